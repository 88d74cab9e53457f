"""Losses of single tokens: sft, policy gradients with one ratio per token, and distillation.

Each function takes log-probs [F] in nats under the current model, and the F (edge, path) pairs that they
belong to. It returns losses [F], or losses and a dict of metrics, each [F]. In formulas, A is the advantage,
l the log-prob, and r the ratio p / p_old.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log

import torch
from torch import Tensor

from titan_tree.components.tree_loss.ratios import (
    bounded_exp,
    clipped_surrogate,
    field,
    kl_estimate,
    ratio_metrics,
)
from titan_tree.components.tree_loss.settings import LossFunction
from titan_tree.components.tree_loss.spec import LossAndMetrics, LossSpec
from titan_tree.errors import UserError
from titan_tree.tree.batch import PathPairs

MAX_RATIO = 5.0  # of cispo: ScaleRL, arXiv:2510.13786


@partial(LossSpec, reads_pairs=False)
def sft(logprobs: Tensor, pairs: PathPairs) -> Tensor:
    """Returns the negative log-likelihood of each token, the loss of supervised fine-tuning."""
    return -logprobs


def reinforce(logprobs: Tensor, pairs: PathPairs) -> Tensor:
    """Returns the on-policy policy gradient loss -A l (REINFORCE; Williams, 1992)."""
    return -field(pairs, "advantage") * logprobs


def ppo(
    logprobs: Tensor,
    pairs: PathPairs,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
) -> LossAndMetrics:
    """Returns PPO's clipped surrogate loss, with one ratio per token (PPO, arXiv:1707.06347).

    Args:
        clip_low: the ratio is clipped from below at 1 - clip_low.
        clip_high: the ratio is clipped from above at 1 + clip_high.
        dual_clip: bound c of the ratio where A < 0, which PPO does not clip from above (dual-clip PPO,
            arXiv:1912.09729; usually 3). At least 1 + clip_high; 0: no bound.

    Returns:
        Losses, and the metrics clip_fraction, ratio and old_kl, an estimate of KL(old || new).
    """
    log_ratio = logprobs - field(pairs, "old_logprobs")
    loss, is_clipped = clipped_surrogate(log_ratio, field(pairs, "advantage"), clip_low, clip_high, dual_clip)
    return loss, {"clip_fraction": is_clipped} | ratio_metrics(log_ratio)


def grpo(
    logprobs: Tensor,
    pairs: PathPairs,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float = 0.0,
) -> LossAndMetrics:
    """Returns the loss of GRPO (arXiv:2402.03300), which is PPO's. Its KL penalty is ``KLPenalty``.

    GRPO counts each path once: use the reduction "path_token_mean". Paths carry their advantages;
    ``data.advantage = "group"`` computes them from rewards as GRPO does.
    """
    return ppo(logprobs, pairs, clip_low, clip_high, dual_clip)


@partial(LossSpec, reduction="path_mean")
def dr_grpo(
    logprobs: Tensor, pairs: PathPairs, clip_low: float = 0.2, clip_high: float = 0.2
) -> LossAndMetrics:
    """Returns PPO's loss for Dr. GRPO (arXiv:2503.20783): sums over tokens, with the reduction "path_mean".

    The paper also divides by the length budget of a response, a constant. Divide the learning rate or the
    path weights by it.
    """
    return ppo(logprobs, pairs, clip_low, clip_high)


@partial(LossSpec, reduction="token_mean")
def dapo(
    logprobs: Tensor, pairs: PathPairs, clip_low: float = 0.2, clip_high: float = 0.28
) -> LossAndMetrics:
    """Returns PPO's loss with DAPO's clip range (arXiv:2503.14476), for the reduction "token_mean".

    DAPO also drops groups whose rewards are all equal, and masks truncated responses. The data decides both.
    """
    return ppo(logprobs, pairs, clip_low, clip_high)


def cispo(
    logprobs: Tensor,
    pairs: PathPairs,
    clip_low: float = 1.0,
    clip_high: float | None = None,
    max_ratio: float | None = None,
) -> LossAndMetrics:
    """Returns -w A l with the clipped ratio w, a constant: every token keeps a gradient (arXiv:2506.13585).

    Args:
        clip_low: w is at least 1 - clip_low. 1: no lower bound.
        clip_high: w is at most 1 + clip_high, as in the paper and in verl.
        max_ratio: w is at most this, as TRL's ``epsilon_high``. Default: 5, unless clip_high is set.

    Returns:
        Losses, and the metrics of ``ppo``.

    Raises:
        UserError: both upper bounds are set.
    """
    if clip_high is not None and max_ratio is not None:
        raise UserError("loss 'cispo': expected either clip_high or max_ratio, got both; remove one")
    high = 1 + clip_high if clip_high is not None else MAX_RATIO if max_ratio is None else max_ratio
    log_ratio = logprobs - field(pairs, "old_logprobs")
    ratio = log_ratio.detach().exp()
    weight = ratio.clamp(1 - clip_low, high)
    loss = -weight * field(pairs, "advantage") * logprobs
    return loss, {"clip_fraction": (weight != ratio).float()} | ratio_metrics(log_ratio)


def sapo(
    logprobs: Tensor, pairs: PathPairs, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> LossAndMetrics:
    """Returns -A (4 / tau) sigmoid(tau (r - 1)), a smooth gate in place of clipping (SAPO, arXiv:2511.20347).

    SAPO counts each path once: use the reduction "path_token_mean".

    Args:
        tau_positive: tau where A > 0.
        tau_negative: tau elsewhere.

    Returns:
        Losses, and the metrics ratio and old_kl.
    """
    advantage = field(pairs, "advantage")
    log_ratio = logprobs - field(pairs, "old_logprobs")
    tau = torch.where(advantage > 0, tau_positive, tau_negative)
    # Beyond exp(20), the gate is 1 and flat. Its derivative would be 0 * inf.
    gate = torch.sigmoid(tau * (bounded_exp(log_ratio) - 1)) * 4 / tau
    return -gate * advantage, ratio_metrics(log_ratio)


def _dppo(distance: Callable[[Tensor, Tensor], Tensor], limit: float) -> LossFunction:
    """Returns the loss -w A l, masked by the change of the token's probability (DPPO, arXiv:2602.04879).

    Args:
        distance: (new, old) log-probs -> distance of both distributions, [F].
        limit: default of both bounds.
    """

    def dppo(
        logprobs: Tensor,
        pairs: PathPairs,
        clip_low: float = limit,
        clip_high: float = limit,
        max_ratio: float = 20.0,
    ) -> LossAndMetrics:
        """Returns -w A l, or 0 for tokens that have already moved too far in the direction of A.

        Args:
            clip_low: largest distance of tokens with A <= 0 that are less likely now; others are dropped.
            clip_high: largest distance of tokens with A > 0 that are more likely now; others are dropped.
            max_ratio: upper bound of w, the ratio without gradient.

        Returns:
            Losses, and the metrics clip_fraction (dropped tokens), ratio and old_kl.
        """
        advantage, new = field(pairs, "advantage"), logprobs.detach()
        old = field(pairs, "old_logprobs").to(new.dtype)
        moved = distance(new, old)
        is_kept = torch.where(
            advantage > 0,
            (moved <= clip_high) | (new <= old),
            (moved <= clip_low) | (new >= old),
        )
        weight = (new - old).exp().clamp(max=max_ratio)
        loss = torch.where(is_kept, -weight * advantage * logprobs, 0.0)
        return loss, {"clip_fraction": (~is_kept).float()} | ratio_metrics(logprobs - old)

    return dppo


def _total_variation(new: Tensor, old: Tensor) -> Tensor:
    """Returns the change of the token's probability."""
    return (new.exp() - old.exp()).abs()


