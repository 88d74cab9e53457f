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
one product for A and one for P, of which the pairs that meet at this level are kept.

The kernels run in this order:

    _keys_kernel     all chunks at once: G, and the keys and queries with their decays
    _pairs_kernel    all chunks at once: T and P
    _state_kernel    chain after chain: S at the start of each chunk, and n
    _output_kernel   all chunks at once: o

The backward pass runs the first two again, because their results would need more memory than the inputs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_tree.components.recurrence.buffers import Run, Saved, empty_states, precision, run_rounds, sizes
from titan_tree.components.recurrence.triton_kernels.forward_kernels import (
    LOG2_E,
    SMALLEST_BETA,
    inverse_length,
    load_hidden,
    stages,
    unit_inverse,
)
from titan_tree.tree.chunks import CHUNK, Chains, Chunks

LEVELS = tl.constexpr(CHUNK.bit_length() - 1)


class Prepared(NamedTuple):
    """What is computed for all chunks at once, before the serial pass: [N, G, K], unless stated otherwise."""

    total: Tensor  # G in base 2, fp32
    query: Tensor  # exp(G) q, in the dtype of q, as are the next two
    read: Tensor  # -exp(G) k
    write: Tensor  # exp(G_last - G) k
    keep: Tensor  # [chunks, G, K] fp32: exp(G_last)
    q_length: Tensor  # [chunks, G, 64] fp32: 1 / |q|
    length: Tensor  # [chunks, G, 64] fp32: 1 / |k|
    scores: Tensor  # [chunks, G, 64, 64]: P, 0 past a chunk's last token; ``make_scores`` fills it
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
def _keys_kernel(
    q_ptr, k_ptr, g_ptr, total_ptr, query_ptr, read_ptr, write_ptr, keep_ptr, q_length_ptr, length_ptr,
    start_ptr, scale,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
):  # fmt: skip
    """``Keys`` of one chunk and head."""
    index = tl.program_id(0).to(tl.int64)
    chunk, head = index // G, index % G
    start, end = tl.load(start_ptr + chunk), tl.load(start_ptr + chunk + 1)
    t, d = tl.arange(0, C), tl.arange(0, K)
    is_token = (t < end - start)[:, None]
    start = start.to(tl.int64)
    key_base, key_tile = (
        (start * (G // GROUP) + head // GROUP) * K,
        t[:, None] * (G // GROUP * K) + d[None, :],
    )
    base, tile = (start * G + head) * K, t[:, None] * (G * K) + d[None, :]
    g = tl.load(g_ptr + base + tile, mask=is_token, other=0.0).to(tl.float32)
    total = tl.cumsum(g * LOG2_E, 0)
    tl.store(total_ptr + base + tile, total, mask=is_token)
    last = tl.sum(tl.where(t[:, None] == C - 1, total, 0.0), 0)
    tl.store(keep_ptr + index * K + d, tl.exp2(last))
    gain = tl.exp2(total)

    q = tl.load(q_ptr + key_base + key_tile, mask=is_token, other=0.0).to(tl.float32)
    q_length = inverse_length(q)
    tl.store(q_length_ptr + index * C + t, q_length)
    query = q * (scale * q_length)[:, None] * gain
    tl.store(query_ptr + base + tile, query.to(query_ptr.dtype.element_ty), mask=is_token)
    k = tl.load(k_ptr + key_base + key_tile, mask=is_token, other=0.0).to(tl.float32)
    length = inverse_length(k)
    tl.store(length_ptr + index * C + t, length)
    k *= length[:, None]
    tl.store(read_ptr + base + tile, (-gain * k).to(read_ptr.dtype.element_ty), mask=is_token)
    write = tl.exp2(last[None, :] - total) * k
    tl.store(write_ptr + base + tile, write.to(write_ptr.dtype.element_ty), mask=is_token)


@triton.jit
def _pairs_kernel(
    q_ptr, k_ptr, beta_ptr, total_ptr, q_length_ptr, length_ptr, inverse_ptr, p_ptr, start_ptr, scale,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, INVERSE_PRECISION: tl.constexpr, INVERSE: tl.constexpr,
):  # fmt: skip
    """P of one chunk and head. INVERSE: also T."""
    index = tl.program_id(0).to(tl.int64)
    chunk, head = index // G, index % G
    start, end = tl.load(start_ptr + chunk), tl.load(start_ptr + chunk + 1)
    size, start = end - start, start.to(tl.int64)
    t, d = tl.arange(0, C), tl.arange(0, K)
    is_token = (t < size)[:, None]
    key_base, key_tile = (
        (start * (G // GROUP) + head // GROUP) * K,
        t[:, None] * (G // GROUP * K) + d[None, :],
    )
    total_ptr += (start * G + head) * K
    total = tl.load(total_ptr + (t[:, None] * (G * K) + d[None, :]), mask=is_token, other=0.0)
    q = tl.load(q_ptr + key_base + key_tile, mask=is_token, other=0.0)
    k = tl.load(k_ptr + key_base + key_tile, mask=is_token, other=0.0)
    q_length = tl.load(q_length_ptr + index * C + t)[:, None] * scale
    length = tl.load(length_ptr + index * C + t)[:, None]

    differ = t[:, None] ^ t[None, :]
    products = tl.sum(q.to(tl.float32) * q_length * k.to(tl.float32) * length, 1)
    p = tl.where(differ == 0, products[:, None], 0.0)
    kk = tl.zeros([C, C], tl.float32)  # symmetric: A without beta, and its transpose
    for level in range(LEVELS):
        decay = level_decay(total_ptr, total, t, d, level, size, G * K)
        column = (k.to(tl.float32) * (length * decay)).to(k.dtype)
        row = (q.to(tl.float32) * (q_length * decay)).to(k.dtype)
        meets = (differ >> level) == 1
        product = tl.dot(row, tl.trans(column), input_precision=PRECISION)
        p = tl.where(meets & (t[:, None] > t[None, :]), product, p)
        if INVERSE:
            kk = tl.where(meets, tl.dot(column, tl.trans(column), input_precision=PRECISION), kk)
    pair = index * C * C + (t[:, None] * C + t[None, :])
    tl.store(p_ptr + pair, p.to(p_ptr.dtype.element_ty))
    if INVERSE:
        beta = tl.load(beta_ptr + start * G + head + t * G, mask=t < size, other=0.0).to(tl.float32)
        beta = tl.where((t < size) & (beta == 0.0), SMALLEST_BETA, beta)
        a = tl.where(t[:, None] > t[None, :], kk * beta[:, None], 0.0)
        at = tl.where(t[:, None] < t[None, :], kk * beta[None, :], 0.0)
        inverse = unit_inverse(a, at, C, INVERSE_PRECISION) * beta[None, :]
        tl.store(inverse_ptr + pair, inverse.to(inverse_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["first_chain"])
def _state_kernel(
    read_ptr, write_ptr, v_ptr, inverse_ptr, keep_ptr, state_ptr, new_ptr, slots_ptr,
    first_ptr, end_ptr, source_ptr, slot_ptr, start_ptr, first_chain,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_V: tl.constexpr, LEAVE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    RAW: tl.constexpr,
):  # fmt: skip
    """S^T at the start of each chunk of one chain, and n^T. LEAVE: also stores states into their slots."""
    index = tl.program_id(0)
    V_BLOCKS: tl.constexpr = V // BLOCK_V
    chain = first_chain + index // (G * V_BLOCKS)
    head = (index // V_BLOCKS) % G
    column = (index % V_BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
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
        key = token * K + (t[:, None] * (G * K) + d[None, :])
        read = tl.load(read_ptr + key, mask=is_token, other=0.0)
        value = token * V + (t[:, None] * (G * V) + column[None, :])
        v = tl.load(v_ptr + value, mask=is_token, other=0.0)
        inverse = tl.load(inverse_ptr + row * C * C + (t[:, None] * C + t[None, :]))
        write = tl.load(write_ptr + key, mask=is_token, other=0.0)
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


@triton.jit
def _output_kernel(
    query_ptr, state_ptr, new_ptr, p_ptr, o_ptr, start_ptr,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """o of one chunk and head."""
    index = tl.program_id(0).to(tl.int64)
    chunk, head = index // G, index % G
    start, end = tl.load(start_ptr + chunk), tl.load(start_ptr + chunk + 1)
    t, d, column = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    is_token = (t < end - start)[:, None]
    token = start.to(tl.int64) * G + head
    query = tl.load(query_ptr + token * K + (t[:, None] * (G * K) + d[None, :]), mask=is_token, other=0.0)
    state = tl.load(state_ptr + index * K * V + (column[:, None] * K + d[None, :]))
    new = tl.load(new_ptr + index * C * V + (column[:, None] * C + t[None, :]))
    p = tl.load(p_ptr + index * C * C + (t[:, None] * C + t[None, :]))
    o = tl.dot(query, tl.trans(state), input_precision=PRECISION)
    o = tl.dot(p, tl.trans(new), o, input_precision=PRECISION)
    tile = token * V + (t[:, None] * (G * V) + column[None, :])
    tl.store(o_ptr + tile, o.to(o_ptr.dtype.element_ty), mask=is_token)


# 2. Launches.


def prepare(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks) -> Prepared:
    """Returns ``Prepared``, for inputs of any strides; ``scores`` is not filled yet."""
    q, k, g = (x.contiguous() for x in (q, k, g))
    (_, heads, width_k), num_chunks = g.shape, len(chunks.before)
    total, scale = torch.empty_like(g, dtype=torch.float32), width_k**-0.5
    query, read, write = (torch.empty_like(g, dtype=q.dtype) for _ in range(3))
    keep = total.new_empty(num_chunks, heads, width_k)
    q_length, length = total.new_empty(2, num_chunks, heads, CHUNK)
    keys = total, query, read, write, keep, q_length, length
    _keys_kernel[(num_chunks * heads,)](q, k, g, *keys, chunks.start, scale, **sizes(q, v))
    return Prepared(*keys, q.new_empty(num_chunks, heads, CHUNK, CHUNK), beta.contiguous())


def make_inverse(
    prepared: Prepared, q: Tensor, k: Tensor, g: Tensor, beta: Tensor, v: Tensor, saved: Saved, chunks: Chunks
) -> None:
    """Fills ``saved.inverse`` and ``prepared.scores``."""
    _make_pairs(prepared, q, k, v, saved, chunks, inverse=True)


def make_scores(
    prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, saved: Saved, chunks: Chunks, leave: bool
) -> Tensor:
    """Returns ``prepared.scores``. leave: ``make_inverse`` filled it; otherwise this function does."""
    if not leave:
        _make_pairs(prepared, q, k, v, saved, chunks, inverse=False)
    return prepared.scores


def _make_pairs(
    prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, saved: Saved, chunks: Chunks, inverse: bool
) -> None:
    _pairs_kernel[(len(saved.inverse) * v.shape[1],)](
        q, k, prepared.beta, prepared.total, prepared.q_length, prepared.length, saved.inverse,
        prepared.scores, chunks.start, q.shape[2] ** -0.5, **sizes(q, v), PRECISION=precision(q),
        INVERSE_PRECISION="tf32" if q.dtype != torch.float32 else precision(q), INVERSE=inverse,
        num_warps=8, num_stages=1,
    )  # fmt: skip


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
            **sizes(k, v), BLOCK_V=block, LEAVE=leave, PRECISION=precision(k), STAGES=stages(k, programs),
            RAW=k.is_cuda,
        )  # fmt: skip

    return run


def outputs(
    prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, scores: Tensor, o: Tensor, saved: Saved,
    chunks: Chunks, chains: Chains,
) -> None:  # fmt: skip
    """Fills the slots, round by round, and o."""
    state, new = empty_states(saved)
    run_rounds(make_states(prepared, k, v, state, new, saved, chunks, chains, leave=True), chains)
    _output_kernel[(len(state) * v.shape[1],)](
        prepared.query, state, new, scores, o, chunks.start, **sizes(q, v), PRECISION=precision(q)
    )
