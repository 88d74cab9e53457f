"""Forward kernels of Kimi Delta Attention (arXiv:2510.26692) in Triton: a decay per channel of the keys.

``forward_kernels.py`` explains letters, layouts and the serial pass, ``reference.py`` the algebra. With q and
k normalized, q also scaled, and with G_i the decays of a channel summed from the chunk's start:

    A_ij = beta_i sum over channels of exp(G_i - G_j) k_i k_j  (j < i);   T = (I + A)^-1 diag(beta)
    P_ij = sum over channels of exp(G_i - G_j) q_i k_j  (j <= i);   n = T (v - (exp(G) k) S)
    S' = Diag(exp(G_last)) S + (exp(G_last - G) k)^T n;   o = (exp(G) q) S + P n

exp(-G_j) may overflow, so A is not one product of two matrices. It is computed as six of them, and so is P.
Two tokens of a chunk *meet* at a level: the highest bit in which their numbers differ. At level l, the chunk
consists of blocks of 2^(l+1) tokens. j < i meet if j is in the left half of a block and i in its right half.
With m the first token of the right half,

    exp(G_i - G_j) = exp(G_i - G_m) exp(G_m - G_j)

where both factors are at most 1. A token has one factor per level: 2^-|G - G_m|, with G in base 2. A level is
one product for A and one for P. Only the pairs that meet at this level are kept.

The kernels run in this order:

    _prepare_kernel   all chunks at once: G, the keys and queries with their decays, P and T
    _state_kernel     chain after chain: S at the start of each chunk, and n
    output_kernel     all chunks at once: o

The backward pass keeps T alone. It prepares the rest again, because that takes more memory than the inputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_tree.components.recurrence.buffers import Saved, empty_states, precision, sizes
from titan_tree.components.recurrence.launch import Run, run_rounds
from titan_tree.components.recurrence.triton_kernels.forward_kernels import (
    SMALLEST_BETA,
    chain_of,
    chunk_of,
    gate_sums,
    inverse_length,
    load_hidden,
    output_kernel,
    stages,
    unit_inverse,
)
from titan_tree.tree.chunks import CHUNK, Chains, Chunks

LEVELS = tl.constexpr(CHUNK.bit_length() - 1)


class Prepared(NamedTuple):
    """What ``prepare`` computes for all chunks at once: [N, G, K], unless stated otherwise."""

    total: Tensor  # G in base 2, fp32
    query: Tensor  # exp(G) q, in the dtype of q, as are the next two
    read: Tensor  # -exp(G) k
    write: Tensor  # exp(G_last - G) k
    keep: Tensor  # [chunks, G, K] fp32: exp(G_last)
    q_length: Tensor  # [chunks, G, 64] fp32: 1 / |q|
    length: Tensor  # [chunks, G, 64] fp32: 1 / |k|
    scores: Tensor  # [chunks, G, 64, 64] in the dtype of q: P, 0 past a chunk's last token
    beta: Tensor  # [N, G]: the input


# 1. Device code.


@triton.jit
def level_decay(total_ptr, total, t, d, level, size, STRIDE: tl.constexpr):
    """2 ** -|G - G_m| of each token; m is the token in the middle of its block at this level.

    total_ptr: G of the chunk's first token. size: its number of tokens; the last one replaces those after it.
    """
    middle = tl.minimum(((t >> level) | 1) << level, size - 1)
    return tl.exp2(-tl.abs(total - tl.load(total_ptr + (middle[:, None] * STRIDE + d[None, :]))))


@triton.jit
def level_of_pairs(t):
    """The level at which each pair of tokens t [C] meets, as [C, C]: the highest bit in which they differ.

    It is negative for a token and itself. The exponent of a floating-point number is its highest bit.
    """
    return ((t[:, None] ^ t[None, :]).to(tl.float32).to(tl.int32, bitcast=True) >> 23) - 127


@triton.jit
def _prepare_kernel(
    q_ptr, k_ptr, g_ptr, beta_ptr, total_ptr, query_ptr, read_ptr, write_ptr, keep_ptr, q_length_ptr,
    length_ptr, p_ptr, inverse_ptr, start_ptr, scale,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_K: tl.constexpr, PRECISION: tl.constexpr, INVERSE_PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """``Prepared`` of one chunk and head. INVERSE: also T."""
    index = tl.program_id(0).to(tl.int64)
    head, start, size = chunk_of(index, start_ptr, G)
    t = tl.arange(0, C)
    is_token, token = (t < size)[:, None], start * G + head
    q_ptr += (start * (G // GROUP) + head // GROUP) * K
    k_ptr += (start * (G // GROUP) + head // GROUP) * K
    total_ptr += token * K
    key_rows = t[:, None] * (G // GROUP * K)
    whole = key_rows + tl.arange(0, K)[None, :]
    q = tl.load(q_ptr + whole, mask=is_token, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + whole, mask=is_token, other=0.0).to(tl.float32)
    q_length, length = inverse_length(q), inverse_length(k)
    tl.store(q_length_ptr + index * C + t, q_length)
    tl.store(length_ptr + index * C + t, length)
    q_length *= scale
    with_itself = tl.sum(q * k, 1) * q_length * length

    # Without beta, A is the lower triangle of a symmetric matrix. The upper triangle of p has no meaning.
    p, kk = tl.zeros([C, C], tl.float32), tl.zeros([C, C], tl.float32)
    pair_level = level_of_pairs(t)
    for block in range(K // BLOCK_K):
        d = block * BLOCK_K + tl.arange(0, BLOCK_K)
        tile = t[:, None] * (G * K) + d[None, :]
        total = gate_sums(tl.load(g_ptr + token * K + tile, mask=is_token, other=0.0))
        tl.store(total_ptr + tile, total, mask=is_token)
        tl.debug_barrier()  # ``level_decay`` reads what other threads store here
        last = tl.load(total_ptr + (size - 1) * (G * K) + d)
        tl.store(keep_ptr + index * K + d, tl.exp2(last))
        key_tile = key_rows + d[None, :]
        gain = tl.exp2(total)
        q_block = tl.load(q_ptr + key_tile, mask=is_token, other=0.0).to(tl.float32) * q_length[:, None]
        tl.store(query_ptr + token * K + tile, (q_block * gain).to(query_ptr.dtype.element_ty), mask=is_token)
        k_block = tl.load(k_ptr + key_tile, mask=is_token, other=0.0).to(tl.float32) * length[:, None]
        tl.store(read_ptr + token * K + tile, (-gain * k_block).to(read_ptr.dtype.element_ty), mask=is_token)
        write = tl.exp2(last[None, :] - total) * k_block
        tl.store(write_ptr + token * K + tile, write.to(write_ptr.dtype.element_ty), mask=is_token)

        for level in range(LEVELS):
            decay = level_decay(total_ptr, total, t, d, level, size, G * K)
            row = (q_block * decay).to(p_ptr.dtype.element_ty)
            column = (k_block * decay).to(p_ptr.dtype.element_ty)
            meets = pair_level == level
            p += tl.where(meets, tl.dot(row, tl.trans(column), input_precision=PRECISION), 0.0)
            if INVERSE:
                kk += tl.where(meets, tl.dot(column, tl.trans(column), input_precision=PRECISION), 0.0)

    p = tl.where(t[:, None] > t[None, :], p, tl.where(t[:, None] == t[None, :], with_itself[:, None], 0.0))
    pair = t[:, None] * C + t[None, :]
    tl.store(p_ptr + index * C * C + pair, p.to(p_ptr.dtype.element_ty))
    if INVERSE:
        beta = tl.load(beta_ptr + token + t * G, mask=t < size, other=0.0).to(tl.float32)
        beta = tl.where((t < size) & (beta == 0.0), SMALLEST_BETA, beta)
        a = tl.where(t[:, None] > t[None, :], kk * beta[:, None], 0.0)
        at = tl.where(t[:, None] < t[None, :], kk * beta[None, :], 0.0)
        inverse = unit_inverse(a, at, C, INVERSE_PRECISION) * beta[None, :]
        tl.store(inverse_ptr + index * C * C + pair, inverse.to(inverse_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["first_chain"])
def _state_kernel(
    read_ptr, write_ptr, v_ptr, inverse_ptr, keep_ptr, state_ptr, new_ptr, slots_ptr,
    first_ptr, end_ptr, source_ptr, slot_ptr, start_ptr, first_chain,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_V: tl.constexpr, LEAVE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    RAW: tl.constexpr,
):  # fmt: skip
    """S^T at the start of each chunk of one chain, and n^T. LEAVE: also stores states into their slots."""
    chain, head, column = chain_of(first_chain, G, V, BLOCK_V)
    t, d = tl.arange(0, C), tl.arange(0, K)
    state_tile = column[:, None] * K + d[None, :]
    state = tl.zeros([BLOCK_V, K], dtype=tl.float32)
    source = tl.load(source_ptr + chain)
    if source >= 0:
        state = tl.load(slots_ptr + (source.to(tl.int64) * G + head) * K * V + state_tile)
    first, end = tl.load(first_ptr + chain), tl.load(end_ptr + chain)
    keep = tl.load(keep_ptr + (first.to(tl.int64) * G + head) * K + d)
    for chunk in tl.range(first, end, num_stages=STAGES):
        row = tl.cast(chunk, tl.int64) * G + head
        clamped = tl.minimum(chunk, end - 1)
        start = load_hidden(start_ptr + clamped, RAW)
        is_token = (t < load_hidden(start_ptr + clamped + 1, RAW) - start)[:, None]
        token = start.to(tl.int64) * G + head
        key = t[:, None] * (G * K) + d[None, :]
        read = tl.load(read_ptr + token * K + key, mask=is_token, other=0.0)
        value = t[:, None] * (G * V) + column[None, :]
        v = tl.load(v_ptr + token * V + value, mask=is_token, other=0.0)
        inverse = tl.load(inverse_ptr + row * C * C + (t[:, None] * C + t[None, :]))
        write = tl.load(write_ptr + token * K + key, mask=is_token, other=0.0)
        slot = load_hidden(slot_ptr + clamped, RAW)
        next_keep = tl.load(keep_ptr + (tl.minimum(chunk + 1, end - 1).to(tl.int64) * G + head) * K + d)
        rounded = state.to(read.dtype)
        tl.store(state_ptr + row * K * V + state_tile, rounded)
        ks = tl.dot(rounded, tl.trans(read), input_precision=PRECISION).to(inverse.dtype)
        new = tl.dot(tl.trans(v), tl.trans(inverse), input_precision=PRECISION)
        new = tl.dot(ks, tl.trans(inverse), new, input_precision=PRECISION).to(write.dtype)
        tl.store(new_ptr + row * C * V + (column[:, None] * C + t[None, :]), new)
        state = tl.dot(new, write, state * keep[None, :], input_precision=PRECISION)
        if LEAVE:  # noqa: SIM102 (LEAVE is a constant of the compiler, slot is not)
            if slot >= 0:
                tl.store(slots_ptr + (slot.to(tl.int64) * G + head) * K * V + state_tile, state)
        keep = next_keep


# 2. Launches.


def empty_prepared(q: Tensor, g: Tensor, beta: Tensor, chunks: Chunks, with_total: bool = True) -> Prepared:
    """Returns an uninitialized ``Prepared``, except for beta. Without total, that tensor is empty."""
    (_, heads, width_k), num_chunks = g.shape, len(chunks.before)
    total = g.new_empty(g.shape if with_total else 0, dtype=torch.float32)
    query, read, write = q.new_empty(3, *g.shape)
    q_length, length = total.new_empty(2, num_chunks, heads, CHUNK)
    keep, scores = total.new_empty(num_chunks, heads, width_k), q.new_empty(num_chunks, heads, CHUNK, CHUNK)
    return Prepared(total, query, read, write, keep, q_length, length, scores, beta)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks, inverse: Tensor | None = None
) -> Prepared:
    """Returns ``Prepared``, for inputs of any strides. Also fills ``inverse`` if given: T of each chunk."""
    q, k, g, beta = (x.contiguous() for x in (q, k, g, beta))
    prepared, width_k = empty_prepared(q, g, beta, chunks), q.shape[2]
    _prepare_kernel[(len(prepared.keep) * v.shape[1],)](
        q, k, g, beta, *prepared[:-1], inverse, chunks.start, width_k**-0.5, **sizes(q, v),
        PRECISION=precision(q), INVERSE_PRECISION="tf32" if q.dtype != torch.float32 else precision(q),
        INVERSE=inverse is not None, BLOCK_K=min(width_k, 64), num_warps=8, num_stages=1,
        # In 16 bits, two programs fit on a multiprocessor.
        maxnreg=128 if q.dtype != torch.float32 else None,
    )  # fmt: skip
    return prepared


def scores(prepared: Prepared, *inputs: object) -> Tensor:
    """Returns P, which is already computed."""
    return prepared.scores


def make_states(
    prepared: Prepared, k: Tensor, v: Tensor, state: Tensor, new: Tensor, saved: Saved, chunks: Chunks,
    chains: Chains, leave: bool = False,
) -> Run:  # fmt: skip
    """Returns a pass that fills ``state`` (S^T) and ``new`` (n^T) of chains whose slots are filled.

    leave: also fill the slots that later chains start from.
    """
    block = min(v.shape[2], 64)

    def run(first: int, end: int) -> None:
        programs = (end - first) * v.shape[1] * (v.shape[2] // block)
        _state_kernel[(programs,)](
            prepared.read, prepared.write, v, saved.inverse, prepared.keep, state, new, saved.slots,
            chains.first, chains.end, chains.source, chains.slot, chunks.start, first,
            **sizes(k, v), BLOCK_V=block, LEAVE=leave, PRECISION=precision(k),
            STAGES=stages(k, programs, least=1), RAW=k.is_cuda,
        )  # fmt: skip

    return run


def outputs(
    prepare: Callable, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, o: Tensor, saved: Saved,
    chunks: Chunks, chains: Chains,
) -> None:  # fmt: skip
    """Fills ``saved``, its slots round by round, and o."""
    prepared = prepare(q, k, v, g, beta, chunks, saved.inverse)
    state, new = empty_states(saved)
    run_rounds(make_states(prepared, k, v, state, new, saved, chunks, chains, leave=True), chains)
    output_kernel[(len(state) * v.shape[1],)](
        prepared.query, state, new, prepared.scores, None, o, chunks.start,
        **sizes(prepared.query, v), PRECISION=precision(q), DELTA=True,
    )  # fmt: skip
