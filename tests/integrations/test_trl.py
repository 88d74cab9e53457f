"""TRL's trainers on trees beside the stock trainers: equal samples, losses, metrics and weights."""

import functools
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

os.environ |= {"TRL_EXPERIMENTAL_SILENCE": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
pytest.importorskip("trl")

from datasets import Dataset, disable_progress_bars
from peft import LoraConfig, PromptTuningConfig
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
from trl.trainer.utils import add_fused_lm_head

from tests.support.hf_families import VOCAB, hf_family
from tests.support.processes import as_rank, run_ranks
from titan_tree.errors import UserError
from titan_tree.integrations import trl as integration
from titan_tree.integrations.trl import TreeGRPOTrainer, score_on_trees
from titan_tree.models.transformers.support import SUPPORTED

transformers_logging.set_verbosity_error()
transformers_logging.disable_progress_bar()
disable_progress_bars()

pytestmark = pytest.mark.xdist_group("trl")  # importing trl takes ten seconds

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{i}" for i in range(61))]
SYSTEM = " ".join(f"w{i % 17}" for i in range(24))
PROMPTS = [f"{SYSTEM} " + " ".join(f"w{(7 * i + 3 * j) % 60}" for j in range(4 + i % 5)) for i in range(16)]
ANSWERS = [" " + " ".join(f"w{(5 * i + 2 * j + i * j) % 60}" for j in range(5 + i % 4)) for i in range(16)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the snapshot of a random model that ends some completions early."""
    path = tmp_path_factory.mktemp("model")
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
    rows: list[list[int]]  # token ids of all samples
    weights: dict[str, Tensor]
    start: dict[str, Tensor]


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(token % 2 for token in ids) / len(ids) + 0.01 * len(ids) for ids in completion_ids]


def with_tool(prompts: list[str], trainer: Any) -> dict[str, Any]:
    """A rollout of two turns, with the answer of a tool between them that is not trained on."""
    answer = [40, 41, 42, 43, 44]
    prompt_ids = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
    first, second = (
        [torch.randint(3, 64, (size + i % 4,)).tolist() for i in range(len(prompts))] for size in (2, 3)
    )
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


def run(trainer: Any) -> Run:
    losses: list[float] = []
    logs: list[dict[str, float]] = []
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
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    weights = {name: p.detach() for name, p in trainer.model.named_parameters()}
    return Run(trainer, losses, logs[:-1], rows, weights, start)


def assert_equal(stock: Run, tree: Run, micro_batches: int = 1, tolerance: float = 2e-5) -> None:
    """Asserts equal samples, losses of steps, metrics, and weights, relative to the way that they moved."""
    assert stock.rows == tree.rows
    sums = [
        [sum(losses[i : i + micro_batches]) for i in range(0, len(losses), micro_batches)]
        for losses in (stock.losses, tree.losses)
    ]
    assert sums[1] == pytest.approx(sums[0], rel=1e-5, abs=2e-6)
    if micro_batches == 1:
        for one, other in zip(stock.logs, tree.logs, strict=True):
            mine = {name: other[name] for name in one}
            assert mine == pytest.approx(one, rel=1e-4, abs=1e-5, nan_ok=True)
    assert stock.weights.keys() == tree.weights.keys()
    moved = max(float((p - stock.start[name]).norm()) for name, p in stock.weights.items())
    assert moved > 1e-4
    for name, p in stock.weights.items():
        assert float((p - tree.weights[name]).norm()) <= tolerance * moved, name


def grpo(
    cls: type,
    folder: Path,
    rollout: Callable[..., Any] | None = None,
    peft: bool = False,
    max_tokens: int | None = None,
    **options: Any,
) -> Run:
    """Trains with GRPO. max_tokens is only for the trainer on trees."""
    set_seed(7)
    extra: dict[str, Any] = {"rollout_func": rollout} if rollout else {}
    if peft:
        modules = ["q_proj", "v_proj", "down_proj"]
        extra["peft_config"] = LoraConfig(
            r=4, lora_alpha=8, target_modules=modules, task_type="CAUSAL_LM", init_lora_weights=False
        )
    if cls is TreeGRPOTrainer:
        extra["max_tokens"] = max_tokens
    args = arguments(GRPOConfig, folder, **{"num_generations": 4, "max_completion_length": 12, **options})
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    data = Dataset.from_dict({"prompt": PROMPTS})
    trainer = cls(
        model=model, reward_funcs=reward, args=args, processing_class=tokenizer, train_dataset=data, **extra
    )
    return run(trainer)


def test_ten_steps_equal_those_of_grpo_trainer(folder: Path) -> None:
    stock, tree = (
        grpo(cls, folder, loss_type="dapo", max_steps=10) for cls in (GRPOTrainer, TreeGRPOTrainer)
    )
    assert_equal(stock, tree)
    assert len(tree.losses) == 10
    steps = [tree.rows[start : start + 8] for start in range(0, 80, 8)]
    for rows, log in zip(steps, tree.logs, strict=True):
        prefixes = {tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)}
        assert log["tree/distinct_tokens"] == len(prefixes)
        assert log["tree/row_tokens"] == sum(map(len, rows)) > 2 * len(prefixes)


SEQUENCE = {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4}
ACCUMULATE = {"gradient_accumulation_steps": 2}
CASES: dict[str, dict[str, Any]] = {
    # In the second iteration, ratios differ from 1.
    **{
        loss: {"loss_type": loss, "num_iterations": 2}
        for loss in ("grpo", "dapo", "dr_grpo", "bnpo", "cispo", "sapo", "vespo")
    },
    "luspo": {"loss_type": "luspo", "num_iterations": 2, "importance_sampling_level": "sequence"},
    "sequence level": {"loss_type": "grpo", "num_iterations": 2, **SEQUENCE},
    "reference model": {"loss_type": "grpo", "beta": 0.1},
    "LoRA": {"loss_type": "grpo", "beta": 0.1, "peft": True},
    "truncated rows": {"loss_type": "dapo", "beta": 0.1, "mask_truncated_completions": True},
    "tool mask": {"loss_type": "dapo", "rollout": with_tool, "max_completion_length": 32},
    "temperature": {"loss_type": "dapo", "temperature": 0.7},
    "entropy bonus": {"loss_type": "grpo", "entropy_coef": 0.1},
    "entropy quantile": {"loss_type": "grpo", "top_entropy_quantile": 0.5, **ACCUMULATE},
    "accumulation": {"loss_type": "grpo", **ACCUMULATE},
    "mean over micro-batches": {"loss_type": "bnpo", **ACCUMULATE},
    "two steps per generation": {"loss_type": "dapo", "steps_per_generation": 4, **ACCUMULATE},
    "checkpointing": {"loss_type": "dapo", "gradient_checkpointing": True, "peft": True},
    "reentrant checkpointing": {
        "loss_type": "dapo",
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
    },
}
# What CI leaves out, in one pass and in partitions.
LONG_TAIL = {"temperature", "reentrant checkpointing", "bnpo", "SFT, wrapped", "DPO, reference ahead"}
LONG_TAIL |= {"mean over micro-batches", "two steps per generation", "truncated rows"}
PARTITIONED = {"sequence level", "LoRA", "SFT, padding-free", "DPO, weighting"}


def cases(names: Iterable[str]) -> list[Any]:
    """Returns (name, max_tokens) of all cases, each in one pass and in partitions."""
    return [
        pytest.param(name, max_tokens, marks=[] if is_in_ci else pytest.mark.exhaustive)
        for name in names
        for max_tokens, is_in_ci in ((None, name not in LONG_TAIL), (30, name in PARTITIONED))
        if (name, max_tokens) != ("reentrant checkpointing", 30)  # refused
    ]


@pytest.fixture(scope="module")
def stock(folder: Path) -> Callable[[str], Run]:
    """Returns the run of the stock trainer for a case. Each is trained once."""
    return functools.cache(
        lambda name: (
            grpo(GRPOTrainer, folder, **CASES[name])
            if name in CASES
            else run(make_other(OTHERS[name][0], folder, **OTHERS[name][1]))
        )
    )


@pytest.mark.parametrize(("name", "max_tokens"), cases(CASES))
def test_grpo(folder: Path, stock: Callable[[str], Run], name: str, max_tokens: int | None) -> None:
    """In partitions, at most 30 tokens run at once, and a row has 30 to 44."""
    options = CASES[name]
    tree = grpo(TreeGRPOTrainer, folder, max_tokens=max_tokens, **options)
    assert_equal(stock(name), tree, options.get("gradient_accumulation_steps", 1))


def test_groups_stay_together(folder: Path) -> None:
    """TRL spreads the groups of 4 rows over the 4 micro-batches of a step."""
    options = {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 4, "max_steps": 1}
    stock, tree = (grpo(cls, folder, loss_type="dapo", **options) for cls in (GRPOTrainer, TreeGRPOTrainer))
    assert_equal(stock, tree, micro_batches=4)
    parts = tree.trainer._buffered_inputs
    assert [part["row"].tolist() for part in parts] == [[*range(i, i + 4)] for i in (0, 4, 8, 12)]
    groups = [tree.rows[start : start + 4] for start in range(0, 16, 4)]
    prefixes = [{tuple(row[:end]) for row in rows for end in range(1, len(row) + 1)} for rows in groups]
    assert tree.logs[0]["tree/distinct_tokens"] == sum(map(len, prefixes)) / 4


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
OTHERS: dict[str, tuple[type, dict[str, Any]]] = {
    "SFT": (SFTTrainer, {}),
    "SFT, dft": (SFTTrainer, {"loss_type": "dft", **ACCUMULATE}),
    "SFT, padding-free": (SFTTrainer, {"padding_free": True, "max_length": None}),
    "SFT, packed": (SFTTrainer, PACKED),
    "SFT, wrapped": (SFTTrainer, {**PACKED, "packing_strategy": "wrapped"}),
    "DPO": (DPOTrainer, {}),
    "DPO, weighting": (DPOTrainer, {"use_weighting": True}),
    "DPO, LoRA": (DPOTrainer, {"adapter": LORA}),
    "DPO, reference ahead": (DPOTrainer, {"precompute_ref_log_probs": True}),
    "KTO": (KTOTrainer, {}),
    "RLOO": (RLOOTrainer, {"num_generations": 4, "max_completion_length": 12, "beta": 0.05}),
}


def make_other(cls: type, folder: Path, adapter: Any = None, **options: Any) -> Any:
    """Returns a trainer that does not run on trees yet."""
    set_seed(7)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
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


@pytest.mark.parametrize(("name", "max_tokens"), cases(OTHERS))
def test_other_trainers(folder: Path, stock: Callable[[str], Run], name: str, max_tokens: int | None) -> None:
    cls, options = OTHERS[name]
    trainer = make_other(cls, folder, **options)
    score_on_trees(trainer, max_tokens)
    tree = run(trainer)
    assert_equal(stock(name), tree, options.get("gradient_accumulation_steps", 1))
    assert tree.logs[0]["tree/distinct_tokens"] <= tree.logs[0]["tree/row_tokens"]


@pytest.mark.parametrize("max_tokens", [None, 30])
def test_mixed_precision_is_no_worse_than_in_the_stock_trainer(folder: Path, max_tokens: int | None) -> None:
    """bf16 is TRL's default. The reference is fp32."""
    options: dict[str, Any] = {"loss_type": "dapo", "max_steps": 1}
    exact, stock = (grpo(GRPOTrainer, folder, **options | extra) for extra in ({}, {"bf16": True}))
    tree = grpo(TreeGRPOTrainer, folder, max_tokens=max_tokens, **options, bf16=True)

    def error(run: Run) -> float:
        return sum(float((p - exact.weights[name]).square().sum()) for name, p in run.weights.items()) ** 0.5

    assert exact.rows == tree.rows
    assert 0 < error(tree) < 1.2 * error(stock)


def test_the_model_generates_and_saves_as_before(folder: Path, tmp_path: Path) -> None:
    trainer = make_other(SFTTrainer, folder, max_steps=1)
    model, ids = trainer.model, torch.randint(3, 64, (2, 9))
    mask = torch.ones_like(ids)
    mask[0, :3] = 0  # padding

    def outputs(model: Any) -> tuple[Tensor, Tensor]:
        model.eval()
        with torch.no_grad():
            logits = model(input_ids=ids, attention_mask=mask).logits
        return logits, model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)

    before, names = outputs(model), list(model.state_dict())
    score_on_trees(trainer, 30)
    assert all(map(torch.equal, before, outputs(model)))
    assert list(model.state_dict()) == names
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    trainer.save_model(str(tmp_path))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(map(torch.equal, outputs(loaded), outputs(model)))
    assert not torch.equal(outputs(model)[0], before[0])


def train_on_ranks(rank: int, ports: list[int], folder: Path) -> None:
    torch.set_num_threads(1)
    with as_rank(rank, 2, ports[0]):
        options: dict[str, Any] = {"loss_type": "dapo", "ddp_backend": "gloo", "beta": 0.1}
        stock = grpo(GRPOTrainer, folder, **options, **ACCUMULATE)
        assert stock.trainer.accelerator.num_processes == 2
        for max_tokens in (None, 30):
            tree = grpo(TreeGRPOTrainer, folder, max_tokens=max_tokens, **options, **ACCUMULATE)
            assert type(tree.trainer.model_wrapped).__name__ == "DistributedDataParallel"
            assert_equal(stock, tree, micro_batches=2)
        own = torch.cat([p.flatten() for p in tree.weights.values()])
        both = [torch.empty_like(own) for _ in range(2)]
        dist.all_gather(both, own)
        assert torch.equal(*both)
        lists: list[Any] = [None, None]
        dist.all_gather_object(lists, tree.rows)
        assert lists[0] != lists[1]
        dist.destroy_process_group()


@pytest.mark.distributed
@pytest.mark.slow
@pytest.mark.exhaustive
def test_two_ranks_train_as_the_stock_trainer_does(folder: Path) -> None:
    """With accumulation and a reference model, in one pass and in partitions."""
    run_ranks(train_on_ranks, 2, folder)


def with_attribute(path: str, value: Any) -> Callable[[Any], None]:
    def change(trainer: Any) -> None:
        *owners, name = path.split(".")
        setattr(functools.reduce(getattr, owners, trainer), name, value)

    return change


REFUSALS: dict[str, tuple[Callable[[Any], Any], str]] = {
    "liger": (with_attribute("args.use_liger_kernel", True), "use_liger_kernel: expected none on trees"),
    "compile": (with_attribute("args.torch_compile", True), "torch_compile: expected none on trees"),
    "noise": (with_attribute("args.neftune_noise_alpha", 5.0), "neftune_noise_alpha: expected none on trees"),
    "smoothing": (
        with_attribute("args.label_smoothing_factor", 0.1),
        "label_smoothing_factor: expected none",
    ),
    "offloading": (
        with_attribute("args.activation_offloading", True),
        "activation_offloading: expected none",
    ),
    "fsdp": (with_attribute("is_fsdp_enabled", True), "is_fsdp_enabled: expected False on trees"),
    "deepspeed": (with_attribute("is_deepspeed_enabled", True), "is_deepspeed_enabled: expected False"),
    "loss function": (
        with_attribute("compute_loss_func", print),
        "compute_loss_func: expected none on trees",
    ),
    "router": (with_attribute("aux_loss_enabled", True), "output_router_logits: expected False on trees"),
    "flash": (with_attribute("model.config._attn_implementation", "flash_attention_2"), "expected 'sdpa' or"),
    "family": (
        with_attribute("model.config.model_type", "lfm2"),
        "lfm2 cannot run on trees: its convolutions",
    ),
    "dropout": (
        with_attribute("model.config.attention_dropout", 0.1),
        "attention_dropout: expected 0 on trees",
    ),
    "module": (with_attribute("model.model.drop", torch.nn.Dropout(0.1)), "model.drop: expected no dropout"),
    "quantized": (
        with_attribute("model.config.quantization_config", {"bits": 4}),
        "expected unquantized weights",
    ),
    "twice": (score_on_trees, "without it; pass a new trainer for SFT, DPO, KTO or RLOO, and only once"),
    "plain model": (
        lambda trainer: trainer.model.__dict__.pop("forward"),
        "fused head, got Qwen3ForCausalLM",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_cannot_run_on_trees_is_refused(folder: Path, name: str) -> None:
    change, message = REFUSALS[name]
    trainer = make_other(SFTTrainer, folder)
    change(trainer)
    with pytest.raises(UserError, match=re.escape(message)) as error:
        score_on_trees(trainer)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (
            LoraConfig(target_modules=["q_proj"], lora_dropout=0.1),
            "lora_dropout.default: expected no dropout",
        ),
        (
            LoraConfig(target_modules=["q_proj"], modules_to_save=["lm_head"]),
            "output projection: expected torch.nn.Linear",
        ),
        (PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3), "got prompt learning"),
    ],
)
def test_adapters_that_cannot_run_on_trees_are_refused(folder: Path, adapter: Any, message: str) -> None:
    trainer = make_other(SFTTrainer, folder, adapter=adapter)
    with pytest.raises(UserError, match=re.escape(message)):
        score_on_trees(trainer)


