"""TreeAttention in Triton: triton_kernels kernels for the interval mask, forward and backward.

Query-stationary passes walk their list of visible key blocks (``plan``): a loop with a mask over the partly
visible ones, then one without. The key-stationary pass walks its range of queries.

The algorithm is FlashAttention-2 (Dao, arXiv:2307.08691): scores in base 2 with a running row maximum,
``lse`` saved for the backward, dk/dv and dq in passes of their own, so every sum has a fixed order and
the gradients are deterministic.

Letters: N queries, M keys, H query heads, G = H / Hkv heads a key head serves, D head dim.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_tree.components.tree_attention.plan import KEYS, QUERIES, Plan
from titan_tree.errors import UserError

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(1 / LOG2_E.value)
# Finite, so that a row without a live key yet gives exp2(0), not NaN; its garbage is multiplied by
# exp2(MASKED - max) = 0 when the first live key arrives, and every query sees at least itself. A power of
# two, so that MASKED * scale is exact and the fused multiply-add of exp2(s * scale - peak) gives 0.
MASKED = tl.constexpr(-(2.0**100))


# 1. Forward: one program per (query block, head). Heads of one key head run side by side, so that its
#    keys and values are read from L2.


@triton.jit
def _forward_block(
    q, peak, total, acc, column, k_rows, v_rows, head_column, end_ptr, row, M, scale,
    BLOCK_K: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k = k_rows.load([row, head_column])
    s = tl.dot(q, k.T, input_precision=PRECISION)
    if MASK:
        key = row + tl.arange(0, BLOCK_K)
        end = tl.load(end_ptr + key, mask=key < M, other=0)
        visible = (key[None, :] <= column[:, None]) & (column[:, None] < end[None, :])
        s = tl.where(visible, s, MASKED)
    new_peak = tl.maximum(peak, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(p, 1)
    v = v_rows.load([row, head_column])
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return new_peak, total, acc


@triton.jit(do_not_specialize=["N", "M", "nk", "lse_stride"])
def _forward_kernel(
    q_rows, k_rows, v_rows, o_rows, lse_ptr, end_ptr, column_ptr, blocks_ptr, partial_ptr,
    visible_ptr, order_ptr, N, M, nk, lse_stride, scale,
    G: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    Q_SPLIT: tl.constexpr, K_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    index, head_k = tl.program_id(0), tl.program_id(1)
    head = head_k * G + index % G
    tile = tl.load(order_ptr + index // G // Q_SPLIT)
    row_q = tile * (BLOCK_Q * Q_SPLIT) + index // G % Q_SPLIT * BLOCK_Q

    rows = row_q + tl.arange(0, BLOCK_Q)
    column = tl.load(column_ptr + rows, mask=rows < N, other=0)
    q = q_rows.load([row_q, head * D])
    peak = tl.full([BLOCK_Q], MASKED, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    acc = tl.zeros([BLOCK_Q, D], tl.float32)
    scale *= LOG2_E

    list_ptr = blocks_ptr + tile.to(tl.int64) * nk
    n_partial = tl.load(partial_ptr + tile) * K_SPLIT
    n_blocks = tl.load(visible_ptr + tile) * K_SPLIT
    for i in range(n_partial):
        row = (tl.load(list_ptr + i // K_SPLIT) * K_SPLIT + i % K_SPLIT) * BLOCK_K
        peak, total, acc = _forward_block(
            q, peak, total, acc, column, k_rows, v_rows, head_k * D, end_ptr, row, M, scale,
            BLOCK_K, True, PRECISION,
        )  # fmt: skip
    for i in range(n_partial, n_blocks):
        row = (tl.load(list_ptr + i // K_SPLIT) * K_SPLIT + i % K_SPLIT) * BLOCK_K
        peak, total, acc = _forward_block(
            q, peak, total, acc, column, k_rows, v_rows, head_k * D, end_ptr, row, M, scale,
            BLOCK_K, False, PRECISION,
        )  # fmt: skip

    o_rows.store([row_q, head * D], (acc / total[:, None]).to(q.dtype))
    lse = tl.where(rows < N, peak + tl.log2(total), float("inf"))
    tl.store(lse_ptr + head.to(tl.int64) * lse_stride + rows, lse)


# 2. Backward. With P = exp(S - lse), dP = dO V^T, delta = rowsum(O * dO) and dS = P * (dP - delta):
#    dV = P^T dO, dK = scale * dS^T Q, dQ = scale * dS K.


@triton.jit(do_not_specialize=["lse_stride"])
def _delta_kernel(
    o_rows, do_rows, delta_ptr, lse_stride, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) * BLOCK, tl.program_id(1)
    rows = row + tl.arange(0, BLOCK)
    o, do = o_rows.load([row, head * D]), do_rows.load([row, head * D])
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + head.to(tl.int64) * lse_stride + rows, delta)


@triton.jit
def _dkdv_block(
    dk, dv, k, v, key, end, q_rows, do_rows, head_column, lse_ptr, delta_ptr, column_ptr, row, N, scale,
    BLOCK_Q: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    rows = row + tl.arange(0, BLOCK_Q)
    q, do = q_rows.load([row, head_column]), do_rows.load([row, head_column])
    if MASK:  # rows past N: no key is visible to column -1
        lse = tl.load(lse_ptr + rows, mask=rows < N, other=0.0)
        delta = tl.load(delta_ptr + rows, mask=rows < N, other=0.0)
        column = tl.load(column_ptr + rows, mask=rows < N, other=-1)
    else:
        lse = tl.load(lse_ptr + rows)
        delta = tl.load(delta_ptr + rows)
    # Transposed scores straight from the product: a transposed result of tl.dot is miscompiled by some
    # Triton versions on Hopper when it feeds another tl.dot.
    s = tl.dot(k, q.T, input_precision=PRECISION) * scale
    p = tl.exp2(s - lse[None, :])
    if MASK:
        p = tl.where((key[:, None] <= column[None, :]) & (column[None, :] < end[:, None]), p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, do.T, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["N", "M", "lse_stride"])
def _dkdv_kernel(
    q_rows, k_rows, v_rows, do_rows, lse_ptr, delta_ptr, dk_rows, dv_rows, end_ptr, column_ptr,
    first_ptr, first_full_ptr, end_full_ptr, last_ptr, order_ptr, N, M, lse_stride, scale,
    G: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    K_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    index, head_k = tl.program_id(0), tl.program_id(1)
    tile = tl.load(order_ptr + index // K_SPLIT)
    row_k = tile * (BLOCK_K * K_SPLIT) + index % K_SPLIT * BLOCK_K
    key = row_k + tl.arange(0, BLOCK_K)
    end = tl.load(end_ptr + key, mask=key < M, other=0)
    k, v = k_rows.load([row_k, head_k * D]), v_rows.load([row_k, head_k * D])
    dk = tl.zeros([BLOCK_K, D], tl.float32)
    dv = tl.zeros([BLOCK_K, D], tl.float32)

    first = tl.load(first_ptr + tile)
    first_full = tl.load(first_full_ptr + tile)
    end_full = tl.load(end_full_ptr + tile)
    last = tl.load(last_ptr + tile)
    # Steps of BLOCK_Q queries from `first` on; those from full_from to full_to need no mask.
    n_steps = tl.cdiv(last - first, BLOCK_Q)
    full_from = tl.minimum(tl.cdiv(first_full - first, BLOCK_Q), n_steps)
    full_to = tl.maximum((end_full - first) // BLOCK_Q, full_from)
    for g in range(G):
        head = head_k * G + g
        statistics = head.to(tl.int64) * lse_stride
        lse_base, delta_base = lse_ptr + statistics, delta_ptr + statistics
        for i in range(full_from):
            dk, dv = _dkdv_block(
                dk, dv, k, v, key, end, q_rows, do_rows, head * D, lse_base, delta_base, column_ptr,
                first + i * BLOCK_Q, N, scale * LOG2_E, BLOCK_Q, True, PRECISION,
            )  # fmt: skip
        for i in range(full_from, full_to):
            dk, dv = _dkdv_block(
                dk, dv, k, v, key, end, q_rows, do_rows, head * D, lse_base, delta_base, column_ptr,
                first + i * BLOCK_Q, N, scale * LOG2_E, BLOCK_Q, False, PRECISION,
            )  # fmt: skip
        for i in range(full_to, n_steps):
            dk, dv = _dkdv_block(
                dk, dv, k, v, key, end, q_rows, do_rows, head * D, lse_base, delta_base, column_ptr,
                first + i * BLOCK_Q, N, scale * LOG2_E, BLOCK_Q, True, PRECISION,
            )  # fmt: skip

    dk_rows.store([row_k, head_k * D], (dk * scale).to(k.dtype))
    dv_rows.store([row_k, head_k * D], dv.to(v.dtype))


@triton.jit
def _dq_block(
    dq, q, do, lse, delta, column, k_rows, v_rows, head_column, end_ptr, row, M, scale,
    BLOCK_K: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    k = k_rows.load([row, head_column])
    v = v_rows.load([row, head_column])
    s = tl.dot(q, k.T, input_precision=PRECISION) * scale
    p = tl.exp2(s - lse[:, None])
    if MASK:
        key = row + tl.arange(0, BLOCK_K)
        end = tl.load(end_ptr + key, mask=key < M, other=0)
        p = tl.where((key[None, :] <= column[:, None]) & (column[:, None] < end[None, :]), p, 0.0)
    dp = tl.dot(do, v.T, input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["N", "M", "nk", "lse_stride"])
def _dq_kernel(
    q_rows, k_rows, v_rows, do_rows, lse_ptr, delta_ptr, dq_rows, end_ptr, column_ptr, blocks_ptr,
    partial_ptr, visible_ptr, order_ptr, N, M, nk, lse_stride, scale,
    G: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    Q_SPLIT: tl.constexpr, K_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    index, head_k = tl.program_id(0), tl.program_id(1)
    head = head_k * G + index % G
    tile = tl.load(order_ptr + index // G // Q_SPLIT)
    row_q = tile * (BLOCK_Q * Q_SPLIT) + index // G % Q_SPLIT * BLOCK_Q

    rows = row_q + tl.arange(0, BLOCK_Q)
    column = tl.load(column_ptr + rows, mask=rows < N, other=-1)
    q = q_rows.load([row_q, head * D])
    do = do_rows.load([row_q, head * D])
    lse = tl.load(lse_ptr + head.to(tl.int64) * lse_stride + rows)
    delta = tl.load(delta_ptr + head.to(tl.int64) * lse_stride + rows)
    dq = tl.zeros([BLOCK_Q, D], tl.float32)

    list_ptr = blocks_ptr + tile.to(tl.int64) * nk
    n_partial = tl.load(partial_ptr + tile) * K_SPLIT
    n_blocks = tl.load(visible_ptr + tile) * K_SPLIT
    for i in range(n_partial):
        row = (tl.load(list_ptr + i // K_SPLIT) * K_SPLIT + i % K_SPLIT) * BLOCK_K
        dq = _dq_block(
            dq, q, do, lse, delta, column, k_rows, v_rows, head_k * D, end_ptr, row, M, scale * LOG2_E,
            BLOCK_K, True, PRECISION,
        )  # fmt: skip
    for i in range(n_partial, n_blocks):
        row = (tl.load(list_ptr + i // K_SPLIT) * K_SPLIT + i % K_SPLIT) * BLOCK_K
        dq = _dq_block(
            dq, q, do, lse, delta, column, k_rows, v_rows, head_k * D, end_ptr, row, M, scale * LOG2_E,
            BLOCK_K, False, PRECISION,
        )  # fmt: skip

    dq_rows.store([row_q, head * D], (dq * scale).to(q.dtype))


# 3. Launch.


class Tile(NamedTuple):
    """Tile sizes and launch options of one kernel."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    forward: Tile
    dkdv: Tile
    dq: Tile


