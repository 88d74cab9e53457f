"""edge_logprobs: log-probabilities of the edges' labels and targets, without an fp32 logit matrix in memory.

An edge is a pair of a token and its successor. Row e of the [E, V] logits is ``hidden[e] @ weight.T``, from
the token that predicts; the label is the successor.

The vocabulary is processed in blocks of columns. The forward pass applies softmax to each block separately
and keeps a running log-sum-exp per row, as online softmax does (arXiv:1805.02867). With blocks of columns
instead of rows, the weight gradient of each block is one complete GEMM: no [V, d] tensor is summed over
blocks.

The backward pass reads the blocks' probabilities in hidden's dtype, which is also that of the logits'
gradient. They are either kept from the forward pass, 2 * E * V bytes in bf16 (5.0 GB at E = 16k, V = 152k),
or recomputed with one more GEMM. The gradient of the entropy takes their logarithm and needs them in fp32, so
it recomputes them.

Memory beyond inputs, gradients and kept probabilities is about 1 GiB for any V:

    a block's logits in fp32, at most ``BLOCK_ELEMENTS`` = 2**27 of them     512 MiB
    their probabilities and their gradient in bf16                          256 MiB each
    the sum of hidden's gradient in fp32, E * d * 4 bytes                   256 MiB at E = 32k, d = 2048
    targets: their indices in a block and its gradient, about 40 bytes each  80 MiB at 64 of E = 32k

At these sizes, the full fp32 logits of Qwen3 would take 18.5 GiB.

E edges, V vocabulary, d hidden size, B columns of a block, S targets.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

BLOCK_ELEMENTS = 2**27
COLUMN_MULTIPLE = 128  # keeps the rows of a block aligned for GEMMs; also the minimum width of a block
EMPTY = -1e30  # log-sum-exp of no logits; finite, so that 0 * EMPTY is 0
EMPTY_LOGIT = tl.constexpr(EMPTY)


def edge_logprobs(
    hidden: Tensor,
    weight: Tensor,
    label: Tensor,
    entropy: bool = False,
    recompute: bool = True,
    block_elements: int = BLOCK_ELEMENTS,
    cap: Tensor | None = None,
    support: Tensor | None = None,
    targets: Tensor | None = None,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Returns the log-probability of each edge's label, and on request entropies and more of them, in nats.

    Logits, log-probabilities and entropies are computed in fp32 for any inputs (in fp64 for fp64 inputs). The
    function is deterministic and differentiable once.

    Args:
        hidden: [E, d], hidden states of the tokens that predict; E may be 0.
        weight: [V, d] in hidden's dtype, the output projection, tied to the embedding or not.
        label: [E] int64 in 0 .. V-1. The caller must ensure the range, because a
            check would synchronize with the device.
        entropy: also return the entropy of each edge's distribution. The forward pass needs no further
            matrix multiplication for it.
        recompute: recompute the logits in the backward pass instead of keeping [E, V] probabilities. With
            ``entropy`` they are always recomputed, because its gradient needs unrounded probabilities.
        block_elements: upper bound of E * B; a block has at least ``COLUMN_MULTIPLE`` columns.
        cap: [E]; c tanh(s / c) replaces each logit s of an edge with the cap c (Gemma 2, arXiv:2408.00118),
            and logits are always recomputed. None: logits stay.
        support: [2, S] int64, pairs of an edge and a token id: an edge with pairs has the distribution over
            these ids alone, which must contain its label; an edge without pairs has the whole vocabulary
            (Keep Sampling Mask, arXiv:2512.02556, section 3.1). A block needs one byte more per logit.
        targets: [2, S] int64, different pairs of an edge and a token id within its support, whose
            log-probabilities are also returned.
    Returns:
        (logprobs [E], entropy [E] or None, log-probabilities of the targets [S] or None).
    """
    keep = torch.is_grad_enabled() and not recompute and not entropy and cap is None
    return _EdgeLogprobs.apply(hidden, weight, label, entropy, keep, block_elements, cap, support, targets)


