"""The gated delta rule on chunks in Triton: gradients. Letters and layouts are those of kernels_forward.py.

From dS', the gradient of a chunk's last state, and X = dv, with s the scale of q:

    dn = s P^T do + d (k dS');   X = T^T dn;   dS = exp(G_last) dS' + s (exp(G) q)^T do - (e k)^T X

Neither A nor k k^T is made again for them, since dA beta = -X n^T. Row sums of gradients with what they are
gradients of give those of beta and of the decays, with r that of the rows of A and e k S:

    dbeta_i = (X_i.v_i + r_i) / beta_i;   dG_i = q_i.dq_i + r_i - k_i.dk_column_i

and that of G_last also has <S', dS'> = exp(G_last) <S, dS'> + sum_i d_i k_i.(dS' n_i). What P and A give
to dG are the row sums less the column sums of P * dP and A * dA, from one matrix each: so in the gradient of
g, a sum of dG, what should cancel does. With bf16 operands its error is a fifth of what it is otherwise.

A chain leaves the gradient of the state that it starts from in a buffer of its own; what the children of a
slot left is added up, in the order of the table, before the chain runs that filled the slot. So each sum has
a fixed order, and the serial loop no inner one.
"""

from __future__ import annotations

import functools
import itertools
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_tree.components.tree_gdn import hopper
from titan_tree.components.tree_gdn.buffers import Run, Saved, empty_states, precision, sizes
from titan_tree.components.tree_gdn.kernels_forward import (
    decayed,
    inverse_length,
    load_hidden,
    make_scores,
    make_states,
    stages,
)
from titan_tree.tree.chains import Chains
from titan_tree.tree.chunks import Chunks


