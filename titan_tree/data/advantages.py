"""Group advantages (GRPO, arXiv:2402.03300): how much better a sample's reward is than its group's mean."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from titan_tree.data.groups import Sample
from titan_tree.errors import UserError, shorten

MAX_REWARD = 1e30  # advantages are float32


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """Returns (reward - mean) / (std + 1e-6) for each reward of a group; std divides by n - 1.

    Advantages are zero if all rewards are equal, because such a group does not say which sample is better.
    """
    mean = statistics.mean(rewards)
    std = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


def with_group_advantages(samples: Sequence[Sample]) -> list[Sample]:
    """Returns the samples of one group, each with the advantage that its ``reward`` gives it.

    A record or a trajectory counts once, however many paths its turns become: all of them get its advantage.

    Raises:
        UserError: a sample without a finite reward, or with an advantage of its own.
    """
    for place, _, record in samples:
        reward: Any = record.get("reward")
        is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
        if not is_number or not -MAX_REWARD <= reward <= MAX_REWARD:
            raise UserError(
                f"{place}: reward: expected a finite number, which data.advantage = 'group' needs for every "
                f"sample, got {shorten(reward)}; add a reward or remove the sample"
            )
        if record.get("advantage") is not None:
            raise UserError(
                f"{place}: advantage: expected none, because data.advantage = 'group' computes it from "
                "rewards; remove the field, or set data.advantage = 'given'"
            )
    advantages = group_advantages([float(sample.record["reward"]) for sample in samples])
    return [
        sample._replace(record=sample.record | {"advantage": advantage})
        for sample, advantage in zip(samples, advantages, strict=True)
    ]
