"""edge_logprobs: log-probabilities of the edges' labels without a logit matrix in memory.

Row e of the [E, V] logits is ``hidden[e] @ weight.T``. The vocabulary is walked in blocks of columns:
forward keeps a running log-sum-exp per row (as in online softmax, Milakov & Gimelshein,
arXiv:1805.02867), backward computes each block again. Chunking columns, not rows, makes the weight
gradient of a block one complete GEMM: nothing [V, d] is ever summed over chunks.

E edges, V vocabulary, d hidden size, B columns of a block.

Memory beyond inputs and gradients: a block holds E * B <= ``BLOCK_ELEMENTS`` = 2**27 logits in fp32
(512 MiB) and their gradient in bf16 (256 MiB); ``hidden``'s gradient is summed in fp32 (E * d * 4 bytes:
256 MiB at E = 32k, d = 2048). 1 GiB, whatever V; full fp32 logits of Qwen3 would be 18.5 GiB.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_ELEMENTS = 2**27
COLUMN_MULTIPLE = 128  # keeps the rows of a block aligned for GEMMs; also the narrowest block
EMPTY = -1e30  # log-sum-exp of no logits; finite, so that 0 * EMPTY is 0


def edge_logprobs(
    hidden: Tensor,
    weight: Tensor,
    label: Tensor,
    entropy: bool = False,
    block_elements: int = BLOCK_ELEMENTS,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of each edge's label, and on request the entropy of its distribution, in nats.

    Logits, log-probs and entropy are fp32 whatever the inputs (fp64 for fp64 inputs), and exact: no
    sampling, no bf16 logits. Differentiable once, deterministic.

    Args:
        hidden: [E, d] of the tokens that predict; E may be 0.
        weight: [V, d] of hidden's dtype: the output projection, tied to the embedding or not.
        label: [E] int64 in 0 .. V-1. The caller vouches for the range: checking would synchronise.
        entropy: also return the entropy (costs no matrix multiplication).
        block_elements: upper bound of E * B, but a block has ``COLUMN_MULTIPLE`` columns at least.
    Returns:
        (logprobs [E], entropy [E] or None).
    """
    return _EdgeLogprobs.apply(hidden, weight, label, entropy, block_elements)


class _EdgeLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, label: Tensor, entropy: bool, block_elements: int
    ) -> tuple[Tensor, Tensor | None]:
        absorb = _fused(_absorb_block, hidden)
        accumulator = torch.promote_types(hidden.dtype, torch.float32)
        lse = hidden.new_full((len(hidden),), EMPTY, dtype=accumulator)
        label_logit = torch.zeros_like(lse)
        entropies = torch.zeros_like(lse) if entropy else None
        for start, end in _blocks(weight, len(hidden), block_elements):
            lse, label_logit, entropies = absorb(
                _matmul(hidden, weight[start:end].t()), label - start, lse, label_logit, entropies
            )
        ctx.save_for_backward(hidden, weight, label, lse, entropies)
        ctx.block_elements = block_elements
        return label_logit - lse, entropies

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logprobs: Tensor, grad_entropy: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden, weight, label, lse, entropies = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        logit_gradient = _fused(_logit_gradient, hidden)
        grad_logprobs = grad_logprobs.contiguous()  # a sum's gradient has stride 0: one more graph
        grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
        for start, end in _blocks(weight, len(hidden), ctx.block_elements):
            grad = logit_gradient(
                _matmul(hidden, weight[start:end].t()),
                label - start,
                lse,
                entropies,
                grad_logprobs,
                grad_entropy,
                hidden.dtype,
            )
            if grad_weight is not None:
                torch.mm(grad.t(), hidden, out=grad_weight[start:end])
            if grad_hidden is not None:
                _add_matmul(grad_hidden, grad, weight[start:end])
            del grad  # before the next block allocates
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, None, None, None


def _blocks(weight: Tensor, num_edges: int, block_elements: int) -> Iterator[tuple[int, int]]:
    """(first, end) of the vocabulary blocks."""
    columns = block_elements // max(num_edges, 1)
    columns = max(columns // COLUMN_MULTIPLE, 1) * COLUMN_MULTIPLE
    for start in range(0, len(weight), columns):
        yield start, min(start + columns, len(weight))


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b, accumulated and returned in fp32 (fp64 for fp64)."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b with ``total`` in fp32 (fp64 for fp64)."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.float(), b.float())


def _absorb_block(
    logits: Tensor, column: Tensor, lse: Tensor, label_logit: Tensor, entropies: Tensor | None
) -> tuple[Tensor, Tensor, Tensor | None]:
    """The running row statistics with a block of logits [E, B] taken in, all [E].

    column: the label's column in this block; outside 0 .. B-1 the label lies in another block.
    Entropy by its chain rule: parts of mass a and b, each normalised for itself, make
    H = a (H_a - log a) + b (H_b - log b). No large logit enters, so nothing cancels.
    """
    width = logits.shape[1]
    block_lse = logits.logsumexp(1)
    new_lse = torch.logaddexp(lse, block_lse)
    in_block = (column >= 0) & (column < width)
    candidate = logits.gather(1, column.clamp(0, width - 1)[:, None]).squeeze(1)
    label_logit = torch.where(in_block, candidate, label_logit)
    if entropies is not None:
        log_p = logits - block_lse[:, None]
        block_entropies = -(log_p.exp() * log_p).sum(1)
        log_a, log_b = lse - new_lse, block_lse - new_lse
        entropies = log_a.exp() * (entropies - log_a) + log_b.exp() * (block_entropies - log_b)
    return new_lse, label_logit, entropies


def _logit_gradient(
    logits: Tensor,
    column: Tensor,
    lse: Tensor,
    entropies: Tensor | None,
    grad_logprobs: Tensor,
    grad_entropy: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[E, B] gradient of a block's logits, in ``dtype``: one read and one write when fused.

    d logprob / d logit_j = [j = label] - p_j and d H / d logit_j = -p_j (log p_j + H).
    """
    log_p = logits - lse[:, None]
    p = log_p.exp()
    is_label = column[:, None] == torch.arange(logits.shape[1], device=logits.device)
    grad = grad_logprobs[:, None] * (is_label.to(p.dtype) - p)
    if entropies is not None and grad_entropy is not None:
        grad = grad - grad_entropy[:, None] * p * (log_p + entropies[:, None])
    return grad.to(dtype)


def _fused(function: Callable[..., Any], hidden: Tensor) -> Callable[..., Any]:
    """``function`` compiled into few passes over a block on a GPU, itself on CPU.

    Also for a single edge or none: torch.compile makes sizes 0 and 1 a graph of their own.
    """
    return _compiled(function) if hidden.is_cuda and len(hidden) > 1 else function


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=True)
