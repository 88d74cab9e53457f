"""Times one optimizer step of GRPO: TRL's own trainer, and the same trainer on token trees.

python -m benchmarks trl                                  # on a GPU
python -m benchmarks trl --max-tokens 16384               # also in partitions
python -m benchmarks trl --not-compiled                   # also without torch.compile
python -m benchmarks trl --model 1.7b --lora 16           # LoRA of rank 16

Rollouts are recorded before, other ones for each step: groups of completions with a common prompt. The
completions of a group have four turns, each with the answer of a tool that is not trained on. Half of the
group shares the first turn, a quarter the second. A step scores them with the reference model, and trains on
them. Trainers take turns in one process, each with the same model with random weights, and TRL's default
settings: AdamW, bf16 autocast and gradient checkpointing on a GPU. With ``--lora``, PEFT adapts all linear
layers of both, and the reference model is the model without adapters.

| column          | meaning                                                                               |
|-----------------|---------------------------------------------------------------------------------------|
| s               | median seconds of an optimizer step, without the first of each round                  |
| x TRL           | speed-up over TRL's trainer                                                           |
| row tokens      | tokens of all rows of a step, without padding                                         |
| distinct tokens | tokens of the forest of these rows                                                    |
| grad norm       | of the first step, before clipping                                                    |
| peak GB         | memory that PyTorch allocated, only on a GPU                                          |
"""

from __future__ import annotations

import argparse
import gc
import os
import tempfile
import time
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch

from benchmarks.timers import Contender, add_rounds, benchmark, synchronize
from titan_tree.cli.bench.record import Row, default_device
from titan_tree.models.pretrained import build_model

SIZE_KEYS = ("model", "lora", "groups", "completions", "prompt", "completion")
MAY_BE_ZERO = ("beta", "lora")
KEYS = (*SIZE_KEYS, "trainer")
RATIOS = ("x TRL",)
QUICK = (
    "--model", "debug", "--groups", "2", "--completions", "4", "--prompt", "32", "--completion", "16",
    "--micro-batch", "4", "--rounds", "1", "--steps", "1", "--max-tokens", "24",
)  # fmt: skip
PACKAGES = ("transformers", "trl", "accelerate", "peft")
WORDS = 1000  # token ids in rollouts
TURNS, ANSWER = 4, 0.25  # turns of a completion, and how much of a turn is the answer of a tool
SIZES = {"0.6b": "0.6B", "1.7b": "1.7B", "debug": "debug"}  # flavors of Qwen3
COLUMNS = ("trainer", "s", "x TRL", "row tokens", "distinct tokens", "grad norm", "peak GB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser)
    add = parser.add_argument
    add("--model", choices=SIZES, default="0.6b")
    add("--lora", type=int, default=0, help="rank of PEFT's LoRA of all linear layers (default: 0, none)")
    add("--groups", type=int, default=8, help="groups of a step")
    add("--completions", type=int, default=8, help="completions of a group")
    add("--prompt", type=int, default=4096, help="tokens of a prompt")
    add("--completion", type=int, default=512, help="tokens of a completion")
    add("--micro-batch", type=int, default=8, help="rows of a micro-batch")
    add("--steps", type=int, default=3, help="timed steps of a round")
    add("--beta", type=float, default=0.04, help="0: without a reference model")
    add("--max-tokens", type=int, nargs="*", default=[], help="also in such partitions")
    add("--not-compiled", action="store_true", help="also without torch.compile")


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row for TRL, and one per way to train on trees."""
    silence = {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    os.environ.update(silence)
    from datasets import disable_progress_bars
    from transformers.utils import logging as transformers_logging

    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    disable_progress_bars()
    ways: dict[str, dict[str, Any] | None] = {"TRL": None, "on trees": {}}
    if args.not_compiled:
        ways["on trees, not compiled"] = {"compile": False}
    for max_tokens in args.max_tokens:
        ways[f"on trees, partitions of {max_tokens:,}"] = {"max_tokens": max_tokens}
    contenders = [Contender(name, partial(measure, args, options)) for name, options in ways.items()]
    with tempfile.TemporaryDirectory() as args.folder:
        save_model(args)
        sizes = {name: getattr(args, name) for name in SIZE_KEYS}
        return benchmark(contenders, args.rounds, lambda each: sizes | row(each, contenders[0]))


def save_model(args: argparse.Namespace) -> None:
    """Writes a model with random weights and a tokenizer of numbered words into ``args.folder``."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

    words = ["<pad>", "<eos>", *(f"w{i}" for i in range(2, WORDS))]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>").save_pretrained(
        args.folder
    )
    with torch.device("meta"):
        sizes = build_model("qwen3", SIZES[args.model]).config.to_hf()
    sizes |= {
        "vocab_size": max(WORDS, sizes["vocab_size"]),
        "max_position_embeddings": args.prompt + args.completion,
    }
    config = AutoConfig.for_model(**sizes, pad_token_id=0, eos_token_id=1, bos_token_id=None)
    torch.manual_seed(0)
    with default_device():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(args.folder)


