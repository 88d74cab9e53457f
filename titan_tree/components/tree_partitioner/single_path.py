"""single_path: leaves of a traversal share one prefix and nothing below it (Tree Training, arXiv:2511.00413).

Problem: a traversal at node u runs the path to u once. For each of the n_u leaves below u it then runs a
separate copy of the rest of the leaf's path. Let L(u) be the number of tokens from the root to the end of u.
In total the traversal runs L(u) + R(u) tokens, where R(u) is the sum of L(l) - L(u) over these leaves l. That
is (n_u - 1) L(u) tokens fewer than running each path alone. Choose nodes, at most one on each path, that save
the most tokens, subject to L(u) + R(u) <= max_tokens.

Idea: a dynamic program from the leaves up. It decides between a node and the best choices below its children:

    saving(u) = max( (n_u - 1) L(u) if L(u) + R(u) <= max_tokens,  sum of saving(v) over the children v )

Invariant: every leaf is below exactly one chosen node, or is chosen itself. A leaf always fits.

Complexity: O(K) for K nodes, plus the executed tokens.
"""

from __future__ import annotations

import numpy as np

from titan_tree.components.tree_partitioner.traversals import (
    check_paths_fit,
    node_tokens,
    path_tokens,
)
from titan_tree.tree.partition import Partition
from titan_tree.tree.token_tree import TokenTree


def partition(tree: TokenTree, max_tokens: int, max_chain_tokens: int | None) -> list[Partition]:
    """Returns a partition per chosen node. Raises UserError if a path is longer than ``max_tokens``."""
    check_paths_fit(tree, max_tokens, "single_path")
    parent = tree.node_parent.tolist()
    leaves = tree.leaves
    scored = np.zeros(len(tree), bool)
    partitions = []
    for node in _chosen(tree, leaves, max_tokens):
        below = leaves if node < 0 else leaves[slice(*np.searchsorted(leaves, _node_range(tree, node)))]
        partitions.append(_unmerged(tree, parent, node, below.tolist(), scored))
    return partitions


def _chosen(tree: TokenTree, leaves: np.ndarray, max_tokens: int) -> list[int]:
    """Returns the chosen nodes in DFS order; -1: virtual root. Each leaf is below exactly one of them."""
    parent = tree.node_parent.tolist()
    length = [*path_tokens(tree).tolist(), 0]
    count = [0] * len(length)  # leaves below the node
    total = [0] * len(length)  # sum of their L
    for leaf in leaves.tolist():
        count[leaf], total[leaf] = 1, length[leaf]
    saving = [0] * len(length)  # the sum over the children, until the node itself is decided
    is_chosen = [False] * len(length)
    for node in range(len(parent) - 1, -2, -1):
        saving_here = (count[node] - 1) * length[node]
        fits = length[node] + total[node] - count[node] * length[node] <= max_tokens
        if fits and saving_here >= saving[node]:  # prefer fewer traversals
            saving[node], is_chosen[node] = saving_here, True
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
    """Returns the first node and the exclusive last node of a subtree."""
    return node, int(np.searchsorted(tree.node_offsets, tree.node_subtree_end[node]))


def _unmerged(
    tree: TokenTree, parent: list[int], node: int, leaves: list[int], scored: np.ndarray
) -> Partition:
    """Returns the traversal at ``node``. Sets ``scored`` for the tokens whose edges it scores."""

    def path(end: int, start: int) -> list[int]:
        """Returns the nodes below ``start`` on the way to ``end``, with ``end``."""
        nodes = []
        while end != start:
            nodes.append(end)
            end = parent[end]
        return nodes[::-1]

    parts = [node_tokens(tree, path(node, -1)), *(node_tokens(tree, path(leaf, node)) for leaf in leaves)]
    keys = np.concatenate(parts).astype(np.int32)
    ends = np.cumsum([len(part) for part in parts])
    ends[0] = len(keys)  # all copies see the shared prefix
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
