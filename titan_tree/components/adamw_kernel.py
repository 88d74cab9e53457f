"""adamw_: updates tensors by AdamW, also with 8-bit moments: one Triton kernel on a GPU, else plain PyTorch.

The update runs in fp32 (AdamW: arXiv:1711.05101; 8-bit moments: Dettmers et al., arXiv:2110.02861). A moment
is dequantized, updated, used, and quantized again. The kernel reads and writes each number once. It divides
the gradient by its scale and can skip the update, both by values on the device, so the host never waits.

A block of 256 numbers has one scale, its largest magnitude. Divided by it, each number is replaced by the
index of the nearest of 256 values in a table, its code. The table of first moments spans -1 to 1, that of
second moments 0 to 1. It divides each decade of magnitudes, from 10^(i-7) to 10^(i-6) for i = 0 .. 6, into
n_i equal bins: 2^i for first moments, 2^(i+1) for second moments. The values are the centers of the bins,
their negatives in the table of first moments, and 0 and 1.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256  # numbers per scale
BLOCKS = 4  # per program of the kernel: each of its warps has one block, and each thread 8 numbers
MIN_SCALE = tl.constexpr(1e-12)  # of a block of zeros


class Moment(NamedTuple):
    """A moment of a tensor: quantized, or without scale and table in the dtype of ``values``."""

    values: Tensor  # codes (uint8) or numbers, in the shape of the tensor
    scale: Tensor | None = None  # [blocks] fp32
    table: Tensor | None = None  # [256] fp32, ascending


def adamw_(
    weights: Sequence[Tensor],
    grads: Sequence[Tensor],
    firsts: Sequence[Moment],
    seconds: Sequence[Moment],
    scalars: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
) -> None:
    """Updates n weights and their moments in place: m = first, v = second moment, t = number of this step.

        m += (1 - beta1) (g - m);  v += (1 - beta2) (g^2 - v);  w *= 1 - lr weight_decay
        w -= lr m / (1 - beta1^t) / (sqrt(v) / sqrt(1 - beta2^t) + eps)

    Args:
        weights: contiguous, bf16 or fp32, on one device. If moments of a weight are quantized, its size is a
            multiple of ``BLOCK``.
        grads: gradients times the divisors in ``scalars``, in the shapes of the weights, bf16 or fp32.
        firsts: the first moments. Each is quantized if and only if the second one is.
        seconds: the second moments.
        scalars: [n, 4] fp32 on the weights' device, for each weight: 1 - beta1^t, sqrt(1 - beta2^t), the
            divisor of the gradient, and 1 to skip the update or 0.
    """
    assert all(weight.is_contiguous() for weight in weights)
    update = _launch if weights[0].is_cuda else _update
    grads, decay = [grad.contiguous() for grad in grads], lr * weight_decay
    update(weights, grads, firsts, seconds, scalars, lr=lr, betas=betas, eps=eps, decay=decay)


def _update(
    weights: Sequence[Tensor], grads: Sequence[Tensor], firsts: Sequence[Moment], seconds: Sequence[Moment],
    scalars: Tensor, *, lr: float, betas: tuple[float, float], eps: float, decay: float,
) -> None:  # fmt: skip
    """Runs ``adamw_`` in plain PyTorch. ``decay``: lr * weight_decay."""
    rows = zip(weights, grads, firsts, seconds, scalars.tolist(), strict=True)
    for weight, grad, first, second, (correction1, root_correction2, divisor, skip) in rows:
        if skip or not weight.numel():
            continue
        w, g = weight.float(), grad.float() / divisor
        m = _read(first).lerp(g, 1 - betas[0])
        v = _read(second).lerp(g.square(), 1 - betas[1])
        w = w - decay * w
        weight.copy_(w - (lr / correction1) * m / (v.sqrt() / root_correction2 + eps))
        _write(first, m)
        _write(second, v)


def _read(moment: Moment) -> Tensor:
    """Returns the numbers of a moment in fp32."""
    if moment.scale is None or moment.table is None:
        return moment.values.float()
    blocks = moment.table[moment.values.view(-1, BLOCK).int()] * moment.scale[:, None]
    return blocks.view_as(moment.values)


def _write(moment: Moment, x: Tensor) -> None:
    """Replaces the numbers of a moment by ``x``, which is fp32."""
    if moment.scale is None or moment.table is None:
        moment.values.copy_(x)
        return
    blocks = x.view(-1, BLOCK)
    moment.scale.copy_(blocks.abs().amax(1).clamp_min(MIN_SCALE.value))
    halfway = (moment.table[1:] + moment.table[:-1]) / 2
    codes = torch.bucketize(blocks / moment.scale[:, None], halfway, right=True)
    moment.values.copy_(codes.view_as(x))


def _launch(
    weights: Sequence[Tensor], grads: Sequence[Tensor], firsts: Sequence[Moment], seconds: Sequence[Moment],
    scalars: Tensor, *, lr: float, betas: tuple[float, float], eps: float, decay: float,
) -> None:  # fmt: skip
    """Runs ``adamw_`` in the kernel, which is launched once per kind of weight. ``decay``: lr * weight_decay.

    A weight has programs of its own, and a row of the table, which tells them what to update.
    """
    columns: Any = weights, grads, *zip(*firsts, strict=True), *zip(*seconds, strict=True)
    addresses = [[0 if x is None else x.data_ptr() for x in column] for column in columns]
    table = np.stack([[weight.numel() for weight in weights], *addresses], axis=1)
    is_aligned = (table % 16 == 0).all(1).tolist()
    kinds: dict[tuple[Any, ...], list[int]] = defaultdict(list)
    for i, (weight, grad, values, aligned) in enumerate(zip(*columns[:3], is_aligned, strict=True)):
        kinds[weight.dtype, grad.dtype, values.dtype, aligned].append(i)
    for kind, members in kinds.items():
        programs = -(-table[members, 0] // (BLOCKS * BLOCK))
        rows = np.column_stack([programs.cumsum() - programs, members, table[members]])
        on_host = torch.from_numpy(rows)
        if scalars.is_cuda:
            on_host = on_host.pin_memory()  # the host does not wait for the copy
        on_device = on_host.to(scalars.device, non_blocking=True)
        program = torch.arange(int(programs.sum()), device=scalars.device)
        owner = torch.searchsorted(on_device[:, 0].contiguous(), program, right=True, out_int32=True) - 1
        like = (tensors[members[0]] for tensors in columns[:3])
        _adamw_kernel[(len(program),)](
            on_device, owner, scalars, *like, lr, 1 - betas[0], 1 - betas[1], eps, decay,
            rows.shape[1], kind[-1], BLOCK, BLOCKS, num_warps=BLOCKS,
        )  # fmt: skip


@triton.jit
def _adamw_kernel(
    table, owner, scalars, like_weight, like_grad, like_moment, lr, share1, share2, eps, decay,
    COLUMNS: tl.constexpr, IS_ALIGNED: tl.constexpr, BLOCK: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Updates ``BLOCKS`` blocks of a weight.

    table: [n, COLUMNS] int64. A row holds the first program of a weight, its index in ``scalars``, its size,
        and the addresses of weight, gradient, first and second ``Moment``: 0 for parts that are None.
    owner: [programs] int32: the row of each program's weight.
    like_weight, like_grad, like_moment: pointers of the types of weights, gradients and values of moments.
    share1, share2: 1 - beta1 and 1 - beta2.
    IS_ALIGNED: whether sizes and addresses are multiples of 16.
    """
    row = table + tl.load(owner + tl.program_id(0)) * COLUMNS
    scalars += tl.load(row + 1) * 4
    if tl.load(scalars + 3) != 0:
        return
    size = _load(row + 2, tl.int64, IS_ALIGNED)  # may exceed int32
    weight = _load(row + 3, like_weight.dtype, IS_ALIGNED)
    grad = _load(row + 4, like_grad.dtype, IS_ALIGNED)
    first = _load(row + 5, like_moment.dtype, IS_ALIGNED)
    first_scale = _load(row + 6, scalars.dtype, IS_ALIGNED)
    first_table = _load(row + 7, scalars.dtype, IS_ALIGNED)
    second = _load(row + 8, like_moment.dtype, IS_ALIGNED)
    second_scale = _load(row + 9, scalars.dtype, IS_ALIGNED)
    second_table = _load(row + 10, scalars.dtype, IS_ALIGNED)
    block = (tl.program_id(0) - tl.load(row)) * BLOCKS + tl.arange(0, BLOCKS)
    start = block * BLOCK
    offset = start[:, None] + tl.arange(0, BLOCK)[None, :]
    mask, block_mask = offset < size, start < size
    m = _read_moment(first, first_scale, first_table, block, offset, mask, block_mask)
    v = _read_moment(second, second_scale, second_table, block, offset, mask, block_mask)
    g = tl.load(grad + offset, mask=mask, other=0.0).to(tl.float32) * (1 / tl.load(scalars + 2))
    w = tl.load(weight + offset, mask=mask, other=0.0).to(tl.float32)
    m += share1 * (g - m)
    v += share2 * (g * g - v)
    w -= decay * w
    w -= lr / tl.load(scalars) * m / (tl.sqrt(v) * (1 / tl.load(scalars + 1)) + eps)
    tl.store(weight + offset, w.to(weight.dtype.element_ty), mask=mask)
    _write_moment(first, first_scale, m, block, offset, mask, block_mask, 1)
    _write_moment(second, second_scale, v, block, offset, mask, block_mask, 2)


