"""What TreeLoss adds to a policy loss: a KL penalty, and the correction of rollout mismatch.

Both read fields of the paths: ``ref_logprobs``, ``old_logprobs`` and ``rollout_logprobs``.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from titan_tree.components.tree_loss.ratios import field, kl_estimate
from titan_tree.errors import UserError
from titan_tree.tree.batch import PathPairs

MAX_LOG_RATIO = 20.0  # of ``importance``; verl has the same bound


@dataclass(frozen=True)
class KLPenalty:
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

    coefficient: float
    estimator: Literal["k1", "k2", "k3"] = "k3"
    importance: bool = False
    as_reward: bool = False

    def __post_init__(self) -> None:
        if self.importance and self.as_reward:
            raise UserError("loss.kl.importance: expected false together with loss.kl.as_reward, got true")

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
class RolloutCorrection:
    """Weights for paths that were sampled with other numerics, or by an older policy, than old_logprobs say.

    A token's policy loss is multiplied by a weight without gradient. It is computed from w = p_old /
    p_rollout of the token, of its whole path (the product over counted tokens), or from the geometric mean of
    its path.

    Args:
        level: "token", "sequence" or "geometric".
        mode: "truncate" clamps w to [low, high] (truncated importance sampling); "mask" uses w within
            [low, high] and 0 elsewhere (masked importance sampling; IcePop, arXiv:2510.18855, on tokens);
            "reject" uses 1 within [low, high] and 0 elsewhere.
        low: lower bound of w.
        high: upper bound of w.

    Raises:
        UserError: the bounds are negative or in the wrong order.
    """

    level: Literal["token", "sequence", "geometric"] = "token"
    mode: Literal["truncate", "mask", "reject"] = "truncate"
    low: float = 0.0
    high: float = 2.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high:
            raise UserError(
                f"loss.correction.low: expected at least 0 and below loss.correction.high = {self.high:g}, "
                f"got {self.low:g}"
            )

    def weights(self, pairs: PathPairs) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the weight of each pair, [F], and metrics, [F] each.

        The metrics are rollout_weight, its square, from which TreeStep computes the effective sample size
        ess, and the fraction of tokens outside of the bounds.
        """
        log_weight = field(pairs, "old_logprobs") - field(pairs, "rollout_logprobs")
        if self.level != "token":
            of_path = field(pairs, "rollout_log_ratio")
            if self.level == "geometric":
                of_path = of_path / pairs.loss_tokens.clamp_min(1e-30)
            log_weight = of_path[pairs.path]
        weight = log_weight.exp()
        is_outside = (weight < self.low) | (weight > self.high)
        if self.mode == "truncate":
            weight = weight.clamp(self.low, self.high)
        else:
            weight = torch.where(is_outside, 0.0, weight if self.mode == "mask" else 1.0)
        outside = "truncated_fraction" if self.mode == "truncate" else "masked_fraction"
        metrics = {"rollout_weight": weight, "rollout_weight_square": weight.square()}
        return weight, metrics | {outside: is_outside.float()}
