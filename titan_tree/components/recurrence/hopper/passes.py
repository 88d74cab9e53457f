"""The serial passes of the recurrences on Hopper, in Gluon: along each chain, and back.

The algebra and the letters are those of ``triton_kernels/forward_kernels.py`` and ``backward_kernels.py``. A
pass is serial: each chunk needs the state after the previous one, and its own products depend on each other.
So the latency of one step decides the speed. A producer warp fetches whole chunks by TMA, several chunks
ahead. Four warps hold the state of 64 columns of V in registers. Their products are asynchronous, and work
outside of the chain of dependent products fills the gaps.

The forward pass computes the output on the way. Except for the slots, it writes neither states nor n. For the
backward pass the same kernel runs a second time and writes them instead of the output.

TMA always fetches 64 tokens from a chunk's start, so a short chunk also gets tokens of other chunks. They
contribute nothing, because T, P and the factor of q are zero there. Without the delta rule, the factor d is
zero there, too. But zero times NaN or infinity is NaN. So NaN or infinity in k or v spreads to the whole
chunk, and so does one in q or do in the backward pass. It also arises where the product of two such keys
overflows, in ``prepare.py``.

The kernels are long because each loop interleaves copies, products and waits by hand.
"""

from __future__ import annotations

import itertools

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonJITFunction
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from titan_tree.components.recurrence.buffers import Saved
from titan_tree.components.recurrence.hopper.prepare import prepare
from titan_tree.components.recurrence.hopper.tiles import (
    BLOCK_V,
    C,
    ChainMemory,
    decay_of,
    factor,
    producer,
    rows_of,
    store_tokens,
    tile_of,
    work_of,
)
from titan_tree.components.recurrence.launch import Run, beside, join
from titan_tree.components.recurrence.triton_kernels.forward_kernels import sum_gates
from titan_tree.components.rings import (
    make_ring,
    matrix,
    num_multiprocessors,
    release,
    vector,
    wait_full,
)
from titan_tree.errors import UserError
from titan_tree.tree.chunks import CHUNK, Chains, Chunks


