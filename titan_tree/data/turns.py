"""Turns: the turns of a group of rollouts, as nodes of a tree.

A *turn* is a run of tokens that the loss counts. Its *state* is the context before it: all earlier tokens of
its path. Turns are the same *node* if their states and their tokens are equal. A node is not a node of the
token tree: turns that begin with the same tokens and then diverge are different nodes.
"""

from __future__ import annotations

import statistics
from collections.abc import Hashable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from titan_tree.tree.paths import TokenPath
from titan_tree.tree.trie import lexicographic_trie


class Turn(NamedTuple):
    """One turn of one path."""

    path: int
    start: int  # first token, >= 1
    end: int  # exclusive
    state: Hashable  # equal for turns with the same context
    node: Hashable  # equal for turns with the same context and the same tokens


class Turns:
    """The turns of P paths, which belong to R rollouts.

    Args:
        paths: of one group.
        rewards: [R] of the rollouts.
        rollouts: [P] the rollout of each path. Default: each path is a rollout. The paths of a rollout are in
            the order of its turns.
    """

    def __init__(
        self,
        paths: Sequence[TokenPath],
        rewards: Sequence[float],
        rollouts: Sequence[int] | None = None,
    ) -> None:
        self.paths = paths
        self.rewards = rewards
        self.rollouts = range(len(paths)) if rollouts is None else rollouts

    @cached_property
    def turns(self) -> list[Turn]:
        """All turns, path after path."""
        index, _ = lexicographic_trie([path.tokens for path in self.paths])
        return [
            Turn(p, start, end, int(tokens[start - 1]), (int(tokens[start - 1]), int(tokens[end - 1])))
            for p, (path, tokens) in enumerate(zip(self.paths, index, strict=True))
            for start, end in _runs(path.loss_mask)
        ]

    @cached_property
    def root(self) -> float:
        """V(root): the mean reward of all rollouts."""
        return statistics.mean(self.rewards)

    @cached_property
    def node_rollouts(self) -> dict[Hashable, set[int]]:
        """The rollouts that took each turn, by node."""
        return _group((turn.node, self.rollouts[turn.path]) for turn in self.turns)

    @cached_property
    def node_values(self) -> dict[Hashable, float]:
        """V(u): the mean reward of the rollouts that took turn u, by node."""
        return self._means(self.node_rollouts)

    @cached_property
    def state_values(self) -> dict[Hashable, float]:
        """The mean reward of the rollouts that took any turn from a state: V of the node above."""
        return self._means(_group((turn.state, self.rollouts[turn.path]) for turn in self.turns))

    def per_token(self, values: Iterable[float]) -> list[np.ndarray]:
        """Returns [T] float64 per path: the value of the turn at its tokens, 0 elsewhere.

        Args:
            values: of ``turns``, in their order.
        """
        arrays = [np.zeros(len(path)) for path in self.paths]
        for turn, value in zip(self.turns, values, strict=True):
            arrays[turn.path][turn.start : turn.end] = value
        return arrays

    def per_path(self, values: Sequence[float]) -> list[np.ndarray]:
        """Returns [T] float64 per path: the value of its rollout at all tokens. ``values`` are [R]."""
        return [
            np.full(len(path), float(values[rollout]))
            for path, rollout in zip(self.paths, self.rollouts, strict=True)
        ]

    def counts(self) -> list[np.ndarray]:
        """Returns [T] float64 per path: how many paths count the token's turn; 1 outside of turns."""
        number = {node: len(paths) for node, paths in _group((t.node, t.path) for t in self.turns).items()}
        return [np.maximum(array, 1) for array in self.per_token(number[turn.node] for turn in self.turns)]

    def _means(self, members: dict[Hashable, set[int]]) -> dict[Hashable, float]:
        return {
            key: statistics.mean([self.rewards[rollout] for rollout in rollouts])
            for key, rollouts in members.items()
        }


def _group(pairs: Iterable[tuple[Hashable, int]]) -> dict[Hashable, set[int]]:
    groups: dict[Hashable, set[int]] = {}
    for key, member in pairs:
        groups.setdefault(key, set()).add(member)
    return groups


def _runs(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """Returns [start, end) of each run of counted tokens. Nothing predicts token 0, so it is in no run."""
    is_counted = np.concatenate([[False], loss_mask[1:] > 0, [False]])
    edges = np.flatnonzero(np.diff(is_counted)) + 1
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
