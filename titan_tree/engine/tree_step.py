"""TreeStep: the forward and backward passes of one optimizer step on one rank.

    trees -> prepare (host): plan, batches -> run (device): forward, loss, backward per batch -> StepResult

A micro-batch that is larger than memory is cut into partitions, run one inside of another (``gateways``).

No optimizer, no data, no logging: a Trainer, another framework's training loop or a test can own those.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from titan_tree.components.moe import RouterLoss, router_metrics
from titan_tree.components.tree_loss import TreeLoss
from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.distributed.parallelize import cast_weights
from titan_tree.engine.activations import Activations
from titan_tree.engine.lockstep import dummy, in_lockstep
from titan_tree.engine.partitions import run_partitions, score_partitions
from titan_tree.engine.records import StepCounts, StepInput, StepResult, all_reduce_counts, world_size
from titan_tree.engine.router_loss import RouterStep, Use
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder, ModelOutput
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.partition import one_pass
from titan_tree.tree.token_tree import TokenTree

logger = logging.getLogger(__name__)


class TreeStep:
    """Accumulates into ``parameter.grad`` the gradient of the loss over a global batch of trees.

    With FSDP2 ranks whose schedules differ must not communicate within them. Without partitions all ranks
    run the same sequence, a rank with fewer micro-batches dummies that add exactly nothing. With partitions
    all parameters are gathered in the first forward, and gradients summed over ranks in the last backward.
    Ranks that share out experts communicate in every forward and backward: they run in lockstep.

    Args:
        model: one of titan_tree's, plain or parallelized.
        loss: see ``TreeLoss``.
        device: where the model is.
        partitioner: cuts micro-batches into partitions; None: each runs in one forward, whatever its size.
        activations: where those of partitions that wait for others are kept; None: on the device.
        reduce_gradients: with FSDP2, sum gradients over ranks after the "last" micro-batch only (keeps an
            unsharded fp32 gradient on each rank), or after "every" one, which partitions cannot.
        reshard_after_forward: what FSDP2 does where there are no partitions.
        router_loss: of a model with experts; None: none.
    Raises:
        UserError: a router_loss of a model without experts; activations that may move where ranks share out
            experts.
    """

    def __init__(
        self,
        model: Decoder,
        loss: TreeLoss,
        device: torch.device | str = "cpu",
        partitioner: TreePartitioner | None = None,
        activations: Activations | None = None,
        reduce_gradients: str = "last",
        reshard_after_forward: bool = True,
        router_loss: RouterLoss | None = None,
    ) -> None:
        self.router_loss = router_loss or RouterLoss()
        if self.router_loss and model.experts is None:
            raise UserError(
                "router_loss: expected a model with experts, such as qwen3_moe; this one has none: set "
                "balance and z to 0"
            )
        self.model, self.loss, self.partitioner = model, loss, partitioner
        self.device = torch.device(device)
        self.activations = activations or Activations(self.device)
        if model.experts and model.experts.group and self.activations.may_offload():
            raise UserError(
                "partition.activations: expected 'keep' or 'recompute' with parallel.expert_parallel (ranks "
                "must run alike, and experts' weights would move too); set it, or unset partition.device_gb"
            )
        self.reduce_gradients = reduce_gradients
        self.reshard_after_forward = reshard_after_forward
        self._warned = False

    def prepare(self, micro_batches: Sequence[Sequence[TokenTree]]) -> StepInput:
        """Everything that the host does for a step; communicates nothing, so any thread may run ahead."""
        plan = one_pass if self.partitioner is None else self.partitioner.plan
        plans = [plan(TokenTree.forest(trees)) for trees in micro_batches]
        batches = [TreeBatch.from_plan(plan, edges="loss") for plan in plans]
        paths = [path for plan in plans for path in plan.tree.paths]
        every = [batch for partitions in batches for batch in partitions]
        recorded = [plan.tree.records for plan in plans if plan.tree.records is not None]
        counts = StepCounts(
            normalizer=self.loss.normalizer(paths),
            loss_weight=float(sum(path.weight * path.loss_tokens for path in paths)),
            num_trees=sum(len(trees) for trees in micro_batches),
            num_paths=len(paths),
            logical_tokens=sum(batch.n_logical for batch in every),
            distinct_tokens=sum(len(plan.tree) for plan in plans),
            executed_tokens=sum(map(len, every)),
            scored_edges=sum(len(batch.edge_label) for batch in every),
            forwards=len(every),
            gateway_bytes=sum(self.model.gateway_bytes(batch) for batch in every),
            flops=sum(self.model.training_flops(batch) for batch in every),
            replayed_rows=sum(records.num_rows for records in recorded),
            disagreeing_rows=sum(records.num_disagreeing for records in recorded),
        )
        whole = [
            TreeBatch.from_trees([plan.tree], edges="loss")
            if len(plan) > 1 and self.loss.needs_whole_paths
            else None
            for plan in plans
        ]
        if self.device.type == "cuda":  # so that ``run`` copies without waiting
            batches = [[batch.pin_memory() for batch in partitions] for partitions in batches]
            whole = [None if batch is None else batch.pin_memory() for batch in whole]
        chain_peak = max((int(plan.chain_tokens.max()) for plan in plans), default=0)
        return StepInput(batches, whole, counts, chain_peak)

    def run(self, step: StepInput) -> StepResult:
        """Forward and backward of all micro-batches. Gradients add to those that are there.

        Raises UserError where the loss counts no token of the global batch, and where a GPU's memory does
        not suffice; gradients are not to be used then.
        """
        counts, num_micro_batches, num_partitions, chain_peak = all_reduce_counts(step)
        self._check(counts, num_partitions)
        total = _Total(self.loss, counts.normalizer, torch.zeros((), device=self.device))
        nested = num_partitions > 1
        routing = None
        if self.model.experts:
            routing = RouterStep(self.router_loss, counts.logical_tokens, self.device)
        out_of_memory = ""
        try:
            with cast_weights(self.model):
                self._run_micro_batches(step, nested, num_micro_batches, total, routing)
        except torch.OutOfMemoryError as error:
            out_of_memory = str(error).splitlines()[0]
        if out_of_memory:  # outside of the handler, whose exception holds the partitions' tensors
            budget = "data.max_tokens or partition.max_chain_tokens" if nested else "data.max_tokens"
            raise UserError(
                f"the GPU's memory does not hold the activations of {chain_peak:,} tokens; lower {budget}, "
                f"or set training.activation_checkpoint ({out_of_memory})"
            )
        costs = {
            name: torch.full_like(total.loss, getattr(total, name))
            for name in ("extra_forward_tokens", "dummy_forwards")
        }
        if routing is not None:
            total.loss += routing.loss
        loss, sums = self._over_ranks(total.loss, total.sums | costs)
        token_weight, extra, dummies = (sums.pop(name) for name in ("token_weight", *costs))
        metrics = {name: value / token_weight for name, value in sums.items()}
        routed = None if routing is None else routing.total()
        of_router = {} if routed is None else router_metrics(routed, counts.logical_tokens)
        return StepResult(
            loss, metrics, routed, of_router, counts, extra, dummies, chain_peak, num_micro_batches
        )

    def _run_micro_batches(
        self, step: StepInput, nested: bool, most: int, total: _Total, routing: RouterStep | None
    ) -> None:
        """nested: some rank has partitions. most: micro-batches of the rank with the most."""
        experts = self.model.experts
        if experts and experts.group:
            micro_batches = in_lockstep(step.micro_batches, most, experts.group)
        else:
            micro_batches = list(step.micro_batches)
            num_runs = max(len(micro_batches), 1) if nested else most
            micro_batches += [[dummy()]] * (num_runs - len(micro_batches))
        total.dummy_forwards = sum(map(len, micro_batches)) - sum(map(len, step.micro_batches))
        self._hold_parameters(nested)
        if routing is not None and routing.must_count(nested, most):
            routing.count(self.model, micro_batches)
            total.extra_forward_tokens += step.counts.executed_tokens
        for i, batches in enumerate(micro_batches):
            last = i == len(micro_batches) - 1
            if not nested:
                self._sum_gradients(last or self.reduce_gradients == "every")
            whole = step.whole[i] if i < len(step.whole) else None
            use: Use = total.add
            if whole is not None:
                use = self._surrogate(batches, whole, total)
            elif self.loss.needs_whole_paths and len(batches) > 1:  # in lockstep with a rank that has one
                with torch.no_grad():
                    total.extra_forward_tokens += sum(map(len, batches))
                    run_partitions(self.model, batches, self.device, _ignore, entropy=self.loss.needs_entropy)
            if routing is not None:
                use = routing.added_to(use, i, batches)
            again = run_partitions(
                self.model,
                batches,
                self.device,
                use,
                entropy=self.loss.needs_entropy,
                before_last=self._release_parameters if nested and last else None,
                activations=self.activations,
            )
            total.extra_forward_tokens += again  # not around the call: the surrogate adds its own

    def _surrogate(self, batches: Sequence[TreeBatch], whole: TreeBatch, total: _Total) -> Use:
        """Losses of partitions whose gradients add up to that of a loss of whole paths.

        All partitions are scored without gradients; the loss is differentiated with respect to these
        log-probs; a partition's loss is its log-probs weighted by these derivatives: the same first-order
        gradient, and one more forward.
        """
        total.extra_forward_tokens += sum(map(len, batches))
        scores = score_partitions(self.model, batches, self.device, self.loss.needs_entropy)[1:]
        named = zip(("logprobs", "entropy"), scores, strict=True)
        values = {name: score.requires_grad_() for name, score in named if score is not None}
        whole = whole.to(self.device, non_blocking=True)
        loss = total.of(values["logprobs"], whole, values.get("entropy"))
        derivatives = dict(zip(values, torch.autograd.grad(loss, list(values.values())), strict=True))

        def weighted(number: int, batch: TreeBatch, out: ModelOutput) -> Tensor:
            if batch.is_dummy:
                return out.logprobs.sum() * 0.0
            at = torch.searchsorted(whole.edge_token, batch.edge_token)
            terms = [(d[at] * getattr(out, name)).sum() for name, d in derivatives.items()]
            return torch.stack(terms).sum()

        return weighted

    def _check(self, counts: StepCounts, num_partitions: int) -> None:
        if counts.loss_weight <= 0:
            raise UserError(
                "the loss counts no token of this step's global batch (all loss masks or weights are 0); "
                "check the data, or raise data.global_batch_groups"
            )
        if num_partitions > 1 and isinstance(self.model, FSDPModule) and self.reduce_gradients != "last":
            raise UserError(
                f"parallel.reduce_gradients: expected 'last' where a tree is cut into partitions ("
                f"{num_partitions} of one micro-batch), got {self.reduce_gradients!r}; set it, or raise "
                "data.max_tokens"
            )
        if counts.duplicates > 0.01 and not self._warned:
            logger.warning(
                "partitions run %.1f %% of the tokens again (%s instead of %s); partition.strategy = "
                "'redundancy_free' runs each once",
                100 * counts.duplicates,
                f"{counts.executed_tokens:,}",
                f"{counts.distinct_tokens:,}",
            )
            self._warned = True

    def _sum_gradients(self, sync: bool) -> None:
        """Whether FSDP2 sums gradients over ranks in the backwards to come."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(sync)

    def _hold_parameters(self, hold: bool) -> None:
        """Whether FSDP2 keeps what it gathers, and sums nothing, until ``_release_parameters``."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(not hold)
            self.model.set_reshard_after_backward(not hold)
            self.model.set_is_last_backward(not hold)
            for block in self.model.get_submodule("layers").children():
                assert isinstance(block, FSDPModule)
                block.set_reshard_after_forward(self.reshard_after_forward and not hold)

    def _release_parameters(self) -> None:
        """The backward to come is the rank's last: sum gradients in it, and free what was gathered."""
        if isinstance(self.model, FSDPModule):
            self.model.set_requires_gradient_sync(True)
            self.model.set_reshard_after_backward(True)
            self.model.set_is_last_backward(True)

    def _over_ranks(self, loss: Tensor, sums: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Totals of all ranks, in one all-reduce. A rank that ran dummies only does not know the names."""
        if world_size() == 1:
            return loss, sums
        names: list[list[str]] = [[]] * world_size()
        dist.all_gather_object(names, list(sums))
        union = sorted({name for own in names for name in own})
        zero = torch.zeros_like(loss)
        total = torch.stack([loss, *(sums.get(name, zero).float() for name in union)])
        dist.all_reduce(total)
        return total[0], dict(zip(union, total[1:], strict=True))


@dataclass
class _Total:
    """The loss and its metrics, summed over partitions and micro-batches."""

    function: TreeLoss
    normalizer: float
    loss: Tensor
    sums: dict[str, Tensor] = field(default_factory=dict)
    extra_forward_tokens: int = 0
    dummy_forwards: int = 0

    def add(self, number: int, batch: TreeBatch, out: ModelOutput) -> Tensor:
        """The loss to differentiate: 0 of a batch that scores nothing, but takes part in collectives."""
        if batch.is_dummy or not len(batch.edge_label):
            return out.logprobs.sum() * 0.0
        return self.of(out.logprobs, batch, out.entropy)

    def of(self, logprobs: Tensor, batch: TreeBatch, entropy: Tensor | None) -> Tensor:
        loss, own = self.function(logprobs, batch, self.normalizer, entropy)
        self.loss += loss.detach()
        for name, value in own.items():
            self.sums[name] = self.sums.get(name, 0.0) + value
        return loss


def _ignore(number: int, batch: TreeBatch, out: ModelOutput) -> None:
    """Of a forward that others need."""
