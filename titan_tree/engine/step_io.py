"""The input and the result of an optimizer step, with their sizes.

trees -> prepare_step (host, any process) -> StepInput -> TreeStep.run (device) -> StepResult
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import get_type_hints

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_tree.components.moe.routing import Routing
from titan_tree.components.tree_loss.loss import GlobalStatistics, normalizer
from titan_tree.components.tree_loss.settings import Reduction
from titan_tree.components.tree_loss.spec import COUNT_ONCE
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.distributed.agreement import check_agreement
from titan_tree.distributed.collectives import world_size
from titan_tree.errors import AgreedError, UserError
from titan_tree.tree.batch import ALL_TOKENS, TokenShard, TreeBatch
from titan_tree.tree.costs import ModelCosts, batch_sizes
from titan_tree.tree.partition import PartitionPlan, one_pass
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree, reuse_ratio


@dataclass(frozen=True, kw_only=True)
class StepCounts:
    """Sizes of an optimizer step: one rank's in ``StepInput``, those of all ranks in ``StepResult``.

    The counts of ranks can be added (``all_reduce_counts``), and so can those of steps. A sum has the largest
    value of each of the ``MAXIMA``.
    """

    normalizer: float = 0.0  # Z, the loss's divisor
    # Sum of w_p m_{p,t}. If it is 0, there is nothing to learn, even if Z of path_mean is positive.
    loss_weight: float = 0.0
    advantage: float = 0.0  # sum of w_p m_{p,t} A_{p,t}; 0 without advantages
    advantage_square: float = 0.0  # sum of w_p m_{p,t} A²_{p,t}; 0 without advantages
    num_trees: int = 0
    num_paths: int = 0
    logical_tokens: int = 0  # N_flat: tokens of all paths
    leaf_tokens: int = 0  # N_leaf: tokens of one path per leaf, which training without trees would run
    distinct_tokens: int = 0  # N_tree
    executed_tokens: int = 0  # N_part: larger than N_tree if partitions or pieces repeat shared tokens
    split_tokens: int = 0  # tokens that pieces of trees repeat, see run/balance/splitting.py
    scored_edges: int = 0
    forwards: int = 0  # one per micro-batch, or one per partition of it
    gateway_bytes: int = 0  # keys, values and states that partitions read from their ancestors
    flops: float = 0.0  # the model's own operations, forward and backward, without recomputation
    # A token-layer is one token in one layer with experts (tree/routed_experts.py).
    replayed_token_layers: int = 0  # token-layers with recorded experts
    disagreeing_token_layers: int = 0  # those among them on which paths recorded different experts

    max_micro_batches: int = 0  # of a rank
    max_partitions: int = 0  # of a micro-batch
    # The most tokens whose activations are live at once. Without partitions: of the largest micro-batch.
    chain_peak: int = 0
    # The newest policy: the one that is trained, or else that sampled a token (``TokenPath.policy_version``).
    # -1: unknown.
    newest_version: int = -1

    def __add__(self, other: StepCounts) -> StepCounts:
        mine, others = vars(self), vars(other)
        return StepCounts(
            **{
                name: max(value, others[name]) if name in MAXIMA else value + others[name]
                for name, value in mine.items()
            }
        )

    @classmethod
    def of_plans(
        cls,
        plans: Sequence[PartitionPlan],
        batches: Sequence[Sequence[TreeBatch]],
        trees: Sequence[TokenTree],
        reduction: Reduction,
        costs: ModelCosts,
    ) -> StepCounts:
        """Returns the sums of a step, without the maxima.

        Args:
            plans: the plan of each micro-batch.
            batches: the batches of each plan, with all of their tokens.
            trees: the trees of all micro-batches.
            reduction: the loss's reduction, which decides the normalizer.
            costs: the model's operations and bytes.
        """
        paths = [path for plan in plans for path in plan.tree.paths]
        all_batches = list(chain.from_iterable(batches))
        recorded = [plan.tree.routed_experts for plan in plans if plan.tree.routed_experts is not None]
        distinct_tokens = sum(tree.counted_tokens for tree in trees)
        return cls(
            normalizer=normalizer(reduction, paths),
            loss_weight=float(sum(path.weight * path.loss_tokens for path in paths)),
            advantage=sum(_weighted_sum(path, 1) for path in paths),
            advantage_square=sum(_weighted_sum(path, 2) for path in paths),
            num_trees=sum(tree.is_counted for tree in trees),
            num_paths=len(paths),
            logical_tokens=sum(batch.n_logical for batch in all_batches),
            leaf_tokens=sum(plan.tree.leaf_tokens for plan in plans),
            distinct_tokens=distinct_tokens,
            executed_tokens=sum(map(len, all_batches)),
            split_tokens=sum(len(plan.tree) for plan in plans) - distinct_tokens,
            scored_edges=sum(len(batch.edge_label) for batch in all_batches),
            forwards=len(all_batches),
            gateway_bytes=sum(map(costs.gateway_bytes, all_batches)),
            flops=sum(map(costs.training_flops, all_batches)),
            replayed_token_layers=sum(experts.num_token_layers for experts in recorded),
            disagreeing_token_layers=sum(experts.num_disagreeing for experts in recorded),
        )

    @property
    def is_partitioned(self) -> bool:
        """Whether any micro-batch has several partitions."""
        return self.max_partitions > 1

    @property
    def advantage_moments(self) -> tuple[float, float, float]:
        """The sums of w_p m_{p,t} times 1, A and A²."""
        return self.loss_weight, self.advantage, self.advantage_square

    @property
    def por(self) -> float:
        """The potential overlap ratio (POR), see ``TreeStats.por``."""
        return reuse_ratio(self.leaf_tokens, self.distinct_tokens)

    @property
    def por_samples(self) -> float:
        """See ``TreeStats.por_samples``."""
        return reuse_ratio(self.logical_tokens, self.distinct_tokens)

    @property
    def err(self) -> float:
        """The effective reuse ratio (ERR). It equals ``por`` if no token runs twice."""
        return reuse_ratio(self.leaf_tokens, self.executed_tokens)

    @property
    def duplicates(self) -> float:
        """Tokens that partitions repeat, as a fraction of those that they get."""
        return self.executed_tokens / (self.distinct_tokens + self.split_tokens) - 1.0


NO_CHECKSUM = -(2**62)
NO_COUNTS = StepCounts()
MAXIMA = ("max_micro_batches", "max_partitions", "chain_peak", "newest_version")
TYPES = get_type_hints(StepCounts)  # of the counts by name, in their order


@dataclass(frozen=True, kw_only=True)
class StepInput:
    """One rank's part of an optimizer step, on the host and ready to run.

    Attributes:
        micro_batches: the batches of each micro-batch: its partitions, or a single batch.
        unpartitioned: the micro-batch as a single batch, if the loss needs whole paths and the micro-batch is
            partitioned or other ranks have some of its tokens. None otherwise.
        counts: this rank's counts. The first of the ranks that share the tokens of trees counts them.
        path_ids: the ids of each micro-batch's paths; "?" for a path without an id.
        tree_ids: the id of each tree's first path.
        micro_batch_sizes: the ``SIZES`` of each micro-batch (tree/costs.py) and its number of forward passes,
            from which ``TreeCosts.seconds`` estimates how long it takes.
    """

    micro_batches: list[list[TreeBatch]]
    unpartitioned: list[TreeBatch | None]
    counts: StepCounts
    path_ids: tuple[tuple[str, ...], ...] = ()
    tree_ids: tuple[str, ...] = ()
    micro_batch_sizes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def nothing(cls) -> StepInput:
        """Returns the input of a rank without trees."""
        return cls(micro_batches=[], unpartitioned=[], counts=NO_COUNTS)

    def whole(self, micro_batch: int, device: torch.device | str = "cpu") -> TreeBatch | None:
        """Returns ``unpartitioned`` of a micro-batch on ``device``, or None, also for one of dummies."""
        batch = self.unpartitioned[micro_batch] if micro_batch < len(self.unpartitioned) else None
        return None if batch is None else batch.to(device, non_blocking=True)

    def pin_memory(self) -> StepInput:
        """Returns the input in page-locked memory, from which a GPU copies without waiting. Needs CUDA."""
        return dataclasses.replace(
            self,
            micro_batches=[[batch.pin_memory() for batch in batches] for batches in self.micro_batches],
            unpartitioned=[None if batch is None else batch.pin_memory() for batch in self.unpartitioned],
        )


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The outcome of a step over all ranks. Tensors are on the device; reading them waits for the step."""

    loss: Tensor  # 0-dim fp32, router losses included
    loss_metrics: dict[str, Tensor]  # the loss function's own metrics, 0-dim: means over the tokens it counts
    routing: Routing | None  # None for a model without experts
    router_metrics: dict[str, Tensor]  # see components/moe; empty for a model without experts
    counts: StepCounts
    # Tokens of additional forward passes: recomputed activations, score passes and count passes.
    extra_forward_tokens: Tensor
    dummy_forwards: Tensor  # forward passes without trees, run because other ranks had more
    statistics: GlobalStatistics | None = None  # what the loss depended on, for ``TreeStep.find_cause``

    @property
    def chain_peak(self) -> int:
        """The most tokens of a rank whose activations were live at once."""
        return self.counts.chain_peak


