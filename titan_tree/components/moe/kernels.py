"""SwiGLU with a weight per row, and sums of gathered rows: Triton kernels on GPUs, plain PyTorch elsewhere.

Both compute in fp32, and in float64 for float64. Only PyTorch computes float64, also on a GPU.

n rows, m hidden size of an expert, d width of a row, w rows per sum.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024  # columns per program of ``sum_rows``


def swiglu(h: Tensor, scale: Tensor) -> Tensor:
    """Returns silu(gate) * up * scale, [n, m] in h's dtype.

    Args:
        h: [n, 2 m], in each row gate and then up.
        scale: [n, 1] fp32, or float64 if h is.
    """
    if not _use_kernels(h):
        gate, up = h.to(scale.dtype).chunk(2, dim=1)
        return (F.silu(gate) * up * scale).to(h.dtype)
    hidden = h.new_empty(len(h), h.shape[1] // 2)
    if len(h):
        _swiglu_kernel[(len(h),)](h, scale, hidden, *_columns(hidden))
    return hidden


def swiglu_backward(h: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the result of ``swiglu``, and for its gradient [n, m] those of h and of scale."""
    if not _use_kernels(h):
        gate, up = h.to(scale.dtype).chunk(2, dim=1)
        sigmoid, silu, wide = gate.sigmoid(), F.silu(gate), grad.to(scale.dtype)
        d_gate = wide * scale * up * sigmoid * (1 + gate * (1 - sigmoid))
        dh = torch.cat([d_gate, wide * scale * silu], 1)
        return (silu * up * scale).to(h.dtype), dh.to(h.dtype), (wide * silu * up).sum(1, keepdim=True)
    hidden, dh, dscale = torch.empty_like(grad), torch.empty_like(h), torch.empty_like(scale)
    if len(h):
        _swiglu_backward_kernel[(len(h),)](h, scale, grad, hidden, dh, dscale, *_columns(hidden))
    return hidden, dh, dscale


def sum_rows(x: Tensor, index: Tensor) -> Tensor:
    """Returns [n, d]: the sums of the rows that ``index`` names, added from left to right.

    Args:
        x: [any, d].
        index: [n, w] int32, rows of x; -1 adds nothing.
    """
    if _use_kernels(x):
        out = x.new_empty(len(index), x.shape[1])
        if len(index):
            grid = (len(index), triton.cdiv(x.shape[1], BLOCK))
            _sum_rows_kernel[grid](x, index, out, x.shape[1], index.shape[1], BLOCK)
        return out
    total = x.new_zeros(len(index), x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    for rows in index.unbind(1):
        (named,) = (rows >= 0).nonzero(as_tuple=True)
        total[named] += x[rows[named]]
    return total.to(x.dtype)


def _use_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


def _columns(hidden: Tensor) -> tuple[int, int]:
    return hidden.shape[1], triton.next_power_of_2(hidden.shape[1])


@triton.jit
def _load_row(h, scale, M: tl.constexpr, BLOCK: tl.constexpr):
    """The row of a program: its number, its columns, their mask, gate, up and scale."""
    row = tl.program_id(0).to(tl.int64)  # row * M overflows int32
    column = tl.arange(0, BLOCK)
    mask = column < M
    gate = tl.load(h + row * 2 * M + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(h + row * 2 * M + M + column, mask=mask, other=0.0).to(tl.float32)
    return row, column, mask, gate, up, tl.load(scale + row)


@triton.jit
def _swiglu_kernel(h, scale, hidden, M: tl.constexpr, BLOCK: tl.constexpr):
    row, column, mask, gate, up, weight = _load_row(h, scale, M, BLOCK)
    value = gate * tl.sigmoid(gate) * up * weight
    tl.store(hidden + row * M + column, value.to(hidden.dtype.element_ty), mask=mask)


@triton.jit
def _swiglu_backward_kernel(h, scale, grad, hidden, dh, dscale, M: tl.constexpr, BLOCK: tl.constexpr):
    row, column, mask, gate, up, weight = _load_row(h, scale, M, BLOCK)
    g = tl.load(grad + row * M + column, mask=mask, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    d_gate = g * weight * up * sigmoid * (1 + gate * (1 - sigmoid))
    tl.store(hidden + row * M + column, (silu * up * weight).to(hidden.dtype.element_ty), mask=mask)
    tl.store(dh + row * 2 * M + column, d_gate.to(dh.dtype.element_ty), mask=mask)
    tl.store(dh + row * 2 * M + M + column, (g * weight * silu).to(dh.dtype.element_ty), mask=mask)
    tl.store(dscale + row, tl.sum(g * silu * up, 0))


@triton.jit
def _sum_rows_kernel(x, index, out, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < D
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(WIDTH):
        source = tl.load(index + row * WIDTH + j).to(tl.int64)
        is_row = tl.where(source >= 0, mask, False)  # triton 3.9's interpreter cannot load with mask & scalar
        total += tl.load(x + source * D + column, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + row * D + column, total.to(out.dtype.element_ty), mask=mask)
