"""Policy-gradient losses with one ratio per path: gspo, gspo_token, luspo, gmpo and vespo.

They take and return what those of policy_gradient.py do. A token's loss depends on all tokens of its path.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from titan_tree.components.tree_loss.marks import corrects_rollout, fixed_reduction, whole_path_loss
from titan_tree.components.tree_loss.policy_gradient import LossAndMetrics
from titan_tree.components.tree_loss.ratios import (
    clipped_surrogate,
    field,
    path_mean,
    path_sum,
    ratio_metrics,
)
from titan_tree.tree.batch import PathPairs

_of_one_path = partial(whole_path_loss, compares_paths=False)


@_of_one_path
def gspo(
    logprobs: Tensor, pairs: PathPairs, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> LossAndMetrics:
    """Returns PPO's clipped surrogate loss with one ratio per path (GSPO, arXiv:2507.18071).

    A path's ratio is the geometric mean of its tokens' ratios. GSPO counts each path once: use the reduction
    "path_token_mean".

    Args:
        clip_low: see ``ppo``.
        clip_high: see ``ppo``.

    Returns:
        Losses, and the metrics clip_fraction, ratio and old_kl, of which ratio is that of the path.
    """
    log_ratio = logprobs - field(pairs, "old_logprobs")
    of_path = path_mean(log_ratio, pairs)[pairs.path]
    loss, is_clipped = clipped_surrogate(of_path, field(pairs, "advantage"), clip_low, clip_high)
    metrics = ratio_metrics(log_ratio) | {"ratio": of_path.exp()}
    return loss, metrics | {"clip_fraction": is_clipped}


@_of_one_path
def gspo_token(
    logprobs: Tensor, pairs: PathPairs, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> LossAndMetrics:
    """Returns GSPO-token: the value of the path's ratio, with the gradient of each token's own log-prob.

    Unlike in ``gspo``, a token's gradient has the advantage of this token. Both have equal gradients if all
    tokens of a path have one advantage.
    """
    log_ratio = logprobs - field(pairs, "old_logprobs")
    of_path = path_mean(log_ratio.detach(), pairs)[pairs.path]
    own = of_path + logprobs - logprobs.detach()
    loss, is_clipped = clipped_surrogate(own, field(pairs, "advantage"), clip_low, clip_high)
    metrics = ratio_metrics(log_ratio) | {"ratio": of_path.exp()}
    return loss, metrics | {"clip_fraction": is_clipped}


@fixed_reduction("path_mean")
@_of_one_path
def luspo(
    logprobs: Tensor, pairs: PathPairs, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> LossAndMetrics:
    """Returns GSPO's loss; the reduction "path_mean" multiplies it by a path's length (arXiv:2602.05261)."""
    return gspo(logprobs, pairs, clip_low, clip_high)  # type: ignore[return-value]


@_of_one_path
def gmpo(logprobs: Tensor, pairs: PathPairs, clip_low: float = 0.4, clip_high: float = 0.4) -> LossAndMetrics:
    """Returns -A times the geometric mean of clipped token ratios (GMPO, arXiv:2507.20673).

    A is the mean advantage of the path's tokens. GMPO counts each path once: use the reduction
    "path_token_mean".

    Args:
        clip_low: log-ratios are clipped from below at -clip_low, where A < 0.
        clip_high: log-ratios are clipped from above at clip_high, where A > 0.

    Returns:
        Losses, and the metrics of ``ppo``.
    """
    advantage = field(pairs, "advantage")
    log_ratio = logprobs - field(pairs, "old_logprobs")
    sign = advantage.sign()
    clipped = sign * torch.minimum(sign * log_ratio, sign * log_ratio.clamp(-clip_low, clip_high))
    mean = path_mean(clipped, pairs)
    of_path = path_mean(advantage, pairs)
    # Without an advantage there is no gradient, and the exponential may overflow.
    loss = -torch.where(of_path == 0, 0.0, mean).exp() * of_path
    is_clipped = (clipped != log_ratio) & (sign != 0)
    return loss[pairs.path], {"clip_fraction": is_clipped.float()} | ratio_metrics(log_ratio)


@corrects_rollout
@_of_one_path
def vespo(
    logprobs: Tensor,
    pairs: PathPairs,
    k_positive: float = 2.0,
    lambda_positive: float = 3.0,
    k_negative: float = 3.0,
    lambda_negative: float = 2.0,
) -> LossAndMetrics:
    """Returns -phi(W) A l with phi(W) = W^k exp(lambda (1 - W)), a constant (VESPO, arXiv:2602.10693).

    W is the ratio of whole paths: the product of the tokens' ratios p / p_old. If the paths have
    rollout_logprobs, p_old / p_rollout is a factor, too. As in TRL, log W is clipped to [log 1e-8, 20].

    Args:
        k_positive: k where A >= 0.
        lambda_positive: lambda where A >= 0.
        k_negative: k where A < 0.
        lambda_negative: lambda where A < 0.

    Returns:
        Losses, and the metrics ratio, old_kl and phi.
    """
    advantage = field(pairs, "advantage")
    log_ratio = logprobs - field(pairs, "old_logprobs")
    log_w = path_sum(log_ratio.detach(), pairs)
    if pairs.rollout_log_ratio is not None:
        log_w = log_w + pairs.rollout_log_ratio
    log_w = log_w.clamp(math.log(1e-8), 20.0)[pairs.path]
    k = torch.where(advantage >= 0, k_positive, k_negative)
    rate = torch.where(advantage >= 0, lambda_positive, lambda_negative)
    phi = (k * log_w + rate * (1 - log_w.exp())).exp()
    return -phi * advantage * logprobs, ratio_metrics(log_ratio) | {"phi": phi}
