"""RouterStep: the losses of the router over one optimizer step, whatever forwards it consists of.

A forward that is not all of its pool (``RouterLoss``) does not know which experts the pool chose. So these
choices are counted first, by a round of all forwards without gradients and without the vocabulary. Not needed
where a rank has one forward per pool: then ranks add up what that one chose, before its backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titan_tree.components.moe import RouterLoss, Routing
from titan_tree.engine.partitions import run_partitions
from titan_tree.engine.records import world_size
from titan_tree.models.decoder import Decoder, ModelOutput
from titan_tree.tree.batch import TreeBatch

Use = Callable[[int, TreeBatch, ModelOutput], Tensor]  # see ``run_partitions``


class RouterStep:
    """Adds the router's losses to those of micro-batches, and keeps count of what was routed.

    Args:
        all_tokens: tokens on paths of the global batch.
    Attributes:
        loss: what was added on this rank, 0-dim fp32.
    """

    def __init__(self, router_loss: RouterLoss, all_tokens: int, device: torch.device) -> None:
        self.router_loss, self.all_tokens = router_loss, all_tokens
        self.loss = torch.zeros((), device=device)
        self._global = router_loss.scope == "global_batch"
        self._chosen: Tensor | None = None  # [micro-batches, E], of the pool of each
        self._sums: Routing | None = None

    def must_count(self, nested: bool, num_micro_batches: int) -> bool:
        """Whether pools have several forwards of a rank. Given the same on all ranks, the same on all.

        nested: micro-batches are cut into partitions.
        """
        return self.router_loss.balance > 0 and (nested or (self._global and num_micro_batches > 1))

    @torch.no_grad()
    def count(self, model: Decoder, micro_batches: Sequence[Sequence[TreeBatch]]) -> None:
        """Runs all forwards of all micro-batches, as each rank must."""
        rows: list[Tensor] = []
        for batches in micro_batches:
            chosen: list[Tensor] = []

            def keep(number: int, batch: TreeBatch, out: ModelOutput, chosen: list[Tensor] = chosen) -> None:
                assert out.routing is not None
                chosen.append(out.routing.chosen.sum(0))

            run_partitions(model, [batch.without_edges() for batch in batches], self.loss.device, keep)
            rows.append(torch.stack(chosen).sum(0))
        self._chosen = torch.stack(rows)
        if self._global:
            self._chosen = _over_ranks(self._chosen.sum(0)).expand_as(self._chosen)

    def added_to(self, use: Use, micro_batch: int, batches: Sequence[TreeBatch]) -> Use:
        """``use`` of a micro-batch, by its number among this rank's, with the router's losses added."""
        pool_tokens = self.all_tokens
        if not self._global:
            pool_tokens = sum(batch.n_logical for batch in batches) or 1  # of a dummy all sums are 0

        def added(number: int, batch: TreeBatch, out: ModelOutput) -> Tensor:
            routing = out.routing
            assert routing is not None
            detached = Routing(*map(Tensor.detach, routing))
            self._sums = detached if self._sums is None else Routing(*map(torch.add, self._sums, detached))
            loss = use(number, batch, out)
            if not self.router_loss:
                return loss
            if self._chosen is not None:
                chosen = self._chosen[micro_batch]
            else:
                chosen = routing.chosen.sum(0)
                chosen = _over_ranks(chosen) if self._global and self.router_loss.balance else chosen
            own = self.router_loss(routing, chosen, pool_tokens, self.all_tokens)
            self.loss += own.detach()
            return loss + own

        return added

    def total(self) -> Routing:
        """Of the global batch, on each rank."""
        assert self._sums is not None
        return Routing(*map(_over_ranks, self._sums))


def _over_ranks(values: Tensor) -> Tensor:
    """The sum."""
    if world_size() == 1:
        return values
    total = values.clone()
    dist.all_reduce(total)
    return total