@gluon.jit
def _chain_consumer(
    state_rows, new_rows, o_ptr, slots_ptr, number_ptr, source_ptr, slot_ptr, start_ptr, memory, work,
    G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, FORWARD: gl.constexpr,
    DELTA: gl.constexpr,
):  # fmt: skip
    """Runs a chain from its start, see ``_chain_kernel``; ``state`` is S^T at the start of each chunk."""
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    TOKENS_OPERAND: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    STATE_OPERAND: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    column = work.head * V + work.column
    zero = gl.zeros([BLOCK_V, C], gl.float32, TOKENS)
    state = gl.zeros([BLOCK_V, K], gl.float32, STATE)
    source = gl.load(source_ptr + work.chain)
    if source >= 0:
        state = gl.load(slots_ptr + tile_of(source, work, G, K, V, STATE))
    chunk = work.first
    last = decay_of(number_ptr, chunk, work, G)
    slot = gl.load(slot_ptr + chunk)
    for i in range(work.count):
        chunk = work.first + i
        s = i % STAGES
        k, v = memory.ring.stages.index(s), memory.v.index(s).permute((1, 0))
        # Loaded one step ahead.
        next_chunk = work.first + gl.minimum(i + 1, work.count - 1)
        next_last = decay_of(number_ptr, next_chunk, work, G)
        next_slot = gl.load(slot_ptr + next_chunk)

        rounded = state.to(k.dtype)
        operand = gl.convert_layout(rounded, TOKENS_OPERAND)
        state *= gl.exp2(last)  # not during a product: ptxas would wait for it
        wait_full(memory.ring, i, STAGES)
        if DELTA:
            inverse = memory.inverse.index(s).permute((1, 0))
            new = warpgroup_mma(v, inverse, zero, use_acc=False, is_async=True)
            ks = warpgroup_mma(operand, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        if FORWARD:
            if i > 0:
                store_tokens(o_ptr, memory.out, start_ptr, chunk - 1, column, G * V, BLOCK_V)
        else:
            tma.store_wait(1 if DELTA else 0)
            memory.state.store(rounded)
            fence_async_shared()
            row = (chunk * G + work.head) * V + work.column
            tma.async_copy_shared_to_global(state_rows, [row, 0], memory.state)
        if DELTA:
            new, ks, operand = warpgroup_mma_wait(0, [new, ks, operand])
            ks = gl.convert_layout((ks * factor(memory, 3 * s, TOKENS)).to(k.dtype), TOKENS_OPERAND)
            new = warpgroup_mma(ks, inverse, new, is_async=True)
        if FORWARD:
            o = warpgroup_mma(operand, memory.q.index(s).permute((1, 0)), zero, use_acc=False, is_async=True)
        if DELTA:
            if FORWARD:
                new, ks = warpgroup_mma_wait(1, [new, ks])
            else:
                new, ks = warpgroup_mma_wait(0, [new, ks])
        else:
            new = v.load(TOKENS).to(gl.float32)
        written = gl.convert_layout((new * factor(memory, 3 * s + 1, TOKENS)).to(k.dtype), STATE_OPERAND)
        state = warpgroup_mma(written, k, state, is_async=True)
        new = new.to(k.dtype)
        if FORWARD:
            o, operand = warpgroup_mma_wait(1, [o, operand])
            new = gl.convert_layout(new, TOKENS_OPERAND)
            o = warpgroup_mma(
                new,
                memory.p.index(s).permute((1, 0)),
                o * factor(memory, 3 * s + 2, TOKENS),
                is_async=True,
            )
            state, written = warpgroup_mma_wait(1, [state, written])
            if slot >= 0:
                gl.store(slots_ptr + tile_of(slot, work, G, K, V, STATE), state)
            o, new = warpgroup_mma_wait(0, [o, new])
            release(memory.ring, i, STAGES)
            memory.out.permute((1, 0)).store(o.to(k.dtype))
        else:
            if DELTA:
                tma.store_wait(1)
                memory.out.store(new)
                fence_async_shared()
                tma.async_copy_shared_to_global(new_rows, [row, 0], memory.out)
            state, written = warpgroup_mma_wait(0, [state, written])
            release(memory.ring, i, STAGES)
        last, slot = next_last, next_slot
    if FORWARD:
        store_tokens(o_ptr, memory.out, start_ptr, work.first + work.count - 1, column, G * V, BLOCK_V)
    else:
        tma.store_wait(0)


@gluon.jit(do_not_specialize=["plane", "first_chain"])
def _chain_kernel(
    q_rows, k_rows, v_rows, inverse_rows, p_rows, number_row, state_rows, new_rows,
    o_ptr, slots_ptr, number_ptr, first_ptr, end_ptr, source_ptr, slot_ptr, start_ptr, plane, first_chain,
    GROUP: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
    FORWARD: gl.constexpr, DELTA: gl.constexpr,
):  # fmt: skip
    """Chains from first_chain on. FORWARD: o, and states into slots; otherwise S^T and n^T of each chunk."""
    dtype: gl.constexpr = k_rows.dtype
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_V, C], dtype)
    k_stages = gl.allocate_shared_memory(dtype, [STAGES, C, K], k_rows.layout)
    if FORWARD:
        q_stages = gl.allocate_shared_memory(dtype, [STAGES, C, K], q_rows.layout)
        p_stages = gl.allocate_shared_memory(dtype, [STAGES, C, C], p_rows.layout)
        state_tile = None
    else:
        q_stages = None
        p_stages = None
        state_tile = gl.allocate_shared_memory(dtype, [BLOCK_V, K], state_rows.layout)
    if DELTA:
        inverse_stages = gl.allocate_shared_memory(dtype, [STAGES, C, C], inverse_rows.layout)
    else:
        inverse_stages = None
    memory = ChainMemory(
        make_ring(k_stages, STAGES, 1),
        q_stages,
        gl.allocate_shared_memory(dtype, [STAGES, C, BLOCK_V], v_rows.layout),
        inverse_stages,
        p_stages,
        gl.allocate_shared_memory(gl.float32, [3 * STAGES, C], number_row.layout),
        state_tile,
        gl.allocate_shared_memory(dtype, [BLOCK_V, C], out_layout),
    )
    fence_async_shared()
    work = work_of(first_ptr, end_ptr, first_chain, G, V)
    gl.warp_specialize(
        [
            (_chain_consumer, (
                state_rows, new_rows, o_ptr, slots_ptr, number_ptr, source_ptr, slot_ptr, start_ptr, memory,
                work, G, K, V, STAGES, FORWARD, DELTA,
            )),
            (producer, (
                q_rows, k_rows, v_rows, inverse_rows, p_rows, number_row, plane, start_ptr, memory, work,
                GROUP, G, K, V, STAGES, False, FORWARD, DELTA,
            )),
        ],
        [1], [24],
    )  # fmt: skip


