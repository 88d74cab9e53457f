"""Backward kernels of Kimi Delta Attention in Triton. ``kda_forward.py`` explains letters and levels.

From dS', the gradient of a chunk's last state, and X = dv:

    dn = P^T do + (exp(G_last - G) k) dS';   X = T^T dn
    dS = Diag(exp(G_last)) dS' + (exp(G) q)^T do - (exp(G) k)^T X
    dP_ij = do_i.n_j  (j <= i);   beta_i dA_ij = -X_i.n_j  (j < i)

The gradients that pass through P and A are sums over levels, with the same factors as P and A themselves. At
each level, a token is either in a left half or in a right half. In a left half, its key is a column of P and
A. In a right half, its query and its key are rows. So a level is one product for P and one for A, with dP and
dA mirrored at the diagonal.

A program computes a part of the channels. Sums over all channels follow from the definitions of o, n and X:

    dbeta_i = (X_i.n_i) / beta_i^2;   q_i.dq_i = o_i.do_i;   k_i.dk_i = 2 beta_i dbeta_i - X_i.v_i

The last two are needed because q and k are normalized. Let dk_row_i be the part of dk_i where k_i is a row of
A or exp(G) k S, and dk_column_i the rest. Then, for each channel,

    dG_i = q_i dq_i + k_i dk_row_i - k_i dk_column_i

The gradient of G_last also contains, for each channel, exp(G_last) times the product of S and dS', and what
S' contributes to the sum of all k_i dk_column_i. At each level, rows and columns get the same rounded
factors, so terms that cancel in exact arithmetic also cancel here.

The kernels run in this order:

    _state_gradient_kernel   chain after chain, from its end: dS' of each chunk, and X
    _pair_gradient_kernel    all chunks at once: dP, dA, dv, dbeta, and q.dq and k.dk
    _input_kernel            all chunks at once: dq, dk and dg
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_tree.components.recurrence.buffers import Saved, precision, sizes
from titan_tree.components.recurrence.launch import Run
from titan_tree.components.recurrence.triton_kernels.backward_kernels import head_gradient, sum_heads
from titan_tree.components.recurrence.triton_kernels.forward_kernels import (
    SMALLEST_BETA,
    chain_of,
    chunk_of,
    load_hidden,
    stages,
)
from titan_tree.components.recurrence.triton_kernels.kda_forward import (
    LEVELS,
    Prepared,
    level_decay,
    level_of_pairs,
)
from titan_tree.tree.chunks import Chains, Chunks

# 1. Device code.


@triton.jit(do_not_specialize=["first_chain"])
def _state_gradient_kernel(
    query_ptr, read_ptr, write_ptr, do_ptr, inverse_ptr, p_ptr, keep_ptr, dstate_ptr, x_ptr,
    start_gradient_ptr, first_ptr, end_ptr, source_ptr, reader_ptr, start_ptr, first_chain,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """One chain from its end: dS'^T and X^T of each chunk, and the gradient of the state it starts from."""
    chain, head, column = chain_of(first_chain, G, V, BLOCK_V)
    t, d = tl.arange(0, C), tl.arange(0, K)
    state_tile = column[:, None] * K + d[None, :]
    dstate = tl.zeros([BLOCK_V, K], dtype=tl.float32)
    first, end = tl.load(first_ptr + chain), tl.load(end_ptr + chain)
    keep = tl.load(keep_ptr + ((end - 1).to(tl.int64) * G + head) * K + d)
    for i in tl.range(0, end - first, num_stages=STAGES):
        chunk = end - 1 - i
        row = chunk.to(tl.int64) * G + head
        clamped = tl.maximum(chunk, first)
        start = load_hidden(start_ptr + clamped, RAW)
        is_token = (t < load_hidden(start_ptr + clamped + 1, RAW) - start)[:, None]
        token = start.to(tl.int64) * G + head
        key = t[:, None] * (G * K) + d[None, :]
        write = tl.load(write_ptr + token * K + key, mask=is_token, other=0.0)
        value = t[:, None] * (G * V) + column[None, :]
        do = tl.load(do_ptr + token * V + value, mask=is_token, other=0.0)
        p = tl.load(p_ptr + row * C * C + (t[:, None] * C + t[None, :]))
        inverse = tl.load(inverse_ptr + row * C * C + (t[:, None] * C + t[None, :]))
        query = tl.load(query_ptr + token * K + key, mask=is_token, other=0.0)
        read = tl.load(read_ptr + token * K + key, mask=is_token, other=0.0)
        reader = load_hidden(reader_ptr + clamped, RAW)
        next_keep = tl.load(keep_ptr + (tl.maximum(chunk - 1, first).to(tl.int64) * G + head) * K + d)
        if reader >= 0:
            dstate += tl.load(start_gradient_ptr + (reader.to(tl.int64) * G + head) * K * V + state_tile)
        rounded = dstate.to(write.dtype)
        tl.store(dstate_ptr + row * K * V + state_tile, rounded)
        dnew = tl.dot(rounded, tl.trans(write), input_precision=PRECISION)
        dnew = tl.dot(tl.trans(do), p, dnew, input_precision=PRECISION).to(inverse.dtype)
        x = tl.dot(dnew, inverse, input_precision=PRECISION).to(read.dtype)
        tl.store(x_ptr + row * C * V + (column[:, None] * C + t[None, :]), x)
        dstate = tl.dot(tl.trans(do), query, dstate * keep[None, :], input_precision=PRECISION)
        dstate = tl.dot(x, read, dstate, input_precision=PRECISION)
        keep = next_keep
    if tl.load(source_ptr + chain) >= 0:
        tl.store(start_gradient_ptr + (chain.to(tl.int64) * G + head) * K * V + state_tile, dstate)


