"""greedy: next fit in DFS order, the deepest leaves first (Tree Training, 2511.00413).

Neighbours in DFS order share the most; a traversal takes them until the next one does not fit. Linear time.
It runs at most 1.29 times the tokens of multi_path on 20,000 random trees of up to 8 leaves, and 1.23 times
on the trees of tau-bench airline.
"""

from __future__ import annotations

import numpy as np

from titan_tree.components.tree_partitioner.traversals import (
    check_paths_fit,
    find_leaves,
    path_tokens,
    run_each,
)
from titan_tree.tree.partition import Partition
from titan_tree.tree.token_tree import TokenTree


def partition(tree: TokenTree, max_tokens: int, max_chain_tokens: int | None) -> list[Partition]:
    check_paths_fit(tree, max_tokens, "greedy")
    leaves, new = _depth_first(tree)
    length = path_tokens(tree)[leaves].tolist()
    traversals: list[list[int]] = []
    size = max_tokens
    for leaf, more, path in zip(leaves.tolist(), new.tolist(), length, strict=True):
        if size + more > max_tokens:
            traversals.append([])
            size, more = 0, path
        traversals[-1].append(leaf)
        size += more
    return run_each(tree, traversals)


def _depth_first(tree: TokenTree) -> tuple[np.ndarray, np.ndarray]:
    """Leaves in DFS order, the child with the deepest leaf first, and the tokens that each adds to those
    before it."""
    parent = tree.node_parent.tolist()
    leaves = find_leaves(tree)
    length = path_tokens(tree)
    deepest = length.tolist()
    count = np.bincount(leaves, minlength=len(parent)).tolist()  # leaves below
    for node in range(len(parent) - 1, -1, -1):
        if (above := parent[node]) >= 0:
            deepest[above] = max(deepest[above], deepest[node])
            count[above] += count[node]

    # Leaves of earlier siblings, all families at once.
    order = np.lexsort((-np.array(deepest), tree.node_parent))
    counts = np.array(count)[order]
    before = np.cumsum(counts) - counts
    is_first = np.diff(tree.node_parent[order], prepend=-2) != 0
    before -= before[is_first][np.cumsum(is_first) - 1]
    rank = np.empty_like(before)
    rank[order] = before

    # Down the tree: leaves before this one, and where its path leaves that of the leaf before it.
    position, fork = rank.tolist(), tree.node_depth.tolist()
    for node, above in enumerate(parent):
        if above >= 0:
            if position[node] == 0:
                fork[node] = fork[above]
            position[node] += position[above]
    order = np.argsort(np.array(position)[leaves])
    leaves = leaves[order]
    return leaves, length[leaves] - np.array(fork)[leaves]