@triton.jit
def _query_kernel(
    q_ptr, k_ptr, do_ptr, state_ptr, new_ptr, total_ptr, length_ptr, dq_ptr, dtotal_ptr, start_ptr, scale,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dq of each chunk and value head, and what P and exp(G) q S give to the gradient of each token's G."""
    index = tl.program_id(0).to(tl.int64)
    chunk, head = index // G, index % G
    start, end = tl.load(start_ptr + chunk), tl.load(start_ptr + chunk + 1)
    t, d, column = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    is_token = (t < end - start)[:, None]
    key_base = (start.to(tl.int64) * (G // GROUP) + head // GROUP) * K
    key_tile = t[:, None] * (G // GROUP * K) + d[None, :]
    value_base = (start.to(tl.int64) * G + head) * V
    q = tl.load(q_ptr + key_base + key_tile, mask=is_token, other=0.0)
    # Not from memory, in whose layout the rest would need more registers
    q_length = inverse_length(q)
    k = tl.load(k_ptr + key_base + key_tile, mask=is_token, other=0.0)
    do = tl.load(do_ptr + value_base + (t[:, None] * (G * V) + column[None, :]), mask=is_token, other=0.0)
    total, length = tl.load(total_ptr + index * C + t), tl.load(length_ptr + index * C + t)
    new = tl.load(new_ptr + index * C * V + (column[:, None] * C + t[None, :]))
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
    dq = (dq - q * (q_length * q_dq)[:, None]) * q_length[:, None]
    tile = t[:, None] * (G * K) + d[None, :]
    tl.store(
        dq_ptr + (start.to(tl.int64) * G + head) * K + tile, dq.to(dq_ptr.dtype.element_ty), mask=is_token
    )


@triton.jit(do_not_specialize=["first_slot"])
def _slot_kernel(
    start_gradient_ptr, slot_gradient_ptr, first_child_ptr, child_ptr, first_slot, SIZE, BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of each slot: the sum of its children's."""
    slot = first_slot + tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(tl.load(first_child_ptr + slot), tl.load(first_child_ptr + slot + 1)):
        total += tl.load(start_gradient_ptr + tl.load(child_ptr + i).to(tl.int64) * SIZE + element)
    tl.store(slot_gradient_ptr + slot * SIZE + element, total)


@triton.jit(do_not_specialize=["first_chain"])
def _state_gradient_kernel(
    q_ptr, k_ptr, do_ptr, inverse_ptr, p_ptr, read_ptr, write_ptr, query_ptr, total_ptr, dstate_ptr, x_ptr,
    slot_gradient_ptr, start_gradient_ptr, first_ptr, end_ptr, source_ptr, slot_ptr, start_ptr, first_chain,
    GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    BLOCK_V: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr, RAW: tl.constexpr,
):  # fmt: skip
    """A chain from its end: dS'^T of each chunk, X^T, and the gradient of the state that it starts from."""
    index = tl.program_id(0)
    V_BLOCKS: tl.constexpr = V // BLOCK_V
    chain = first_chain + index // (G * V_BLOCKS)
    head = (index // V_BLOCKS) % G
    column = (index % V_BLOCKS) * BLOCK_V + tl.arange(0, BLOCK_V)
    t, d = tl.arange(0, C), tl.arange(0, K)
    state_tile = column[:, None] * K + d[None, :]
    dstate = tl.zeros([BLOCK_V, K], dtype=tl.float32)
    first, end = tl.load(first_ptr + chain), tl.load(end_ptr + chain)
    row = ((end - 1).to(tl.int64) * G + head) * C
    read, write = tl.load(read_ptr + row + t), tl.load(write_ptr + row + t)
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
        inverse = tl.load(inverse_ptr + row * C + (t[:, None] * C + t[None, :]))
        p = tl.load(p_ptr + row * C + (t[:, None] * C + t[None, :]))
        # of the chunk before, which the next step runs
        next_row = (tl.maximum(chunk - 1, 0).to(tl.int64) * G + head) * C
        slot = load_hidden(slot_ptr + clamped, RAW)
        next_read = tl.load(read_ptr + next_row + t)
        next_write = tl.load(write_ptr + next_row + t)
        next_query = tl.load(query_ptr + next_row + t)
        next_last = tl.load(total_ptr + next_row + C - 1)
        if slot >= 0:
            dstate += tl.load(slot_gradient_ptr + (slot.to(tl.int64) * G + head) * K * V + state_tile)
        rounded = dstate.to(k.dtype)
        tl.store(dstate_ptr + row // C * K * V + state_tile, rounded)
        dnew = tl.dot(rounded, tl.trans(k), input_precision=PRECISION) * write[None, :]
        dnew = tl.dot(tl.trans(do), p, dnew, input_precision=PRECISION)
        x = tl.dot(dnew.to(inverse.dtype), inverse, input_precision=PRECISION)
        tl.store(x_ptr + row * V + (column[:, None] * C + t[None, :]), x.to(x_ptr.dtype.element_ty))
        scaled = (tl.trans(do).to(tl.float32) * query[None, :]).to(q.dtype)
        dstate = tl.dot(scaled, q, dstate * tl.exp2(last), input_precision=PRECISION)
        dstate = tl.dot((x * read[None, :]).to(k.dtype), k, dstate, input_precision=PRECISION)
        read, write, query, last = next_read, next_write, next_query, next_last
    if tl.load(source_ptr + chain) >= 0:
        tl.store(start_gradient_ptr + (chain.to(tl.int64) * G + head) * K * V + state_tile, dstate)


@triton.jit
def _input_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, state_ptr, dstate_ptr, new_ptr, x_ptr, total_ptr, beta_ptr,
    length_ptr, q_length_ptr, dtotal_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, start_ptr,
    scale, GROUP: tl.constexpr, G: tl.constexpr, K: tl.constexpr, V: tl.constexpr, C: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """dk of each value head, dv, dg and dbeta.

    Operands of products are loaded once more, from the cache, for arithmetic by element: registers do not
    hold both forms.
    """
    index = tl.program_id(0).to(tl.int64)
    chunk, head = index // G, index % G
    start, end = tl.load(start_ptr + chunk), tl.load(start_ptr + chunk + 1)
    t, d, column = tl.arange(0, C), tl.arange(0, K), tl.arange(0, V)
    is_token = t < end - start
    key_base = (start.to(tl.int64) * (G // GROUP) + head // GROUP) * K
    key_tile = t[:, None] * (G // GROUP * K) + d[None, :]
    value_base = (start.to(tl.int64) * G + head) * V
    value_tile = t[:, None] * (G * V) + column[None, :]
    value_tile_t = t[None, :] * (G * V) + column[:, None]
    state_tile = column[:, None] * K + d[None, :]
    new_tile = column[:, None] * C + t[None, :]

    row = index * C + t
    total, last = tl.load(total_ptr + row), tl.load(total_ptr + index * C + C - 1)
    dstate = tl.load(dstate_ptr + index * K * V + state_tile).to(tl.float32)
    state = tl.load(state_ptr + index * K * V + state_tile).to(tl.float32)
    d_last = tl.sum(tl.sum(dstate * state, 1), 0) * tl.exp2(last)

    q_length, length = tl.load(q_length_ptr + row), tl.load(length_ptr + row)
    x = tl.load(x_ptr + index * C * V + new_tile)
    v = tl.load(v_ptr + value_base + value_tile_t, mask=is_token[None, :], other=0.0)
    tl.store(dv_ptr + value_base + value_tile_t, x.to(dv_ptr.dtype.element_ty), mask=is_token[None, :])
    x_v = tl.sum(v.to(tl.float32) * x.to(tl.float32), 0)

    # dk of columns: in the last state, P and A
    new = tl.load(new_ptr + index * C * V + new_tile)
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
    x = tl.load(x_ptr + index * C * V + new_tile)
    k = tl.load(k_ptr + key_base + key_tile, mask=is_token[:, None], other=0.0)
    da = tl.dot(tl.trans(new), x, input_precision=PRECISION)
    da = decayed(-da * length[None, :], total[None, :], total[:, None], t[:, None] < t[None, :])
    dk = tl.dot(da.to(q.dtype), k, dk, input_precision=PRECISION)

    # dk of rows: in A and e k S
    da = tl.dot(tl.trans(x), new, input_precision=PRECISION)
    da = decayed(-da * length[None, :], total[:, None], total[None, :], t[:, None] > t[None, :])
    a_da = da * (tl.dot(k, tl.trans(k), input_precision=PRECISION) * length[:, None])
    dtotal = tl.load(dtotal_ptr + row) - from_last - tl.sum(a_da, 0)
    state = tl.load(state_ptr + index * K * V + state_tile)
    dk_row = tl.dot(tl.trans(x), state, input_precision=PRECISION) * (-tl.exp2(total))[:, None]
    k_wide = tl.load(k_ptr + key_base + key_tile, mask=is_token[:, None], other=0.0).to(tl.float32)
    k_row = tl.sum(dk_row * k_wide, 1) * length + tl.sum(a_da, 1)
    dk += tl.dot(da.to(q.dtype), k, dk_row, input_precision=PRECISION)

    k_wide = tl.load(k_ptr + key_base + key_tile, mask=is_token[:, None], other=0.0).to(tl.float32)
    dk = (dk - k_wide * (length * length * tl.sum(dk * k_wide, 1))[:, None]) * length[:, None]
    tile = t[:, None] * (G * K) + d[None, :]
    head_base = start.to(tl.int64) * G + head
    tl.store(dk_ptr + head_base * K + tile, dk.to(dk_ptr.dtype.element_ty), mask=is_token[:, None])
    dbeta = (x_v + k_row) / tl.load(beta_ptr + row, mask=is_token, other=1.0)
    tl.store(dbeta_ptr + head_base + t * G, dbeta.to(dbeta_ptr.dtype.element_ty), mask=is_token)
    dg = tl.cumsum(dtotal + k_row, 0, reverse=True) + d_last + tl.sum(from_last, 0)
    tl.store(dg_ptr + head_base + t * G, dg.to(dg_ptr.dtype.element_ty), mask=is_token)


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


def backward(
    do: Tensor, dexported: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, saved: Saved,
    chunks: Chunks, chains: Chains,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv, dg, dbeta in the dtypes of their inputs, and the gateway states' [R, G, K, V] fp32."""
    (n, heads_k, width_k), (_, heads, width), rounds = k.shape, v.shape, chains.rounds.tolist()
    dq, dk = (q.new_empty(n, heads, width_k) for _ in range(2))
    dv, dg, dbeta = (torch.empty_like(like) for like in (v, g, beta))
    state, new = empty_states(saved)
    on_hopper = hopper.supports(q, v)
    make = hopper.states if on_hopper else partial(make_states, leave=False)
    again = make(k, v, state, new, saved, chunks, chains)

    # The states once more, from their slots: all chains at once, and beside the reverse pass, since a few
    # chains cannot fill the GPU.
    if k.is_cuda:
        main, side = torch.cuda.current_stream(k.device), _side_stream(k.device)
        side.wait_stream(main)
        with torch.cuda.stream(side):
            again(0, rounds[-1][0])
    else:
        again(0, rounds[-1][0])
    scores = make_scores(q, k, v, saved, chunks, leave=False)

    dstate, x = empty_states(saved)
    slot_gradient, num_chains = torch.empty_like(saved.slots), len(chains.first)
    start_gradient = saved.slots.new_empty(num_chains + len(dexported), heads, width, width_k)
    start_gradient[num_chains:] = dexported.mT

    def add_up(first: int, end: int) -> None:
        if first < end:
            block = min(width * width_k, 2048)
            _slot_kernel[(end - first, heads * width * width_k // block)](
                start_gradient, slot_gradient, chains.first_child, chains.child, first,
                heads * width * width_k, BLOCK=block,
            )  # fmt: skip

    reverse = hopper.state_gradients if on_hopper else state_gradients
    run = reverse(q, k, do, scores, dstate, x, slot_gradient, start_gradient, saved, chunks, chains)
    for (chain, slot), (end, slot_end) in reversed(list(itertools.pairwise(rounds))):
        add_up(slot, slot_end)
        run(chain, end)
    num_rows = rounds[0][1]
    add_up(0, num_rows)
    dstates = slot_gradient[:num_rows].mT.contiguous()

    if k.is_cuda:
        main.wait_stream(side)
    make_inputs = hopper.input_gradients if on_hopper else input_gradients
    make_inputs(q, k, v, do, state, dstate, new, x, (dq, dk, dv, dg, dbeta), saved, chunks)
    if heads > heads_k:  # torch sums 16-bit numbers in fp32
        dq, dk = (x.view(n, heads_k, -1, width_k).sum(2) for x in (dq, dk))
    return dq, dk, dv, dg, dbeta, dstates


def state_gradients(
    q: Tensor, k: Tensor, do: Tensor, scores: Tensor, dstate: Tensor, x: Tensor, slot_gradient: Tensor,
    start_gradient: Tensor, saved: Saved, chunks: Chunks, chains: Chains,
) -> Run:  # fmt: skip
    """dS'^T, X^T and the start gradients of chains, from the gradients of their slots."""
    factors, block = saved.factors, min(do.shape[2], 64)

    def run(first: int, end: int) -> None:
        programs = (end - first) * do.shape[1] * (do.shape[2] // block)
        _state_gradient_kernel[(programs,)](
            q, k, do, saved.inverse, scores, factors.read, factors.write, factors.query, factors.total,
            dstate, x, slot_gradient, start_gradient, chains.first, chains.end, chains.source, chains.slot,
            chunks.start, first, **sizes(q, do), BLOCK_V=block, PRECISION=precision(k),
            STAGES=stages(k, programs), RAW=k.is_cuda,
        )  # fmt: skip

    return run


def input_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, state: Tensor, dstate: Tensor, new: Tensor, x: Tensor,
    gradients: tuple[Tensor, ...], saved: Saved, chunks: Chunks,
) -> None:  # fmt: skip
    """Fills dq and dk [N, G, K], dv, dg and dbeta."""
    factors, (dq, *others), scale = saved.factors, gradients, q.shape[2] ** -0.5
    constants = sizes(q, v) | {"PRECISION": precision(q)}
    grid, dtotal = (len(state) * v.shape[1],), torch.empty_like(factors.total)
    _query_kernel[grid](
        q, k, do, state, new, factors.total, factors.length, dq, dtotal, chunks.start, scale, **constants
    )
    _input_kernel[grid](
        q, k, v, do, state, dstate, new, x, factors.total, factors.beta, factors.length, factors.q_length,
        dtotal, *others, chunks.start, scale, **constants,
    )  # fmt: skip
