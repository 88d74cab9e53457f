"""Forward passes without gradients: the one path under scoring, evaluation and the search for bad paths.

    forward_passes        runs the partitions of one micro-batch: yields (batch, output)
    step_forward_passes   runs all micro-batches of a step, on all ranks equally many
    scored_batches        joins partitions where the loss needs whole paths
    evaluate              sums losses over all tokens

Score, measure and count passes (tree_step.py), scoring/ and integrations/ call the first one. The forward
passes with gradients, of which backward passes follow, are in partitions.py.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from titan_tree.components.edge_statistics import Statistic
from titan_tree.distributed.collectives import all_reduce_sum, world_group
from titan_tree.distributed.gradient_sync import cast_weights
from titan_tree.distributed.sequence_parallel import join
from titan_tree.engine.partitions import GatewayCache, encode
from titan_tree.engine.schedule import equal_schedule
from titan_tree.engine.step_io import StepInput
from titan_tree.models.tree_model import ModelOutput, TreeModel
from titan_tree.tree.batch import TreeBatch

Outputs = Iterator[tuple[TreeBatch, ModelOutput]]


@torch.no_grad()
def forward_passes(
    model: TreeModel,
    batches: Sequence[TreeBatch],
    device: torch.device,
    *,
    entropy: bool = False,
    statistics: Collection[Statistic] = (),
) -> Outputs:
    """Runs the partitions of one micro-batch without gradients. Yields (batch on the device, model output).

    Ranks that communicate within forward passes must consume equally many outputs.

    Args:
        batches: one per partition, in the plan's order (``TreeBatch.from_plan``).
        device: the device of the model.
        entropy: whether the model also returns entropies.
        statistics: the statistics that the model also returns, see ``edge_statistics``.
    """
    cache = GatewayCache(model.cache_streams, batches)
    parents = {batch.parent for batch in batches}
    features, batches = encode(model, batches)
    for number, on_host in enumerate(batches):
        batch = on_host.to(device, non_blocking=True)
        gateway = cache.read(batch)
        out = model(batch, entropy=entropy, gateway=gateway, statistics=statistics, features=features)
        if number in parents and out.exports:
            cache.write(batch, out.exports)
        yield batch, out


def step_forward_passes(
    model: TreeModel,
    step: StepInput,
    device: torch.device,
    *,
    entropy: bool = False,
    statistics: Collection[Statistic] = (),
) -> Iterator[Outputs]:
    """Yields the outputs of each micro-batch of a step. Micro-batches of dummies come last. Collective.

    Every forward pass runs, whether or not the caller consumes its output, because ranks communicate in it.
    """
    for batches in equal_schedule(step.micro_batches, world_group(), token_shard=model.token_shard):
        outputs = forward_passes(model, batches, device, entropy=entropy, statistics=statistics)
        yield outputs
        for _ in outputs:
            pass


def scored_batches(
    model: TreeModel, step: StepInput, device: torch.device, *, entropy: bool = False
) -> Iterator[tuple[int, TreeBatch, ModelOutput]]:
    """Yields the batches of a step on which its loss can run, with the scores of their edges. Collective.

    They are whole micro-batches if the step was prepared for a loss of whole paths, and partitions otherwise.
    Every rank must consume all of them.

    Returns:
        The number of the micro-batch, the batch on the device, and its scores (see ``join_outputs``).
    """
    for i, outputs in enumerate(step_forward_passes(model, step, device, entropy=entropy)):
        whole = step.whole(i, device)
        for batch, scores in batches_for_loss(outputs, whole, model.execution.sequence_group):
            yield i, batch, scores


def batches_for_loss(
    outputs: Iterable[tuple[TreeBatch, ModelOutput]],
    whole: TreeBatch | None,
    group: dist.ProcessGroup | None,
) -> Outputs:
    """Yields the batches of one micro-batch on which a loss can run, with the scores of their edges.

    Args:
        whole: the micro-batch as a single batch on the device, if the loss needs it. None: the loss runs on
            each partition.
        group: the ranks that share the tokens. Collective.
    """
    if whole is not None:
        yield whole, join_outputs(outputs, len(whole.edge_label), group)
        return
    for batch, out in outputs:
        if not batch.is_dummy:
            yield batch, out


def join_outputs(
    outputs: Iterable[tuple[TreeBatch, ModelOutput]],
    num_edges: int,
    group: dist.ProcessGroup | None = None,
) -> ModelOutput:
    """Joins the scores of all partitions of a micro-batch, and of all ranks that share its tokens.

    Args:
        num_edges: E of the micro-batch as a single batch.
        group: the ranks that share the tokens. Collective.
    Returns:
        Log-probs, and entropies and statistics if the outputs have them, [E] each, in the order of
        ``edge_number``. Differentiable, see ``join``.
    """
    # Without exports, which would keep the keys of all partitions in memory.
    scored = [(batch.edge_number, out._replace(exports=None)) for batch, out in outputs if not batch.is_dummy]
    index = torch.cat([numbers for numbers, _ in scored])

    def joined(values: Iterable[Tensor]) -> Tensor:
        return join(torch.cat(list(values)), index, num_edges, group)

    _, first = scored[0]
    return ModelOutput(
        logprobs=joined(out.logprobs for _, out in scored),
        entropy=None
        if first.entropy is None
        else joined(out.entropy for _, out in scored if out.entropy is not None),
        statistics={name: joined(out.statistics[name] for _, out in scored) for name in first.statistics},
    )


def evaluate(model: TreeModel, steps: Iterable[StepInput], device: torch.device) -> dict[str, float]:
    """Returns the mean loss and accuracy over all tokens that the paths' loss masks count.

    Tokens count w_p m_{p,t}, as in TreeLoss. Every rank makes the same call with equally many steps.

    Args:
        steps: this rank's part of the data.

    Returns:
        loss: mean negative log-likelihood per token, in nats.
        accuracy: share of tokens that the model ranks first.
    """
    sums = torch.zeros(3, dtype=torch.float64, device=device)
    with torch.no_grad(), cast_weights(model):
        for step in steps:
            for outputs in step_forward_passes(model, step, device, statistics=["is_top1"]):
                for batch, out in outputs:
                    if not batch.is_dummy:
                        sums += _evaluation_sums(batch, out)
    loss, correct, weight = all_reduce_sum(sums).tolist()
    return {"loss": loss / weight, "accuracy": correct / weight} if weight else {}


def _evaluation_sums(batch: TreeBatch, out: ModelOutput) -> Tensor:
    """Returns the batch's sums of loss, of correct tokens and of weights, [3] float64."""
    pairs = batch.pairs
    weight = (pairs.weight[pairs.path] * pairs.loss_mask).double()
    is_top1 = out.statistics["is_top1"]
    values = torch.stack([-out.logprobs[pairs.edge].double(), is_top1[pairs.edge].double()])
    return torch.cat([(values * weight).sum(1), weight.sum()[None]])
