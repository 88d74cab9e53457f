"""Turns: the turns of a group of rollouts, as nodes of a tree.

A *turn* is a run of tokens that the loss counts. Its *state* is the context before it: all earlier tokens of
its path. Turns are the same *node* if their states and their tokens are equal. A node is not a node of the
token tree: turns that begin with the same tokens and then diverge are different nodes.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from titan_tree.errors import UserError
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import lexicographic_trie, merge_keys

# A function (turns, **options) -> one array of advantages per path; advantages.py has some.
Estimator = Callable[..., list[np.ndarray]]


class Turn(NamedTuple):
    """One turn of one path."""

    path: int
    start: int  # first token, >= 1
    end: int  # exclusive
    state: Hashable  # equal for turns with the same context
    node: Hashable  # equal for turns with the same context and the same tokens


class Weights(NamedTuple):
    """How much each rollout counts in the mean rewards."""

    turn: list[float]  # in V(turn), one per turn
    state: list[float]  # in V(state), one per turn
    root: list[float]  # in V(root), [R]


class Turns:
    """The turns of P paths, which belong to R rollouts.

    Args:
        paths: the paths of one group.
        rewards: [R] the reward of each rollout.
        rollouts: [P] the rollout of each path. Default: each path is a rollout. The paths of a rollout are in
            the order of its turns.
        inherited: [R] how many of its first turns each rollout inherited from the rollout that it was forked
            from. It sampled the others. None: not known.
    """

    def __init__(
        self,
        paths: Sequence[TokenPath],
        rewards: Sequence[float],
        rollouts: Sequence[int] | None = None,
        inherited: Sequence[int] | None = None,
    ) -> None:
        self.paths = paths
        self.rewards = rewards
        self.rollouts = range(len(paths)) if rollouts is None else rollouts
        self.inherited = inherited

    @cached_property
    def turns(self) -> list[Turn]:
        """All turns, path after path."""
        index, _ = lexicographic_trie(merge_keys(self.paths)[0])
        return [
            Turn(p, start, end, int(tokens[start - 1]), (int(tokens[start - 1]), int(tokens[end - 1])))
            for p, (path, tokens) in enumerate(zip(self.paths, index, strict=True))
            for start, end in runs(path.loss_mask)
        ]

    @cached_property
    def root(self) -> float:
        """V(root): the mean reward of all rollouts."""
        return _mean(self.rewards, self._weights.root)

    @cached_property
    def node_rollouts(self) -> dict[Hashable, set[int]]:
        """The rollouts that took each turn, by node."""
        return _group((turn.node, self.rollouts[turn.path]) for turn in self.turns)

    @cached_property
    def node_values(self) -> dict[Hashable, float]:
        """V(u): the mean reward of the rollouts that took turn u, by node."""
        rewards = [self.rewards[self.rollouts[turn.path]] for turn in self.turns]
        return self._means([turn.node for turn in self.turns], rewards, self._weights.turn)

    @cached_property
    def state_values(self) -> dict[Hashable, float]:
        """The mean reward of the rollouts that took any turn from a state: V of the node above."""
        rewards = [self.rewards[self.rollouts[turn.path]] for turn in self.turns]
        return self._means([turn.state for turn in self.turns], rewards, self._weights.state)

    @cached_property
    def state_stds(self) -> dict[Hashable, float]:
        """The standard deviation of V(u) over the rollouts that took a turn u from a state."""
        states = [turn.state for turn in self.turns]
        gaps = [self.node_values[turn.node] - self.state_values[turn.state] for turn in self.turns]
        variances = self._means(states, [gap**2 for gap in gaps], self._weights.state)
        return {state: math.sqrt(variance) for state, variance in variances.items()}

    def per_token(self, values: Iterable[float]) -> list[np.ndarray]:
        """Returns [T] float64 per path: the value of the turn at its tokens, 0 elsewhere.

        Args:
            values: the values of ``turns``, in their order.
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
        """Returns [T] float64 per path: how many paths count the token's turn; 1 outside of turns.

        If it is known which rollouts sampled the turn, the number is divided by theirs.
        """
        paths = _group((turn.node, turn.path) for turn in self.turns)
        number = {node: len(paths[node]) / self._sampled.get(node, 1) for node in paths}
        values = self.per_token(number[turn.node] for turn in self.turns)
        return [np.where(array > 0, array, 1.0) for array in values]

    @cached_property
    def _sampled(self) -> Counter[Hashable]:
        """How many rollouts sampled each turn, and a turn in each state. Empty if that is not known."""
        sampled: Counter[Hashable] = Counter()
        if self.inherited is not None:
            number: Counter[int] = Counter()
            for turn in self.turns:
                rollout = self.rollouts[turn.path]
                is_sampled = number[rollout] >= self.inherited[rollout]
                sampled.update({turn.node: is_sampled, turn.state: is_sampled})
                number[rollout] += 1
            if not all(sampled.values()):
                raise UserError(
                    "inherited: expected every turn to be sampled by a rollout of the group, but all "
                    "rollouts of one turn inherited it; pass the rollouts that were forked, too"
                )
        return sampled

    @cached_property
    def _weights(self) -> Weights:
        """Importance weights that undo forking. Without forks, all of them are 1.

        A rollout that inherited a turn did not sample it, so it says nothing about how likely the turn is.
        The value of a state must be the mean of V(turn) over the turns that were sampled there.
        """
        taken = Counter(key for turn in self.turns for key in (turn.node, turn.state))
        share = {key: self._sampled[key] / taken[key] if self._sampled else 1.0 for key in taken}
        weights = [1.0] * len(self.rewards)  # of each rollout, behind the turn that the loop looks at
        turn_weights, state_weights = [], []
        for turn in reversed(self.turns):
            rollout = self.rollouts[turn.path]
            turn_weights.append(weights[rollout])
            weights[rollout] *= share[turn.node] / share[turn.state]
            state_weights.append(weights[rollout])
        return Weights(turn_weights[::-1], state_weights[::-1], weights)

    def _means(
        self, keys: Sequence[Hashable], values: Sequence[float], weights: Sequence[float]
    ) -> dict[Hashable, float]:
        """Returns the mean value of the rollouts with each key. All arguments are per turn."""
        members: dict[Hashable, dict[int, tuple[float, float]]] = {}
        for turn, key, value, weight in zip(self.turns, keys, values, weights, strict=True):
            members.setdefault(key, {})[self.rollouts[turn.path]] = value, weight
        return {key: _mean(*zip(*pairs.values(), strict=True)) for key, pairs in members.items()}


def _mean(values: Sequence[float], weights: Sequence[float]) -> float:
    """Returns the weighted mean. It is exact if the values are equal."""
    differences = (weight * (value - values[0]) for value, weight in zip(values, weights, strict=True))
    return values[0] + math.fsum(differences) / math.fsum(weights)


def _group(pairs: Iterable[tuple[Hashable, int]]) -> dict[Hashable, set[int]]:
    groups: dict[Hashable, set[int]] = {}
    for key, member in pairs:
        groups.setdefault(key, set()).add(member)
    return groups


def runs(loss_mask: np.ndarray) -> list[tuple[int, int]]:
    """Returns [start, end) of each run of counted tokens. Nothing predicts token 0, so it is in no run."""
    is_counted = np.concatenate([[False], loss_mask[1:] > 0, [False]])
    edges = np.flatnonzero(np.diff(is_counted)) + 1
    return [(int(start), int(end)) for start, end in edges.reshape(-1, 2)]