def test_fp16_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="mixed precision: expected bf16 or none on trees, got fp16"):
        score_on_trees(make_other(SFTTrainer, folder, fp16=True))


def test_wrong_rows_are_refused(folder: Path) -> None:
    trainer = make_other(SFTTrainer, folder)
    score_on_trees(trainer)
    ids = torch.randint(3, 64, (2, 9))
    good = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids), "fused_lm_head": True}
    positions = torch.arange(9).repeat(2, 1)
    trainer.model(**good)
    for change, message in (
        ({"labels": ids + 1}, "labels: expected the token itself or -100"),
        ({"attention_mask": positions > 2}, "labels: expected -100 for padding"),
        ({"attention_mask": None}, "got neither and 2 rows"),
        ({"position_ids": positions}, "got both and 2 rows"),
        ({"pixel_values": torch.ones(2)}, "pixel_values: expected text rows without it"),
        ({"output_router_logits": True}, "output_router_logits: expected text rows without it"),
        (
            {
                "input_ids": ids[:1],
                "labels": ids[:1],
                "attention_mask": None,
                "position_ids": positions[:1] + 1,
            },
            "position_ids: expected 0, 1, 2, ... in each row",
        ),
    ):
        with pytest.raises(UserError, match=re.escape(message)):
            trainer.model(**good | change)


