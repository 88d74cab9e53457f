"""The losses of a step: their sums on one rank, and the loss of one micro-batch.

A forward pass of a micro-batch adds its part of the loss in one of three ways:

    plain              the loss of the tokens of the forward pass itself
    score, then train  a loss of whole paths, such as GSPO, whose micro-batch is partitioned: a score pass
                       differentiates the loss of the whole micro-batch with respect to all log-probs; the
                       loss of a partition is the sum of its log-probs times these derivatives
    shared tokens      a loss of whole paths under sequence parallelism: the ranks join their log-probs

Routers have losses of their own. The load-balancing loss multiplies two means over a *balancing scope*
(``RouterLoss.scope``): the global batch, or one micro-batch. A forward pass that covers only a part of its
scope does not know how often the scope chose each expert. Count passes without gradients therefore run first.
They are not needed if each rank has one forward pass per scope. If the scope is the global batch, the choices
are then summed over ranks between the forward and the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titan_tree.components.moe.routing import RouterLoss, Routing
from titan_tree.components.tree_loss.loss import GlobalStatistics, TreeLoss
from titan_tree.distributed.collectives import all_reduce_sum
from titan_tree.engine.forward import join_outputs
from titan_tree.models.tree_model import ModelOutput
from titan_tree.tree.batch import TreeBatch


class LossSum:
    """The loss of a step on this rank so far, without router losses, and the sums of its metrics.

    Args:
        function: the loss.
        normalizer: Z of the global batch.
        statistics: statistics of the global batch. A measure pass replaces them before the first loss.
        device: the device of the model.
    Attributes:
        loss: 0-dim fp32.
        metrics: the sums that ``function`` returns, 0-dim, by name.
    """

    def __init__(
        self, function: TreeLoss, normalizer: float, statistics: GlobalStatistics, device: torch.device
    ) -> None:
        self.function, self.normalizer, self.statistics = function, normalizer, statistics
        self.loss = torch.zeros((), device=device)
        self.metrics: dict[str, Tensor] = {}

    def add(self, scores: ModelOutput, batch: TreeBatch, is_counted: bool = True) -> Tensor:
        """Adds the loss of a batch from its log-probs and entropies, and returns it.

        Args:
            is_counted: False if another rank adds the same loss, so that this one only returns it.
        """
        batch = batch.with_target_logprobs(scores.target_logprobs)
        loss, sums = self.function(scores.logprobs, batch, self.normalizer, scores.entropy, self.statistics)
        if is_counted:
            self.loss += loss.detach()
            for name, value in sums.items():
                self.metrics[name] = self.metrics.get(name, 0.0) + value
        return loss


class RouterLossSum:
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


class MicroBatchLoss:
    """The loss of one micro-batch: ``loss`` returns the part of each forward pass, in the train pass.

    Args:
        total: sums the losses of the step.
        number: the number of the micro-batch.
        whole: the micro-batch as a single batch on the host, if the loss needs it, see ``StepInput``.
        routing: adds the router losses of a model with experts, and sums up what it routed. None: no experts.
        group: the ranks that share the tokens. None: this rank has all of them.
    """

    def __init__(
        self,
        total: LossSum,
        number: int,
        whole: TreeBatch | None,
        routing: RouterLossSum | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.total, self.number, self.whole, self.routing, self.group = total, number, whole, routing, group
        self._derivatives: dict[str, Tensor] | None = None  # by the name of a score, [E] each

    def score(self, outputs: Iterable[tuple[TreeBatch, ModelOutput]]) -> None:
        """Differentiates the loss of the whole micro-batch with respect to the scores of its edges.

        In a loss of whole paths, a token's term depends on other tokens of its path, of which a partition
        holds only a part. With these derivatives, the gradient is the same, at the cost of one forward pass.

        Args:
            outputs: of all partitions, without gradients. All of them run, because ranks may communicate in
                each, also if only other ranks' micro-batches are partitioned.
        """
        if self.whole is None:
            for _ in outputs:
                pass
            return
        scores = join_outputs(outputs, len(self.whole.edge_label), self.group)
        fields = {"logprobs": scores.logprobs, "entropy": scores.entropy}
        leaves = {name: score.requires_grad_() for name, score in fields.items() if score is not None}
        loss = self._of_whole(scores)
        # A loss may use entropies for its metrics alone. They then have no derivative.
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        named = zip(leaves, gradients, strict=True)
        self._derivatives = {name: gradient for name, gradient in named if gradient is not None}

    def loss(self, batch: TreeBatch, out: ModelOutput) -> Tensor:
        """Returns the part of one forward pass, 0-dim, router losses included.

        Its gradients, summed over the forward passes of the micro-batch, are those of the loss.
        """
        if self.routing is None:
            return self._without_router(batch, out)
        assert out.routing is not None
        self.routing.add(out.routing)
        loss = self._without_router(batch, out)
        return (
            loss + self.routing.compute_loss(self.number, out.routing) if self.routing.router_loss else loss
        )

    def _without_router(self, batch: TreeBatch, out: ModelOutput) -> Tensor:
        if not batch.is_dummy:
            if self._derivatives is not None:
                derivatives = self._derivatives.items()
                terms = [(d[batch.edge_number] * getattr(out, name)).sum() for name, d in derivatives]
                return torch.stack(terms).sum()
            if self.whole is not None:
                return self._of_whole(join_outputs([(batch, out)], len(self.whole.edge_label), self.group))
            if len(batch.edge_label):
                return self.total.add(out, batch)
        return out.logprobs.sum() * 0.0  # nothing is scored, but the backward pass has collectives

    def _of_whole(self, scores: ModelOutput) -> Tensor:
        """Adds the loss of the whole micro-batch. One of the ranks that share its tokens counts it."""
        assert self.whole is not None
        whole = self.whole.to(scores.logprobs.device, non_blocking=True)
        return self.total.add(scores, whole, is_counted=self.group is None or self.group.rank() == 0)