def _coin_kl(new: Tensor, old: Tensor) -> Tensor:
    """Returns the KL divergence of two coins, whose probabilities are the token's: KL(old || new)."""
    rest_old, rest_new = 1 - old.exp(), 1 - new.exp()
    return old.exp() * (old - new) + rest_old * ((rest_old + 1e-8) / (rest_new + 1e-8)).log()


dppo_tv = _dppo(_total_variation, 0.15)  # DPPO-Binary-TV
dppo_kl = _dppo(_coin_kl, 0.05)  # DPPO-Binary-KL


@partial(LossSpec, corrects_rollout=True)
def decoupled_ppo(
    logprobs: Tensor, pairs: PathPairs, clip_low: float = 0.2, clip_high: float = 0.2, max_weight: float = 5.0
) -> LossAndMetrics:
    """Returns PPO's loss times p_old / p_rollout (decoupled PPO, arXiv:2505.24298, as in AReaL).

    The ratio is relative to old_logprobs, those of the proximal policy. The paths were sampled by an older
    policy, whose log-probs are rollout_logprobs.

    Args:
        clip_low: see ``ppo``.
        clip_high: see ``ppo``.
        max_weight: tokens with a larger p_old / p_rollout are dropped.

    Returns:
        Losses, and the metrics of ``ppo`` and masked_fraction.
    """
    weight = (field(pairs, "old_logprobs") - field(pairs, "rollout_logprobs")).exp()
    is_dropped = weight > max_weight
    weight = torch.where(is_dropped, 0.0, weight)
    # The ratio of a token with weight 0 may overflow, and 0 * inf is NaN.
    logprobs = torch.where(weight > 0, logprobs, logprobs.detach())
    loss, metrics = ppo(logprobs, pairs, clip_low, clip_high)
    loss = torch.where(weight > 0, weight * loss, 0.0)
    return loss, metrics | {"masked_fraction": is_dropped.float()}


