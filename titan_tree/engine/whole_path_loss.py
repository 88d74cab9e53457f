"""Losses of whole paths over partitions: score, differentiate, reweight.

In such a loss, a token's term depends on other tokens of its path (GSPO's sequence ratio), and a partition
holds only parts of the paths. A score pass therefore computes the log-probs of all edges without gradients.
The loss of the whole micro-batch is differentiated with respect to these log-probs. In the train pass, a
partition's loss is the sum of its log-probs times these derivatives. The gradient is the same; the cost is
one more forward pass.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from titan_tree.distributed.sequence_parallel import join
from titan_tree.models.tree_model import ModelOutput
from titan_tree.tree.batch import TreeBatch

Scores = dict[str, Tensor]  # fields of ModelOutput, "logprobs" and on request "entropy", [E] each


def collect_scores(
    outputs: Iterable[tuple[TreeBatch, ModelOutput]],
    edge_token: Tensor,
    group: dist.ProcessGroup | None = None,
) -> Scores:
    """Joins the scores of all partitions of a micro-batch, and of all ranks that share its tokens.

    Args:
        edge_token: [E] of the micro-batch as a single batch, on the same device, see ``TreeBatch``.
        group: the ranks that share the tokens. Collective.
    Returns:
        [E] each, in nats, in the order of ``edge_token``. Differentiable, see ``join``.
    """
    # Without exports, which would keep the keys of all partitions in memory.
    scored = [(batch.edge_token, out._replace(exports=None)) for batch, out in outputs if not batch.is_dummy]
    index = torch.searchsorted(edge_token, torch.cat([tokens for tokens, _ in scored]))
    columns = {name: [getattr(out, name) for _, out in scored] for name in ("logprobs", "entropy")}
    return {
        name: join(torch.cat(values), index, len(edge_token), group)
        for name, values in columns.items()
        if values[0] is not None
    }


class WholePathLoss:
    """The loss of one partitioned micro-batch, as a weighted sum of the log-probs of its edges.

    Args:
        scores: of all edges, from ``collect_scores``.
        unpartitioned: the micro-batch as a single batch, on the same device.
        loss_function: maps scores and batch to the loss.
    """

    def __init__(
        self, scores: Scores, unpartitioned: TreeBatch, loss_function: Callable[[Scores, TreeBatch], Tensor]
    ) -> None:
        scores = {name: score.requires_grad_() for name, score in scores.items()}
        loss = loss_function(scores, unpartitioned)
        # A loss may use entropies for its metrics alone. They then have no derivative.
        gradients = torch.autograd.grad(loss, list(scores.values()), allow_unused=True)
        named = zip(scores, gradients, strict=True)
        self._derivatives = {name: gradient for name, gradient in named if gradient is not None}
        self._edge_token = unpartitioned.edge_token

    def __call__(self, batch: TreeBatch, out: ModelOutput) -> Tensor:
        """Returns a 0-dim tensor. Its gradients, summed over all partitions, are those of the loss."""
        if batch.is_dummy:
            return out.logprobs.sum() * 0.0
        index = torch.searchsorted(self._edge_token, batch.edge_token)
        terms = [(d[index] * getattr(out, name)).sum() for name, d in self._derivatives.items()]
        return torch.stack(terms).sum()
