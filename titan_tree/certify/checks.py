"""The checks of a certificate: what they measure, and when they fail."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import numpy as np
import torch
from torch import Tensor

from titan_tree.certify.certified_step import CertifiedStep
from titan_tree.certify.numbers import Numbers, Scores, score_tree
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.tree_model import TreeModel
from titan_tree.tree.token_tree import TokenTree

TOLERANCE = 1e-5  # a relative error up to this is no fault
# The largest error of N tokens, in multiples of the noise floor, which is a random number if N is small.
FLOORS, FLOORS_OF_FEW = 1.2, 6.0  # 1.2 + 6 / sqrt(N)
# The same for the gradient of one parameter, whose few numbers may round unluckily, and for all checks of a
# model with experts, in which rounding may choose another expert for a token.
FLOORS_OF_ONE = 3.0


@dataclass
class Comparison:
    """One row of a certificate."""

    name: str
    passed: bool | None  # None: not a reason to fail
    found: str  # one sentence
    error: float | None = None  # relative, of the step on trees
    floor: float | None = None  # of every path alone in the dtype of training
    limit: float | None = None
    tokens: list[dict[str, object]] = field(default_factory=list)  # those that differ, see sampler.py


def compare(trees: Numbers, exact: Numbers, noisy: Numbers, certified: CertifiedStep) -> list[Comparison]:
    """Compares a step on trees with the exact one, beside the noise floor: the errors of ``noisy``.

    The checks are in the order of the computation, so the first that fails is next to the cause.
    """
    checks = []
    assert exact.scores
    assert noisy.scores
    floors = FLOORS + FLOORS_OF_FEW / math.sqrt(sum(map(len, certified.paths)))
    if _has_experts(certified.tree_step.model):
        floors = max(floors, FLOORS_OF_ONE)
    if trees.scores:
        checks.append(_layers(trees.scores, exact.scores, noisy.scores, certified, floors))
        checks.append(_logprobs(trees.scores, exact.scores, noisy.scores, certified, floors))
    # The loss is one number, whose own noise may be small by chance.
    noise = relative(torch.cat(noisy.scores.logprobs), torch.cat(exact.scores.logprobs))
    error, floor = (abs(step.loss - exact.loss) / (abs(exact.loss) or 1.0) for step in (trees, noisy))
    checks.append(
        _check("loss", "", f"{trees.loss:.7g}, alone {exact.loss:.7g}", error, max(floor, noise), floors)
    )
    return [*checks, *_gradients(trees.gradients, exact.gradients, noisy.gradients, floors)]


def _layers(
    trees: Scores, exact: Scores, noisy: Scores, certified: CertifiedStep, floors: float
) -> Comparison:
    """Compares the outputs of the layers. The worst is the first above its limit, or else the largest."""
    rows = []
    for number, layers in enumerate(zip(trees.hidden, exact.hidden, noisy.hidden, strict=True)):
        got, want, other = map(torch.cat, layers)
        rows.append((relative(got, want), relative(other, want), number))
    above = (row for row in rows if not row[0] <= _limit(row[1], floors))
    error, floor, number = next(above, max(rows))
    name = f"layers.{number}"
    model = certified.tree_step.model
    if isinstance(model, Decoder):
        name += f" ({list(model.blocks)[number].mixer_name})"
    worst = _token(certified, trees.hidden[number], exact.hidden[number], first=0)
    what = f"{len(exact.hidden)} layers"
    return _check("outputs of layers", what, f"{name}, {worst}", error, floor, floors)


def _logprobs(
    trees: Scores, exact: Scores, noisy: Scores, certified: CertifiedStep, floors: float
) -> Comparison:
    """Compares the log-probs of the tokens that the loss counts."""
    counted = [torch.from_numpy(path.loss_mask[1:] > 0) for path in certified.paths]
    got, want, other = (
        [torch.where(mask, values, 0.0) for values, mask in zip(scores.logprobs, counted, strict=True)]
        for scores in (trees, exact, noisy)
    )
    worst = _token(certified, got, want, first=1)
    error, floor = (relative(torch.cat(values), torch.cat(want)) for values in (got, other))
    return _check(
        "log-probs", f"{sum(map(int, map(torch.sum, counted)))} counted tokens", worst, error, floor, floors
    )


def _gradients(
    trees: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    noisy: Mapping[str, Tensor],
    floors: float,
) -> list[Comparison]:
    """Compares the gradients of all parameters together, and of each one.

    The error of one parameter is relative to its gradient's norm. If that is smaller than the average element
    of the layer would give, as for the decays of Gated DeltaNet, it is relative to that norm. The noise floor
    of one parameter is at least that of all.
    """
    if missing := [name for name, gradient in exact.items() if name not in trees and gradient.any()]:
        return [Comparison("gradients", False, f"{missing[0]}: expected a gradient, got none")]
    if extra := [name for name, gradient in trees.items() if name not in exact and gradient.any()]:
        return [
            Comparison("gradients", False, f"{extra[0]}: the reference has no such parameter to compare with")
        ]
    if not any(gradient.any() for gradients in (exact, trees) for gradient in gradients.values()):
        raise UserError(
            "titan-tree certify: all gradients of the first step are 0, so a certificate would say nothing; "
            "check advantages and weights, and whether the loss clips every token"
        )
    squares, counts = defaultdict[str, float](float), defaultdict[str, int](int)
    for name, gradient in exact.items():
        squares[_layer(name)] += gradient.double().square().sum().item()
        counts[_layer(name)] += gradient.numel()
    rows = []
    for name, want in exact.items():
        average = (squares[_layer(name)] * want.numel() / counts[_layer(name)]) ** 0.5
        size = max(want.double().norm().item(), average) or 1.0
        both = trees.get(name, torch.zeros_like(want)), noisy[name]
        rows.append((*((gradient.double() - want.double()).norm().item() / size for gradient in both), name))
    error, floor = (math.sqrt(fmean(row[i] ** 2 for row in rows)) for i in (0, 1))
    rows = [(error, max(own, floor), name) for error, own, name in rows]
    rows.sort(key=lambda row: row[0] / max(row[1], TOLERANCE) if row[0] == row[0] else math.inf, reverse=True)
    largest = ", ".join(name for *_, name in rows[:3])
    worst, its_floor, name = rows[0]
    return [
        _check("gradients", f"{len(rows)} parameters", f"largest: {largest}", error, floor, floors),
        _check("gradient of one parameter", "the largest error", name, worst, its_floor, FLOORS_OF_ONE),
    ]


def _check(name: str, what: str, where: str, error: float, floor: float, floors: float) -> Comparison:
    """Makes a check. If it passes, it says what was compared, and otherwise also where the error is."""
    limit = _limit(floor, floors)
    passed = error <= limit < math.inf  # False for NaN
    found = what if passed else f"{where}: error {error:.1e}, limit {limit:.1e}"
    return Comparison(name, passed, found, error, floor, limit)


def _limit(floor: float, floors: float) -> float:
    return max(TOLERANCE, floors * floor)


def _has_experts(model: TreeModel) -> bool:
    return any(".experts." in name for name, _ in model.named_parameters())


def _layer(name: str) -> str:
    match = re.match(r"layers\.\d+\.", name)
    return match[0] if match else name


def relative(got: Tensor, want: Tensor) -> float:
    """Returns the norm of the difference, relative to the norm of ``want``."""
    size = want.double().norm().item() or 1.0
    return (got.double() - want.double()).norm().item() / size


def _token(certified: CertifiedStep, got: Sequence[Tensor], want: Sequence[Tensor], first: int) -> str:
    """Names the token with the largest error. ``first``: the number of the token that entry 0 belongs to."""
    errors = [
        (a.double() - b.double()).reshape(len(a), -1).norm(dim=1).nan_to_num(torch.inf)
        for a, b in zip(got, want, strict=True)
    ]
    number = max(range(len(errors)), key=lambda i: errors[i].max().item() if len(errors[i]) else -1.0)
    token = int(errors[number].argmax()) + first
    path = certified.paths[number]
    return f"largest at token {token} of path {path.id or number}{_after_branch(certified, number, token)}"


def _after_branch(certified: CertifiedStep, number: int, token: int) -> str:
    for tree in certified.trees:
        if number < len(tree.paths):
            index = tree.path_index[tree.path_offsets[number] + token]
            children = np.bincount(tree.predecessor + 1, minlength=len(tree) + 1)
            before = tree.predecessor[index]
            return ", the first after a branch" if before >= 0 and children[before + 1] > 1 else ""
        number -= len(tree.paths)
    raise AssertionError(number)


def repeats(first: Numbers, second: Numbers) -> Comparison:
    """Compares two runs of one step. A difference is no fault; the sums of GPU kernels may change order."""
    errors = {name: relative(second.gradients[name], g) for name, g in first.gradients.items()}
    errors["the loss"] = abs(second.loss - first.loss) / (abs(first.loss) or 1.0)
    worst = max(errors, key=lambda name: errors[name])
    found = f"{worst} differs most" if errors[worst] else "bit for bit"
    return Comparison("same step again", True if not errors[worst] else None, found, errors[worst])


def leaks(step: TreeStep, micro_batches: Sequence[Sequence[TokenTree]]) -> Comparison:
    """Replaces all tokens that a path cannot see, and compares the outputs of layers for this path.

    It reads the first and the last path in the order of the tree, between which all others lie. Experts
    multiply the tokens of all branches together, in an order that depends on them, which may change rounding.
    """
    name, limit = "other branches", TOLERANCE if _has_experts(step.model) else 0.0
    rows = []
    for trees in micro_batches:
        tree = TokenTree.forest(trees)
        before, _ = score_tree(step, tree)
        for number in {int(tree.path_node.argmin()), int(tree.path_node.argmax())}:
            own = tree.path_index[tree.path_offsets[number] : tree.path_offsets[number + 1]].astype(np.int64)
            tokens = (tree.tokens + 1) % step.model.config.vocab_size
            tokens[own] = tree.tokens[own]
            if len(own) == len(tree):
                continue
            other = dataclasses.replace(tree, tokens=tokens)
            if tree.image_row is not None:  # images become text
                image_row = np.full_like(tree.image_row, -1)
                image_row[own] = tree.image_row[own]
                other = dataclasses.replace(other, image_row=image_row)
            after, _ = score_tree(step, other)
            for layer, (a, b) in enumerate(zip(before, after, strict=True)):
                error = relative(b[torch.from_numpy(own)], a[torch.from_numpy(own)])
                rows.append((error, f"layers.{layer}, path {tree.paths[number].id or number}"))
    if not rows:
        return Comparison(name, None, "no path has tokens that another one cannot see")
    # The first output above the limit is next to the cause.
    error, where = next((row for row in rows if not row[0] <= limit), max(rows))
    found = (
        f"{where}: other tokens there change the output"
        if error
        else "their tokens change nothing, bit for bit"
    )
    return Comparison(name, error <= limit, found, error, limit=limit)
