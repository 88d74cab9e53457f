"""The configuration: one dataclass per TOML table, overridden by ``key=value`` arguments.

Precedence: ``key=value`` over the file over the defaults below. Every component receives its own table, never
the whole configuration. Mistakes of the user are UserErrors that name the file or argument, the key and,
where one is close, the key that was meant.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from omegaconf import MISSING, OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from titan_tree.errors import UserError


@dataclass
class ModelConfig:
    """Which model; its weights are drawn from ``training.seed`` unless ``hf_path`` holds some."""

    name: str = "qwen3"  # the family, see titan_tree/models
    flavor: str | None = None  # a named size; not needed with hf_path, which carries its own configuration
    hf_path: str | None = None  # local Hugging Face snapshot: configuration and initial weights
    # TreeAttention's backend
    attention: Literal["auto", "hopper", "triton", "flash", "flex", "reference"] = "auto"
    gdn: str = "auto"  # TreeGDN's backend
    overrides: dict[str, Any] = field(default_factory=dict)  # fields of the model's own configuration


@dataclass
class DataConfig:
    """Files of groups of samples, and how they become token trees and micro-batches."""

    files: Any = MISSING  # a path or a list of paths; "demo" is the embedded sample
    tokenizer: str | None = None  # "byte" | a Hugging Face folder | a .tiktoken file; default: hf_path's own
    template: str | None = None  # a chat template (.jinja) instead of the tokenizer's own
    sample: dict[str, Any] = field(default_factory=dict)  # how conversations become training samples
    merge: Literal["group", "batch"] = "group"  # one tree per group, or merge groups that share a prefix too
    layout: Literal["tree", "flat"] = "tree"  # "flat" trains every path alone: the baseline
    advantage: Literal["given", "group"] = "given"  # by the data, or made of the rewards of each group
    # Train with the routed_experts that samples record. Where paths disagree on a token that they share: with
    # those of the "first", or of most ("majority"), or paths part there ("split"). See docs/routing.md
    replay: Literal["off", "first", "majority", "split"] = "off"
    max_tokens: int = 32_768  # tokens of one forward; larger trees are cut, see PartitionConfig
    global_batch_groups: int = 8  # groups per optimizer step, over all ranks
    shuffle_buffer: int = 256  # groups to draw the next one from; 0 keeps the files' order
    seed: int = 0  # of the shuffling

    def __post_init__(self) -> None:
        self.files = [self.files] if isinstance(self.files, str) else self.files
        _require(
            isinstance(self.files, list) and self.files and all(isinstance(f, str) for f in self.files),
            "data.files",
            "a path or a non-empty list of paths",
            self.files,
        )


@dataclass
class PartitionConfig:
    """How a tree of more than ``data.max_tokens`` is cut into forwards, see TreePartitioner."""

    # "none" refuses such trees
    strategy: Literal["auto", "none", "single_path", "multi_path", "greedy", "redundancy_free"] = "auto"
    # tokens whose activations are alive at once; default: the larger of data.max_tokens and the longest path
    max_chain_tokens: int | None = None
    # of forwards that wait for others below them; "auto" keeps what fits, see the budgets
    activations: Literal["auto", "keep", "offload", "recompute"] = "auto"
    device_gb: float | None = (
        None  # "auto": activations on each GPU; the oldest that exceed it go to the host
    )
    host_gb: float | None = (
        None  # "auto": and what exceeds this runs again; default: half of what is available
    )

    def __post_init__(self) -> None:
        good = self.max_chain_tokens is None or self.max_chain_tokens >= 1
        _require(good, "partition.max_chain_tokens", "at least 1", self.max_chain_tokens)
        for name in ("device_gb", "host_gb"):
            value = getattr(self, name)
            _require(value is None or value >= 0, f"partition.{name}", "a number >= 0", value)
            good = value is None or self.activations == "auto"
            _require(good, f"partition.{name}", 'partition.activations = "auto" beside it', self.activations)


@dataclass
class LossConfig:
    """What TreeLoss computes; ``options`` are the loss function's own numbers: clip range, KL weight, ..."""

    name: str = "sft"
    reduction: Literal["path_mean", "token_mean", "path_token_mean"] = "path_mean"
    entropy: float = 0.0  # coefficient of an entropy bonus
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _require(math.isfinite(self.entropy), "loss.entropy", "a finite number", self.entropy)
        for name, value in self.options.items():
            _require(name not in vars(self), f"loss.options.{name}", f"it as loss.{name}", value)
            number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            _require(number, f"loss.options.{name}", "a finite number", repr(value))


@dataclass
class RouterLossConfig:
    """Losses of a mixture of experts' router, see RouterLoss. 0 is off, as is usual after pre-training."""

    balance: float = 0.0  # coefficient of the load balancing loss; pre-training takes about 1e-3
    z: float = 0.0  # coefficient of the z-loss
    # Which tokens are balanced together. "global_batch" is the same however trees are packed into
    # micro-batches and ranks, but where a rank has several it runs each forward once more, to count; with
    # partitions "micro_batch" does so too.
    scope: Literal["global_batch", "micro_batch"] = "global_batch"


