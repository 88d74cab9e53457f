"""redundancy_free: no token runs twice (Tree Training v5, 2511.00413). Partitions read what is above them
from a gateway, and may end anywhere, also inside a node.

A partition runs at most C = ``max_tokens``. Its *chain*, its own tokens and those of all partitions above it,
is alive while it runs: at most K = ``max_chain_tokens``. The fewest forwards under both bounds are sought on
one *level* after the other, the subtrees that hang from one parent partition, under a chain of b tokens:

1.  A subtree of more than K - b tokens is cut (subtree_cut.py): its top is a partition, below it is a new level.
2.  One of more than C tokens runs in DFS order, at most C at a time. Each of these pieces is the parent of
    the next: what a token has above its own piece is in the piece before, or above all of that.
3.  All other subtrees, and the last pieces, share partitions: best fit, largest first.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

import numpy as np

from titan_tree.components.tree_partitioner.subtree_cut import Heights, Ranges, Subtree, SubtreeCut
from titan_tree.components.tree_partitioner.traversals import ranges
from titan_tree.errors import UserError
from titan_tree.tree.partition import Partition, in_tree_order
from titan_tree.tree.token_tree import TokenTree

DISCOUNTS = (
    1,
    2,
    4,
)  # of what subtree_cut leave to be cut again: no one suits all trees, the best plan is taken


def partition(tree: TokenTree, max_tokens: int, max_chain_tokens: int | None) -> list[Partition]:
    """max_chain_tokens: None is the larger of ``max_tokens`` and the longest path.

    Raises UserError where it is less than the longest path.
    """
    longest = tree.stats.longest_path
    if max_chain_tokens is None:
        max_chain_tokens = max(max_tokens, longest)
    if max_chain_tokens < longest:
        raise UserError(
            f"TreePartitioner: max_chain_tokens: expected at least the longest path, {longest:,} tokens, got "
            f"{max_chain_tokens:,}; raise it, or leave it out"
        )
    heights = Heights(tree)
    planners = [Planner(heights, max_tokens, max_chain_tokens, discount) for discount in DISCOUNTS]
    for planner in planners:
        planner.run()
    best = min(planners, key=lambda planner: len(planner.parents))
    return _build(tree, best.parents, best.owned)


@dataclass
class _Bin:
    """Subtrees that share a partition. The first may have pieces of its own above that one."""

    token: int  # first token of the first subtree
    size: int  # tokens of the first subtree
    shared: list[tuple[int, int]] = field(default_factory=list)  # (first token, tokens) of the others


class Planner:
    """Fills ``owned``, the tokens of each partition, and ``parents``; a parent comes before its children."""

    def __init__(self, heights: Heights, max_tokens: int, max_chain_tokens: int, discount: float) -> None:
        self.max_tokens, self.max_chain_tokens, self.discount = max_tokens, max_chain_tokens, discount
        self.heights, tree = heights, heights.tree
        self.start, self.end = tree.node_offsets.tolist(), tree.node_subtree_end.tolist()
        self.node_parent = tree.node_parent.tolist()
        self.parents: list[int] = []
        self.owned: list[Ranges] = []

    def run(self) -> None:
        roots = [(self.start[node], node) for node, above in enumerate(self.node_parent) if above < 0]
        self.levels = [(roots, -1, 0)]  # (subtrees, parent partition, its chain)
        while self.levels:
            self._level(*self.levels.pop())

    def _level(self, subtrees: list[Subtree], parent: int, chain: int) -> None:
        room = self.max_chain_tokens - chain
        bins: list[_Bin] = []
        free: list[tuple[int, int]] = []  # (tokens that still fit, bin), ascending
        for size, subtree in sorted(((self._size(s), s) for s in subtrees), reverse=True):
            if size > room:
                own, hanging = SubtreeCut(self.heights, subtree, self.max_tokens, room).best(self.discount)
                top = int((own[1] - own[0]).sum())
                self.levels.append((hanging, self._add(parent, own), chain + top))
                continue
            fitting = range(bisect_left(free, (size, 0)), len(free))
            slot = next((i for i in fitting if self._may_share(subtree, bins[free[i][1]])), None)
            if slot is None:
                above = (size - 1) // self.max_tokens * self.max_tokens  # pieces above the last one
                insort(free, (min(self.max_tokens, room - above) - (size - above), len(bins)))
                bins.append(_Bin(subtree[0], size))
            else:
                left, number = free.pop(slot)
                insort(free, (left - size, number))
                bins[number].shared.append((subtree[0], size))
        for bin in bins:
            self._add_bin(parent, bin)

    def _size(self, subtree: Subtree) -> int:
        return self.end[subtree[1]] - subtree[0]

    def _may_share(self, subtree: Subtree, bin: _Bin) -> bool:
        """Under pieces of the bin's first subtree may run what hangs from an ancestor of that subtree."""
        if bin.size <= self.max_tokens:
            return True  # there are no such pieces
        token, node = subtree
        if token > self.start[node]:
            return False  # it hangs from a token inside a node, from which nothing else hangs
        above = self.node_parent[node]
        return above < 0 or self.start[above + 1] <= bin.token < self.end[above]

    def _add_bin(self, parent: int, bin: _Bin) -> None:
        token, end, step = bin.token, bin.token + bin.size, self.max_tokens
        if not bin.shared:
            step = -(-bin.size // -(-bin.size // step))  # pieces of one size
        while end - token > step:
            parent = self._add(parent, (np.array([token]), np.array([token + step])))
            token += step
        tokens, sizes = np.array(sorted([(token, end - token), *bin.shared])).T
        self._add(parent, (tokens, tokens + sizes))

    def _add(self, parent: int, own: Ranges) -> int:
        self.parents.append(parent)
        self.owned.append(own)
        return len(self.parents) - 1


def _build(tree: TokenTree, parents: list[int], owned: list[Ranges]) -> list[Partition]:
    """The partitions, depth first."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]  # the last: of no parent
    for number, parent in enumerate(parents):
        children[parent].append(number)
    tokens = np.arange(len(tree), dtype=np.int32)
    partitions: list[Partition] = []
    stack = [(number, -1) for number in reversed(children[-1])]
    while stack:
        number, parent = stack.pop()
        stack += [(child, len(partitions)) for child in reversed(children[number])]
        above = partitions[parent].keys if parent >= 0 else tokens[:0]
        partitions.append(_partition(tree, tokens, parent, above, *owned[number]))
    return partitions


def _partition(
    tree: TokenTree, tokens: np.ndarray, parent: int, above: np.ndarray, starts: np.ndarray, stops: np.ndarray
) -> Partition:
    """One partition; ``above`` are the keys of its parent, ``tokens`` all tokens of the tree."""
    start, stop = int(starts[0]), int(stops[-1])
    root = stop - 1 - int(tree.positions[stop - 1])
    if len(starts) == 1 and root >= 0 and tree.positions[root] == 0:
        # The keys are one path without a gap: no search, and views, as such a path may have many pieces.
        m = stop - root
        return Partition(
            parent=parent,
            keys=tokens[root:stop],
            subtree_end=np.full(m, m, np.int32),
            key_index=np.arange(start - root, m, dtype=np.int32),
            scores=np.ones(stop - start, bool),
        )
    # A token is above this partition if the first own token after it is below it.
    next_own = np.append(starts, len(tree))[np.searchsorted(starts, above)]
    context = above[next_own < tree.subtree_end[above]]
    return in_tree_order(tree, parent, ranges(starts, stops), context)