class _EdgeLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        label: Tensor,
        entropy: bool,
        keep: bool,
        block_elements: int,
        cap: Tensor | None,
        support: Tensor | None,
        targets: Tensor | None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        accumulator = torch.promote_types(hidden.dtype, torch.float32)
        keep = keep and any(ctx.needs_input_grad[:2])
        lse = hidden.new_full((len(hidden),), EMPTY, dtype=accumulator)
        label_logit = torch.zeros_like(lse)
        entropies = torch.zeros_like(lse) if entropy else None
        target_logit = None if targets is None else lse.new_zeros(targets.shape[1])
        kept = []
        for start, end in vocabulary_blocks(weight, len(hidden), block_elements):
            logits = block_logits(hidden, weight[start:end], cap)
            remove_outside(logits, support, start)
            if targets is not None and target_logit is not None:
                inside, index = _target_index(targets, start, logits, 0)
                target_logit = torch.where(inside, logits.view(-1)[index], target_logit)
            p, block_lse, block_entropy = _softmax(
                logits, label - start, label_logit, hidden.dtype if keep else None, entropy
            )
            del logits
            new_lse = torch.logaddexp(lse, block_lse)
            if entropies is not None and block_entropy is not None:
                # Two parts with probability mass a and b and entropies H_a and H_b combine to
                # H = a (H_a - log a) + b (H_b - log b). No large logit is involved, so nothing cancels.
                log_a, log_b = lse - new_lse, block_lse - new_lse
                entropies = log_a.exp() * (entropies - log_a) + log_b.exp() * (block_entropy - log_b)
            lse = new_lse
            if keep:
                kept += [p, block_lse]
        logprobs = label_logit - lse
        of_targets = None
        if targets is not None and target_logit is not None:
            of_targets = target_logit - lse[targets[0]]
        ctx.save_for_backward(hidden, weight, label, lse, logprobs, entropies, of_targets, *kept)
        ctx.block_elements, ctx.cap, ctx.support, ctx.targets = block_elements, cap, support, targets
        ctx.set_materialize_grads(False)  # the gradient of an unused output is None
        return logprobs, entropies, of_targets

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_logprobs: Tensor | None, grad_entropy: Tensor | None, grad_targets: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        hidden, weight, label, lse, logprobs, entropies, of_targets, *kept = ctx.saved_tensors
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.zeros_like(hidden, dtype=lse.dtype) if needs_hidden else None
        grad_weight = torch.empty_like(weight) if needs_weight else None
        # The gradient of a sum has stride 0; the kernel needs it contiguous.
        grad_logprobs = torch.zeros_like(lse) if grad_logprobs is None else grad_logprobs.contiguous()
        grad_entropy = None if grad_entropy is None else grad_entropy.contiguous()
        targets = None if grad_targets is None else ctx.targets
        grad_rest = None
        if targets is not None and grad_targets is not None:
            edge, id = targets
            # Sums of the targets of each edge. The accumulation is deterministic, unlike that of index_add.
            grad_rest = torch.zeros_like(lse).index_put((edge,), grad_targets, accumulate=True)
            # The gradient of the targets' logits, without the rounding of the block's probabilities.
            target_p = of_targets.exp()
            at_target = grad_targets + torch.where(id == label[edge], grad_logprobs[edge], 0.0)
            at_target -= (grad_logprobs + grad_rest)[edge] * target_p
            if grad_entropy is not None:
                at_target -= grad_entropy[edge] * target_p * (of_targets + entropies[edge])
        # Of the probabilities. With a cap, the gradient is multiplied before it is rounded.
        dtype = hidden.dtype if grad_entropy is None and ctx.cap is None else lse.dtype
        for i, (start, end) in enumerate(vocabulary_blocks(weight, len(hidden), ctx.block_elements)):
            if kept:
                p, block_lse = kept[2 * i : 2 * i + 2]
            else:
                logits = block_logits(hidden, weight[start:end], ctx.cap)
                if ctx.cap is not None:
                    slope = 1 - (logits / ctx.cap[:, None]).square_()
                remove_outside(logits, ctx.support, start)
                p, block_lse, _ = _softmax(logits, label - start, None, dtype, False)
                del logits
            # The element behind the block takes the gradients of targets in other blocks.
            padded = p.new_empty(p.numel() + 1, dtype=hidden.dtype if ctx.cap is None else lse.dtype)
            grad = padded[:-1].view_as(p)
            _logit_gradient(
                p,
                label - start,
                block_lse - lse,
                logprobs,
                entropies,
                grad_logprobs,
                grad_rest,
                grad_entropy,
                out=grad,
            )
            if targets is not None:
                _, index = _target_index(targets, start, p, p.numel())
                padded[index] = at_target.to(padded.dtype)
            if ctx.cap is not None:
                grad = (grad * slope).to(hidden.dtype)
            if grad_weight is not None:
                torch.mm(grad.t(), hidden, out=grad_weight[start:end])
            if grad_hidden is not None:
                _add_matmul(grad_hidden, grad, weight[start:end])
            del p, grad, padded  # before the next block allocates
        if grad_hidden is not None:
            grad_hidden = grad_hidden.to(hidden.dtype)
        return grad_hidden, grad_weight, *[None] * 7


