"""The rows of the gateway cache that each partition reads and writes.

Partitions pass two kinds of tensors to the partitions below them: the keys and values of tokens, and the
states of recurrent layers after a token. The *gateway cache* (engine/partitions.py) stores both, for one
chain of partitions at a time. It has two *streams* of rows, "keys" and "states", and works like a stack: a
partition writes its rows after those of the partitions above it, and its descendants read them there. The
next partition with the same parent overwrites these rows. In each stream the first PAD rows are padding that
nothing reads.

This file plans the rows on the host. It knows tokens only, never the tensors in the rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from titan_tree.tree.partition import PAD, Partition
from titan_tree.tree.token_tree import TokenTree


class CacheRows(NamedTuple):
    """A number of rows in each stream of the gateway cache."""

    keys: int
    states: int


NO_CACHE_ROWS = CacheRows(0, 0)


@dataclass(frozen=True, eq=False, kw_only=True)
class GatewayAccess:
    """The rows of the gateway cache that one partition reads and writes.

    The partition reads rows below ``cache_offset``. It writes its exports to the rows from ``cache_offset``
    on. Exports are own tokens, named by their index among the own tokens, and padded to at least PAD entries.

    The tree of ``TokenTree``'s example, with tokens named by their index, in four partitions:

        0: [0 1] -+- 1: [2] --- 2: [3 4 5]      token 2 follows 1; 3 and 5 follow 2; 4 follows 3
                  +- 3: [6]                     token 6 follows 1

        rows of keys         0  1 | 2  3 | 4  5       rows of states       0  1 | 2  3 | 4  5
        while 2 runs         -  - | 0  1 | 2  2       while 2 runs         -  - | 1  1 | 2  2
        while 3 runs         -  - | 0  1 |            while 3 runs         -  - | 1  1 |

    The table shows which token's tensors each row holds. ``-`` marks the rows that nothing reads. A token is
    repeated where exports are padded. Partition 2 reads rows 2, 3 and 4 of the keys, and its tokens 3 and 5
    start from row 4 of the states.

    >>> from titan_tree.tree.partition import in_tree_order
    >>> from titan_tree.tree.paths import TokenPath
    >>> paths = [TokenPath([1, 2, 3, 4]), TokenPath([1, 2, 3, 5, 6]), TokenPath([1, 2, 7])]
    >>> tree = TokenTree.from_paths(paths)
    >>> parts = [(-1, [0, 1], []), (0, [2], [0, 1]), (1, [3, 4, 5], [0, 1, 2]), (0, [6], [0, 1])]
    >>> plan = [in_tree_order(tree, parent, *map(np.array, tokens)) for parent, *tokens in parts]
    >>> for number, access in enumerate(gateway_accesses(tree, plan)):
    ...     print(number, *access.cache_offset, access.exports, access.state_exports, access.context_rows)
    0 2 2 [0 1] [1 1] []
    1 4 4 [0 0] [0 0] [2 3]
    2 6 6 [2 2] [2 2] [2 3 4]
    3 4 4 [0 0] [0 0] [2 3]
    >>> print(access.predecessor, gateway_accesses(tree, plan)[2].predecessor)  # -2 - row: read this state
    [-4] [-6  0 -6]
    """

    cache_offset: CacheRows  # rows of padding and of the partitions above; this partition's rows come next
    exports: np.ndarray  # [X >= PAD] int64: own tokens whose keys and values descendants read
    state_exports: np.ndarray  # [S >= PAD] int64: own tokens whose states descendants start from
    context_rows: np.ndarray  # [m - n] int64: the row of each context token in the stream of keys
    predecessor: np.ndarray  # [n] int32, see ``TreeLayout.predecessor``


def gateway_accesses(tree: TokenTree, partitions: Sequence[Partition]) -> list[GatewayAccess]:
    """Returns how each partition of a plan accesses the gateway cache.

    A partition exports the keys and values of all own tokens in the context of one of its children. A context
    token that the parent does not own is in the parent's context, so a partition above already exported it.
    """
    wanted: list[list[np.ndarray]] = [[] for _ in partitions]
    for partition in partitions:
        if partition.parent >= 0:
            wanted[partition.parent].append(partition.context)
    wanted_states = _wanted_states(tree, partitions)
    # Tokens of the rows PAD, PAD + 1, ... once a partition has written its exports.
    filled: list[tuple[np.ndarray, np.ndarray]] = []
    accesses = []
    for i, partition in enumerate(partitions):
        if partition.parent >= 0:
            keys, states = filled[partition.parent]
        else:
            keys = states = partition.context[:0]
        exports, state_exports = (_padded_indices(partition, tokens[i]) for tokens in (wanted, wanted_states))
        accesses.append(
            GatewayAccess(
                cache_offset=CacheRows(PAD + len(keys), PAD + len(states)),
                exports=exports,
                state_exports=state_exports,
                context_rows=_rows_of(keys, partition.context),
                predecessor=predecessors(tree, partition, states),
            )
        )
        filled.append(
            (
                np.concatenate([keys, partition.own_tokens[exports]]),
                np.concatenate([states, partition.own_tokens[state_exports]]),
            )
        )
    return accesses


def predecessors(tree: TokenTree, partition: Partition, states: np.ndarray | None = None) -> np.ndarray:
    """Returns the ``TreeLayout.predecessor`` of a partition.

    Args:
        states: tokens of the rows PAD, PAD + 1, ... of the cached states. None: the partition needs none.
    """
    token_before, is_own, own_index = _tokens_before(tree, partition)
    predecessor = np.where(is_own, own_index, -1).astype(np.int32)
    is_cached = (token_before >= 0) & ~is_own
    if is_cached.any():
        assert states is not None
        predecessor[is_cached] = -2 - _rows_of(states, token_before[is_cached])
    return predecessor


def _tokens_before(tree: TokenTree, partition: Partition) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the predecessor of each own token on its path, whether it is an own token, and its index if so.

    The strategy single_path may run several copies of a token, one path after another. The predecessor on a
    token's own path is therefore the nearest copy of the predecessor to the left of the token.
    """
    before, n = tree.predecessor[partition.own_tokens], len(partition)
    if np.array_equal(partition.own_tokens, np.arange(len(tree))):
        return before, before >= 0, before
    numbers = np.sort(
        partition.own_tokens.astype(np.int64) * n + np.arange(n)
    )  # (token, index) as one number
    nearest = numbers[np.searchsorted(numbers, before.astype(np.int64) * n + np.arange(n)) - 1]
    return before, (before >= 0) & (nearest // n == before), nearest % n


def _wanted_states(tree: TokenTree, partitions: Sequence[Partition]) -> list[list[np.ndarray]]:
    """Returns, for each partition, the own tokens after which a partition below continues a path."""
    wanted: list[list[np.ndarray]] = [[] for _ in partitions]
    for partition in partitions:
        before, is_own, _ = _tokens_before(tree, partition)
        missing = np.unique(before[(before >= 0) & ~is_own])
        above = partition.parent
        while len(missing):
            is_own = np.isin(missing, partitions[above].own_tokens)
            wanted[above].append(missing[is_own])
            missing, above = missing[~is_own], partitions[above].parent
    return wanted


def _padded_indices(partition: Partition, tokens: list[np.ndarray]) -> np.ndarray:
    """Returns the indices of ``tokens`` among the own tokens. The last own token pads them to PAD entries."""
    wanted = np.unique(np.concatenate(tokens)) if tokens else np.empty(0, np.int32)
    own_indices = np.flatnonzero(np.isin(partition.own_tokens, wanted))
    return np.pad(own_indices, (0, max(PAD - len(own_indices), 0)), constant_values=len(partition) - 1)


def _rows_of(filled: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """Returns the first row of each token, given the tokens of the rows PAD, PAD + 1, ..."""
    order = np.argsort(filled, kind="stable")
    return PAD + order[np.searchsorted(filled[order], tokens)]