@gluon.jit
def _gradient_consumer(
    dstate_rows, x_rows, dv_ptr, start_gradient_ptr, number_ptr, source_ptr, reader_ptr, start_ptr, memory,
    work,
    G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr, DELTA: gl.constexpr,
):  # fmt: skip
    """Runs a chain from its end, see ``_gradient_kernel``; ``dstate`` is dS'^T of each chunk."""
    TOKENS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    STATE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    TOKENS_OPERAND: gl.constexpr = gl.DotOperandLayout(0, TOKENS, 2)
    STATE_OPERAND: gl.constexpr = gl.DotOperandLayout(0, STATE, 2)
    zero = gl.zeros([BLOCK_V, C], gl.float32, TOKENS)
    dstate = gl.zeros([BLOCK_V, K], gl.float32, STATE)
    chunk = work.first + work.count - 1
    last = decay_of(number_ptr, chunk, work, G)
    reader = gl.load(reader_ptr + chunk)
    for i in range(work.count):
        s = i % STAGES
        k, q = memory.ring.stages.index(s), memory.q.index(s)
        do = memory.v.index(s).permute((1, 0))
        row = (chunk * G + work.head) * V + work.column
        # Loaded one step ahead: the next step computes the previous chunk.
        chunk = gl.maximum(chunk - 1, work.first)
        next_last = decay_of(number_ptr, chunk, work, G)
        next_reader = gl.load(reader_ptr + chunk)

        if reader >= 0:
            dstate += gl.load(start_gradient_ptr + tile_of(reader, work, G, K, V, STATE))
        rounded = dstate.to(k.dtype)
        operand = gl.convert_layout(rounded, TOKENS_OPERAND)
        dstate *= gl.exp2(last)  # not during a product: ptxas would wait for it
        wait_full(memory.ring, i, STAGES)
        local = warpgroup_mma(do, memory.p.index(s), zero, use_acc=False, is_async=True)
        dnew = warpgroup_mma(operand, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        tma.store_wait(1 if DELTA else 0)
        memory.state.store(rounded)
        fence_async_shared()
        tma.async_copy_shared_to_global(dstate_rows, [row, 0], memory.state)
        scaled = do.load(TOKENS).to(gl.float32) * factor(memory, 3 * s + 2, TOKENS)
        scaled = gl.convert_layout(scaled.to(k.dtype), STATE_OPERAND)
        local, dnew, operand = warpgroup_mma_wait(0, [local, dnew, operand])
        dnew = (dnew * factor(memory, 3 * s + 1, TOKENS) + local).to(k.dtype)
        if DELTA:
            dnew = gl.convert_layout(dnew, TOKENS_OPERAND)
            x = warpgroup_mma(dnew, memory.inverse.index(s), zero, use_acc=False, is_async=True)
            dstate = warpgroup_mma(scaled, q, dstate, is_async=True)
            x, dnew = warpgroup_mma_wait(1, [x, dnew])
            read = gl.convert_layout((x * factor(memory, 3 * s, TOKENS)).to(k.dtype), STATE_OPERAND)
            dstate, scaled = warpgroup_mma_wait(0, [dstate, scaled])
            dstate = warpgroup_mma(read, k, dstate, is_async=True)
            tma.store_wait(1)
            memory.out.store(x.to(k.dtype))
            fence_async_shared()
            tma.async_copy_shared_to_global(x_rows, [row, 0], memory.out)
            dstate, read = warpgroup_mma_wait(0, [dstate, read])
        else:
            dstate = warpgroup_mma(scaled, q, dstate, is_async=True)
            memory.out.permute((1, 0)).store(dnew)
            current, column = work.first + work.count - 1 - i, work.head * V + work.column
            store_tokens(dv_ptr, memory.out, start_ptr, current, column, G * V, BLOCK_V)
            dstate, scaled = warpgroup_mma_wait(0, [dstate, scaled])
        release(memory.ring, i, STAGES)
        last, reader = next_last, next_reader
    if gl.load(source_ptr + work.chain) >= 0:
        gl.store(start_gradient_ptr + tile_of(work.chain, work, G, K, V, STATE), dstate)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["plane", "first_chain"])
