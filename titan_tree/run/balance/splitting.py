"""Splitting: trees that keep other owners waiting are split into pieces, if the step gets faster.

However trees are assigned, a step takes at least as long as its costliest tree. The paths of such trees are
therefore divided into pieces, which go to different owners. A tree is cut between two leaves in DFS order, so
each piece is a contiguous part of the tree plus a copy of the tokens above its first leaf. A cut before the
second leaf of a = 1 2 3 4, b = 1 2 3 5 6 and c = 1 2 7:

    tree                           piece 0                       piece 1

    [1 2] -+- [3] -+- [5 6]   b    [1 2] --- [3] --- [5 6]   b   [1 2] -+- [3] --- [4]   a
           |       +- [4]     a                                         +- [7]           c
           +- [7]             c

Every path is in one piece, so the pieces' losses and gradients add up to the tree's. The copied tokens of
piece 1 (1 2 3) run a second time. Only the first piece with a token counts it: ``node_paths`` has the number
of the tree's paths there, and 0 in later pieces. So the numbers of distinct and of logical tokens and the
routers' sums (components/moe) also add up to the tree's.

Pieces repeat tokens, so a step is assigned several times:

    1. All trees stay whole. If the step could be faster by MIN_GAIN, were its work divided evenly, the trees
       that cost more than half of an owner's even part of the work are candidates.
    2. For each target in TARGETS, from coarse to fine, candidates are cut such that no piece of several
       leaves costs more than the target. Of all such cuts, those that repeat least are used.
    3. A finer assignment replaces a coarser one only if the step's estimated time, with all repeated tokens,
       falls by MIN_GAIN.

Every rank computes the same assignment: it depends on sizes and costs alone, and sums have a fixed order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from titan_tree.run.balance.assignment import Assignment, assign_freely, assign_in_step, step_seconds
from titan_tree.tree.costs import TreeCosts, leaf_sizes
from titan_tree.tree.images import distinct_images, renumbered_rows
from titan_tree.tree.paths import PER_TOKEN, TokenPath
from titan_tree.tree.token_tree import TokenTree

MIN_GAIN = 0.05  # smallest gain, relative to a step's estimated time
TARGETS = (2.0, 1.4, 1.1, 0.8, 0.6, 0.45, 0.3)  # costs of a piece, relative to an owner's even part


@dataclass(frozen=True)
class StepAssignment:
    """Which owner trains on which trees and pieces of a step.

    A *unit* is a whole tree or a piece. Units are numbered tree by tree, and pieces in their tree's order.
    """

    cuts: list[list[int]]  # for each tree, see ``split_tree``; empty: it stays whole
    sizes: np.ndarray  # [units, 6] int64, see ``tree_sizes``
    micro_batches: Assignment  # units of each owner's micro-batches
    seconds: float  # estimated time of the step

    def first_unit(self, tree: int) -> int:
        return sum(1 + len(cuts) for cuts in self.cuts[:tree])

    def units(self, trees: Mapping[int, TokenTree]) -> dict[int, TokenTree]:
        return {
            unit: piece
            for number, tree in trees.items()
            for unit, piece in enumerate(split_tree(tree, self.cuts[number]), self.first_unit(number))
        }


def may_split(tree: TokenTree) -> bool:
    """Returns whether a tree may be split: that must neither hide an error of the tree nor change its loss.

    A batch refuses paths of which only some have a field. Pieces of such a tree might pass, so it stays
    whole. The paths of a preference pair stay together.
    """
    return len(set(map(_traits, tree.paths))) == 1 and tree.paths[0].preference is None


def _traits(path: TokenPath) -> tuple[object, ...]:
    return tuple(getattr(path, name) is None for name in (*PER_TOKEN, "policy_version"))


@dataclass(frozen=True)
class StepBalancer:
    """Assigns trees to owners, and splits those that would keep other owners waiting.

    Args:
        costs: seconds of the model's trees.
        num_owners: number of owners. An owner is a rank, or several that train on the same trees.
        max_tokens: largest number of tokens of a micro-batch.
        in_step: whether owners run in step. None: unless a tree or a piece has more than ``max_tokens``.
    """

    costs: TreeCosts
    num_owners: int
    max_tokens: int
    in_step: bool | None = None

    def assign(
        self,
        sizes: np.ndarray,
        trees: Mapping[int, TokenTree],
        gather: Callable[[dict[int, np.ndarray]], dict[int, np.ndarray]] = lambda leaves: leaves,
    ) -> tuple[StepAssignment, StepAssignment]:
        """Returns the assignment of a step without pieces, and the faster one that may contain pieces.

        Args:
            sizes: [trees, 6] int64, the ``tree_sizes`` of all trees of the step.
            trees: the trees that this process has, by number.
            gather: returns the entries of all processes. All processes call it, or none does.
        """
        whole = self.whole(sizes)
        if not (candidates := self.candidates(whole)):
            return whole, whole
        leaves = {i: leaf_sizes(trees[i]) for i in candidates if i in trees and may_split(trees[i])}
        return whole, self.split(whole, gather(leaves))

    def whole(self, sizes: np.ndarray) -> StepAssignment:
        """Returns the assignment of a step whose trees, of ``sizes`` [trees, 6], all stay whole."""
        return self._assign([[] for _ in sizes], sizes)

    def candidates(self, whole: StepAssignment) -> list[int]:
        """Returns the numbers of the trees that ``split`` should split if it may. Empty: it is not needed."""
        if not self._may_gain(whole):
            return []
        seconds = self.costs.seconds(whole.sizes)
        return np.flatnonzero(seconds > self.even_part(whole) / 2).tolist()

    def split(self, whole: StepAssignment, leaves: Mapping[int, np.ndarray]) -> StepAssignment:
        """Returns the assignment of the same step in which trees may be in pieces.

        Args:
            leaves: the ``leaf_sizes`` of the trees that may be split, by number.
        """
        best = whole
        for target in TARGETS:
            if not self._may_gain(best):
                break
            seconds = target * self.even_part(whole)
            cuts: list[list[int]] = [[] for _ in whole.cuts]
            sizes = [*whole.sizes[:, None]]
            for i, of_tree in leaves.items():
                if cut := best_cuts(of_tree, self.costs, seconds):
                    cuts[i], sizes[i] = cut, unit_sizes(of_tree, cut)
            finer = self._assign(cuts, np.concatenate(sizes))
            if finer.seconds < (1 - MIN_GAIN) * best.seconds:
                best = finer
        return best

    def describe(self, whole: StepAssignment, assigned: StepAssignment) -> dict[str, str]:
        """Returns messages for the user, by kind: trees in pieces, and trees that others wait for.

        Args:
            whole: the assignment of the step without pieces.
            assigned: the assignment to use.
        """
        messages = {}
        tokens = whole.sizes[:, 0]
        if split := [i for i, cuts in enumerate(assigned.cuts) if cuts]:
            largest = max(split, key=lambda i: tokens[i])
            first, pieces = assigned.first_unit(largest), 1 + len(assigned.cuts[largest])
            repeated = int(assigned.sizes[first : first + pieces, 0].sum()) - int(tokens[largest])
            messages["split tree"] = (
                f"a tree of {tokens[largest]:,} tokens is split into {pieces} pieces, because other ranks "
                f"would wait for it; the pieces repeat {repeated:,} tokens; a larger "
                "parallel.sequence_parallel would compute each token once"
            )
        seconds = self.costs.seconds(whole.sizes) + self.costs.forward
        large = np.flatnonzero(seconds * (1 - MIN_GAIN) > self._even_seconds(whole)).tolist()
        if waited_for := [i for i in large if not assigned.cuts[i]]:
            longest = max(waited_for, key=lambda i: seconds[i])
            times = float(seconds[longest]) / self._even_seconds(whole)
            messages["large tree"] = (
                f"other ranks wait for a tree of {tokens[longest]:,} tokens, which takes "
                f"{times:.1f} times as long as the mean work of a rank; it stays in one piece; a larger "
                "parallel.sequence_parallel would share its tokens"
            )
        return messages

    def even_part(self, assigned: StepAssignment) -> float:
        """Returns the seconds of all units divided by the number of owners, without the passes' constant."""
        return float(self.costs.seconds(assigned.sizes.sum(0))) / self.num_owners

    def _even_seconds(self, assigned: StepAssignment) -> float:
        return self.even_part(assigned) + self.costs.forward

    def _may_gain(self, assigned: StepAssignment) -> bool:
        """Returns whether the step would be faster by more than MIN_GAIN if its work were divided evenly."""
        return self._even_seconds(assigned) < (1 - MIN_GAIN) * assigned.seconds

    def _assign(self, cuts: list[list[int]], sizes: np.ndarray) -> StepAssignment:
        in_step = self.in_step
        if in_step is None:
            in_step = not (sizes[:, 0] > self.max_tokens).any()
        assign = assign_in_step if in_step else assign_freely
        owners = assign(sizes, self.costs, self.num_owners, self.max_tokens)
        return StepAssignment(cuts, sizes, owners, step_seconds(owners, sizes, self.costs, in_step))