@dataclass
class RouterBiasConfig:
    """Balances a mixture of experts without a loss, see RouterBias."""

    # Of a bias's step after each optimizer step; DeepSeek-V3 takes 1e-3. None: no bias; 0: it stays as it is.
    rate: float | None = None
    counts: Literal["paths", "tokens"] = "paths"  # loads as in a batch of the paths, or of distinct tokens

    def __post_init__(self) -> None:
        good = self.rate is not None or self.counts == "paths"
        _require(good, "router_bias.counts", "router_bias.rate beside it", self.counts)


@dataclass
class OptimizerConfig:
    """AdamW on fp32 weights. Weight decay acts on matrices, not on norms and biases."""

    name: Literal["adamw", "adamw8bit"] = "adamw"  # states of 8 or, by torchao, 2 bytes a parameter
    lr: float = 1e-5
    betas: list[float] = field(default_factory=lambda: [0.9, 0.95])
    weight_decay: float = 0.1
    eps: float = 1e-8
    max_grad_norm: float = 1.0  # gradients are scaled down to this 2-norm; inf never clips

    def __post_init__(self) -> None:
        for name in ("lr", "weight_decay", "eps"):
            value = getattr(self, name)
            _require(0 <= value < math.inf, f"optimizer.{name}", "a finite number >= 0", value)
        good = len(self.betas) == 2 and all(0 <= beta < 1 for beta in self.betas)
        _require(good, "optimizer.betas", "two numbers from 0 to below 1", self.betas)
        _require(self.max_grad_norm > 0, "optimizer.max_grad_norm", "a number > 0", self.max_grad_norm)


@dataclass
class LRSchedulerConfig:
    """Linear warm-up, then decay over the rest of the run."""

    warmup_steps: int = 0
    decay_type: Literal["cosine", "linear", "sqrt"] = "cosine"
    min_lr_factor: float = 0.0  # the learning rate ends at this fraction of optimizer.lr

    def __post_init__(self) -> None:
        _require(self.warmup_steps >= 0, "lr_scheduler.warmup_steps", "at least 0", self.warmup_steps)
        good = 0 <= self.min_lr_factor <= 1
        _require(good, "lr_scheduler.min_lr_factor", "a fraction from 0 to 1", self.min_lr_factor)


@dataclass
class TrainingConfig:
    steps: int = 1000  # optimizer steps of the whole run, resumed parts included
    dtype: Literal["bfloat16", "float32"] = "bfloat16"  # of the computation; weights and gradients are fp32
    # Of the operands in products of dense layers, by torchao's recipes: scaled by "tensorwise" or "rowwise"
    # maxima, and with gradients of weights left in dtype. Not of experts, routers and the vocabulary.
    float8: Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"] = "none"
    seed: int = 0  # of the initial weights
    compile: bool = False  # torch.compile each block; worth its start-up time on a GPU
    # Memory for recomputation. "none" also keeps 2 bytes per edge and vocabulary entry: 10 GB at 32k tokens.
    activation_checkpoint: Literal["none", "selective", "full"] = "none"
    deterministic: bool = False  # refuse operators whose results vary from run to run

    def __post_init__(self) -> None:
        _require(self.steps >= 1, "training.steps", "at least 1", self.steps)


@dataclass
class ParallelConfig:
    """FSDP2 over all ranks. All options trade memory for communication and change no result."""

    reshard_after_forward: bool = True  # free a block's gathered weights between its forward and backward
    reduce_gradients: Literal["last", "every"] = "last"  # micro-batch; "last" keeps 4 bytes a parameter
    # Neighbouring ranks that share out each layer's experts: a divisor of the numbers of ranks and experts.
    # Tokens travel to their experts then, and FSDP2 shards an expert over ranks / expert_parallel only.
    expert_parallel: int = 1

    def __post_init__(self) -> None:
        _require(self.expert_parallel >= 1, "parallel.expert_parallel", "at least 1", self.expert_parallel)


@dataclass
class CheckpointConfig:
    interval: int = 500  # steps between checkpoints; the last step writes one too; 0 writes none at all
    keep: int = 3  # newest checkpoints kept; 0 keeps all
    folder: str = "checkpoints"  # inside the run's folder, unless absolute
    resume: bool = True  # continue from the newest complete checkpoint in the folder
    async_save: bool = False  # copy to host memory, then write while training goes on
    export_hf: bool = False  # write the final weights as a Hugging Face snapshot into hf/

    def __post_init__(self) -> None:
        _require(self.interval >= 0, "checkpoint.interval", "at least 0", self.interval)
        good = self.keep == 0 or self.keep >= 2  # the newest may still be in the writing
        _require(good, "checkpoint.keep", "0 (all) or at least 2", self.keep)


