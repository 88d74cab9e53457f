"""The settings of the data: [data], [partition] and [validation]."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from titan_tree.components.tree_partitioner import PARTITION_STRATEGIES
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
from titan_tree.config.registry import Registry
from titan_tree.data.readers import READERS

if TYPE_CHECKING:
    from titan_tree.data.turns import Estimator

ADVANTAGES: Registry[Estimator] = Registry(
    "advantage estimator",
    {
        name: f"titan_tree.data.advantages:{name}"
        for name in ("group", "mean", "loo", "gigpo", "tree_rl", "tree_grpo", "spo", "tree_po")
    },
    key="data.advantage",
)

PATHS = check(
    "a path or a non-empty list of paths",
    lambda files: isinstance(files, list) and files and all(isinstance(file, str) for file in files),
)
OPTIONS = check(
    "no messages and no tools", lambda options: not {"self", "messages", "tools"} & options.keys()
)
WORKERS = check(
    '"auto" or an integer >= 0', lambda value: value == "auto" or (type(value) is int and value >= 0)
)


@dataclass(kw_only=True)
class DataConfig(Checked, table="data"):
    """Data files, and how their samples become token trees and micro-batches."""

    # Data files: a path, a glob pattern or a list of them. "demo" is the bundled sample.
    files: Any = setting(MISSING, PATHS)
    # How often an epoch contains each group, as one number per entry of ``files``. Default: once. 0.5 draws
    # half of the groups, anew in each epoch.
    weights: list[float] | None = setting(
        None, list_of(check("a number > 0 and at most 1e6", lambda weight: 0 < weight <= 1e6))
    )
    # Format of the files. "auto" looks at their content.
    format: str = setting("auto", one_of("auto", READERS))
    # Unknown fields of records and messages that are not errors, besides those that say where data come from
    # (docs/fields.md). ["*"] ignores all.
    ignore_fields: list[str] = setting([])
    # "byte", a Hugging Face folder, a .tiktoken file, or a function of your own as "module:name"
    # (docs/extending.md). Default: model.hf_path.
    tokenizer: str | None = None
    template: str | None = None  # Chat template (.jinja) that replaces the tokenizer's.
    # Arguments of TreeTokenizer.samples, such as turns = "last" (docs/components/tree_tokenizer.md).
    sample: dict[str, Any] = setting({}, OPTIONS)
    # "group" makes one tree per group. "batch" also merges the groups of a batch.
    merge: Literal["group", "batch"] = "group"
    # "tree" trains on token trees. Baselines: "leaf" trains one row per leaf, with its prefixes; "flat"
    # trains one row per path.
    layout: Literal["tree", "leaf", "flat"] = "tree"
    # Paths of a group that are trained. Baseline: "longest" keeps the longest path and its prefixes
    # (docs/data.md).
    paths: Literal["all", "longest"] = "all"
    # Source of the advantages: "given" in the data, or an estimator that computes them from rewards, such as
    # "group" in GRPO (docs/advantages.md).
    advantage: str = setting("given", one_of("given", ADVANTAGES))
    advantage_options: dict[str, Any] = setting({})  # Options of the estimator, such as once = true.
    # Train with recorded experts (docs/routing.md). Where paths recorded different ones for a token, use
    # those of the "first" path or of the "majority", or "split" the paths.
    replay: Literal["off", "first", "majority", "split"] = "off"
    # Maximum tokens of one forward pass. Larger trees are partitioned, see [partition].
    max_tokens: int = setting(32_768, at_least(1))
    global_batch_groups: int = setting(8, at_least(1))  # Groups per optimizer step, over all ranks.
    # Number of groups from which the next one is drawn at random. 0 keeps the order of the files.
    shuffle_buffer: int = setting(256, at_least(0))
    seed: int = 0  # Seed of the shuffling.
    # Processes per rank that make the inputs of steps ahead of training. 0 uses a thread of the training
    # process. "auto" chooses up to 4 on a GPU, and 0 on a CPU.
    workers: int | str = setting("auto", WORKERS)

    def __post_init__(self) -> None:
        if isinstance(self.files, str) and self.files != MISSING:
            self.files = [self.files]
        super().__post_init__()
        if self.weights is not None:
            require(
                len(self.weights) == len(self.files),
                "data.weights",
                f"one weight for each of the {len(self.files)} entries of data.files",
                self.weights,
            )


@dataclass(kw_only=True)
class PartitionConfig(Checked, table="partition"):
    """How TreePartitioner splits trees above ``data.max_tokens``, and where activations are stored."""

    # How trees are split (docs/partitioning.md). With "none", a tree of more than data.max_tokens tokens is
    # an error.
    strategy: str = setting("auto", one_of("auto", PARTITION_STRATEGIES))
    # Maximum tokens whose activations are live at once. Default: the larger of data.max_tokens and the
    # longest path.
    max_chain_tokens: int | None = setting(None, at_least(1))
    # Where activations of suspended partitions wait (docs/partitioning.md). "auto" keeps up to device_gb on
    # the GPU, offloads up to host_gb to host memory, and recomputes the rest.
    activations: Literal["auto", "keep", "offload", "recompute"] = "auto"
    device_gb: float | None = setting(None, finite, at_least(0))  # GPU memory for "auto". Default: no limit.
    # Host memory per GPU for "auto". Default: half of the available memory, divided by the number of ranks on
    # the host.
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


@dataclass(kw_only=True)
class ValidationConfig(Checked, table="validation"):
    """Held-out files to score during training, with all their paths. Other keys of [data] apply, too."""

    files: Any = setting(None, PATHS)  # A path, a glob pattern or a list of them. Default: no validation.
    interval: int = setting(
        100, at_least(0)
    )  # Steps between validations. The last step validates, too. 0: none.

    def __post_init__(self) -> None:
        if isinstance(self.files, str):
            self.files = [self.files]
        super().__post_init__()
        is_default = self.interval in (0, 100)
        require(self.files or is_default, "validation.files", "files beside validation.interval", "none")
