"""Routing replay: tokens of a tree have the experts that sampling gave them (R3, arXiv:2510.11370).

An engine that samples rounds otherwise than a trainer, so a router chooses otherwise now and then, and
the ratio of both policies jumps. Paths that record what was chosen (``TokenPath.routed_experts``) train with
it; the router's probabilities, hence weights and gradients, are those of the model as it is.

Two paths may have been sampled in different batches and disagree on a token that they share. A *row* is one
token in one layer; rows agree where they are equal as sets.

N tokens of a trie, L layers with experts, k experts of a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from titan_tree.errors import UserError
from titan_tree.tree.paths import TokenPath

# What a row on which paths disagree becomes. "off": records are not used. "first": that of the first path
# that has one. "majority": the set that most paths have, of several the first. "split": paths part before a
# token whose records differ, or are missing in one: every path has its own, and they share less.
Replay = Literal["off", "first", "majority", "split"]


class Records(NamedTuple):
    """The experts of a trie's tokens. Rows are counted where paths merge by their tokens, split or not."""

    experts: np.ndarray  # [N, L, k] int16; -1: not recorded, the model chooses
    num_rows: int  # that some path recorded
    num_disagreeing: int  # of these, on which paths disagree


def merged_records(
    paths: Sequence[TokenPath], index: Sequence[np.ndarray], num_tokens: int, replay: Replay
) -> Records | None:
    """Of a trie, given the trie's tokens that each path consists of; None where no path has records.

    Raises UserError for an unknown ``replay``, and where paths have records of different models.
    """
    if replay not in get_args(Replay):
        raise UserError(f"replay: expected one of {', '.join(get_args(Replay))}; got {replay!r}")
    recorded = [(path, tokens) for path, tokens in zip(paths, index, strict=True) if has_records(path)]
    if replay == "off" or not recorded:
        return None
    shape = _experts_of(recorded[0][0]).shape[1:]
    experts = np.full((num_tokens, *shape), -1, np.int16)
    ordered = experts.copy()  # each row sorted
    disagree = np.zeros((num_tokens, shape[0]), bool)
    for path, tokens in recorded:
        rows = _experts_of(path)
        if rows.shape[1:] != shape:
            raise UserError(
                f"path {path.id or '?'}: routed_experts: expected {shape[0]} layers and {shape[1]} experts "
                f"of a token, as path {recorded[0][0].id or '?'} has, got {rows.shape[1]} and {rows.shape[2]}"
            )
        rows_ordered = np.sort(rows, axis=-1)
        has, had = rows[..., 0] >= 0, experts[tokens, :, 0] >= 0
        disagree[tokens] |= has & had & (rows_ordered != ordered[tokens]).any(-1)
        new = (has & ~had)[..., None]
        experts[tokens] = np.where(new, rows, experts[tokens])
        ordered[tokens] = np.where(new, rows_ordered, ordered[tokens])
    if replay == "majority" and disagree.any():
        _vote(recorded, disagree, experts)
    return Records(experts, int((experts[..., 0] >= 0).sum()), int(disagree.sum()))


def split_keys(paths: Sequence[TokenPath]) -> list[np.ndarray]:
    """[T] int64 of each path, equal where tokens and records are: what a trie of replay "split" merges by.

    One path at least has records.
    """
    recorded = next(_experts_of(path) for path in paths if has_records(path))
    none = np.full_like(recorded[0], -1).tobytes()
    kinds = {none: 0}  # of distinct records of a token

    def kind(path: TokenPath) -> np.ndarray:
        if not has_records(path):
            return np.zeros(len(path), np.int64)
        ordered = np.sort(_experts_of(path), axis=-1)
        return np.array([kinds.setdefault(token.tobytes(), len(kinds)) for token in ordered], np.int64)

    # Tokens first, so that where records agree the trie is that of the tokens, in the same order.
    return [(path.tokens.astype(np.int64) << 32) + kind(path) for path in paths]


def has_records(path: TokenPath) -> bool:
    return path.routed_experts is not None


def _experts_of(path: TokenPath) -> np.ndarray:
    assert path.routed_experts is not None
    return path.routed_experts


def _vote(
    recorded: Sequence[tuple[TokenPath, np.ndarray]], disagree: np.ndarray, experts: np.ndarray
) -> None:
    """Puts into ``experts`` [N, L, k], where paths ``disagree`` [N, L], the set that most of them have."""
    num_layers, top_k = experts.shape[1:]
    names, votes = [], []  # of each vote the row, by its number, and its experts
    for path, tokens in recorded:
        at, layer = np.nonzero(disagree[tokens] & (_experts_of(path)[..., 0] >= 0))
        names.append(tokens[at].astype(np.int64) * num_layers + layer)
        votes.append(_experts_of(path)[at, layer])
    name, vote = np.concatenate(names), np.concatenate(votes)
    ballots = _as_bytes(np.concatenate([name[:, None], np.sort(vote, axis=-1)], axis=1))
    _, first, count = np.unique(ballots, return_index=True, return_counts=True)
    # Row by row, most votes first, and of as many the earliest.
    order = np.lexsort((first, -count, name[first]))
    best = first[order[np.unique(name[first][order], return_index=True)[1]]]
    experts.reshape(-1, top_k)[name[best]] = vote[best]


def _as_bytes(rows: np.ndarray) -> np.ndarray:
    """[n] opaque values, equal where rows of ``rows`` [n, m] are."""
    rows = np.ascontiguousarray(rows)
    return rows.view(np.dtype((np.void, rows.itemsize * rows.shape[1])))[:, 0]
