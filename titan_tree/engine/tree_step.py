"""TreeStep: the forward and backward passes of one optimizer step on one rank.

    trees -> prepare (host): partition, pack -> run (device): passes over the micro-batches -> StepResult

    count    counts which experts each micro-batch chooses, for a balancing loss over several forward passes
    measure  computes a mean over the global batch that the loss depends on
    score    computes the log-probs of a partitioned micro-batch, for a loss of whole paths
    train    runs the forward passes, the loss and the backward passes

Each pass runs all partitions of one micro-batch. Expert-parallel ranks need the same passes, and get them
from micro-batches of the same shape (schedule.py).

TreeStep has no optimizer, data or logging. Those belong to the training loop, which can be the Trainer's,
another framework's or your own.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titan_tree.components.moe.routing import RouterLoss, router_metrics
from titan_tree.components.tree_loss.loss import GlobalStatistics, TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.distributed.collectives import all_reduce_named, all_reduce_sum, world_size
from titan_tree.distributed.gradient_sync import GradientSync, cast_weights
from titan_tree.engine.activations import Activations
from titan_tree.engine.bad_steps import BadStepError, find_cause
from titan_tree.engine.forward import Outputs, batches_for_loss, evaluate, forward_passes, scored_batches
from titan_tree.engine.losses import LossSum, MicroBatchLoss, RouterLossSum
from titan_tree.engine.partitions import train_micro_batch
from titan_tree.engine.schedule import equal_schedule
from titan_tree.engine.step_io import (
    PrepareStep,
    StepCounts,
    StepInput,
    StepResult,
    all_reduce_counts,
    prepare_step,
)
from titan_tree.engine.warm_up import warm_up_inputs
from titan_tree.errors import AgreedError, UserError, require_list
from titan_tree.models.tree_model import TreeModel
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import ModelLimits
from titan_tree.tree.token_tree import TokenTree

logger = logging.getLogger(__name__)


class TreeStep:
    """Accumulates the gradient of the loss over a global batch of trees into ``parameter.grad``.

    FSDP2 gathers all weights in the first forward pass of a step, and sums gradients in the last backward
    pass; or it does both for every micro-batch, see ``reduce_gradients``. All ranks run equally many forward
    passes if there are no partitions: ranks with fewer micro-batches run dummy batches, whose loss is zero.
    With partitions, ranks run different numbers of passes. Expert-parallel ranks communicate in every pass,
    so their schedules are made equal (schedule.py). Sequence-parallel ranks run the same trees, and so the
    same passes.

    Args:
        model: a titan_tree model, plain or parallelized.
        loss: the loss, see ``TreeLoss``.
        device: the device of the model.
        partitioner: splits micro-batches into partitions. None runs each micro-batch in one forward pass.
        activations: stores the activations of suspended partitions. None keeps them on the device.
        reduce_gradients: when FSDP2 sums gradients over ranks. After the "last" micro-batch, which keeps
            unsharded weights, and fp32 gradients, on each rank during the step. Or after "every" one, which
            frees the weights after each forward and backward pass; not possible with partitions.
        router_loss: the router losses of a model with experts. None adds none.
    Raises:
        UserError: there is a router_loss without experts, or expert-parallel ranks would offload activations.
    """

    def __init__(
        self,
        model: TreeModel,
        loss: TreeLoss,
        device: torch.device | str = "cpu",
        partitioner: TreePartitioner | None = None,
        activations: Activations | None = None,
        reduce_gradients: str = "last",
        router_loss: RouterLoss | None = None,
    ) -> None:
        self.router_loss = router_loss or RouterLoss()
        if self.router_loss and model.experts is None:
            raise UserError(
                "router_loss: expected a model with experts, such as qwen3_moe, but this model has none; set "
                "router_loss.balance and router_loss.z to 0"
            )
        self.model, self.loss, self.partitioner = model, loss, partitioner
        self.device = torch.device(device)
        self.activations = activations or Activations(self.device)
        if model.communicates:
            self.activations.check_lockstep()
        self.reduce_gradients = reduce_gradients
        self._gradient_sync = GradientSync(model)
        self._has_warned = False

    def preparer(self) -> PrepareStep:
        """Returns the function that makes step inputs. It can be pickled and run in another process."""
        return partial(
            prepare_step,
            reduction=self.loss.reduction,
            needs_whole_paths=self.loss.spec.needs_whole_paths,
            costs=self.model.costs(),
            partitioner=self.partitioner,
            token_shard=self.model.token_shard,
            merges_pairs=self.loss.merges_pairs,
            targets=self.loss.spec.reads_targets,
        )

    def prepare(self, micro_batches: Sequence[Sequence[TokenTree]]) -> StepInput:
        """Partitions and packs the trees of each micro-batch on the host.

        It does not communicate with other ranks, so a thread may run it ahead of the step.

        Raises:
            UserError: something else than lists of trees, a path for which the model is not exact, or a
                token id or an image that it cannot read.
        """
        hint = "pass [[tree, ...], ...], a list of trees for each micro-batch"
        require_list(micro_batches, Sequence, "TreeStep.prepare", hint)
        images = self.model.image_limits._replace(token_id=None)  # a policy may sample any id
        limits = ModelLimits(self.model.longest_path, self.model.config.vocab_size, images=images)
        for trees in micro_batches:
            require_list(trees, TokenTree, "TreeStep.prepare", hint)
            for tree in trees:
                for path in tree.paths:
                    path.check_limits(limits)
        step = self.preparer()(micro_batches)
        return step.pin_memory() if self.device.type == "cuda" else step

    def run(self, step: StepInput, sizes: StepCounts | None = None) -> StepResult:
        """Runs the forward and backward passes of all micro-batches. Gradients add to those already present.

        Args:
            step: this rank's part of the step.
            sizes: the counts of all ranks, if the caller has called ``all_reduce_counts`` already.
        Raises:
            BadStepError: if the loss counts no token of the global batch. No pass has run then.
            UserError: if ``step`` is not a StepInput, or if the GPU runs out of memory. Discard the gradients
                in that case.
        """
        total = sizes or all_reduce_counts(step)[0]
        self._check(total)
        micro_batches = self._schedule(step, total)
        routing, group = None, self.model.execution.sequence_group
        if self.model.experts:
            num_tokens = total.logical_tokens
            routing = RouterLossSum(self.router_loss, micro_batches, num_tokens, self.device, group)
        statistics = GlobalStatistics(moments=total.advantage_moments, newest_version=total.newest_version)
        losses = LossSum(self.loss, total.normalizer, statistics, self.device)
        extra_tokens = 0  # of forward passes besides those of the train passes
        self._gradient_sync.hold(self._is_held(total))
        with _out_of_memory_as_user_error(total), cast_weights(self.model):
            if RouterLossSum.needs_count(self.router_loss, total.is_partitioned, total.max_micro_batches):
                assert routing is not None
                self._count(micro_batches, routing)
                extra_tokens += step.counts.executed_tokens
            if self.loss.measurement is not None and (total.max_micro_batches > 1 or world_size() > 1):
                measured = self._measure(step, micro_batches)
                losses.statistics = dataclasses.replace(statistics, measured=measured)
                extra_tokens += sum(len(batch) for batches in micro_batches for batch in batches)
            for i, batches in enumerate(micro_batches):
                loss = MicroBatchLoss(losses, i, step.whole(i), routing, group)
                if self.loss.spec.needs_whole_paths and len(batches) > 1:
                    loss.score(self._scores(batches))
                    extra_tokens += sum(map(len, batches))
                extra_tokens += self._train(batches, loss, total, is_last=i == len(micro_batches) - 1)
        if self.model.visual is not None:
            # Optimizers treat a step without images alike on one rank and on ranks that share the tower.
            for weight in self.model.visual.parameters():
                if weight.requires_grad and weight.grad is None:
                    weight.grad = torch.zeros_like(weight)
        dummy_forwards = sum(map(len, micro_batches)) - sum(map(len, step.micro_batches))
        return self._result(total, losses, routing, extra_tokens, dummy_forwards)

    def warm_up(self, num_tokens: int, replay: bool = False, evaluates: bool = False) -> None:
        """Runs all kinds of passes on two random trees, so that a compiled model compiles its graphs now.

        Weights and gradients stay unchanged. Call it before the first step, on every rank.

        Args:
            num_tokens: tokens of both trees, approximately. The compiler chooses kernels for this size.
            replay: whether steps will replay recorded experts.
            evaluates: whether ``evaluate`` will be called, or partitions will drop their activations.
        """
        experts = self.model.experts.sizes if replay and self.model.experts else None
        is_partitioned = self._may_partition and self.partitioner is not None
        vocab_size = self.model.config.vocab_size
        inputs = warm_up_inputs(self.preparer(), num_tokens, vocab_size, is_partitioned, experts)
        for step in inputs:
            self.run(step)
        if evaluates:
            self.evaluate(inputs)
        for parameter in self.model.parameters():
            parameter.grad = None

    def evaluate(self, steps: Iterable[StepInput]) -> dict[str, float]:
        """Scores held-out trees, see ``forward.evaluate``."""
        self._gradient_sync.hold(False)  # the last step may have left gathered weights in place
        return evaluate(self.model, steps, self.device)

    def score(self, step: StepInput) -> list[tuple[TreeBatch, dict[str, Tensor]]]:
        """Returns each micro-batch as a single batch on the device, with the scores of its edges.

        The scores are "logprobs" and, if the loss needs it, "entropy", [E] fp32 each, in nats, without
        gradients. The loss must need whole paths. Call it on every rank.
        """
        self._gradient_sync.hold(False)
        with torch.no_grad(), cast_weights(self.model):
            scored = scored_batches(self.model, step, self.device, entropy=self.loss.needs_entropy)
            return [
                (
                    batch,
                    {"logprobs": out.logprobs} | ({} if out.entropy is None else {"entropy": out.entropy}),
                )
                for _, batch, out in scored
            ]

    def find_cause(self, step: StepInput, statistics: GlobalStatistics | None = None) -> str:
        """Names the paths that made the loss or the gradient of ``step`` not finite.

        See ``bad_steps.find_cause``. Call it on every rank, before the weights change.

        Args:
            statistics: ``StepResult.statistics`` of the step. None: each batch has its own.
        """
        self._gradient_sync.hold(False)
        return find_cause(self.model, self.loss, step, self.device, statistics)

    def _count(self, micro_batches: Sequence[Sequence[TreeBatch]], routing: RouterLossSum) -> None:
        """Counts the experts that the micro-batches choose, without the vocabulary projection."""
        for i, batches in enumerate(micro_batches):
            without_edges = [batch.without_edges() for batch in batches]
            outputs = forward_passes(self.model, without_edges, self.device)
            routing.count(outputs, is_last=i == len(micro_batches) - 1)

    def _measure(self, step: StepInput, micro_batches: Sequence[Sequence[TreeBatch]]) -> Tensor:
        """Returns the sums of the mean that the loss depends on, over micro-batches and ranks."""
        measured = torch.zeros(2, dtype=torch.float64)
        for i, batches in enumerate(micro_batches):
            whole = step.whole(i, self.device)
            outputs = self._scores(batches)
            for batch, scores in batches_for_loss(outputs, whole, self.model.execution.sequence_group):
                # Ranks that share the tokens have the same scores of whole micro-batches.
                if whole is None or self.model.token_shard.rank == 0:
                    measured += self.loss.measure(scores.logprobs, batch).double().cpu()
        return all_reduce_sum(measured.to(self.device))

    def _scores(self, batches: Sequence[TreeBatch]) -> Outputs:
        """Returns the outputs of a micro-batch without gradients, with the scores that the loss needs."""
        return forward_passes(self.model, batches, self.device, entropy=self.loss.needs_entropy)

    def _is_held(self, total: StepCounts) -> bool:
        """Returns whether FSDP2 communicates once per step."""
        return total.is_partitioned or self.reduce_gradients == "last"

    def _train(
        self, batches: Sequence[TreeBatch], loss: MicroBatchLoss, total: StepCounts, is_last: bool
    ) -> int:
        """Runs the forward and backward passes of a micro-batch. Returns the number of recomputed tokens."""
        return train_micro_batch(
            self.model,
            batches,
            loss.loss,
            self.device,
            entropy=self.loss.needs_entropy,
            activations=self.activations,
            before_last_backward=self._gradient_sync.release if is_last and self._is_held(total) else None,
        )

    def _result(
        self,
        total: StepCounts,
        losses: LossSum,
        routing: RouterLossSum | None,
        extra_tokens: int,
        dummy_forwards: int,
    ) -> StepResult:
        """Returns the result of the step over all ranks. Collective."""
        loss = losses.loss if routing is None else losses.loss + routing.loss
        costs = {"extra_forward_tokens": extra_tokens, "dummy_forwards": dummy_forwards}
        cost_tensors = {name: torch.full_like(loss, value) for name, value in costs.items()}
        loss, sums = all_reduce_named(loss, losses.metrics | cost_tensors)
        extra, dummies = (sums.pop(name) for name in costs)
        routed = None if routing is None else routing.total()
        return StepResult(
            loss=loss,
            loss_metrics=self.loss.finish_metrics(sums, losses.statistics),
            statistics=losses.statistics,
            routing=routed,
            router_metrics={} if routed is None else router_metrics(routed, total.logical_tokens),
            counts=total,
            extra_forward_tokens=extra,
            dummy_forwards=dummies,
        )

    @property
    def _may_partition(self) -> bool:
        """Whether steps may contain partitions. FSDP2 then sums gradients after the last backward pass."""
        return self.reduce_gradients == "last" or not isinstance(self.model.root, FSDPModule)

    def _schedule(self, step: StepInput, total: StepCounts) -> list[list[TreeBatch]]:
        """Returns this rank's micro-batches, with dummy batches if FSDP2 or expert parallelism needs them."""
        lockstep = self.model.experts.group if self.model.experts else None
        min_micro_batches = total.max_micro_batches
        if total.is_partitioned and lockstep is None:
            min_micro_batches = 1  # ranks may differ, but each needs one pass for the collectives of FSDP2
        return equal_schedule(
            step.micro_batches,
            lockstep,
            min_micro_batches=min_micro_batches,
            token_shard=self.model.token_shard,
        )

    def _check(self, total: StepCounts) -> None:
        if total.loss_weight <= 0:
            raise BadStepError(
                "the loss counts no token of this step's global batch, because all loss masks or weights "
                "are 0; check the data, or raise data.global_batch_groups"
            )
        if total.is_partitioned and not self._may_partition:
            raise AgreedError(
                "parallel.reduce_gradients: expected 'last' if trees are partitioned (one micro-batch has "
                f"{total.max_partitions} partitions), got {self.reduce_gradients!r}; set it to 'last', or "
                "raise data.max_tokens"
            )
        if total.duplicates > 0.01 and not self._has_warned:
            logger.warning(
                "partitions repeat %.1f %% of the tokens (%s instead of %s); partition.strategy = "
                "'redundancy_free' runs each token once",
                100 * total.duplicates,
                f"{total.executed_tokens:,}",
                f"{total.distinct_tokens + total.split_tokens:,}",
            )
            self._has_warned = True


@contextmanager
def _out_of_memory_as_user_error(total: StepCounts) -> Iterator[None]:
    """Turns an out-of-memory error into a UserError that says which setting to lower."""
    message = ""
    try:
        yield
    except torch.OutOfMemoryError as error:
        message = str(error).splitlines()[0]
    # Raise outside of the handler: the caught exception would keep the partitions' tensors alive.
    if message:
        budget = (
            "data.max_tokens or partition.max_chain_tokens" if total.is_partitioned else "data.max_tokens"
        )
        raise UserError(
            f"the GPU is out of memory with the activations of {total.chain_peak:,} tokens; lower {budget}, "
            f"or set training.activation_checkpoint ({message})"
        )
