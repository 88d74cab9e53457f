"""Keys and values of a partition: those of ancestors (the context) and those of its own tokens.

The context has R rows and the partition N tokens. ``source`` gives each of the M key columns, in DFS order,
its row: r < R names row r of the context, R + i the own token i.

In the operator (``operator.py``), the M columns exist only while attention computes. The backward pass
gathers them again, so a partition keeps no copy of its ancestors' keys and values. Backends without the
operator call ``join``, whose result autograd keeps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def join(k: Tensor, v: Tensor, context: Tensor | None, source: Tensor | None) -> tuple[Tensor, Tensor]:
    """Returns keys and values [M, Hkv, D] from own k, v [N, Hkv, D] and a context [R, 2, Hkv, D].

    It is differentiable. Without a context, k and v already are the columns.
    """
    if context is None or source is None:
        return k, v
    joined = (torch.cat([old, own]) for old, own in zip(context.unbind(1), (k, v), strict=True))
    k, v = (x.index_select(0, source) for x in joined)
    return k, v


def gather(k: Tensor, v: Tensor, context: Tensor, source: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the columns of ``join`` in one pass over memory, for contiguous tensors, without autograd."""
    columns = k.new_empty(len(source), *k.shape[1:]), v.new_empty(len(source), *v.shape[1:])
    _move(source, context, k, v, *columns, to_columns=True)
    return columns


def scatter(
    dk: Tensor, dv: Tensor, context: Tensor, source: Tensor, num_own: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of own k and v [num_own, Hkv, D] and of the context, from those of the M columns.

    ``source`` must name every own token and no row twice.
    """
    of_own_tokens = dk.new_empty(num_own, *dk.shape[1:]), dv.new_empty(num_own, *dv.shape[1:])
    dcontext = torch.zeros_like(context)
    _move(source, dcontext, *of_own_tokens, dk, dv, to_columns=False)
    return *of_own_tokens, dcontext


def add_gradient(total: Tensor, gradient: Tensor) -> None:
    """Adds ``gradient`` to ``total`` in place; both are contiguous.

    For tensors of different dtypes, torch's own addition reaches half of a GPU's bandwidth.
    """
    if total.device.type != "cuda":
        total += gradient
        return
    with torch.cuda.device_of(total):
        _add_kernel[(triton.cdiv(total.numel(), _ADDED),)](total, gradient, total.numel(), _ADDED)


_ADDED = 4096  # elements per program


@triton.jit
def _add_kernel(total, gradient, size, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = i < size
    x = tl.load(gradient + i, mask=mask).to(total.dtype.element_ty)
    tl.store(total + i, tl.load(total + i, mask=mask) + x, mask=mask)


def _move(
    source: Tensor, context: Tensor, own_k: Tensor, own_v: Tensor, k: Tensor, v: Tensor, to_columns: bool
) -> None:
    size = k.shape[1] * k.shape[2]
    grid = (len(source),)
    block = 1 << (size - 1).bit_length()  # the next power of two
    _move_kernel[grid](
        source, context, own_k, own_v, k, v,
        num_context=len(context), SIZE=size, BLOCK=block, TO_COLUMNS=to_columns,
    )  # fmt: skip


@triton.jit
def _move_kernel(
    source, context, own_k, own_v, k, v, num_context, SIZE: tl.constexpr, BLOCK: tl.constexpr,
    TO_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Each program copies one key and its value, SIZE elements each, from its row to its column or back."""
    column = tl.program_id(0).to(tl.int64)
    element = tl.arange(0, BLOCK)
    mask = element < SIZE
    row = tl.load(source + column)
    if row < num_context:
        key_row, value_row = context + 2 * row * SIZE, context + (2 * row + 1) * SIZE
    else:
        key_row, value_row = own_k + (row - num_context) * SIZE, own_v + (row - num_context) * SIZE
    key_column, value_column = k + column * SIZE, v + column * SIZE
    if TO_COLUMNS:
        tl.store(key_column + element, tl.load(key_row + element, mask=mask), mask=mask)
        tl.store(value_column + element, tl.load(value_row + element, mask=mask), mask=mask)
    else:
        tl.store(key_row + element, tl.load(key_column + element, mask=mask), mask=mask)
        tl.store(value_row + element, tl.load(value_column + element, mask=mask), mask=mask)
