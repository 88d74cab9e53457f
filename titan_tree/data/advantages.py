"""Advantages from the rewards of a group of rollouts, by name (settings.ADVANTAGES; docs/advantages.md).

An estimator is a function (turns, **options) -> one [T] array per path. R_i is the reward of rollout i, and
V(u) the mean reward of the rollouts through a turn u. V(root) is the mean of the group, and V(par u) that of
the rollouts that took any turn from the state in which u was taken (turns.py).

All estimators give 0, and never NaN, where rewards do not differ or there is nothing to compare with.
"""

from __future__ import annotations

import inspect
import statistics
from collections import Counter, defaultdict
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np

from titan_tree.data.data_files import Trajectory
from titan_tree.data.schema import record_name
from titan_tree.data.settings import ADVANTAGES
from titan_tree.data.turns import Turn, Turns
from titan_tree.errors import UserError, shorten
from titan_tree.tree.paths import TokenPath

MAX_REWARD = 1e30  # advantages are float32


def advantages(
    name: str,
    paths: Sequence[TokenPath],
    rewards: Sequence[float],
    rollouts: Sequence[int] | None = None,
    inherited: Sequence[int] | None = None,
    **options: float,
) -> list[np.ndarray]:
    """Returns the advantages of the paths of one group.

    Args:
        name: name of an estimator in ``ADVANTAGES``, such as "loo" or "tree_rl".
        paths: P paths. Their tokens and loss masks are read.
        rewards: [R] one finite number per rollout.
        rollouts: [P] which rollout each path belongs to, for example if each turn of a conversation is a
            path. The paths of a rollout are in the order of its turns. Default: each path is a rollout.
        inherited: [R] how many of its first turns each rollout inherited from another one, if it was forked.
            Default: not known; all rollouts then count alike in V.
        options: options of the estimator. ``once`` is an option of all: divide by the number of paths that
            count the same turn, so that a sum over paths counts the turn once. With ``inherited``, it counts
            once per rollout that sampled it.

    Returns:
        One [T] float32 array per path (``TokenPath.advantage``).

    Raises:
        UserError: an unknown name or option, or rewards that are not finite or not one per rollout.
    """
    estimator = ADVANTAGES[name]
    check_options(name, options)
    expected = len(paths) if rollouts is None else max(rollouts, default=-1) + 1
    if len(rewards) < expected or not all(-MAX_REWARD <= reward <= MAX_REWARD for reward in rewards):
        raise UserError(
            f"rewards: expected {expected} finite numbers, one per rollout, got {shorten(rewards)}"
        )
    if not paths:
        return []
    once = options.pop("once", name in ONCE)
    turns = Turns(paths, [float(reward) for reward in rewards], rollouts, inherited)
    with ADVANTAGES.calling(name, ", ".join(["turns", *options])):
        values = [np.asarray(value) for value in estimator(turns, **options)]
    shapes, expected_shapes = [value.shape for value in values], [path.tokens.shape for path in paths]
    if shapes != expected_shapes or any(value.dtype.kind not in "biuf" for value in values):
        got = f"{shorten(shapes)} of {', '.join(sorted({str(value.dtype) for value in values})) or 'nothing'}"
        raise UserError(
            f"advantage estimator {name!r}: expected an array of real numbers per path, one per token, "
            f"of shapes {shorten(expected_shapes)}, got {got}; turns.per_path and turns.per_token make them"
        )
    if once:
        values = [value / count for value, count in zip(values, turns.counts(), strict=True)]
    return [value.astype(np.float32) for value in values]


def check_options(name: str, options: Mapping[str, object], table: str = "data") -> None:
    """Raises UserError unless all ``options`` are numbers or booleans that the estimator takes.

    Args:
        name: name of the estimator.
        options: the options by name.
        table: the configuration's table that has them, for error messages.
    """
    known = ["once", *list(inspect.signature(ADVANTAGES[name]).parameters)[1:]]
    for key, value in options.items():
        where = f"{table}.advantage_options.{key}"
        if key not in known:
            raise UserError(f"{where}: {name!r} has no such option; expected {', '.join(known)}; remove it")
        if not isinstance(value, int | float) or not -MAX_REWARD <= value <= MAX_REWARD:
            raise UserError(f"{where}: expected a finite number, true or false, got {shorten(value)}")


def group(turns: Turns) -> list[np.ndarray]:
    """Returns (R_i - V(root)) / (std + 1e-6); std divides by n - 1 (GRPO, arXiv:2402.03300)."""
    return turns.per_path(_normalized(turns.rewards))


def mean(turns: Turns) -> list[np.ndarray]:
    """Returns R_i - V(root) (Dr. GRPO, arXiv:2503.20783)."""
    return turns.per_path(_normalized(turns.rewards, std=False))


def loo(turns: Turns) -> list[np.ndarray]:
    """Returns R_i minus the mean reward of the other rollouts (RLOO, arXiv:2402.14740)."""
    n = len(turns.rewards)
    return turns.per_path([value * n / max(n - 1, 1) for value in _normalized(turns.rewards, std=False)])


def gigpo(turns: Turns, omega: float = 1.0, gamma: float = 0.95, std: bool = True) -> list[np.ndarray]:
    """Returns the advantage of the rollout plus that of the turn among turns from the same state.

    The second one compares discounted returns, gamma^(turns that follow) R_i (GiGPO, arXiv:2505.10978).

    Args:
        omega: weight of the turn's advantage.
        gamma: discount per turn.
        std: divide both by their standard deviation + 1e-6.
    """
    rollout_values = _normalized(turns.rewards, std)
    left = Counter(turns.rollouts[turn.path] for turn in turns.turns)
    by_state: dict[Hashable, list[tuple[int, float]]] = defaultdict(list)
    for number, turn in enumerate(turns.turns):
        rollout = turns.rollouts[turn.path]
        left[rollout] -= 1
        by_state[turn.state].append((number, gamma ** left[rollout] * turns.rewards[rollout]))
    values = [rollout_values[turns.rollouts[turn.path]] for turn in turns.turns]
    for members in by_state.values():
        numbers, returns = zip(*members, strict=True)
        for number, advantage in zip(numbers, _normalized(returns, std), strict=True):
            values[number] += omega * advantage
    return turns.per_token(values)