# Keyed by head dim; smaller ones use the row of 64. Measured on an H200 (docs/performance.md); two
# programs of 4 warps a multiprocessor beat one of 8 in the backward.
TILES_16BIT = {
    64: Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    128: Tiles(Tile(128, 128, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 1), Tile(128, 32, 8, 2)),
}
# For GPUs with as little as 99 KiB of shared memory a block (Ada, consumer Ampere and Blackwell).
TILES_16BIT_99K = {
    64: Tiles(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),
    256: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
}
# fp32 products run on the CUDA cores (no TF32: its error is 1000 times larger): small tiles.
TILES_FP32 = {
    64: Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    128: Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    256: Tiles(Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}


@functools.cache
def _shared_memory(device: int) -> int:
    """Bytes of shared memory that one block can have."""
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


def _tiles(q: Tensor) -> Tiles:
    if q.dtype == torch.float32:
        table = TILES_FP32
    else:
        table = TILES_16BIT if _shared_memory(q.get_device()) > 200 * 1024 else TILES_16BIT_99K
    return table[max(q.shape[-1], 64)]


def check(q: Tensor) -> None:
    """The limits of these kernels, each with its own message."""
    if q.device.type != "cuda" and not INTERPRET:
        raise UserError(
            f"TreeAttention: backend 'triton' needs a CUDA device, got {q.device}; "
            "use 'reference', or set TRITON_INTERPRET=1 to debug the kernels"
        )
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise UserError(
            f"TreeAttention: backend 'triton': expected bfloat16, float16 or float32, got {q.dtype}; "
            "use 'reference' for other dtypes"
        )
    if q.shape[-1] not in (16, 32, 64, 128, 256):
        raise UserError(
            "TreeAttention: backend 'triton': expected head dim 16, 32, 64, 128 or 256, "
            f"got {q.shape[-1]}; use 'flex' or 'reference'"
        )


def _rows(x: Tensor, block: int) -> TensorDescriptor:
    """x [N, H, D] as a matrix [N, H * D], read and written in blocks of ``block`` rows of one head.

    Rows past the end read as zero and are not written; coordinates are rows and columns, so no offset
    overflows. On Hopper these are TMA transfers.
    """
    return TensorDescriptor.from_tensor(x.flatten(1), [block, x.shape[2]])


def empty_lse(q: Tensor) -> Tensor:
    """[H, N rounded up to QUERIES] fp32 for the log2-sum-exp2 of each row's scores; +inf past N."""
    return q.new_empty(q.shape[1], -(-q.shape[0] // QUERIES) * QUERIES, dtype=torch.float32)


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"  # without effect on 16-bit operands


def forward(
    q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """o [N, H, D] and lse [H, padded N], see ``empty_lse``."""
    (n, heads, dim), (m, heads_k, _) = q.shape, k.shape
    o, lse = torch.empty_like(q), empty_lse(q)
    tile, group = _tiles(q).forward, heads // heads_k
    q_split = QUERIES // tile.block_q
    _forward_kernel[(len(plan.query_order) * q_split * group, heads_k)](
        _rows(q, tile.block_q), _rows(k, tile.block_k), _rows(v, tile.block_k), _rows(o, tile.block_q),
        lse, end, column, plan.key_blocks, plan.n_partial, plan.n_visible, plan.query_order,
        n, m, plan.key_blocks.shape[1], lse.shape[1], dim**-0.5,
        G=group, D=dim, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, Q_SPLIT=q_split,
        K_SPLIT=KEYS // tile.block_k, PRECISION=_precision(q),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return o, lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, end: Tensor, column: Tensor,
    plan: Plan, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the dtypes of q, k, v; deterministic in any case."""
    delta = row_sums(do, o, lse)
    dk, dv = _key_gradients(do, q, k, v, lse, delta, end, column, plan)
    return _query_gradients(do, q, k, v, lse, delta, end, column, plan), dk, dv


def row_sums(do: Tensor, o: Tensor, lse: Tensor) -> Tensor:
    """delta = rowsum(O * dO), shaped like lse and 0 past N."""
    delta = torch.empty_like(lse)
    _delta_kernel[(lse.shape[1] // 64, len(lse))](
        _rows(o, 64), _rows(do, 64), delta, lse.shape[1], D=o.shape[2], BLOCK=64
    )
    return delta


def _key_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, end: Tensor, column: Tensor,
    plan: Plan,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dk and dv, every sum in a fixed order."""
    (n, heads, dim), (m, heads_k, _) = q.shape, k.shape
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    tile = _tiles(q).dkdv
    k_split = KEYS // tile.block_k
    _dkdv_kernel[(len(plan.range_order) * k_split, heads_k)](
        _rows(q, tile.block_q), _rows(k, tile.block_k), _rows(v, tile.block_k), _rows(do, tile.block_q),
        lse, delta, _rows(dk, tile.block_k), _rows(dv, tile.block_k), end, column,
        plan.first, plan.first_full, plan.end_full, plan.last, plan.range_order,
        n, m, lse.shape[1], dim**-0.5,
        G=heads // heads_k, D=dim, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, K_SPLIT=k_split,
        PRECISION=_precision(q), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return dk, dv


def _query_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, end: Tensor, column: Tensor,
    plan: Plan,
) -> Tensor:  # fmt: skip
    """dq, every sum in a fixed order."""
    (n, heads, dim), (m, heads_k, _) = q.shape, k.shape
    dq = torch.empty_like(q)
    tile, group = _tiles(q).dq, heads // heads_k
    q_split = QUERIES // tile.block_q
    _dq_kernel[(len(plan.query_order) * q_split * group, heads_k)](
        _rows(q, tile.block_q), _rows(k, tile.block_k), _rows(v, tile.block_k), _rows(do, tile.block_q),
        lse, delta, _rows(dq, tile.block_q), end, column,
        plan.key_blocks, plan.n_partial, plan.n_visible, plan.query_order,
        n, m, plan.key_blocks.shape[1], lse.shape[1], dim**-0.5,
        G=group, D=dim, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, Q_SPLIT=q_split,
        K_SPLIT=KEYS // tile.block_k, PRECISION=_precision(q),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return dq
