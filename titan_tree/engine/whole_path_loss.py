"""Losses of whole paths over partitions: score, differentiate, reweight.

In such a loss, a token's term depends on other tokens of its path (GSPO's sequence ratio), and a partition
holds only parts of the paths. A score pass therefore computes the log-probs of all edges without gradients.
The loss of the whole micro-batch is differentiated with respect to these log-probs. In the train pass, a
partition's loss is the sum of its log-probs times these derivatives. The gradient is the same; the cost is
one more forward pass.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from titan_tree.models.tree_model import ModelOutput
from titan_tree.tree.batch import TreeBatch


class WholePathLoss:
    """The loss of one partitioned micro-batch, as a weighted sum of the log-probs of its edges.

    Args:
        scores: the scores of all edges, from ``join_outputs``.
        unpartitioned: the micro-batch as a single batch, on the same device.
        loss_function: maps scores and batch to the loss.
    """

    def __init__(
        self,
        scores: ModelOutput,
        unpartitioned: TreeBatch,
        loss_function: Callable[[ModelOutput, TreeBatch], Tensor],
    ) -> None:
        fields = {"logprobs": scores.logprobs, "entropy": scores.entropy}
        leaves = {name: score.requires_grad_() for name, score in fields.items() if score is not None}
        loss = loss_function(scores, unpartitioned)
        # A loss may use entropies for its metrics alone. They then have no derivative.
        gradients = torch.autograd.grad(loss, list(leaves.values()), allow_unused=True)
        named = zip(leaves, gradients, strict=True)
        self._derivatives = {name: gradient for name, gradient in named if gradient is not None}
        self._edge_token = unpartitioned.edge_token

    def __call__(self, batch: TreeBatch, out: ModelOutput) -> Tensor:
        """Returns a 0-dim tensor. Its gradients, summed over all partitions, are those of the loss."""
        if batch.is_dummy:
            return out.logprobs.sum() * 0.0
        index = torch.searchsorted(self._edge_token, batch.edge_token)
        terms = [(d[index] * getattr(out, name)).sum() for name, d in self._derivatives.items()]
        return torch.stack(terms).sum()
