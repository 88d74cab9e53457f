"""Policy-gradient losses with one ratio per path: gspo, gspo_token, luspo, gmpo and vespo.

They take and return what those of token_losses.py do. A token's loss depends on all tokens of its path. With
``TreeLoss(sequence="rollout")``, the pairs have one path per rollout, see ``by_rollout``.
"""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor

from titan_tree.components.tree_loss.ratios import (
    bounded_exp,
    clipped_surrogate,
    field,
    path_mean,
    path_sum,
    ratio_metrics,
)
from titan_tree.components.tree_loss.spec import LossAndMetrics, LossResult, LossSpec
from titan_tree.tree.batch import PathPairs

_path_loss = partial(LossSpec, needs_whole_paths=True)


@_path_loss
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
    path_log_ratio = path_mean(log_ratio, pairs)[pairs.path]
    loss, is_clipped = clipped_surrogate(path_log_ratio, field(pairs, "advantage"), clip_low, clip_high)
    metrics = ratio_metrics(log_ratio) | {"ratio": bounded_exp(path_log_ratio)}
    return loss, metrics | {"clip_fraction": is_clipped}


@_path_loss
def gspo_token(
    logprobs: Tensor, pairs: PathPairs, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> LossAndMetrics:
    """Returns GSPO-token: the value of the path's ratio, with the gradient of each token's own log-prob.

    Unlike in ``gspo``, a token's gradient has the advantage of this token. Both have equal gradients if all
    tokens of a path have one advantage.
    """
    log_ratio = logprobs - field(pairs, "old_logprobs")
    path_log_ratio = path_mean(log_ratio.detach(), pairs)[pairs.path]
    token_log_ratio = path_log_ratio + logprobs - logprobs.detach()
    loss, is_clipped = clipped_surrogate(token_log_ratio, field(pairs, "advantage"), clip_low, clip_high)
    metrics = ratio_metrics(log_ratio) | {"ratio": bounded_exp(path_log_ratio)}
    return loss, metrics | {"clip_fraction": is_clipped}


@partial(_path_loss, reduction="path_mean")
def luspo(logprobs: Tensor, pairs: PathPairs, clip_low: float = 3e-4, clip_high: float = 4e-4) -> LossResult:
    """Returns GSPO's loss; the reduction "path_mean" multiplies it by a path's length (arXiv:2602.05261)."""
    return gspo(logprobs, pairs, clip_low, clip_high)


@_path_loss
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
    path_log_ratio = path_mean(clipped, pairs)
    path_advantage = path_mean(advantage, pairs)
    loss = -bounded_exp(path_log_ratio) * path_advantage
    is_clipped = (clipped != log_ratio) & (sign != 0)
    return loss[pairs.path], {"clip_fraction": is_clipped.float()} | ratio_metrics(log_ratio)


@partial(_path_loss, corrects_rollout=True)
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
