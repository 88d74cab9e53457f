"""The sampler's log-probs, as paths store them, against those of the trainer, with a cause for each token.

A cause is a change of the paths under which the trainer's log-prob of the token becomes the stored one.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_tree.certify.certified_step import CertifiedStep
from titan_tree.certify.checks import Comparison
from titan_tree.certify.numbers import Scores, score
from titan_tree.rl.settings import RLRunConfig
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.routed_experts import Replay
from titan_tree.tree.token_tree import TokenTree

NOISE = "dtype"
MIN_NATS = 1e-3  # a smaller difference is noise
FLOORS = 4.0  # so is one of this many times the largest error of the training dtype
TEMPERATURES = (1.0, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3, 1.5, 2.0)
MAX_CUT = 0.7  # nats: truncation keeps at least half of the probability
SHOWN = 50  # tokens in the JSON
NAMES = {
    NOISE: "rounding",
    "loss mask": "the loss counts a token that the sampler did not draw",
    "routing": "the sampler used the experts that the path records; set data.replay",
    "sampling support": "one of both normalized over the ids that top-p, top-k or min-p kept",
    "alignment": "the log-probs are shifted by one token",
    "temperature": "the sampler's logits were divided by this",
    "unknown": "other weights, or other tokens before them: another chat template or tokenizer",
}


class Token(NamedTuple):
    """A token that the loss counts, whose stored log-prob differs from the trainer's by more than noise."""

    place: tuple[str, int]  # the path, and the token's number in it
    stored: float
    trainer: float
    cause: str


def compare_sampler(
    certified: CertifiedStep, trees: Scores, exact: Scores, noisy: Scores
) -> Comparison | None:
    """Compares stored log-probs with the trainer's. Returns None if the paths store none.

    Records may come from older weights. They fail only if most tokens agree, as they do with equal weights.
    """
    paths = certified.paths
    if any(stored(path) is None for path in paths):
        return None
    given = [torch.from_numpy(stored(path)[1:]).double() for path in paths]  # type: ignore[index]
    counted = torch.cat([torch.from_numpy(path.loss_mask[1:] > 0) for path in paths])
    want, own = torch.cat(given)[counted], torch.cat(trees.logprobs).double()[counted]
    pairs = zip(noisy.logprobs, exact.logprobs, strict=True)
    noise = max(((a - b).abs().max().item() for a, b in pairs if len(a)), default=0.0)
    limit = max(MIN_NATS, FLOORS * noise)
    cause = np.full(len(want), "unknown", object)
    cause[((want - own).abs() <= limit).numpy()] = NOISE
    for name, explained in _explanations(certified, trees.logprobs, want, own, counted, limit):
        left = torch.from_numpy(cause == "unknown")
        if not left.any():
            break
        cause[(left & explained(left)).numpy()] = name
    error = (want - own).abs().mean().item() if len(want) else 0.0
    numbers = counted.nonzero()[:, 0].tolist()
    places = [(path.id or "?", token) for path in paths for token in range(1, len(path))]
    tokens = [
        Token(places[numbers[i]], want[i].item(), own[i].item(), str(cause[i]))
        for i in np.flatnonzero(cause != NOISE).tolist()
    ]
    counts = Counter(token.cause for token in tokens)
    found = (
        f"{len(want):,} tokens, rounding"
        if not tokens
        else "; ".join(
            f"{number:,} of {len(want):,} tokens: {name}: {NAMES.get(name.partition(' = ')[0], name)}"
            for name, number in counts.most_common()
        )
    )
    is_same_policy = isinstance(certified.config, RLRunConfig) or counts["unknown"] < len(want) / 2
    passed = not tokens or (False if is_same_policy else None)
    return Comparison(
        "sampler", passed, found, error, noise, limit, [token._asdict() for token in tokens[:SHOWN]]
    )


def stored(path: TokenPath) -> np.ndarray | None:
    """Returns the log-probs [T] that the sampler reported."""
    return path.old_logprobs if path.rollout_logprobs is None else path.rollout_logprobs


def _explanations(
    certified: CertifiedStep, by_path: list[Tensor], want: Tensor, own: Tensor, counted: Tensor, limit: float
) -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    """Yields causes, each with a function of the tokens that are left: which of them the cause explains.

    Args:
        by_path: the trainer's log-probs of each path.
        want, own: the stored log-probs and the trainer's, of the counted tokens.
        counted: which tokens of all paths count.
    """
    paths = certified.paths

    def fits(values: Tensor) -> Tensor:
        return (want - values.double()[counted]).abs() <= limit

    def most(values: Callable[[], Tensor], left: Tensor) -> Tensor:
        """Returns what a cause explains, or nothing if that is less than half of what is left."""
        explained = fits(values())
        return explained if explained[left].double().mean() >= 0.5 else torch.zeros_like(explained)

    was_given = torch.cat(
        [
            torch.zeros(len(path) - 1, dtype=torch.bool)
            if path.policy_version is None
            else torch.from_numpy(path.policy_version[1:] < 0)
            for path in paths
        ]
    )
    # Engines report 0 for tokens that they did not draw.
    yield "loss mask", lambda left: (want == 0) | was_given[counted]
    if any(path.routed_experts is not None for path in paths):
        yield "routing", lambda left: fits(_rescored(certified, "first"))
    if any(path.sampling_mask is not None for path in paths):
        yield "sampling support", lambda left: fits(_rescored(certified, sampling_mask=None))
    for temperature in TEMPERATURES:
        at_temperature = partial(_rescored, certified, temperature=temperature)
        yield f"temperature = {temperature}", partial(most, at_temperature)
    for shift in (-1, 1):
        rolled = torch.cat([values.roll(shift) for values in by_path])
        yield "alignment", partial(most, partial(torch.clone, rolled))
    kept = want - own  # minus the logarithm of the probability that truncation kept
    is_kept = (kept > 0) & (kept < MAX_CUT)
    yield "sampling support", lambda left: is_kept if bool(is_kept[left].all()) else torch.zeros_like(is_kept)


def _rescored(certified: CertifiedStep, replay: Replay = "off", **fields: object) -> Tensor:
    """Returns the trainer's log-probs of all paths, one after another, with other fields of the paths."""

    def changed(path: TokenPath) -> TokenPath:
        path = copy.copy(path)
        for name, value in fields.items():
            setattr(path, name, value)
        return path

    micro_batches = [
        [TokenTree.from_paths([changed(path) for path in tree.paths], replay) for tree in trees]
        for trees in certified.micro_batches
    ]
    return torch.cat(score(certified.tree_step, micro_batches).logprobs)
