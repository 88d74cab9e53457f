"""Where redundancy_free cuts a subtree that does not fit: its top runs first, what hangs from it later.

The *height* of a token is the number of tokens from it down to the deepest leaf below it. A top is all tokens
of height > h, for some h: of all subtree_cut that leave no path of more than h tokens it is the smallest.
"""

from __future__ import annotations

import heapq

import numpy as np

from titan_tree.tree.token_tree import TokenTree

CANDIDATES = 24  # heights tried for a cut
Subtree = tuple[int, int]  # its first token, which may be inside a node, and that node
Ranges = tuple[np.ndarray, np.ndarray]  # starts and exclusive stops of runs of tokens, ascending


class Heights:
    """What cuts read of a tree, node by node: hence Python lists."""

    def __init__(self, tree: TokenTree) -> None:
        self.tree = tree
        length, parent = tree.node_length.tolist(), tree.node_parent.tolist()
        self.below = [0] * len(length)  # height of the highest child; 0 at a leaf
        for node in range(len(length) - 1, -1, -1):
            if (above := parent[node]) >= 0:
                self.below[above] = max(self.below[above], self.below[node] + length[node])
        self.first = [a + b for a, b in zip(self.below, length, strict=True)]  # height of the first token
        # The node after a node's subtree: its next sibling, if there is one.
        self.after = np.searchsorted(tree.node_offsets, tree.node_subtree_end).tolist()


class SubtreeCut:
    """The subtree_cut of a subtree that may become a partition of at most ``max_tokens``, and that leave no path
    longer than the rest of ``room``, the tokens that the chain has left.

    The subtree has more than ``room`` tokens, each of its paths at most that many. The work is per node of
    the largest top and its children, never per token.
    """

    def __init__(self, heights: Heights, subtree: Subtree, max_tokens: int, room: int) -> None:
        self.max_tokens, self.room = max_tokens, room
        token, root = subtree
        tree = heights.tree
        self.lowest, nodes, above = self._sweep(heights, token, root)
        # The nodes that a top may reach, and their tokens in the subtree; its root comes first.
        self.node = np.array(nodes)
        self.start = tree.node_offsets[self.node]
        self.start[0] = token
        self.below = np.array([heights.below[node] for node in nodes])
        self.first = self.below + tree.node_offsets[self.node + 1] - self.start  # height of the first token
        self.above = np.array(above)  # height of the token before the first
        self.size = tree.node_subtree_end[self.node] - self.start  # tokens in the node and below it

    def best(self, discount: float) -> tuple[Ranges, list[Subtree]]:
        """The top of the highest value, and the subtrees that hang from it."""
        # The run of tokens before the first fork is on every path: a top without all of it is no better.
        highest = max(self.lowest, int(self.below[0]))
        tried = np.unique(np.linspace(self.lowest, highest, CANDIDATES).astype(int)).tolist()
        h = max(tried, key=lambda h: self._value(h, discount)) if len(tried) > 1 else tried[0]
        top, hangs = self._top(h), self._hangs(h)
        stop = self.start + top
        runs = np.flatnonzero(top)
        runs = runs[np.argsort(self.start[runs])]
        hanging = zip(stop[hangs].tolist(), self.node[hangs].tolist(), strict=True)
        return (self.start[runs], stop[runs]), list(hanging)

    def _sweep(self, heights: Heights, token: int, root: int) -> tuple[int, list[int], list[int]]:
        """The lowest legal h, |top| <= max_tokens and |top| + h <= room; all nodes in which a legal top may
        end; and the height of the token before each of these.

        On the way down |top| grows by one for each node that has a token of this height, so |top| + h never
        falls: a sweep over the heights at which nodes begin and end finds where a bound would be passed.
        """
        h = heights.first[root] - (token - int(heights.tree.node_offsets[root]))
        nodes, above, top, active = [root], [h + 1], 0, 0
        events = [(-h, True, root)]  # (-height, does the node begin or end there?, node)
        while True:
            step = h + events[0][0]  # down to the next event
            legal = step
            if active:
                legal = min(legal, (self.max_tokens - top) // active)
            if active > 1:
                legal = min(legal, (self.room - top - h) // (active - 1))
            top, h = top + active * legal, h - legal
            if legal < step:
                return h, nodes, above
            _, begins, node = heapq.heappop(events)
            if begins:
                active += 1
                heapq.heappush(events, (-heights.below[node], False, node))
                continue
            active -= 1
            child = node + 1
            while child < heights.after[node]:
                nodes.append(child)
                above.append(h + 1)
                heapq.heappush(events, (-heights.first[child], True, child))
                child = heights.after[child]

    def _top(self, h: int) -> np.ndarray:
        """How many tokens of each node are higher than ``h``."""
        return np.maximum(self.first, h) - np.maximum(self.below, h)

    def _hangs(self, h: int) -> np.ndarray:
        """Does a subtree hang from the top that begins in this node, at its first token or further on?"""
        return (self.below < h) & (h < self.above)

    def _value(self, h: int, discount: float) -> float:
        """Tokens per forward, of the top and of what fits under it, for which forwards are taken as full.

        What does not fit is cut again, with less room the larger this top: hence the discount.
        """
        own = self._top(h)
        hanging = (self.size - own)[self._hangs(h)]
        top = int(own.sum())
        room = self.room - top
        fits = int(hanging[hanging <= room].sum())
        large = int(hanging.sum()) - fits
        forwards = 1 + fits / min(self.max_tokens, room)
        return (top + fits) / forwards * (1 - large / int(self.size[0]) * top / self.room) ** discount