@partial(LossSpec, reads_reference=True)
def distill(logprobs: Tensor, pairs: PathPairs) -> LossAndMetrics:
    """Returns -A l with A = log p_teacher - l, a constant: on-policy distillation (GKD, arXiv:2306.13649).

    Its expected gradient is that of KL(student || teacher) if the current model sampled the paths. The
    teacher's log-probs are ``ref_logprobs``.

    Returns:
        Losses, and the metric teacher_kl, the k1 estimate of KL(student || teacher).
    """
    gap = logprobs.detach() - field(pairs, "ref_logprobs")
    return gap * logprobs, {"teacher_kl": kl_estimate("k1", gap)}


@partial(LossSpec, reads_targets=True)
def distill_topk(logprobs: Tensor, pairs: PathPairs, beta: float = 0.0, tail: float = 1.0) -> LossAndMetrics:
    """Returns the divergence of the student's distribution S from the teacher's T over T's likeliest ids.

    It is beta KL(T || M) + (1 - beta) KL(S || M) with M = beta T + (1 - beta) S, the generalized
    Jensen-Shannon divergence of GKD (arXiv:2306.13649). At the ends, it is KL(T || S) for 0, the forward KL,
    and KL(S || T) for 1, the reverse KL.

    Args:
        beta: from 0 to 1, as in TRL.
        tail: 1: all other ids are one more symbol, with the rest of the probability (TRL's add_tail_bucket),
            which is at least the epsilon of the log-probs' dtype. The result is a lower bound of the
            divergence over the whole vocabulary. 0: both distributions are normalized over the ids, as in
            TRL without the tail. (verl's forward_kl_topk sums p log(p / q) over them without either.)

    Returns:
        Losses, and the metrics teacher_kl, KL(S || T) over the same symbols, and teacher_mass, the
        probability of the ids under the teacher.

    Raises:
        UserError: the paths have no teacher_topk, or an option is out of range.
    """
    if not 0 <= beta <= 1 or tail not in (0, 1):
        raise UserError(
            f"loss 'distill_topk': expected beta from 0 to 1 and tail 0 or 1, got {beta:g} and {tail:g}"
        )
    targets = pairs.targets
    if targets is None or targets.student is None:
        raise UserError(
            "loss: the paths have no targets of a teacher; give teacher_topk to every path: titan-tree score "
            "--top-k computes it; a loop of your own also passes batch.with_target_logprobs(...) to the loss"
        )
    student, teacher = targets.student, targets.teacher.to(targets.student.dtype)

    def total(values: Tensor) -> Tensor:
        """Returns the sums over the targets of each pair, [F]. Deterministic, unlike index_add on a GPU."""
        return values.new_zeros(len(logprobs)).index_put((targets.pair,), values, accumulate=True)

    teacher_mass = total(teacher.exp())
    if tail:
        rest_teacher, rest_student = (_log_rest(mass) for mass in (teacher_mass, total(student.exp())))
    else:
        teacher, student = (x - _log_total(x, total, targets.pair) for x in (teacher, student))

    def over_symbols(term: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
        return total(term(teacher, student)) + (term(rest_teacher, rest_student) if tail else 0.0)

    def between(t: Tensor, s: Tensor) -> Tensor:
        if beta == 0:
            return t.exp() * (t - s)
        m = torch.logaddexp(t + log(beta), s + log(1 - beta))
        return beta * t.exp() * (t - m) + (1 - beta) * s.exp() * (s - m)

    reverse = over_symbols(lambda t, s: s.exp() * (s - t))
    loss = reverse if beta == 1 else over_symbols(between)
    return loss, {"teacher_kl": reverse, "teacher_mass": teacher_mass}


def _log_rest(mass: Tensor) -> Tensor:
    """Returns the logarithm of what is left of a probability."""
    return (1 - mass).clamp_min(torch.finfo(mass.dtype).eps).log()


def _log_total(logprobs: Tensor, total: Callable[[Tensor], Tensor], pair: Tensor) -> Tensor:
    """Returns [S]: the logarithm of the sum of the probabilities of each target's pair."""
    peak = torch.full_like(total(logprobs), -torch.inf)
    peak = peak.detach().scatter_reduce(0, pair, logprobs.detach(), "amax")[pair]
    return peak + total((logprobs - peak).exp())[pair].log()
