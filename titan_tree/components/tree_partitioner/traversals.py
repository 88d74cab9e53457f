"""What the traversal strategies share: a traversal runs whole root-to-leaf paths, all by itself.

It needs no context, so its partition has no parent; ancestors of several traversals run in each of them. A
*leaf* is a node without children, named by its index; L(u) are the tokens from the root to the end of node u.
A forest hangs from a virtual root of 0 tokens, which Python lists of one entry more hold at index -1: the
parent that the tree gives to a root.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from titan_tree.errors import UserError
from titan_tree.tree.partition import Partition, in_tree_order
from titan_tree.tree.token_tree import TokenTree


def check_paths_fit(tree: TokenTree, max_tokens: int, strategy: str) -> None:
    """Raises UserError where a path alone is longer than a traversal may be."""
    longest = tree.stats.longest_path
    if longest > max_tokens:
        number = int(np.diff(tree.path_offsets).argmax())
        raise UserError(
            f"TreePartitioner: strategy {strategy}: it runs whole paths, but path "
            f"{tree.paths[number].id or number} has {longest:,} tokens, more than max_tokens = "
            f"{max_tokens:,}; raise that, or use strategy redundancy_free, which cuts paths"
        )


def find_leaves(tree: TokenTree) -> np.ndarray:
    """Nodes without children, in DFS order."""
    is_leaf = np.ones(len(tree.node_parent), bool)
    is_leaf[tree.node_parent[tree.node_parent >= 0]] = False
    return np.flatnonzero(is_leaf)


def path_tokens(tree: TokenTree) -> np.ndarray:
    """[K] L(u) of every node."""
    return tree.node_depth + tree.node_length


def ranges(starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """start, .., stop - 1 of every pair, one after another."""
    lengths = stops - starts
    first = np.cumsum(lengths) - lengths
    return np.repeat(starts - first, lengths) + np.arange(lengths.sum())


def node_tokens(tree: TokenTree, nodes: Sequence[int]) -> np.ndarray:
    """Tokens of ``nodes``, in the order given."""
    index = np.asarray(nodes, np.intp)
    return ranges(tree.node_offsets[index], tree.node_offsets[index + 1])


def run_each(tree: TokenTree, traversals: Iterable[Sequence[int]]) -> list[Partition]:
    """A partition per traversal, given as its leaves: the union of their paths, in tree order."""
    parent = tree.node_parent.tolist()
    last = [-1] * len(parent)  # the last traversal that ran this node
    scored = np.zeros(len(tree), bool)
    partitions = []
    for number, leaves in enumerate(traversals):
        nodes = []
        for node in leaves:
            while node >= 0 and last[node] != number:
                last[node] = number
                nodes.append(node)
                node = parent[node]
        own = node_tokens(tree, sorted(nodes))
        partitions.append(in_tree_order(tree, -1, own, np.empty(0, np.int32), scores=~scored[own]))
        scored[own] = True
    return partitions
