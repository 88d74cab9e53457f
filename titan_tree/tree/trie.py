"""The trie of a set of integer sequences, such as the tokens of paths.

Sequences are sorted as byte strings. The longest prefix that a sequence shares with any earlier one is then
the prefix that it shares with the one right before it, as in the longest-common-prefix table of a suffix
array.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def lexicographic_trie(paths: Sequence[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Builds the trie of integer sequences. Trie tokens are numbered in lexicographic pre-order.

    Args:
        paths: the integers to merge by, one array per path: tokens, or keys that represent tokens.

    Returns:
        For each path the numbers of its trie tokens; and for each trie token its parent, -1 for roots.
    """
    index: list[np.ndarray] = [np.empty(0, np.int32)] * len(paths)
    predecessors: list[np.ndarray] = []
    n = 0
    tokens, trie = np.empty(0, np.int32), np.empty(0, np.int32)
    for p in lexicographic_order(paths):
        shared = common_prefix(tokens, paths[p])
        tokens = paths[p]
        new = np.arange(n, n + len(tokens) - shared, dtype=np.int32)
        if len(new):
            predecessors.append(new - 1)
            predecessors[-1][0] = trie[shared - 1] if shared else -1
        index[p] = trie = np.concatenate([trie[:shared], new])
        n += len(new)
    return index, np.concatenate(predecessors)


def lexicographic_order(paths: Sequence[np.ndarray]) -> list[int]:
    """Returns the indices that sort ``paths``. A prefix comes first; equal paths keep their order."""
    # In big-endian order, comparing bytes compares integers.
    return sorted(
        range(len(paths)), key=lambda p: paths[p].astype(paths[p].dtype.newbyteorder(">")).tobytes()
    )


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the number of leading tokens that ``a`` and ``b`` share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n