def vocabulary_blocks(weight: Tensor, num_edges: int, block_elements: int) -> Iterator[tuple[int, int]]:
    """Iterates over (start, end) of the blocks of columns.

    Args:
        weight, block_elements: see ``edge_logprobs``.
        num_edges: E.
    """
    columns = block_elements // max(num_edges, 1)
    columns = max(columns // COLUMN_MULTIPLE, 1) * COLUMN_MULTIPLE
    for start in range(0, len(weight), columns):
        yield start, min(start + columns, len(weight))


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Returns a @ b, accumulated in fp32 and returned in fp32 (fp64 for fp64)."""
    if a.dtype in (torch.float32, torch.float64):
        return a @ b
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()


def _add_matmul(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Adds a @ b to ``total`` in place, which is fp32 (fp64 for fp64)."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    elif a.is_cuda:
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(a.float(), b.float())


def _use_kernels(x: Tensor) -> bool:
    return x.is_cuda


def block_logits(hidden: Tensor, weight: Tensor, cap: Tensor | None) -> Tensor:
    """Returns the logits [E, B] of a block, in fp32 or wider.

    Args:
        hidden, cap: see ``edge_logprobs``.
        weight: [B, d].
    """
    logits = _matmul(hidden, weight.t())
    return logits if cap is None else logits.div_(cap[:, None]).tanh_().mul_(cap[:, None])


def remove_outside(logits: Tensor, support: Tensor | None, start: int) -> None:
    """Replaces logits outside the support by ``EMPTY`` in place, without waiting for the device.

    Args:
        logits: [E, B], a block.
        support: see ``edge_logprobs``.
        start: the token id of the block's first column.
    """
    if support is None:
        return
    edge, token = support
    num_edges, width = logits.shape
    is_outside = torch.zeros(num_edges, width + 1, dtype=torch.bool, device=logits.device)
    is_outside.index_fill_(0, edge, True)
    column = token - start
    column = torch.where((column >= 0) & (column < width), column, width)  # the last column is not read
    is_outside.view(-1).index_fill_(0, edge * (width + 1) + column, False)
    logits.masked_fill_(is_outside[:, :width], EMPTY)


def _target_index(targets: Tensor, start: int, block: Tensor, elsewhere: int) -> tuple[Tensor, Tensor]:
    """Returns which targets are in a block, [S] bool, and their indices in the flat block, [S] int64.

    Args:
        targets: see ``edge_logprobs``.
        start: the token id of the block's first column.
        block: [E, B].
        elsewhere: the index of targets in other blocks.
    """
    column, width = targets[1] - start, block.shape[1]
    inside = (column >= 0) & (column < width)
    return inside, torch.where(inside, targets[0] * width + column, elsewhere)


# Softmax of one block: one read of the logits, one write of the probabilities.


def _softmax(
    logits: Tensor,
    column: Tensor,
    label_logit: Tensor | None,
    dtype: torch.dtype | None,
    entropy: bool,
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    """Returns a block's (probabilities [E, B], log-sum-exp [E], entropy [E]).

    Args:
        logits: [E, B].
        column: [E], the label's column in this block; outside 0 .. B-1 if the label is in another block.
        label_logit: [E], overwritten in place for labels in this block; or None.
        dtype: dtype of the probabilities; None: return None instead of them.
        entropy: if False, return None instead of the entropy.
    """
    if not _use_kernels(logits):
        return _softmax_reference(logits, column, label_logit, dtype, entropy)
    p = torch.empty_like(logits, dtype=dtype) if dtype else None
    lse = logits.new_empty(len(logits))
    entropies = torch.empty_like(lse) if entropy else None
    with torch.cuda.device_of(logits):
        _softmax_kernel[(len(logits),)](
            logits, column, label_logit, p, lse, entropies, logits.shape[1], BLOCK=2048, num_warps=8
        )
    return p, lse, entropies


def _softmax_reference(
    logits: Tensor, column: Tensor, label_logit: Tensor | None, dtype: torch.dtype | None, entropy: bool
) -> tuple[Tensor | None, Tensor, Tensor | None]:
    lse = logits.logsumexp(1)
    log_p = logits - lse[:, None]
    p = log_p.exp()
    if label_logit is not None:
        inside = (column >= 0) & (column < logits.shape[1])
        label_logit[inside] = logits[inside, column[inside]]
    return None if dtype is None else p.to(dtype), lse, -(p * log_p).sum(1) if entropy else None


@triton.jit
def _softmax_kernel(
    logits_ptr, column_ptr, label_logit_ptr, p_ptr, lse_ptr, entropy_ptr, B, BLOCK: tl.constexpr
):  # fmt: skip
    """One program per row. The pointer to a result that is not wanted is None."""
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * B
    offset = tl.arange(0, BLOCK)
    peak = tl.full([BLOCK], EMPTY_LOGIT, logits_ptr.dtype.element_ty)
    total = tl.zeros([BLOCK], logits_ptr.dtype.element_ty)
    for first in range(0, B, BLOCK):  # every lane by itself, without a reduction
        x = tl.load(logits_ptr + first + offset, mask=first + offset < B, other=EMPTY_LOGIT)
        new_peak = tl.maximum(peak, x)
        total = total * tl.exp(peak - new_peak) + tl.exp(x - new_peak)
        peak = new_peak
    top = tl.max(peak, 0)
    lse = top + tl.log(tl.sum(total * tl.exp(peak - top), 0))
    tl.store(lse_ptr + row, lse)

    if label_logit_ptr is not None:
        column = tl.load(column_ptr + row)
        inside = (column >= 0) & (column < B)
        tl.store(label_logit_ptr + row, tl.load(logits_ptr + column, mask=inside), mask=inside)

    if p_ptr is not None or entropy_ptr is not None:  # the row once more, out of L2
        sums = tl.zeros([BLOCK], logits_ptr.dtype.element_ty)
        for first in range(0, B, BLOCK):
            mask = first + offset < B
            log_p = tl.load(logits_ptr + first + offset, mask=mask, other=EMPTY_LOGIT) - lse
            p = tl.exp(log_p)
            sums += p * log_p
            if p_ptr is not None:
                tl.store(p_ptr + row * B + first + offset, p.to(p_ptr.dtype.element_ty), mask=mask)
        if entropy_ptr is not None:
            tl.store(entropy_ptr + row, -tl.sum(sums, 0))


# Gradient of a block's logits: one read and one write.


def _logit_gradient(
    p: Tensor,
    column: Tensor,
    log_share: Tensor,
    logprobs: Tensor,
    entropies: Tensor | None,
    grad_logprobs: Tensor,
    grad_rest: Tensor | None,
    grad_entropy: Tensor | None,
    out: Tensor,
) -> None:
    """Writes the gradient [E, B] of the logits of a block whose own softmax is ``p`` to ``out``.

    d logprob / d logit_j = [j = label] - P_j and d H / d logit_j = -P_j (log P_j + H), where P_j is the
    block's p_j times exp(log_share). For the label, P_j is exp(logprob), because 1 - P_j needs an unrounded
    value. ``grad_rest`` [E] is the sum of the gradients of the edge's targets. It adds only their 2nd term.
    """
    if not _use_kernels(p):
        gradients = grad_logprobs, grad_rest, grad_entropy
        out.copy_(_logit_gradient_reference(p, column, log_share, logprobs, entropies, *gradients))
        return
    block = 2048
    with torch.cuda.device_of(p):
        _logit_gradient_kernel[(len(p), triton.cdiv(p.shape[1], block))](
            p, column, log_share, logprobs, entropies, grad_logprobs, grad_rest, grad_entropy, grad_ptr=out,
            B=p.shape[1], BLOCK=block, num_warps=4,
        )  # fmt: skip


def _logit_gradient_reference(
    p: Tensor,
    column: Tensor,
    log_share: Tensor,
    logprobs: Tensor,
    entropies: Tensor | None,
    grad_logprobs: Tensor,
    grad_rest: Tensor | None,
    grad_entropy: Tensor | None,
) -> Tensor:
    is_label = column[:, None] == torch.arange(p.shape[1], device=p.device)
    wide = torch.where(is_label, logprobs.exp()[:, None], p * log_share.exp()[:, None])
    grad = grad_logprobs[:, None] * (is_label.to(wide.dtype) - wide)
    if grad_rest is not None:
        grad = grad - grad_rest[:, None] * wide
    if entropies is not None and grad_entropy is not None:
        grad = grad - grad_entropy[:, None] * (wide.xlogy(wide) + wide * entropies[:, None])
    return grad


@triton.jit
def _logit_gradient_kernel(
    p_ptr, column_ptr, log_share_ptr, logprob_ptr, entropy_ptr, grad_logprob_ptr, grad_rest_ptr,
    grad_entropy_ptr, grad_ptr, B, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row and BLOCK columns."""
    row = tl.program_id(0).to(tl.int64)
    offset = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_label = offset == tl.load(column_ptr + row)
    label_p = tl.exp(tl.load(logprob_ptr + row))
    p = tl.load(p_ptr + row * B + offset, mask=offset < B, other=0.0)
    p = tl.where(is_label, label_p, p.to(label_p.dtype) * tl.exp(tl.load(log_share_ptr + row)))
    grad = tl.load(grad_logprob_ptr + row) * (is_label.to(p.dtype) - p)
    if grad_rest_ptr is not None:
        grad -= tl.load(grad_rest_ptr + row) * p
    if grad_entropy_ptr is not None:
        log_p = tl.log(tl.where(p > 0, p, 1.0))  # p log p is 0 at 0
        grad -= tl.load(grad_entropy_ptr + row) * p * (log_p + tl.load(entropy_ptr + row))
    tl.store(grad_ptr + row * B + offset, grad.to(grad_ptr.dtype.element_ty), mask=offset < B)