def all_reduce_counts(
    step: StepInput, notice: int = 0, checksum: int | None = None
) -> tuple[StepCounts, int]:
    """Returns the counts of all ranks, and the largest notice of a rank. Ranks reduce them on the host.

    Args:
        notice: a number that all ranks learn, at no extra cost, before they run the step.
        checksum: the checksum of the step's groups (``TreeDataset.checksum``), which must be equal on all
            ranks, also at no extra cost. None: this rank has none.
    Raises:
        AgreedError: ranks have read different groups.
    """
    if not isinstance(step, StepInput):
        raise UserError(
            f"TreeStep.run: expected a StepInput, got {type(step).__name__}; pass what prepare returns"
        )
    counts = vars(step.counts)
    summed = [name for name in counts if name not in MAXIMA]
    sums = torch.tensor([counts[name] for name in summed], dtype=torch.float64)  # exact up to 2**53
    # The largest checksum and the smallest one; a rank without one changes neither.
    bounds = (NO_CHECKSUM, NO_CHECKSUM) if checksum is None else (checksum, -checksum)
    maxima = torch.tensor([*(counts[name] for name in MAXIMA), notice, *bounds])
    if world_size() > 1:
        dist.all_reduce(sums)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
    *largest_counts, notice, largest, smallest = maxima.tolist()
    if largest != -smallest and largest != NO_CHECKSUM:
        check_agreement({"the groups that they have read": checksum}, "data", error=AgreedError)
    values = dict(zip([*summed, *MAXIMA], [*sums.tolist(), *largest_counts], strict=True))
    return StepCounts(**{name: kind(values[name]) for name, kind in TYPES.items()}), notice