def record(args: argparse.Namespace, step: int) -> dict[str, Any]:
    """Returns the rollouts of a step, group after group, as TRL's ``rollout_func`` returns them."""
    groups, number, size = args.groups, args.completions, args.completion // TURNS
    draw = partial(np.random.default_rng(step).integers, 2, WORDS)
    prompts, turns = draw((groups, args.prompt)), []
    for turn in range(TURNS):
        sharers = max(number // 2 ** (turn + 1), 1)
        distinct = draw((groups, -(-number // sharers), size))
        turns.append(distinct.repeat(sharers, 1)[:, :number])
    answer = int(ANSWER * size)
    mask = [0] * answer + [1] * (size - answer)
    return {
        "prompt_ids": prompts.repeat(number, 0).tolist(),
        "completion_ids": np.concatenate(turns, 2).reshape(groups * number, -1).tolist(),
        "env_mask": [mask * TURNS] * (groups * number),
        "logprobs": None,
    }


def reward(completion_ids: list[list[int]], **_: object) -> list[float | None]:
    return [sum(ids) % 7 for ids in completion_ids]


def step_times() -> Any:
    """Returns a callback whose list ``seconds`` gets the seconds of every optimizer step."""
    from transformers import TrainerCallback

    class StepTimes(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *_: object, **__: object) -> None:
            synchronize()
            self.started = time.perf_counter()

        def on_step_end(self, *_: object, **__: object) -> None:
            synchronize()
            self.seconds.append(time.perf_counter() - self.started)

    return StepTimes()


def measure(args: argparse.Namespace, options: dict[str, Any] | None) -> Iterable[dict[str, float]]:
    """Yields the numbers of every step but the first.

    Args:
        options: those of ``treeify``; None: TRL's trainer as it is.
    """
    from datasets import Dataset
    from peft import LoraConfig
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback, set_seed
    from trl import GRPOConfig, GRPOTrainer

    from titan_tree.integrations.hugging_face import treeify

    is_gpu = default_device().type == "cuda"
    rows = args.groups * args.completions
    config = GRPOConfig(
        output_dir=f"{args.folder}/out",
        max_steps=1 + args.steps,
        num_generations=args.completions,
        per_device_train_batch_size=args.micro_batch,
        gradient_accumulation_steps=rows // args.micro_batch,
        max_completion_length=args.completion,
        beta=args.beta,
        bf16=is_gpu,
        use_cpu=not is_gpu,
        learning_rate=1e-6,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
    )
    set_seed(0)
    times = step_times()
    recorded = [record(args, step) for step in range(config.max_steps)]
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(args.folder, dtype=torch.float32),
        reward_funcs=reward,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": [f"w{2 + i}" for i in range(args.groups)]}),
        processing_class=PreTrainedTokenizerFast.from_pretrained(args.folder),
        rollout_func=lambda prompts, trainer: recorded[trainer.state.global_step],
        peft_config=LoraConfig(r=args.lora, target_modules="all-linear") if args.lora else None,
        callbacks=[times],
    )
    if options is not None:
        treeify(trainer, **options)
    trainer.remove_callback(PrinterCallback)
    if is_gpu:
        torch.cuda.reset_peak_memory_stats()
    trainer.train()
    logs = trainer.state.log_history[0]
    sample = {
        "row tokens": rows * (args.prompt + args.completion),
        "distinct tokens": logs.get("tree/distinct_tokens", 0.0),
        "grad norm": logs["grad_norm"],
        "peak GB": torch.cuda.max_memory_allocated() / 1e9 if is_gpu else 0.0,
    }
    seconds = times.seconds[1:]
    del trainer, logs
    gc.collect()
    torch.cuda.empty_cache()
    yield from ({"s": value} | sample for value in seconds)


def row(contender: Contender, baseline: Contender) -> Row:
    """Returns a row of the table."""
    distinct, peak = contender.median("distinct tokens"), contender.median("peak GB")
    return {
        "trainer": contender.name,
        "s": f"{contender.median('s'):.3f}",
        "x TRL": f"{baseline.median('s') / contender.median('s'):.3f}",
        "row tokens": int(contender.median("row tokens")),
        "distinct tokens": int(distinct) if distinct else None,
        "grad norm": f"{contender.median('grad norm'):.4g}",
        "peak GB": f"{peak:.1f}" if peak else None,
    }
