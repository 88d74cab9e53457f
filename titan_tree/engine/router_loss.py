"""Router losses over one optimizer step with any number of forward passes.

The load-balancing loss multiplies two means over a *balancing scope* (``RouterLoss.scope``): the global
batch, or one micro-batch. A forward pass that covers only a part of its scope does not know how often the
scope chose each expert. Count passes without gradients therefore run first. They are not needed if each rank
has one forward pass per scope. If the scope is the global batch, the choices are then summed over ranks
between the forward and the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titan_tree.components.moe.routing import RouterLoss, Routing
from titan_tree.distributed.collectives import all_reduce_sum
from titan_tree.models.tree_model import ModelOutput
from titan_tree.tree.batch import TreeBatch


class StepRouting:
    """Computes the router's loss of each forward pass, and sums up what the step routed.

    Args:
        router_loss: the loss and its balancing scope.
        micro_batches: this rank's, each with its partitions.
        all_tokens: tokens on the paths of the global batch.
        sequence_group: the ranks that share the tokens of each micro-batch.
    Attributes:
        loss: the router's loss on this rank so far, 0-dim fp32.
    """

    def __init__(
        self,
        router_loss: RouterLoss,
        micro_batches: Sequence[Sequence[TreeBatch]],
        all_tokens: int,
        device: torch.device,
        sequence_group: dist.ProcessGroup | None = None,
    ) -> None:
        self.router_loss, self.all_tokens = router_loss, all_tokens
        self.loss = torch.zeros((), device=device)
        self._is_global = router_loss.scope == "global_batch"
        self._sequence_group = sequence_group
        # Tokens on the paths of each micro-batch. All sums of a dummy batch are 0, so any divisor works.
        self._micro_batch_tokens = [
            sum(batch.n_logical for batch in batches) or 1 for batches in micro_batches
        ]
        self._counted: list[Tensor] = []  # choices of each micro-batch, [E]
        self._sums: Routing | None = None

    @staticmethod
    def needs_count(router_loss: RouterLoss, is_partitioned: bool, max_micro_batches: int) -> bool:
        """Returns whether the balance loss is on and its scope has several forward passes on one rank.

        All ranks must pass the same arguments.
        """
        is_global = router_loss.scope == "global_batch"
        return router_loss.balance > 0 and (is_partitioned or (is_global and max_micro_batches > 1))

    def count(self, outputs: Iterable[tuple[TreeBatch, ModelOutput]], is_last: bool) -> None:
        """Counts the experts that one micro-batch chose.

        If the scope is the global batch, the last call sums the counts over micro-batches and ranks.
        """
        choices = [out.routing.chosen.sum(0) for _, out in outputs if out.routing is not None]
        self._counted.append(torch.stack(choices).sum(0))
        if is_last and self._is_global:
            total = all_reduce_sum(torch.stack(self._counted).sum(0))
            self._counted = [total] * len(self._counted)
        elif not self._is_global:
            self._counted[-1] = self._over_scope(self._counted[-1])

    def add(self, routing: Routing) -> None:
        """Adds what one forward pass routed to the totals of the step."""
        detached = Routing(*map(Tensor.detach, routing))
        self._sums = detached if self._sums is None else Routing(*map(torch.add, self._sums, detached))

    def compute_loss(self, micro_batch: int, routing: Routing) -> Tensor:
        """Returns one forward pass's part of the router's loss, 0-dim."""
        if self._counted:
            choices = self._counted[micro_batch]
        else:
            choices = routing.chosen.sum(0)
            if self.router_loss.balance:
                choices = self._over_scope(choices)
        scope_tokens = self.all_tokens if self._is_global else self._micro_batch_tokens[micro_batch]
        loss = self.router_loss(routing, choices, scope_tokens, self.all_tokens)
        self.loss += loss.detach()
        return loss

    def _over_scope(self, choices: Tensor) -> Tensor:
        """Sums choices over the ranks whose tokens belong to the scope."""
        if self._is_global:
            return all_reduce_sum(choices)
        return choices if self._sequence_group is None else all_reduce_sum(choices, self._sequence_group)

    def total(self) -> Routing:
        """Returns the routing of the global batch, the same on every rank."""
        assert self._sums is not None
        return Routing(*map(all_reduce_sum, self._sums))
