"""Runs of TRL's trainers on a small model, and their comparison. Skips the tests without TRL."""

import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
pytest.importorskip("trl")

from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin
from datasets import Dataset, disable_progress_bars
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, PrinterCallback, Qwen3Config, set_seed
from transformers.utils import logging as transformers_logging
from trl import (
    DPOConfig,
    DPOTrainer,
    GRPOConfig,
    GRPOTrainer,
    KTOConfig,
    KTOTrainer,
    RLOOConfig,
    RLOOTrainer,
    SFTConfig,
    SFTTrainer,
)

from titan_tree.integrations.hugging_face import treeify

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
disable_progress_bars()


WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]
SYSTEM = " ".join(f"w{i % 17}" for i in range(24))
PROMPTS = [f"{SYSTEM} " + " ".join(f"w{(7 * i + 3 * j) % 60}" for j in range(4 + i % 5)) for i in range(16)]
ANSWERS = [" " + " ".join(f"w{(5 * i + 2 * j + i * j) % 60}" for j in range(5 + i % 4)) for i in range(16)]
ACCUMULATE = {"gradient_accumulation_steps": 2}
# GRPO with every loss of TRL, beside a reference model. In the second iteration, ratios differ from 1.
LOSSES: dict[str, dict[str, Any]] = {
    loss: {"loss_type": loss, "num_iterations": 2, "beta": 0.1}
    for loss in ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "vespo", "luspo")
}
LOSSES["luspo"]["importance_sampling_level"] = "sequence"
# What two ranks train with GRPO: ten steps, some of them without the truncated completions.
ON_RANKS: tuple[dict[str, Any], ...] = tuple(
    options | {"max_steps": 10, "ddp_backend": "gloo", **ACCUMULATE}
    for options in (
        *LOSSES.values(),
        LOSSES["grpo"] | {"peft": True, "mask_truncated_completions": True, "gradient_checkpointing": True},
    )
)


def save_model(path: Path) -> Path:
    """Saves and returns the snapshot of a random model that ends some completions early."""
    words = Tokenizer(models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    PreTrainedTokenizerFast(tokenizer_object=words, **special).save_pretrained(path)
    config = Qwen3Config(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        pad_token_id=0,
        eos_token_id=1,
        bos_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.12)
    model.lm_head.weight.data[1] += 0.15 * torch.randn(64)
    model.save_pretrained(path)
    return path


class Run(NamedTuple):
    """What a trainer did."""

    trainer: Any
    losses: list[float]  # of each micro-batch
    logs: list[dict[str, float]]  # of each step
    passes: list[int]  # forests of each step
    rows: list[list[int]]  # token ids of all samples
    weights: dict[str, Tensor]
    start: dict[str, Tensor]


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 for token in ids) / len(ids) + 0.01 * len(ids) for ids in completion_ids]


def with_tool(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout of two turns, with the answer of a tool between them that is not trained on.

    Every second completion ends with <eos>. The others count as truncated.
    """
    answer = [40, 41, 42, 43, 44]
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    first, second = (
        [torch.randint(3, 64, (size + i % 4,)).tolist() for i in range(len(prompts))] for size in (2, 3)
    )
    second = [ids + [1] * (i % 2) for i, ids in enumerate(second)]
    return {
        "prompt_ids": prompt_ids,
        "completion_ids": [a + answer + b for a, b in zip(first, second, strict=True)],
        "env_mask": [[1] * len(a) + [0] * 5 + [1] * len(b) for a, b in zip(first, second, strict=True)],
        "logprobs": None,
    }


def arguments(config: type, path: Path, **options: Any) -> Any:
    common = {
        "output_dir": str(path / "out"),
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "learning_rate": 0.05,
        "optim": "sgd",  # Adam divides tiny gradients by their size, so it magnifies rounding
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "max_steps": 2,
        "save_strategy": "no",
        "disable_tqdm": True,
        "gradient_checkpointing": False,
        "per_device_train_batch_size": 8,
        "seed": 7,
    }
    return config(**common | options)


def shard(trainer: Any) -> None:
    """Makes a trainer shard its model by accelerate's FSDP2, which accelerate leaves out on a CPU."""
    state = trainer.accelerator.state
    state.distributed_type = DistributedType.FSDP
    state.fsdp_plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["Qwen3DecoderLayer"],
        reshard_after_forward=True,
    )
    trainer.is_fsdp_enabled = True