def test_other_versions_of_trl_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("titan_tree.integrations.trl")
    monkeypatch.setattr("trl.__version__", "1.15.0")
    with pytest.raises(UserError, match=r"expected trl 1\.16\.0, got 1\.15\.0; run pip install"):
        importlib.reload(module)
    monkeypatch.setitem(sys.modules, "trl", None)
    with pytest.raises(UserError, match="needs the package trl"):
        importlib.reload(module)


def test_partitions_that_cannot_run_are_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="max_tokens: expected at least 2, got 1"):
        score_on_trees(make_other(SFTTrainer, folder), 1)
    reentrant = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": True}}
    with pytest.raises(UserError, match="expected use_reentrant = False with max_tokens"):
        score_on_trees(make_other(SFTTrainer, folder, **reentrant), 30)


OUTPUTS = ("log_probs", "entropy", "mean_logits", "is_top1", "log_sum_sq_probs")


IN_CI = {
    "gpt_oss",
    "gemma2",
    "gemma4_text",
    "cohere2",
    "granite",
    "deepseek_v3",
}  # sinks, caps, scales, latents


@pytest.mark.parametrize("max_tokens", [None, 12])
@pytest.mark.parametrize(
    "family",
    [
        name if name in IN_CI else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in sorted(SUPPORTED)
    ],
)
def test_every_field_of_the_fused_head_is_equal(family: str, max_tokens: int | None) -> None:
    """Fields, gradients, and what the model does without the fused head, for each supported architecture."""
    model = hf_family(family)
    add_fused_lm_head(model, temperature=0.7, outputs=OUTPUTS)
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(3, VOCAB, (3, 20), generator=draw)
    ids[:, :12] = ids[0, :12]
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    labels = ids.masked_fill(mask == 0, -100)
    labels[:, :3] = -100

    def results() -> tuple[dict[str, Tensor], dict[str, Tensor], list[Tensor]]:
        model.zero_grad()
        out = model(input_ids=ids, attention_mask=mask, labels=labels, fused_lm_head=True)
        (out.loss + out.log_probs.exp().sum() + 0.3 * out.entropy.sum()).backward()
        gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        with torch.no_grad():
            plain = model(input_ids=ids, attention_mask=mask).logits
            generated = model.generate(ids[:, :9], max_new_tokens=5, do_sample=False)
        return {name: out[name] for name in (*OUTPUTS, "loss", "label_mask")}, gradients, [plain, generated]

    fields, gradients, plain = results()
    integration._replace_head(model, max_tokens, None, lambda *_: None)
    found, found_gradients, found_plain = results()
    assert all(map(torch.equal, plain, found_plain))
    for name, want in fields.items():
        torch.testing.assert_close(found[name], want, rtol=1e-5, atol=1e-5, msg=name)
    assert found_gradients.keys() == gradients.keys()
    for name, want in gradients.items():
        # transformers rounds the gradients of Gated DeltaNet's decays more coarsely in fp32.
        limit = 1e-4 if name.endswith(("A_log", "dt_bias")) else 1e-5
        assert (found_gradients[name] - want).norm() <= limit * want.norm(), name
