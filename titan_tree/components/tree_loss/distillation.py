"""Distillation: from the teacher's log-prob of the sampled token, and from those of its likeliest tokens.

Symbols of F, l and pairs are those of token_losses.py.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import log

import torch
from torch import Tensor

from titan_tree.components.tree_loss.ratios import field, kl_estimate
from titan_tree.components.tree_loss.spec import LossAndMetrics, LossSpec
from titan_tree.errors import UserError
from titan_tree.tree.batch import PathPairs


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
