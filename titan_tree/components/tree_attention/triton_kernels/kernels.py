"""Device code of backend "triton": the forward pass and the two backward passes of tree attention.

The algorithm is FlashAttention-2 (Dao, arXiv:2307.08691). Scores are in base 2, with a running row maximum.
The forward pass saves ``lse``, the log2 of each row's sum. dk and dv come from one backward pass, dq from
another, so every sum has a fixed order and the gradients are deterministic.

What the tree changes is which tiles a program visits (``block_lists.py``). A program that keeps a block of
queries walks the list of key blocks that those queries see: first the partly visible ones, with a mask, then
the fully visible ones, without. A program that keeps a block of keys walks the one contiguous range of
queries that see it.

Blocks of the lists are QUERIES x KEYS. A kernel's tiles may be smaller: Q_SPLIT tiles make a query block,
K_SPLIT a key block. ``*_rows`` are tensor descriptors of matrices [N, H * D]: coordinates are a row and a
column. Rows past the end read as zero and are never written. ``*_ptr`` are plain pointers.

The backward pass, with P = exp2(S - lse) and delta = rowsum(O * dO):

    dP = dO V^T;   dS = P * (dP - delta);   dV = P^T dO;   dK = scale * dS^T Q;   dQ = scale * dS K

Options, which cost nothing if they are absent, because their arguments are then None at compile time:

- a sliding window: ``depth_ptr`` [M] has the depths of keys, and ``start_ptr`` [N] the depth of the first key
  in each query's window. The lists leave out blocks outside of all windows (``WindowLists``).
- a soft cap: CAP is the cap of scores in base 2.
- sinks: ``sinks_ptr`` [H]. The online softmax begins with the sink, which has no value.

Letters: N queries, M keys, H query heads, G = H / Hkv query heads per key head, D and DV the head dims of
keys and of values, rounded up to powers of two.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(1 / LOG2_E.value)
# The score of a masked key. It is finite: in a row that has seen no visible key yet, exp2(MASKED - peak) is
# then exp2(0) and not NaN. What such a row has summed is multiplied by exp2(MASKED - new peak) = 0 when the
# first visible key arrives, and every query sees at least itself. A power of two makes MASKED * scale exact,
# so that the fused multiply-add in exp2(s * scale - peak) gives exactly 0.
MASKED = tl.constexpr(-(2.0**100))


@triton.jit
def _load(rows, row, head):
    """A tile of rows of one head. ``_rows`` in __init__.py makes the two kinds of descriptors."""
    if len(rows.block_shape) == 2:
        x = rows.load([row, head * rows.block_shape[1]])
    else:
        x = rows.load([head, row, 0]).reshape(rows.block_shape[1], rows.block_shape[2])
    return x


@triton.jit
def _store(rows, row, head, x):
    """Writes a tile that ``_load`` could read."""
    if len(rows.block_shape) == 2:
        rows.store([row, head * rows.block_shape[1]], x)
    else:
        rows.store([head, row, 0], x.reshape(1, rows.block_shape[1], rows.block_shape[2]))


@triton.jit
def _capped(s, CAP: tl.constexpr):
    """CAP * tanh(s / CAP). The error is CAP times fp32's rounding."""
    return CAP - 2 * CAP / (tl.exp2(s * (2 * LOG2_E / CAP)) + 1)


@triton.jit
def _visible(column, start, end_ptr, depth_ptr, row, M, BLOCK_K: tl.constexpr):
    """[queries, BLOCK_K]: which of the keys row .. row + BLOCK_K - 1 each query sees."""
    key = row + tl.arange(0, BLOCK_K)
    end = tl.load(end_ptr + key, mask=key < M, other=0)
    visible = (key[None, :] <= column[:, None]) & (column[:, None] < end[None, :])
    if depth_ptr is not None:
        depth = tl.load(depth_ptr + key, mask=key < M, other=0)
        visible &= depth[None, :] >= start[:, None]
    return visible


