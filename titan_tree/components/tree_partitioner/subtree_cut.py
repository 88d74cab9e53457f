"""SubtreeCut: where redundancy_free cuts a subtree that exceeds its room.

The *height* of a token is the number of tokens on the longest path from it down to a leaf, itself included.
The *top* of a subtree for a height h is the set of its tokens of height > h. A cut runs the top as one
partition. The subtrees that *hang* from the top run later. Here are the heights in a subtree of 9 tokens. For
h = 2 the top has 4 tokens, and subtrees of 2, 2 and 1 tokens hang from it:

    6 5 4 -+- 3 | 2 1
           +-   | 2 1
           +-   | 1

Problem: choose a set of tokens that is closed under ancestors as the partition. It must fit ``max_tokens``,
and the paths below it must fit the rest of the ``room``, the tokens that are left for this part of the chain.
Among all such sets that leave no path of more than h tokens, the top for h is the smallest. So only h must be
chosen.

Idea: h is *legal* if |top| <= max_tokens and |top| + h <= room. Compute the lowest legal h, try up to
CANDIDATES values from there up to the first fork, and keep the one with the most tokens per partition
(``SubtreeCut._value``).

Invariant: if h is legal, so is every larger height, because a step down in h adds at least one token to the
top.

Complexity: O(n log n) for the n nodes that the top for the lowest legal h reaches, and their children. The
work does not depend on the number of tokens.
"""

from __future__ import annotations

import heapq

import numpy as np

from titan_tree.tree.token_tree import TokenTree

CANDIDATES = 24  # largest number of heights to try for a cut
Subtree = tuple[int, int]  # its first token, which may be inside a node, and the node of this token
Ranges = tuple[np.ndarray, np.ndarray]  # starts and exclusive stops of runs of tokens, ascending


class Heights:
    """The heights of a tree's tokens, as Python lists over nodes: cuts read them one by one."""

    def __init__(self, tree: TokenTree) -> None:
        self.tree = tree
        length, parent = tree.node_length.tolist(), tree.node_parent.tolist()
        self.below = [0] * len(length)  # largest height of a child's first token; 0 for a leaf
        for node in range(len(length) - 1, -1, -1):
            if (above := parent[node]) >= 0:
                self.below[above] = max(self.below[above], self.below[node] + length[node])
        self.first = [a + b for a, b in zip(self.below, length, strict=True)]  # height of the first token
        # The first node after a node's subtree: its next sibling, if it has one.
        self.after = np.searchsorted(tree.node_offsets, tree.node_subtree_end).tolist()


class SubtreeCut:
    """The legal cuts of one subtree.

    >>> from titan_tree.tree.paths import TokenPath
    >>> paths = [[1, 1, 1, 2, 2, 2], [1, 1, 1, 3, 3], [1, 1, 1, 4]]  # the subtree in the module's docstring
    >>> tree = TokenTree.from_paths([TokenPath(path) for path in paths])
    >>> cut = SubtreeCut(Heights(tree), (0, 0), max_tokens=4, room=6)
    >>> cut.lowest, cut._top(cut.lowest).tolist()  # lowest legal height; its top's tokens in each node
    (2, [3, 1, 0, 0])
    >>> top, hanging = cut.best(discount=1)  # the top for h = 3: tokens 0 to 2, which all paths share
    >>> [array.tolist() for array in top], hanging
    ([[0], [3]], [(3, 1), (6, 2), (8, 3)])

    Args:
        subtree: it has more than ``room`` tokens, but each of its paths has at most that many.
        max_tokens: largest number of tokens in the top.
        room: tokens that a chain may have inside the subtree.
    """

    def __init__(self, heights: Heights, subtree: Subtree, max_tokens: int, room: int) -> None:
        self.max_tokens, self.room = max_tokens, room
        token, root = subtree
        tree = heights.tree
        self.lowest, nodes, above = self._sweep(heights, token, root)
        # The nodes that a top may reach, and their children. The root comes first, from ``token`` on.
        self.node = np.array(nodes)
        self.start = tree.node_offsets[self.node]
        self.start[0] = token
        self.below = np.array([heights.below[node] for node in nodes])
        self.first = self.below + tree.node_offsets[self.node + 1] - self.start  # height of ``start``
        self.above = np.array(above)  # height of the token before ``start``
        self.size = tree.node_subtree_end[self.node] - self.start  # tokens in the node's subtree

    def best(self, discount: float) -> tuple[Ranges, list[Subtree]]:
        """Returns the top of the highest value, as ranges of tokens, and the subtrees that hang from it."""
        # All paths share the tokens above the first fork, so a top without all of them is no better.
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
        """Returns the lowest legal h, the nodes that its top reaches with their children, and heights.

        The last list holds for each of these nodes the height of the token before it.

        The sweep goes down from the subtree's own height. A step down adds one token to the top for each
        *active* node, which is a node with a token of this height. Between two events, the heights at which
        nodes begin or end, the number of active nodes is constant. So a division tells how far down h remains
        legal.
        """
        h = heights.first[root] - (token - int(heights.tree.node_offsets[root]))
        nodes, above, top, active = [root], [h + 1], 0, 0
        events = [(-h, True, root)]  # (-height, whether the node begins there or ends, node)
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
        """Returns the number of tokens of each node that belong to the top for ``h``."""
        return np.maximum(self.first, h) - np.maximum(self.below, h)

    def _hangs(self, h: int) -> np.ndarray:
        """Returns for each node whether a subtree that hangs from the top for ``h`` begins in it."""
        return (self.below < h) & (h < self.above)

    def _value(self, h: int, discount: float) -> float:
        """Returns the estimated tokens per partition if the subtree is cut at ``h``.

        The estimate counts the top and all hanging subtrees that fit the rest of the room, as if they filled
        their partitions. Larger hanging subtrees must be cut again, and a larger top leaves less room for
        that. A factor of at most 1, to the power of ``discount``, lowers the estimate for them.
        """
        top_tokens = self._top(h)
        hanging = (self.size - top_tokens)[self._hangs(h)]
        top = int(top_tokens.sum())
        room = self.room - top
        fits = int(hanging[hanging <= room].sum())
        large = int(hanging.sum()) - fits
        forwards = 1 + fits / min(self.max_tokens, room)
        return (top + fits) / forwards * (1 - large / int(self.size[0]) * top / self.room) ** discount
