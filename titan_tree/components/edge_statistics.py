"""edge_statistics: what metrics need of the distributions of edges, beside log-probs and entropies.

E edges, V vocabulary, d hidden size, k likeliest tokens.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from titan_tree.components.logprobs import (
    BLOCK_ELEMENTS,
    EMPTY,
    block_logits,
    remove_outside,
    vocabulary_blocks,
)


class Likeliest(NamedTuple):
    """The k likeliest tokens of each edge, [E, k]. Outside of the support, log-probs are below -1e29."""

    k: int  # the whole vocabulary if it is smaller
    of: Literal["ids", "logprobs"]


Statistic = Literal["is_top1", "mean_logits", "log_sum_sq_probs"] | Likeliest


@torch.no_grad()
def edge_statistics(
    names: Collection[Statistic],
    hidden: Tensor,
    weight: Tensor,
    label: Tensor,
    block_elements: int = BLOCK_ELEMENTS,
    cap: Tensor | None = None,
    support: Tensor | None = None,
) -> dict[Statistic, Tensor]:
    """Returns the chosen statistics of each edge's distribution by name, without gradients.

    All of them together repeat the matrix multiplication of ``edge_logprobs`` once, whose other arguments it
    takes.

    Args:
        names: any of
            "is_top1": [E] bool, whether no token has a larger logit than the edge's label;
            "mean_logits": [E] fp32 (fp64 for fp64 inputs), the mean of the logits over the whole vocabulary;
            "log_sum_sq_probs": [E] likewise, log sum_v p_v^2 (WPO, arXiv:2406.11827);
            ``Likeliest``, of one k.
    """
    zero = torch.zeros(
        len(hidden), dtype=torch.promote_types(hidden.dtype, torch.float32), device=hidden.device
    )
    peak, label_logit, total = zero - torch.inf, zero, zero
    lse, log_squares = zero + EMPTY, zero + EMPTY
    likeliest = [name for name in names if isinstance(name, Likeliest)]
    top, top_ids = zero.new_empty(len(hidden), 0), label.new_empty(len(hidden), 0)
    for start, end in vocabulary_blocks(weight, len(hidden), block_elements):
        logits, column = block_logits(hidden, weight[start:end], cap), label - start
        if "mean_logits" in names:
            total = total + logits.sum(1)
        remove_outside(logits, support, start)
        if "is_top1" in names:
            peak = torch.maximum(peak, logits.amax(1))
            inside = (column >= 0) & (column < end - start)
            logit_inside = logits.gather(1, column.clamp(0, end - start - 1)[:, None])[:, 0]
            label_logit = torch.where(inside, logit_inside, label_logit)
        if likeliest:
            block_top, block_ids = logits.topk(min(likeliest[0].k, end - start), dim=1)
            top, top_ids = torch.cat([top, block_top], 1), torch.cat([top_ids, block_ids + start], 1)
            top, order = top.topk(min(likeliest[0].k, top.shape[1]), dim=1)
            top_ids = top_ids.gather(1, order)
        if likeliest or "log_sum_sq_probs" in names:
            # Probabilities of a block are relative to its own sum, so no large logits cancel.
            block_lse = logits.logsumexp(1)
            block_squares = (2 * (logits - block_lse[:, None])).logsumexp(1)
            new_lse = torch.logaddexp(lse, block_lse)
            shares = 2 * (lse - new_lse), 2 * (block_lse - new_lse)
            log_squares = torch.logaddexp(log_squares + shares[0], block_squares + shares[1])
            lse = new_lse
    results: dict[Statistic, Tensor] = {
        "is_top1": label_logit >= peak,
        "mean_logits": total / len(weight),
        "log_sum_sq_probs": log_squares,
        **{name: top_ids if name.of == "ids" else top - lse[:, None] for name in likeliest},
    }
    return {name: results[name] for name in names}
