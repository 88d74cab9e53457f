"""Small payloads of the X-ray page, from paths."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from titan_tree.data.turns import runs
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

KINDS = ["system", "tools", "user", "assistant", "thought", "tool", "other"]
REASONS = ["other text", "path ends here"]


def tree_payload(
    name: str,
    paths: Sequence[TokenPath],
    rewards: Sequence[float | None],
    rollouts: Sequence[int] | None = None,
    kind: np.ndarray | None = None,
    text: Callable[[list[int]], str] = lambda tokens: " ".join(map(str, tokens)),
) -> dict[str, Any]:
    """Returns an entry of ``trees``.

    Args:
        name: its id.
        paths: the paths of one group.
        rewards: the reward of each rollout.
        rollouts: the rollout of each path. Default: each path is a rollout.
        kind: index into KINDS of each token of the tree. Default: other if not trained, else assistant.
        text: token ids -> text.
    """
    tree = TokenTree.from_paths(paths)
    trained = np.zeros(len(tree), bool)
    for p, path in enumerate(paths):
        for start, end in runs(path.loss_mask):
            trained[tree.indices_of(p)[start:end]] = True
    kind = np.where(trained, 3, 6) if kind is None else kind
    starts = np.zeros(len(tree), bool)
    starts[tree.node_offsets[:-1]] = True
    starts[1:] |= (trained[1:] != trained[:-1]) | (kind[1:] != kind[:-1])
    first = np.flatnonzero(starts)
    segment = np.cumsum(starts) - 1
    before = tree.predecessor[first]
    parent = np.where(before < 0, -1, segment[before])
    ends = [*first[1:], len(tree)]
    seen: set[int] = set()
    reason = []
    for p in parent.tolist():
        reason.append(0 if p in seen else -1)
        seen.add(p)
    stats = tree.stats
    owners = range(len(paths)) if rollouts is None else rollouts
    return {
        "id": name,
        "n_flat": stats.n_flat,
        "n_leaf": stats.n_leaf,
        "n_tree": stats.n_tree,
        "n_calls": stats.n_flat,
        "parent": parent.tolist(),
        "tokens": [int(end - start) for start, end in zip(first, ends, strict=True)],
        "paths": np.repeat(tree.node_paths, np.diff(tree.node_offsets))[first].tolist(),
        "trained": trained[first].astype(int).tolist(),
        "kind": kind[first].tolist(),
        "text": [text(tree.tokens[a : min(a + 60, b)].tolist()) for a, b in zip(first, ends, strict=True)],
        "reason": reason,
        "samples": [
            {
                "id": path.id or f"sample {p}",
                "segment": int(segment[tree.indices_of(p)[-1]]),
                "reward": rewards[owner],
                "advantage": None,
                "weight": path.weight,
                "rollout": owner,
                "turns": runs(path.loss_mask),
            }
            for p, (path, owner) in enumerate(zip(paths, owners, strict=True))
        ],
    }


def payload(trees: Sequence[dict[str, Any]], name: str = "random") -> dict[str, Any]:
    """Returns a payload of ``trees``."""

    def total(key: str) -> int:
        return sum(tree[key] for tree in trees)

    repeats = [0] * len(KINDS)
    for tree in trees:
        for kind, tokens, paths in zip(tree["kind"], tree["tokens"], tree["paths"], strict=True):
            repeats[kind] += tokens * (paths - 1)
    points = sum(reason == 0 for tree in trees for reason in tree["reason"])
    return {
        "version": 1,
        "name": name,
        "tokenizer": "bytes",
        "sentences": [
            f"A tree computes {total('n_flat') / total('n_tree'):.1f} times fewer tokens.",
            "Tool results repeat most.",
            "Branches part because their texts differ.",
        ],
        "totals": {
            "groups": len(trees),
            "samples": sum(len(tree["samples"]) for tree in trees),
            "calls": sum(len(tree["samples"]) for tree in trees),
            **{key: total(key) for key in ("n_calls", "n_flat", "n_leaf", "n_tree")},
        },
        "kinds": KINDS,
        "repeats": repeats,
        "reasons": [[REASONS[0], points, total("n_tree") // 2]],
        "trees": list(trees),
        "skipped": {},
    }
