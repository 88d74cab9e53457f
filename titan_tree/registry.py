"""Every extension point of titan_tree, in one place: names that a configuration may use, and what they stand for.

To extend titan_tree, write one file and add one line below, or call ``register`` from your own script
(docs/extending.md shows one example for each registry).
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from importlib import import_module
from typing import Any, Generic, TypeVar

from titan_tree.errors import UserError

T = TypeVar("T")


class Registry(Generic[T]):
    """Implementations of one kind, by name.

    An entry is the implementation itself, or a string that says where to import it from: "package.module" or
    "package.module:attribute". Strings are imported on first use, so that listing names costs nothing: reading
    a configuration or inspecting data never waits for torch.

    Args:
        kind: what the entries are, for error messages: "loss", "attention backend".
        entries: implementations or import strings by name, in the order in which messages list them.
    """

    def __init__(self, kind: str, entries: Mapping[str, T | str]) -> None:
        self.kind = kind
        self._entries: dict[str, T | str] = dict(entries)

    def register(self, name: str, entry: T | str) -> None:
        """Adds an entry, or replaces the one of this name."""
        self._entries[name] = entry

    def __getitem__(self, name: str) -> T:
        """The implementation called ``name``. Raises UserError for an unknown name."""
        if name not in self._entries:
            raise unknown_name(self.kind, name, self._entries)
        entry = self._entries[name]
        if isinstance(entry, str):
            module, _, attribute = entry.partition(":")
            loaded: Any = import_module(module)
            entry = self._entries[name] = getattr(loaded, attribute) if attribute else loaded
        return entry

    def __iter__(self) -> Iterator[str]:
        """The names, in the order of registration."""
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __len__(self) -> int:
        return len(self._entries)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """The error for a name that does not exist; it suggests the closest one that does."""
    known = list(known)
    close = difflib.get_close_matches(name, known, n=1)
    hint = f"; did you mean {close[0]!r}?" if close else ""
    return UserError(f"unknown {kind} {name!r}{hint} (known: {', '.join(known)})")


MODELS: Registry[Any] = Registry(  # subclasses of models.decoder.Decoder
    "model",
    {
        "qwen3": "titan_tree.models.qwen3:Qwen3",
        "qwen3_moe": "titan_tree.models.qwen3_moe:Qwen3Moe",
        "qwen3_5": "titan_tree.models.qwen3_5:Qwen35",
        "qwen3_5_moe": "titan_tree.models.qwen3_5_moe:Qwen35Moe",
    },
)

ATTENTION_BACKENDS: Registry[Any] = Registry(  # see components/tree_attention/backend.py
    "attention backend",
    {
        "hopper": "titan_tree.components.tree_attention.hopper",
        "triton": "titan_tree.components.tree_attention.triton_kernels",
        "flash": "titan_tree.components.tree_attention.flash",
        "flex": "titan_tree.components.tree_attention.flex",
        "reference": "titan_tree.components.tree_attention.reference",
    },
)

GDN_BACKENDS: Registry[Any] = Registry(  # see components/tree_gdn/backend.py
    "gated DeltaNet backend",
    {
        "hopper": "titan_tree.components.tree_gdn.hopper",
        "triton": "titan_tree.components.tree_gdn.triton_kernels",
        "reference": "titan_tree.components.tree_gdn.reference",
    },
)

PARTITION_STRATEGIES: Registry[Any] = (
    Registry(  # functions (tree, max_tokens, max_chain_tokens) -> partitions
        "partition strategy",
        {
            "none": "titan_tree.components.tree_partitioner.none:partition",
            "single_path": "titan_tree.components.tree_partitioner.single_path:partition",
            "multi_path": "titan_tree.components.tree_partitioner.multi_path:partition",
            "greedy": "titan_tree.components.tree_partitioner.greedy:partition",
            "redundancy_free": "titan_tree.components.tree_partitioner.redundancy_free:partition",
        },
    )
)

LOSSES: Registry[Any] = Registry(  # functions (logprobs [F], pairs, **options) -> losses [F]
    "loss",
    {
        "sft": "titan_tree.components.tree_loss.sft:sft",
        "reinforce": "titan_tree.components.tree_loss.policy_gradient:reinforce",
        "ppo": "titan_tree.components.tree_loss.policy_gradient:ppo",
        "grpo": "titan_tree.components.tree_loss.policy_gradient:grpo",
        "gspo": "titan_tree.components.tree_loss.policy_gradient:gspo",
    },
)

READERS: Registry[Any] = Registry(  # see data/readers/__init__.py
    "data format",
    {"jsonl": "titan_tree.data.readers.jsonl:JsonLinesReader"},
)

OPTIMIZERS: Registry[Any] = Registry(  # instances of distributed.optimizers.OptimizerSpec
    "optimizer",
    {
        "adamw": "titan_tree.distributed.optimizers:ADAMW",
        "adamw8bit": "titan_tree.distributed.ao:ADAMW_8BIT",
    },
)

LOGGERS: Registry[Any] = Registry(  # subclasses of metrics.loggers.Logger
    "logger",
    {
        "console": "titan_tree.metrics.console:ConsoleLogger",
        "csv": "titan_tree.metrics.csv_file:CsvLogger",
        "tensorboard": "titan_tree.metrics.tensorboard:TensorBoardLogger",
        "wandb": "titan_tree.metrics.wandb:WandbLogger",
    },
)

METRICS: Registry[Any] = Registry(  # functions metrics.StepReport -> {name: number}, {} where not applicable
    "metric",
    {
        "tree": "titan_tree.metrics.step_metrics:tree_metrics",
        "partitions": "titan_tree.metrics.step_metrics:partition_metrics",
        "speed": "titan_tree.metrics.step_metrics:speed_metrics",
        "replay": "titan_tree.metrics.step_metrics:replay_metrics",
        "gpu": "titan_tree.metrics.step_metrics:gpu_metrics",
    },
)
