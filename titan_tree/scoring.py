"""tree_logprobs: log-probabilities of many token lists, shared prefixes computed once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.data.batch import TreeBatch
from titan_tree.data.partition import one_pass
from titan_tree.data.paths import TokenPath
from titan_tree.data.tree import TokenTree
from titan_tree.errors import UserError
from titan_tree.gateways import score_partitions
from titan_tree.models.decoder import Decoder


def tree_logprobs(
    model: Decoder, token_lists: Sequence[Sequence[int]], max_tokens: int | None = None
) -> list[Tensor]:
    """log p(tokens[t] | tokens[:t]) for t = 1, 2, ... of every list, every shared prefix computed once.

    Duplicates and prefixes of one another are welcome; differentiable under ``torch.enable_grad``.

    Args:
        model: on the device to compute on.
        token_lists: each of one token at least.
        max_tokens: of one forward; None: all in one. Larger trees run in pieces that hand keys, values and
            states down, every token once, in memory for one path and one piece. Needs ``torch.no_grad``.
    Returns:
        One fp32 tensor [len(tokens) - 1] per list, in nats, in the order given.
    Raises:
        UserError: a list, named by its index, that is empty, longer than the model's positions, or
            beyond its vocabulary; max_tokens where gradients are enabled.
    """
    if max_tokens is not None and torch.is_grad_enabled():
        raise UserError(
            "tree_logprobs: max_tokens: expected no gradients, which would keep all pieces in memory; "
            "call it under torch.no_grad(), or train with TreeStep"
        )
    paths = [TokenPath(np.asarray(tokens), id=str(i)) for i, tokens in enumerate(token_lists)]
    if not paths:
        return []
    for path in paths:
        path.check_limits(model.config.max_position_embeddings, model.config.vocab_size)
    tree = TokenTree.from_paths(paths)
    plan = one_pass(tree) if max_tokens is None else TreePartitioner("auto", max_tokens).plan(tree)
    device = next(model.parameters()).device
    batches = TreeBatch.from_plan(plan)
    if len(batches) == 1:
        batch = batches[0].to(device)
        tokens, values = batch.edge_token, model(batch).logprobs
    else:
        tokens, values, _ = score_partitions(model, batches, device)
    predicted = np.ones(len(tree.path_index), bool)
    predicted[tree.path_offsets[:-1]] = False
    index = torch.from_numpy(tree.path_index[predicted]).to(device)
    return list(values[torch.searchsorted(tokens, index)].split([len(path) - 1 for path in paths]))
