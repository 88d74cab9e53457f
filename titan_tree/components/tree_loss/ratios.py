"""What losses compute from log-probs: ratios of probabilities, estimates of KL divergence, sums over paths.

F counts the (edge, path) pairs of a batch and P its paths. Log-probs are in nats. Log-ratios in exponents are
at most ``MAX_LOG_RATIO``; beyond it, the exponential has no gradient. fp32 overflows at 88.7.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from titan_tree.errors import UserError
from titan_tree.tree.pairs import MAX_LOG_RATIO

if TYPE_CHECKING:  # a configuration is checked without torch
    from torch import Tensor

    from titan_tree.tree.batch import PathPairs

_FIXES = {
    "advantage": ", or set data.advantage = 'group' and give rewards",
    "old_logprobs": (
        ", compute it with titan-tree score, or set loss.name = 'reinforce' if the current model sampled the "
        "paths"
    ),
    "ref_logprobs": ": compute them under the reference model, or the teacher, with titan-tree score",
    "rollout_logprobs": ", as the sampling engine reported them",
    **dict.fromkeys(("edge_weight", "is_first"), ": call weigh_edges() of every tree"),
    "is_chosen": ": set the field preference to 'chosen' or 'rejected'",
    "is_mismatched": ": set the field preference to 'desirable', 'undesirable' or 'mismatched'",
    "partner": (
        ": set the field preference to 'chosen' or 'rejected', put as many chosen as rejected paths of each "
        "pair into one group, and set data.layout = 'tree'"
    ),
}


def field(pairs: PathPairs, name: str) -> Tensor:
    """Returns a field of the paths. Raises UserError if they lack it, or if it has gradients."""
    value: Tensor | None = getattr(pairs, name)
    if value is not None:
        if value.requires_grad:
            raise UserError(
                f"loss: {name}: expected constants, got a tensor that requires grad; compute it under "
                f"torch.no_grad(), or pass {name}.detach()"
            )
        return value
    fix = f"give it to every path{_FIXES.get(name, '')}"
    if name == "old_logprobs" and pairs.rollout_logprobs is not None:
        fix = (
            "compute them with titan-tree score, or rename rollout_logprobs to old_logprobs to use those of "
            "the sampling engine in their place"
        )
    raise UserError(f"loss: the paths have no {name}; {fix}")


def kl_estimate(estimator: str, log_ratio: Tensor) -> Tensor:
    """Returns an estimate of KL(p || q) per token, from log_ratio = log p - log q of tokens sampled from p.

    k1 is unbiased, k2 has low variance, and k3 is unbiased and never negative (Schulman, 2020). Below
    -``MAX_LOG_RATIO``, k3 keeps its value there, without gradient.
    """
    if estimator == "k1":
        return log_ratio
    if estimator == "k2":
        return log_ratio.square() / 2
    log_ratio = log_ratio.clamp(min=-MAX_LOG_RATIO)
    return (-log_ratio).expm1() + log_ratio


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """Returns e^log_ratio, at most e^20. Beyond this bound, there is no gradient."""
    return log_ratio.clamp(max=MAX_LOG_RATIO).exp()


def path_sum(values: Tensor, pairs: PathPairs) -> Tensor:
    """Returns [P]: the sum of ``values`` [F] over the tokens of each path, weighted by the loss mask.

    A path without weight gets 0: it has no gradient, even an infinite one.
    """
    is_counted = pairs.weight[pairs.path] > 0
    values = (values * pairs.loss_mask).where(is_counted, 0.0)
    return values.new_zeros(pairs.loss_tokens.shape).index_add(0, pairs.path, values)


def path_mean(values: Tensor, pairs: PathPairs) -> Tensor:
    """Returns [P]: the mean of ``values`` [F] over the counted tokens of each path; 0 if there are none."""
    return path_sum(values, pairs) / pairs.loss_tokens.clamp_min(1e-30)


def clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float, dual_clip: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Returns the losses [F], and 1.0 wherever a bound is the loss and stops the gradient.

    Where A < 0, the ratio is at most ``dual_clip``, or e^20 without it. Where the gradient is 0, the
    exponential is not differentiated: it may overflow, and 0 * inf is NaN.
    """
    ratio = log_ratio.detach().exp()
    bound = ratio.clamp(1 - clip_low, 1 + clip_high)
    is_clipped = (bound - ratio) * advantage < 0
    if dual_clip and not dual_clip >= 1 + clip_high:
        raise UserError(
            f"loss: dual_clip: expected 0 (off) or at least 1 + clip_high = {1 + clip_high:g}, got "
            f"{dual_clip:g}"
        )
    largest = dual_clip or math.exp(MAX_LOG_RATIO)
    is_bounded = (advantage < 0) & (ratio > largest)
    bound, is_clipped = bound.where(~is_bounded, largest), is_clipped | is_bounded
    ratio = log_ratio.where(~is_clipped & (advantage != 0), 0.0).exp()
    return -bound.where(is_clipped, ratio) * advantage, is_clipped.float()


def ratio_metrics(log_ratio: Tensor) -> dict[str, Tensor]:
    """Returns the metrics ratio, p / p_old, and old_kl, the k3 estimate of KL(old || new), [F] each."""
    return {"ratio": bounded_exp(log_ratio), "old_kl": kl_estimate("k3", -log_ratio)}
