"""multi_path: the division of the leaves into traversals that runs the fewest tokens (Tree Training,
2511.00413).

A dynamic program from the leaves up. A *state* of node u is a multiset of loads a_1 .. a_k: k traversals
enter u, and the j-th runs a_j tokens below it. One step up, a child's loads grow by its tokens and join those
of its siblings in bins of at most max_tokens - L(u) tokens: a bin is a traversal that goes on into several
children. At the root the state of the smallest sum wins. Two kinds of states are dropped on the way:

- those that another one beats: it has no more loads and, both sorted from the largest down, each of them is
  at most as large, so that what completes the one completes the other at no higher cost;
- those that run more tokens again than the greedy plan does in all. A state runs sum(a) + k L(u) tokens.

What is left may still grow exponentially with the leaves, hence a limit.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from titan_tree.components.tree_partitioner import greedy
from titan_tree.components.tree_partitioner.traversals import (
    check_paths_fit,
    find_leaves,
    path_tokens,
    run_each,
)
from titan_tree.errors import UserError
from titan_tree.tree.partition import Partition
from titan_tree.tree.token_tree import TokenTree

MAX_PACKINGS = 10_000  # ways to join the states of siblings at one node: about a second

Bins = tuple[tuple[int, tuple[int, ...]], ...]  # (load, its leaves) of each traversal, ascending
States = dict[tuple[int, ...], Bins]  # by their loads


def partition(tree: TokenTree, max_tokens: int, max_chain_tokens: int | None) -> list[Partition]:
    """Raises UserError where the tree has too many leaves for an exact answer, see ``MAX_PACKINGS``."""
    check_paths_fit(tree, max_tokens, "multi_path")
    parent = tree.node_parent.tolist()
    length = [*path_tokens(tree).tolist(), 0]
    states: list[States] = [{(): ()} for _ in length]  # of the children that have been joined so far
    for leaf in find_leaves(tree).tolist():
        states[leaf] = {(0,): ((0, (leaf,)),)}
    size = [0] * len(length)  # tokens of these children and below them
    run_again = sum(map(len, greedy.partition(tree, max_tokens, None))) - len(tree)
    for node in range(len(parent) - 1, -1, -1):
        above = parent[node]
        step, room = length[node] - length[above], max_tokens - length[above]
        size[above] += size[node] + step
        joined: States = {}
        packings = 0
        for child in states[node].values():
            child = tuple((load + step, leaves) for load, leaves in child)
            for bins in states[above].values():
                for packed in _packings(bins, child, room):
                    state = tuple(sorted(packed))
                    loads = tuple(load for load, _ in state)
                    if sum(loads) - size[above] + (len(loads) - 1) * length[above] <= run_again:
                        joined[loads] = state
                    packings += 1
                    if packings > MAX_PACKINGS:
                        raise _too_large(tree)
        states[above] = _undominated(joined)
        states[node] = {}
    best = min(states[-1].values(), key=lambda bins: (sum(load for load, _ in bins), len(bins)))
    return run_each(tree, [leaves for _, leaves in best])


def _packings(bins: Bins, loads: Bins, room: int) -> Iterator[Bins]:
    """Every way to put each of ``loads`` into one of ``bins``, or by itself.

    No two into the same: they come from one child, which has a state in which they are one already.
    """
    if not loads:
        yield bins
        return
    (load, leaves), rest = loads[0], loads[1:]
    for others in _packings(bins, rest, room):
        yield ((load, leaves), *others)
    tried = set()
    for i, (filled, inside) in enumerate(bins):
        if filled + load <= room and filled not in tried:  # bins filled alike are alike
            tried.add(filled)
            for others in _packings(bins[:i] + bins[i + 1 :], rest, room):
                yield ((filled + load, inside + leaves), *others)


def _undominated(states: States) -> States:
    """The states that no other one beats."""
    width = max(map(len, states))
    loads = np.full((len(states), width), -1)  # -1: no load, less than a load of 0
    for row, state in zip(loads, states, strict=True):
        row[: len(state)] = state[::-1]
    order = np.argsort(loads.sum(1), kind="stable")  # who beats another has the smaller sum
    kept, count = np.empty_like(loads), 0
    best: States = {}
    keys = list(states)
    for i in order.tolist():
        if not (kept[:count] <= loads[i]).all(1).any():
            kept[count], count = loads[i], count + 1
            best[keys[i]] = states[keys[i]]
    return best


def _too_large(tree: TokenTree) -> UserError:
    return UserError(
        f"TreePartitioner: strategy multi_path: a tree of {len(find_leaves(tree)):,} leaves has more than "
        f"{MAX_PACKINGS:,} packings at one node, too many for an exact answer; use strategy greedy or "
        "redundancy_free"
    )
