"""score_trees: log-probs, entropies and experts of the paths of trees, over all ranks.

``tree_logprobs`` scores lists of tokens with a model on one device. This is the same for trees of paths, each
at its own temperature, with the weights, dtype and parallelism of training.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist

from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.data.packing import first_fit
from titan_tree.distributed.collectives import own, world_size
from titan_tree.distributed.gradient_sync import cast_weights
from titan_tree.engine.lockstep import in_lockstep, positions
from titan_tree.engine.partitions import PartitionRunner
from titan_tree.engine.whole_path_loss import collect_scores
from titan_tree.models.tree_model import ModelOutput, TreeModel
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.partition import PartitionPlan, one_pass
from titan_tree.tree.token_tree import TokenTree


@dataclass(frozen=True)
class PathScores:
    """The scores of one path of T tokens. NaN: the loss mask is 0, or it is the first token."""

    logprobs: np.ndarray  # [T] float32, nats
    entropies: np.ndarray | None = None  # [T] float32, nats: of the distribution that predicts the token
    routed_experts: np.ndarray | None = None  # [T, L, k] int16, see ``TokenPath``


def score_trees(
    model: TreeModel,
    trees: Sequence[TokenTree],
    max_tokens: int,
    partitioner: TreePartitioner | None = None,
    *,
    entropies: bool = False,
    routed_experts: bool = False,
) -> list[list[PathScores]]:
    """Returns the scores of each tree's paths, in their order. Every rank makes the same call.

    Args:
        model: may be sharded over ranks.
        trees: this rank's own; may be empty. Ranks that share tokens pass the same trees.
        max_tokens: of one forward pass.
        partitioner: splits trees of more than ``max_tokens`` tokens. None runs each tree in one forward pass.
        entropies: also return the entropies.
        routed_experts: also return the experts. The model must have experts, and ranks must not share tokens.

    Raises:
        UserError: on all ranks, if paths that share a token that counts have different temperatures.
    """
    chosen = first_fit(list(map(len, trees)), max_tokens)
    plan = one_pass if partitioner is None else partitioner.plan
    plans = own(lambda: [plan(TokenTree.forest([trees[i] for i in of_pass])) for of_pass in chosen])
    batches = own(lambda: [TreeBatch.from_plan(plan, edges="loss") for plan in plans])
    schedule = [[model.share.of(batch) for batch in of_plan] for of_plan in batches]
    if world_size() > 1:
        assert dist.group.WORLD is not None
        schedule = in_lockstep(schedule, 0, dist.group.WORLD, model.share)
    device = next(model.parameters()).device
    found: list[list[PathScores]] = [[] for _ in trees]
    with torch.no_grad(), cast_weights(model):
        for number, partitions in enumerate(schedule):
            outputs = PartitionRunner(model, partitions, device, entropy=entropies).outputs()
            if number >= len(plans):  # dummy batches
                for _ in outputs:
                    pass
                continue
            experts = _Experts(plans[number], batches[number]) if routed_experts else None
            kept = outputs if experts is None else experts.keep(outputs)
            scores = iter(_path_scores(model, plans[number].tree, kept, experts))
            for tree in chosen[number]:
                found[tree] = [next(scores) for _ in trees[tree].paths]
    return found


class _Experts:
    """Collects the experts of each token of a plan from the outputs of its partitions."""

    def __init__(self, plan: PartitionPlan, batches: Sequence[TreeBatch]) -> None:
        order = list(range(len(batches)))
        if world_size() > 1:  # ranks in lockstep run partitions in this order
            order.sort(key=positions(batches).__getitem__)
        self._partitions = [plan.partitions[i] for i in order]
        self._num_tokens = len(plan.tree)
        self.of_tokens = np.empty((0, 0, 0), np.int16)  # [N, L, k]

    def keep(
        self, outputs: Iterable[tuple[TreeBatch, ModelOutput]]
    ) -> Iterator[tuple[TreeBatch, ModelOutput]]:
        partitions = iter(self._partitions)
        for batch, out in outputs:
            if not batch.is_dummy:
                # A token that several partitions run is recorded where its edges are scored.
                partition = next(partitions)
                used = torch.stack(out.routed_experts, dim=1).cpu().numpy()
                if not self.of_tokens.size:
                    self.of_tokens = np.full((self._num_tokens, *used.shape[1:]), -1, np.int16)
                self.of_tokens[partition.own[partition.scores]] = used[partition.scores]
            yield batch, out


def _path_scores(
    model: TreeModel,
    tree: TokenTree,
    outputs: Iterable[tuple[TreeBatch, ModelOutput]],
    experts: _Experts | None,
) -> Iterator[PathScores]:
    """Yields the scores of each path of a forest."""
    whole = TreeBatch.from_trees([tree], edges="loss")
    device = next(model.parameters()).device
    scores = collect_scores(outputs, whole.to(device), model.sequence_group)
    of_tokens = {}
    for name, values in scores.items():
        of_tokens[name] = np.full(len(tree), np.nan, np.float32)
        of_tokens[name][whole.edge_token.numpy()] = values.float().cpu().numpy()
    for number, path in enumerate(tree.paths):
        tokens = tree.indices_of(number)
        of_path = {
            name: np.where(path.loss_mask > 0, values[tokens], np.float32("nan"))
            for name, values in of_tokens.items()
        }
        yield PathScores(
            of_path["logprobs"],
            of_path.get("entropy"),
            None if experts is None else experts.of_tokens[tokens],
        )
