"""The steps of a run as training would make them: how much each owner runs, in which forward passes.

An owner is a GPU, or the GPUs that share the tokens of each tree.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from typing import Any

import numpy as np

from titan_tree.balance.sharing import TreeSharing
from titan_tree.config import Config
from titan_tree.data.dataset import TreeDataset
from titan_tree.data.groups import Group
from titan_tree.data.packing import shuffled
from titan_tree.data.sample_reader import SampleReader
from titan_tree.engine.step_io import StepInput, StepPreparer
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.chains import Chains
from titan_tree.tree.costs import TreeCosts, num_pairs
from titan_tree.tree.gateway import CacheRows
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_shards import TokenShard
from titan_tree.tree.token_tree import TokenTree


@dataclass(frozen=True)
class Pass:
    """One forward and backward pass of an owner: over a micro-batch, or over one of its partitions."""

    tokens: int  # of all GPUs of the owner
    keys: int  # tokens that attention sees: those of the pass and their ancestors in other partitions
    pairs: int  # of a token and a token that it sees
    edges: int  # that the loss scores, on the GPU with the most
    is_suspended: bool = False  # while other partitions run between its forward and its backward pass
    serial_chunks: int = 0  # of a recurrence, that run one after another

    @classmethod
    def of(cls, batch: TreeBatch, is_suspended: bool, num_ranks: int) -> Pass:
        """Returns the sizes of ``batch``, whose tokens ``num_ranks`` GPUs share."""
        ends = np.cumsum(TokenShard(num_ranks=num_ranks).sizes(len(batch)))
        ranks = np.searchsorted(ends, batch.edge_source.numpy(), side="right")  # of the edges
        edges = int(np.bincount(ranks, minlength=1).max())
        sizes = len(batch), len(batch.layout.subtree_end), num_pairs(batch), edges
        return cls(*sizes, is_suspended, _serial_chunks(batch.layout.chains))


def _serial_chunks(chains: Chains | None) -> int:
    """Returns the sum of the longest chains of all rounds."""
    if chains is None:
        return 0
    longest = chains.rounds[:-1, 0]  # comes first in its round
    return int((chains.end - chains.first)[longest].sum())


@dataclass(frozen=True)
class OwnerStep:
    """What an owner runs in one optimizer step."""

    micro_batches: list[list[Pass]]  # each with its partitions, or a single pass
    chain_tokens: int  # the most tokens whose activations are live at once, on all GPUs of the owner
    cache: CacheRows  # the most rows of the gateway cache
    logical_tokens: int
    distinct_tokens: int
    flops: float  # of the model itself, without recomputation

    @classmethod
    def of(cls, step: StepInput, num_ranks: int = 1) -> OwnerStep:
        """Returns the sizes of ``step``, whose tokens ``num_ranks`` GPUs share."""
        batches = [batch for micro_batch in step.micro_batches for batch in micro_batch]
        rows = [[a + b for a, b in zip(x.cache_offset, x.cache_writes, strict=True)] for x in batches]
        return cls(
            micro_batches=[_passes(batches, num_ranks) for batches in step.micro_batches],
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


def _passes(partitions: Sequence[TreeBatch], num_ranks: int) -> list[Pass]:
    parents = {batch.parent for batch in partitions}
    return [Pass.of(batch, number in parents, num_ranks) for number, batch in enumerate(partitions)]


Step = list[OwnerStep]  # one entry per owner


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
    config: Config, sample: SampleReader, preparer: StepPreparer, costs: TreeCosts, gpus: int, num_steps: int
) -> list[Step]:
    """Returns the first steps of a run on ``gpus`` GPUs.

    Args:
        sample: is read again and again, as the epochs of a run.
        preparer: of the run's ``TreeStep``, for whole batches.
        costs: balance the trees.
    Raises:
        UserError: malformed data, or a tree that is too large.
    """
    num_ranks = config.parallel.sequence_parallel
    is_balanced = config.parallel.balance and gpus > 1

    def dataset(rank: int, world_size: int) -> TreeDataset:
        data, allow_larger = replace(config.data, shuffle_buffer=0), config.partition.strategy != "none"
        return TreeDataset(data, sample, allow_larger=allow_larger, rank=rank, world_size=world_size)

    owners = range(gpus // num_ranks)
    if is_balanced:
        sharings = [_sharing(config, costs, owner * num_ranks, gpus) for owner in owners]
        trees = [list(chain.from_iterable(step)) for step in dataset(0, 1).steps(num_steps)]
        by_owner = [[sharing.choose(0, each) for each in trees] for sharing in sharings]
    else:
        by_owner = [list(dataset(owner, len(owners)).steps(num_steps)) for owner in owners]
    by_step = zip(*by_owner, strict=True)
    return [[OwnerStep.of(preparer(trees), num_ranks) for trees in step] for step in by_step]


def _sharing(config: Config, costs: TreeCosts, rank: int, gpus: int) -> TreeSharing:
    """Returns what chooses the trees of a rank among those of all ranks."""
    sharing = TreeSharing(
        lambda _: _Alone(costs),
        rank,
        gpus,
        config.data.max_tokens,
        always_in_step=config.parallel.expert_parallel > 1,
        ranks_per_owner=config.parallel.sequence_parallel,
    )
    sharing.join(0)
    return sharing


@dataclass
class _Alone:
    """Stands in for the group of all ranks, where one process has all trees."""

    start_costs: TreeCosts

    def gather(self, make: Callable[[], bytes]) -> list[bytes]:
        return [make()]

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        return list(parts)

    def costs(self, version: int) -> TreeCosts:
        return self.start_costs
