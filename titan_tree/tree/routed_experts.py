"""Routing replay: training uses the experts that sampling used for each token (R3, arXiv:2510.11370).

The sampling engine and the trainer use different numerics, so their routers sometimes choose different
experts for the same token. The ratio between the probabilities of the two policies then jumps. Paths can
therefore record the experts that sampling used (``TokenPath.routed_experts``), and training forces tokens to
use them. Router probabilities, and with them the weights of the experts and all gradients, are still the
model's own.

A *token-layer* is one token in one layer. Paths that share a token may have been sampled in different
batches, and their records of a token-layer may disagree. Two records agree if they hold the same set of
experts, in any order. ``Replay`` says which experts such a token-layer uses.

Sizes: N tokens of a trie, L layers with experts, k experts per token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from titan_tree.errors import UserError
from titan_tree.tree.paths import TokenPath

# "off"       ignores all records.
# "first"     uses the record of the first path that has one.
# "majority"  uses the set that most paths recorded; of equally frequent sets the first one.
# "split"     merges two tokens only if their records, too, agree in every layer. A missing record agrees only
#             with another missing one. Every path keeps its own experts, and paths share fewer tokens.
Replay = Literal["off", "first", "majority", "split"]


class RoutedExperts(NamedTuple):
    """The recorded experts of a trie.

    Both counts always refer to the trie that merges paths by tokens alone, even if ``replay`` is "split".
    """

    experts: np.ndarray  # [N, L, k] int16; -1: not recorded, the router chooses
    num_token_layers: int  # token-layers that at least one path recorded
    num_disagreeing: int  # recorded token-layers on which paths disagree


def merged_experts(
    paths: Sequence[TokenPath], index: Sequence[np.ndarray], num_tokens: int, replay: Replay
) -> RoutedExperts | None:
    """Merges the records of paths into records of their trie.

    Args:
        paths: the paths of the trie.
        index: the numbers of each path's tokens in the trie.
        num_tokens: N, the size of the trie.
        replay: see ``Replay``.

    Returns:
        None if ``replay`` is "off" or no path has records.

    Raises:
        UserError: ``replay`` is unknown, or models of different sizes recorded their experts.
    """
    if replay not in get_args(Replay):
        raise UserError(f"replay: expected one of {', '.join(get_args(Replay))}; got {replay!r}")
    recorded = [(path, tokens) for path, tokens in zip(paths, index, strict=True) if has_experts(path)]
    if replay == "off" or not recorded:
        return None
    shape = _experts_of(recorded[0][0]).shape[1:]
    experts = np.full((num_tokens, *shape), -1, np.int16)
    experts_sorted = experts.copy()  # the same sets, each in ascending order
    disagree = np.zeros((num_tokens, shape[0]), bool)
    for path, tokens in recorded:
        path_experts = _experts_of(path)
        if path_experts.shape[1:] != shape:
            raise UserError(
                f"path {path.id or '?'}: routed_experts: expected {shape[0]} layers and {shape[1]} experts "
                f"per token, as in path {recorded[0][0].id or '?'}, got {path_experts.shape[1]} and "
                f"{path_experts.shape[2]}"
            )
        path_sorted = np.sort(path_experts, axis=-1)
        has, had = path_experts[..., 0] >= 0, experts[tokens, :, 0] >= 0
        disagree[tokens] |= has & had & (path_sorted != experts_sorted[tokens]).any(-1)
        new = (has & ~had)[..., None]
        experts[tokens] = np.where(new, path_experts, experts[tokens])
        experts_sorted[tokens] = np.where(new, path_sorted, experts_sorted[tokens])
    if replay == "majority" and disagree.any():
        _apply_majority(recorded, disagree, experts)
    return RoutedExperts(experts, int((experts[..., 0] >= 0).sum()), int(disagree.sum()))


def split_keys(paths: Sequence[TokenPath], keys: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Returns the keys by which "split" merges: [T] int64 per path, equal if tokens and records are equal.

    Args:
        paths: at least one of them must have records.
        keys: the ``merge_keys`` of the paths.
    """
    recorded = next(_experts_of(path) for path in paths if has_experts(path))
    missing = np.full_like(recorded[0], -1).tobytes()
    numbers = {missing: 0}  # distinct records of one token, numbered as they appear

    def record_numbers(path: TokenPath) -> np.ndarray:
        if not has_experts(path):
            return np.zeros(len(path), np.int64)
        experts_sorted = np.sort(_experts_of(path), axis=-1)
        return np.array(
            [numbers.setdefault(token.tobytes(), len(numbers)) for token in experts_sorted], np.int64
        )

    # The token takes the upper bits, so keys are sorted by token first. Where records agree, the trie of keys
    # therefore has the same order as the trie of tokens.
    return [
        (key.astype(np.int64) << 32) + record_numbers(path) for path, key in zip(paths, keys, strict=True)
    ]


def has_experts(path: TokenPath) -> bool:
    return path.routed_experts is not None


def _experts_of(path: TokenPath) -> np.ndarray:
    assert path.routed_experts is not None
    return path.routed_experts


def _apply_majority(
    recorded: Sequence[tuple[TokenPath, np.ndarray]], disagree: np.ndarray, experts: np.ndarray
) -> None:
    """Writes the most frequent set into ``experts`` [N, L, k] where ``disagree`` [N, L] is true."""
    num_layers, top_k = experts.shape[1:]
    token_layers, votes = [], []  # one per vote: the number of the token-layer, and its experts
    for path, tokens in recorded:
        at, layer = np.nonzero(disagree[tokens] & (_experts_of(path)[..., 0] >= 0))
        token_layers.append(tokens[at].astype(np.int64) * num_layers + layer)
        votes.append(_experts_of(path)[at, layer])
    token_layer, vote = np.concatenate(token_layers), np.concatenate(votes)
    ballots = _as_bytes(np.concatenate([token_layer[:, None], np.sort(vote, axis=-1)], axis=1))
    _, first, count = np.unique(ballots, return_index=True, return_counts=True)
    # Sort by token-layer, descending count and first appearance. The first entry of each token-layer wins.
    order = np.lexsort((first, -count, token_layer[first]))
    best = first[order[np.unique(token_layer[first][order], return_index=True)[1]]]
    experts.reshape(-1, top_k)[token_layer[best]] = vote[best]


def _as_bytes(rows: np.ndarray) -> np.ndarray:
    """Returns [n] opaque values that are equal if the rows of ``rows`` [n, m] are."""
    rows = np.ascontiguousarray(rows)
    return rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))[:, 0]
