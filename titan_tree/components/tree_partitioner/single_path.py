"""single_path: leaves share one prefix per traversal, and nothing below it (Tree Training, 2511.00413).

A traversal at node u holds the path to u once and then, for each leaf below u, an unmerged copy of the rest
of its path: L(u) + R(u) tokens, R(u) = sum over leaves l below u of L(l) - L(u). Run alone, the n_u leaves
would need (n_u - 1) L(u) more. Which nodes to choose, at most one on each path, is a dynamic program:

    saving(u) = max( (n_u - 1) L(u) if L(u) + R(u) <= max_tokens,  sum of saving(v) over the children v )
"""

from __future__ import annotations

import numpy as np

from titan_tree.components.tree_partitioner.traversals import (
    check_paths_fit,
    find_leaves,
    node_tokens,
    path_tokens,
)
from titan_tree.tree.partition import Partition
from titan_tree.tree.token_tree import TokenTree


def partition(tree: TokenTree, max_tokens: int, max_chain_tokens: int | None) -> list[Partition]:
    """O(nodes) for the choice. Leaves under no chosen node run alone."""
    check_paths_fit(tree, max_tokens, "single_path")
    parent = tree.node_parent.tolist()
    leaves = find_leaves(tree)
    scored = np.zeros(len(tree), bool)
    partitions = []
    for node in _chosen(tree, leaves, max_tokens):
        below = leaves if node < 0 else leaves[slice(*np.searchsorted(leaves, _node_range(tree, node)))]
        partitions.append(_unmerged(tree, parent, node, below.tolist(), scored))
    return partitions


def _chosen(tree: TokenTree, leaves: np.ndarray, max_tokens: int) -> list[int]:
    """Nodes (-1: the virtual root) whose leaves make a traversal, in DFS order; all leaves are below one."""
    parent = tree.node_parent.tolist()
    length = [*path_tokens(tree).tolist(), 0]
    count = [0] * len(length)  # leaves below, and their summed L
    total = [0] * len(length)
    for leaf in leaves.tolist():
        count[leaf], total[leaf] = 1, length[leaf]
    saving = [0] * len(length)  # at first that of the children
    is_chosen = [False] * len(length)
    for node in range(len(parent) - 1, -2, -1):
        own = (count[node] - 1) * length[node]
        fits = length[node] + total[node] - count[node] * length[node] <= max_tokens
        if fits and own >= saving[node]:  # of equals the one with fewer traversals
            saving[node], is_chosen[node] = own, True
        if node >= 0:
            above = parent[node]
            count[above] += count[node]
            total[above] += total[node]
            saving[above] += saving[node]

    chosen, covered = [], [False] * len(length)
    for node in range(-1, len(parent)):
        above_covered = node >= 0 and covered[parent[node]]
        if is_chosen[node] and not above_covered:
            chosen.append(node)
        covered[node] = above_covered or is_chosen[node]
    return chosen


def _node_range(tree: TokenTree, node: int) -> tuple[int, int]:
    """First node and exclusive last node of a subtree."""
    return node, int(np.searchsorted(tree.node_offsets, tree.node_subtree_end[node]))


def _unmerged(
    tree: TokenTree, parent: list[int], node: int, leaves: list[int], scored: np.ndarray
) -> Partition:
    """The traversal at ``node``; what it scores is marked in ``scored``."""

    def path(end: int, start: int) -> list[int]:
        """Nodes below ``start`` down to and with ``end``."""
        nodes = []
        while end != start:
            nodes.append(end)
            end = parent[end]
        return nodes[::-1]

    parts = [node_tokens(tree, path(node, -1)), *(node_tokens(tree, path(leaf, node)) for leaf in leaves)]
    keys = np.concatenate(parts).astype(np.int32)
    ends = np.cumsum([len(part) for part in parts])
    ends[0] = len(keys)  # every copy sees the path
    token, first = np.unique(keys, return_index=True)
    scores = np.zeros(len(keys), bool)
    scores[first] = ~scored[token]
    scored[token] = True
    return Partition(
        parent=-1,
        keys=keys,
        subtree_end=np.repeat(ends, [len(part) for part in parts]).astype(np.int32),
        key_index=np.arange(len(keys), dtype=np.int32),
        scores=scores,
    )
