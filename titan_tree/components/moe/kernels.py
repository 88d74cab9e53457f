"""The router's logits, weighted SwiGLU, copies of rows, their sums, and the largest numbers of rows.

Triton kernels compute all but the logits on a GPU, and PyTorch on a CPU, or if they have float64. Sums and
SwiGLU are computed in fp32 or wider. All are operators, which torch.compile does not trace. Only
``router_logits`` is differentiable.

N tokens, E experts, d hidden size, n rows, m hidden size of an expert, w copies of a row.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_tree.components.operators import as_operator

BLOCK = 1024  # columns per program of ``copy_rows`` and ``sum_rows``


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Returns the router's logits, x times the transpose of weight, [N, E] in fp32 or wider. Differentiable.

    If x and the weight are bf16, a GPU computes them with tensor cores, and not with TF32, which would round
    its inputs. Products of two bf16 numbers are exact in fp32. Tensor cores round their sums less precisely:
    with d = 2048, an H100's relative error was 2e-6, and that of fp32 arithmetic 2e-7.

    The gradient of the logits has 24 significant bits. The backward pass splits it into two bf16 numbers,
    which keep 16 bits or more. Its results are rounded to bf16, which keeps 8.

    Args:
        x: [N, d].
        weight: [E, d], any dtype.
    """
    if x.dtype == weight.dtype == torch.bfloat16:
        return _Logits.apply(x, weight)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide))


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return bf16_product(x, weight.t(), torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        # The upper 16 bits of an fp32 number are a bf16 number. With ``grad.bfloat16()``, a compiled kernel
        # would continue with the unrounded number, and the difference would be 0.
        high = (grad.view(torch.int32) & -65536).view(torch.float32)
        parts = torch.cat([high, grad - high], 1).bfloat16()
        dx = bf16_product(parts, weight.repeat(2, 1), x.dtype)
        if not ctx.needs_input_grad[1]:
            return dx, None
        dweight = bf16_product(parts.t(), x, torch.float32)
        return dx, dweight.view(2, *weight.shape).sum(0).to(weight.dtype)


@as_operator
def bf16_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the product of two bf16 matrices, summed in fp32, in bf16 or fp32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return (a.float() @ b.float()).to(dtype)


@as_operator
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
    _launch_swiglu(_swiglu_kernel, h, scale, hidden)
    return hidden


@as_operator
def swiglu_backward(h: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the result of ``swiglu``, and for its gradient [n, m] those of h and of scale."""
    if not _use_kernels(h):
        gate, up = h.to(scale.dtype).chunk(2, dim=1)
        sigmoid, silu, wide = gate.sigmoid(), F.silu(gate), grad.to(scale.dtype)
        d_gate = wide * scale * up * sigmoid * (1 + gate * (1 - sigmoid))
        dh = torch.cat([d_gate, wide * scale * silu], 1)
        return (silu * up * scale).to(h.dtype), dh.to(h.dtype), (wide * silu * up).sum(1, keepdim=True)
    hidden, dh, dscale = (t.new_empty(t.shape) for t in (grad, h, scale))
    _launch_swiglu(_swiglu_backward_kernel, h, scale, grad, hidden, dh, dscale)
    return hidden, dh, dscale


@as_operator
def copy_rows(x: Tensor, index: Tensor, num_rows: int) -> Tensor:
    """Returns [num_rows, d]: row i of x at each of the rows ``index[i]``. The transpose of ``sum_rows``.

    Args:
        x: [n, d].
        index: [n, w] integers that name each of the rows once; -1 names none.
    """
    out = x.new_empty(num_rows, x.shape[1])
    write_copies(x, index, out)
    return out


def write_copies(x: Tensor, index: Tensor, out: Tensor) -> None:
    """Writes row i of x to each of the rows ``index[i]`` of out; -1 names none."""
    if _use_kernels(x):
        _launch_rows(_copy_rows_kernel, x, index, out)
        return
    is_named = index >= 0
    out[index[is_named].long()] = x[is_named.nonzero()[:, 0]]


@as_operator
def sum_rows(x: Tensor, index: Tensor) -> Tensor:
    """Returns [n, d]: the sums of the rows that ``index`` names, added from left to right.

    Args:
        x: [any, d].
        index: [n, w] integers, rows of x; -1 adds nothing.
    """
    out = x.new_empty(len(index), x.shape[1])
    write_sums(x, index, out)
    return out


def write_sums(x: Tensor, index: Tensor, out: Tensor) -> None:
    """Writes what ``sum_rows`` returns to out."""
    if _use_kernels(x):
        _launch_rows(_sum_rows_kernel, x, index, out)
        return
    total = x.new_zeros(len(index), x.shape[1], dtype=torch.promote_types(x.dtype, torch.float32))
    padded = F.pad(x, (0, 0, 0, 1))  # the row -1 is 0
    for rows in index.unbind(1):
        total += padded[rows]
    out.copy_(total)


@as_operator
def top_k(x: Tensor, k: int) -> Tensor:
    """Returns the columns of the k largest values in each row of x [N, E], largest first: [N, k] int64.

    In fp32 on a GPU, the first of equal values comes first.
    """
    if not _use_kernels(x):
        return x.topk(k, dim=-1).indices
    num_rows, num_columns = x.shape
    out = torch.empty(num_rows, k, dtype=torch.int64, device=x.device)
    block = triton.next_power_of_2(num_columns)
    rows = max(2048 // block, 1)  # per program
    if num_rows:
        with torch.cuda.device_of(x):
            _top_k_kernel[(triton.cdiv(num_rows, rows),)](
                x.contiguous(), out, num_rows, E=num_columns, K=k, ROWS=rows, BLOCK=block
            )
    return out


@torch.library.register_fake("titan_tree::bf16_product")
def _(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)


@torch.library.register_fake("titan_tree::swiglu")
def _(h: Tensor, scale: Tensor) -> Tensor:
    return h.new_empty(h.shape[0], h.shape[1] // 2)


@torch.library.register_fake("titan_tree::swiglu_backward")
def _(h: Tensor, scale: Tensor, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return grad.new_empty(grad.shape), h.new_empty(h.shape), scale.new_empty(scale.shape)


@torch.library.register_fake("titan_tree::copy_rows")
def _(x: Tensor, index: Tensor, num_rows: int) -> Tensor:
    return x.new_empty(num_rows, x.shape[1])


@torch.library.register_fake("titan_tree::sum_rows")
def _(x: Tensor, index: Tensor) -> Tensor:
    return x.new_empty(index.shape[0], x.shape[1])


@torch.library.register_fake("titan_tree::top_k")
def _(x: Tensor, k: int) -> Tensor:
    return x.new_empty(x.shape[0], k, dtype=torch.int64)


def _use_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


def _launch_swiglu(kernel: Any, h: Tensor, *tensors: Tensor) -> None:
    """Launches one program per row."""
    m = h.shape[1] // 2
    if len(h):
        with torch.cuda.device_of(h):
            inputs = (t.contiguous() for t in (h, *tensors))
            kernel[(len(h),)](*inputs, M=m, BLOCK=triton.next_power_of_2(m))


def _launch_rows(kernel: Any, x: Tensor, index: Tensor, out: Tensor) -> None:
    """Launches one program for BLOCK columns of each row of ``index``."""
    d = x.shape[1]
    if len(index):
        with torch.cuda.device_of(x):
            kernel[(len(index) * triton.cdiv(d, BLOCK),)](
                x.contiguous(), index.contiguous(), out, D=d, WIDTH=index.shape[1], BLOCK=BLOCK
            )


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
def _block_of_row(D: tl.constexpr, BLOCK: tl.constexpr):
    """The row of a program, its columns and their mask."""
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    row = (tl.program_id(0) // blocks).to(tl.int64)  # row * D overflows int32
    column = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    return row, column, column < D


@triton.jit
def _copy_rows_kernel(x, index, out, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, column, mask = _block_of_row(D, BLOCK)
    value = tl.load(x + row * D + column, mask=mask)
    for j in tl.static_range(WIDTH):
        target = tl.load(index + row * WIDTH + j).to(tl.int64)
        is_row = tl.where(target >= 0, mask, False)  # triton 3.9's interpreter cannot use mask & scalar
        tl.store(out + target * D + column, value, mask=is_row)


@triton.jit
def _sum_rows_kernel(x, index, out, D: tl.constexpr, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    row, column, mask = _block_of_row(D, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(WIDTH):
        source = tl.load(index + row * WIDTH + j).to(tl.int64)
        is_row = tl.where(source >= 0, mask, False)
        total += tl.load(x + source * D + column, mask=is_row, other=0.0).to(tl.float32)
    tl.store(out + row * D + column, total.to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["N"])
def _top_k_kernel(x, out, N, E: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < N)[:, None] & (column < E)
    value = tl.load(x + row[:, None].to(tl.int64) * E + column, mask=mask, other=0.0)
    # The upper half of a key is an integer in the order of the numbers, and the lower half makes it unique.
    bits = (value + 0.0).to(tl.int32, bitcast=True)  # -0.0 + 0.0 is 0.0
    key = (bits ^ (bits >> 31 & 0x7FFFFFFF)).to(tl.int64) * 4294967296 + (BLOCK - 1 - column)
    key = tl.where(mask, key, -9223372036854775808)
    for j in tl.static_range(K):
        largest = tl.max(key, 1)
        place = row.to(tl.int64) * K + j
        tl.store(out + place, BLOCK - 1 - (largest & 4294967295), mask=row < N)
        key = tl.where(key == largest[:, None], -9223372036854775808, key)
