"""Traversals: partitions of whole root-to-leaf paths. single_path, multi_path and greedy share this file.

A *traversal* runs the paths of a set of leaves. It contains all ancestors of these leaves, so it needs no
context, and its partition has no parent. A token above leaves of several traversals runs in each of them.

A *leaf* is a node without children, named by its index. L(u) is the number of tokens from the root to the end
of node u. The roots of a forest are children of a virtual root without tokens. Its index is -1, the parent of
a root in ``TokenTree.node_parent``; in Python lists over nodes it is the additional last entry.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from titan_tree.errors import UserError
from titan_tree.tree.partition import Partition, in_tree_order
from titan_tree.tree.token_tree import TokenTree


def check_paths_fit(tree: TokenTree, max_tokens: int, strategy: str) -> None:
    """Raises UserError if a path is longer than a traversal may be."""
    longest = tree.stats.longest_path
    if longest > max_tokens:
        number = int(np.diff(tree.path_offsets).argmax())
        raise UserError(
            f"TreePartitioner: strategy {strategy} runs whole paths, but path "
            f"{tree.paths[number].id or number} has {longest:,} tokens, more than max_tokens = "
            f"{max_tokens:,}; raise max_tokens, or use strategy redundancy_free, which cuts paths"
        )


def path_tokens(tree: TokenTree) -> np.ndarray:
    """Returns L(u) of every node, [K] int32."""
    return tree.node_depth + tree.node_length


def ranges(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Concatenates the ranges start, .., stop - 1."""
    lengths = stops - starts
    first = np.cumsum(lengths) - lengths
    return np.repeat(starts - first, lengths) + np.arange(lengths.sum())


def node_tokens(tree: TokenTree, nodes: Sequence[int]) -> np.ndarray:
    index = np.asarray(nodes, np.intp)
    return ranges(tree.node_offsets[index], tree.node_offsets[index + 1])


def run_each(tree: TokenTree, traversals: Iterable[Sequence[int]]) -> list[Partition]:
    """Returns a partition for each traversal, given as lists of leaves.

    A partition runs the union of its leaves' paths, in the order of the tree. The first traversal that runs a
    token scores the edges to the token's children.
    """
    parent = tree.node_parent.tolist()
    last = [-1] * len(parent)  # the last traversal that contains the node
    scored = np.zeros(len(tree), bool)
    partitions = []
    for number, leaves in enumerate(traversals):
        nodes = []
        for node in leaves:
            while node >= 0 and last[node] != number:
                last[node] = number
                nodes.append(node)
                node = parent[node]
        tokens = node_tokens(tree, sorted(nodes))
        partitions.append(in_tree_order(tree, -1, tokens, np.empty(0, np.int32), scores=~scored[tokens]))
        scored[tokens] = True
    return partitions
