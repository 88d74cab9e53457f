"""tree_logprobs: log-probabilities of many token lists, each shared prefix computed once.

It can also record the experts that each token used, so that training can replay them (tree/replay.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor

from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.distributed.sequence_parallel import join
from titan_tree.engine.partitions import PartitionRunner
from titan_tree.errors import UserError
from titan_tree.models.tree_model import ModelOutput, TreeModel
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.partition import PartitionPlan, one_pass
from titan_tree.tree.paths import ModelLimits, TokenPath
from titan_tree.tree.token_tree import TokenTree


@overload
def tree_logprobs(
    model: TreeModel,
    token_lists: Sequence[Sequence[int]],
    max_tokens: int | None = None,
    *,
    temperature: float = 1.0,
) -> list[Tensor]: ...


@overload
def tree_logprobs(
    model: TreeModel,
    token_lists: Sequence[Sequence[int]],
    max_tokens: int | None = None,
    *,
    temperature: float = 1.0,
    return_routed_experts: Literal[True],
) -> tuple[list[Tensor], list[Tensor]]: ...


def tree_logprobs(
    model: TreeModel,
    token_lists: Sequence[Sequence[int]],
    max_tokens: int | None = None,
    *,
    temperature: float = 1.0,
    return_routed_experts: bool = False,
) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
    """Returns log p(tokens[t] | tokens[:t]) for t = 1, 2, ... of every list.

    Each shared prefix is computed once. Lists may be duplicates or prefixes of one another. The result is
    differentiable under ``torch.enable_grad``.

    Args:
        model: on the device that computes.
        token_lists: token ids; each list has at least one.
        max_tokens: maximum tokens of one forward pass; None runs all in one. Larger trees run in partitions.
            Memory then holds one partition, and the keys, values and states of the path above it. This needs
            ``torch.no_grad``. A model over several ranks also needs equally many partitions on each rank:
            pass the same lists on all of them.
        temperature: the log-probs are those of logits / temperature.
        return_routed_experts: also return the experts that each token used. The model must have experts.
    Returns:
        One fp32 tensor [len(tokens) - 1] in nats per list, in the order given. On request also one int16
        tensor [len(tokens), L, k] per list, on the CPU, for L layers with k experts per token
        (``TokenPath.routed_experts``).
    Raises:
        UserError: if a list is empty, exceeds the model's positions or its vocabulary (the message has its
            index); for a temperature that is not positive; for max_tokens with gradients enabled; for experts
            of a model without experts.
    """
    _check_arguments(model, max_tokens, return_routed_experts)
    paths = [
        TokenPath(np.asarray(tokens), id=str(i), temperature=temperature)
        for i, tokens in enumerate(token_lists)
    ]
    if not paths:
        return ([], []) if return_routed_experts else []
    limits = ModelLimits(model.config.max_position_embeddings, model.config.vocab_size)
    for path in paths:
        path.check_limits(limits)
    tree = TokenTree.from_paths(paths)
    plan = one_pass(tree) if max_tokens is None else TreePartitioner("auto", max_tokens).plan(tree)
    device = next(model.parameters()).device
    scores: list[tuple[Tensor, Tensor]] = []  # tokens that edges predict, and their log-probs
    experts: list[tuple[np.ndarray, Tensor]] = []  # tokens, and their experts
    for partition, (batch, out) in zip(plan.partitions, _outputs(model, plan, device), strict=True):
        scores.append((batch.edge_token, out.logprobs))
        if return_routed_experts:
            # A token that several partitions run is recorded where its edges are scored: rounding may differ.
            used = torch.stack(out.routed_experts, dim=1).cpu()
            experts.append((partition.own[partition.scores], used[torch.from_numpy(partition.scores)]))

    logprobs = _by_path(tree, scores, device)
    return (logprobs, _experts_by_path(tree, experts)) if return_routed_experts else logprobs


def _check_arguments(model: TreeModel, max_tokens: int | None, return_routed_experts: bool) -> None:
    if max_tokens is not None and torch.is_grad_enabled():
        raise UserError(
            "tree_logprobs: max_tokens: expected gradients to be disabled, because they would keep all "
            "partitions in memory; call it under torch.no_grad(), or train with TreeStep"
        )
    if return_routed_experts and model.experts is None:
        raise UserError(
            "tree_logprobs: return_routed_experts: expected a model with experts, but this model has none"
        )


def _outputs(
    model: TreeModel, plan: PartitionPlan, device: torch.device
) -> Iterable[tuple[TreeBatch, ModelOutput]]:
    """Returns the batch and the output of each partition. A single one has gradients, if they are enabled."""
    batches = TreeBatch.from_plan(plan)
    own = [model.share.of(batch) for batch in batches]
    if len(own) > 1:
        outputs = PartitionRunner(model, own, device).outputs()
    else:
        batch = own[0].to(device)
        outputs = iter([(batch, model(batch))])
    if model.sequence_group is None:
        return outputs
    return (_joined(model, batch.to(device), *out) for batch, out in zip(batches, outputs, strict=True))


def _joined(
    model: TreeModel, whole: TreeBatch, own: TreeBatch, out: ModelOutput
) -> tuple[TreeBatch, ModelOutput]:
    """Joins the outputs of the ranks that share the tokens of a batch."""
    group, tokens = model.sequence_group, model.share.tokens(len(whole))
    edges = torch.searchsorted(whole.edge_token, own.edge_token)
    place = torch.arange(tokens.start, tokens.stop, device=edges.device)
    experts = (join(used.int(), place, len(whole), group).short() for used in out.routed_experts)
    logprobs = join(out.logprobs, edges, len(whole.edge_token), group)
    return whole, out._replace(logprobs=logprobs, routed_experts=tuple(experts))


def _by_path(tree: TokenTree, scores: list[tuple[Tensor, Tensor]], device: torch.device) -> list[Tensor]:
    """Gathers the log-probs of each path's edges."""
    is_predicted = np.ones(len(tree.path_index), bool)
    is_predicted[tree.path_offsets[:-1]] = False  # the first token of a path
    tokens, values = map(torch.cat, zip(*scores, strict=True))
    ascending, order = tokens.sort()
    path_tokens = torch.from_numpy(tree.path_index[is_predicted]).to(device)
    edges = order[torch.searchsorted(ascending, path_tokens)]
    return list(values[edges].split([len(path) - 1 for path in tree.paths]))


def _experts_by_path(tree: TokenTree, experts: list[tuple[np.ndarray, Tensor]]) -> list[Tensor]:
    """Gathers the experts of each path's tokens."""
    row = np.argsort(np.concatenate([tokens for tokens, _ in experts]))
    by_path = torch.cat([used for _, used in experts])[torch.from_numpy(row[tree.path_index])]
    return list(by_path.split(list(map(len, tree.paths))))
