"""StepPreparer: partitions and packs the trees of an optimizer step on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np

from titan_tree.components.tree_loss import Reduction, normalizer
from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.engine.step_io import NO_COUNTS, StepCounts, StepInput
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.costs import ModelCosts, batch_sizes
from titan_tree.tree.partition import one_pass
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_shards import WHOLE, TokenShard
from titan_tree.tree.token_tree import TokenTree


@dataclass(frozen=True)
class StepPreparer:
    """Makes the ``StepInput`` of a step from its trees: a function that worker processes can run.

    It can be pickled, never communicates with other ranks, and never touches a GPU.

    Args:
        reduction: of the loss; it decides the normalizer.
        needs_whole_paths: whether a token's loss depends on other tokens of its path.
        costs: the model's operations and bytes.
        partitioner: splits micro-batches into partitions. None runs each micro-batch in one forward pass.
        share: which tokens of each forward pass this rank computes. Ranks that share them get the same trees.
    """

    reduction: Reduction
    needs_whole_paths: bool
    costs: ModelCosts
    partitioner: TreePartitioner | None = None
    share: TokenShard = WHOLE

    def __call__(self, micro_batches: Sequence[Sequence[TokenTree]]) -> StepInput:
        """Returns the input of a step from the trees of each micro-batch."""
        plan = one_pass if self.partitioner is None else partial(self.partitioner.plan, costs=self.costs)
        plans = [plan(TokenTree.forest(trees)) for trees in micro_batches]
        batches = [TreeBatch.from_plan(plan, edges="loss") for plan in plans]
        paths = [path for plan in plans for path in plan.tree.paths]
        all_batches = [batch for partitions in batches for batch in partitions]
        recorded = [plan.tree.routed_experts for plan in plans if plan.tree.routed_experts is not None]
        trees = [tree for trees in micro_batches for tree in trees]
        tree_ids = tuple(tree.paths[0].id or "?" for tree in trees if tree.is_counted)
        distinct_tokens = sum(tree.counted_tokens for tree in trees)
        counts = StepCounts(
            normalizer=normalizer(self.reduction, paths),
            loss_weight=float(sum(path.weight * path.loss_tokens for path in paths)),
            advantage=sum(_weighted_sum(path, 1) for path in paths),
            advantage_square=sum(_weighted_sum(path, 2) for path in paths),
            num_trees=len(tree_ids),
            num_paths=len(paths),
            logical_tokens=sum(batch.n_logical for batch in all_batches),
            distinct_tokens=distinct_tokens,
            executed_tokens=sum(map(len, all_batches)),
            split_tokens=sum(len(plan.tree) for plan in plans) - distinct_tokens,
            scored_edges=sum(len(batch.edge_label) for batch in all_batches),
            forwards=len(all_batches),
            gateway_bytes=sum(map(self.costs.gateway_bytes, all_batches)),
            flops=sum(map(self.costs.training_flops, all_batches)),
            replayed_token_layers=sum(records.num_token_layers for records in recorded),
            disagreeing_token_layers=sum(records.num_disagreeing for records in recorded),
        )
        unpartitioned = [
            TreeBatch.from_trees([plan.tree], edges="loss")
            if self.needs_whole_paths and (len(plan) > 1 or self.share.num_ranks > 1)
            else None
            for plan in plans
        ]
        chain_peak = max((int(plan.chain_tokens.max()) for plan in plans), default=0)
        versions = [path.policy_version.max() for path in paths if path.policy_version is not None]
        path_ids = tuple(tuple(path.id or "?" for path in plan.tree.paths) for plan in plans)
        newest = int(max(versions, default=-1))
        sizes = tuple(
            (*map(sum, zip(*map(batch_sizes, partitions), strict=True)), len(partitions))
            for partitions in batches
        )
        own = [[self.share.of(batch) for batch in partitions] for partitions in batches]
        chain_peak = -(-chain_peak // self.share.num_ranks)
        if self.share.rank:  # the first of the ranks that share these trees counts them
            counts = dataclasses.replace(NO_COUNTS, gateway_bytes=counts.gateway_bytes)
        return StepInput(own, unpartitioned, counts, chain_peak, newest, path_ids, tree_ids, sizes)


def _weighted_sum(path: TokenPath, power: int) -> float:
    """Returns the sum of a power of the advantages, weighted as in the loss."""
    if path.advantage is None:
        return 0.0
    return path.weight * float(path.loss_mask[1:] @ path.advantage[1:].astype(np.float64) ** power)
