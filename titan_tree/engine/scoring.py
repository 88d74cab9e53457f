"""tree_logprobs: log-probabilities of many token lists, shared prefixes computed once.

And with which experts, so that training can replay them (data/replay.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, overload

import numpy as np
import torch
from torch import Tensor

from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.engine.partitions import run_partitions
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder, ModelOutput
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.partition import one_pass
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


@overload
def tree_logprobs(
    model: Decoder, token_lists: Sequence[Sequence[int]], max_tokens: int | None = None
) -> list[Tensor]: ...


@overload
def tree_logprobs(
    model: Decoder,
    token_lists: Sequence[Sequence[int]],
    max_tokens: int | None = None,
    *,
    return_routed_experts: Literal[True],
) -> tuple[list[Tensor], list[Tensor]]: ...


def tree_logprobs(
    model: Decoder,
    token_lists: Sequence[Sequence[int]],
    max_tokens: int | None = None,
    *,
    return_routed_experts: bool = False,
) -> list[Tensor] | tuple[list[Tensor], list[Tensor]]:
    """log p(tokens[t] | tokens[:t]) for t = 1, 2, ... of every list, every shared prefix computed once.

    Duplicates and prefixes of one another are welcome; differentiable under ``torch.enable_grad``.

    Args:
        model: on the device to compute on.
        token_lists: each of one token at least.
        max_tokens: of one forward; None: all in one. Larger trees run in pieces that hand keys, values and
            states down, every token once, in memory for one path and one piece. Needs ``torch.no_grad``,
            and of a model over several ranks as many pieces on each: give all of them the same lists.
        return_routed_experts: of a model with experts.
    Returns:
        One fp32 tensor [len(tokens) - 1] per list, in nats, in the order given. On request also the experts
        of each list's tokens, [len(tokens), L, k] int16 on the CPU: ``TokenPath.routed_experts``.
    Raises:
        UserError: a list, named by its index, that is empty, longer than the model's positions, or
            beyond its vocabulary; max_tokens where gradients are enabled; experts of a model without.
    """
    if max_tokens is not None and torch.is_grad_enabled():
        raise UserError(
            "tree_logprobs: max_tokens: expected no gradients, which would keep all pieces in memory; "
            "call it under torch.no_grad(), or train with TreeStep"
        )
    if return_routed_experts and model.experts is None:
        raise UserError(
            "tree_logprobs: return_routed_experts: expected a model with experts, this one has none"
        )
    paths = [TokenPath(np.asarray(tokens), id=str(i)) for i, tokens in enumerate(token_lists)]
    if not paths:
        return ([], []) if return_routed_experts else []
    for path in paths:
        path.check_limits(model.config.max_position_embeddings, model.config.vocab_size)
    tree = TokenTree.from_paths(paths)
    plan = one_pass(tree) if max_tokens is None else TreePartitioner("auto", max_tokens).plan(tree)
    device = next(model.parameters()).device
    batches = TreeBatch.from_plan(plan)
    scored: list[tuple[Tensor, Tensor]] = []  # tokens that edges predict, log-probs
    experts: list[tuple[np.ndarray, Tensor]] = []  # tokens, theirs

    def keep(number: int, batch: TreeBatch, out: ModelOutput) -> None:
        scored.append((batch.edge_token, out.logprobs))
        if return_routed_experts:
            # A copy of a token that runs for the sake of others may have been rounded to other experts.
            counts = plan.partitions[number].scores
            used = torch.stack(out.routed_experts, dim=1).cpu()
            experts.append((plan.partitions[number].own[counts], used[torch.from_numpy(counts)]))

    if len(batches) == 1:
        keep(0, batch := batches[0].to(device), model(batch))
    else:
        run_partitions(model, batches, device, keep)
    predicted = np.ones(len(tree.path_index), bool)
    predicted[tree.path_offsets[:-1]] = False
    tokens, values = map(torch.cat, zip(*scored, strict=True))
    ascending, order = tokens.sort()
    index = torch.from_numpy(tree.path_index[predicted]).to(device)
    at = order[torch.searchsorted(ascending, index)]
    logprobs = list(values[at].split([len(path) - 1 for path in paths]))
    if not return_routed_experts:
        return logprobs
    where = np.argsort(np.concatenate([tokens for tokens, _ in experts]))
    of_paths = torch.cat([used for _, used in experts])[torch.from_numpy(where[tree.path_index])]
    return logprobs, list(of_paths.split(list(map(len, paths))))