# 1. Forward pass. A program computes one tile of queries for one head. Programs of the heads that share a key
#    head have adjacent ids, so that they read its keys and values from L2.


@triton.jit
def _forward_block(
    q, q_rest, peak, total, acc, column, start, k_rows, k_rest_rows, v_rows, head, end_ptr, depth_ptr, row, M,
    scale, BLOCK_K: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One step of online softmax: adds keys row .. row + BLOCK_K - 1 to the sums of a tile of queries."""
    k = _load(k_rows, row, head)
    s = tl.dot(q, k.T, input_precision=PRECISION)
    if q_rest is not None:
        k_rest = _load(k_rest_rows, row, head)
        s = tl.dot(q_rest, k_rest.T, s, input_precision=PRECISION)
    if CAP is not None:
        s = _capped(s * scale, CAP)
        scale = 1.0
    if MASK:
        s = tl.where(_visible(column, start, end_ptr, depth_ptr, row, M, BLOCK_K), s, MASKED)
    new_peak = tl.maximum(peak, tl.max(s, 1) * scale)
    p = tl.exp2(s * scale - new_peak[:, None])
    decay = tl.exp2(peak - new_peak)
    total = total * decay + tl.sum(p, 1)
    v = _load(v_rows, row, head)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision=PRECISION)
    return new_peak, total, acc


@triton.jit(do_not_specialize=["N", "M", "nk", "lse_stride"])
def _forward_kernel(
    q_rows, q_rest_rows, k_rows, k_rest_rows, v_rows, o_rows, lse_ptr, end_ptr, column_ptr, blocks_ptr,
    partial_ptr, visible_ptr, order_ptr, depth_ptr, start_ptr, sinks_ptr, N, M, nk, lse_stride, scale,
    G: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, Q_SPLIT: tl.constexpr,
    K_SPLIT: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """o and lse of one tile of queries and one head. Query blocks with the most keys start first.

    The columns of queries and keys may come in two parts, see ``_in_parts`` in __init__.py.
    """
    index, head_k = tl.program_id(0), tl.program_id(1)
    head = head_k * G + index % G
    tile = tl.load(order_ptr + index // G // Q_SPLIT)
    row_q = tile * (BLOCK_Q * Q_SPLIT) + index // G % Q_SPLIT * BLOCK_Q

    rows = row_q + tl.arange(0, BLOCK_Q)
    column = tl.load(column_ptr + rows, mask=rows < N, other=0)
    start = None if start_ptr is None else tl.load(start_ptr + rows, mask=rows < N, other=0)
    q = _load(q_rows, row_q, head)
    q_rest = None if q_rest_rows is None else _load(q_rest_rows, row_q, head)
    peak = tl.full([BLOCK_Q], MASKED, tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    if sinks_ptr is not None:
        peak = tl.zeros([BLOCK_Q], tl.float32) + tl.load(sinks_ptr + head).to(tl.float32) * LOG2_E
        total += 1.0
    acc = tl.zeros([BLOCK_Q, DV], tl.float32)
    scale *= LOG2_E

    list_ptr = blocks_ptr + tile.to(tl.int64) * nk
    n_partial = tl.load(partial_ptr + tile) * K_SPLIT
    n_blocks = tl.load(visible_ptr + tile) * K_SPLIT
    for i in range(n_partial):
        row = (tl.load(list_ptr + i // K_SPLIT) * K_SPLIT + i % K_SPLIT) * BLOCK_K
        peak, total, acc = _forward_block(
            q, q_rest, peak, total, acc, column, start, k_rows, k_rest_rows, v_rows, head_k, end_ptr,
            depth_ptr, row, M, scale, BLOCK_K, CAP, True, PRECISION,
        )  # fmt: skip
    for i in range(n_partial, n_blocks):
        row = (tl.load(list_ptr + i // K_SPLIT) * K_SPLIT + i % K_SPLIT) * BLOCK_K
        peak, total, acc = _forward_block(
            q, q_rest, peak, total, acc, column, start, k_rows, k_rest_rows, v_rows, head_k, end_ptr,
            depth_ptr, row, M, scale, BLOCK_K, CAP, False, PRECISION,
        )  # fmt: skip

    _store(o_rows, row_q, head, (acc / total[:, None]).to(q.dtype))
    lse = tl.where(rows < N, peak + tl.log2(total), float("inf"))
    tl.store(lse_ptr + head.to(tl.int64) * lse_stride + rows, lse)


# 2. Backward pass.


@triton.jit(do_not_specialize=["lse_stride"])
def _delta_kernel(
    o_rows, do_rows, delta_ptr, lse_stride, BLOCK: tl.constexpr,
):  # fmt: skip
    """delta = rowsum(O * dO) of BLOCK queries and one head."""
    row, head = tl.program_id(0) * BLOCK, tl.program_id(1)
    rows = row + tl.arange(0, BLOCK)
    o, do = _load(o_rows, row, head), _load(do_rows, row, head)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    tl.store(delta_ptr + head.to(tl.int64) * lse_stride + rows, delta)


@triton.jit
def _dkdv_block(
    dk, dv, k, v, key, end, depth, q_rows, do_rows, head, lse_ptr, delta_ptr, column_ptr, start_ptr, row, N,
    scale, BLOCK_Q: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds queries row .. row + BLOCK_Q - 1 of one head to dk and dv of a tile of keys."""
    rows = row + tl.arange(0, BLOCK_Q)
    q, do = _load(q_rows, row, head), _load(do_rows, row, head)
    if MASK:  # rows past N get column -1, which sees no key
        lse = tl.load(lse_ptr + rows, mask=rows < N, other=0.0)
        delta = tl.load(delta_ptr + rows, mask=rows < N, other=0.0)
        column = tl.load(column_ptr + rows, mask=rows < N, other=-1)
    else:
        lse = tl.load(lse_ptr + rows)
        delta = tl.load(delta_ptr + rows)
    # The product gives the scores transposed. Transposing the result of a tl.dot that feeds another tl.dot is
    # miscompiled on Hopper by some versions of Triton.
    s = tl.dot(k, q.T, input_precision=PRECISION) * scale
    if CAP is not None:
        s = _capped(s, CAP)
    p = tl.exp2(s - lse[None, :])
    if MASK:
        visible = (key[:, None] <= column[None, :]) & (column[None, :] < end[:, None])
        if start_ptr is not None:
            visible &= depth[:, None] >= tl.load(start_ptr + rows, mask=rows < N, other=0)[None, :]
        p = tl.where(visible, p, 0.0)
    dv = tl.dot(p.to(do.dtype), do, dv, input_precision=PRECISION)
    dp = tl.dot(v, do.T, input_precision=PRECISION)
    ds = p * (dp - delta[None, :])
    if CAP is not None:
        ds *= 1 - (s / CAP) * (s / CAP)
    dk = tl.dot(ds.to(q.dtype), q, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit
def _dkdv_steps(
    dk, dv, k, v, key, end, depth, q_rows, do_rows, head, lse_ptr, delta_ptr, column_ptr, start_ptr,
    list_ptr, first, begin, stop, N, scale, BLOCK_Q: tl.constexpr, Q_SPLIT: tl.constexpr,
    CAP: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Steps begin .. stop - 1 of a tile of keys: of the range from query ``first`` on, or of a list."""
    for i in range(begin, stop):
        row = first + i * BLOCK_Q
        if list_ptr is not None:
            row = (tl.load(list_ptr + i // Q_SPLIT) * Q_SPLIT + i % Q_SPLIT) * BLOCK_Q
        dk, dv = _dkdv_block(
            dk, dv, k, v, key, end, depth, q_rows, do_rows, head, lse_ptr, delta_ptr, column_ptr, start_ptr,
            row, N, scale, BLOCK_Q, CAP, MASK, PRECISION,
        )  # fmt: skip
    return dk, dv


@triton.jit
def _range_of_steps(tile, first_ptr, first_full_ptr, end_full_ptr, last_ptr, BLOCK_Q: tl.constexpr):
    """Steps of BLOCK_Q queries, beginning at query ``first``. Steps full_from .. full_to - 1 need no mask."""
    first = tl.load(first_ptr + tile)
    first_full = tl.load(first_full_ptr + tile)
    end_full = tl.load(end_full_ptr + tile)
    last = tl.load(last_ptr + tile)
    n_steps = tl.cdiv(last - first, BLOCK_Q)
    full_from = tl.minimum(tl.cdiv(first_full - first, BLOCK_Q), n_steps)
    full_to = tl.maximum((end_full - first) // BLOCK_Q, full_from)
    return first, full_from, full_to, n_steps


@triton.jit(do_not_specialize=["N", "M", "nq", "lse_stride"])
def _dkdv_kernel(
    q_rows, k_rows, v_rows, do_rows, lse_ptr, delta_ptr, dk_rows, dv_rows, end_ptr, column_ptr,
    first_ptr, first_full_ptr, end_full_ptr, last_ptr, blocks_ptr, partial_ptr, visible_ptr, order_ptr,
    depth_ptr, start_ptr, N, M, nq, lse_stride, scale,
    G: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr,
    Q_SPLIT: tl.constexpr, K_SPLIT: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys and one key head, summed over the query heads that use it.

    With a window, the queries come from a list of blocks, and otherwise from one range.
    """
    index, head_k = tl.program_id(0), tl.program_id(1)
    tile = tl.load(order_ptr + index // K_SPLIT)
    row_k = tile * (BLOCK_K * K_SPLIT) + index % K_SPLIT * BLOCK_K
    key = row_k + tl.arange(0, BLOCK_K)
    end = tl.load(end_ptr + key, mask=key < M, other=0)
    k, v = _load(k_rows, row_k, head_k), _load(v_rows, row_k, head_k)
    dk = tl.zeros([BLOCK_K, D], tl.float32)
    dv = tl.zeros([BLOCK_K, DV], tl.float32)

    if depth_ptr is None:
        depth, list_ptr = None, None
        first, full_from, full_to, n_steps = _range_of_steps(
            tile, first_ptr, first_full_ptr, end_full_ptr, last_ptr, BLOCK_Q
        )
    else:
        depth = tl.load(depth_ptr + key, mask=key < M, other=0)
        list_ptr, first = blocks_ptr + tile.to(tl.int64) * nq, 0
        full_from = tl.load(partial_ptr + tile) * Q_SPLIT
        full_to = tl.load(visible_ptr + tile) * Q_SPLIT
    for g in range(G):
        head = head_k * G + g
        statistics = head.to(tl.int64) * lse_stride
        lse_base, delta_base = lse_ptr + statistics, delta_ptr + statistics
        dk, dv = _dkdv_steps(
            dk, dv, k, v, key, end, depth, q_rows, do_rows, head, lse_base, delta_base, column_ptr, start_ptr,
            list_ptr, first, 0, full_from, N, scale * LOG2_E, BLOCK_Q, Q_SPLIT, CAP, True, PRECISION,
        )  # fmt: skip
        dk, dv = _dkdv_steps(
            dk, dv, k, v, key, end, depth, q_rows, do_rows, head, lse_base, delta_base, column_ptr, start_ptr,
            list_ptr, first, full_from, full_to, N, scale * LOG2_E, BLOCK_Q, Q_SPLIT, CAP, False, PRECISION,
        )  # fmt: skip
        if depth_ptr is None:
            dk, dv = _dkdv_steps(
                dk, dv, k, v, key, end, depth, q_rows, do_rows, head, lse_base, delta_base, column_ptr,
                start_ptr, list_ptr, first, full_to, n_steps, N, scale * LOG2_E, BLOCK_Q, Q_SPLIT, CAP, True,
                PRECISION,
            )  # fmt: skip

    _store(dk_rows, row_k, head_k, (dk * scale).to(k.dtype))
    _store(dv_rows, row_k, head_k, dv.to(v.dtype))


@triton.jit
def _dq_block(
    dq, q, do, lse, delta, column, start, k_rows, v_rows, head, end_ptr, depth_ptr, row, M, scale,
    BLOCK_K: tl.constexpr, CAP: tl.constexpr, MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds keys row .. row + BLOCK_K - 1 to dq of a tile of queries."""
    k = _load(k_rows, row, head)
    v = _load(v_rows, row, head)
    s = tl.dot(q, k.T, input_precision=PRECISION) * scale
    if CAP is not None:
        s = _capped(s, CAP)
    p = tl.exp2(s - lse[:, None])
    if MASK:
        p = tl.where(_visible(column, start, end_ptr, depth_ptr, row, M, BLOCK_K), p, 0.0)
    dp = tl.dot(do, v.T, input_precision=PRECISION)
    ds = p * (dp - delta[:, None])
    if CAP is not None:
        ds *= 1 - (s / CAP) * (s / CAP)
    return tl.dot(ds.to(k.dtype), k, dq, input_precision=PRECISION)


@triton.jit(do_not_specialize=["N", "M", "nk", "lse_stride"])
def _dq_kernel(
    q_rows, k_rows, v_rows, do_rows, lse_ptr, delta_ptr, dq_rows, end_ptr, column_ptr, blocks_ptr,
    partial_ptr, visible_ptr, order_ptr, depth_ptr, start_ptr, N, M, nk, lse_stride, scale,
    G: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, Q_SPLIT: tl.constexpr,
    K_SPLIT: tl.constexpr, CAP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries and one head."""
    index, head_k = tl.program_id(0), tl.program_id(1)
    head = head_k * G + index % G
    tile = tl.load(order_ptr + index // G // Q_SPLIT)
    row_q = tile * (BLOCK_Q * Q_SPLIT) + index // G % Q_SPLIT * BLOCK_Q

    rows = row_q + tl.arange(0, BLOCK_Q)
    column = tl.load(column_ptr + rows, mask=rows < N, other=-1)
    start = None if start_ptr is None else tl.load(start_ptr + rows, mask=rows < N, other=0)
    q = _load(q_rows, row_q, head)
    do = _load(do_rows, row_q, head)
    lse = tl.load(lse_ptr + head.to(tl.int64) * lse_stride + rows)
    delta = tl.load(delta_ptr + head.to(tl.int64) * lse_stride + rows)
    dq = tl.zeros([BLOCK_Q, D], tl.float32)

    list_ptr = blocks_ptr + tile.to(tl.int64) * nk
    n_partial = tl.load(partial_ptr + tile) * K_SPLIT
    n_blocks = tl.load(visible_ptr + tile) * K_SPLIT
    for i in range(n_partial):
        row = (tl.load(list_ptr + i // K_SPLIT) * K_SPLIT + i % K_SPLIT) * BLOCK_K
        dq = _dq_block(
            dq, q, do, lse, delta, column, start, k_rows, v_rows, head_k, end_ptr, depth_ptr, row, M,
            scale * LOG2_E, BLOCK_K, CAP, True, PRECISION,
        )  # fmt: skip
    for i in range(n_partial, n_blocks):
        row = (tl.load(list_ptr + i // K_SPLIT) * K_SPLIT + i % K_SPLIT) * BLOCK_K
        dq = _dq_block(
            dq, q, do, lse, delta, column, start, k_rows, v_rows, head_k, end_ptr, depth_ptr, row, M,
            scale * LOG2_E, BLOCK_K, CAP, False, PRECISION,
        )  # fmt: skip

    _store(dq_rows, row_q, head, (dq * scale).to(q.dtype))