def _gradient_kernel(
    q_rows, k_rows, do_rows, inverse_rows, p_rows, number_row, dstate_rows, x_rows, dv_ptr,
    start_gradient_ptr, number_ptr, first_ptr, end_ptr, source_ptr, reader_ptr, start_ptr, plane,
    first_chain,
    GROUP: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
    DELTA: gl.constexpr,
):  # fmt: skip
    """Chains from their ends: dS'^T of each chunk, and gradients of the states they start from.

    DELTA: also X^T of each chunk; otherwise dv.
    """
    dtype: gl.constexpr = k_rows.dtype
    if DELTA:
        inverse_stages = gl.allocate_shared_memory(dtype, [STAGES, C, C], inverse_rows.layout)
    else:
        inverse_stages = None
    out_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_V, C], dtype)
    k_stages = gl.allocate_shared_memory(dtype, [STAGES, C, K], k_rows.layout)
    memory = ChainMemory(
        make_ring(k_stages, STAGES, 1),
        gl.allocate_shared_memory(dtype, [STAGES, C, K], q_rows.layout),
        gl.allocate_shared_memory(dtype, [STAGES, C, BLOCK_V], do_rows.layout),
        inverse_stages,
        gl.allocate_shared_memory(dtype, [STAGES, C, C], p_rows.layout),
        gl.allocate_shared_memory(gl.float32, [3 * STAGES, C], number_row.layout),
        gl.allocate_shared_memory(dtype, [BLOCK_V, K], dstate_rows.layout),
        gl.allocate_shared_memory(dtype, [BLOCK_V, C], out_layout),
    )
    fence_async_shared()
    work = work_of(first_ptr, end_ptr, first_chain, G, V)
    gl.warp_specialize(
        [
            (_gradient_consumer, (
                dstate_rows, x_rows, dv_ptr, start_gradient_ptr, number_ptr, source_ptr, reader_ptr,
                start_ptr, memory, work, G, K, V, STAGES, DELTA,
            )),
            (producer, (
                q_rows, k_rows, do_rows, inverse_rows, p_rows, number_row, plane, start_ptr, memory, work,
                GROUP, G, K, V, STAGES, True, True, DELTA,
            )),
        ],
        [1], [24],
    )  # fmt: skip


# Launches.

STAGES = 3  # chunks in flight: as many as fit into 227 KiB at K = 128
# If many programs wait, two share a multiprocessor, with half of its shared memory and registers each. A step
# is slower, but two run at once.
PAIR_STAGES, PAIR_REGISTERS = 2, 128


def outputs(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, o: Tensor, saved: Saved, chunks: Chunks,
    chains: Chains,
) -> None:  # fmt: skip
    """Fills ``saved``, its slots round by round, and o.

    A few chains leave multiprocessors free, on which the chunks of later rounds are prepared meanwhile. A
    program of a chain needs a whole multiprocessor, so chains run on a stream whose programs go first.
    """
    sum_gates(g, beta, saved, chunks)
    scores, prepare_chunks = prepare(q, k, v, saved, chunks, inverse=saved.has_delta)
    tiles = _tiles(q, k, v, scores, saved)
    rest = None, None, o, saved.slots, *_where(saved, chunks, chains, chains.slot)
    delta = saved.has_delta
    run = _run(_chain_kernel, [*tiles, *rest], q, v, pairs=not delta, FORWARD=True, DELTA=delta)
    for (first, _, chunk), (end, _, chunk_end) in itertools.pairwise(chains.rounds.tolist()):
        if chunk < chunk_end:
            prepare_chunks(chunk, chunk_end)
        with beside(q, priority=-1):
            run(first, end)
    join(q, priority=-1)


