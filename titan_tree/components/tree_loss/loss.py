"""TreeLoss: reduces a loss of single sequences over the paths of a global batch.

A loss maps the log-probs of a sequence's tokens to one number per token. TreeLoss gathers the log-probs of
shared edges to the F (edge, path) pairs of a batch (``PathPairs``), where the tokens of each path are
contiguous and in order. It applies the loss there, and autograd scatters the gradients back onto the shared
edges. For token t of path p with loss l_{p,t}, path weight w_p, loss mask m_{p,t} and c_{p,t} = w_p m_{p,t}:

    L = (1 / Z) sum_p sum_t c_{p,t} l_{p,t}

    path_mean        Z = sum_p w_p               token losses are summed over a path, then paths are averaged
    token_mean       Z = sum_p sum_t c_{p,t}     all counted tokens are averaged
    path_token_mean  Z = sum_p w_p, and c_{p,t} is divided by sum_t m_{p,t}:
                                                 tokens of a path are averaged, then paths are averaged
    rollout_token_mean  c_{p,t} is divided by r_p, the sum of m over all paths of p's rollout, and
                     Z = sum_p sum_t c_{p,t}:
                                 tokens of a rollout are averaged, then rollouts are averaged
    distinct_token_mean  c_{p,t} is divided by its sum over all paths through the token's edge, and
                     Z = sum_p sum_t c_{p,t}, the number of counted edges:
                                 all distinct counted tokens are averaged (the default of Prompt Trees)
    first_path_token_mean  c_{p,t} is 0 unless p is the first path that counts the edge, and
                     Z = sum_p sum_t c_{p,t}:
                                 as token_mean, but the first path owns a shared token (as in prime-rl)

Within one step, path_mean and token_mean differ only by the constant Z: all counted tokens weigh the same.
path_token_mean gives every path the same weight, and rollout_token_mean every rollout, however many paths
(turns) and tokens it has. The last two count a token once, however many paths share it. They need what
``TokenTree.weigh_edges`` sets.

Sums run over the *global* batch, that is, over all micro-batches and ranks of an optimizer step. Z is known
before the first backward pass, so the losses of micro-batches and ranks add up to L. Tree Training
(arXiv:2511.00413) uses path_mean; scattering the gradients yields its per-token weights.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from titan_tree.components.tree_loss.corrections import KLPenalty, RolloutCorrection
from titan_tree.components.tree_loss.ratios import field, kl_estimate
from titan_tree.components.tree_loss.settings import LOSSES, LossFunction, Reduction
from titan_tree.components.tree_loss.spec import COUNT_ONCE, LossSpec, Measurement, call_loss
from titan_tree.errors import UserError
from titan_tree.tree.batch import PathPairs, TreeBatch
from titan_tree.tree.paths import TokenPath

MIN_DIVISOR = 1e-30  # of weights that are 0
# Sums of c, c A and c A² over a batch, with c = w_p m_{p,t} and the advantages A
Moments = tuple[float | Tensor, float | Tensor, float | Tensor]


def register_loss(
    name: str, whole_paths: bool = False, reference: bool = False
) -> Callable[[LossFunction], LossFunction]:
    """Returns a decorator that registers a loss for ``TreeLoss(name)`` and the setting ``loss.name``.

    The function is called as ``loss(logprobs [F], pairs, **options)`` and returns losses [F].

    Args:
        name: name of the loss.
        whole_paths: whether a token's loss depends on other tokens of its path, or on other paths of its
            tree. If a tree is partitioned, all partitions are then scored before the loss is computed.
        reference: whether the loss reads ref_logprobs. In reinforcement learning, the reference model then
            scores rollouts.
    """

    def register(function: LossFunction) -> LossFunction:
        needs = LossSpec.from_function(function)
        spec = dataclasses.replace(
            needs,
            needs_whole_paths=needs.needs_whole_paths or whole_paths,
            compares_paths=needs.compares_paths or whole_paths,
            reads_reference=needs.reads_reference or reference,
        )
        LOSSES.register(name, spec)
        return function

    return register


def normalizer(reduction: Reduction, paths: Iterable[TokenPath]) -> float:
    """Returns the contribution of ``paths`` to Z, the divisor of the loss."""
    if reduction == "token_mean":
        return float(sum(path.weight * path.loss_tokens for path in paths))
    if reduction == "rollout_token_mean":
        return float(sum(path.weight * path.rollout_share for path in paths))
    if reduction in COUNT_ONCE:
        return float(sum(path.weight * _once_tokens(reduction, path) for path in paths))
    return float(sum(path.weight for path in paths))


def _once_tokens(reduction: Reduction, path: TokenPath) -> float:
    """Returns the sum of a path's c_{p,t} / w_p for a reduction of ``COUNT_ONCE``."""
    if path.edge_weight is None or path.is_first is None:
        raise UserError(
            f"loss.reduction: {reduction!r} needs the edge weights of path {path.id or '?'}, which are "
            "missing; call weigh_edges() of the path's tree"
        )
    mask = path.loss_mask[1:].astype(np.float64)
    if reduction == "first_path_token_mean":
        return float(mask @ path.is_first[1:])
    return float((mask / path.edge_weight[1:].clip(MIN_DIVISOR)).sum())


