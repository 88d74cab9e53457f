"""Small payloads of the X-ray page, from paths."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import numpy as np

from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree
from titan_tree.xray.credit import answer_advantages, estimators
from titan_tree.xray.rendering import KINDS
from titan_tree.xray.secrets import Secrets
from titan_tree.xray.segments import find_segments, texts

Group = tuple[list[TokenPath], list[float], list[int]]  # paths, rewards, the rollout of each path
ASSISTANT, OTHER = KINDS.index("assistant"), KINDS.index("other")


def random_group(seed: int) -> Group:
    """Returns paths that branch within and between turns, rewards per rollout, and each path's rollout."""
    rng = random.Random(seed)
    paths: list[TokenPath] = []
    owners: list[int] = []
    rewards: list[float] = []
    for rollout in range(rng.randint(1, 9)):
        tokens, mask = [1, 2], [0, 0]
        per_turn = rng.random() < 0.4
        for _ in range(rng.randint(0, 4)):
            answer = [rng.randint(3, 4) for _ in range(rng.randint(1, 3))]
            tokens, mask = tokens + answer, mask + [1] * len(answer)
            if per_turn:
                paths.append(TokenPath(tokens, loss_mask=mask, weight=rng.choice([1.0, 0.5])))
                owners.append(rollout)
                mask = [0] * len(mask)
                if rng.random() < 0.3:  # the rest of the rollout continues without this answer
                    tokens, mask = tokens[: -len(answer)], mask[: -len(answer)]
            reply = [rng.randint(7, 8) for _ in range(rng.randint(0, 2))]
            tokens, mask = tokens + reply, mask + [0] * len(reply)
        if not owners or owners[-1] != rollout:
            paths.append(TokenPath(tokens, loss_mask=mask))
            owners.append(rollout)
        rewards.append(rng.choice([0.0, 1.0, rng.uniform(-2, 2)]))
    return paths, rewards, owners


TWO_ANSWERS = [TokenPath([1, 2, answer], loss_mask=[0, 0, 1]) for answer in (3, 4, 3, 4, 3)]
GROUPS = [random_group(seed) for seed in range(40)]
GROUPS.append((TWO_ANSWERS, [1.0, 0.0, 0.8], [0, 0, 1, 1, 2]))  # two rollouts share two turns from one state


def tree_payload(
    name: str,
    paths: Sequence[TokenPath],
    rewards: Sequence[float | None],
    rollouts: Sequence[int] | None = None,
) -> dict[str, Any]:
    """Returns an entry of ``trees``. Tokens that a path trains are of an assistant, others are not.

    Args:
        name: its id.
        paths: the paths of one group.
        rewards: the reward of each rollout.
        rollouts: the rollout of each path. Default: each path is a rollout.
    """
    tree = TokenTree.from_paths(paths)
    kinds = np.full(len(tree), OTHER, np.int8)
    for p, path in enumerate(paths):
        kinds[tree.indices_of(p)[1:][path.loss_mask[1:] > 0]] = ASSISTANT
    segments = find_segments(tree, kinds)
    parents = segments.parent.tolist()
    owners = range(len(paths)) if rollouts is None else rollouts
    samples = [
        {
            "id": path.id or f"sample {p}",
            "segment": int(segments.last[p]),
            "turns": segments.turns[p],
            "rollout": owner,
            "reward": rewards[owner],
            "advantage": None,
            "weight": path.weight,
        }
        for p, (path, owner) in enumerate(zip(paths, owners, strict=True))
    ]
    return {
        "id": name,
        "n_flat": tree.stats.n_flat,
        "n_leaf": tree.stats.n_leaf,
        "n_tree": tree.stats.n_tree,
        "n_calls": segments.n_calls,
        "parent": parents,
        "tokens": segments.tokens.tolist(),
        "paths": segments.paths.tolist(),
        "calls": segments.calls.tolist(),
        "trained": segments.trained.astype(int).tolist(),
        "kind": segments.kind.tolist(),
        "text": texts(tree, segments, lambda tokens: " ".join(map(str, tokens)), Secrets(False)),
        "reason": [0 if parent in parents[:i] else -1 for i, parent in enumerate(parents)],
        "samples": samples,
        "advantages": answer_advantages(segments, samples),
        "partitions": {},
    }


def payload(trees: Sequence[dict[str, Any]], name: str = "random") -> dict[str, Any]:
    """Returns a payload of ``trees``."""
    sums = {key: sum(tree[key] for tree in trees) for key in ("n_calls", "n_flat", "n_leaf", "n_tree")}
    samples = [sample for tree in trees for sample in tree["samples"]]
    points = sum(reason == 0 for tree in trees for reason in tree["reason"])
    return {
        "version": 1,
        "name": name,
        "tokenizer": "tokens",
        "sentences": ["Trees compute less.", "System prompts repeat.", "Texts differ."],
        "notes": ["Tokens are numbers here."],
        "totals": {"groups": len(trees), "samples": len(samples), "calls": len(samples), **sums},
        "kinds": list(KINDS),
        "repeats": [100 * i for i in range(len(KINDS))],
        "reasons": [["other text", points, 100]],
        "skipped": {},
        "estimators": estimators(),
        "trees": list(trees),
    }