def split_tree(tree: TokenTree, cuts: Sequence[int]) -> list[TokenTree]:
    """Returns the pieces of a tree, in DFS order. Nodes and the order of paths are those of the tree.

    Args:
        cuts: ascending numbers of leaves, from 1: each is the first leaf of the next piece.
    """
    if not cuts:
        return [tree]
    piece_of_path = np.searchsorted(cuts, tree.leaf_of_path, side="right")
    starts = [0, *(int(tree.leaves[cut - 1]) + 1 for cut in cuts), len(tree.node_parent)]  # nodes
    return [
        _piece(tree, start, stop, np.flatnonzero(piece_of_path == i))
        for i, (start, stop) in enumerate(pairwise(starts))
    ]


def _piece(tree: TokenTree, start: int, stop: int, paths: np.ndarray) -> TokenTree:
    """Returns the piece with the nodes ``start``, .., ``stop`` - 1 and the nodes above ``start``.

    Args:
        paths: [paths] int64, ascending: the numbers of the piece's paths.
    """
    copied: list[int] = []
    node = int(tree.node_parent[start])
    while node >= 0:
        copied.append(node)
        node = int(tree.node_parent[node])
    nodes = np.array([*reversed(copied), *range(start, stop)])
    new_node = np.full(len(tree.node_parent) + 1, -1, np.int32)  # its last entry is for -1: no parent
    new_node[nodes] = np.arange(len(nodes))
    is_kept = np.repeat(new_node[:-1] >= 0, tree.node_length)
    new_token = np.cumsum(is_kept, dtype=np.int32) - 1
    # The subtree of a copied node may also contain tokens before and behind the piece.
    num_before = np.append(0, new_token + 1)
    indices = [tree.indices_of(number) for number in paths.tolist()]
    is_counted = bool(paths[0] == 0)
    recorded = tree.routed_experts
    if recorded is not None:
        counts = recorded[1:] if is_counted else (0, 0)
        recorded = type(recorded)(recorded.experts[is_kept], *counts)
    kept_paths = tuple(tree.paths[number] for number in paths.tolist())
    images, image_row = tree.images, tree.image_row
    if image_row is not None:
        images = distinct_images(image for path in kept_paths for _, image in path.images)
        image_row = renumbered_rows(image_row[is_kept], tree.images, images) if images else None
    return TokenTree(
        tokens=tree.tokens[is_kept],
        node_offsets=np.append(0, np.cumsum(tree.node_length[nodes], dtype=np.int32)).astype(np.int32),
        node_parent=new_node[tree.node_parent[nodes]],
        node_depth=tree.node_depth[nodes],
        node_subtree_end=num_before[tree.node_subtree_end[nodes]].astype(np.int32),
        node_paths=np.where(nodes < start, np.int32(0), tree.node_paths[nodes]),
        paths=kept_paths,
        path_node=new_node[tree.path_node[paths]],
        path_offsets=np.cumsum([0, *map(len, indices)]),
        path_index=new_token[np.concatenate(indices)],
        routed_experts=recorded,
        images=images,
        image_row=image_row,
        is_counted=is_counted,
    )


def unit_sizes(leaves: np.ndarray, cuts: Sequence[int]) -> np.ndarray:
    """Returns [pieces, 6] int64: the ``SIZES`` of a tree's pieces.

    Args:
        leaves: [leaves, 2, 6], see ``leaf_sizes``.
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
