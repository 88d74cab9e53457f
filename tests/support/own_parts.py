"""A user's module with one part of each kind. Each computes what a built-in part does, and says that it ran.

``test_plugins.py`` copies this file into a folder of its own, and trains with the parts by their names there.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from titan_tree import PathPairs, TreeTokenizer
from titan_tree.components.recurrence import reference as recurrence_reference
from titan_tree.components.tree_attention import reference as attention_reference
from titan_tree.components.tree_loss.ratios import field
from titan_tree.components.tree_partitioner import greedy
from titan_tree.data.readers import Record, Source
from titan_tree.data.readers.own_schema import OwnSchemaReader
from titan_tree.data.settings import ADVANTAGES
from titan_tree.data.turns import Turns
from titan_tree.distributed.settings import OptimizerSpec
from titan_tree.models.decoder_config import DecoderConfig
from titan_tree.models.qwen3_5 import Qwen35
from titan_tree.rl.environment import Desk, DeskEpisode
from titan_tree.run.metrics import Logger, StepReport
from titan_tree.run.metrics.step_metrics import METRICS
from titan_tree.tree.partition import Partition
from titan_tree.tree.token_tree import TokenTree

USED = Path("used.txt")  # a line per call, with the name of the part


def use(part: str) -> None:
    with USED.open("a") as file:
        file.write(f"{part}\n")


def tokenizer(template: str | None) -> TreeTokenizer:
    """Bytes under the configuration's chat template."""
    use("tokenizer")
    return TreeTokenizer.byte_level(template or "chatml")


class Chats(OwnSchemaReader):
    """The library's own schema."""

    def records(self, source: Source) -> Iterator[tuple[str, Record]]:
        use("reader")
        return super().records(source)


def centred(turns: Turns) -> list[np.ndarray]:
    """Rewards less their mean, as the estimator "mean"."""
    use("advantage")
    mean = sum(turns.rewards) / len(turns.rewards)
    return turns.per_path([reward - mean for reward in turns.rewards])


class Hybrid(Qwen35):
    """Qwen3.5, whose smallest size has another name."""

    hf_architectures: ClassVar[dict[str, str]] = {}
    flavors: ClassVar[Mapping[str, DecoderConfig]] = {"mine": Qwen35.flavors["debug"]}

    def __init__(self, *args: Any, **options: Any) -> None:
        use("model")
        super().__init__(*args, **options)


class Backend:
    """The functions of another backend."""

    def __init__(self, part: str, module: Any) -> None:
        self.part, self.module = part, module

    def is_automatic(self, device: torch.device) -> bool:
        return False  # "auto" does not choose it

    def __getattr__(self, name: str) -> Any:
        if name in ("attention", "forward"):
            use(self.part)
        return getattr(self.module, name)


ATTENTION = Backend("attention", attention_reference)
RECURRENCE = Backend("recurrence", recurrence_reference)


def cut(tree: TokenTree, max_tokens: int, max_chain_tokens: int | None) -> Iterable[Partition]:
    """The partitions of the strategy "greedy"."""
    use("strategy")
    return greedy.partition(tree, max_tokens, max_chain_tokens)


def reinforce(logprobs: Tensor, pairs: PathPairs) -> Tensor:
    """REINFORCE (Williams, 1992)."""
    use("loss")
    return -field(pairs, "advantage") * logprobs


class AdamW(torch.optim.AdamW):
    def step(self, closure: Any = None) -> Any:
        use("optimizer")
        return super().step(closure)


OPTIMIZER = OptimizerSpec(import_class=lambda: AdamW)


class Steps(Logger):
    """Writes down which steps were logged."""

    def log(self, step: int, values: Mapping[str, float]) -> None:
        use("logger")


def answer(report: StepReport) -> dict[str, float]:
    """The metric of every step. No key selects a metric, so the module registers it."""
    use("metric")
    return {"answer": 42.0}


METRICS.register("answer", answer)
ADVANTAGES.register("centred", centred)  # for a configuration with the plain name


class Shop(Desk):
    """The desk tasks."""

    def episode(self, draw: random.Random) -> DeskEpisode:
        use("environment")
        return super().episode(draw)


CONSTANT = 0.5  # is of no kind that a registry has
