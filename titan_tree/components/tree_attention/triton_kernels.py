"""TreeAttention in Triton: portable kernels for the interval mask, forward and backward.

Key k is visible to query q iff ``k <= c < end[k]`` with ``c = key_index[q]``: one int32 per key. Two
facts make blocks cheap (``end`` is the exclusive end of the key's subtree, DFS order):

- a block of keys is seen by *one contiguous range* of queries, and seen in full by a contiguous part of
  it, so the key-stationary backward needs four integers per key block;
- the query-stationary passes read a list of visible key blocks, the partly visible ones first: one loop
  with a mask, one without.

The algorithm is FlashAttention-2 (Dao, arXiv:2307.08691): scores in base 2 with a running row maximum,
``lse`` saved for the backward, dk/dv and dq in passes of their own, so every sum has a fixed order and
the gradients are deterministic. Saved for backward: q, k, v, o, lse; no memory grows with N * M tokens.

Letters: N queries, M keys, H query heads, G = H / Hkv heads a key head serves, D head dim.
"""

from __future__ import annotations

import functools
import os
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_tree.data.layout import TreeLayout
from titan_tree.errors import UserError

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
# Finite, so that a row without a live key yet gives exp2(0), not NaN; its garbage is multiplied by
# exp2(MASKED - max) = 0 when the first live key arrives, and every query sees at least itself. A power of
# two, so that MASKED * scale is exact and the fused multiply-add of exp2(s * scale - peak) gives 0.
MASKED = tl.constexpr(-(2.0**100))

# Granularity of the plan. A kernel's tiles may be smaller, dividing these.
LIST_Q, LIST_K, RANGE_K = 128, 128, 128


# 1. Plan: which blocks meet, from O(N) metadata, in tensor operations without host synchronisation.


class Plan(NamedTuple):
    """Visible blocks. nq = ceil(N / LIST_Q), nk = ceil(M / LIST_K), nr = ceil(M / RANGE_K); all int32.

    One tensor per column: a dimension of constant size would be taken for nq or nk by torch.compile
    where it happens to equal them, and recompiled where it does not.
    """

    key_blocks: Tensor  # [nq, nk]: key blocks of each query block, partly visible, then fully, then unused
    n_partial: Tensor  # [nq]: how many of them are partly visible
    n_visible: Tensor  # [nq]: how many are visible at all
    query_order: Tensor  # [nq]: query blocks, most work first
    first: Tensor  # [nr]: queries first .. last - 1 see something of a key block,
    first_full: Tensor  # [nr]: and first_full .. end_full - 1 all of it
    end_full: Tensor  # [nr]
    last: Tensor  # [nr]
    range_order: Tensor  # [nr]: key blocks, most work first


def prepare(layout: TreeLayout) -> Plan:
    """Block lists and ranges of a layout; on its device, shared by all layers and by recomputation."""
    end, column = layout.subtree_end, layout.key_index

    first_q, last_q = _block_bounds(column, LIST_Q, pad=column[-1:])
    lowest, highest = _block_bounds(end, LIST_K, pad=end.new_zeros(1))
    first_k = torch.arange(0, len(end), LIST_K, device=end.device)
    seen = (first_k <= last_q[:, None]) & (highest > first_q[:, None])
    full = (first_k + LIST_K - 1 <= first_q[:, None]) & (lowest > last_q[:, None])
    rank = torch.where(full, 1, torch.where(seen, 0, 2)).to(torch.uint8)
    n_visible = (rank < 2).sum(1)

    lowest, highest = _block_bounds(end, RANGE_K, pad=end.new_zeros(1))
    first_k = torch.arange(0, len(end), RANGE_K, device=end.device, dtype=torch.int32)
    bounds = torch.stack([first_k, first_k + RANGE_K - 1, lowest, highest])
    first, first_full, end_full, last = (row.int() for row in torch.searchsorted(column, bounds))
    first_full = torch.minimum(first_full, last)

    return Plan(
        key_blocks=rank.argsort(dim=1, stable=True).int(),
        n_partial=(rank == 0).sum(1).int(),
        n_visible=n_visible.int(),
        query_order=n_visible.argsort(stable=True, descending=True).int(),
        first=first,
        first_full=first_full,
        end_full=torch.maximum(first_full, end_full),
        last=last,
        range_order=(last - first).argsort(stable=True, descending=True).int(),
    )


def _block_bounds(values: Tensor, block: int, pad: Tensor) -> tuple[Tensor, Tensor]:
    """Minimum and maximum of each run of ``block`` values, the last run filled up with ``pad``."""
    missing = -len(values) % block
    blocks = torch.cat([values, pad.expand(missing)]).view(-1, block)
    return blocks.amin(1), blocks.amax(1)


