"""Losses of preference pairs: dpo, ipo, apo_zero, simpo, orpo and cpo; and kto, which needs no pairs.

A pair is a chosen and a rejected path of one tree. All tokens of both paths get the loss of the pair, so the
reduction "path_token_mean" is the mean over pairs. In formulas, c is the chosen path and d the rejected one.
l is a path's log-prob, the sum over its counted tokens, and f that under the reference model. T is its number
of counted tokens, and S = l - f.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_tree.components.tree_loss.ratios import field
from titan_tree.components.tree_loss.spec import LossAndMetrics, LossSpec, Measurement
from titan_tree.tree.batch import PathPairs

_pair_loss = partial(
    LossSpec,
    reduction="path_token_mean",
    needs_whole_paths=True,
    compares_paths=True,
    reads_reference=True,
    reads_preferences=True,
)
_pair_loss_without_reference = partial(_pair_loss, reads_reference=False)


@_pair_loss
def dpo(
    logprobs: Tensor, pairs: PathPairs, beta: float = 0.1, label_smoothing: float = 0.0
) -> LossAndMetrics:
    """Returns -log sigmoid(beta (S_c - S_d)) (DPO, arXiv:2305.18290).

    Args:
        beta: strength of the tie to the reference model.
        label_smoothing: probability that a label is wrong (conservative DPO).

    Returns:
        Losses, and the metrics margin, beta (S_c - S_d), and accuracy, the share of positive margins.
    """
    margin = beta * _difference(_scores(logprobs, pairs), pairs)
    loss = -(1 - label_smoothing) * F.logsigmoid(margin) - label_smoothing * F.logsigmoid(-margin)
    return _on_tokens(loss, margin, pairs)


@_pair_loss
def ipo(logprobs: Tensor, pairs: PathPairs, beta: float = 0.1) -> LossAndMetrics:
    """Returns (S_c / T_c - S_d / T_d - 1 / (2 beta))^2 (IPO, arXiv:2310.12036).

    The means over tokens follow TRL, which agreed on them with the authors.
    """
    margin = _difference(_scores(logprobs, pairs) / pairs.loss_tokens, pairs)
    return _on_tokens((margin - 1 / (2 * beta)).square(), margin, pairs)


@_pair_loss
def apo_zero(logprobs: Tensor, pairs: PathPairs, beta: float = 0.1) -> LossAndMetrics:
    """Returns 1 - sigmoid(beta S_c) + sigmoid(beta S_d) (APO-zero, arXiv:2408.06266).

    It is KTO (arXiv:2402.01306) on pairs with a reference point of 0.
    """
    score = beta * _scores(logprobs, pairs)
    path_loss = torch.sigmoid(-_sign(pairs) * score)
    return _on_tokens(path_loss + path_loss[field(pairs, "partner")], _difference(score, pairs), pairs)


def _mismatched_scores(logprobs: Tensor, pairs: PathPairs) -> Tensor:
    """Returns [2]: the sum of S over mismatched paths, and their number."""
    is_mismatched = field(pairs, "is_mismatched")
    return torch.stack([(_scores(logprobs, pairs) * is_mismatched).sum(), is_mismatched.sum()])


_REFERENCE_POINT = Measurement(
    option="reference_point", sums=_mismatched_scores, members="paths with the preference 'mismatched'"
)


@partial(_pair_loss, measurement=_REFERENCE_POINT)
def kto(
    logprobs: Tensor,
    pairs: PathPairs,
    beta: float = 0.1,
    desirable_weight: float = 1.0,
    undesirable_weight: float = 1.0,
    reference_point: float = 0.0,
) -> LossAndMetrics:
    """Returns w_D (1 - sigmoid(beta (S - z))) for chosen paths (KTO, arXiv:2402.01306).

    For the others it is w_U (1 - sigmoid(beta (z - S))). Pairs are possible, but not needed.

    Args:
        beta: strength of the tie to the reference model.
        desirable_weight: w_D.
        undesirable_weight: w_U.
        reference_point: m; z is m, or 0 if m is negative. Unless it is set, m is the mean of S over the
            mismatched paths of the global batch, an estimate of KL(policy || reference), as in TRL.

    Returns:
        Losses, and the metrics margin, beta (S - z) or its negative, accuracy, the share of positive margins,
        and reference_point, which is z.
    """
    z = torch.as_tensor(reference_point, dtype=logprobs.dtype, device=logprobs.device).clamp(min=0)
    margin = _sign(pairs) * beta * (_scores(logprobs, pairs) - z)
    weight = torch.where(field(pairs, "is_chosen"), desirable_weight, undesirable_weight)
    losses, metrics = _on_tokens(weight * torch.sigmoid(-margin), margin, pairs)
    return losses, metrics | {"reference_point": z.expand_as(losses)}


@_pair_loss_without_reference
def simpo(logprobs: Tensor, pairs: PathPairs, beta: float = 2.0, gamma: float = 1.0) -> LossAndMetrics:
    """Returns -log sigmoid(beta (l_c / T_c - l_d / T_d) - gamma) (SimPO, arXiv:2405.14734).

    Args:
        beta: scale of the mean log-probs.
        gamma: margin that the chosen path should have.
    """
    margin = beta * _difference(_path_logprobs(logprobs, pairs) / pairs.loss_tokens, pairs)
    return _on_tokens(-F.logsigmoid(margin - gamma), margin, pairs)


@_pair_loss_without_reference
def orpo(logprobs: Tensor, pairs: PathPairs, beta: float = 0.1) -> LossAndMetrics:
    """Returns -a_c - beta log sigmoid(g_c - g_d) with a = l / T (ORPO, arXiv:2403.07691).

    g = a - log(1 - e^a) is the log-odds. The paper writes lambda for beta.
    """
    mean = _path_logprobs(logprobs, pairs) / pairs.loss_tokens
    # log(1 - e^a) is -inf at 0, which only a model that is certain reaches.
    log_odds = mean - torch.log(-torch.expm1(mean.clamp(max=-1e-7)))
    margin = _difference(log_odds, pairs)
    return _on_tokens(-_chosen_value(mean, pairs) - beta * F.logsigmoid(margin), margin, pairs)


@_pair_loss_without_reference
def cpo(logprobs: Tensor, pairs: PathPairs, beta: float = 0.1, alpha: float = 1.0) -> LossAndMetrics:
    """Returns -log sigmoid(beta (l_c - l_d)) - alpha l_c / T_c (CPO, arXiv:2401.08417).

    In TRL, the second term is a mean over the tokens of all chosen answers of a batch.

    Args:
        beta: scale of the log-probs.
        alpha: weight of the second term, the negative log-likelihood of the chosen path.
    """
    score = _path_logprobs(logprobs, pairs)
    margin = beta * _difference(score, pairs)
    nll = -_chosen_value(score / pairs.loss_tokens, pairs)
    return _on_tokens(alpha * nll - F.logsigmoid(margin), margin, pairs)


def _path_logprobs(values: Tensor, pairs: PathPairs) -> Tensor:
    """Returns [P]: the sums of ``values`` [F] over the counted tokens of each path."""
    # Unlike path_sum, it counts paths of weight 0: their partners need them.
    zeros = torch.zeros_like(pairs.loss_tokens, dtype=values.dtype)
    return zeros.index_add(0, pairs.path, values * pairs.loss_mask)


def _scores(logprobs: Tensor, pairs: PathPairs) -> Tensor:
    """Returns S [P]."""
    return _path_logprobs(logprobs - field(pairs, "ref_logprobs"), pairs)


def _sign(pairs: PathPairs) -> Tensor:
    """Returns [P]: 1 for chosen and -1 for rejected paths."""
    return torch.where(field(pairs, "is_chosen"), 1.0, -1.0)


def _difference(values: Tensor, pairs: PathPairs) -> Tensor:
    """Returns [P]: the value of the chosen path minus that of the rejected one, for both paths of a pair."""
    return _sign(pairs) * (values - values[field(pairs, "partner")])


def _chosen_value(values: Tensor, pairs: PathPairs) -> Tensor:
    """Returns [P]: the value of the chosen path, for both paths of a pair."""
    return torch.where(field(pairs, "is_chosen"), values, values[field(pairs, "partner")])


def _on_tokens(loss: Tensor, margin: Tensor, pairs: PathPairs) -> LossAndMetrics:
    """Returns the losses of pairs, and their metrics, for every token of their paths."""
    metrics = {"margin": margin, "accuracy": (margin > 0).float()}
    return loss[pairs.path], {name: value[pairs.path] for name, value in metrics.items()}
