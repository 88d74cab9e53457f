"""Forward kernels of the recurrences in Triton. The backward pass reuses some of them.

The algebra is that of ``reference.py``; the chunk form is Gated DeltaNet's (arXiv:2412.06464). Two things are
folded in. The row factors e_i = exp(G_i) / |k_i| and d_i = exp(G_last - G_i) / |k_i| also normalize the keys,
so that no normalized copy is stored. And a chunk's preparation stores T = (I + A)^-1 diag(beta) alone, where
flash-linear-attention stores the products w = T k and u = T v. From the state S at the chunk's start, and
with P_ij = exp(G_i - G_j) q_i.k_j for j <= i and normalized q and k:

    n = T (v - e (k S));   S' = exp(G_last) S + k^T (d n);   o = exp(G) (q S) + P n

Without the delta rule (DELTA is false), q and k are not normalized, T is the identity and n = v: kernels read
v in place of n, and ``_inverse_kernel`` does not run.

This costs one more small product and saves a quarter of the memory traffic. A kernel of its own computes P,
scaled, and the factors of q, because the backward pass needs P again.

The kernels run in this order:

    _gates_kernel     all chunks at once: decays summed from each chunk's start, and beta
    _inverse_kernel   all chunks at once: T and the row factors
    _scores_kernel    all chunks at once: P and the factors of q
    _state_kernel     chain after chain: S at the start of each chunk, and n
    output_kernel     all chunks at once: o

A program of ``_state_kernel`` runs one chain of chunks (``tree/chunks.py``) for one head and up to 64 columns
of V. It is serial, so its loop is pipelined: tiles of later chunks are loaded while a chunk is computed.

States are stored transposed: S^T [V, K] and n^T [V, 64]. On Hopper, the state and all that the serial kernel
computes from it then stay in registers, as left operands and accumulators of its products. All right operands
come straight from shared memory. No tl.dot reads the transposed result of another tl.dot, which some versions
of Triton miscompile on Hopper.

Gates are summed in base 2. Offsets inside a tile are 32-bit on a 64-bit base; 64-bit tiles of offsets would
spill.

Letters: N tokens, G value heads, GROUP value heads per key head, C tokens that a chunk has room for.

The file is long because the five kernels share these conventions and are read together.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_tree.components.recurrence.buffers import Saved, empty_states, precision, sizes
from titan_tree.components.recurrence.launch import Run, run_rounds
from titan_tree.components.recurrence.reference import EPSILON
from titan_tree.tree.chunks import CHUNK, Chains, Chunks

LOG2_E = tl.constexpr(1.4426950408889634)
NORM_EPSILON = tl.constexpr(EPSILON)
# A beta of 0 is replaced by this number, so that the gradient of beta can be divided by beta. The number is
# negligible compared with 1.
SMALLEST_BETA = tl.constexpr(2.0**-40)
# Gates below this number, in base 2, are replaced by it. In a sum with a lower one, the others would be
# rounded away, and differences of infinite sums are NaN.
SMALLEST_GATE = tl.constexpr(-126.0)


# 1. Device code.


@triton.jit
def load_hidden(ptr, RAW: tl.constexpr):
    """Loads an int32 that is part of an address, hidden from Triton's pipeliner by inline assembly.

    The pipeliner would turn a plain load in the loop into an asynchronous copy, and waiting for that copy
    would also wait for all tiles requested just before. The hidden load runs some iterations early, without a
    predicate, and also for iterations past the end of the loop, so the caller must clamp the address.
    """
    if RAW:
        value = tl.inline_asm_elementwise(
            "ld.global.nc.b32 $0, [$1];", "=r,l", [ptr], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        value = tl.load(ptr)
    return value


@triton.jit
def chunk_of(index, start_ptr, G: tl.constexpr):
    """The head of item ``index``, and its chunk's first token and number of tokens."""
    chunk = index // G
    start, end = tl.load(start_ptr + chunk), tl.load(start_ptr + chunk + 1)
    return index % G, start.to(tl.int64), end - start


