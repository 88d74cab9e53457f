"""evaluate and score: forward passes without gradients."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from titan_tree.distributed.collectives import all_reduce_sum, world_size
from titan_tree.distributed.gradient_sync import cast_weights
from titan_tree.engine.partitions import PartitionRunner
from titan_tree.engine.schedule import in_lockstep
from titan_tree.engine.step_io import StepInput, all_reduce_counts
from titan_tree.engine.whole_path_loss import Scores, collect_scores
from titan_tree.models.tree_model import ModelOutput, TreeModel
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.token_shards import TokenShard


def evaluate(model: TreeModel, steps: Iterable[StepInput], device: torch.device) -> dict[str, float]:
    """Returns the mean loss and accuracy over all tokens that the paths' loss masks count.

    Tokens count w_p m_{p,t}, as in TreeLoss. Every rank makes the same call with equally many steps.

    Args:
        steps: this rank's share of the data.

    Returns:
        loss: mean negative log-likelihood per token, in nats.
        accuracy: share of tokens that the model ranks first.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    with torch.no_grad(), cast_weights(model):
        for step in steps:
            for batches in equal_schedule(step, model.share):
                runner = PartitionRunner(model, batches, device, statistics=["is_top1"])
                for batch, out in runner.outputs():
                    if not batch.is_dummy:
                        sums += _sums(batch, out)
    loss, correct, weight = all_reduce_sum(sums).tolist()
    return {"loss": loss / weight, "accuracy": correct / weight} if weight else {}


def score(
    model: TreeModel, step: StepInput, device: torch.device, entropy: bool = False
) -> list[tuple[TreeBatch, Scores]]:
    """Returns this rank's micro-batches with the log-probs of their edges. Every rank makes the same call.

    Args:
        step: prepared for a loss of whole paths.
        entropy: also return the entropies of the edges.
    Returns:
        Each micro-batch as a single batch on the device, and its scores.
    """
    scored = []
    with torch.no_grad(), cast_weights(model):
        for i, batches in enumerate(equal_schedule(step, model.share)):
            outputs = PartitionRunner(model, batches, device, entropy=entropy).outputs()
            if i >= len(step.micro_batches):  # dummy batches
                for _ in outputs:
                    pass
                continue
            whole = (step.unpartitioned[i] or step.micro_batches[i][0]).to(device)
            scored.append((whole, collect_scores(outputs, whole.edge_token, model.sequence_group)))
    return scored


def equal_schedule(step: StepInput, share: TokenShard) -> list[list[TreeBatch]]:
    """Returns the micro-batches of this rank, with dummy batches so that all ranks run equally many passes.

    Ranks communicate in every forward pass. Dummy micro-batches come last.
    """
    if world_size() == 1:
        return step.micro_batches
    sizes = all_reduce_counts(step)
    assert dist.group.WORLD is not None
    return in_lockstep(step.micro_batches, sizes.max_micro_batches, dist.group.WORLD, share)


def _sums(batch: TreeBatch, out: ModelOutput) -> Tensor:
    """Returns the batch's sums of loss, of correct tokens and of weights, [3] float64."""
    pairs = batch.pairs
    weight = (pairs.weight[pairs.path] * pairs.loss_mask).double()
    is_top1 = out.statistics["is_top1"]
    values = torch.stack([-out.logprobs[pairs.edge].double(), is_top1[pairs.edge].double()])
    return torch.cat([(values * weight).sum(1), weight.sum()[None]])
