"""The advantages of a tree's answers under titan_tree's estimators, each with its default options."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from titan_tree.data import advantages
from titan_tree.data.advantages import MAX_REWARD, ONCE
from titan_tree.data.settings import ADVANTAGES
from titan_tree.data.turns import Turns
from titan_tree.tree.paths import TokenPath
from titan_tree.xray.segments import Segments


def estimators() -> dict[str, str]:
    """Returns what each estimator computes, by name."""
    first_lines = {name: (inspect.getdoc(ADVANTAGES[name]) or "").partition("\n")[0] for name in _own()}
    return {name: line.removeprefix("Returns ").rstrip(".") for name, line in first_lines.items()}


def _own() -> list[str]:
    """Returns the names of titan_tree's estimators, without those that plugins have registered."""
    return [name for name in ADVANTAGES if ADVANTAGES[name] is getattr(advantages, name, None)]


def answer_advantages(segments: Segments, samples: Sequence[Mapping[str, Any]]) -> dict[str, list[float]]:
    """Returns the advantage of each answer by estimator, in the order of the samples and their answers.

    Args:
        segments: the segments of a tree.
        samples: the entries of the payload. Without a reward of every sample, the result is empty.
    """
    rewards: dict[int, float] = {}
    for sample in samples:
        if sample["reward"] is None or not -MAX_REWARD <= sample["reward"] <= MAX_REWARD:
            return {}
        rewards[sample["rollout"]] = float(sample["reward"])
    parents = segments.parent.tolist()
    paths = [_path_of_segments(parents, sample) for sample in samples]
    rollouts = [sample["rollout"] for sample in samples]
    turns = Turns(paths, [rewards[rollout] for rollout in range(len(rewards))], rollouts)
    counts = turns.counts()
    result = {}
    for name in _own():
        values = ADVANTAGES[name](turns)
        if name in ONCE:
            values = [value / count for value, count in zip(values, counts, strict=True)]
        result[name] = [float(values[turn.path][turn.start]) for turn in turns.turns]
    return result


def _path_of_segments(parents: Sequence[int], sample: Mapping[str, Any]) -> TokenPath:
    """Returns the path of a sample with one token per segment, after one token that all paths share.

    Its turns have the states and the nodes of the sample's answers, and it is much shorter.
    """
    path = [sample["segment"]]
    while path[-1] >= 0:
        path.append(parents[path[-1]])
    path.reverse()  # -1 comes first
    place = {segment: number for number, segment in enumerate(path)}
    mask = [0] * len(path)
    for first, last in sample["turns"]:
        mask[place[first] : place[last] + 1] = [1] * (place[last] + 1 - place[first])
    return TokenPath([segment + 1 for segment in path], loss_mask=mask)
