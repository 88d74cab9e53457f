"""TreeStep: the forward and backward passes of one optimizer step on one rank.

    trees -> prepare (host) -> batches -> run (device): forward, loss, backward per batch -> StepResult

No optimizer, no data, no logging: a Trainer, another framework's training loop or a test can own those.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titan_tree.components.tree_loss import TreeLoss
from titan_tree.data.batch import TreeBatch
from titan_tree.data.paths import TokenPath
from titan_tree.data.tree import TokenTree
from titan_tree.errors import UserError
from titan_tree.models.qwen3 import Qwen3


@dataclass(frozen=True)
class StepCounts:
    """Sizes of an optimizer step: of one rank's share in ``StepInput``, of all ranks in ``StepResult``."""

    normalizer: float  # Z, the loss's divisor
    loss_weight: float  # sum of w_p m_{p,t}; 0: nothing to learn, though Z of path_mean may be positive
    num_trees: int
    num_paths: int
    logical_tokens: int  # training every path alone would run
    executed_tokens: int  # that are run
    scored_edges: int
    flops: float  # the model's own, forward and backward, without recomputation

    @property
    def por(self) -> float:
        """The share of the logical tokens that needed no computation."""
        return 1.0 - self.executed_tokens / self.logical_tokens


@dataclass(frozen=True)
class StepInput:
    """One rank's share of an optimizer step, on the host and ready to run."""

    batches: list[TreeBatch]  # one per micro-batch
    counts: StepCounts


@dataclass(frozen=True)
class StepResult:
    """Of all ranks together. Tensors lie on the device, and nothing has waited for them yet."""

    loss: Tensor  # 0-dim fp32
    metrics: dict[str, Tensor]  # the loss function's own, 0-dim: means over the tokens that the loss counts
    counts: StepCounts
    num_micro_batches: int  # of the rank with the most; every rank ran this many


class TreeStep:
    """Accumulates into ``parameter.grad`` the gradient of the loss over a global batch of trees.

    With FSDP2 all ranks must run the same sequence of forwards and backwards, so a rank with fewer
    micro-batches runs dummies that add exactly nothing.

    Args:
        model: one of titan_tree's, plain or parallelized.
        loss: see ``TreeLoss``.
        device: where the model is.
        reduce_gradients: with FSDP2, sum gradients over ranks after the "last" micro-batch only (keeps an
            unsharded fp32 gradient on each rank), or after "every" one.
    """

    def __init__(
        self,
        model: Qwen3,
        loss: TreeLoss,
        device: torch.device | str = "cpu",
        reduce_gradients: str = "last",
    ) -> None:
        self.model, self.loss = model, loss
        self.device = torch.device(device)
        self.reduce_gradients = reduce_gradients

    def prepare(self, micro_batches: Sequence[Sequence[TokenTree]]) -> StepInput:
        """Everything that the host does for a step; communicates nothing, so any thread may run ahead."""
        batches = [TreeBatch.from_trees(trees, edges="loss") for trees in micro_batches]
        paths = [path for trees in micro_batches for tree in trees for path in tree.paths]
        counts = StepCounts(
            normalizer=self.loss.normalizer(paths),
            loss_weight=float(sum(path.weight * path.loss_tokens for path in paths)),
            num_trees=sum(len(trees) for trees in micro_batches),
            num_paths=len(paths),
            logical_tokens=sum(batch.n_logical for batch in batches),
            executed_tokens=sum(len(batch) for batch in batches),
            scored_edges=sum(len(batch.edge_label) for batch in batches),
            flops=sum(self.model.training_flops(batch) for batch in batches),
        )
        if self.device.type == "cuda":
            batches = [batch.pin_memory() for batch in batches]  # so that ``run`` copies without waiting
        return StepInput(batches, counts)

    def run(self, step: StepInput) -> StepResult:
        """Forward and backward of all micro-batches. Gradients add to those that are there.

        Raises UserError where the loss counts no token of the global batch.
        """
        counts, num_micro_batches = _agree(step)
        if counts.loss_weight <= 0:
            raise UserError(
                "the loss counts no token of this step's global batch (all loss masks or weights are 0); "
                "check the data, or raise data.global_batch_groups"
            )

        loss = torch.zeros((), device=self.device)
        sums: dict[str, Tensor] = {}
        for i in range(num_micro_batches):
            self._set_gradient_sync(self.reduce_gradients == "every" or i == num_micro_batches - 1)
            if i >= len(step.batches):
                self._run_dummy()
                continue
            batch = step.batches[i].to(self.device, non_blocking=True)
            out = self.model(batch, entropy=self.loss.needs_entropy)
            scalar, own = self.loss(out.logprobs, batch, counts.normalizer, out.entropy)
            scalar.backward()
            loss += scalar.detach()
            for name, value in own.items():
                sums[name] = sums.get(name, 0.0) + value
        loss, sums = self._over_ranks(loss, sums)
        token_weight = sums.pop("token_weight")
        metrics = {name: value / token_weight for name, value in sums.items()}
        return StepResult(loss, metrics, counts, num_micro_batches)

    def _set_gradient_sync(self, sync: bool) -> None:
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(sync)

    def _run_dummy(self) -> None:
        """One edge whose log-prob counts nothing: takes part in the collectives, adds zero gradients."""
        batch = TreeBatch.from_trees([TokenTree.from_paths([TokenPath(np.zeros(2, np.int32))])])
        out = self.model(batch.to(self.device, non_blocking=True), entropy=self.loss.needs_entropy)
        (out.logprobs.sum() * 0.0).backward()

    def _over_ranks(self, loss: Tensor, sums: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Totals of all ranks, in one all-reduce. A rank that ran dummies only does not know the names."""
        if _world_size() == 1:
            return loss, sums
        names: list[list[str]] = [[]] * _world_size()
        dist.all_gather_object(names, list(sums))
        union = sorted({name for own in names for name in own})
        zero = torch.zeros_like(loss)
        total = torch.stack([loss, *(sums.get(name, zero).float() for name in union)])
        dist.all_reduce(total)
        return total[0], dict(zip(union, total[1:], strict=True))


def _agree(step: StepInput) -> tuple[StepCounts, int]:
    """Counts of all ranks together, and the micro-batches of the rank with the most. Host to host: no
    waiting for the device."""
    counts = torch.tensor(dataclasses.astuple(step.counts), dtype=torch.float64)  # exact up to 2**53
    most = torch.tensor(len(step.batches))
    if _world_size() > 1:
        dist.all_reduce(counts)
        dist.all_reduce(most, dist.ReduceOp.MAX)
    z, weight, trees, paths, logical, executed, edges, flops = counts.tolist()
    sizes = StepCounts(z, weight, int(trees), int(paths), int(logical), int(executed), int(edges), flops)
    return sizes, int(most)


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1
