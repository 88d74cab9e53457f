"""Finds out what lines without a group_id would save as one tree."""

from __future__ import annotations

import numpy as np

from titan_tree.data.groups import Group
from titan_tree.data.token_store import STORED
from titan_tree.tree.token_tree import TokenTree, common_prefix, lexicographic_order

MAX_TOKENS = 1 << 24  # of the paths that are held for the comparison, 64 MB; later lines are left out
MIN_SAVED = 0.05  # share of tokens; lines of unrelated tasks may still begin with the same header


class UngroupedLines:
    """Compares the trees of lines without a group_id with one tree of all these lines.

    Lines with trajectories and groups of a token store do not count, because they are groups already.
    """

    def __init__(self) -> None:
        self._paths: list[np.ndarray] = []  # tokens of the paths that no other path of their line continues
        self._num_held = 0  # tokens of these paths
        self._num_lines = 0
        self._num_tokens = 0  # of the lines' trees

    def add(self, group: Group, tree: TokenTree) -> None:
        """Adds the tree of a group, if the group is a line without a group_id."""
        _, record = group.records[0]
        is_group = record.get("group_id") is not None or "trajectories" in record or STORED in record
        if self._is_full or is_group:
            return
        parents = set(tree.node_parent.tolist())
        by_node = dict(zip(tree.path_node.tolist(), tree.paths, strict=True))
        leaves = [path.tokens for node, path in by_node.items() if node not in parents]
        self._paths += leaves
        self._num_held += sum(map(len, leaves))
        self._num_lines += 1
        self._num_tokens += len(tree)

    @property
    def _is_full(self) -> bool:
        return self._num_held >= MAX_TOKENS

    def advice(self) -> str | None:
        """Returns what one tree of all lines would save, and how to get it; None if that is too little."""
        num_distinct, previous = 0, np.empty(0, np.int32)
        for p in lexicographic_order(self._paths):
            # A path adds to the tree what it does not share with the path before it.
            num_distinct += len(self._paths[p]) - common_prefix(previous, self._paths[p])
            previous = self._paths[p]
        if num_distinct >= (1 - MIN_SAVED) * self._num_tokens:
            return None
        first = "the first " if self._is_full else ""
        return (
            f"{first}{self._num_lines:,} lines without group_id share prefixes: one tree instead of "
            f"{self._num_lines:,} would hold {num_distinct:,} tokens instead of {self._num_tokens:,}; "
            'give the lines of a task the same group_id, or set data.merge = "batch"'
        )