# 2. Forward: one program per (query block, head). Heads of one key head run side by side, so that its
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


@triton.jit(do_not_specialize=["N", "M", "nk"])
def _forward_kernel(
    q_rows, k_rows, v_rows, o_rows, lse_ptr, end_ptr, column_ptr, blocks_ptr, partial_ptr,
    visible_ptr, order_ptr, N, M, nk, scale,
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
    tl.store(lse_ptr + head.to(tl.int64) * N + rows, (peak + tl.log2(total)) * LN_2, mask=rows < N)


# 3. Backward. With P = exp(S - lse), dP = dO V^T, delta = rowsum(O * dO) and dS = P * (dP - delta):
#    dV = P^T dO, dK = scale * dS^T Q, dQ = scale * dS K.


@triton.jit(do_not_specialize=["N"])
def _delta_kernel(
    o_rows, do_rows, delta_ptr, N, D: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, head = tl.program_id(0) * BLOCK, tl.program_id(1)
    rows = row + tl.arange(0, BLOCK)
    o, do = o_rows.load([row, head * D]), do_rows.load([row, head * D])
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + head.to(tl.int64) * N + rows, delta, mask=rows < N)


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
    p = tl.exp2(s - (lse * LOG2_E)[None, :])
    if MASK:
        p = tl.where((key[:, None] <= column[None, :]) & (column[None, :] < end[:, None]), p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, do.T, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(do_not_specialize=["N", "M"])
def _dkdv_kernel(
    q_rows, k_rows, v_rows, do_rows, lse_ptr, delta_ptr, dk_rows, dv_rows, end_ptr, column_ptr,
    first_ptr, first_full_ptr, end_full_ptr, last_ptr, order_ptr, N, M, scale,
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
        lse_base, delta_base = lse_ptr + head.to(tl.int64) * N, delta_ptr + head.to(tl.int64) * N
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


@triton.jit(do_not_specialize=["N", "M", "nk"])
def _dq_kernel(
    q_rows, k_rows, v_rows, do_rows, lse_ptr, delta_ptr, dq_rows, end_ptr, column_ptr, blocks_ptr,
    partial_ptr, visible_ptr, order_ptr, N, M, nk, scale,
    G: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    Q_SPLIT: tl.constexpr, K_SPLIT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    index, head_k = tl.program_id(0), tl.program_id(1)
    head = head_k * G + index % G
    tile = tl.load(order_ptr + index // G // Q_SPLIT)
    row_q = tile * (BLOCK_Q * Q_SPLIT) + index // G % Q_SPLIT * BLOCK_Q

    rows = row_q + tl.arange(0, BLOCK_Q)
    live = rows < N
    column = tl.load(column_ptr + rows, mask=live, other=-1)
    q = q_rows.load([row_q, head * D])
    do = do_rows.load([row_q, head * D])
    lse = tl.load(lse_ptr + head.to(tl.int64) * N + rows, mask=live, other=0.0) * LOG2_E
    delta = tl.load(delta_ptr + head.to(tl.int64) * N + rows, mask=live, other=0.0)
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


# 4. Launch.


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


def _check(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout) -> None:
    """The limits of these kernels, each with its own message."""
    dim = q.shape[-1]
    if q.device.type != "cuda" and not INTERPRET:
        raise UserError(
            f"TreeAttention: backend 'triton' needs a CUDA device, got {q.device}; "
            "use 'reference', or set TRITON_INTERPRET=1 to debug the kernels"
        )
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or not q.dtype == k.dtype == v.dtype:
        raise UserError(
            "TreeAttention: backend 'triton': expected q, k, v all bfloat16, float16 or float32, "
            f"got {q.dtype}, {k.dtype}, {v.dtype}; use 'reference' for other dtypes"
        )
    if dim not in (16, 32, 64, 128, 256):
        raise UserError(
            f"TreeAttention: backend 'triton': expected head dim 16, 32, 64, 128 or 256, got {dim}; "
            "use 'flex' or 'reference'"
        )
    n, m = len(layout.key_index), len(layout.subtree_end)
    shapes = tuple(q.shape), tuple(k.shape), tuple(v.shape)
    if (
        q.shape[0] != n
        or k.shape[0] != m
        or k.shape != v.shape
        or q.shape[1] % k.shape[1]
        or k.shape[2] != dim
    ):
        raise UserError(
            f"TreeAttention: expected q [{n}, H, D] and k, v [{m}, Hkv, D] with Hkv dividing H, got {shapes}"
        )


def _rows(x: Tensor, block: int) -> TensorDescriptor:
    """x [N, H, D] as a matrix [N, H * D], read and written in blocks of ``block`` rows of one head.

    Rows past the end read as zero and are not written; coordinates are rows and columns, so no offset
    overflows. On Hopper these are TMA transfers.
    """
    return TensorDescriptor.from_tensor(x.flatten(1), [block, x.shape[2]])


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"  # without effect on 16-bit operands


def _forward(
    q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, key_blocks: Tensor, n_partial: Tensor,
    n_visible: Tensor, query_order: Tensor, first: Tensor, first_full: Tensor, end_full: Tensor,
    last: Tensor, range_order: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [N, H, D] and lse [H, N] fp32, nats. The ranges are for the backward."""
    (n, heads, dim), (m, heads_k, _) = q.shape, k.shape
    q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
    o, lse = q.new_empty(q.shape), q.new_empty(heads, n, dtype=torch.float32)
    tile, group = _tiles(q).forward, heads // heads_k
    q_split = LIST_Q // tile.block_q
    with torch.cuda.device_of(q):
        _forward_kernel[(len(query_order) * q_split * group, heads_k)](
            _rows(q, tile.block_q), _rows(k, tile.block_k), _rows(v, tile.block_k), _rows(o, tile.block_q),
            lse, end, column, key_blocks, n_partial, n_visible, query_order,
            n, m, key_blocks.shape[1], dim**-0.5,
            G=group, D=dim, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, Q_SPLIT=q_split,
            K_SPLIT=LIST_K // tile.block_k, PRECISION=_precision(q),
            num_warps=tile.num_warps, num_stages=tile.num_stages,
        )  # fmt: skip
    return o, lse


def _backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, end: Tensor, column: Tensor,
    key_blocks: Tensor, n_partial: Tensor, n_visible: Tensor, query_order: Tensor, first: Tensor,
    first_full: Tensor, end_full: Tensor, last: Tensor, range_order: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the dtypes of q, k, v."""
    (n, heads, dim), (m, heads_k, _) = q.shape, k.shape
    q, k, v, do = q.contiguous(), k.contiguous(), v.contiguous(), do.contiguous()
    dq, dk, dv = q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)
    delta = torch.empty_like(lse)
    tiles, group = _tiles(q), heads // heads_k
    common = {"G": group, "D": dim, "PRECISION": _precision(q)}
    with torch.cuda.device_of(q):
        _delta_kernel[(triton.cdiv(n, 64), heads)](_rows(o, 64), _rows(do, 64), delta, n, D=dim, BLOCK=64)
        tile = tiles.dkdv
        k_split = RANGE_K // tile.block_k
        _dkdv_kernel[(len(range_order) * k_split, heads_k)](
            _rows(q, tile.block_q), _rows(k, tile.block_k), _rows(v, tile.block_k), _rows(do, tile.block_q),
            lse, delta, _rows(dk, tile.block_k), _rows(dv, tile.block_k), end, column,
            first, first_full, end_full, last, range_order, n, m, dim**-0.5,
            BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, K_SPLIT=k_split,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **common,
        )  # fmt: skip
        tile = tiles.dq
        q_split = LIST_Q // tile.block_q
        _dq_kernel[(len(query_order) * q_split * group, heads_k)](
            _rows(q, tile.block_q), _rows(k, tile.block_k), _rows(v, tile.block_k), _rows(do, tile.block_q),
            lse, delta, _rows(dq, tile.block_q), end, column, key_blocks, n_partial, n_visible, query_order,
            n, m, key_blocks.shape[1], dim**-0.5,
            BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, Q_SPLIT=q_split, K_SPLIT=LIST_K // tile.block_k,
            num_warps=tile.num_warps, num_stages=tile.num_stages, **common,
        )  # fmt: skip
    return dq, dk, dv


# 5. Operators: all that torch.compile and activation checkpointing need to know.

tree_attention = torch.library.custom_op("titan_tree::tree_attention", _forward, mutates_args=())
tree_attention_backward = torch.library.custom_op(
    "titan_tree::tree_attention_backward", _backward, mutates_args=()
)


@tree_attention.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, *plan: Tensor) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), q.new_empty(q.shape[1], q.shape[0], dtype=torch.float32)


@tree_attention_backward.register_fake
def _(do: Tensor, q: Tensor, k: Tensor, v: Tensor, *saved: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, *metadata = inputs
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, o, lse, *metadata)


def _autograd(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: activation checkpointing recomputes at each access
    return *tree_attention_backward(do, *saved), *[None] * (len(saved) - 5)


tree_attention.register_autograd(_autograd, setup_context=_setup_context)


def attention(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, plan: Plan) -> Tensor:
    """See ``TreeAttention.forward``."""
    _check(q, k, v, layout)
    return tree_attention(q, k, v, layout.subtree_end, layout.key_index, *plan)[0]
