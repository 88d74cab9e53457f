"""The input and the result of an optimizer step, with their sizes."""

from __future__ import annotations

import dataclasses
import operator
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_tree.components.moe import Routing
from titan_tree.components.tree_loss import GlobalStatistics
from titan_tree.distributed.collectives import world_size
from titan_tree.errors import UserError
from titan_tree.tree.batch import TreeBatch


@dataclass(frozen=True)
class StepCounts:
    """Sizes of an optimizer step: of one rank's share in ``StepInput``, of all ranks in ``StepResult``."""

    normalizer: float  # Z, the loss's divisor
    # Sum of w_p m_{p,t}. If it is 0, there is nothing to learn, even if Z of path_mean is positive.
    loss_weight: float
    advantage: float  # sum of w_p m_{p,t} A_{p,t}; 0 without advantages
    advantage_square: float  # the same of A²
    num_trees: int
    num_paths: int
    logical_tokens: int  # N_flat: tokens that training on every path alone would run
    distinct_tokens: int  # N_tree
    executed_tokens: int  # N_part: larger than N_tree if partitions or pieces repeat shared tokens
    split_tokens: int  # tokens that pieces of trees repeat, see balance/splitting.py
    scored_edges: int
    forwards: int  # one per micro-batch, or one per partition of it
    gateway_bytes: int  # keys, values and states that partitions read from their ancestors
    flops: float  # the model's own operations, forward and backward, without recomputation
    # A token-layer is one token in one layer with experts (tree/routed_experts.py).
    replayed_token_layers: int  # token-layers with recorded experts
    disagreeing_token_layers: int  # those among them on which paths recorded different experts

    def __add__(self, other: StepCounts) -> StepCounts:
        return StepCounts(*map(operator.add, dataclasses.astuple(self), dataclasses.astuple(other)))

    @property
    def advantage_moments(self) -> tuple[float, float, float]:
        """The sums of w_p m_{p,t} times 1, A and A²."""
        return self.loss_weight, self.advantage, self.advantage_square

    @property
    def por(self) -> float:
        """The potential overlap ratio 1 - N_tree / N_flat."""
        return 1.0 - self.distinct_tokens / self.logical_tokens

    @property
    def err(self) -> float:
        """The effective reuse ratio 1 - N_part / N_flat. It equals ``por`` if no token runs twice."""
        return 1.0 - self.executed_tokens / self.logical_tokens

    @property
    def duplicates(self) -> float:
        """Tokens that partitions repeat, as a fraction of those that they get."""
        return self.executed_tokens / (self.distinct_tokens + self.split_tokens) - 1.0


NO_COUNTS = StepCounts(*(0 for _ in dataclasses.fields(StepCounts)))


@dataclass(frozen=True)
class StepInput:
    """One rank's share of an optimizer step, on the host and ready to run."""

    micro_batches: list[list[TreeBatch]]  # each with its partitions, or a single batch
    # One entry per micro-batch: None, or the micro-batch as a single batch if the loss needs whole paths and
    # the micro-batch is partitioned, or other ranks have some of its tokens.
    unpartitioned: list[TreeBatch | None]
    counts: StepCounts
    chain_peak: int  # the most tokens whose activations are live at once
    newest_version: int = -1  # the newest policy that sampled a token (TokenPath.policy_version); -1: unknown
    path_ids: tuple[tuple[str, ...], ...] = ()  # of each micro-batch's paths; "?" for a path without an id
    tree_ids: tuple[str, ...] = ()  # of the first path of each tree
    # For each micro-batch, the sum of its batches' ``batch_sizes`` (tree/costs.py), and their number.
    sizes: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def nothing(cls) -> StepInput:
        """Returns the input of a rank without trees."""
        return cls([], [], NO_COUNTS, chain_peak=0)

    def pin_memory(self) -> StepInput:
        """Returns the input in page-locked memory, from which a GPU copies without waiting. Needs CUDA."""
        return dataclasses.replace(
            self,
            micro_batches=[[batch.pin_memory() for batch in batches] for batches in self.micro_batches],
            unpartitioned=[None if batch is None else batch.pin_memory() for batch in self.unpartitioned],
        )


@dataclass(frozen=True)
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
    chain_peak: int  # maximum over ranks
    num_micro_batches: int  # maximum over ranks
    statistics: GlobalStatistics | None = None  # what the loss depended on, for ``TreeStep.find_cause``


class GlobalSizes(NamedTuple):
    """The sizes over all ranks that every rank knows before a step starts."""

    counts: StepCounts  # summed over ranks
    max_micro_batches: int
    max_partitions: int  # of one micro-batch
    chain_peak: int
    newest_version: int
    notice: int  # the largest one that a rank gave, see ``all_reduce_counts``

    @property
    def is_partitioned(self) -> bool:
        """Whether any micro-batch of any rank has several partitions."""
        return self.max_partitions > 1


def all_reduce_counts(step: StepInput, notice: int = 0) -> GlobalSizes:
    """Sums the counts of all ranks and takes the maxima of the other sizes, on the host.

    Args:
        notice: a number that all ranks learn, at no extra cost, before they run the step.
    """
    if not isinstance(step, StepInput):
        raise UserError(
            f"TreeStep.run: expected a StepInput, got {type(step).__name__}; pass what prepare returns"
        )
    counts = torch.tensor(dataclasses.astuple(step.counts), dtype=torch.float64)  # exact up to 2**53
    max_partitions = max(map(len, step.micro_batches), default=0)
    maxima = torch.tensor(
        [len(step.micro_batches), max_partitions, step.chain_peak, step.newest_version, notice]
    )
    if world_size() > 1:
        dist.all_reduce(counts)
        dist.all_reduce(maxima, dist.ReduceOp.MAX)
    fields = dataclasses.fields(StepCounts)
    values = (
        value if f.type == "float" else int(value) for f, value in zip(fields, counts.tolist(), strict=True)
    )
    return GlobalSizes(StepCounts(*values), *maxima.tolist())
