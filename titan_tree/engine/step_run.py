"""The passes of one optimizer step on one rank.

    count    counts which experts each micro-batch chooses, for a balancing loss over several forward passes
    measure  computes a mean over the global batch that the loss depends on
    score    computes the log-probs of a partitioned micro-batch, for a loss of whole paths
    train    runs the forward passes, the loss and the backward passes

A step is the list that ``plan_passes`` returns. Each pass runs all partitions of one micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from titan_tree.components.moe.routing import router_metrics
from titan_tree.components.tree_loss.loss import GlobalStatistics, TreeLoss
from titan_tree.distributed.collectives import all_reduce_named, all_reduce_sum
from titan_tree.distributed.gradient_sync import GradientSync
from titan_tree.engine.activations import Activations
from titan_tree.engine.forward import Outputs, batches_for_loss, forward_passes, join_outputs
from titan_tree.engine.partitions import train_micro_batch
from titan_tree.engine.router_loss import StepRouting
from titan_tree.engine.step_io import GlobalSizes, StepInput, StepResult
from titan_tree.models.tree_model import ModelOutput, TreeModel
from titan_tree.tree.batch import TreeBatch

BatchLoss = Callable[[TreeBatch, ModelOutput], Tensor]  # the loss of a batch, from its log-probs
# A sweep over the partitions of a micro-batch: what it does, and the micro-batch's number.
Pass = tuple[Literal["count", "measure", "score", "train"], int]


def plan_passes(
    micro_batches: Sequence[Sequence[TreeBatch]], *, count: bool, measure: bool, score: bool
) -> list[Pass]:
    """Returns the passes of a step in order.

    Expert-parallel ranks need the same list, and get it from micro-batches of the same shape (schedule.py).

    Args:
        count: whether the router loss needs count passes.
        measure: whether the loss depends on a mean over several micro-batches.
        score: whether the loss needs whole paths, and so a score pass for every partitioned micro-batch.
    """
    numbers = range(len(micro_batches))
    passes: list[Pass] = [("count", i) for i in numbers if count]
    passes += [("measure", i) for i in numbers if measure]
    for i in numbers:
        if score and len(micro_batches[i]) > 1:
            passes.append(("score", i))
        passes.append(("train", i))
    return passes


def whole_path_loss(
    scores: ModelOutput,
    unpartitioned: TreeBatch,
    loss_function: Callable[[ModelOutput, TreeBatch], Tensor],
) -> BatchLoss:
    """Returns the loss of one partitioned micro-batch, as a weighted sum of the log-probs of its edges.

    In a loss of whole paths, a token's term depends on other tokens of its path (GSPO's sequence ratio), and
    a partition holds only parts of the paths. A score pass therefore computes the log-probs of all edges
    without gradients, and the loss of the whole micro-batch is differentiated with respect to them. In the
    train pass, the loss of a partition is the sum of its log-probs times these derivatives. The gradient is
    the same; the cost is one more forward pass.

    Args:
        scores: the scores of all edges, from ``join_outputs``.
        unpartitioned: the micro-batch as a single batch, on the same device.
        loss_function: maps scores and batch to the loss.
    Returns:
        A function of a partition's batch and output. It returns a 0-dim tensor. Its gradients, summed over
        all partitions, are those of the loss.
    """
    fields = {"logprobs": scores.logprobs, "entropy": scores.entropy}
    leaves = {name: score.requires_grad_() for name, score in fields.items() if score is not None}
    loss = loss_function(scores, unpartitioned)
    # A loss may use entropies for its metrics alone. They then have no derivative.
    gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
    named = zip(leaves, gradients, strict=True)
    derivatives = {name: gradient for name, gradient in named if gradient is not None}

    def partition_loss(batch: TreeBatch, out: ModelOutput) -> Tensor:
        if batch.is_dummy:
            return out.logprobs.sum() * 0.0
        terms = [(d[batch.edge_number] * getattr(out, name)).sum() for name, d in derivatives.items()]
        return torch.stack(terms).sum()

    return partition_loss


@dataclass(kw_only=True)
class StepRun:
    """Runs the passes of one step, and sums up the loss and its metrics.

    Args:
        step: this rank's part of the step.
        sizes: the sizes of all ranks.
        micro_batches: the micro-batches of ``step``, and those of dummies.
        routing: sums up what routers chose. None for a model without experts.
        sums_every_backward: whether every backward pass sums gradients over ranks (not possible with
            partitions), or only the last one.
    """

    model: TreeModel
    loss_function: TreeLoss
    step: StepInput
    sizes: GlobalSizes
    micro_batches: Sequence[Sequence[TreeBatch]]
    routing: StepRouting | None
    activations: Activations
    gradient_sync: GradientSync
    sums_every_backward: bool = False

    def __post_init__(self) -> None:
        # Tokens of score passes and recomputed activations, and of count passes, which TreeStep adds.
        self.extra_forward_tokens = 0
        self._device = self.activations.device
        self._statistics = GlobalStatistics(
            moments=self.sizes.counts.advantage_moments, newest_version=self.sizes.newest_version
        )
        self._loss = torch.zeros((), device=self._device)  # of this rank, without router losses
        self._loss_sums: dict[str, Tensor] = {}  # the sums that ``loss_function`` returns
        self._whole_path_losses: dict[int, BatchLoss] = {}  # by micro-batch
        self._measured = torch.zeros(2, dtype=torch.float64)

    def run(self, passes: Sequence[Pass]) -> None:
        """Runs ``passes`` in order."""
        for kind, i in passes:
            is_last = i == len(self.micro_batches) - 1
            if kind == "count":
                self.count(i, is_last)
            elif kind == "measure":
                self.measure(i, is_last)
            elif kind == "score":
                self.score(i)
            else:
                self.train(i, is_last)

    def count(self, i: int, is_last: bool) -> None:
        """Counts the choices of micro-batch ``i``, without the vocabulary projection."""
        assert self.routing is not None
        batches = [batch.without_edges() for batch in self.micro_batches[i]]
        self.routing.count(forward_passes(self.model, batches, self._device), is_last)

    def measure(self, i: int, is_last: bool) -> None:
        """Adds micro-batch ``i`` to the mean that the loss depends on. The last one sums it over ranks."""
        batches, loss = self.micro_batches[i], self.loss_function
        self.extra_forward_tokens += sum(map(len, batches))
        outputs, whole = self._outputs(batches), self._whole(i)
        for batch, scores in batches_for_loss(outputs, whole, self.model.execution.sequence_group):
            # Ranks that share the tokens have the same scores of whole micro-batches.
            if whole is None or self.model.token_shard.rank == 0:
                self._measured += loss.measure(scores.logprobs, batch).double().cpu()
        if is_last:
            measured = all_reduce_sum(self._measured.to(self._device))
            self._statistics = dataclasses.replace(self._statistics, measured=measured)

    def score(self, i: int) -> None:
        """Scores micro-batch ``i`` and differentiates its loss with respect to the log-probs."""
        batches = self.micro_batches[i]
        outputs = self._outputs(batches)
        self.extra_forward_tokens += sum(map(len, batches))
        # Only another rank's micro-batch is partitioned: run the same forward passes.
        if (whole := self._whole(i)) is None:
            for _ in outputs:
                pass
            return
        scores = join_outputs(outputs, len(whole.edge_label), self.model.execution.sequence_group)
        self._whole_path_losses[i] = whole_path_loss(scores, whole, self._add_whole_paths)

    def train(self, i: int, is_last: bool) -> None:
        """Runs forward and backward passes of micro-batch ``i``."""
        if not self.sizes.is_partitioned:
            self.gradient_sync.sum_in_backward(is_last or self.sums_every_backward)
        self.extra_forward_tokens += train_micro_batch(
            self.model,
            self.micro_batches[i],
            lambda batch, out: self._partition_loss(i, batch, out),
            self._device,
            entropy=self.loss_function.needs_entropy,
            activations=self.activations,
            before_last_backward=(
                self.gradient_sync.release if self.sizes.is_partitioned and is_last else None
            ),
        )
        self._whole_path_losses.pop(i, None)

    def result(self) -> StepResult:
        """Returns the result of the step over all ranks. Collective."""
        loss, sizes = self._loss, self.sizes
        dummy_forwards = sum(map(len, self.micro_batches)) - sum(map(len, self.step.micro_batches))
        costs = {"extra_forward_tokens": self.extra_forward_tokens, "dummy_forwards": dummy_forwards}
        cost_tensors = {name: torch.full_like(loss, value) for name, value in costs.items()}
        if self.routing is not None:
            loss = loss + self.routing.loss
        loss, sums = all_reduce_named(loss, self._loss_sums | cost_tensors)
        extra, dummies = (sums.pop(name) for name in costs)
        routing = None if self.routing is None else self.routing.total()
        return StepResult(
            loss=loss,
            loss_metrics=self.loss_function.finish_metrics(sums, self._statistics),
            statistics=self._statistics,
            routing=routing,
            router_metrics={} if routing is None else router_metrics(routing, sizes.counts.logical_tokens),
            counts=sizes.counts,
            extra_forward_tokens=extra,
            dummy_forwards=dummies,
            chain_peak=sizes.chain_peak,
        )

    def _partition_loss(self, i: int, batch: TreeBatch, out: ModelOutput) -> Tensor:
        """Returns the loss of one forward pass of micro-batch ``i``, router losses included."""
        if self.routing is not None:
            assert out.routing is not None
            self.routing.add(out.routing)
        loss = self._tree_loss(i, batch, out)
        if self.routing is not None and out.routing is not None and self.routing.router_loss:
            loss = loss + self.routing.compute_loss(i, out.routing)
        return loss

    def _tree_loss(self, i: int, batch: TreeBatch, out: ModelOutput) -> Tensor:
        if (partition_loss := self._whole_path_losses.get(i)) is not None:
            return partition_loss(batch, out)
        if (whole := self._whole(i)) is not None:  # other ranks have the rest of its tokens
            scores = join_outputs([(batch, out)], len(whole.edge_label), self.model.execution.sequence_group)
            return self._add_whole_paths(scores, whole)
        if batch.is_dummy or not len(batch.edge_label):
            return out.logprobs.sum() * 0.0  # the batch scores nothing, but its backward pass has collectives
        return self._add_loss(out, batch)

    def _whole(self, i: int) -> TreeBatch | None:
        """Returns micro-batch ``i`` as a single batch if the loss needs it, see ``StepInput``."""
        return self.step.whole(i, self._device)

    def _add_whole_paths(self, scores: ModelOutput, whole: TreeBatch) -> Tensor:
        """Computes the loss of a whole micro-batch. One of the ranks that share its tokens adds it up."""
        return self._add_loss(scores, whole, is_counted=self.model.token_shard.rank == 0)

    def _add_loss(self, scores: ModelOutput, batch: TreeBatch, is_counted: bool = True) -> Tensor:
        """Computes the loss of log-probs and entropies, adds it to the sums of this rank, and returns it.

        Args:
            is_counted: False if another rank adds the same loss to its sums.
        """
        normalizer = self.sizes.counts.normalizer
        loss, sums = self.loss_function(scores.logprobs, batch, normalizer, scores.entropy, self._statistics)
        if not is_counted:
            return loss
        self._loss += loss.detach()
        for name, value in sums.items():
            self._loss_sums[name] = self._loss_sums.get(name, 0.0) + value
        return loss

    def _outputs(self, batches: Sequence[TreeBatch]) -> Outputs:
        """Returns the outputs of forward passes without gradients, with the scores that the loss needs."""
        entropy = self.loss_function.needs_entropy
        return forward_passes(self.model, batches, self._device, entropy=entropy)
