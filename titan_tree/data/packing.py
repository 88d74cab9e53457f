"""Shuffles groups, merges paths into trees, and distributes trees over ranks and micro-batches."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np

from titan_tree.tree.paths import TokenPath
from titan_tree.tree.routed_experts import Replay, has_experts, split_keys
from titan_tree.tree.token_tree import TokenTree, common_prefix, lexicographic_order

T = TypeVar("T")
MicroBatches = list[list[TokenTree]]


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


def flat_trees(paths: Sequence[TokenPath], replay: Replay = "off") -> list[TokenTree]:
    """Returns one tree per path, so that paths share nothing: the baseline for comparisons with trees."""
    return [TokenTree.from_paths([path], replay) for path in paths]


def merged_trees(paths: Sequence[TokenPath], max_tokens: int, replay: Replay = "off") -> list[TokenTree]:
    """Returns trees of at most ``max_tokens`` tokens that share prefixes across all paths.

    In lexicographic order, a path adds to the trie only what it does not share with the path before it.
    The sorted paths are therefore cut greedily into runs whose tries fit. A path that is longer than
    ``max_tokens`` becomes a tree of its own.
    """
    runs: list[list[int]] = []
    splits = replay == "split" and any(map(has_experts, paths))
    keys = split_keys(paths) if splits else [path.tokens for path in paths]
    size, previous = 0, np.empty(0, np.int32)
    for p in lexicographic_order(keys):
        added = len(keys[p]) - common_prefix(previous, keys[p])
        if runs and size + added <= max_tokens:
            runs[-1].append(p)
            size += added
        else:
            runs.append([p])
            size = len(keys[p])
        previous = keys[p]
    # Restore the given order within each run: it decides whose routed experts replay = "first" uses.
    return [TokenTree.from_paths([paths[p] for p in sorted(run)], replay) for run in runs]


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
        slot = next((i for i, room in enumerate(free) if room >= sizes[item]), None)
        if slot is None:
            slot = len(free)
            bins.append([])
            free.append(capacity)
        bins[slot].append(item)
        free[slot] -= sizes[item]
    return bins
