"""TreeSharing: ranks read different groups of a step, plan together, and send each tree to its owner.

    read own groups -> all ranks exchange sizes -> same assignment everywhere -> trees travel as bytes

The processes that make inputs do all of this, ahead of training. Worker w of every rank makes the same steps,
so the workers w of all ranks form a group of their own.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Protocol

import numpy as np

from titan_tree.data.balance import Assignment, assign_freely, assign_in_step
from titan_tree.data.packing import MicroBatches
from titan_tree.data.tree_bytes import tree_from_bytes, tree_to_bytes
from titan_tree.data.tree_costs import SIZES, TreeCosts, tree_sizes
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


class RankGroup(Protocol):
    """The processes, one per rank, that make the same steps. ``DataGroup`` is one."""

    def gather(self, make: Callable[[], bytes]) -> list[bytes]:
        """Calls ``make`` on every rank and returns the results of all, by rank. All raise its UserErrors."""

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """Sends ``parts[r]`` to rank r, and returns what each rank has sent to this one."""

    def costs(self, version: int) -> Sequence[float]:
        """Returns the coefficients of a version as soon as training has published them."""


@dataclass
class TreeSharing:
    """Shares the trees of steps among ranks, balanced by their costs. It can be pickled until ``join``.

    Args:
        connect: makes the group of the workers with a number.
        rank: this rank.
        num_ranks: number of ranks.
        max_tokens: of a micro-batch.
        always_in_step: whether ranks run in step even if trees are partitioned (expert parallelism).
        fitted_from: number of the first step that uses the fitted costs, version 1, instead of version 0.
            None: no step does. The steps of a dataset are numbered from 0.
        ranks_per_owner: adjacent ranks that train on the same trees; it divides ``num_ranks``.
    """

    connect: Callable[[int], RankGroup]
    rank: int
    num_ranks: int
    max_tokens: int
    always_in_step: bool = False
    fitted_from: int | None = None
    ranks_per_owner: int = 1
    _group: RankGroup | None = field(default=None, init=False)

    def join(self, worker: int) -> None:
        """Joins the group of the workers with this number. Waits until those of all ranks have joined."""
        self._group = self.connect(worker)

    def leave(self) -> None:
        """Leaves the group. Workers of other ranks that still wait for this one get an error."""
        self._group = None

    def own_micro_batches(self, step: int, read: Callable[[], list[TokenTree]]) -> MicroBatches:
        """Returns this rank's micro-batches of a step whose trees are on different ranks.

        Args:
            step: number of the step, from 0.
            read: returns the trees that this rank reads. If it raises a UserError, all ranks raise it.
        """
        assert self._group is not None
        trees: list[TokenTree] = []

        def sizes() -> bytes:
            trees.extend(read())
            return tree_sizes(trees).tobytes()

        by_rank = [
            np.frombuffer(part, np.int64).reshape(-1, len(SIZES)) for part in self._group.gather(sizes)
        ]
        assignment = self._assign(step, np.concatenate(by_rank))
        owner_of = {
            tree: owner
            for owner, micro_batches in enumerate(assignment)
            for tree in chain.from_iterable(micro_batches)
        }
        first = sum(map(len, by_rank[: self.rank]))  # the number of this rank's first tree
        own = dict(enumerate(trees, start=first))
        parts: list[dict[int, bytes]] = [{} for _ in range(self.num_ranks)]
        for i, tree in own.items():
            begin = owner_of[i] * self.ranks_per_owner
            if others := set(range(begin, begin + self.ranks_per_owner)) - {self.rank}:
                for path in tree.paths:
                    path.routed_experts = None  # the tree has what it needs of them
                content = tree_to_bytes(tree)
                for rank in others:
                    parts[rank][i] = content
        for part in self._group.exchange(list(map(pickle.dumps, parts))):
            own |= {i: tree_from_bytes(content) for i, content in pickle.loads(part).items()}
        return self._pick(assignment, own)

    def all_paths(self, read: Callable[[], list[list[TokenPath]]]) -> list[TokenPath]:
        """Returns the paths of all groups of a step, in the order of the groups.

        Args:
            read: returns the paths of this rank's groups: groups ``rank``, ``rank + num_ranks``, ...
        """
        assert self._group is not None

        def groups() -> bytes:
            return pickle.dumps([tree_to_bytes(TokenTree.from_paths(p)) if p else b"" for p in read()])

        by_rank = map(pickle.loads, self._group.gather(groups))
        in_order = chain.from_iterable(zip_longest(*by_rank, fillvalue=b""))
        return [path for content in in_order if content for path in tree_from_bytes(content).paths]

    def choose(self, step: int, trees: Sequence[TokenTree]) -> MicroBatches:
        """Returns this rank's micro-batches of a step whose trees are the same on all ranks."""
        return self._pick(self._assign(step, tree_sizes(trees)), dict(enumerate(trees)))

    def _assign(self, step: int, sizes: np.ndarray) -> Assignment:
        assert self._group is not None
        is_fitted = self.fitted_from is not None and step >= self.fitted_from
        costs = TreeCosts(*self._group.costs(version=int(is_fitted)))
        is_partitioned = bool((sizes[:, 0] > self.max_tokens).any())
        assign = assign_freely if is_partitioned and not self.always_in_step else assign_in_step
        return assign(sizes, costs, self.num_ranks // self.ranks_per_owner, self.max_tokens)

    @property
    def _owner(self) -> int:
        return self.rank // self.ranks_per_owner

    def _pick(self, assignment: Assignment, trees: dict[int, TokenTree]) -> MicroBatches:
        return [[trees[i] for i in chosen] for chosen in assignment[self._owner]]
