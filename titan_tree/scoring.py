"""tree_logprobs: log-probabilities of many token lists, shared prefixes computed once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from titan_tree.data.batch import TreeBatch
from titan_tree.data.paths import TokenPath
from titan_tree.data.tree import TokenTree
from titan_tree.models.qwen3 import Qwen3


def tree_logprobs(model: Qwen3, token_lists: Sequence[Sequence[int]]) -> list[Tensor]:
    """log p(tokens[t] | tokens[:t]) for t = 1, 2, ... of every list, in one pass over their token tree.

    Duplicates and prefixes of one another are welcome; differentiable under ``torch.enable_grad``.

    Args:
        model: on the device to compute on.
        token_lists: each of one token at least.
    Returns:
        One fp32 tensor [len(tokens) - 1] per list, in nats, in the order given.
    Raises:
        UserError: a list, named by its index, that is empty, longer than the model's positions, or
            beyond its vocabulary.
    """
    paths = [TokenPath(np.asarray(tokens), id=str(i)) for i, tokens in enumerate(token_lists)]
    if not paths:
        return []
    for path in paths:
        path.check_limits(model.config.max_position_embeddings, model.config.vocab_size)
    batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])
    batch = batch.to(next(model.parameters()).device)
    logprobs = model(batch).logprobs[batch.pairs.edge]
    return list(logprobs.split([len(path) - 1 for path in paths]))