@triton.jit
def chain_of(first_chain, G: tl.constexpr, V: tl.constexpr, BLOCK_V: tl.constexpr):
    """The chain, the head and the BLOCK_V columns of V of a program."""
    index = tl.program_id(0)
    V_BLOCKS: tl.constexpr = V // BLOCK_V
    chain = first_chain + index // (G * V_BLOCKS)
    column = (index % V_BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    return chain, (index // V_BLOCKS) % G, column


@triton.jit
def gate_sums(g):
    """Natural logarithms of decays, summed over the tokens [C, ..] of a chunk, in base 2."""
    g = g.to(tl.float32) * LOG2_E
    return tl.cumsum(tl.where(g < SMALLEST_GATE, SMALLEST_GATE, g), 0)


@triton.jit
def inverse_length(x):
    """1 / |x| of each row."""
    x = x.to(tl.float32)
    return 1.0 / tl.sqrt(tl.sum(x * x, 1) + NORM_EPSILON)


@triton.jit
def decayed(x, gained, lost, is_seen):
    """x * 2 ** (gained - lost) where ``is_seen``, else 0. Of several forms, this one spills the least."""
    return tl.where(is_seen, x * tl.exp2(tl.where(is_seen, gained - lost, 0.0)), 0.0)


@triton.jit
def load_new(
    ptr, index, start, head, is_token, G: tl.constexpr, V: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """n^T [V, C] of a chunk and head. ``ptr``: n^T of all chunks; without the delta rule v [N, G, V]."""
    t, column = tl.arange(0, C)[None, :], tl.arange(0, V)[:, None]
    if DELTA:
        new = tl.load(ptr + index * C * V + (column * C + t))
    else:
        base = ptr + (start * G + head) * V
        new = tl.load(base + (t * (G * V) + column), mask=is_token[None, :], other=0.0)
    return new


@triton.jit
def unit_inverse(a, at, C: tl.constexpr, INVERSE_PRECISION: tl.constexpr):
    """(I + A)^-1 of a strictly lower triangular A [C, C], given with its transpose."""
    t = tl.arange(0, C)
    # The inverses of the 16 x 16 blocks on the diagonal of I + A: forward substitution in all blocks at once.
    BLOCKS: tl.constexpr = C // 16
    block, i16 = tl.arange(0, BLOCKS), tl.arange(0, 16)
    same_block = block[:, None, None, None] == block[None, None, :, None]
    blocks = tl.sum(tl.where(same_block, tl.reshape(at, [BLOCKS, 16, BLOCKS, 16]), 0.0), 2)  # [block, j, i]
    one = tl.full([BLOCKS, 16, 16], 1.0, tl.float32)
    x = tl.where(i16[None, :, None] == i16[None, None, :], one, 0.0)
    for i in range(1, 16):
        a_i = tl.sum(tl.where(i16[None, None, :] == i, blocks, 0.0), 2)  # row i of A in each block
        x = tl.where(i16[None, :, None] == i, x - tl.sum(a_i[:, :, None] * x, 1)[:, None, :], x)
    diagonal = tl.reshape(tl.where(same_block, x[:, :, None, :], 0.0), [C, C])

    # (I + A)^-1 = (I + Z)^-1 D, with D the inverse of the block diagonal and Z = D times A off the block
    # diagonal. With four blocks Z^4 = 0, so that (I + Z)^-1 = (I - Z) (I + Z^2).
    tl.static_assert(BLOCKS == 4)
    off = tl.where(t[:, None] // 16 > t[None, :] // 16, a, 0.0)
    z = tl.dot(diagonal, off, input_precision=INVERSE_PRECISION)
    zz = tl.dot(z, z, input_precision=INVERSE_PRECISION)
    y = diagonal + tl.dot(zz, diagonal, input_precision=INVERSE_PRECISION)
    return y - tl.dot(z, y, input_precision=INVERSE_PRECISION)


@triton.jit
def _gates_kernel(
    g_ptr, beta_ptr, total_ptr, chunk_beta_ptr, write_ptr, query_ptr, start_ptr,
    G: tl.constexpr, BLOCK_G: tl.constexpr, C: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """Decays summed from the chunk's start as [chunks, G, C]; one chunk and BLOCK_G heads.

    DELTA: also beta. Otherwise also the row factors d and exp(G), which depend on the decays alone.
    """
    chunk = tl.program_id(0).to(tl.int64)
    start, end = tl.load(start_ptr + chunk), tl.load(start_ptr + chunk + 1)
    t = tl.arange(0, C)
    head = tl.program_id(1) * BLOCK_G + tl.arange(0, BLOCK_G)
    is_head = (head < G)[None, :]
    mask = (start + t < end)[:, None] & is_head
    source = (start + t).to(tl.int64)[:, None] * G + head[None, :]
    target = (chunk * G + head)[None, :] * C + t[:, None]
    total = gate_sums(tl.load(g_ptr + source, mask=mask, other=0.0))
    tl.store(total_ptr + target, total, mask=is_head)
    if DELTA:
        beta = tl.load(beta_ptr + source, mask=mask, other=0.0).to(tl.float32)
        beta = tl.where(mask & (beta == 0.0), SMALLEST_BETA, beta)
        tl.store(chunk_beta_ptr + target, beta, mask=is_head)
    else:
        last = tl.sum(tl.where((t == C - 1)[:, None], total, 0.0), 0)[None, :]
        tl.store(write_ptr + target, tl.where(mask, tl.exp2(last - total), 0.0), mask=is_head)
        tl.store(query_ptr + target, tl.where(mask, tl.exp2(total), 0.0), mask=is_head)


@triton.jit
def _inverse_kernel(
    k_ptr, total_ptr, beta_ptr, inverse_ptr, read_ptr, write_ptr, length_ptr, start_ptr,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, INVERSE_PRECISION: tl.constexpr,
):  # fmt: skip
    """T of one chunk and head, and the row factors -e, d and 1 / |k|."""
    index = tl.program_id(0).to(tl.int64)
    head, start, size = chunk_of(index, start_ptr, G)
    t = tl.arange(0, C)
    key_tile = t[:, None] * (G // GROUP * K) + tl.arange(0, K)[None, :]
    key_base = (start * (G // GROUP) + head // GROUP) * K
    k = tl.load(k_ptr + key_base + key_tile, mask=(t < size)[:, None], other=0.0)
    row = index * C + t
    total, beta = tl.load(total_ptr + row), tl.load(beta_ptr + row)
    last = tl.load(total_ptr + index * C + C - 1)
    length = inverse_length(k)
    tl.store(length_ptr + row, length)
    tl.store(read_ptr + row, -tl.exp2(total) * length)
    tl.store(write_ptr + row, tl.exp2(last - total) * length)

    # A and its transpose. Both come from the symmetric k k^T: a transposed result of a tl.dot must not reach
    # another tl.dot, see the module's docstring.
    kk = tl.dot(k, tl.trans(k), input_precision=PRECISION) * length[:, None] * length[None, :]
    a = decayed(kk * beta[:, None], total[:, None], total[None, :], t[:, None] > t[None, :])
    at = decayed(kk * beta[None, :], total[None, :], total[:, None], t[:, None] < t[None, :])

    inverse = unit_inverse(a, at, C, INVERSE_PRECISION) * beta[None, :]
    tl.store(
        inverse_ptr + index * C * C + t[:, None] * C + t[None, :], inverse.to(inverse_ptr.dtype.element_ty)
    )


@triton.jit(do_not_specialize=["first_chain"])
def _state_kernel(
    k_ptr, v_ptr, inverse_ptr, read_ptr, write_ptr, total_ptr, state_ptr, new_ptr, slots_ptr,
    first_ptr, end_ptr, source_ptr, slot_ptr, start_ptr, first_chain,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_V: tl.constexpr, LEAVE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    RAW: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """S^T at the start of each chunk of one chain, and n^T. LEAVE: also fills slots."""
    chain, head, column = chain_of(first_chain, G, V, BLOCK_V)
    t, d = tl.arange(0, C), tl.arange(0, K)
    state_tile = column[:, None] * K + d[None, :]
    state = tl.zeros([BLOCK_V, K], dtype=tl.float32)
    source = tl.load(source_ptr + chain)
    if source >= 0:
        state = tl.load(slots_ptr + (source.to(tl.int64) * G + head) * K * V + state_tile)
    first, end = tl.load(first_ptr + chain), tl.load(end_ptr + chain)
    row = (first.to(tl.int64) * G + head) * C
    write = tl.load(write_ptr + row + t)
    read = tl.load(read_ptr + row + t) if DELTA else write
    last = tl.load(total_ptr + row + C - 1)
    for chunk in tl.range(first, end, num_stages=STAGES):
        row = (tl.cast(chunk, tl.int64) * G + head) * C
        clamped = tl.minimum(chunk, end - 1)
        start = load_hidden(start_ptr + clamped, RAW)
        is_token = t < load_hidden(start_ptr + clamped + 1, RAW) - start
        start = start.to(tl.int64)
        key_base = (start * (G // GROUP) + head // GROUP) * K
        k = tl.load(
            k_ptr + key_base + (t[:, None] * (G // GROUP * K) + d[None, :]), mask=is_token[:, None], other=0.0
        )
        v = tl.load(
            v_ptr + (start * G + head) * V + (t[:, None] * (G * V) + column[None, :]),
            mask=is_token[:, None], other=0.0,
        )  # fmt: skip
        if DELTA:
            inverse = tl.load(inverse_ptr + row * C + (t[:, None] * C + t[None, :]))
        slot = load_hidden(slot_ptr + clamped, RAW)
        # Factors of the next chunk. The tensors have room for one chunk after the last.
        next_write = tl.load(write_ptr + row + G * C + t)
        next_read = tl.load(read_ptr + row + G * C + t) if DELTA else next_write
        next_last = tl.load(total_ptr + row + G * C + C - 1)
        rounded = state.to(k.dtype)
        tl.store(state_ptr + row // C * K * V + state_tile, rounded)
        if DELTA:
            ks = tl.dot(rounded, tl.trans(k), input_precision=PRECISION)
            new = tl.dot(tl.trans(v), tl.trans(inverse), input_precision=PRECISION)
            ks = (ks * read[None, :]).to(inverse.dtype)
            new = tl.dot(ks, tl.trans(inverse), new, input_precision=PRECISION)
            tl.store(new_ptr + row * V + (column[:, None] * C + t[None, :]), new.to(new_ptr.dtype.element_ty))
        else:
            new = tl.trans(v).to(tl.float32)
        written = (new * write[None, :]).to(k.dtype)
        state = tl.dot(written, k, state * tl.exp2(last), input_precision=PRECISION)
        if LEAVE:  # noqa: SIM102 (LEAVE is a constant of the compiler, slot is not)
            if slot >= 0:
                tl.store(slots_ptr + (slot.to(tl.int64) * G + head) * K * V + state_tile, state)
        read, write, last = next_read, next_write, next_last


@triton.jit
def _scores_kernel(
    q_ptr, k_ptr, total_ptr, length_ptr, p_ptr, query_ptr, q_length_ptr, start_ptr, scale,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, LEAVE: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """s P of one chunk and head. LEAVE: also the factors of its queries, with DELTA."""
    index = tl.program_id(0).to(tl.int64)
    head, start, size = chunk_of(index, start_ptr, G)
    t, d = tl.arange(0, C), tl.arange(0, K)
    is_token = t < size
    key_base = (start * (G // GROUP) + head // GROUP) * K
    key_tile = t[:, None] * (G // GROUP * K) + d[None, :]
    q = tl.load(q_ptr + key_base + key_tile, mask=is_token[:, None], other=0.0)
    k = tl.load(k_ptr + key_base + key_tile, mask=is_token[:, None], other=0.0)
    row = index * C + t
    total = tl.load(total_ptr + row)
    p = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    if DELTA:
        length, q_length = tl.load(length_ptr + row), inverse_length(q)
        if LEAVE:
            tl.store(q_length_ptr + row, tl.where(is_token, q_length, 0.0))
            tl.store(query_ptr + row, tl.where(is_token, scale * q_length * tl.exp2(total), 0.0))
        p = p * length[None, :] * (scale * q_length)[:, None]
    p = decayed(p, total[:, None], total[None, :], t[:, None] >= t[None, :])
    tl.store(p_ptr + index * C * C + (t[:, None] * C + t[None, :]), p.to(p_ptr.dtype.element_ty))


@triton.jit
def output_kernel(
    q_ptr, state_ptr, new_ptr, p_ptr, query_ptr, o_ptr, start_ptr,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr, DELTA: tl.constexpr,
):  # fmt: skip
    """o of one chunk and head. query_ptr: the factors of queries; None: q has them already."""
    index = tl.program_id(0).to(tl.int64)
    head, start, size = chunk_of(index, start_ptr, G)
    t, d, column = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    is_token = (t < size)[:, None]
    key_base = (start * (G // GROUP) + head // GROUP) * K
    key_tile = t[:, None] * (G // GROUP * K) + d[None, :]
    q = tl.load(q_ptr + key_base + key_tile, mask=is_token, other=0.0)
    state = tl.load(state_ptr + index * K * V + (column[:, None] * K + d[None, :]))
    new = load_new(new_ptr, index, start, head, t < size, G, V, C, DELTA)
    p = tl.load(p_ptr + index * C * C + (t[:, None] * C + t[None, :]))
    o = tl.dot(q, tl.trans(state), input_precision=PRECISION)
    if query_ptr is not None:
        o *= tl.load(query_ptr + index * C + t)[:, None]
    o = tl.dot(p, tl.trans(new), o, input_precision=PRECISION)
    tile = t[:, None] * (G * V) + column[None, :]
    tl.store(o_ptr + (start * G + head) * V + tile, o.to(o_ptr.dtype.element_ty), mask=is_token)


# 2. Launches.


def stages(x: Tensor, programs: int, least: int = 2) -> int:
    """Returns how many chunks a serial kernel has in flight, for inputs of x's dtype.

    In 16 bits, this is 3 while every program has a multiprocessor to itself. With more programs it is 2, so
    that two of them fit on a multiprocessor. On GPUs with little shared memory it is ``least``. In fp32: 1.
    """
    if not x.is_cuda or x.dtype == torch.float32:
        return 1
    gpu = _gpu(x.get_device())
    if gpu["max_shared_mem"] <= 200 * 1024:
        return least
    return 3 if programs <= gpu["multiprocessor_count"] else 2


@functools.cache
def _gpu(device: int) -> dict[str, int]:
    return triton.runtime.driver.active.utils.get_device_properties(device)


def sum_gates(g: Tensor, beta: Tensor | None, saved: Saved, chunks: Chunks) -> None:
    """Fills the factors that depend on the gates alone."""
    factors, heads = saved.factors, g.shape[1]
    block = min(32, triton.next_power_of_2(heads))
    _gates_kernel[(saved.num_chunks, triton.cdiv(heads, block))](
        g, beta, factors.total, factors.beta, factors.write, factors.query, chunks.start,
        G=heads, BLOCK_G=block, C=CHUNK, DELTA=saved.has_delta,
    )  # fmt: skip


def prepare_chunks(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, saved: Saved, chunks: Chunks
) -> Tensor:
    """Fills ``saved.inverse`` and all factors. Returns s P, as ``make_scores`` does."""
    sum_gates(g, beta, saved, chunks)
    factors = saved.factors
    if saved.has_delta:
        _inverse_kernel[(saved.num_chunks * v.shape[1],)](
            k, factors.total, factors.beta, saved.inverse, factors.read, factors.write, factors.length,
            chunks.start, **sizes(q, v), PRECISION=precision(q),
            INVERSE_PRECISION="tf32" if q.dtype != torch.float32 else precision(q),
        )  # fmt: skip
    return make_scores(q, k, v, saved, chunks, leave=True)


def make_scores(q: Tensor, k: Tensor, v: Tensor, saved: Saved, chunks: Chunks, leave: bool = False) -> Tensor:
    """Returns s P [chunks, G, 64, 64] in the dtype of q, 0 past a chunk's last token.

    leave: also fill the factors of q.
    """
    scores, factors = q.new_empty(saved.num_chunks, v.shape[1], CHUNK, CHUNK), saved.factors
    _scores_kernel[(len(scores) * v.shape[1],)](
        q, k, factors.total, factors.length, scores, factors.query, factors.q_length, chunks.start,
        q.shape[2] ** -0.5, **sizes(q, v), PRECISION=precision(q), LEAVE=leave,
        DELTA=saved.has_delta,
    )  # fmt: skip
    return scores


def make_states(
    k: Tensor, v: Tensor, state: Tensor, new: Tensor, saved: Saved, chunks: Chunks, chains: Chains,
    leave: bool = False,
) -> Run:  # fmt: skip
    """Returns a pass that fills ``state`` (S^T) and ``new`` (n^T) of chains whose slots are filled.

    leave: also fill the slots that later chains start from.
    """
    factors, block = saved.factors, min(v.shape[2], 64)

    def run(first: int, end: int) -> None:
        programs = (end - first) * v.shape[1] * (v.shape[2] // block)
        _state_kernel[(programs,)](
            k, v, saved.inverse, factors.read, factors.write, factors.total, state, new, saved.slots,
            chains.first, chains.end, chains.source, chains.slot, chunks.start, first,
            **sizes(k, v), BLOCK_V=block, LEAVE=leave, PRECISION=precision(k), STAGES=stages(k, programs),
            RAW=k.is_cuda, DELTA=saved.has_delta,
        )  # fmt: skip

    return run


def outputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, o: Tensor, saved: Saved, chunks: Chunks,
    chains: Chains,
) -> None:  # fmt: skip
    """Fills ``saved``, its slots round by round, and o."""
    scores = prepare_chunks(q, k, v, g, beta, saved, chunks)
    state, new = empty_states(saved)
    run_rounds(make_states(k, v, state, new, saved, chunks, chains, leave=True), chains)
    output_kernel[(len(state) * v.shape[1],)](
        q, state, new if saved.has_delta else v, scores, saved.factors.query, o, chunks.start,
        **sizes(q, v), PRECISION=precision(q), DELTA=saved.has_delta,
    )  # fmt: skip
