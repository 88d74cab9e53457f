"""Splitting: trees that keep other owners waiting are split, if the step gets faster.

However trees are assigned, a step takes at least as long as its costliest tree. The paths of such trees are
therefore divided into pieces (tree_splits.py), which go to different owners. A piece repeats the tokens that
its first path shares with earlier pieces, so a step is planned several times:

    1. All trees stay whole. If the step could be faster by MIN_GAIN, were its work divided evenly, the trees
       that cost more than half of an owner's fair share are candidates.
    2. For each target in TARGETS, from coarse to fine, candidates are cut such that no piece of several
       leaves costs more than the target. Of all such cuts, those that repeat least are used.
    3. A finer plan replaces a coarser one only if the step's planned time, with all repeated tokens, falls by
       MIN_GAIN.

Every rank makes the same plan: it depends on sizes and coefficients alone, and sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from titan_tree.balance.assignment import Assignment, assign_freely, assign_in_step, step_seconds
from titan_tree.balance.tree_splits import split_tree
from titan_tree.tree.costs import TreeCosts
from titan_tree.tree.paths import PER_TOKEN, TokenPath
from titan_tree.tree.token_tree import TokenTree

MIN_GAIN = 0.05  # share of a step's planned time
TARGETS = (2.0, 1.4, 1.1, 0.8, 0.6, 0.45, 0.3)  # costs of a piece, in fair shares of an owner


@dataclass(frozen=True)
class StepPlan:
    """Which owner trains on which trees and pieces of a step.

    A *unit* is a whole tree or a piece. Units are numbered tree by tree, and pieces in their tree's order.
    """

    cuts: list[list[int]]  # for each tree, see ``split_tree``; empty: it stays whole
    sizes: np.ndarray  # [units, 4] int64, see ``tree_sizes``
    assignment: Assignment  # of units
    seconds: float  # planned time of the step

    def first_unit(self, tree: int) -> int:
        """Returns the number of a tree's first unit."""
        return sum(1 + len(cuts) for cuts in self.cuts[:tree])

    def units(self, trees: Mapping[int, TokenTree]) -> dict[int, TokenTree]:
        """Returns the units of some trees by number."""
        return {
            unit: piece
            for number, tree in trees.items()
            for unit, piece in enumerate(split_tree(tree, self.cuts[number]), self.first_unit(number))
        }


def may_split(tree: TokenTree) -> bool:
    """Returns whether pieces of a tree are refused whenever the tree is, and otherwise have the same loss.

    A batch refuses paths that count the same token at different temperatures, and paths of which only some
    have a field. Pieces of such a tree might pass, so it stays whole. The paths of a preference pair stay
    together.
    """
    return len(set(map(_traits, tree.paths))) == 1 and tree.paths[0].preference is None


def _traits(path: TokenPath) -> tuple[object, ...]:
    return path.temperature, *(getattr(path, name) is None for name in (*PER_TOKEN, "policy_version"))