def tree_rl(turns: Turns) -> list[np.ndarray]:
    """Returns [(V(u) - V(root)) + (V(u) - V(par u))] / sqrt(n_u) (TreeRL, arXiv:2506.11902).

    n_u is the number of rollouts through the turn u.
    """

    def value(turn: Turn) -> float:
        v, n = turns.node_values[turn.node], len(turns.node_rollouts[turn.node])
        return float((v - turns.root + v - turns.state_values[turn.state]) / np.sqrt(n))

    return turns.per_token(map(value, turns.turns))


def spo(turns: Turns, std: bool = False) -> list[np.ndarray]:
    """Returns V(u) - V(par u) (SPO-tree, arXiv:2505.23564). By default, it counts ``once`` per turn.

    Args:
        std: divide by the standard deviation of V over the turns from the same state, + 1e-8.
    """

    def value(turn: Turn) -> float:
        gap = turns.node_values[turn.node] - turns.state_values[turn.state]
        return gap / (turns.state_stds[turn.state] + 1e-8) if std else gap

    return turns.per_token(map(value, turns.turns))


def tree_grpo(turns: Turns) -> list[np.ndarray]:
    """Returns GRPO's advantage in the group plus that in the rollout's tree (Tree-GRPO, arXiv:2509.21240).

    The rollouts of a tree are those that share their first turn.
    """
    first = {turns.rollouts[turn.path]: turn.node for turn in reversed(turns.turns)}
    trees = defaultdict(list)
    for rollout, node in first.items():
        trees[node].append(rollout)
    values = _normalized(turns.rewards)
    for members in trees.values():
        tree_values = _normalized([turns.rewards[rollout] for rollout in members])
        for rollout, advantage in zip(members, tree_values, strict=True):
            values[rollout] += advantage
    return turns.per_path(values)


def tree_po(turns: Turns, weighted: bool = True) -> list[np.ndarray]:
    """Returns the mean of R_i - V(a) over the root and the shared turns a of rollout i (arXiv:2508.17445).

    TreePO then normalizes over the batch, as ``TreeLoss`` does with ``whiten``.

    Args:
        weighted: weigh each a by the number of rollouts through it.
    """
    n = len(turns.rewards)
    # For each rollout, (n_a, V(a)) by a; None is the root.
    above: list[dict[Hashable, tuple[int, float]]] = [{None: (n, turns.root)} for _ in range(n)]
    for turn in turns.turns:
        through = len(turns.node_rollouts[turn.node])
        if through > 1:
            above[turns.rollouts[turn.path]][turn.node] = through, turns.node_values[turn.node]

    def value(reward: float, nodes: Mapping[Hashable, tuple[int, float]]) -> float:
        weights, values = np.array(list(nodes.values())).T
        return float(np.average(reward - values, weights=weights if weighted else None))

    return turns.per_path([value(reward, above[i]) for i, reward in enumerate(turns.rewards)])


ONCE = frozenset({"spo"})  # estimators that are defined per turn of the tree, not per path
# Estimators that take branches for independent rollouts, which would bias the gradient.
WITHOUT_BRANCHES = frozenset({"group", "mean", "loo", "gigpo", "tree_rl", "tree_grpo", "tree_po"})


def rollout_rewards(name: str, trajectories: Sequence[Trajectory]) -> tuple[list[float], list[int]]:
    """Returns the rewards of a group's rollouts, for the estimator ``name``, and the rollout of each
    trajectory.

    Trajectories with the same rollout_id are one rollout. Every other trajectory is a rollout of its own.

    Raises:
        UserError: a trajectory without a finite reward, with another reward than its rollout, or with an
            advantage of its own.
    """
    rewards: list[float] = []
    owners: list[int] = []
    numbers: dict[str | int, int] = {}
    for place, _, record in trajectories:
        reward: Any = record.get("reward")
        is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
        if not is_number or not -MAX_REWARD <= reward <= MAX_REWARD:
            raise UserError(
                f"{place}: reward: expected a finite number, which data.advantage = {name!r} needs for every "
                f"trajectory, got {shorten(reward)}; add a reward or remove the trajectory"
            )
        if record.get("advantage") is not None:
            raise UserError(
                f"{place}: advantage: expected none, because data.advantage = {name!r} computes it from "
                "rewards; remove the field, or set data.advantage = 'given'"
            )
        rollout = record_name(record, "rollout_id")
        owner = numbers.setdefault(len(owners) if rollout is None else rollout, len(rewards))
        if owner == len(rewards):
            rewards.append(float(reward))
        elif reward != rewards[owner]:
            raise UserError(
                f"{place}: reward: expected {rewards[owner]:g}, as in the other trajectories of "
                f"rollout {rollout!r}, got {reward:g}; give all trajectories of a rollout its reward"
            )
        owners.append(owner)
    return rewards, owners


def _normalized(rewards: Sequence[float], std: bool = True) -> list[float]:
    """Returns rewards minus their mean, divided by their standard deviation + 1e-6 on request."""
    center = statistics.mean(rewards)  # exact: equal rewards give 0
    scale = (statistics.stdev(rewards) if len(rewards) > 1 else 0.0) + 1e-6 if std else 1.0
    return [(reward - center) / scale for reward in rewards]
