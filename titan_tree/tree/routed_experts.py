"""Routing replay: training uses the experts that sampling used for each token (R3, arXiv:2510.11370).

The sampling engine and the trainer use different numerics, so their routers sometimes choose different
experts for the same token. The ratio between the probabilities of the two policies then jumps. Paths can
therefore record the experts that sampling used (``TokenPath.routed_experts``), and training forces tokens to
use them. Router probabilities, and with them the weights of the experts and all gradients, are still the
model's own.

A *row* is one token in one layer. Paths that share a token may have been sampled in different batches, and
their records of a row may disagree. Two records agree if they hold the same set of experts, in any order.
``Replay`` says which experts such a row uses.

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


class Records(NamedTuple):
    """The recorded experts of a trie.

    Both counts always refer to the trie that merges paths by tokens alone, even if ``replay`` is "split".
    """

    experts: np.ndarray  # [N, L, k] int16; -1: not recorded, the router chooses
    num_rows: int  # rows that at least one path recorded
    num_disagreeing: int  # recorded rows on which paths disagree


def merged_records(
    paths: Sequence[TokenPath], index: Sequence[np.ndarray], num_tokens: int, replay: Replay
) -> Records | None:
    """Merges the records of paths into records of their trie.

    Args:
        paths: the paths of the trie.
        index: for each path, the numbers of its tokens in the trie.
        num_tokens: N, the size of the trie.
        replay: see ``Replay``.

    Returns:
        None if ``replay`` is "off" or no path has records.

    Raises:
        UserError: ``replay`` is unknown, or models of different sizes recorded their experts.
    """
    if replay not in get_args(Replay):
        raise UserError(f"replay: expected one of {', '.join(get_args(Replay))}; got {replay!r}")
    recorded = [(path, tokens) for path, tokens in zip(paths, index, strict=True) if has_records(path)]
    if replay == "off" or not recorded:
        return None
    shape = _experts_of(recorded[0][0]).shape[1:]
    experts = np.full((num_tokens, *shape), -1, np.int16)
    experts_sorted = experts.copy()  # the same sets, each in ascending order
    disagree = np.zeros((num_tokens, shape[0]), bool)
    for path, tokens in recorded:
        rows = _experts_of(path)
        if rows.shape[1:] != shape:
            raise UserError(
                f"path {path.id or '?'}: routed_experts: expected {shape[0]} layers and {shape[1]} experts "
                f"per token, as in path {recorded[0][0].id or '?'}, got {rows.shape[1]} and {rows.shape[2]}"
            )
        rows_sorted = np.sort(rows, axis=-1)
        has, had = rows[..., 0] >= 0, experts[tokens, :, 0] >= 0
        disagree[tokens] |= has & had & (rows_sorted != experts_sorted[tokens]).any(-1)
        new = (has & ~had)[..., None]
        experts[tokens] = np.where(new, rows, experts[tokens])
        experts_sorted[tokens] = np.where(new, rows_sorted, experts_sorted[tokens])
    if replay == "majority" and disagree.any():
        _apply_majority(recorded, disagree, experts)
    return Records(experts, int((experts[..., 0] >= 0).sum()), int(disagree.sum()))


def split_keys(paths: Sequence[TokenPath]) -> list[np.ndarray]:
    """Returns the keys by which "split" merges: [T] int64 per path, equal if tokens and records are equal.

    At least one path must have records.
    """
    recorded = next(_experts_of(path) for path in paths if has_records(path))
    missing = np.full_like(recorded[0], -1).tobytes()
    numbers = {missing: 0}  # distinct records of one token, numbered as they appear

    def record_numbers(path: TokenPath) -> np.ndarray:
        if not has_records(path):
            return np.zeros(len(path), np.int64)
        experts_sorted = np.sort(_experts_of(path), axis=-1)
        return np.array(
            [numbers.setdefault(token.tobytes(), len(numbers)) for token in experts_sorted], np.int64
        )

    # The token takes the upper bits, so keys are sorted by token first. Where records agree, the trie of keys
    # therefore has the same order as the trie of tokens.
    return [(path.tokens.astype(np.int64) << 32) + record_numbers(path) for path in paths]


def has_records(path: TokenPath) -> bool:
    """Returns whether the path recorded its experts."""
    return path.routed_experts is not None


def _experts_of(path: TokenPath) -> np.ndarray:
    assert path.routed_experts is not None
    return path.routed_experts


def _apply_majority(
    recorded: Sequence[tuple[TokenPath, np.ndarray]], disagree: np.ndarray, experts: np.ndarray
) -> None:
    """Writes the most frequent set into ``experts`` [N, L, k] for all rows that ``disagree`` [N, L] marks."""
    num_layers, top_k = experts.shape[1:]
    row_ids, votes = [], []  # one per vote: the number of the row, and its experts
    for path, tokens in recorded:
        at, layer = np.nonzero(disagree[tokens] & (_experts_of(path)[..., 0] >= 0))
        row_ids.append(tokens[at].astype(np.int64) * num_layers + layer)
        votes.append(_experts_of(path)[at, layer])
    row, vote = np.concatenate(row_ids), np.concatenate(votes)
    ballots = _as_bytes(np.concatenate([row[:, None], np.sort(vote, axis=-1)], axis=1))
    _, first, count = np.unique(ballots, return_index=True, return_counts=True)
    # Sort by row, then by descending count, then by first appearance. The first entry of each row wins.
    order = np.lexsort((first, -count, row[first]))
    best = first[order[np.unique(row[first][order], return_index=True)[1]]]
    experts.reshape(-1, top_k)[row[best]] = vote[best]


def _as_bytes(rows: np.ndarray) -> np.ndarray:
    """Returns [n] opaque values that are equal if the rows of ``rows`` [n, m] are."""
    rows = np.ascontiguousarray(rows)
    return rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))[:, 0]