@dataclass(frozen=True, kw_only=True)
class GlobalStatistics:
    """Statistics of the global batch on which losses and metrics depend, besides the normalizer.

    A loss that is called without them takes its own batch for the global one.
    """

    moments: Moments | None = None  # sums over advantages, for ``whiten``
    measured: Tensor | None = None  # the sum of ``TreeLoss.measure`` over all batches and ranks
    newest_version: int = -1  # the newest policy; -1: unknown


class TreeLoss:
    """A registered loss, reduced over the paths of a global batch.

    Args:
        name: a name in ``LOSSES``, or one given to ``register_loss``.
        reduction: how token losses are added up, see the module's docstring; None: that of the loss, or
            "path_mean" if the loss has none of its own.
        entropy: coefficient of an entropy bonus: ``entropy * H`` is subtracted from every token's loss.
        kl: a penalty for diverging from a reference policy; None: no penalty.
        correction: weights for the mismatch of rollout_logprobs and old_logprobs; None: all weights are 1.
        whiten: normalize advantages over the tokens of the global batch: subtract their mean and divide by
            their standard deviation (TreePO, arXiv:2508.17445; REINFORCE++, arXiv:2501.03262).
        sequence: what has one ratio, in losses of whole paths and in the correction: a "path", or all paths
            of a "rollout", which must then be in one micro-batch.
        options: keyword arguments of the loss function.

    Raises:
        UserError: the name, the reduction or an option does not exist, or they do not go together.
    """

    def __init__(
        self,
        name: str = "sft",
        reduction: Reduction | None = None,
        entropy: float = 0.0,
        kl: KLPenalty | None = None,
        correction: RolloutCorrection | None = None,
        whiten: bool = False,
        sequence: Literal["path", "rollout"] = "path",
        **options: float,
    ) -> None:
        self.spec, self.sequence = LossSpec.of(name), sequence
        self.name, self.entropy, self.options = name, entropy, options
        self.reduction: Reduction = reduction or self.spec.reduction or "path_mean"
        self.kl, self.correction, self.whiten = kl, correction, whiten
        _check(self)
        if sequence == "rollout":
            self.spec = dataclasses.replace(self.spec, needs_whole_paths=True, compares_paths=True)

    @property
    def needs_reference(self) -> bool:
        """Whether the paths need ref_logprobs."""
        return self.kl is not None or self.spec.reads_reference

    @property
    def reads_rollout(self) -> bool:
        """Whether the loss compares old_logprobs with rollout_logprobs."""
        return self.correction is not None or self.spec.corrects_rollout

    @property
    def needs_entropy(self) -> bool:
        """Whether ``__call__`` needs the entropies of the model's predictions."""
        return self.entropy != 0.0

    @property
    def merges_pairs(self) -> bool:
        """Whether one pair per edge is enough, because only the sum of w_p m_{p,t} over its paths counts."""
        return not self.spec.reads_pairs and self.reduction in (
            "path_mean",
            "token_mean",
            "distinct_token_mean",
        )

    @property
    def measurement(self) -> Measurement | None:
        """The mean over the global batch that the loss depends on, or None."""
        measurement = self.spec.measurement
        return None if measurement is None or measurement.option in self.options else measurement

    @torch.no_grad()
    def measure(self, logprobs: Tensor, batch: TreeBatch) -> Tensor:
        """Returns [2]: the batch's contributions to the sum and to the number of members of the mean."""
        assert self.measurement is not None
        return self.measurement.sums(self._by_pair(logprobs, batch.pairs), batch.pairs)

    def normalizer(self, paths: Iterable[TokenPath]) -> float:
        """Returns these paths' contribution to Z. Sum it over all paths of the global batch."""
        return normalizer(self.reduction, paths)

    def __call__(
        self,
        logprobs: Tensor,
        batch: TreeBatch,
        normalizer: float,
        entropy: Tensor | None = None,
        statistics: GlobalStatistics | None = None,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Computes this batch's contribution to the global batch's loss.

        Args:
            logprobs: [E] fp32, nats: log-probs of the batch's edges.
            batch: the batch that was scored.
            normalizer: Z of the global batch, > 0.
            entropy: [E] fp32, nats: required if ``needs_entropy``, otherwise only a metric.
            statistics: statistics of the global batch. None: ``batch`` is the global batch.

        Returns:
            The loss, an fp32 scalar, and a dict of detached scalars. Each metric is a sum over pairs,
            weighted by w_p m_{p,t}; "token_weight" is the sum of these weights. All of them add up over
            batches and ranks. ``finish_metrics`` makes means of the totals.

        Raises:
            UserError: ``logprobs`` are not those of ``batch``, ``normalizer`` is not positive, the paths lack
                a field that the loss needs, or the loss function returns something else than [F] losses.
        """
        if not isinstance(batch, TreeBatch) or logprobs.shape != batch.edge_label.shape:
            raise UserError(
                f"loss: expected the log-probs of a TreeBatch, got shape {list(logprobs.shape)} and a "
                f"{type(batch).__name__} of {len(getattr(batch, 'edge_label', ()))} edges; pass "
                "model(batch).logprobs and batch"
            )
        pairs = batch.pairs
        if not normalizer > 0:
            raise UserError(
                f"loss: nothing to train on: the weights of the global batch sum to {normalizer}; "
                "check loss masks and path weights"
            )
        token_weight = pairs.weight[pairs.path] * pairs.loss_mask
        coefficient = self._coefficient(token_weight, pairs)
        losses, metrics = self._losses(
            self._by_pair(logprobs, pairs), pairs, entropy, statistics or GlobalStatistics()
        )
        # What is not counted may be infinite, and 0 * inf is NaN.
        loss = torch.where(coefficient > 0, coefficient * losses, 0.0).sum() / normalizer
        sums = {
            name: torch.where(token_weight > 0, token_weight * value.detach(), 0.0).sum()
            for name, value in metrics.items()
        }
        return loss, sums | {"token_weight": token_weight.sum()}

    def finish_metrics(
        self, sums: dict[str, Tensor], statistics: GlobalStatistics | None = None
    ) -> dict[str, Tensor]:
        """Returns the metrics of a step: means over the counted tokens of the global batch.

        Args:
            sums: the metrics of all calls, summed over all batches and ranks.
            statistics: statistics of the global batch, for the metric policy_lag.
        """
        means = {name: value / sums["token_weight"] for name, value in sums.items() if name != "token_weight"}
        if statistics is not None and "policy_version" in means:
            means["policy_lag"] = statistics.newest_version - means["policy_version"]
        return means if self.correction is None else self.correction.finish_metrics(means)

    @torch.enable_grad()
    def not_finite(
        self,
        logprobs: Tensor,
        batch: TreeBatch,
        entropy: Tensor | None = None,
        statistics: GlobalStatistics | None = None,
    ) -> Tensor:
        """Returns [F] bool: the counted pairs with a loss, or a derivative by a log-prob, that is not finite.

        Args:
            logprobs: see ``__call__``; without gradients.
            batch: see ``__call__``.
            entropy: see ``__call__``.
            statistics: see ``__call__``.
        """
        pairs = batch.pairs
        is_counted = (pairs.weight[pairs.path] > 0) & (pairs.loss_mask > 0)
        leaves = [self._by_pair(logprobs, pairs).requires_grad_()]
        if pairs.targets is not None and pairs.targets.student is not None:
            leaves.append(pairs.targets.student.detach().requires_grad_())
            pairs = dataclasses.replace(pairs, targets=dataclasses.replace(pairs.targets, student=leaves[1]))
        losses, _ = self._losses(leaves[0], pairs, entropy, statistics or GlobalStatistics())
        losses = torch.where(is_counted, losses, 0.0)
        derivative, *others = torch.autograd.grad(losses.sum(), leaves, materialize_grads=True)
        is_finite = losses.isfinite() & derivative.isfinite()
        if pairs.targets is not None and others:
            is_finite[pairs.targets.pair[~others[0].isfinite()]] = False
        return is_counted & ~is_finite

    def _coefficient(self, token_weight: Tensor, pairs: PathPairs) -> Tensor:
        """Returns c_{p,t} of each pair, [F], from w_p m_{p,t}."""
        if self.reduction == "first_path_token_mean":
            return token_weight * field(pairs, "is_first")
        if self.reduction == "distinct_token_mean":
            return token_weight / field(pairs, "edge_weight").clamp_min(MIN_DIVISOR)
        if self.reduction == "path_token_mean":
            return token_weight / pairs.loss_tokens.clamp_min(MIN_DIVISOR)[pairs.path]
        if self.reduction == "rollout_token_mean":
            return token_weight / pairs.rollout_tokens.clamp_min(MIN_DIVISOR)[pairs.path]
        return token_weight

    def _by_pair(self, logprobs: Tensor, pairs: PathPairs) -> Tensor:
        """Returns the log-prob of each pair, [F]; 0 where the mask is 0, as old and reference log-probs are.

        The ratio is then 1 there, and no gradient flows back. The log-prob is also 0 where the path's weight
        is 0, unless the loss needs whole paths.
        """
        is_counted = pairs.loss_mask > 0
        if not self.spec.needs_whole_paths:  # otherwise, the loss of another path may depend on this path
            is_counted = is_counted & (pairs.weight[pairs.path] > 0)
        return torch.where(is_counted, logprobs[pairs.edge], 0.0)

    def _losses(
        self,
        path_logprobs: Tensor,
        pairs: PathPairs,
        entropy: Tensor | None,
        statistics: GlobalStatistics,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the losses and the metrics of all pairs, [F] each."""
        losses, metrics = self._policy_losses(path_logprobs, pairs, statistics)
        if self.kl and not self.kl.as_reward:
            metrics["ref_kl"] = self.kl.estimate(path_logprobs, pairs)
            losses = losses + self.kl.coefficient * metrics["ref_kl"]
        metrics["nll"] = -path_logprobs
        recorded = {"old_nll": pairs.old_logprobs, "rollout_nll": pairs.rollout_logprobs}
        metrics |= {name: -values for name, values in recorded.items() if values is not None}
        if pairs.old_logprobs is not None and pairs.rollout_logprobs is not None:
            metrics["rollout_kl"] = kl_estimate("k3", pairs.rollout_logprobs - pairs.old_logprobs)
        if pairs.policy_version is not None:
            metrics["policy_version"] = pairs.policy_version
        if entropy is not None:
            metrics["entropy"] = entropy[pairs.edge]
        if self.needs_entropy:
            if entropy is None:
                raise ValueError(
                    "TreeLoss: entropy != 0 needs the model's entropy: call model(batch, entropy=True)"
                )
            losses = losses - self.entropy * metrics["entropy"]
        return losses, metrics

    def _policy_losses(
        self, path_logprobs: Tensor, pairs: PathPairs, statistics: GlobalStatistics
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the losses and the metrics of the loss function, corrected for rollout mismatch."""
        extra = {}
        if self.whiten:
            pairs = whitened(pairs, statistics.moments)
        options: dict[str, float | Tensor] = dict(self.options)
        if measurement := self.measurement:
            sums = statistics.measured
            if sums is None:
                sums = measurement.sums(path_logprobs.detach(), pairs)
            options[measurement.option] = measurement.mean(sums)
        if self.kl and self.kl.as_reward:
            pairs, extra["ref_kl"] = self.kl.penalize_rewards(pairs)
        if self.sequence == "rollout":
            pairs = by_rollout(pairs)
        if self.correction is None:
            losses, metrics = call_loss(self.name, self.spec.function, path_logprobs, pairs, options)
            return losses, metrics | extra
        weight, weight_metrics = self.correction.weights(pairs)
        # The ratio of a dropped token may overflow, and 0 * inf is NaN. In a path that keeps its weight, the
        # ratio of a whole path needs the gradients of all tokens.
        if not (self.spec.needs_whole_paths and self.correction.level == "token"):
            path_logprobs = torch.where(weight > 0, path_logprobs, path_logprobs.detach())
        losses, metrics = call_loss(self.name, self.spec.function, path_logprobs, pairs, options)
        losses = torch.where(weight > 0, weight * losses, 0.0)
        return losses, metrics | extra | weight_metrics


def _check(loss: TreeLoss) -> None:
    """Raises UserError for arguments that do not exist or do not go together."""
    if loss.reduction not in get_args(Reduction):
        raise UserError(
            f"loss.reduction: expected one of {', '.join(get_args(Reduction))}, got {loss.reduction!r}"
        )
    known = list(inspect.signature(loss.spec.function).parameters)[2:]
    if unknown := [option for option in loss.options if option not in known]:
        raise UserError(
            f"loss {loss.name!r}: unknown option {unknown[0]!r} (known: {', '.join(known) or 'none'})"
        )
    if loss.spec.reduction not in (None, loss.reduction):
        raise UserError(
            f"loss.reduction: expected {loss.spec.reduction!r}, which is part of the loss {loss.name!r}, got "
            f"{loss.reduction!r}"
        )
    has_ratio = loss.spec.needs_whole_paths and not loss.spec.reads_preferences
    corrects_paths = loss.correction is not None and loss.correction.level != "token"
    if loss.sequence not in ("path", "rollout" if has_ratio or corrects_paths else "path"):
        raise UserError(
            f"loss.sequence: expected 'path' for the loss {loss.name!r}, or 'rollout' for a loss or a "
            f"loss.correction.level with one ratio per path, such as 'gspo', got {loss.sequence!r}"
        )
    if not isinstance(loss.kl, KLPenalty | None):
        raise UserError(f"loss.kl: expected a KLPenalty, got {loss.kl!r}; pass KLPenalty(coefficient)")
    if loss.correction and loss.spec.corrects_rollout:
        raise UserError(
            f"loss.correction: expected none for the loss {loss.name!r}, which reads rollout_logprobs "
            "itself; set loss.correction.level = 'off'"
        )


def by_rollout(pairs: PathPairs) -> PathPairs:
    """Returns the pairs with all paths of a rollout as one: ``path`` and sums over a path are the rollout's.

    A token that several paths of a rollout count stays as many pairs. Slots of other paths have no pairs.

    Raises:
        UserError: a rollout is not complete.
    """
    if (first := pairs.rollout) is None:
        raise UserError(
            "loss.sequence: expected all paths of each rollout in one micro-batch, got other numbers of loss "
            "tokens than their rollout_tokens; set data.layout = 'tree' and data.merge = 'group', or join "
            "each rollout with TokenPath.join_rollout(paths, name)"
        )

    def total(values: Tensor) -> Tensor:
        return torch.zeros_like(values).index_add(0, first, values)

    summed = {name: getattr(pairs, name) for name in ("weight", "loss_tokens", "rollout_log_ratio")}
    joined: dict[str, Any] = {name: total(x) for name, x in summed.items() if x is not None}
    if (divergence := pairs.rollout_divergence) is not None:
        sums, (low, high) = total(divergence[:, :2]), divergence[:, 2:].unbind(1)
        ends = low.scatter_reduce(0, first, low, "amin"), high.scatter_reduce(0, first, high, "amax")
        joined["rollout_divergence"] = torch.cat([sums, torch.stack(ends, 1)], 1)
    return dataclasses.replace(pairs, path=first[pairs.path], **joined)


def whitened(pairs: PathPairs, moments: Moments | None = None) -> PathPairs:
    """Returns the pairs with advantages (A - mean) / sqrt(variance + 1e-8) over the tokens of a batch.

    The variance divides by n - 1, as in verl's masked_whiten.

    Args:
        moments: the batch's sums. None: those of ``pairs``.
    """
    advantage = field(pairs, "advantage")
    if moments is None:
        count = pairs.weight[pairs.path].double() * pairs.loss_mask
        moments = count.sum(), (count * advantage).sum(), (count * advantage.double().square()).sum()
    total, first, second = (torch.as_tensor(x, dtype=torch.float64, device=advantage.device) for x in moments)
    mean = first / total.clamp_min(1e-30)
    variance = (second - total * mean.square()) / torch.where(total > 1, total - 1, 1.0)
    scale = (variance.clamp_min(0) + 1e-8).rsqrt()
    return dataclasses.replace(pairs, advantage=((advantage - mean) * scale).to(advantage.dtype))
