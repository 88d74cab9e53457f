"""The steps of a run as training would make them: how much each GPU runs, in which forward passes."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from titan_tree.config import Config
from titan_tree.data.dataset import TreeDataset
from titan_tree.data.groups import Group
from titan_tree.data.packing import shuffled
from titan_tree.data.sample_reader import SampleReader
from titan_tree.engine.preparation import StepPreparer
from titan_tree.engine.records import StepInput
from titan_tree.models.costs import num_pairs
from titan_tree.tree.batch import CacheRows, TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass on one GPU: over a micro-batch, or over one of its partitions."""

    tokens: int
    keys: int  # tokens that attention sees: those of the pass and their ancestors in other partitions
    pairs: int  # of a token and a token that it sees
    edges: int  # that the loss scores
    is_suspended: bool = False  # while other partitions run between its forward and its backward pass

    @classmethod
    def of(cls, batch: TreeBatch, is_suspended: bool) -> Pass:
        sizes = len(batch), len(batch.layout.subtree_end), num_pairs(batch), len(batch.edge_label)
        return cls(*sizes, is_suspended)


@dataclass(frozen=True)
class RankStep:
    """What one GPU runs in one optimizer step."""

    micro_batches: list[list[Pass]]  # each with its partitions, or a single pass
    chain_tokens: int  # the most tokens whose activations are live at once
    cache: CacheRows  # the most rows of the gateway cache
    logical_tokens: int
    distinct_tokens: int
    flops: float  # of the model itself, without recomputation

    @classmethod
    def of(cls, step: StepInput) -> RankStep:
        batches = [batch for micro_batch in step.micro_batches for batch in micro_batch]
        rows = [[a + b for a, b in zip(x.cache_offset, x.cache_writes, strict=True)] for x in batches]
        return cls(
            micro_batches=[_passes(batches) for batches in step.micro_batches],
            chain_tokens=step.chain_peak,
            cache=CacheRows(*(max(column) for column in zip(*rows, strict=True)))
            if rows
            else CacheRows(0, 0),
            logical_tokens=step.counts.logical_tokens,
            distinct_tokens=step.counts.distinct_tokens,
            flops=step.counts.flops,
        )

    @property
    def passes(self) -> list[Pass]:
        return [each for micro_batch in self.micro_batches for each in micro_batch]


def _passes(partitions: Sequence[TreeBatch]) -> list[Pass]:
    parents = {batch.parent for batch in partitions}
    return [Pass.of(batch, number in parents) for number, batch in enumerate(partitions)]


Step = list[RankStep]  # one entry per GPU


class Sample(SampleReader):
    """A reader of a few groups. It tokenizes each group once, however often it is asked.

    Args:
        reader: reads all groups.
        groups: the number of groups to take: the first ones that training would take.
    """

    def __init__(self, reader: SampleReader, groups: int) -> None:
        super().__init__(reader.config, reader.tokenizer, reader.limits)
        buffer, order = self.config.shuffle_buffer, random.Random(f"{self.config.seed}/0")
        self.taken = list(islice(shuffled(reader.groups(epoch=0), buffer, order), groups))
        self._trees: dict[int, TokenTree] = {}
        self._paths: dict[int, list[TokenPath]] = {}

    def groups(self, *_: Any, **__: Any) -> Iterator[Group]:
        """Yields the groups of the sample."""
        yield from self.taken

    def tree(self, group: Group, replay: Any = None) -> TokenTree:
        """See ``SampleReader.tree``."""
        if id(group) not in self._trees:
            self._trees[id(group)] = super().tree(group, replay)
        return self._trees[id(group)]

    def paths(self, group: Group) -> list[TokenPath]:
        """See ``SampleReader.paths``."""
        if id(group) not in self._paths:
            self._paths[id(group)] = super().paths(group)
        return self._paths[id(group)]


def sample_steps(
    config: Config, sample: SampleReader, preparer: StepPreparer, gpus: int, num_steps: int
) -> list[Step]:
    """Returns the first steps of a run on ``gpus`` GPUs.

    Args:
        sample: is read again and again, as the epochs of a run.
        preparer: of the run's ``TreeStep``.
    Raises:
        UserError: malformed data, or a tree that is too large.
    """
    by_rank = []
    for rank in range(gpus):
        dataset = TreeDataset(
            replace(config.data, shuffle_buffer=0),
            sample,
            allow_larger=config.partition.strategy != "none",
            rank=rank,
            world_size=gpus,
        )
        by_rank.append([RankStep.of(preparer(trees)) for trees in dataset.steps(num_steps)])
    return [list(ranks) for ranks in zip(*by_rank, strict=True)]
