"""The numbers of one training step that a certificate compares, and how they are computed on trees.

T tokens of a path, d hidden size, L layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_tree.distributed.gradient_sync import cast_weights
from titan_tree.engine.forward import forward_passes, join_outputs
from titan_tree.engine.tree_step import TreeStep
from titan_tree.models.weights import CHECKPOINTED
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.partition import PartitionPlan, one_pass
from titan_tree.tree.token_tree import TokenTree

Hidden = list[list[Tensor]]  # of each layer and each path, [T, d] on the CPU


@dataclass
class Scores:
    """What a model computes of P paths without gradients."""

    hidden: Hidden  # the outputs of the layers, in forward order
    logprobs: list[Tensor]  # of each path, [T - 1] on the CPU, nats


@dataclass
class Numbers:
    """What a model computes of P paths in a training step."""

    loss: float
    gradients: dict[str, Tensor]  # of each trained parameter, on the CPU
    scores: Scores | None = None  # None: several ranks compute the step, and none has all paths


def train_step(tree_step: TreeStep, micro_batches: Sequence[Sequence[TokenTree]]) -> Numbers:
    """Returns the loss and the gradients of a training step on trees. Collective. Weights do not change."""
    tree_step.model.zero_grad()
    loss = tree_step.run(tree_step.prepare(micro_batches)).loss.item()
    gradients = {
        name.replace(CHECKPOINTED, ""): whole(parameter.grad)
        for name, parameter in tree_step.model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    tree_step.model.zero_grad()
    return Numbers(loss, gradients)


def whole(tensor: Tensor) -> Tensor:
    """Returns a tensor on the CPU, gathered from all ranks if it is sharded. Collective."""
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).cpu()


def score(tree_step: TreeStep, micro_batches: Sequence[Sequence[TokenTree]]) -> Scores:
    """Returns what a model on one rank computes of all paths, in the order of their trees."""
    hidden: Hidden = [[] for _ in tree_step.model.layers]
    logprobs: list[Tensor] = []
    for trees in micro_batches:
        tree = TokenTree.forest(trees)
        of_tokens, of_paths = score_tree(tree_step, tree)
        starts = tree.path_offsets
        for number in range(len(tree.paths)):
            index = torch.from_numpy(tree.path_index[starts[number] : starts[number + 1]].astype("int64"))
            for layer, values in zip(hidden, of_tokens, strict=True):
                layer.append(values[index])
        logprobs += of_paths
    return Scores(hidden, logprobs)


def score_tree(tree_step: TreeStep, tree: TokenTree) -> tuple[list[Tensor], list[Tensor]]:
    """Returns each layer's output for the tree's tokens, [N, d], and the log-probs of each path, [T - 1]."""
    model, plan = tree_step.model, _plan(tree_step, tree)
    of_tokens: list[Tensor] = []
    outputs = []
    with cast_weights(model), recorded(list(model.layers)) as record:
        passes = forward_passes(model, TreeBatch.from_plan(plan, "all"), tree_step.device)
        for partition, (batch, out) in zip(plan.partitions, passes, strict=True):
            outputs.append((batch, out))
            own = torch.from_numpy(partition.own_tokens[partition.scores].astype("int64"))
            for number, values in enumerate(record):
                if len(of_tokens) == number:
                    of_tokens.append(torch.zeros(len(tree), values.shape[-1], dtype=values.dtype))
                of_tokens[number][own] = values[torch.from_numpy(partition.scores)]
            record.clear()
    pairs = TreeBatch.from_trees([tree], "all").pairs
    joined = join_outputs(outputs, sum(len(batch.edge_label) for batch, _ in outputs)).logprobs.cpu()
    counts = torch.bincount(pairs.path, minlength=len(tree.paths)).tolist()
    return of_tokens, list(joined[pairs.edge].split(counts))


def _plan(tree_step: TreeStep, tree: TokenTree) -> PartitionPlan:
    """Returns the partitions in which training runs the tree."""
    if tree_step.partitioner is None:
        return one_pass(tree)
    return tree_step.partitioner.plan(tree, costs=tree_step.model.costs())


@contextmanager
def recorded(layers: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Yields a list to which each call of a layer appends its output, [N, d] on the CPU."""
    record: list[Tensor] = []

    def keep(_: nn.Module, __: object, out: object) -> None:
        hidden = out[0] if isinstance(out, tuple) else out
        assert isinstance(hidden, Tensor)
        record.append(hidden.detach().flatten(0, -2).cpu())

    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        yield record
    finally:
        for handle in handles:
            handle.remove()