def states(
    k: Tensor, v: Tensor, state: Tensor, new: Tensor, saved: Saved, chunks: Chunks, chains: Chains
) -> Run:
    """Returns a pass that fills ``state`` (S^T) and ``new`` (n^T) of chains whose slots are filled."""
    tiles = _tiles(None, k, v, None, saved)
    rest = None, saved.slots, *_where(saved, chunks, chains, chains.slot)
    arguments = [*tiles, *_parts(saved, state, new), *rest]
    return _run(_chain_kernel, arguments, k, v, pairs=True, FORWARD=False, DELTA=saved.has_delta)


def state_gradients(
    q: Tensor, k: Tensor, do: Tensor, scores: Tensor, dstate: Tensor, x: Tensor, start_gradient: Tensor,
    saved: Saved, chunks: Chunks, chains: Chains,
) -> Run:  # fmt: skip
    """Returns a pass that fills ``dstate`` (dS'^T), ``x`` (X^T, or dv) and ``start_gradient`` of chains.

    It reads the gradients of the chains' own slots from rows ``Chains.first_reader`` of ``start_gradient``.
    """
    tiles = _tiles(q, k, do, scores, saved)
    where = _where(saved, chunks, chains, chains.first_reader)
    rest = None if saved.has_delta else x, start_gradient, *where
    arguments = [*tiles, *_parts(saved, dstate, x), *rest]
    return _run(_gradient_kernel, arguments, q, do, pairs=False, DELTA=saved.has_delta)


def _tiles(
    q: Tensor | None, k: Tensor, v: Tensor, scores: Tensor | None, saved: Saved
) -> list[TensorDescriptor | None]:
    """Returns descriptors of the tensors that are fetched for each chunk."""
    if saved.numbers.numel() >= 2**31:
        raise UserError(
            f"recurrence: backend 'hopper': {saved.num_chunks:,} chunks and {v.shape[1]} heads exceed "
            "TMA's 32-bit coordinates; lower data.max_tokens"
        )
    width_k = k.shape[2]
    return [
        None if q is None else matrix(q, CHUNK, width_k),
        matrix(k, CHUNK, width_k),
        matrix(v, CHUNK, BLOCK_V.value),
        rows_of(saved.inverse, CHUNK) if saved.has_delta else None,
        None if scores is None else rows_of(scores, CHUNK),
        vector(saved.numbers, CHUNK),
    ]


def _parts(saved: Saved, state: Tensor, new: Tensor) -> list[TensorDescriptor | None]:
    """Returns descriptors of S^T and n^T, which a program writes for each chunk, or of their gradients."""
    return [rows_of(state, BLOCK_V.value), rows_of(new, BLOCK_V.value) if saved.has_delta else None]


def _where(saved: Saved, chunks: Chunks, chains: Chains, per_chunk: Tensor) -> list[Tensor | int]:
    numbers = saved.numbers
    return [numbers, chains.first, chains.end, chains.source, per_chunk, chunks.start, numbers.stride(0)]


def _run(
    kernel: GluonJITFunction, args: list, q: Tensor, v: Tensor, *, pairs: bool, **constants: bool
) -> Run:
    """Returns a pass over chains.

    Args:
        kernel: computes chains.
        args: its first arguments.
        q: queries or keys.
        v: values.
        pairs: two of its programs fit into a multiprocessor.
        constants: its constants.
    """
    (heads_k, width_k), (heads, width) = q.shape[1:], v.shape[1:]
    dims = {"GROUP": heads // heads_k, "G": heads, "K": width_k, "V": width}

    def run(first: int, end: int) -> None:
        programs = (end - first) * heads * (width // BLOCK_V.value)
        in_pairs = pairs and programs > 2 * num_multiprocessors(q.device)
        stages, registers = (PAIR_STAGES, PAIR_REGISTERS) if in_pairs else (STAGES, None)
        kernel[(programs,)](*args, first, **dims, **constants, STAGES=stages, num_warps=4, maxnreg=registers)

    return run