@triton.jit
def _pair_gradient_kernel(
    query_ptr, v_ptr, beta_ptr, do_ptr, state_ptr, new_ptr, x_ptr, p_ptr, q_length_ptr, length_ptr, dp_ptr,
    da_ptr, q_dq_ptr, k_dk_ptr, dv_ptr, dbeta_ptr, start_ptr, scale,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dv and dbeta of one chunk and head, dP, and dA without beta; both mirrored at the diagonal.

    dP and dA include the factors that normalize their rows and columns, because the next kernel multiplies
    them by queries and keys that are not normalized.
    """
    index = tl.program_id(0).to(tl.int64)
    head, start, size = chunk_of(index, start_ptr, G)
    t, d, column = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    is_token, token = t < size, start * G + head
    value = t[None, :] * (G * V) + column[:, None]
    new_tile = column[:, None] * C + t[None, :]
    pair = t[:, None] * C + t[None, :]

    x, new = tl.load(x_ptr + index * C * V + new_tile), tl.load(new_ptr + index * C * V + new_tile)
    tl.store(dv_ptr + token * V + value, x.to(dv_ptr.dtype.element_ty), mask=is_token[None, :])
    beta = tl.load(beta_ptr + token + t * G, mask=is_token, other=1.0).to(tl.float32)
    beta = tl.where(beta == 0.0, SMALLEST_BETA, beta)
    dbeta = tl.sum((x.to(tl.float32) / beta[None, :]) * (new.to(tl.float32) / beta[None, :]), 0)
    tl.store(dbeta_ptr + token + t * G, dbeta.to(dbeta_ptr.dtype.element_ty), mask=is_token)
    v = tl.load(v_ptr + token * V + value, mask=is_token[None, :], other=0.0)
    x_v = tl.sum(v.to(tl.float32) * x.to(tl.float32), 0)
    tl.store(k_dk_ptr + index * C + t, 2.0 * beta * dbeta - x_v)

    is_row = t[:, None] >= t[None, :]
    q_length = tl.load(q_length_ptr + index * C + t) * scale
    length = tl.load(length_ptr + index * C + t)
    da = tl.dot(tl.trans(x), new, input_precision=PRECISION)
    mirrored = tl.dot(tl.trans(new), x, input_precision=PRECISION)
    da = tl.where(is_row, -da, -mirrored) * (length[:, None] * length[None, :])
    tl.store(da_ptr + index * C * C + pair, da.to(da_ptr.dtype.element_ty))

    do = tl.load(do_ptr + token * V + value, mask=is_token[None, :], other=0.0)
    dp = tl.dot(tl.trans(do), new, input_precision=PRECISION)
    mirrored = tl.dot(tl.trans(new), do, input_precision=PRECISION)
    q_dq = tl.sum(tl.load(p_ptr + index * C * C + pair).to(tl.float32) * dp, 1)
    dp *= q_length[:, None] * length[None, :]
    dp = tl.where(is_row, dp, mirrored * (length[:, None] * q_length[None, :]))
    tl.store(dp_ptr + index * C * C + pair, dp.to(dp_ptr.dtype.element_ty))
    state = tl.load(state_ptr + index * K * V + (column[:, None] * K + d[None, :]))
    dquery = tl.dot(tl.trans(do), state, input_precision=PRECISION)
    key = t[:, None] * (G * K) + d[None, :]
    query = tl.load(query_ptr + token * K + key, mask=is_token[:, None], other=0.0).to(tl.float32)
    tl.store(q_dq_ptr + index * C + t, q_dq + tl.sum(query * dquery, 1))


@triton.jit
def _input_kernel(
    q_ptr, k_ptr, do_ptr, state_ptr, dstate_ptr, new_ptr, x_ptr, dp_ptr, da_ptr, q_dq_ptr, k_dk_ptr,
    total_ptr, q_length_ptr, length_ptr, dq_ptr, dk_ptr, dg_ptr, start_ptr, scale,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq, dk and dg of one chunk, head and block of channels."""
    # The blocks of a chunk and head are neighbors, so that the tiles that all of them read stay in the cache.
    BLOCKS: tl.constexpr = K // BLOCK_K
    index = (tl.program_id(0) // BLOCKS).to(tl.int64)
    head, start, size = chunk_of(index, start_ptr, G)
    t, column = tl.arange(0, C), tl.arange(0, V)
    d = tl.program_id(0) % BLOCKS * BLOCK_K + tl.arange(0, BLOCK_K)
    is_token, token = (t < size)[:, None], start * G + head
    key_base = (start * (G // GROUP) + head // GROUP) * K
    total_ptr += token * K
    pair, pair_level = t[:, None] * C + t[None, :], level_of_pairs(t)
    new_tile = column[:, None] * C + t[None, :]
    value_tile = t[:, None] * (G * V) + column[None, :]
    q_length = tl.load(q_length_ptr + index * C + t)[:, None]
    length = tl.load(length_ptr + index * C + t)[:, None]
    q_dq = tl.load(q_dq_ptr + index * C + t)[:, None]
    k_dk = tl.load(k_dk_ptr + index * C + t)[:, None]
    key_tile = t[:, None] * (G // GROUP * K) + d[None, :]
    tile = t[:, None] * (G * K) + d[None, :]
    total = tl.load(total_ptr + tile, mask=is_token, other=0.0)
    q = tl.load(q_ptr + key_base + key_tile, mask=is_token, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + key_base + key_tile, mask=is_token, other=0.0).to(tl.float32)

    # Through P and A.
    dp = tl.load(dp_ptr + index * C * C + pair)
    da = tl.load(da_ptr + index * C * C + pair)
    dp_self = tl.load(dp_ptr + index * C * C + t * (C + 1)).to(tl.float32)[:, None]
    dq, dk = dp_self * k, dp_self * q
    dtotal = tl.zeros([C, BLOCK_K], tl.float32)
    for level in range(LEVELS):
        decay = level_decay(total_ptr, total, t, d, level, size, G * K)
        is_row = ((t >> level) & 1 == 1)[:, None]
        meets = pair_level == level
        key = (k * decay).to(dp.dtype)
        mixed = (tl.where(is_row, q, k) * decay).to(dp.dtype)
        from_p = tl.dot(tl.where(meets, dp, 0.0), mixed, input_precision=PRECISION)
        from_a = tl.dot(tl.where(meets, da, 0.0), key, input_precision=PRECISION)
        both = mixed.to(tl.float32) * from_p + key.to(tl.float32) * from_a
        dtotal += tl.where(is_row, both, -both)
        dq += tl.where(is_row, decay, 0.0) * from_p
        dk += decay * from_a + tl.where(is_row, 0.0, decay) * from_p

    # Through the chunk's first state, and through its last one.
    gain = tl.exp2(total)
    state_tile = column[:, None] * K + d[None, :]
    state = tl.load(state_ptr + index * K * V + state_tile)
    do = tl.load(do_ptr + token * V + value_tile, mask=is_token, other=0.0)
    from_state = tl.dot(do, state, input_precision=PRECISION) * gain * (q_length * scale)
    dq += from_state
    dtotal += q * from_state
    x = tl.load(x_ptr + index * C * V + new_tile)
    from_state = tl.dot(tl.trans(x), state, input_precision=PRECISION) * gain * length
    dk -= from_state
    dtotal -= k * from_state
    new = tl.load(new_ptr + index * C * V + new_tile)
    dstate = tl.load(dstate_ptr + index * K * V + state_tile)
    last = tl.load(total_ptr + (size - 1) * (G * K) + d)
    written = tl.dot(tl.trans(new), dstate, input_precision=PRECISION)
    written *= tl.where(is_token, tl.exp2(last[None, :] - total), 0.0) * length
    dk += written
    written *= k
    dtotal -= written
    d_last = tl.sum(state.to(tl.float32) * dstate.to(tl.float32), 0) * tl.exp2(last)
    dg = tl.cumsum(dtotal, 0, reverse=True) + (d_last + tl.sum(written, 0))[None, :]
    tl.store(dg_ptr + token * K + tile, dg.to(dg_ptr.dtype.element_ty), mask=is_token)

    dq -= q * (q_dq * q_length * q_length)
    tl.store(dq_ptr + token * K + tile, dq.to(dq_ptr.dtype.element_ty), mask=is_token)
    dk -= k * (k_dk * length * length)
    tl.store(dk_ptr + token * K + tile, dk.to(dk_ptr.dtype.element_ty), mask=is_token)


# 2. Launches.


def state_gradients(
    prepared: Prepared, q: Tensor, k: Tensor, do: Tensor, scores: Tensor, dstate: Tensor, x: Tensor,
    start_gradient: Tensor, saved: Saved, chunks: Chunks, chains: Chains,
) -> Run:  # fmt: skip
    """Returns a pass that fills ``dstate`` (dS'^T), ``x`` (X^T) and ``start_gradient`` of chains.

    It reads the gradients of the chains' own slots from rows ``Chains.first_reader`` of ``start_gradient``.
    """
    block = min(do.shape[2], 64)

    def run(first: int, end: int) -> None:
        programs = (end - first) * do.shape[1] * (do.shape[2] // block)
        _state_gradient_kernel[(programs,)](
            prepared.query, prepared.read, prepared.write, do, saved.inverse, scores, prepared.keep,
            dstate, x, start_gradient, chains.first, chains.end, chains.source, chains.first_reader,
            chunks.start, first, **sizes(q, do), BLOCK_V=block, PRECISION=precision(k),
            STAGES=min(stages(k, programs, least=1), 2), RAW=k.is_cuda,
        )  # fmt: skip

    return run


def pair_gradients(
    prepared: Prepared, v: Tensor, do: Tensor, state: Tensor, new: Tensor, x: Tensor, dv: Tensor,
    dbeta: Tensor, saved: Saved, chunks: Chunks,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Fills dv and dbeta. Returns dP, dA [chunks, G, 64, 64], and q.dq, k.dk [chunks, G, 64] in fp32."""
    dp, da = torch.empty_like(saved.inverse), torch.empty_like(saved.inverse)
    q_dq, k_dk = torch.empty_like(prepared.length), torch.empty_like(prepared.length)
    query = prepared.query
    _pair_gradient_kernel[(len(state) * v.shape[1],)](
        query, v, prepared.beta, do, state, new, x, prepared.scores, prepared.q_length, prepared.length, dp,
        da, q_dq, k_dk, dv, dbeta, chunks.start, query.shape[2] ** -0.5, **sizes(query, v),
        PRECISION=precision(v), num_warps=8,
    )  # fmt: skip
    return dp, da, q_dq, k_dk


def input_gradients(
    prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, do: Tensor, state: Tensor,
    dstate: Tensor, new: Tensor, x: Tensor, gradients: tuple[Tensor, ...], saved: Saved, chunks: Chunks,
) -> None:  # fmt: skip
    """Fills the gradients dq, dk, dv, dg and dbeta."""
    dq, dk, dv, dg, dbeta = gradients
    q_part, k_part = head_gradient(dq, v), head_gradient(dk, v)
    constants, programs = sizes(q, v) | {"PRECISION": precision(q)}, len(state) * v.shape[1]
    dp, da, q_dq, k_dk = pair_gradients(prepared, v, do, state, new, x, dv, dbeta, saved, chunks)
    block = min(q.shape[2], 64)
    _input_kernel[(programs * (q.shape[2] // block),)](
        q, k, do, state, dstate, new, x, dp, da, q_dq, k_dk, prepared.total, prepared.q_length,
        prepared.length, q_part, k_part, dg, chunks.start, q.shape[2] ** -0.5, **constants, BLOCK_K=block,
        num_warps=8, num_stages=1,
    )  # fmt: skip
    sum_heads(q_part, dq)
    sum_heads(k_part, dk)
