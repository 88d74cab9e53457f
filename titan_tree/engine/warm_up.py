"""The inputs of TreeStep.warm_up: two trees that need every graph of a compiled model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.step_io import StepInput
from titan_tree.tree.paths import PER_TOKEN, ExpertSizes, TokenPath
from titan_tree.tree.routed_experts import Replay
from titan_tree.tree.token_tree import TokenTree

# Lengths of the nodes of the two trees, in units. The small tree is a partition that exports nothing. The
# first partition of the large one exports all of its rows.
SMALL = (7,)
TRUNK, LEFT, RIGHT = 20, (23, 8, 27), (29, 9, 25)  # a trunk with two branches, each of which has two leaves
MAX_LENGTH = 32  # maximum length of a partition
LENGTH = sum(SMALL) + TRUNK + sum(LEFT) + sum(RIGHT)


def warm_up_inputs(
    prepare: Callable[..., StepInput],
    num_tokens: int,
    vocab_size: int,
    is_partitioned: bool,
    experts: ExpertSizes | None = None,
) -> list[StepInput]:
    """Returns the inputs of steps on two random trees: in one pass and, on request, in partitions.

    Args:
        prepare: ``prepare_step`` with its options. The partitioner is replaced.
        num_tokens: approximate number of tokens of both trees. They have LENGTH tokens at least.
        vocab_size: token ids are smaller.
        is_partitioned: whether steps may contain partitions.
        experts: the sizes of recorded experts; None: the trees have none.
    """
    unit = max(1, num_tokens // LENGTH)  # tokens per unit
    rng = np.random.default_rng(0)

    def node(length: int) -> list[int]:
        # Random tokens, because experts would not be balanced if all tokens were alike.
        tokens: list[int] = rng.integers(vocab_size, size=length * unit).tolist()
        return tokens

    trunk = node(TRUNK)
    branches = [(trunk + node(branch), leaves) for branch, *leaves in (LEFT, RIGHT)]
    large = [branch + node(leaf) for branch, leaves in branches for leaf in leaves]
    replay: Replay = "off" if experts is None else "first"
    trees = [
        TokenTree.from_paths(_warm_up_paths(token_lists, experts), replay)
        for token_lists in (2 * [node(*SMALL)], large)
    ]
    partitioners: list[TreePartitioner | None] = [None]
    if is_partitioned:
        partitioners.append(TreePartitioner("redundancy_free", MAX_LENGTH * unit))
    return [partial(prepare, partitioner=partitioner)([trees]) for partitioner in partitioners]


def _warm_up_paths(token_lists: Sequence[list[int]], experts: ExpertSizes | None) -> list[TokenPath]:
    """Returns a path for each of an even number of lists: preference pairs, and then a mismatched path."""
    preferences = ["chosen", "rejected"] * (len(token_lists) // 2)
    paired = zip(token_lists, preferences, strict=True)
    paths = [_warm_up_path(tokens, preference, experts) for tokens, preference in paired]
    return [*paths, _warm_up_path(token_lists[-1], "mismatched", experts)]


def _warm_up_path(tokens: list[int], preference: str, experts: ExpertSizes | None) -> TokenPath:
    """Returns a path with every field that a loss may read."""
    fields: dict[str, Any] = {name: np.zeros(len(tokens)) for name in PER_TOKEN}
    fields |= {"policy_version": 0, "preference": preference, "teacher_topk": [{id: -1.0} for id in tokens]}
    if experts is not None:
        first = np.array(tokens)[:, None, None] + np.arange(experts.num_layers)[:, None]
        fields["routed_experts"] = (first + np.arange(experts.top_k)) % experts.num_experts
    return TokenPath(tokens, **fields)
