"""Branches: further rollouts that continue those of a task."""

from __future__ import annotations

import random
from collections.abc import Sequence

from titan_tree.rl.rollouts import Rollout


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