PrepareStep = Callable[[Sequence[Sequence[TokenTree]]], StepInput]  # ``prepare_step`` with its options


def prepare_step(
    micro_batches: Sequence[Sequence[TokenTree]],
    *,
    reduction: Reduction,
    costs: ModelCosts,
    needs_whole_paths: bool = False,
    partitioner: TreePartitioner | None = None,
    token_shard: TokenShard = ALL_TOKENS,
    merges_pairs: bool = False,
    targets: bool = False,
) -> StepInput:
    """Returns the input of a step from the trees of each micro-batch.

    It never communicates with other ranks and never touches a GPU, so worker processes can run it.

    Args:
        micro_batches: the trees of each micro-batch.
        reduction: the loss's reduction, which decides the normalizer.
        costs: the model's operations and bytes.
        needs_whole_paths: whether a token's loss depends on other tokens of its path.
        partitioner: splits micro-batches into partitions; with "auto", the default, only those that are too
            large. None runs each micro-batch in one forward pass.
        token_shard: the tokens of each forward pass that this rank computes. Ranks that share the tokens of
            a tree get the same trees.
        merges_pairs: whether one pair per edge is enough for the loss (``TreeLoss.merges_pairs``).
        targets: whether the loss reads the targets of teachers (``LossSpec.reads_targets``).
    """
    make_plan = one_pass if partitioner is None else partial(partitioner.plan, costs=costs)
    trees = list(chain.from_iterable(micro_batches))
    if reduction in COUNT_ONCE:
        for tree in trees:
            if any(path.edge_weight is None for path in tree.paths):  # it has no other pieces
                tree.weigh_edges()
    plans = [make_plan(TokenTree.forest(forest)) for forest in micro_batches]
    batches = [TreeBatch.from_plan(plan, "loss", merges_pairs, targets) for plan in plans]
    if token_shard.rank == 0:
        counts = StepCounts.of_plans(plans, batches, trees, reduction, costs)
    else:
        gateway_bytes = sum(map(costs.gateway_bytes, chain.from_iterable(batches)))
        counts = StepCounts(gateway_bytes=gateway_bytes)  # the first rank counts the rest
    chain_peak = max((int(plan.chain_tokens.max()) for plan in plans), default=0)
    versions = [
        int(path.policy_version.max())
        for plan in plans
        for path in plan.tree.paths
        if path.policy_version is not None
    ]
    return StepInput(
        micro_batches=[[token_shard.of(batch) for batch in partitions] for partitions in batches],
        unpartitioned=[
            TreeBatch.from_trees([dataclasses.replace(plan.tree, images=(), image_row=None)], edges="loss")
            if needs_whole_paths and (len(plan) > 1 or token_shard.num_ranks > 1)
            else None
            for plan in plans
        ],
        counts=dataclasses.replace(
            counts,
            max_micro_batches=len(plans),
            max_partitions=max(map(len, batches), default=0),
            chain_peak=-(-chain_peak // token_shard.num_ranks),
            newest_version=max(versions, default=-1),
        ),
        path_ids=tuple(tuple(path.id or "?" for path in plan.tree.paths) for plan in plans),
        tree_ids=tuple(tree.paths[0].id or "?" for tree in trees if tree.is_counted),
        micro_batch_sizes=tuple(map(_micro_batch_sizes, batches)),
    )


def _micro_batch_sizes(partitions: Sequence[TreeBatch]) -> tuple[int, ...]:
    """Returns the ``SIZES`` of all partitions together, and their number."""
    by_size = zip(*map(batch_sizes, partitions), strict=True)
    return (*map(sum, by_size), len(partitions))


def _weighted_sum(path: TokenPath, power: int) -> float:
    """Returns the sum of a power of the advantages, weighted as in the loss."""
    if path.advantage is None:
        return 0.0
    return path.weight * float(path.loss_mask[1:] @ path.advantage[1:].astype(np.float64) ** power)