@triton.jit
def _load(address, dtype: tl.constexpr, IS_ALIGNED: tl.constexpr):
    """Returns a size or a pointer. If it is a multiple of 16, a thread loads several numbers at once."""
    value = tl.load(address).to(dtype)
    return tl.multiple_of(value, 16) if IS_ALIGNED else value


@triton.jit
def _read_moment(values, scale, table, block, offset, mask, block_mask):
    x = tl.load(values + offset, mask=mask, other=0)
    if values.dtype.element_ty == tl.uint8:
        x = tl.load(table + x.to(tl.int32)) * tl.load(scale + block, mask=block_mask, other=0.0)[:, None]
    return x.to(tl.float32)


@triton.jit
def _write_moment(values, scale, x, block, offset, mask, block_mask, BINS: tl.constexpr):
    """BINS: of the lowest decade."""
    if values.dtype.element_ty == tl.uint8:
        largest = tl.maximum(tl.max(tl.abs(x), 1), MIN_SCALE)
        tl.store(scale + block, largest, mask=block_mask)
        x = _codes(x * (1 / largest)[:, None], BINS)
    tl.store(values + offset, x.to(values.dtype.element_ty), mask=mask)


@triton.jit
def _codes(x, BINS: tl.constexpr):
    """The codes of numbers between -1 and 1, computed without the table.

    Let y(|x|) be n_i at the lower end of decade i, and grow by 1 per bin. It is linear within a decade, and
    continuous because n_(i+1) = 2 n_i. Its slope falls from decade to decade, so y is the minimum of seven
    lines. Bin b holds the y from b to b + 1, and its center is nearest, with exceptions next to values whose
    distance is not one bin: the lowest bin of a decade starts 0.2 higher, and the lowest bin of all, next to
    the value 0, even less so. The value 1 is nearest from 0.25 below the upper end.
    """
    magnitude = tl.abs(x)
    slope: tl.constexpr = BINS * 1e6 / 0.9
    y = slope * magnitude + BINS * 8 / 9
    for i in tl.static_range(1, 7):
        y = tl.minimum(y, slope * 0.2**i * magnitude + BINS * 2**i * 8 / 9)
    code = y.to(tl.int32)  # rounds down
    next_to_gap = tl.where(code == BINS, 0.25 - BINS / 18, 0.2) > y - code
    code -= ((code & (code - 1)) == 0) & next_to_gap
    code = tl.where(y > BINS * 128 - 0.25, BINS * 128, code)
    if BINS == 2:
        return code - 1  # 0 is the first value
    return tl.where(x < 0, 127 - tl.minimum(code, 127), 127 + code)  # -1 is not in the table
