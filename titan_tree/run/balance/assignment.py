"""Balance: which rank trains on which tree of a step, so that all ranks finish at about the same time.

Ranks that run *freely* communicate only at the start and at the end of a step. A step then takes as long as
the rank with the most work. Trees go to ranks longest-processing-time first (LPT): the costliest tree first,
each to the rank with the least work (Graham, 1969, doi:10.1137/0117039).

Ranks that run *in step* communicate in every forward pass, so the passes with the same number form a *round*,
which takes as long as its costliest pass:

    rank 0   [ 9 s  ] [ 4 s ]
    rank 1   [ 8 s ]  [ 4 s ]     9 s + 4 s
    rank 2   [ 9 s  ] [ 3 s]

Trees are then packed by LPT into (ranks x rounds) micro-batches. Micro-batches of similar cost form a round.

Every rank computes the assignment itself. It depends on sizes and coefficients alone, so all ranks agree.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence

import numpy as np

from titan_tree.data.packing import first_fit
from titan_tree.tree.costs import TreeCosts

# For each owner, its micro-batches as lists of tree numbers. An owner is a rank, or several that share trees.
Assignment = list[list[list[int]]]
MORE_ROUNDS = 6  # numbers of rounds that ``assign_in_step`` tries


def assign_freely(sizes: np.ndarray, costs: TreeCosts, num_owners: int, max_tokens: int) -> Assignment:
    """Assigns trees to owners that run freely, and packs the trees of each owner by first-fit decreasing.

    Args:
        sizes: [trees, 6], see ``tree_sizes``.
        costs: seconds of the model's trees.
        num_owners: number of owners.
        max_tokens: largest number of tokens of a micro-batch. A larger tree becomes a micro-batch of its own.
    """
    seconds = costs.seconds(sizes).tolist()
    loads = [(0.0, owner) for owner in range(num_owners)]
    trees: list[list[int]] = [[] for _ in range(num_owners)]
    for tree in costliest_first(seconds):
        load, owner = loads[0]
        heapq.heapreplace(loads, (load + seconds[tree], owner))
        trees[owner].append(tree)
    tokens = sizes[:, 0].tolist()
    return [
        [
            [of_owner[i] for i in chosen]
            for chosen in first_fit([tokens[tree] for tree in of_owner], max_tokens)
        ]
        for of_owner in trees
    ]


def assign_in_step(sizes: np.ndarray, costs: TreeCosts, num_owners: int, max_tokens: int) -> Assignment:
    """Assigns trees to owners that run in step, with little time in all rounds together.

    See ``assign_freely`` for the arguments. Micro-batch i of every owner is part of round i.
    """
    seconds, tokens = costs.seconds(sizes).tolist(), sizes[:, 0].tolist()
    fewest = max(1, math.ceil(sum(min(n, max_tokens) for n in tokens) / (num_owners * max_tokens)))
    most = max(fewest, math.ceil(len(tokens) / num_owners))  # every tree alone
    best: list[list[int]] = []
    best_time, first_found = math.inf, most
    for rounds in range(fewest, most + 1):
        if rounds >= first_found + MORE_ROUNDS:
            break
        bins = _pack_evenly(seconds, tokens, rounds * num_owners, max_tokens)
        if bins is None:
            continue
        first_found = min(first_found, rounds)
        loads = [sum(seconds[tree] for tree in trees) for trees in bins]
        order = costliest_first(loads)
        time = sum(loads[i] + costs.forward for i in order[::num_owners] if bins[i])
        if time < best_time:
            best, best_time = [bins[i] for i in order], time
    return [[trees for trees in best[owner::num_owners] if trees] for owner in range(num_owners)]


def _pack_evenly(
    seconds: Sequence[float], tokens: Sequence[int], num_bins: int, max_tokens: int
) -> list[list[int]] | None:
    """Packs trees into bins, costliest first, each into the cheapest bin with room, or returns None."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    free_tokens = [max_tokens] * num_bins
    loads = [(0.0, i) for i in range(num_bins)]
    for tree in costliest_first(seconds):
        full = []
        while loads and bins[loads[0][1]] and free_tokens[loads[0][1]] < tokens[tree]:
            full.append(heapq.heappop(loads))
        if not loads:
            return None
        load, i = loads[0]
        heapq.heapreplace(loads, (load + seconds[tree], i))
        bins[i].append(tree)
        free_tokens[i] -= tokens[tree]
        for item in full:
            heapq.heappush(loads, item)
    return bins


def costliest_first(seconds: Sequence[float]) -> list[int]:
    """Returns the numbers of all items, the costliest first. Equal ones keep their order."""
    return sorted(range(len(seconds)), key=lambda i: -seconds[i])


def planned_work(assignment: Assignment, sizes: np.ndarray, costs: TreeCosts, in_step: bool) -> np.ndarray:
    """Returns [owners, rounds] seconds of work, for ``idle_share``. Owners that run freely have one round."""
    seconds = costs.seconds(sizes)
    work = np.zeros((len(assignment), max(1, *map(len, assignment))))
    for owner, micro_batches in enumerate(assignment):
        for number, trees in enumerate(micro_batches):
            work[owner, number] = costs.forward + sum(seconds[tree] for tree in trees)
    return work if in_step else work.sum(1, keepdims=True)


def step_seconds(assignment: Assignment, sizes: np.ndarray, costs: TreeCosts, in_step: bool) -> float:
    """Returns the planned seconds of a step. Every rank gets the same bits, see ``TreeCosts.seconds``."""
    work = planned_work(assignment, sizes, costs, in_step=True)
    return math.fsum(work.max(0)) if in_step else max(map(math.fsum, work))


def idle_share(work: np.ndarray) -> float:
    """Returns the fraction of the ranks' time that they wait for others in a step.

    Args:
        work: [ranks, rounds] seconds of work. Ranks wait for each other at the end of each round.
    """
    longest = work.max(0).sum()
    return float(1 - work.mean(0).sum() / longest) if longest > 0 else 0.0
