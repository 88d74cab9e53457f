"""Shuffles groups, merges paths into trees, and distributes trees over ranks and micro-batches.

``UngroupedLines`` finds out what lines without a group_id would save as one tree.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from titan_tree.data.data_files import Group
from titan_tree.data.token_store import STORED
from titan_tree.errors import UserError
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.routed_experts import Replay, has_experts, split_keys
from titan_tree.tree.token_tree import TokenTree, common_prefix, lexicographic_order, merge_keys

T = TypeVar("T")
MicroBatches = list[list[TokenTree]]

MAX_HELD_TOKENS = 1 << 24  # capacity of UngroupedLines, 64 MB; it leaves out later lines
MIN_SAVED = 0.05  # share of tokens; lines of unrelated tasks may still begin with the same header


def shuffled(items: Iterable[T], buffer_size: int, random_order: random.Random) -> Iterator[T]:
    """Yields all items once, in an order drawn from a buffer. It never holds more than the buffer.

    Args:
        buffer_size: how many upcoming items each one is drawn from; 0 and 1 keep the given order.
        random_order: draws the order.
    """
    buffer: list[T] = []
    for item in items:
        if len(buffer) < max(buffer_size, 1):
            buffer.append(item)
        else:
            slot = random_order.randrange(len(buffer))
            yield buffer[slot]
            buffer[slot] = item
    random_order.shuffle(buffer)
    yield from buffer


def longest_path(paths: Sequence[TokenPath]) -> list[TokenPath]:
    """Returns the longest path of a group, together with the paths that are its prefixes, in their order.

    This is the baseline of the experiment on quality in Tree Training (arXiv:2511.00413, section 4.7). The
    first of several longest paths counts. Its prefixes hold the loss masks of its earlier turns. Of equal
    paths, only the last one before the longest path stays, or else the first one after it. So a turn that
    several rollouts share counts once, with the weight and the advantage of the longest path's rollout.

    Raises:
        UserError: the paths have preferences, so the loss compares several of them.
    """
    if any(path.preference is not None for path in paths):
        raise UserError(
            "preference: expected none with data.paths = 'longest', because a loss of preferences needs all "
            "paths; set data.paths = 'all'"
        )
    longest = max(range(len(paths)), key=lambda i: len(paths[i]))
    keys, _ = merge_keys(paths)
    by_length: dict[int, int] = {}
    for i in [*reversed(range(longest + 1)), *range(longest + 1, len(paths))]:
        if _is_prefix(keys[i], keys[longest]):
            by_length.setdefault(len(paths[i]), i)
    return [paths[i] for i in sorted(by_length.values())]


def leaf_trees(paths: Sequence[TokenPath], replay: Replay = "off") -> list[TokenTree]:
    """Returns one tree without branches per leaf: the rows of a trainer without trees.

    A path that is a prefix of others is in the row of the first leaf below its end, where it costs nothing.
    """
    tree = TokenTree.from_paths(paths, replay)
    rows: dict[int, list[TokenPath]] = {}
    for leaf, path in zip(tree.leaf_of_path.tolist(), paths, strict=True):
        rows.setdefault(leaf, []).append(path)
    return [TokenTree.from_paths(row, replay) for row in rows.values()]


def flat_trees(paths: Sequence[TokenPath], replay: Replay = "off") -> list[TokenTree]:
    """Returns one tree per path, so that paths share nothing."""
    return [TokenTree.from_paths([path], replay) for path in paths]


# The layouts without branches, by the name of ``data.layout``.
BASELINES = {"leaf": leaf_trees, "flat": flat_trees}


def merged_trees(paths: Sequence[TokenPath], max_tokens: int, replay: Replay = "off") -> list[TokenTree]:
    """Returns trees of at most ``max_tokens`` tokens that share prefixes across all paths.

    In lexicographic order, a path adds to the trie only what it does not share with the path before it.
    The sorted paths are therefore cut greedily into runs whose tries fit. A path that is longer than
    ``max_tokens`` becomes a tree of its own, together with its prefixes: no cut makes a leaf of a prefix.
    """
    runs: list[list[int]] = []
    keys, _ = merge_keys(paths)
    if replay == "split" and any(map(has_experts, paths)):
        keys = split_keys(paths, keys)
    size, previous = 0, np.empty(0, np.int32)
    for p in lexicographic_order(keys):
        added = len(keys[p]) - common_prefix(previous, keys[p])
        if runs and size + added <= max_tokens:
            runs[-1].append(p)
            size += added
        else:
            prefixes = []
            while runs and runs[-1] and _is_prefix(keys[runs[-1][-1]], keys[p]):
                prefixes.append(runs[-1].pop())
            runs.append([*prefixes, p])
            size = len(keys[p])
        previous = keys[p]
    # Restore the given order within each run: it decides whose routed experts replay = "first" uses.
    return [TokenTree.from_paths([paths[p] for p in sorted(run)], replay) for run in runs if run]


def _is_prefix(prefix: np.ndarray, path: np.ndarray) -> bool:
    return common_prefix(prefix, path) == len(prefix)


def balanced(trees: Sequence[TokenTree], num_parts: int) -> list[list[TokenTree]]:
    """Distributes trees into parts of nearly equal tokens: largest tree first, each to the lightest part."""
    parts: list[list[TokenTree]] = [[] for _ in range(num_parts)]
    load = [0] * num_parts
    for tree in sorted(trees, key=len, reverse=True):
        lightest = load.index(min(load))
        parts[lightest].append(tree)
        load[lightest] += len(tree)
    return parts


def pack(trees: Sequence[TokenTree], max_tokens: int) -> MicroBatches:
    """Packs trees into micro-batches of at most ``max_tokens`` tokens, see ``first_fit``."""
    return [[trees[i] for i in chosen] for chosen in first_fit(list(map(len, trees)), max_tokens)]


def first_fit(sizes: Sequence[int], capacity: int) -> list[list[int]]:
    """Packs items into bins by first-fit decreasing, and returns the item numbers of each bin.

    An item that is larger than ``capacity`` gets a bin of its own.
    """
    bins: list[list[int]] = []
    free: list[int] = []  # what still fits, per bin
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        slot = next((i for i, space in enumerate(free) if space >= sizes[item]), None)
        if slot is None:
            slot = len(free)
            bins.append([])
            free.append(capacity)
        bins[slot].append(item)
        free[slot] -= sizes[item]
    return bins


class UngroupedLines:
    """Compares the trees of lines without a group_id with one tree of all these lines.

    Lines with trajectories and groups of a token store do not count, because they are groups already. Nor do
    lines with images, whose tokens do not tell what they share.
    """

    def __init__(self) -> None:
        self._paths: list[np.ndarray] = []  # tokens of the paths that no other path of their line continues
        self._num_held = 0  # tokens of these paths
        self._num_lines = 0
        self._num_tokens = 0  # tokens of the lines' trees

    def add(self, group: Group, tree: TokenTree) -> None:
        """Adds the tree of a group, if the group is a line without a group_id."""
        _, record = group.records[0]
        is_group = record.get("group_id") is not None or "trajectories" in record or STORED in record
        if self._is_full or is_group or tree.images:
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
        return self._num_held >= MAX_HELD_TOKENS

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
