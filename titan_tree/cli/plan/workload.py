"""The steps of a run as training would make them: how much each owner runs, in which forward passes.

An owner is a GPU, or the GPUs that share the tokens of each tree.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice

import numpy as np

from titan_tree.data.dataset import TreeDataset
from titan_tree.data.packing import MicroBatches, shuffled
from titan_tree.data.sample_reader import SampleReader
from titan_tree.engine.step_io import PrepareStep, StepCounts, StepInput
from titan_tree.run.balance.splitting import StepBalancer
from titan_tree.run.config import Config
from titan_tree.tree.batch import TokenShard, TreeBatch
from titan_tree.tree.costs import TreeCosts, tree_sizes
from titan_tree.tree.gateway import NO_CACHE_ROWS, CacheRows


@dataclass(frozen=True, kw_only=True)
class PassSizes:
    """One forward and backward pass of an owner: over a micro-batch or one of its partitions.

    Attributes:
        tokens: tokens of all GPUs of the owner.
        keys: tokens that attention sees: those of the pass, and their ancestors in other partitions.
        edges: edges that the loss scores, on the GPU with the most.
        cache: rows of the gateway cache after the forward pass.
        images: height and width of the micro-batch's distinct images; only the first pass has them.
    """

    tokens: int
    keys: int
    edges: int
    cache: CacheRows = NO_CACHE_ROWS
    images: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of(cls, batch: TreeBatch, num_ranks: int) -> PassSizes:
        """Returns the sizes of ``batch``, whose tokens ``num_ranks`` GPUs share."""
        ends = np.cumsum(TokenShard(num_ranks=num_ranks).sizes(len(batch)))
        ranks = np.searchsorted(ends, batch.edge_source.numpy(), side="right")  # of the edges
        return cls(
            tokens=len(batch),
            keys=len(batch.layout.subtree_end),
            edges=int(np.bincount(ranks, minlength=1).max()),
            cache=CacheRows(*map(sum, zip(batch.cache_offset, batch.cache_writes, strict=True))),
            images=tuple((len(pixels), len(pixels[0])) for pixels in batch.pixels),
        )


@dataclass(frozen=True)
class OwnerSizes:
    """What an owner runs in one optimizer step."""

    micro_batches: list[list[PassSizes]]  # each with its partitions, or a single pass
    chain_tokens: int  # the most tokens whose activations are live at once, on all GPUs of the owner
    counts: StepCounts

    @classmethod
    def of(cls, step: StepInput, num_ranks: int = 1) -> OwnerSizes:
        """Returns the sizes of ``step``, whose tokens ``num_ranks`` GPUs share."""
        micro_batches = [
            [PassSizes.of(batch, num_ranks) for batch in batches] for batches in step.micro_batches
        ]
        return cls(micro_batches, step.counts.chain_peak, step.counts)

    @property
    def passes(self) -> list[PassSizes]:
        """All forward passes of the step."""
        return list(chain.from_iterable(self.micro_batches))


StepSizes = list[OwnerSizes]  # one entry per owner


def is_partitioned(step: StepSizes) -> bool:
    """Returns whether a tree of the step runs in several passes."""
    return any(len(passes) > 1 for owner in step for passes in owner.micro_batches)


def take_sample(reader: SampleReader, number: int) -> int:
    """Makes a reader return the first groups that training would take, each tokenized once.

    Returns the number of groups: ``number``, or fewer if the data have fewer.
    """
    order = random.Random(f"{reader.config.seed}/0")
    groups = list(islice(shuffled(reader.files.groups(epoch=0), reader.config.shuffle_buffer, order), number))
    paths = {id(group): reader.paths(group) for group in groups}
    reader.files.groups = lambda *_, **__: iter(groups)  # type: ignore[method-assign]
    reader.paths = lambda group: paths[id(group)]  # type: ignore[method-assign]
    return len(groups)


def sample_steps(
    config: Config, sample: SampleReader, prepare: PrepareStep, costs: TreeCosts, gpus: int, num_steps: int
) -> list[StepSizes]:
    """Returns the first steps of a run on ``gpus`` GPUs.

    Args:
        sample: groups that are read again and again, as in the epochs of a run.
        prepare: makes the inputs of the run's ``TreeStep``, for whole batches.
        costs: costs by which trees are balanced.
    Raises:
        UserError: malformed data, or a tree that is too large.
    """
    parallel, max_tokens = config.parallel, config.data.max_tokens
    num_owners = gpus // parallel.sequence_parallel
    data, allow_larger = replace(config.data, shuffle_buffer=0), config.partition.strategy != "none"

    def steps(rank: int, size: int) -> Iterator[MicroBatches]:
        dataset = TreeDataset(data, sample, allow_larger=allow_larger, rank=rank, world_size=size)
        return dataset.steps(num_steps)

    by_step: Iterable[Sequence[MicroBatches]]
    if parallel.balance and gpus > 1:
        in_step = True if parallel.expert_parallel > 1 else None
        balancer = StepBalancer(costs, num_owners, max_tokens, in_step)
        by_step = (_balanced(balancer, step) for step in steps(0, 1))
    else:
        by_step = zip(*(steps(owner, num_owners) for owner in range(num_owners)), strict=True)
    return [[OwnerSizes.of(prepare(trees), parallel.sequence_parallel) for trees in step] for step in by_step]


def _balanced(balancer: StepBalancer, micro_batches: MicroBatches) -> list[MicroBatches]:
    """Returns the micro-batches of each owner."""
    trees = dict(enumerate(chain.from_iterable(micro_batches)))
    _, assigned = balancer.assign(tree_sizes(list(trees.values())), trees)
    units = assigned.units(trees)
    return [[[units[i] for i in chosen] for chosen in owner] for owner in assigned.micro_batches]
