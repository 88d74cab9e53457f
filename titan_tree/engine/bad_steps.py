"""Bad steps: steps that cannot change the weights, and the paths that caused them.

A step is bad if its loss or its gradient is not finite, or if the loss counts no token of the global batch.
The optimizer then leaves weights and states unchanged. All ranks know the reduced values, so they agree.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from titan_tree.components.tree_loss.loss import GlobalStatistics, TreeLoss
from titan_tree.distributed.collectives import world_size
from titan_tree.distributed.gradient_sync import cast_weights
from titan_tree.engine.forward import scored_batches
from titan_tree.engine.step_io import StepInput
from titan_tree.errors import AgreedError
from titan_tree.models.tree_model import TreeModel

NAMED_PATHS = 5  # largest number of paths that a message names


class BadStepError(AgreedError):
    """A step that cannot change the weights. The message says why."""


def find_cause(
    model: TreeModel,
    loss: TreeLoss,
    step: StepInput,
    device: torch.device,
    statistics: GlobalStatistics | None = None,
) -> str:
    """Returns a text that names the paths that may have caused a bad step. Collective.

    It scores the trees of all ranks without gradients, and names the paths whose loss, or whose derivative
    with respect to a log-prob, is not finite. If there are none, the model's backward pass or the router loss
    caused the bad step. The text then names the first paths of the step's trees.

    Args:
        statistics: statistics of the global batch. None: each batch has its own.
    """
    bad_paths = _bad_paths(model, loss, step, device, statistics)
    if model.execution.sequence_group is not None:
        shares = [bad_paths] * model.token_shard.num_ranks
        dist.all_gather_object(shares, bad_paths, group=model.execution.sequence_group)
        bad_paths = set().union(*shares)
    causes = [step.path_ids[i][number] for i, number in sorted(bad_paths)]
    trees = list(step.tree_ids)
    if model.token_shard.rank:  # another rank names the same ones
        causes, trees = [], []
    of_this_rank = (len(causes), causes[:NAMED_PATHS], len(trees), trees[:NAMED_PATHS])
    by_rank = [of_this_rank]
    if world_size() > 1:
        by_rank = [of_this_rank] * world_size()
        dist.all_gather_object(by_rank, of_this_rank)
    num_causes, named_causes, num_trees, named_trees = zip(*by_rank, strict=True)
    if sum(num_causes):
        listed = _listed(named_causes, sum(num_causes))
        return f"paths with a loss or a derivative that is not finite: {listed}"
    listed = _listed(named_trees, sum(num_trees))
    return f"the loss of every single path is finite; the first paths of the step's trees: {listed}"


def _bad_paths(
    model: TreeModel,
    loss: TreeLoss,
    step: StepInput,
    device: torch.device,
    statistics: GlobalStatistics | None,
) -> set[tuple[int, int]]:
    """Returns (micro-batch, number of the path) of each path of this rank with a value that is not finite."""
    bad_paths: set[tuple[int, int]] = set()
    with torch.no_grad(), cast_weights(model):
        for i, batch, scores in scored_batches(model, step, device, entropy=loss.needs_entropy):
            if len(batch.edge_label):
                pairs = batch.pairs
                batch = batch.with_target_logprobs(scores.target_logprobs)
                is_bad = loss.not_finite(scores.logprobs, batch, scores.entropy, statistics)
                numbers = pairs.path_number[pairs.path[is_bad].unique()].tolist()
                bad_paths |= {(i, number) for number in numbers}
    return bad_paths


def _listed(names_by_rank: Sequence[Sequence[str]], count: int) -> str:
    """Returns a text with the first names, and how many of ``count`` it omits."""
    names = [name for names in names_by_rank for name in names][:NAMED_PATHS]
    omitted = count - len(names)
    return ", ".join(names) + (f" and {omitted} more" if omitted else "")
