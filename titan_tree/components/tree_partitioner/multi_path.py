"""multi_path: traversals that execute the fewest tokens (Tree Training, arXiv:2511.00413).

Problem: divide the leaves into traversals of at most max_tokens tokens each. A token runs once in every
traversal that contains a leaf below it. Minimize the sum of all traversals' tokens.

Idea: a dynamic program from the leaves up. Of the traversals inside a subtree only their sizes matter to the
rest of the tree. A *state* of node u is therefore a multiset of *loads* a_1 .. a_k: k traversals contain
leaves below u, and the j-th runs a_j tokens below u. To go up from a child to u, its loads grow by the
child's own tokens. Then the loads of all children are packed into bins of at most max_tokens - L(u) tokens: a
bin is a traversal that continues into several children. At the virtual root the state with the smallest sum
is optimal.

Invariant: the states of a node contain one that leads to an optimum. Two kinds of states can be dropped:

- Dominated states. State A dominates state B if, with loads sorted in descending order, A has at most as many
  loads as B and each of them is at most as large. Every completion of B also completes A, at no higher cost.
- States that repeat more tokens than greedy does in total. A state executes sum(a) + k L(u) tokens.

Complexity: exponential in the leaves in the worst case, so MAX_PACKINGS limits the work at each node.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from titan_tree.components.tree_partitioner import greedy
from titan_tree.components.tree_partitioner.traversals import (
    check_paths_fit,
    path_tokens,
    run_each,
)
from titan_tree.errors import UserError
from titan_tree.tree.partition import Partition
from titan_tree.tree.token_tree import TokenTree

MAX_PACKINGS = 10_000  # packings of the states of siblings at one node: about a second

Bins = tuple[tuple[int, tuple[int, ...]], ...]  # (load, leaves) of each traversal, ascending
States = dict[tuple[int, ...], Bins]  # keyed by loads


def partition(tree: TokenTree, max_tokens: int, max_chain_tokens: int | None) -> list[Partition]:
    """Returns a partition per traversal.

    Raises:
        UserError: a path is longer than ``max_tokens``, or the tree has too many leaves for an exact answer.
    """
    check_paths_fit(tree, max_tokens, "multi_path")
    parent = tree.node_parent.tolist()
    length = [*path_tokens(tree).tolist(), 0]
    states: list[States] = [{(): ()} for _ in length]  # of the children packed so far
    for leaf in tree.leaves.tolist():
        states[leaf] = {(0,): ((0, (leaf,)),)}
    size = [0] * len(length)  # tokens of these children's subtrees
    greedy_repeats = sum(map(len, greedy.partition(tree, max_tokens, None))) - len(tree)
    for node in range(len(parent) - 1, -1, -1):
        above = parent[node]
        step, room = length[node] - length[above], max_tokens - length[above]
        size[above] += size[node] + step
        packed_states: States = {}
        packings = 0
        for child in states[node].values():
            child = tuple((load + step, leaves) for load, leaves in child)
            for bins in states[above].values():
                for packed in _packings(bins, child, room):
                    state = tuple(sorted(packed))
                    loads = tuple(load for load, _ in state)
                    if sum(loads) - size[above] + (len(loads) - 1) * length[above] <= greedy_repeats:
                        packed_states[loads] = state
                    packings += 1
                    if packings > MAX_PACKINGS:
                        raise _too_large(tree)
        states[above] = _undominated(packed_states)
        states[node] = {}
    best = min(states[-1].values(), key=lambda bins: (sum(load for load, _ in bins), len(bins)))
    return run_each(tree, [leaves for _, leaves in best])


def _packings(bins: Bins, loads: Bins, room: int) -> Iterator[Bins]:
    """Yields every way to add each of ``loads`` to one of ``bins``, or to a bin of its own.

    No two loads go to the same bin. They come from one child, and another state of this child already merges
    the two traversals into one load.
    """
    if not loads:
        yield bins
        return
    (load, leaves), rest = loads[0], loads[1:]
    for others in _packings(bins, rest, room):
        yield ((load, leaves), *others)
    tried = set()
    for i, (filled, others_leaves) in enumerate(bins):
        if filled + load <= room and filled not in tried:  # equally filled bins are equivalent
            tried.add(filled)
            for others in _packings(bins[:i] + bins[i + 1 :], rest, room):
                yield ((filled + load, others_leaves + leaves), *others)


def _undominated(states: States) -> States:
    """Returns the states that no other state dominates."""
    width = max(map(len, states))
    loads = np.full((len(states), width), -1)  # -1: no load, which is less than a load of 0
    for row, state in zip(loads, states, strict=True):
        row[: len(state)] = state[::-1]
    order = np.argsort(loads.sum(1), kind="stable")  # a dominating state has a smaller sum
    undominated, count = np.empty_like(loads), 0
    best: States = {}
    keys = list(states)
    for i in order.tolist():
        if not (undominated[:count] <= loads[i]).all(1).any():
            undominated[count], count = loads[i], count + 1
            best[keys[i]] = states[keys[i]]
    return best


def _too_large(tree: TokenTree) -> UserError:
    return UserError(
        f"TreePartitioner: strategy multi_path: this tree of {len(tree.leaves):,} leaves is too large "
        f"for an exact search (more than {MAX_PACKINGS:,} combinations at one node); use strategy greedy or "
        "redundancy_free"
    )
