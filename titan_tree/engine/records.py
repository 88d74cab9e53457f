"""What goes into an optimizer step, and what comes out of it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from titan_tree.components.moe import Routing
from titan_tree.tree.batch import TreeBatch


@dataclass(frozen=True)
class StepCounts:
    """Sizes of an optimizer step: of one rank's share in ``StepInput``, of all ranks in ``StepResult``."""

    normalizer: float  # Z, the loss's divisor
    loss_weight: float  # sum of w_p m_{p,t}; 0: nothing to learn, though Z of path_mean may be positive
    num_trees: int
    num_paths: int
    logical_tokens: int  # N_flat: training every path alone would run
    distinct_tokens: int  # N_tree
    executed_tokens: int  # N_part: more than the distinct ones where partitions share tokens
    scored_edges: int
    forwards: int  # one per micro-batch, or more where it is cut into partitions
    gateway_bytes: int  # keys, values and states that partitions read from those above them
    flops: float  # the model's own, forward and backward, without recomputation
    # Rows (a token in a layer, data/replay.py) whose experts are forced_experts, and those on which paths disagree.
    replayed_rows: int
    disagreeing_rows: int

    @property
    def por(self) -> float:
        """The share of the logical tokens that are copies."""
        return 1.0 - self.distinct_tokens / self.logical_tokens

    @property
    def err(self) -> float:
        """The share of the logical tokens that was not computed; ``por`` where nothing runs twice."""
        return 1.0 - self.executed_tokens / self.logical_tokens

    @property
    def duplicates(self) -> float:
        """Tokens that ran again, as a share of the distinct ones."""
        return self.executed_tokens / self.distinct_tokens - 1.0


@dataclass(frozen=True)
class StepInput:
    """One rank's share of an optimizer step, on the host and ready to run."""

    micro_batches: list[list[TreeBatch]]  # of each the partitions, or a single batch
    whole: list[TreeBatch | None]  # of each all of it, where the loss needs whole paths and it is cut
    counts: StepCounts
    chain_peak: int  # most tokens whose activations are alive at once


@dataclass(frozen=True)
class StepResult:
    """Of all ranks together. Tensors lie on the device, and nothing has waited for them yet."""

    loss: Tensor  # 0-dim fp32, with the router's
    metrics: dict[str, Tensor]  # the loss function's own, 0-dim: means over the tokens that the loss counts
    routing: Routing | None  # None without experts
    router_metrics: dict[str, Tensor]  # of components/moe, {} without experts
    counts: StepCounts
    # Forwards that ran again: to recompute activations, to score first what a loss of whole paths needs, or
    # to count first how experts are chosen in a pool of several forwards.
    extra_forward_tokens: Tensor
    dummy_forwards: Tensor  # that ranks ran so that others could run theirs
    chain_peak: int  # of the rank with the most
    num_micro_batches: int  # of the rank with the most


def all_reduce_counts(step: StepInput) -> tuple[StepCounts, int, int, int]:
    """Counts of all ranks together, and of the rank with the most micro-batches, partitions of one, and
    tokens of a chain. Host to host: no waiting for the device."""
    counts = torch.tensor(dataclasses.astuple(step.counts), dtype=torch.float64)  # exact up to 2**53
    partitions = max(map(len, step.micro_batches), default=0)
    most = torch.tensor([len(step.micro_batches), partitions, step.chain_peak])
    if world_size() > 1:
        dist.all_reduce(counts)
        dist.all_reduce(most, dist.ReduceOp.MAX)
    fields = dataclasses.fields(StepCounts)
    values = (
        value if f.type == "float" else int(value) for f, value in zip(fields, counts.tolist(), strict=True)
    )
    num_micro_batches, num_partitions, chain_peak = most.tolist()
    return StepCounts(*values), num_micro_batches, num_partitions, chain_peak


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
