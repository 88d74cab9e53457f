"""Backward kernels of the recurrences in Triton. ``forward_kernels.py`` explains letters and layouts.

From dS', the gradient of a chunk's last state, and X = dv, with s the scale of q:

    dn = s P^T do + d (k dS');   X = T^T dn;   dS = exp(G_last) dS' + s (exp(G) q)^T do - (e k)^T X

beta_i dA_ij = -X_i.n_j, so the kernels need this product and not A itself. Row sums of a gradient times its
operand give the gradients of beta and of the decays. The key k_i determines a row of A and of e k S. It also
determines a column of P, of A, and of k^T in the chunk's last state. dk_row_i and dk_column_i are the
corresponding parts of its gradient. With r_i = k_i.dk_row_i:

    dbeta_i = (X_i.v_i + r_i) / beta_i;   dG_i = q_i.dq_i + r_i - k_i.dk_column_i

The gradient of G_last also contains <S', dS'> = exp(G_last) <S, dS'> + sum_i d_i k_i.(dS' n_i). P and A
contribute to dG the row sums minus the column sums of P * dP and of A * dA. Both sums come from one matrix,
so terms that cancel in exact arithmetic also cancel here. With bf16 operands this lowers the error of dg to a
fifth.

Without the delta rule (DELTA is false), X = dn = dv. The terms of A, of beta and of normalization vanish:

    dG_i = q_i.dq_i - k_i.dk_i

The kernels run in this order:

    _state_gradient_kernel   chain after chain, from its end: dS' of each chunk, and X
    _query_kernel            all chunks at once: dq
    _input_kernel            all chunks at once: dk, dv, dg and dbeta
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_tree.components.recurrence.buffers import Saved, precision, sizes
from titan_tree.components.recurrence.launch import Run
from titan_tree.components.recurrence.triton_kernels.forward_kernels import (
    chain_of,
    chunk_of,
    decayed,
    inverse_length,
    load_hidden,
    load_new,
    stages,
)
from titan_tree.tree.chunks import Chains, Chunks

# 1. Device code.


@triton.jit
def _query_kernel(
    q_ptr, k_ptr, do_ptr, state_ptr, new_ptr, total_ptr, length_ptr, dq_ptr, dtotal_ptr, start_ptr, scale,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """dq of one chunk and value head, and the parts of each token's dG that come from P and exp(G) q S."""
    index = tl.program_id(0).to(tl.int64)
    head, start, size = chunk_of(index, start_ptr, G)
    t, d, column = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    is_token = (t < size)[:, None]
    key_base = (start * (G // GROUP) + head // GROUP) * K
    key_tile = t[:, None] * (G // GROUP * K) + d[None, :]
    value_base = (start * G + head) * V
    q = tl.load(q_ptr + key_base + key_tile, mask=is_token, other=0.0)
    if DELTA:
        # Computed and not loaded: a loaded vector has another layout, with which the rest of the kernel would
        # need more registers.
        q_length, length = inverse_length(q), tl.load(length_ptr + index * C + t)
    else:
        q_length, length = tl.full([C], 1.0, tl.float32), tl.full([C], 1.0, tl.float32)
    k = tl.load(k_ptr + key_base + key_tile, mask=is_token, other=0.0)
    do = tl.load(do_ptr + value_base + (t[:, None] * (G * V) + column[None, :]), mask=is_token, other=0.0)
    total = tl.load(total_ptr + index * C + t)
    new = load_new(new_ptr, index, start, head, t < size, G, V, C, DELTA)
    state = tl.load(state_ptr + index * K * V + (column[:, None] * K + d[None, :]))
    dp = tl.dot(do, new, input_precision=PRECISION) * (scale * length)[None, :]
    dp = decayed(dp, total[:, None], total[None, :], t[:, None] >= t[None, :])
    p_dp = dp * (tl.dot(q, tl.trans(k), input_precision=PRECISION) * q_length[:, None])
    from_p = tl.sum(p_dp, 1)
    dq = tl.dot(do, state, input_precision=PRECISION) * (scale * tl.exp2(total))[:, None]
    q = tl.load(q_ptr + key_base + key_tile, mask=is_token, other=0.0).to(tl.float32)
    q_dq = tl.sum(dq * q, 1) * q_length + from_p
    dq = tl.dot(dp.to(k.dtype), k, dq, input_precision=PRECISION)
    tl.store(dtotal_ptr + index * C + t, q_dq - tl.sum(p_dp, 0))
    if DELTA:
        dq = (dq - q * (q_length * q_dq)[:, None]) * q_length[:, None]
    tile = t[:, None] * (G * K) + d[None, :]
    tl.store(dq_ptr + (start * G + head) * K + tile, dq.to(dq_ptr.dtype.element_ty), mask=is_token)


@triton.jit(do_not_specialize=["first_chain"])
def _state_gradient_kernel(
    q_ptr, k_ptr, do_ptr, inverse_ptr, p_ptr, read_ptr, write_ptr, query_ptr, total_ptr, dstate_ptr, x_ptr,
    start_gradient_ptr, first_ptr, end_ptr, source_ptr, reader_ptr, start_ptr, first_chain,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, RAW: tl.constexpr,
    DELTA: tl.constexpr,
):  # fmt: skip
    """One chain from its end: dS'^T and X^T of each chunk, and the gradient of the state it starts from.

    Without DELTA, X goes to dv [N, G, V].
    """
    chain, head, column = chain_of(first_chain, G, V, BLOCK_V)
    t, d = tl.arange(0, C), tl.arange(0, K)
    state_tile = column[:, None] * K + d[None, :]
    dstate = tl.zeros([BLOCK_V, K], dtype=tl.float32)
    first, end = tl.load(first_ptr + chain), tl.load(end_ptr + chain)
    row = ((end - 1).to(tl.int64) * G + head) * C
    write = tl.load(write_ptr + row + t)
    read = tl.load(read_ptr + row + t) if DELTA else write
    query, last = tl.load(query_ptr + row + t), tl.load(total_ptr + row + C - 1)
    for i in tl.range(0, end - first, num_stages=STAGES):
        chunk = end - 1 - i
        row = (chunk.to(tl.int64) * G + head) * C
        clamped = tl.maximum(chunk, first)
        start = load_hidden(start_ptr + clamped, RAW)
        is_token = t < load_hidden(start_ptr + clamped + 1, RAW) - start
        start = start.to(tl.int64)
        key_base = (start * (G // GROUP) + head // GROUP) * K
        key_tile = t[:, None] * (G // GROUP * K) + d[None, :]
        q = tl.load(q_ptr + key_base + key_tile, mask=is_token[:, None], other=0.0)
        k = tl.load(k_ptr + key_base + key_tile, mask=is_token[:, None], other=0.0)
        do = tl.load(
            do_ptr + (start * G + head) * V + (t[:, None] * (G * V) + column[None, :]),
            mask=is_token[:, None], other=0.0,
        )  # fmt: skip
        if DELTA:
            inverse = tl.load(inverse_ptr + row * C + (t[:, None] * C + t[None, :]))
        p = tl.load(p_ptr + row * C + (t[:, None] * C + t[None, :]))
        # Factors of the previous chunk, which the next step computes.
        next_row = (tl.maximum(chunk - 1, 0).to(tl.int64) * G + head) * C
        reader = load_hidden(reader_ptr + clamped, RAW)
        next_write = tl.load(write_ptr + next_row + t)
        next_read = tl.load(read_ptr + next_row + t) if DELTA else next_write
        next_query = tl.load(query_ptr + next_row + t)
        next_last = tl.load(total_ptr + next_row + C - 1)
        if reader >= 0:
            dstate += tl.load(start_gradient_ptr + (reader.to(tl.int64) * G + head) * K * V + state_tile)
        rounded = dstate.to(k.dtype)
        tl.store(dstate_ptr + row // C * K * V + state_tile, rounded)
        dnew = tl.dot(rounded, tl.trans(k), input_precision=PRECISION) * write[None, :]
        dnew = tl.dot(tl.trans(do), p, dnew, input_precision=PRECISION)
        if DELTA:
            x = tl.dot(dnew.to(inverse.dtype), inverse, input_precision=PRECISION)
            tl.store(x_ptr + row * V + (column[:, None] * C + t[None, :]), x.to(x_ptr.dtype.element_ty))
        else:
            dv_tile = (start * G + head) * V + (t[None, :] * (G * V) + column[:, None])
            tl.store(x_ptr + dv_tile, dnew.to(x_ptr.dtype.element_ty), mask=is_token[None, :])
        scaled = (tl.trans(do).to(tl.float32) * query[None, :]).to(q.dtype)
        dstate = tl.dot(scaled, q, dstate * tl.exp2(last), input_precision=PRECISION)
        if DELTA:
            dstate = tl.dot((x * read[None, :]).to(k.dtype), k, dstate, input_precision=PRECISION)
        read, write, query, last = next_read, next_write, next_query, next_last
    if tl.load(source_ptr + chain) >= 0:
        tl.store(start_gradient_ptr + (chain.to(tl.int64) * G + head) * K * V + state_tile, dstate)


@triton.jit
def _input_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, state_ptr, dstate_ptr, new_ptr, x_ptr, total_ptr, beta_ptr,
    length_ptr, q_length_ptr, dtotal_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, start_ptr,
    scale, GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """dk of one chunk and value head, dg, and with DELTA dv and dbeta.

    Operands of products are loaded a second time, from cache, for elementwise arithmetic: registers cannot
    hold both layouts at once.
    """
    index = tl.program_id(0).to(tl.int64)
    head, start, size = chunk_of(index, start_ptr, G)
    t, d, column = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    is_token = t < size
    key_base = (start * (G // GROUP) + head // GROUP) * K
    key_tile = t[:, None] * (G // GROUP * K) + d[None, :]
    value_base = (start * G + head) * V
    value_tile = t[:, None] * (G * V) + column[None, :]
    value_tile_t = t[None, :] * (G * V) + column[:, None]
    state_tile = column[:, None] * K + d[None, :]
    new_tile = column[:, None] * C + t[None, :]
    head_base = start * G + head

    row = index * C + t
    total, last = tl.load(total_ptr + row), tl.load(total_ptr + index * C + C - 1)
    dstate = tl.load(dstate_ptr + index * K * V + state_tile).to(tl.float32)
    state = tl.load(state_ptr + index * K * V + state_tile).to(tl.float32)
    d_last = tl.sum(tl.sum(dstate * state, 1), 0) * tl.exp2(last)

    if DELTA:
        q_length, length = tl.load(q_length_ptr + row), tl.load(length_ptr + row)
        x = tl.load(x_ptr + index * C * V + new_tile)
        v = tl.load(v_ptr + value_base + value_tile_t, mask=is_token[None, :], other=0.0)
        tl.store(dv_ptr + value_base + value_tile_t, x.to(dv_ptr.dtype.element_ty), mask=is_token[None, :])
        x_v = tl.sum(v.to(tl.float32) * x.to(tl.float32), 0)
    else:
        q_length, length = tl.full([C], 1.0, tl.float32), tl.full([C], 1.0, tl.float32)

    # The part of dk where k is a column: of the chunk's last state, P and A.
    new = load_new(new_ptr, index, start, head, is_token, G, V, C, DELTA)
    dstate = tl.load(dstate_ptr + index * K * V + state_tile)
    dk = tl.dot(tl.trans(new), dstate, input_precision=PRECISION) * tl.exp2(last - total)[:, None]
    k_wide = tl.load(k_ptr + key_base + key_tile, mask=is_token[:, None], other=0.0).to(tl.float32)
    from_last = tl.sum(dk * k_wide, 1) * length
    do = tl.load(do_ptr + value_base + value_tile, mask=is_token[:, None], other=0.0)
    q = tl.load(q_ptr + key_base + key_tile, mask=is_token[:, None], other=0.0)
    dp = tl.dot(tl.trans(new), tl.trans(do), input_precision=PRECISION)
    dp *= (scale * q_length)[None, :]
    dp = decayed(dp, total[None, :], total[:, None], t[:, None] <= t[None, :])
    dk = tl.dot(dp.to(q.dtype), q, dk, input_precision=PRECISION)
    dtotal = tl.load(dtotal_ptr + row) - from_last
    if DELTA:
        x = tl.load(x_ptr + index * C * V + new_tile)
        k = tl.load(k_ptr + key_base + key_tile, mask=is_token[:, None], other=0.0)
        da = tl.dot(tl.trans(new), x, input_precision=PRECISION)
        da = decayed(-da * length[None, :], total[None, :], total[:, None], t[:, None] < t[None, :])
        dk = tl.dot(da.to(q.dtype), k, dk, input_precision=PRECISION)

        # The part of dk where k is a row: of A and e k S.
        da = tl.dot(tl.trans(x), new, input_precision=PRECISION)
        da = decayed(-da * length[None, :], total[:, None], total[None, :], t[:, None] > t[None, :])
        a_da = da * (tl.dot(k, tl.trans(k), input_precision=PRECISION) * length[:, None])
        dtotal -= tl.sum(a_da, 0)
        state = tl.load(state_ptr + index * K * V + state_tile)
        dk_row = tl.dot(tl.trans(x), state, input_precision=PRECISION) * (-tl.exp2(total))[:, None]
        k_wide = tl.load(k_ptr + key_base + key_tile, mask=is_token[:, None], other=0.0).to(tl.float32)
        k_row = tl.sum(dk_row * k_wide, 1) * length + tl.sum(a_da, 1)
        dk += tl.dot(da.to(q.dtype), k, dk_row, input_precision=PRECISION)

        k_wide = tl.load(k_ptr + key_base + key_tile, mask=is_token[:, None], other=0.0).to(tl.float32)
        dk = (dk - k_wide * (length * length * tl.sum(dk * k_wide, 1))[:, None]) * length[:, None]
        dbeta = (x_v + k_row) / tl.load(beta_ptr + row, mask=is_token, other=1.0)
        tl.store(dbeta_ptr + head_base + t * G, dbeta.to(dbeta_ptr.dtype.element_ty), mask=is_token)
        dtotal += k_row
    tile = t[:, None] * (G * K) + d[None, :]
    tl.store(dk_ptr + head_base * K + tile, dk.to(dk_ptr.dtype.element_ty), mask=is_token[:, None])
    dg = tl.cumsum(dtotal, 0, reverse=True) + d_last + tl.sum(from_last, 0)
    tl.store(dg_ptr + head_base + t * G, dg.to(dg_ptr.dtype.element_ty), mask=is_token)


# 2. Launches.


def state_gradients(
    q: Tensor, k: Tensor, do: Tensor, scores: Tensor, dstate: Tensor, x: Tensor, start_gradient: Tensor,
    saved: Saved, chunks: Chunks, chains: Chains,
) -> Run:  # fmt: skip
    """Returns a pass that fills ``dstate`` (dS'^T), ``x`` (X^T) and ``start_gradient`` of chains.

    It reads the gradients of the chains' own slots from rows ``Chains.first_reader`` of ``start_gradient``.
    """
    factors, block = saved.factors, min(do.shape[2], 64)

    def run(first: int, end: int) -> None:
        programs = (end - first) * do.shape[1] * (do.shape[2] // block)
        _state_gradient_kernel[(programs,)](
            q, k, do, saved.inverse, scores, factors.read, factors.write, factors.query, factors.total,
            dstate, x, start_gradient, chains.first, chains.end, chains.source, chains.first_reader,
            chunks.start, first, **sizes(q, do), BLOCK_V=block, PRECISION=precision(k),
            STAGES=stages(k, programs), RAW=k.is_cuda, DELTA=saved.has_delta,
        )  # fmt: skip

    return run


def head_gradient(dk: Tensor, v: Tensor) -> Tensor:
    """Returns a tensor for the part of dk [N, H, K] of each value head [N, G, K]; dk itself if G = H."""
    return dk if dk.shape[1] == v.shape[1] else dk.new_empty(len(dk), v.shape[1], dk.shape[2])


def sum_heads(part: Tensor, dk: Tensor) -> None:
    """Fills dk from its parts. torch sums 16-bit numbers in fp32."""
    if part is not dk:
        torch.sum(part.unflatten(1, (dk.shape[1], -1)), 2, out=dk)


def input_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, state: Tensor, dstate: Tensor, new: Tensor, x: Tensor,
    gradients: tuple[Tensor, Tensor, *tuple[Tensor | None, ...]], saved: Saved, chunks: Chunks,
) -> None:  # fmt: skip
    """Fills the gradients dq, dk, dg, and for a delta rule dv and dbeta."""
    factors, (dq, dk, *others) = saved.factors, gradients
    q_part, k_part = head_gradient(dq, v), head_gradient(dk, v)
    scale = q.shape[2] ** -0.5 if saved.has_delta else 1.0
    constants = sizes(q, v) | {"PRECISION": precision(q), "DELTA": saved.has_delta}
    grid, dtotal = (len(state) * v.shape[1],), torch.empty_like(factors.total)
    _query_kernel[grid](
        q, k, do, state, new, factors.total, factors.length, q_part, dtotal, chunks.start, scale, **constants
    )
    _input_kernel[grid](
        q, k, v, do, state, dstate, new, x, factors.total, factors.beta, factors.length, factors.q_length,
        dtotal, k_part, *others, chunks.start, scale, **constants,
    )  # fmt: skip
    sum_heads(q_part, dq)
    sum_heads(k_part, dk)
