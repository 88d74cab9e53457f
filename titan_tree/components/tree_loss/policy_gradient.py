"""Policy-gradient losses: reinforce, ppo, grpo and gspo.

Each function takes log-probs [F] in nats under the current model, and the F (edge, path) pairs that they
belong to. It returns losses [F], or losses and a dict of metrics, each [F].
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from titan_tree.components.tree_loss.loss import whole_path_loss
from titan_tree.errors import UserError
from titan_tree.tree.batch import PathPairs


def reinforce(logprobs: Tensor, pairs: PathPairs) -> Tensor:
    """Returns the on-policy policy gradient loss -A log p (REINFORCE; Williams, 1992)."""
    return -_field(pairs, "advantage") * logprobs


def ppo(
    logprobs: Tensor, pairs: PathPairs, clip_low: float = 0.2, clip_high: float = 0.2
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns PPO's clipped surrogate loss, with one ratio per token (PPO, arXiv:1707.06347).

    Args:
        clip_low: the ratio is clipped from below at 1 - clip_low.
        clip_high: the ratio is clipped from above at 1 + clip_high.

    Returns:
        Losses, and the metrics clip_fraction and old_kl, an estimate of KL(old || new).
    """
    advantage = _field(pairs, "advantage")
    log_ratio = logprobs - _field(pairs, "old_logprobs")
    loss, is_clipped = _clipped_surrogate(log_ratio, advantage, clip_low, clip_high)
    return loss, {"clip_fraction": is_clipped, "old_kl": _k3(log_ratio)}


def grpo(
    logprobs: Tensor, pairs: PathPairs, clip_low: float = 0.2, clip_high: float = 0.2, kl: float = 0.0
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns PPO's loss plus a penalty for diverging from a reference policy (GRPO, arXiv:2402.03300).

    Paths carry their advantages; ``data.advantage = "group"`` computes them from rewards as GRPO does.

    Args:
        clip_low: see ``ppo``.
        clip_high: see ``ppo``.
        kl: coefficient of the k3 estimate of KL(new || reference).

    Returns:
        Losses, and the metrics of ``ppo`` and, unless ``kl`` is 0, ref_kl.
    """
    loss, metrics = ppo(logprobs, pairs, clip_low, clip_high)
    if kl:
        metrics["ref_kl"] = _k3(_field(pairs, "ref_logprobs") - logprobs)
        loss = loss + kl * metrics["ref_kl"]
    return loss, metrics


@partial(whole_path_loss, compares_paths=False)
def gspo(
    logprobs: Tensor, pairs: PathPairs, clip_low: float = 3e-4, clip_high: float = 4e-4
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns PPO's clipped surrogate loss with one ratio per path (GSPO, arXiv:2507.18071).

    A path's ratio is the geometric mean of its tokens' ratios. GSPO counts each path once: use the reduction
    "path_token_mean".

    Args:
        clip_low: see ``ppo``.
        clip_high: see ``ppo``.

    Returns:
        Losses, and the metric clip_fraction.
    """
    is_counted = pairs.weight[pairs.path] > 0  # a path without weight has no gradient, even an infinite one
    log_ratio = (logprobs - _field(pairs, "old_logprobs")) * pairs.loss_mask * is_counted
    mean = torch.zeros_like(pairs.loss_tokens, dtype=log_ratio.dtype).index_add(0, pairs.path, log_ratio)
    mean = mean / pairs.loss_tokens.clamp_min(1e-30)
    advantage = _field(pairs, "advantage")
    loss, is_clipped = _clipped_surrogate(mean[pairs.path], advantage, clip_low, clip_high)
    return loss, {"clip_fraction": is_clipped}


def _clipped_surrogate(
    log_ratio: Tensor, advantage: Tensor, clip_low: float, clip_high: float
) -> tuple[Tensor, Tensor]:
    """Returns the losses [F], and 1.0 wherever the clipped term is the smaller one and stops the gradient.

    Where the gradient is 0, the exponential is not differentiated: it may overflow, and 0 * inf is NaN.
    """
    ratio = log_ratio.detach().exp()
    clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
    is_clipped = (clipped - ratio) * advantage < 0
    ratio = torch.where(is_clipped | (advantage == 0), 0.0, log_ratio).exp()
    return -torch.where(is_clipped, clipped, ratio) * advantage, is_clipped.float()


def _k3(log_ratio: Tensor) -> Tensor:
    """Returns the k3 estimate of KL divergence by Schulman (2020), which is unbiased and never negative."""
    return log_ratio.expm1() - log_ratio


_FIXES = {
    "advantage": ", or set data.advantage = 'group' and give rewards",
    "old_logprobs": ", or set loss.name = 'reinforce' if the current model sampled the paths",
}


def _field(pairs: PathPairs, name: str) -> Tensor:
    """Returns a per-token field of the paths. Raises UserError if they lack it, or if it has gradients."""
    if (value := getattr(pairs, name)) is not None:
        if value.requires_grad:
            raise UserError(
                f"loss: {name}: expected constants, got a tensor that requires grad; compute it under "
                f"torch.no_grad(), or pass {name}.detach()"
            )
        return value
    fix = f"give it to every path{_FIXES.get(name, '')}"
    if name == "old_logprobs" and pairs.rollout_logprobs is not None:
        fix = (
            "compute them with tree_logprobs, or rename rollout_logprobs to old_logprobs to use those of the "
            "sampling engine in their place"
        )
    raise UserError(f"loss: the paths have no {name}; {fix}")