def whole(tensor: Any) -> Tensor:
    """Returns a tensor that may be sharded over ranks."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def run(trainer: Any) -> Run:
    losses: list[float] = []
    logs: list[dict[str, float]] = []
    passes: list[int] = []
    rows: list[list[int]] = []
    step, log = trainer.training_step, trainer.log

    def recorded_step(*args: Any, **kwargs: Any) -> Tensor:
        loss = step(*args, **kwargs)
        losses.append(float(loss))
        return loss

    def recorded_log(values: dict[str, float], *args: Any, **kwargs: Any) -> None:
        metrics = {name: sum(v) / len(v) for name, v in trainer._metrics["train"].items()}
        for name in ("step_time", "rewards/accuracies"):  # rounding decides whether equal rewards are correct
            metrics.pop(name, None)
        passes.append(len(trainer._metrics["train"].get("tree/row_tokens", [])))
        logs.append(metrics | {"grad_norm": values.get("grad_norm", 0.0)})
        log(values, *args, **kwargs)

    if hasattr(trainer, "_generate_and_score_completions"):
        generate = trainer._generate_and_score_completions

        def recorded_generate(inputs: Any) -> Any:
            output = generate(inputs)
            ids, mask = (
                torch.cat([output[f"prompt_{kind}"], output[f"completion_{kind}"]], 1)
                for kind in ("ids", "mask")
            )
            rows.extend(row[real.bool()].tolist() for row, real in zip(ids, mask, strict=True))
            return output

        trainer._generate_and_score_completions = recorded_generate
    trainer.remove_callback(PrinterCallback)
    trainer.training_step, trainer.log = recorded_step, recorded_log
    # Quantized weights are bytes.
    parameters = trainer.model.named_parameters()
    start = {name: p.detach().clone().cpu() for name, p in parameters if p.is_floating_point()}
    trainer.train()
    weights = {name: whole(p.detach()).cpu() for name, p in trainer.model.named_parameters() if name in start}
    return Run(trainer, losses, logs[:-1], passes[:-1], rows, weights, start)


def assert_equal(stock: Run, tree: Run) -> None:
    """Asserts equal samples, losses, metrics, and weights, relative to the way that they moved.

    In a few steps, weights move so little that their own rounding in fp32 counts.
    """
    tolerance = 1e-5 if len(stock.logs) >= 10 else 2e-5
    assert stock.rows == tree.rows
    # The terms of a micro-batch's loss are about 1 and may cancel.
    assert tree.losses == pytest.approx(stock.losses, rel=1e-5, abs=5e-6)
    for one, other in zip(stock.logs, tree.logs, strict=True):
        mine = {name: other[name] for name in one}
        assert mine == pytest.approx(one, rel=1e-4, abs=1e-5, nan_ok=True)
    assert stock.weights.keys() == tree.weights.keys()
    moved = max(float((p - stock.start[name]).norm()) for name, p in stock.weights.items())
    assert moved > 1e-4
    for name, p in stock.weights.items():
        assert float((p - tree.weights[name]).norm()) <= tolerance * moved, name


def grpo(
    folder: Path,
    tree: dict[str, Any] | None = None,
    rollout: Callable[..., Any] | None = None,
    peft: bool = False,
    prepare: Callable[[Any], None] = lambda trainer: None,
    **options: Any,
) -> Run:
    """Trains with GRPO.

    Args:
        tree: the options of ``treeify``; None: the stock trainer.
        prepare: called with the new trainer.
    """
    set_seed(7)
    extra: dict[str, Any] = {"rollout_func": rollout} if rollout else {}
    if peft:
        modules = ["q_proj", "v_proj", "down_proj"]
        extra["peft_config"] = LoraConfig(
            r=4, lora_alpha=8, target_modules=modules, task_type="CAUSAL_LM", init_lora_weights=False
        )
    args = arguments(GRPOConfig, folder, **{"num_generations": 4, "max_completion_length": 12, **options})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    data = Dataset.from_dict({"prompt": PROMPTS})
    trainer = GRPOTrainer(
        model=model, reward_funcs=reward, args=args, processing_class=tokenizer, train_dataset=data, **extra
    )
    prepare(trainer)
    if tree is not None:
        treeify(trainer, **tree)
    return run(trainer)


def cases(names: Iterable[str], long_tail: Iterable[str], partitioned: Iterable[str]) -> list[Any]:
    """Returns (name, max_tokens, steps) of all cases, each in one pass and in partitions.

    CI trains two steps. Ten steps are exhaustive.

    Args:
        long_tail: what CI leaves out in one pass.
        partitioned: what CI runs in partitions.
    """
    return [
        pytest.param(name, max_tokens, steps, marks=pytest.mark.exhaustive if steps == 10 else [])
        for name in names
        for max_tokens, is_in_ci in ((None, name not in long_tail), (30, name in partitioned))
        for steps in ((2, 10) if is_in_ci else (10,))
        if (name, max_tokens) != ("reentrant checkpointing", 30)  # refused
    ]


SFT = {"prompt": PROMPTS, "completion": ANSWERS}
DPO = {
    "prompt": PROMPTS,
    "chosen": ANSWERS,
    "rejected": [f"{answer.rsplit(' ', 2)[0]} w9 w8 w7" for answer in ANSWERS],
}
CONFIGS: dict[type, tuple[type, dict[str, Any]]] = {
    SFTTrainer: (SFTConfig, SFT),
    DPOTrainer: (DPOConfig, DPO),
    KTOTrainer: (KTOConfig, SFT | {"label": [i % 2 == 0 for i in range(16)]}),
    RLOOTrainer: (RLOOConfig, {"prompt": PROMPTS}),
}
PACKED = {"packing": True, "max_length": 64, "per_device_train_batch_size": 2}
LORA = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False, task_type="CAUSAL_LM")


def make_other(cls: type, folder: Path, adapter: Any = None, quantization: Any = None, **options: Any) -> Any:
    """Returns a trainer that does not run on trees yet."""
    set_seed(7)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, quantization_config=quantization
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    config, data = CONFIGS[cls]
    extra = {"reward_funcs": reward} if cls is RLOOTrainer else {}
    return cls(
        model=model,
        args=arguments(config, folder, **options),
        train_dataset=Dataset.from_dict(data),
        processing_class=tokenizer,
        peft_config=adapter,
        **extra,
    )
