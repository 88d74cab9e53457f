"""The inputs of TreeStep.warm_up: tiny trees that need every graph of a compiled model."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.engine.preparation import StepPreparer
from titan_tree.engine.records import StepInput
from titan_tree.tree.paths import PER_TOKEN, ExpertSizes, TokenPath
from titan_tree.tree.replay import Replay
from titan_tree.tree.token_tree import TokenTree


def warm_up_inputs(preparer: StepPreparer, experts: ExpertSizes | None = None) -> list[StepInput]:
    """Returns the inputs of steps on two tiny trees: in one pass and, with a partitioner, in partitions.

    Args:
        experts: the sizes of recorded experts; None: the trees have none.
    """
    trunk, left, right = [0] * 20, [1] * 23, [2] * 29
    large = (
        trunk + left + [3] * 8,
        trunk + left + [4] * 27,
        trunk + right + [3] * 9,
        trunk + right + [4] * 25,
    )
    # The small tree is a partition that exports nothing. The first partition of the large one exports all.
    small = ([5] * 7,)
    replay: Replay = "off" if experts is None else "first"
    trees = [
        TokenTree.from_paths([_warm_up_path(tokens, experts) for tokens in paths], replay)
        for paths in (small, large)
    ]
    partitioners = [None] if preparer.partitioner is None else [None, TreePartitioner("redundancy_free", 32)]
    return [replace(preparer, partitioner=each)([trees]) for each in partitioners]


def _warm_up_path(tokens: list[int], experts: ExpertSizes | None) -> TokenPath:
    """Returns a path with every field that a loss may read."""
    fields: dict[str, Any] = {name: np.zeros(len(tokens)) for name in PER_TOKEN}
    fields["policy_version"] = 0
    if experts is not None:
        shape = (len(tokens), experts.num_layers, experts.top_k)
        fields["routed_experts"] = np.broadcast_to(np.arange(experts.top_k), shape)
    return TokenPath(tokens, **fields)
