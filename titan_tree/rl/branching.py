"""Branches of rollouts, and advantages of all rollouts of a task."""

from __future__ import annotations

import random
import statistics
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from titan_tree.data.advantages import advantages
from titan_tree.rl.rollouts import Rollout
from titan_tree.tree.paths import TokenPath

Context = tuple[int, ...]  # the tokens before a turn


def branches(rollouts: Sequence[Rollout], number: int, draw: random.Random) -> list[Rollout]:
    """Returns ``number`` unfinished rollouts, each a fork of a random one at a random later turn.

    They are fewer only if no rollout has a second turn. The choice does not look at rewards, which would bias
    the values of contexts.
    """
    longer = [rollout for rollout in rollouts if len(rollout.starts) > 1]
    if not longer:
        return []
    chosen = draw.choices(longer, k=number)
    return [rollout.fork(draw.randrange(1, len(rollout.starts))) for rollout in chosen]


def group_token_advantages(rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """Returns [T] for each rollout: its advantage in the group, as ``data.advantage = "group"`` does."""
    paths = [TokenPath(rollout.tokens, rollout.mask) for rollout in rollouts]
    return advantages("group", paths, [_reward(rollout) for rollout in rollouts])


def turn_advantages(rollouts: Sequence[Rollout]) -> list[np.ndarray]:
    """Returns [T] for each rollout: the advantage of each turn, V(after the turn) - V(before it).

    V of a context is the mean of V after the turns that were sampled in it, or the reward at the end of a
    rollout. This is the estimate of VinePPO (arXiv:2410.01679) and SPO-tree (arXiv:2505.23564), with the
    rollouts of the tree in place of extra ones. A loss counts a shared token once per path, but a turn that
    forks inherited was sampled only once. If k of the n paths through a turn sampled it, each gets k/n of its
    advantage.
    """
    contexts = [
        [*(tuple(rollout.tokens[:start]) for start in rollout.starts), tuple(rollout.tokens)]
        for rollout in rollouts
    ]
    num_paths = Counter(after for own in contexts for after in own[1:])
    sampled: dict[Context, list[Context]] = {}  # context -> what each turn that was sampled in it led to
    value: dict[Context, float] = {}
    for rollout, own in zip(rollouts, contexts, strict=True):
        value[own[-1]] = _reward(rollout)  # equal rollouts have equal rewards
        for before, after in list(pairwise(own))[rollout.inherited :]:
            sampled.setdefault(before, []).append(after)
    for context in sorted(sampled, key=len, reverse=True):  # later contexts come first
        value[context] = statistics.fmean(value[after] for after in sampled[context])
    result = []
    for rollout, own in zip(rollouts, contexts, strict=True):
        advantage = np.zeros(len(rollout.tokens), np.float32)
        for before, after in pairwise(own):
            share = sampled[before].count(after) / num_paths[after]
            advantage[len(before) : len(after)] = share * (value[after] - value[before])
        result.append(advantage)
    return result


ADVANTAGES = {"group": group_token_advantages, "turn": turn_advantages}


def _reward(rollout: Rollout) -> float:
    assert rollout.reward is not None
    return rollout.reward