@dataclass(frozen=True)
class StepPlanner:
    """Assigns trees to owners, and splits those that would keep other owners waiting.

    Args:
        costs: of the model.
        num_owners: number of owners. An owner is a rank, or several that share trees.
        max_tokens: of a micro-batch.
        in_step: whether owners run in step. None: unless a tree or a piece has more than ``max_tokens``.
    """

    costs: TreeCosts
    num_owners: int
    max_tokens: int
    in_step: bool | None = None

    def whole(self, sizes: np.ndarray) -> StepPlan:
        """Returns the plan of a step whose trees, of ``sizes`` [trees, 4], all stay whole."""
        return self._plan([[] for _ in sizes], sizes)

    def candidates(self, whole: StepPlan) -> list[int]:
        """Returns the numbers of the trees that ``split`` should split if it may. Empty: it is not needed."""
        if not self._may_gain(whole):
            return []
        seconds = self.costs.seconds(whole.sizes)
        return np.flatnonzero(seconds > self.fair_share(whole) / 2).tolist()

    def split(self, whole: StepPlan, leaves: Mapping[int, np.ndarray]) -> StepPlan:
        """Returns the plan of the same step in which trees may be in pieces.

        Args:
            leaves: the ``leaf_sizes`` of the trees that may be split, by number.
        """
        best = whole
        for target in TARGETS:
            if not self._may_gain(best):
                break
            seconds = target * self.fair_share(whole)
            cuts: list[list[int]] = [[] for _ in whole.cuts]
            sizes = [*whole.sizes[:, None]]
            for i, each in leaves.items():
                if cut := best_cuts(each, self.costs, seconds):
                    cuts[i], sizes[i] = cut, unit_sizes(each, cut)
            plan = self._plan(cuts, np.concatenate(sizes))
            if plan.seconds < (1 - MIN_GAIN) * best.seconds:
                best = plan
        return best

    def describe(self, whole: StepPlan, plan: StepPlan) -> dict[str, str]:
        """Returns what to tell the user of a plan, by kind: trees in pieces, and trees that others wait for.

        Args:
            whole: the plan of the same step without pieces.
        """
        messages = {}
        tokens = whole.sizes[:, 0]
        if split := [i for i, cuts in enumerate(plan.cuts) if cuts]:
            largest = max(split, key=lambda i: tokens[i])
            first, pieces = plan.first_unit(largest), 1 + len(plan.cuts[largest])
            repeated = int(plan.sizes[first : first + pieces, 0].sum()) - int(tokens[largest])
            messages["split tree"] = (
                f"a tree of {tokens[largest]:,} tokens is split into {pieces} pieces, because other ranks "
                f"would wait for it; the pieces repeat {repeated:,} tokens; a larger "
                "parallel.sequence_parallel would compute each token once"
            )
        seconds = self.costs.seconds(whole.sizes) + self.costs.forward
        large = np.flatnonzero(seconds * (1 - MIN_GAIN) > self._even_seconds(whole)).tolist()
        if waited_for := [i for i in large if not plan.cuts[i]]:
            longest = max(waited_for, key=lambda i: seconds[i])
            times = float(seconds[longest]) / self._even_seconds(whole)
            messages["large tree"] = (
                f"other ranks wait for a tree of {tokens[longest]:,} tokens, which takes "
                f"{times:.1f} times as long as the mean work of a rank; it stays in one piece; a larger "
                "parallel.sequence_parallel would share its tokens"
            )
        return messages

    def fair_share(self, plan: StepPlan) -> float:
        """Returns the seconds of all units divided by the number of owners, without the passes' constant."""
        return float(self.costs.seconds(plan.sizes.sum(0))) / self.num_owners

    def _even_seconds(self, plan: StepPlan) -> float:
        return self.fair_share(plan) + self.costs.forward

    def _may_gain(self, plan: StepPlan) -> bool:
        """Returns whether the step would be faster by more than MIN_GAIN if its work were divided evenly."""
        return self._even_seconds(plan) < (1 - MIN_GAIN) * plan.seconds

    def _plan(self, cuts: list[list[int]], sizes: np.ndarray) -> StepPlan:
        in_step = self.in_step
        if in_step is None:
            in_step = not (sizes[:, 0] > self.max_tokens).any()
        assign = assign_in_step if in_step else assign_freely
        assignment = assign(sizes, self.costs, self.num_owners, self.max_tokens)
        return StepPlan(cuts, sizes, assignment, step_seconds(assignment, sizes, self.costs, in_step))


def unit_sizes(leaves: np.ndarray, cuts: Sequence[int]) -> np.ndarray:
    """Returns [pieces, 4] int64: the ``SIZES`` of a tree's pieces.

    Args:
        leaves: [leaves, 2, 4], see ``leaf_sizes``.
        cuts: see ``split_tree``.
    """
    starts = np.array([0, *cuts])
    return np.add.reduceat(leaves[:, 0], starts) + leaves[starts, 1]


def best_cuts(leaves: np.ndarray, costs: TreeCosts, target: float) -> list[int]:
    """Returns the cuts that repeat least such that no piece of several leaves exceeds ``target`` seconds.

    The best cuts of the first n leaves follow from those of fewer leaves: their last piece starts at some
    leaf, and the leaves before it are cut in the best way.
    """
    before = costs.seconds(np.cumsum(leaves[:, 0], axis=0))
    before = np.append(0.0, before)  # seconds that the leaves before each leaf add
    repeated = costs.seconds(leaves[:, 1])
    least = np.zeros(len(before))  # seconds that the best cuts of the first n leaves repeat
    last_start = [0]
    for n in range(1, len(before)):
        first = min(int(np.searchsorted(before, before[n] - target)), n - 1)  # earlier ones exceed the target
        starts = slice(first, n)
        repeats = least[starts] + repeated[starts]
        repeats[:-1][(before[n] - before[starts] + repeated[starts] > target)[:-1]] = np.inf
        last_start.append(first + int(repeats.argmin()))
        least[n] = repeats.min()
    cuts, n = [], len(leaves)
    while (n := last_start[n]) > 0:
        cuts.append(n)
    return cuts[::-1]
