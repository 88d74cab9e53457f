"""redundancy_free: runs every token exactly once (Tree Training, version 5 of arXiv:2511.00413).

A partition holds one or more connected parts of the tree and reads its context from the gateway cache. A
part may start and end anywhere, also inside a node.

Problem: a partition may have C = ``max_tokens`` own tokens. Its *chain*, which is the partition and all
partitions above it, may have K = ``max_chain_tokens``, because their activations exist at the same time.
Minimize the number of partitions under both limits.

Idea: plan one *level* after another. A level consists of the subtrees that hang from one parent partition. If
the parent's chain has b tokens, each chain below it may add K - b tokens. This is the level's *room*.

1.  A subtree that exceeds the room is cut (subtree_cut.py). Its upper part, the *top*, becomes a partition.
    The subtrees below the top become a new level.
2.  A subtree that fits the room but exceeds C tokens runs in DFS order, in parts of at most C tokens. Each
    part is the parent of the next one. The ancestors of a token are in its own part, in earlier parts of
    the subtree, or in partitions above the level.
3.  All other subtrees, and the last parts of step 2, share partitions. They are placed in descending
    order of size, each in the partition with the least space that still fits it (best fit).

Invariant: every path of a subtree fits its level's room. This holds for the roots because K is at least the
longest path. A cut preserves it: a top of t tokens leaves a room of K - b - t, and no path below the top is
longer.

Complexity: near linear in the nodes in practice, plus the keys of all partitions. Where to cut is a heuristic
with one parameter. Planning runs once for each value in DISCOUNTS and keeps the plan with the fewest
partitions.
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

# How strongly a cut avoids subtrees that must be cut again. No single value suits all trees.
DISCOUNTS = (1, 2, 4)


def partition(tree: TokenTree, max_tokens: int, max_chain_tokens: int | None) -> list[Partition]:
    """Returns the partitions, depth first.

    Args:
        max_chain_tokens: None means the larger of ``max_tokens`` and the longest path.

    Raises:
        UserError: ``max_chain_tokens`` is less than the longest path.
    """
    longest = tree.stats.longest_path
    if max_chain_tokens is None:
        max_chain_tokens = max(max_tokens, longest)
    if max_chain_tokens < longest:
        raise UserError(
            f"TreePartitioner: max_chain_tokens: expected at least the longest path, {longest:,} tokens, got "
            f"{max_chain_tokens:,}; raise it or remove it"
        )
    heights = Heights(tree)
    planners = [LevelPlanner(heights, max_tokens, max_chain_tokens, discount) for discount in DISCOUNTS]
    for planner in planners:
        planner.run()
    best = min(planners, key=lambda planner: len(planner.parents))
    return _build(tree, best.parents, best.owned)


@dataclass
class _Bin:
    """A partition that subtrees of one level share.

    If the first subtree exceeds ``max_tokens``, only its last part is in this partition. Its other parts
    are partitions above this one.
    """

    token: int  # first token of the first subtree
    size: int  # tokens of the first subtree
    others: list[tuple[int, int]] = field(default_factory=list)  # (first token, tokens) of the other subtrees


class LevelPlanner:
    """Plans the partitions of a tree for one value of ``discount``.

    ``run`` fills two lists, with a parent before its children: ``parents``, the parent of each partition, and
    ``owned``, its own tokens.
    """

    def __init__(self, heights: Heights, max_tokens: int, max_chain_tokens: int, discount: float) -> None:
        self.max_tokens, self.max_chain_tokens, self.discount = max_tokens, max_chain_tokens, discount
        self.heights, tree = heights, heights.tree
        self.start, self.end = tree.node_offsets.tolist(), tree.node_subtree_end.tolist()
        self.node_parent = tree.node_parent.tolist()
        self.parents: list[int] = []
        self.owned: list[Ranges] = []

    def run(self) -> None:
        """Plans level after level."""
        roots = [(self.start[node], node) for node, above in enumerate(self.node_parent) if above < 0]
        self.levels = [(roots, -1, 0)]  # (subtrees, parent partition, tokens of the parent's chain)
        while self.levels:
            self._level(*self.levels.pop())

    def _level(self, subtrees: list[Subtree], parent: int, chain: int) -> None:
        chain_room = self.max_chain_tokens - chain
        bins: list[_Bin] = []
        free: list[tuple[int, int]] = []  # (tokens that still fit, number of the bin), ascending
        for size, subtree in sorted(((self._size(s), s) for s in subtrees), reverse=True):
            if size > chain_room:
                top_ranges, hanging = SubtreeCut(self.heights, subtree, self.max_tokens, chain_room).best(
                    self.discount
                )
                top = int((top_ranges[1] - top_ranges[0]).sum())
                self.levels.append((hanging, self._add(parent, top_ranges), chain + top))
                continue
            fitting = range(bisect_left(free, (size, 0)), len(free))
            place = next((i for i in fitting if self._may_share(subtree, bins[free[i][1]])), None)
            if place is None:
                above = (size - 1) // self.max_tokens * self.max_tokens  # in parts before the last
                insort(free, (min(self.max_tokens, chain_room - above) - (size - above), len(bins)))
                bins.append(_Bin(subtree[0], size))
            else:
                left, number = free.pop(place)
                insort(free, (left - size, number))
                bins[number].others.append((subtree[0], size))
        for bin in bins:
            self._add_bin(parent, bin)

    def _size(self, subtree: Subtree) -> int:
        return self.end[subtree[1]] - subtree[0]

    def _may_share(self, subtree: Subtree, bin: _Bin) -> bool:
        """Returns whether the bin's partition can have ``subtree`` as another subtree.

        The keys of the partition's parent must include the context of all subtrees. If the first subtree has
        parts above the partition, the parent is such a part, and its keys are the part and its ancestors.
        So ``subtree`` must hang from an ancestor of the first subtree.
        """
        if bin.size <= self.max_tokens:
            return True  # no parts: the parent is that of the level, which has all of the context
        token, node = subtree
        if token > self.start[node]:
            return False  # it begins inside a node, so no other subtree hangs from the token before it
        above = self.node_parent[node]
        return above < 0 or self.start[above + 1] <= bin.token < self.end[above]

    def _add_bin(self, parent: int, bin: _Bin) -> None:
        token, end, step = bin.token, bin.token + bin.size, self.max_tokens
        if not bin.others:
            step = -(-bin.size // -(-bin.size // step))  # parts of equal size
        while end - token > step:
            parent = self._add(parent, (np.array([token]), np.array([token + step])))
            token += step
        tokens, sizes = np.array(sorted([(token, end - token), *bin.others])).T
        self._add(parent, (tokens, tokens + sizes))

    def _add(self, parent: int, own: Ranges) -> int:
        self.parents.append(parent)
        self.owned.append(own)
        return len(self.parents) - 1


def _build(tree: TokenTree, parents: list[int], owned: list[Ranges]) -> list[Partition]:
    """Returns the partitions in depth-first order."""
    children: list[list[int]] = [[] for _ in range(len(parents) + 1)]  # last: without parent
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
    """Returns one partition.

    Args:
        tokens: all tokens of the tree, 0 .. N-1.
        above: the keys of the parent.
        starts: first tokens of the ranges of own tokens, ascending.
        stops: their exclusive last tokens.
    """
    start, stop = int(starts[0]), int(stops[-1])
    root = stop - 1 - int(tree.positions[stop - 1])
    if len(starts) == 1 and root >= 0 and tree.positions[root] == 0:
        # The keys are one contiguous path. Views save memory: a long path may have thousands of parts.
        m = stop - root
        return Partition(
            parent=parent,
            keys=tokens[root:stop],
            subtree_end=np.full(m, m, np.int32),
            key_index=np.arange(start - root, m, dtype=np.int32),
            scores=np.ones(stop - start, bool),
        )
    # A token is an ancestor of own tokens if the first own token after it lies in its subtree.
    next_own = np.append(starts, len(tree))[np.searchsorted(starts, above)]
    context = above[next_own < tree.subtree_end[above]]
    return in_tree_order(tree, parent, ranges(starts, stops), context)
