"""BalancedSharing: ranks read different groups of a step, and send each tree to the rank that trains on it.

    read groups -> all ranks exchange sizes -> same assignment everywhere -> trees and pieces travel as bytes

The processes that make inputs do all of this, ahead of training. Worker w of every rank makes the same steps,
so the workers w of all ranks form a group of their own.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest

import numpy as np

from titan_tree.data.data_files import Group
from titan_tree.data.dataset import TreeDataset
from titan_tree.data.packing import MicroBatches
from titan_tree.data.tree_bytes import tree_from_bytes, tree_to_bytes
from titan_tree.run.balance.data_group import DataAddress, DataGroup
from titan_tree.run.balance.splitting import StepAssignment, StepBalancer
from titan_tree.tree.costs import SIZES, TreeCosts, tree_sizes
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

logger = logging.getLogger(__name__)


@dataclass
class BalancedSharing:
    """Shares the trees of steps among ranks, balanced by their costs. It can be pickled until ``join``.

    Args:
        address: the address at which the processes that make inputs meet.
        max_tokens: largest number of tokens of a micro-batch.
        always_in_step: whether ranks run in step even if trees are partitioned (expert parallelism).
        fitted_from: number of the first step that uses the fitted costs, version 1, instead of version 0.
            None: no step does. The steps of a dataset are numbered from 0.
        ranks_per_owner: adjacent ranks that train on the same trees; it divides ``num_ranks``.
        splits: whether the paths of a tree may be divided among owners (splitting.py). False if the loss
            compares paths of a tree, or depends on which trees share a micro-batch.
    """

    address: DataAddress
    max_tokens: int
    always_in_step: bool = False
    fitted_from: int | None = None
    ranks_per_owner: int = 1
    splits: bool = True
    _group: DataGroup | None = field(default=None, init=False)
    _logged: set[str] = field(default_factory=set, init=False)

    def steps(
        self, dataset: TreeDataset, number: int, first: int = 0, stride: int = 1
    ) -> Iterator[MicroBatches]:
        """Yields this rank's micro-batches of the same steps as ``TreeDataset.steps``, in worker ``first``.

        Each rank reads every ``world_size``-th group of a global batch. Workers of other ranks that still
        wait for this one when it ends get an error.
        """
        self.join(first)
        try:
            for step, groups in dataset.batches(number, first, stride):
                yield self._of_groups(step, dataset, groups)
        finally:
            self._group = None

    def join(self, worker: int) -> None:
        """Joins the workers with this number on all ranks. Waits until all have joined."""
        self._group = DataGroup(self.address, worker)

    def _of_groups(self, step: int, dataset: TreeDataset, groups: Sequence[Group]) -> MicroBatches:
        if dataset.config.merge == "group":
            return self.own_micro_batches(step, lambda: dataset.own_trees(groups))
        return self._choose(step, dataset.merged(self._all_paths(lambda: dataset.own_paths(groups))))

    def own_micro_batches(self, step: int, read: Callable[[], list[TokenTree]]) -> MicroBatches:
        """Returns this rank's micro-batches of a step whose trees are on different ranks.

        Args:
            step: number of the step, from 0.
            read: returns the trees that this rank reads. If it raises a UserError, all ranks raise it.
        """
        assert self._group is not None
        rank, num_ranks = self.address.rank, self.address.num_ranks
        trees, sizes = self._group.gather(read, lambda trees: tree_sizes(trees).tobytes())
        by_rank = [np.frombuffer(part, np.int64).reshape(-1, len(SIZES)) for part in sizes]
        first = sum(map(len, by_rank[:rank]))  # the number of this rank's first tree
        read_here = dict(enumerate(trees, start=first))
        assigned = self._assign(step, np.concatenate(by_rank), read_here, self._leaves_of_all)
        owner_of = {
            unit: owner
            for owner, micro_batches in enumerate(assigned.micro_batches)
            for unit in chain.from_iterable(micro_batches)
        }
        units = assigned.units(read_here)
        parts: list[dict[int, bytes]] = [{} for _ in range(num_ranks)]
        for i, tree in units.items():
            begin = owner_of[i] * self.ranks_per_owner
            if others := set(range(begin, begin + self.ranks_per_owner)) - {rank}:
                for path in tree.paths:
                    path.routed_experts = None  # the tree has what it needs of them
                content = tree_to_bytes(tree)
                for other in others:
                    parts[other][i] = content
        for part in self._group.exchange(list(map(pickle.dumps, parts))):
            units |= {i: tree_from_bytes(content) for i, content in pickle.loads(part).items()}
        return self._pick(assigned, units)

    def _all_paths(self, read: Callable[[], list[list[TokenPath]]]) -> list[TokenPath]:
        """Returns the paths of all groups of a step, in the order of the groups.

        Args:
            read: returns the paths of groups ``rank``, ``rank + num_ranks``, ..., which this rank reads.
        """
        assert self._group is not None

        def encode(groups: list[list[TokenPath]]) -> bytes:
            return pickle.dumps([tree_to_bytes(TokenTree.from_paths(p)) if p else b"" for p in groups])

        by_rank = map(pickle.loads, self._group.gather(read, encode)[1])
        in_order = chain.from_iterable(zip_longest(*by_rank, fillvalue=b""))
        return [path for content in in_order if content for path in tree_from_bytes(content).paths]

    def _choose(self, step: int, trees: Sequence[TokenTree]) -> MicroBatches:
        """Returns this rank's micro-batches of a step whose trees are the same on all ranks."""
        numbered = dict(enumerate(trees))
        assigned = self._assign(step, tree_sizes(trees), numbered, lambda leaves: leaves)
        return self._pick(assigned, assigned.units(numbered))

    def _assign(
        self,
        step: int,
        sizes: np.ndarray,
        trees: Mapping[int, TokenTree],
        gather: Callable[[dict[int, np.ndarray]], dict[int, np.ndarray]],
    ) -> StepAssignment:
        """Returns the assignment of a step, the same on all ranks. See ``StepBalancer.assign``."""
        assert self._group is not None
        is_fitted = self.fitted_from is not None and step >= self.fitted_from
        costs = TreeCosts(*self._group.costs(version=int(is_fitted)))
        num_owners = self.address.num_ranks // self.ranks_per_owner
        balancer = StepBalancer(costs, num_owners, self.max_tokens, in_step=self.always_in_step or None)
        if self.splits:
            whole, assigned = balancer.assign(sizes, trees, gather)
        else:
            whole = assigned = balancer.whole(sizes)
        if self.address.rank == 0:
            for event, message in balancer.describe(whole, assigned).items():
                if event not in self._logged:
                    self._logged.add(event)
                    logger.warning(message, extra={"warning": event})
        return assigned

    def _leaves_of_all(self, leaves: dict[int, np.ndarray]) -> dict[int, np.ndarray]:
        """Returns the leaf sizes that all ranks have. Collective."""
        assert self._group is not None
        parts = self._group.exchange([pickle.dumps(leaves)] * self.address.num_ranks)
        return {i: sizes for part in parts for i, sizes in pickle.loads(part).items()}

    def _pick(self, assigned: StepAssignment, units: dict[int, TokenTree]) -> MicroBatches:
        owner = self.address.rank // self.ranks_per_owner
        return [[units[i] for i in chosen] for chosen in assigned.micro_batches[owner]]
