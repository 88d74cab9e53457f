"""What TreeLoss adds to a policy loss: whitened advantages, a KL penalty, a correction of rollout mismatch.

They read fields of the paths: ``advantage``, ``ref_logprobs``, ``old_logprobs`` and ``rollout_logprobs``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from titan_tree.components.tree_loss.ratios import field, kl_estimate
from titan_tree.config.losses import CorrectionConfig, KLConfig
from titan_tree.tree.batch import PathPairs
from titan_tree.tree.pairs import MAX_LOG_RATIO

# Sums of c, c A and c A² over a batch, with c = w_p m_{p,t} and the advantages A
Moments = tuple[float | Tensor, float | Tensor, float | Tensor]


class KLPenalty(KLConfig):
    """A penalty for diverging from a reference policy.

    As a term of the loss, k1 has an expected gradient of 0 on policy, k2 that of KL(new || reference), and
    k3 another one, which GRPO uses. With ``importance``, the expected gradient of each estimate is that of
    KL(new || reference) for k1 and k3, also off policy (DeepSeek-V3.2).

    Args:
        coefficient: factor of the estimate.
        estimator: "k1", "k2" or "k3", see ``kl_estimate``.
        importance: multiply the estimate by the ratio p / p_old, with its gradient. It is at most exp(20).
        as_reward: subtract coefficient times the estimate of KL(old || reference) from each token's
            advantage, instead of adding a term to the loss. k1 is usual (REINFORCE++, arXiv:2501.03262).

    Raises:
        UserError: ``importance`` together with ``as_reward``, which needs no ratio.
    """

    def estimate(self, logprobs: Tensor, pairs: PathPairs) -> Tensor:
        """Returns the estimate for each pair, [F] in nats. ``coefficient`` is not applied."""
        log_ratio = logprobs - field(pairs, "ref_logprobs")
        if not self.importance:
            return kl_estimate(self.estimator, log_ratio)
        ratio = (logprobs - field(pairs, "old_logprobs")).clamp(max=MAX_LOG_RATIO).exp()
        if self.estimator != "k3":
            return ratio * kl_estimate(self.estimator, log_ratio)
        # The product of an overflowing k3 and a ratio of 0 would be NaN; p cancels in the overflowing part.
        from_old = (field(pairs, "ref_logprobs") - field(pairs, "old_logprobs")).exp()
        return from_old + ratio * (log_ratio - 1)

    def penalize_rewards(self, pairs: PathPairs) -> tuple[PathPairs, Tensor]:
        """Returns the pairs with penalized advantages, and the estimate of KL(old || reference), [F]."""
        log_ratio = field(pairs, "old_logprobs") - field(pairs, "ref_logprobs")
        estimate = kl_estimate(self.estimator, log_ratio)
        advantage = field(pairs, "advantage") - self.coefficient * estimate
        return dataclasses.replace(pairs, advantage=advantage), estimate


@dataclass(frozen=True)
class RolloutCorrection(CorrectionConfig):
    """Weights for paths that were sampled with other numerics, or by an older policy, than old_logprobs say.

    A token's policy loss is multiplied by a weight without gradient. It is computed from w, the ratio p_old /
    p_rollout, or from an estimate of KL(rollout || old), which is 0 where both policies agree.

    Args:
        level: what w belongs to: a "token", or its whole path. Over the counted tokens of a path, "sequence"
            multiplies ratios and adds estimates. "geometric" takes the geometric mean of ratios and the mean
            of estimates. "max" takes the largest estimate.
        mode: "truncate" clamps w to [low, high] (truncated importance sampling); "mask" uses w within
            [low, high] and 0 elsewhere (masked importance sampling; IcePop, arXiv:2510.18855, on tokens);
            "reject" uses 1 within [low, high] and 0 elsewhere.
        low: lower bound of w.
        high: upper bound of w.
        estimator: "ratio"; or "k2" or "k3", which only "reject" can use, see ``kl_estimate``.

    Raises:
        UserError: the bounds are negative or in the wrong order, or the level or the mode does not fit.
    """

    level: Literal["off", "token", "sequence", "geometric", "max"] = "token"

    def weights(self, pairs: PathPairs) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the weight of each pair, [F], and metrics, [F] each.

        The metrics are rollout_weight, its square, the fraction of tokens outside of the bounds, and two
        counts of paths, of those with at least one such token and of all. A path's 1 is divided among its
        tokens. ``finish_metrics`` turns the means of these metrics into those of the step.
        """
        if self.level == "token":
            value = self._measure(field(pairs, "old_logprobs") - field(pairs, "rollout_logprobs"))
            is_outside = self._is_outside(value)
            # Ratios and estimates have their largest and smallest values at the ends of the gaps, or at 0.
            path_is_outside = self._is_outside(self._measure(_divergence(pairs)[:, 2:])).any(1)
        else:
            path_values = self._path_values(pairs)
            path_is_outside = self._is_outside(path_values)
            value, is_outside = path_values[pairs.path], path_is_outside[pairs.path]
        if self.mode == "truncate":
            weight = value.clamp(self.low, self.high)
        else:
            weight = torch.where(is_outside, 0.0, value if self.mode == "mask" else 1.0)
        share = 1 / pairs.loss_tokens.clamp_min(1e-30)[pairs.path]
        return weight, {
            "rollout_weight": weight,
            "rollout_weight_square": weight.square(),
            f"{self._outside}_fraction": is_outside.float(),
            f"{self._outside}_paths": path_is_outside[pairs.path] * share,
            "corrected_paths": share,
        }

    def finish_metrics(self, means: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the metrics with the effective sample size ess and the fraction of paths outside of bounds.

        Args:
            means: the metrics of ``weights`` and others, as means over the tokens of the global batch.
        """
        finished = dict(means)
        square = finished.pop("rollout_weight_square").clamp_min(1e-30)
        num_paths = finished.pop("corrected_paths").clamp_min(1e-30)
        paths_outside = finished.pop(f"{self._outside}_paths")
        return finished | {
            "ess": finished["rollout_weight"].square() / square,
            f"{self._outside}_path_fraction": paths_outside / num_paths,
        }

    @property
    def _outside(self) -> str:
        """What happens to tokens outside of the bounds, as in the names of metrics."""
        return "truncated" if self.mode == "truncate" else "masked"

    def _path_values(self, pairs: PathPairs) -> Tensor:
        """Returns w of each path, [P]."""
        k2, k3, *ends = _divergence(pairs).unbind(1)
        if self.level == "max":
            return torch.maximum(*map(self._measure, ends))
        total = {"ratio": field(pairs, "rollout_log_ratio"), "k2": k2, "k3": k3}[self.estimator]
        if self.level == "geometric":
            total = total / pairs.loss_tokens.clamp_min(1e-30)
        return total.exp() if self.estimator == "ratio" else total

    def _measure(self, gap: Tensor) -> Tensor:
        """Returns w of tokens with these gaps log p_old - log p_rollout."""
        if self.estimator == "ratio":
            return gap.exp()
        return kl_estimate(self.estimator, -gap.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO))

    def _is_outside(self, value: Tensor) -> Tensor:
        return (value < self.low) | (value > self.high)


def _divergence(pairs: PathPairs) -> Tensor:
    field(pairs, "old_logprobs"), field(pairs, "rollout_logprobs")  # named, if one is missing
    return field(pairs, "rollout_divergence")


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
