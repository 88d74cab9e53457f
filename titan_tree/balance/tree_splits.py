"""Pieces of a tree: several ranks share a large tree by its paths, and each trains on a smaller tree.

A tree is cut between two leaves in DFS order, so each piece is a contiguous part of the tree plus a copy of
the tokens above its first leaf. A cut before the second leaf of a = 1 2 3 4, b = 1 2 3 5 6 and c = 1 2 7:

    tree                           piece 0                       piece 1

    [1 2] -+- [3] -+- [5 6]   b    [1 2] --- [3] --- [5 6]   b   [1 2] -+- [3] --- [4]   a
           |       +- [4]     a                                         +- [7]           c
           +- [7]             c

Every path is in one piece, so the pieces' losses and gradients add up to the tree's. The copied tokens of
piece 1 (1 2 3) run a second time. Only the first piece with a token counts it: ``node_paths`` has the number
of the tree's paths there, and 0 in later pieces. So the numbers of distinct and of logical tokens and the
routers' sums (components/moe) also add up to the tree's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from titan_tree.tree.token_tree import TokenTree


def split_tree(tree: TokenTree, cuts: Sequence[int]) -> list[TokenTree]:
    """Returns the pieces of a tree, in DFS order. Nodes and the order of paths are those of the tree.

    Args:
        cuts: ascending numbers of leaves, from 1: each is the first leaf of the next piece.
    """
    if not cuts:
        return [tree]
    # The first leaf at or below the end of each path. A path may end inside the tree.
    leaf_of_path = np.searchsorted(tree.leaves, tree.path_node)
    piece_of_path = np.searchsorted(cuts, leaf_of_path, side="right")
    starts = [0, *(int(tree.leaves[cut - 1]) + 1 for cut in cuts), len(tree.node_parent)]  # nodes
    return [
        _piece(tree, start, stop, np.flatnonzero(piece_of_path == i))
        for i, (start, stop) in enumerate(pairwise(starts))
    ]


def _piece(tree: TokenTree, start: int, stop: int, paths: np.ndarray) -> TokenTree:
    """Returns the piece with the nodes ``start``, .., ``stop`` - 1 and the nodes above ``start``.

    Args:
        paths: [paths] int64, ascending: the numbers of the piece's paths.
    """
    copied: list[int] = []
    node = int(tree.node_parent[start])
    while node >= 0:
        copied.append(node)
        node = int(tree.node_parent[node])
    nodes = np.array([*reversed(copied), *range(start, stop)])
    new_node = np.full(len(tree.node_parent) + 1, -1, np.int32)  # its last entry is for -1: no parent
    new_node[nodes] = np.arange(len(nodes))
    is_kept = np.repeat(new_node[:-1] >= 0, tree.node_length)
    new_token = np.cumsum(is_kept, dtype=np.int32) - 1
    # The subtree of a copied node may also contain tokens before and behind the piece.
    num_before = np.append(0, new_token + 1)
    indices = [tree.indices_of(number) for number in paths.tolist()]
    is_counted = paths[0] == 0
    recorded = tree.routed_experts
    if recorded is not None:
        counts = recorded[1:] if is_counted else (0, 0)
        recorded = type(recorded)(recorded.experts[is_kept], *counts)
    return TokenTree(
        tokens=tree.tokens[is_kept],
        node_offsets=np.append(0, np.cumsum(tree.node_length[nodes], dtype=np.int32)).astype(np.int32),
        node_parent=new_node[tree.node_parent[nodes]],
        node_depth=tree.node_depth[nodes],
        node_subtree_end=num_before[tree.node_subtree_end[nodes]].astype(np.int32),
        node_paths=np.where(nodes < start, np.int32(0), tree.node_paths[nodes]),
        paths=tuple(tree.paths[number] for number in paths.tolist()),
        path_node=new_node[tree.path_node[paths]],
        path_offsets=np.cumsum([0, *map(len, indices)]),
        path_index=new_token[np.concatenate(indices)],
        routed_experts=recorded,
        is_counted=is_counted,
    )
