"""The tables [data], [partition] and [validation]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from titan_tree.config.checks import (
    MISSING,
    Checked,
    at_least,
    check,
    finite,
    list_of,
    one_of,
    require,
    setting,
)
from titan_tree.registry import ADVANTAGES, PARTITION_STRATEGIES, READERS

PATHS = check(
    "a path or a non-empty list of paths",
    lambda files: isinstance(files, list) and files and all(isinstance(f, str) for f in files),
)
OPTIONS = check(
    "no messages and no tools", lambda options: not {"self", "messages", "tools"} & options.keys()
)


@dataclass
class DataConfig(Checked, table="data"):
    """Data files, and how their samples become token trees and micro-batches."""

    # A path, a glob pattern or a list of them; "demo" is the bundled sample.
    files: Any = setting(MISSING, PATHS)
    # How often an epoch contains each group: one number per entry of ``files``; default: once. 0.5 draws half
    # of the groups, anew in each epoch.
    weights: list[float] | None = setting(
        None, list_of(check("a number > 0 and at most 1e6", lambda weight: 0 < weight <= 1e6))
    )
    format: str = setting("auto", one_of("auto", READERS))  # "auto" recognizes the content of a file
    # Fields of records and messages that are not read. Any other unknown field is an error, except for usual
    # bookkeeping such as "task", "source" or "metadata" (data/schema.py). ["*"] ignores all unknown fields.
    ignore_fields: list[str] = setting([])
    tokenizer: str | None = None  # "byte", a Hugging Face folder or a .tiktoken file; default: model.hf_path
    template: str | None = None  # chat template (.jinja) that replaces the tokenizer's
    sample: dict[str, Any] = setting({}, OPTIONS)  # of TreeTokenizer.samples, such as turns = "last"
    merge: Literal["group", "batch"] = "group"  # one tree per group; "batch" also merges groups of a batch
    layout: Literal["tree", "flat"] = "tree"  # "flat" trains every path separately, as a baseline
    # "given" in the data, or computed from the rewards of each group, such as "group" in GRPO (docs/data.md).
    advantage: str = setting("given", one_of("given", ADVANTAGES))
    advantage_options: dict[str, Any] = setting({})  # numbers that the estimator takes, such as once = true
    # Train with the routed_experts recorded in the samples. If paths record different experts for a token
    # they share, use those of the "first" path or of the "majority", or "split" the paths (docs/routing.md).
    replay: Literal["off", "first", "majority", "split"] = "off"
    # Tokens of one forward pass; larger trees are partitioned, see [partition].
    max_tokens: int = setting(32_768, at_least(1))
    global_batch_groups: int = setting(8, at_least(1))  # groups per optimizer step, over all ranks
    # Groups from which the next one is drawn at random; 0 keeps the order of the files.
    shuffle_buffer: int = setting(256, at_least(0))
    seed: int = 0  # seed of the shuffling
    # Processes per rank that make the inputs of steps ahead of training; 0 uses a thread of the training
    # process. "auto" chooses up to 4 on a GPU, and 0 on a CPU.
    workers: Any = setting(
        "auto", check('"auto" or an integer >= 0', lambda n: n == "auto" or (type(n) is int and n >= 0))
    )

    def __post_init__(self) -> None:
        if isinstance(self.files, str) and self.files != MISSING:
            self.files = [self.files]
        super().__post_init__()
        require(
            self.weights is None or len(self.weights) == len(self.files),
            "data.weights",
            f"one weight for each of the {len(self.files)} entries of data.files",
            self.weights,
        )


@dataclass
class PartitionConfig(Checked, table="partition"):
    """How TreePartitioner splits trees above ``data.max_tokens``, and where activations are stored."""

    # "none" never splits: a tree of more than data.max_tokens tokens is an error.
    strategy: str = setting("auto", one_of("auto", PARTITION_STRATEGIES))
    # Maximum tokens whose activations are live at once.
    # Default: the larger of data.max_tokens and the longest path.
    max_chain_tokens: int | None = setting(None, at_least(1))
    # Activations of partitions that wait for the partitions below them (docs/partitioning.md). "auto" keeps
    # up to device_gb on the GPU, offloads up to host_gb to host memory, and recomputes the rest.
    activations: Literal["auto", "keep", "offload", "recompute"] = "auto"
    # Budget of "auto" per GPU. Default: no limit.
    device_gb: float | None = setting(None, finite, at_least(0))
    # Budget of "auto" in host memory, per GPU. Default: half of the available memory, divided by the number
    # of ranks on the host.
    host_gb: float | None = setting(None, finite, at_least(0))

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("device_gb", "host_gb"):
            require(
                getattr(self, name) is None or self.activations == "auto",
                f"partition.{name}",
                'partition.activations = "auto" when a budget is set',
                repr(self.activations),
            )


@dataclass
class ValidationConfig(Checked, table="validation"):
    """Scores held-out files during training. The keys of [data] apply to them, except ``files``."""

    # A path, a glob pattern or a list of them; unset: no validation.
    files: Any = setting(None, PATHS)
    interval: int = setting(100, at_least(1))  # steps between validations; the last step validates, too

    def __post_init__(self) -> None:
        if isinstance(self.files, str):
            self.files = [self.files]
        super().__post_init__()