@dataclass
class MetricsConfig:
    log_interval: int = 1  # steps between log lines; values are those of the step that is logged
    csv: bool = True  # metrics.csv
    tensorboard: bool = True  # tensorboard/

    def __post_init__(self) -> None:
        _require(self.log_interval >= 1, "metrics.log_interval", "at least 1", self.log_interval)


@dataclass
class ProfilerConfig:
    enable: bool = False  # a Kineto trace of one step in every ``interval``, into profiling/
    interval: int = 10
    memory_snapshot: bool = False  # CUDA memory history, every ``interval`` steps

    def __post_init__(self) -> None:
        _require(self.interval >= 4, "profiler.interval", "at least 4 (3 warm-up steps and 1)", self.interval)


@dataclass
class Config:
    folder: str = "outputs/run"  # everything that the run writes
    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    router_loss: RouterLossConfig = field(default_factory=RouterLossConfig)
    router_bias: RouterBiasConfig = field(default_factory=RouterBiasConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    lr_scheduler: LRSchedulerConfig = field(default_factory=LRSchedulerConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    profiler: ProfilerConfig = field(default_factory=ProfilerConfig)

    def __post_init__(self) -> None:
        _require(
            self.lr_scheduler.warmup_steps <= self.training.steps,
            "lr_scheduler.warmup_steps",
            f"at most training.steps = {self.training.steps}",
            self.lr_scheduler.warmup_steps,
        )
        # Here and not in ModelConfig, whose defaults OmegaConf builds.
        _require(
            bool(self.model.flavor) != bool(self.model.hf_path),
            "model",
            "either flavor (random weights) or hf_path (a local Hugging Face snapshot)",
            f"flavor = {self.model.flavor}, hf_path = {self.model.hf_path}",
        )
        # torch copies plain tensors only to the host, and torchao's states are none.
        copied = not self.checkpoint.async_save or self.optimizer.name == "adamw"
        _require(copied, "checkpoint.async_save", 'false with optimizer.name = "adamw8bit"', "true")


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """The configuration in a TOML file, with ``section.key=value`` arguments on top.

    Values of arguments follow YAML: ``3``, ``1e-4``, ``true``, ``null``, ``[a, b]``. Leading dashes are
    ignored. Raises UserError for anything that is not a valid configuration.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None

    config = _merged(OmegaConf.structured(Config), table, where=str(path))
    for argument in overrides:
        key, separator, _ = argument.lstrip("-").partition("=")
        if not separator or not key:
            raise UserError(f"argument {argument!r}: expected key=value, for example training.steps=10")
        try:
            parsed = OmegaConf.from_dotlist([argument.lstrip("-")])
        except yaml.YAMLError:
            raise UserError(f"argument {argument!r}: the value is not valid YAML") from None
        config = _merged(config, parsed, where=f"argument {argument!r}")
    try:
        return OmegaConf.to_object(config)  # type: ignore[return-value]  # runs every __post_init__
    except MissingMandatoryValue as error:
        raise UserError(f"{path}: {error.full_key}: required, but not set") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def dump_config(config: Config) -> str:
    """``config`` as TOML that ``load_config`` reads back. Keys that are None are left out."""
    lines: list[str] = []

    def write(table: dict[str, Any], prefix: str) -> None:
        for key, value in table.items():
            if value is not None and not isinstance(value, dict):
                lines.append(f"{_toml_key(key)} = {_toml_value(value)}")
        for key, value in table.items():
            if isinstance(value, dict) and value:
                lines.append(f"\n[{prefix}{_toml_key(key)}]")
                write(value, f"{prefix}{_toml_key(key)}.")

    write(dataclasses.asdict(config), "")
    return "\n".join(lines) + "\n"


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # inf and nan in TOML too
    return json.dumps(value)  # strings, numbers and booleans are written alike in JSON and TOML


def _merged(config: Any, table: Any, where: str) -> Any:
    """``config`` overwritten by ``table``; a UserError says ``where`` a wrong key or value stands."""
    try:
        return OmegaConf.merge(config, table)
    except ConfigKeyError as error:
        unknown = error.full_key or str(error.key)
        known = list(_keys(OmegaConf.to_container(OmegaConf.structured(Config))))
        close = difflib.get_close_matches(unknown, known, n=1, cutoff=0.5)
        tables = [f.name for f in dataclasses.fields(Config)]
        hint = f"did you mean {close[0]!r}?" if close else f"the tables are {', '.join(tables)}"
        raise UserError(f"{where}: unknown key {unknown!r}; {hint}") from None
    except (OmegaConfBaseException, TypeError) as error:
        key = getattr(error, "full_key", None)
        message = str(error).splitlines()[0]
        raise UserError(f"{where}: {key}: {message}" if key else f"{where}: {message}") from None


def _keys(table: Any, prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")


def _require(condition: object, key: str, expected: str, got: object) -> None:
    if not condition:
        raise UserError(f"{key}: expected {expected}, got {got}")
