"""What TreeLoss adds to a policy loss: a KL penalty, and a correction of rollout mismatch.

They read fields of the paths: ``advantage``, ``ref_logprobs``, ``old_logprobs`` and ``rollout_logprobs``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from titan_tree.components.tree_loss.ratios import bounded_exp, field, kl_estimate
from titan_tree.config.checks import Checked, at_least, finite, require, setting
from titan_tree.tree.pairs import MAX_LOG_RATIO

if TYPE_CHECKING:  # a configuration is checked without torch
    from torch import Tensor

    from titan_tree.tree.batch import PathPairs

MAX_K3 = 10.0  # in nats


@dataclass(frozen=True)
class KLPenalty(Checked, table="loss.kl"):
    """A penalty for diverging from a reference policy (docs/components/losses.md).

    As a term of the loss, k1 has an expected gradient of 0 on policy, k2 that of KL(new || reference), and
    k3 another one, which GRPO uses. k3 is at most ``MAX_K3``. With ``importance``, the expected gradient of
    each estimate is that of KL(new || reference) for k1 and k3, also off policy (DeepSeek-V3.2).
    """

    # Factor of the penalty, which needs ref_logprobs. 0: off.
    coefficient: float = setting(0.0, finite, at_least(0))
    # Estimator of the KL divergence. "k3" is at most 10 nats; beyond that, it has no gradient.
    estimator: Literal["k1", "k2", "k3"] = "k3"
    # Multiply the estimate by p / p_old, at most exp(20), for tokens of an older policy.
    importance: bool = False
    # Subtract the coefficient times the estimate of KL(old || reference) from the advantages, instead of
    # adding a term to the loss. This is usual with k1 (REINFORCE++, arXiv:2501.03262).
    as_reward: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        is_valid = not (self.importance and self.as_reward)
        require(is_valid, "loss.kl.importance", "false together with loss.kl.as_reward", "true")

    def estimate(self, logprobs: Tensor, pairs: PathPairs) -> Tensor:
        """Returns the estimate for each pair, [F] in nats. ``coefficient`` is not applied."""
        log_ratio = logprobs - field(pairs, "ref_logprobs")
        if not self.importance:
            return self._bounded(log_ratio)
        ratio = bounded_exp(logprobs - field(pairs, "old_logprobs"))
        if self.estimator != "k3":
            return ratio * kl_estimate(self.estimator, log_ratio)
        # The product of an overflowing k3 and a ratio of 0 would be NaN; p cancels in the overflowing part.
        from_old = field(pairs, "ref_logprobs") - field(pairs, "old_logprobs")
        return bounded_exp(from_old) + ratio * (log_ratio - 1)

    def _bounded(self, log_ratio: Tensor) -> Tensor:
        estimate = kl_estimate(self.estimator, log_ratio)
        return estimate.clamp(max=MAX_K3) if self.estimator == "k3" else estimate

    def penalize_rewards(self, pairs: PathPairs) -> tuple[PathPairs, Tensor]:
        """Returns the pairs with penalized advantages, and the estimate of KL(old || reference), [F]."""
        log_ratio = field(pairs, "old_logprobs") - field(pairs, "ref_logprobs")
        estimate = self._bounded(log_ratio)
        advantage = field(pairs, "advantage") - self.coefficient * estimate
        return dataclasses.replace(pairs, advantage=advantage), estimate


@dataclass(frozen=True)
class RolloutCorrection(Checked, table="loss.correction"):
    """Weights for rollout_logprobs that differ from old_logprobs (docs/components/losses.md).

    The engine that sampled the paths has other numerics, or an older policy. A token's policy loss is
    multiplied by a weight without gradient. It is computed from w, the ratio p_old / p_rollout, or from an
    estimate of KL(rollout || old), which is 0 where both policies agree.
    """

    # What the weight w = p_old / p_rollout belongs to: a "token", or its path (its rollout with loss.sequence
    # = "rollout"). Over the counted tokens of a path, "sequence" multiplies ratios and adds estimates,
    # "geometric" takes the geometric mean of ratios and the mean of estimates, and "max" takes the largest
    # estimate ("k2" or "k3"). "off": all weights are 1.
    level: Literal["off", "token", "sequence", "geometric", "max"] = "token"
    # "truncate" clamps weights to [low, high] (truncated importance sampling), "mask" sets those outside to 0
    # (masked importance sampling; IcePop, arXiv:2510.18855), and "reject" also sets those inside to 1.
    mode: Literal["truncate", "mask", "reject"] = "truncate"
    low: float = setting(0.0, finite, at_least(0))  # Lower bound of the weights.
    high: float = setting(2.0, finite)  # Upper bound of the weights.
    # What is compared with the bounds: the "ratio" above, or an estimate of KL(rollout || old), which needs
    # mode = "reject".
    estimator: Literal["ratio", "k2", "k3"] = "ratio"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.level == "off":
            return
        low, high, is_ratio = self.low, self.high, self.estimator == "ratio"
        expected = f"at least 0 and below loss.correction.high = {high:g}"
        require(low < high, "loss.correction.low", expected, f"{low:g}")
        expected = "'max' only with the estimator 'k2' or 'k3'"
        require(self.level != "max" or not is_ratio, "loss.correction.level", expected, "'ratio'")
        require(
            is_ratio or (self.mode == "reject" and low == 0),
            "loss.correction.estimator",
            f"mode = 'reject' and low = 0 with {self.estimator!r}",
            f"{self.mode!r} and {low:g}",
        )

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
            inside = value if self.mode == "mask" else value.new_ones(value.shape)
            weight = inside.where(~is_outside, 0.0)
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
            low, high = map(self._measure, ends)
            return low.maximum(high)
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
