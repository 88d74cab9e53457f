"""Advantages of rollouts of which some were forked from others, against recursive implementations."""

import itertools
import random
from statistics import fmean

import numpy as np
import pytest

from tests.support.cases import for_each
from titan_tree.data.advantages import advantages
from titan_tree.data.settings import ADVANTAGES
from titan_tree.errors import UserError
from titan_tree.rl.environment import DeskEpisode
from titan_tree.rl.rollouts import Rollout, token_paths
from titan_tree.tree.paths import TokenPath


def prompted(inherited: int = 0) -> Rollout:
    """Returns a rollout that has only the prompt [9]."""
    rollout = Rollout(episode=DeskEpisode(random.Random(0)), inherited=inherited)
    rollout.read([9])
    return rollout


def rollout(turns: list[list[int]], reward: float, inherited: int = 0) -> Rollout:
    """Returns a rollout with the prompt [9] and the observation [8] between its turns."""
    made = prompted(inherited)
    for i, turn in enumerate(turns):
        made.read([8] if i else [])
        made.write(turn, [-1.0] * len(turn))
    made.end(reward)
    return made


def of_tokens(rollouts: list[Rollout], name: str, **options: float) -> list[np.ndarray]:
    return [path.advantage for path in token_paths(rollouts, "task", name, options)]


def test_group_advantages_cover_all_tokens() -> None:
    first, second = of_tokens([rollout([[1], [2, 3]], 1.0), rollout([[4]], 0.0)], "group")
    expected = 0.5 / (np.std([0, 1], ddof=1) + 1e-6)
    assert first == pytest.approx([expected] * 5)
    assert second == pytest.approx([-expected] * 2)


def test_forked_rollouts_by_hand() -> None:
    """Two independent rollouts a and b; b has two forks at its second turn.

    prompt -> a [1] -> a ends: 1.0
           -> b [2] -> b [3]: 0.0, fork [3]: 0.0 (the same tokens), fork [4]: 0.9

    V(after b's first turn) = (0 + 0 + 0.9) / 3 = 0.3, and V(prompt) = (1 + 0.3) / 2 = 0.65.
    """
    rollouts = [
        rollout([[1]], 1.0),
        rollout([[2], [3]], 0.0),
        rollout([[2], [3]], 0.0, inherited=1),
        rollout([[2], [4]], 0.9, inherited=1),
    ]
    a, b, same, other = of_tokens(rollouts, "spo")
    assert a == pytest.approx([0, 0.35])
    # Three paths share b's first turn, which was sampled once: -0.35 / 3 on each. Token 2 is an observation.
    # Two paths share the turn [3], and both have sampled it: -0.3 on each.
    assert b == pytest.approx([0, -0.35 / 3, 0, -0.3], abs=1e-6)
    assert same == pytest.approx(b)
    assert other == pytest.approx([0, -0.35 / 3, 0, 0.6], abs=1e-6)
    # [(V(u) - V(root)) + (V(u) - V(par u))] / sqrt(n_u)
    a, b, _, other = of_tokens(rollouts, "tree_rl")
    assert a == pytest.approx([0, 0.7])
    assert b == pytest.approx([0, -0.7 / 3**0.5, 0, (-0.65 - 0.3) / 2**0.5], abs=1e-6)
    assert other == pytest.approx([0, -0.7 / 3**0.5, 0, 0.25 + 0.6], abs=1e-6)


Context = tuple[int, ...]


def sampled_turn_values(rollouts: list[Rollout]) -> list[list[float]]:
    """Returns for each turn of each rollout k/n (V(after) - V(before)), from the leaves up.

    V of a context is the mean of V after the turns that were sampled in it, or the reward at the end.
    """
    contexts = [[*(tuple(r.tokens[:start]) for start in r.starts), tuple(r.tokens)] for r in rollouts]
    sampled: dict[Context, list[Context]] = {}
    value: dict[Context, float] = {}
    for made, own in zip(rollouts, contexts, strict=True):
        value[own[-1]] = made.reward
        for before, after in list(itertools.pairwise(own))[made.inherited :]:
            sampled.setdefault(before, []).append(after)
    for context in sorted(sampled, key=len, reverse=True):
        value[context] = fmean(value[after] for after in sampled[context])
    through = [after for own in contexts for after in own[1:]]
    return [
        [
            sampled[before].count(after) / through.count(after) * (value[after] - value[before])
            for before, after in itertools.pairwise(own)
        ]
        for own in contexts
    ]


def finish(made: Rollout, draw: random.Random) -> Rollout:
    """Samples the remaining turns. The tokens decide where the rollout ends, and its reward."""
    while True:
        turn = [draw.randrange(2)] * draw.randint(1, 2)
        made.write(turn, [-1.0] * len(turn))
        episode = random.Random(str(made.tokens))
        if len(made.starts) == 4 or episode.random() < 0.2:
            made.end(episode.random())
            return made
        made.read([8])


def random_rollouts(draw: random.Random) -> list[Rollout]:
    """Returns independent rollouts and forks, also forks of forks."""
    made = [finish(prompted(), draw) for _ in range(4)]
    for _ in range(5):
        if longer := [each for each in made if len(each.starts) > 1]:
            source = draw.choice(longer)
            made.append(finish(source.fork(draw.randrange(1, len(source.starts))), draw))
    return made


def test_random_forks_against_values_from_the_leaves_up() -> None:
    num_forks = 0
    for seed in range(60):
        rollouts = random_rollouts(random.Random(seed))
        num_forks += sum(made.inherited > 0 for made in rollouts)
        for made, got, want in zip(
            rollouts, of_tokens(rollouts, "spo"), sampled_turn_values(rollouts), strict=True
        ):
            assert [got[start] for start in made.starts] == pytest.approx(want, abs=1e-6)
    assert num_forks > 200


@for_each("name", ADVANTAGES)
@for_each("once", [False, True])
def test_without_forks_values_are_those_of_files(name: str, once: bool) -> None:
    """Only ``once`` differs: rollouts that are known to be independent have sampled each of their turns."""
    for seed in range(20):
        rollouts = [made for made in random_rollouts(random.Random(seed)) if not made.inherited]
        paths = [TokenPath(made.tokens, made.mask) for made in rollouts]
        plain = advantages(name, paths, [made.reward for made in rollouts], once=False)
        for got, want in zip(of_tokens(rollouts, name, once=once), plain, strict=True):
            assert got == pytest.approx(want, abs=1e-6)


def test_a_turn_that_nobody_sampled_is_refused() -> None:
    with pytest.raises(UserError, match="inherited: expected every turn to be sampled by a rollout"):
        of_tokens([rollout([[1], [2]], 1.0, inherited=1)], "spo")
