"""The gradients of q, k, v, g and beta on Hopper, in Gluon.

The algebra is that of ``triton_kernels/backward_kernels.py``. The kernel reads much memory for little
arithmetic, so reading must never pause. A producer warp fetches the tiles of the next chunk and head by TMA
as soon as there is room. Two groups of four warps share the work on one chunk and head. The first computes
dq, dv and the row sums that belong to them. The second computes dk and, with these sums, dbeta and dg.

The gradient of a chunk's decay contains <S', dS'> = exp(G_last) <S, dS'> + sum d k . (dS' n), so it needs no
state of another chunk.

TMA always fetches 64 tokens from a chunk's start, so a short chunk also gets tokens of other chunks. They
contribute nothing, because n, X and 1 / |q| are zero there. Without the delta rule, n is v and no |q| exists:
the kernel masks these tokens. The serial pass has computed dv already.

The kernel is long because five gradients share nearly all of their inputs, and each group interleaves
products and waits by hand.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from titan_tree.components.recurrence.buffers import Factors, Saved
from titan_tree.components.recurrence.hopper.tiles import rows_of, store_tokens
from titan_tree.components.rings import (
    Ring,
    make_ring,
    matrix,
    num_multiprocessors,
    opaque_zero,
    release,
    vector,
    wait_empty,
    wait_full,
)
from titan_tree.tree.chunks import CHUNK, Chunks

C = gl.constexpr(CHUNK)
BETA, LENGTH, Q_LENGTH = (
    gl.constexpr(Factors._fields.index(name)) for name in ("beta", "length", "q_length")
)


class InputMemory(NamedTuple):
    """The shared memory of a program: per kind of input a ring with one stage, and tiles to write."""

    q: Ring  # [C, K]
    k: Ring  # [C, K]
    v: Ring  # [C, V]; without the delta rule, it takes the place of ``new``
    do: Ring  # [C, V]
    state: Ring  # [V, K]: S^T
    dstate: Ring  # [V, K]: dS'^T
    new: Ring  # [V, C]: n^T; this and x are None without the delta rule
    x: Ring  # [V, C]: X^T
    factors: Ring  # [3, C] fp32: total, 1 / |k|, 1 / |q|
    sums: Ring  # [2, C] fp32, from the first group to the second: its part of dG, and row sums of v * dv
    queries: gl.shared_memory_descriptor  # [2, C] fp32: row sums that the first group's threads exchange
    keys: gl.shared_memory_descriptor  # [3, C] fp32: the same for the second group
    dq: gl.shared_memory_descriptor  # [C, K]
    dk: gl.shared_memory_descriptor  # [C, K]
    dv: gl.shared_memory_descriptor  # [C, V]


@gluon.jit
def _count(n_items):
    """How many items this program computes. Program p takes items p, p + programs, and so on."""
    return (n_items - gl.program_id(0) + gl.num_programs(0) - 1) // gl.num_programs(0)


@gluon.jit
def _place(n, GROUP: gl.constexpr, G: gl.constexpr):
    """Chunk, value head, and which of its key head's value heads this is, of the program's step n.

    An item is a chunk and a key head. Its value heads are GROUP steps in a row.
    """
    item = gl.program_id(0) + n // GROUP * gl.num_programs(0)
    member = n % GROUP
    return item // (G // GROUP), item % (G // GROUP) * GROUP + member, member


@gluon.jit
def _fetch(descriptor, row, column, ring, n):
    """Fetches a tile as filling n of its ring."""
    wait_empty(ring, n, 1)
    full = ring.full.index(0)
    mbarrier.expect(full, descriptor.block_type.nbytes)
    tma.async_copy_global_to_shared(descriptor, [row, column], full, ring.stages.index(0))


@gluon.jit
def _producer(
    q_rows, k_rows, v_rows, do_rows, state_rows, dstate_rows, new_rows, x_rows, number_row, plane, start_ptr,
    memory, n_items, GROUP: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
    DELTA: gl.constexpr,
):  # fmt: skip
    """Fetches the tiles of each item, in the order in which the consumers need them."""
    for n in range(_count(n_items) * GROUP):
        chunk, head, member = _place(n, GROUP, G)
        item = chunk * G + head
        start = gl.load(start_ptr + chunk)
        wait_empty(memory.factors, n, 1)
        full = memory.factors.full.index(0)
        mbarrier.expect(full, (1 + 2 * DELTA) * C * 4)
        factors = memory.factors.stages
        tma.async_copy_global_to_shared(number_row, [item * C], full, factors.index(0))
        if DELTA:
            tma.async_copy_global_to_shared(number_row, [LENGTH * plane + item * C], full, factors.index(1))
            tma.async_copy_global_to_shared(number_row, [Q_LENGTH * plane + item * C], full, factors.index(2))
            _fetch(new_rows, item * V, 0, memory.new, n)
        else:
            _fetch(v_rows, start, head * V, memory.v, n)
        _fetch(do_rows, start, head * V, memory.do, n)
        _fetch(dstate_rows, item * V, 0, memory.dstate, n)
        _fetch(state_rows, item * V, 0, memory.state, n)
        if member == 0:
            _fetch(k_rows, start, head // GROUP * K, memory.k, n // GROUP)
            _fetch(q_rows, start, head // GROUP * K, memory.q, n // GROUP)
        if DELTA:
            _fetch(x_rows, item * V, 0, memory.x, n)
            _fetch(v_rows, start, head * V, memory.v, n)


@gluon.jit
def _rows(memory, i: gl.constexpr, LAYOUT: gl.constexpr):
    """Factor i of a chunk's tokens, for tiles whose rows are tokens."""
    return gl.expand_dims(memory.factors.stages.index(i).load(gl.SliceLayout(1, LAYOUT)), 1)


@gluon.jit
def _columns(memory, i: gl.constexpr, LAYOUT: gl.constexpr):
    """Factor i of a chunk's tokens, for tiles whose columns are tokens."""
    return gl.expand_dims(memory.factors.stages.index(i).load(gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def _new_of(memory, zero, DELTA: gl.constexpr):
    """The ring that holds n, and n^T in it."""
    if DELTA:
        ring = memory.new
        new = ring.stages.index(zero)
    else:
        ring = memory.v
        new = ring.stages.index(zero).permute((1, 0))
    return ring, new


@gluon.jit
def _decayed(x, gained, lost, is_seen):
    """x * 2 ** (gained - lost) where ``is_seen``, else 0."""
    return gl.where(is_seen, x * gl.exp2(gl.where(is_seen, gained - lost, 0.0)), 0.0)


@gluon.jit
def _query_consumer(
    dq_ptr, dv_ptr, number_ptr, start_ptr, memory, n_items, scale,
    GROUP: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DELTA: gl.constexpr,
):  # fmt: skip
    """dq and (DELTA) dv, the row sums of v * dv, and the parts of dG that come from q, P and S.

    The tile ``memory.dq`` adds up the value heads of a key head.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    VALUES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, V, 16])
    STATE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, KEYS)
    STATE_ROWS: gl.constexpr = 16  # rows of a state that are loaded at once
    i = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, SCORES)), 1)
    j = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, SCORES)), 0)
    t = gl.arange(0, C, ROWS)
    for n in range(_count(n_items) * GROUP):
        zero = opaque_zero(n)
        q, k, do = memory.q.stages.index(zero), memory.k.stages.index(zero), memory.do.stages.index(zero)
        news, new = _new_of(memory, zero, DELTA)
        state, dstate = memory.state.stages.index(zero), memory.dstate.stages.index(zero)
        chunk, head, member = _place(n, GROUP, G)
        item = chunk * G + head
        start, end = gl.load(start_ptr + chunk), gl.load(start_ptr + (chunk + 1))
        last = gl.load(number_ptr + (item * C + C - 1))
        wait_full(memory.factors, n, 1)
        wait_full(news, n, 1)
        wait_full(memory.do, n, 1)
        none = gl.zeros([C, C], gl.float32, SCORES)
        dp = warpgroup_mma(do, new, none, use_acc=False, is_async=True)
        wait_full(memory.state, n, 1)
        none_k = gl.zeros([C, K], gl.float32, KEYS)
        dq = warpgroup_mma(do, state, none_k, use_acc=False, is_async=True)
        wait_full(memory.q, n // GROUP, 1)
        wait_full(memory.k, n // GROUP, 1)
        qk = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
        dp, dq, qk = warpgroup_mma_wait(0, [dp, dq, qk])
        release(memory.do, n, 1)
        release(news, n, 1)
        if DELTA:
            dp *= scale * _columns(memory, 1, SCORES)
            dp = _decayed(dp, _rows(memory, 0, SCORES), _columns(memory, 0, SCORES), i >= j)
            p_dp = dp * (qk * _rows(memory, 2, SCORES))
        else:
            is_seen = (i >= j) & (start + i < end)
            dp = _decayed(dp, _rows(memory, 0, SCORES), _columns(memory, 0, SCORES), is_seen)
            p_dp = dp * qk
        memory.queries.index(0).store(gl.sum(p_dp, 1))
        memory.queries.index(1).store(gl.sum(p_dp, 0))
        dp = gl.convert_layout(dp.to(do.dtype), gl.DotOperandLayout(0, KEYS, 2))
        if DELTA:
            q_length = memory.factors.stages.index(2).load(ROWS)
        dq *= scale * gl.exp2(_rows(memory, 0, KEYS))
        release(memory.factors, n, 1)
        queries = q.load(KEYS).to(gl.float32)
        if DELTA:
            q_dq = gl.sum(dq * queries, 1) * q_length + memory.queries.index(0).load(ROWS)
        else:
            q_dq = gl.sum(dq * queries, 1) + memory.queries.index(0).load(ROWS)
        dq = warpgroup_mma(dp, k, dq, is_async=True)

        wait_full(memory.dstate, n, 1)
        product = gl.zeros([STATE_ROWS, K], gl.float32, STATE)
        for part in gl.static_range(V // STATE_ROWS):
            s = state.slice(part * STATE_ROWS, STATE_ROWS, 0).load(STATE).to(gl.float32)
            product += s * dstate.slice(part * STATE_ROWS, STATE_ROWS, 0).load(STATE).to(gl.float32)
        product = gl.sum(gl.sum(product, 1), 0) * gl.exp2(last)
        release(memory.state, n, 1)
        release(memory.dstate, n, 1)
        dq, dp = warpgroup_mma_wait(0, [dq, dp])
        if DELTA:
            queries = q.load(KEYS).to(gl.float32)
            dq = (dq - queries * gl.expand_dims(q_length * q_dq, 1)) * gl.expand_dims(q_length, 1)
        if member > 0:
            dq += memory.dq.load(KEYS).to(gl.float32)
        memory.dq.store(dq.to(memory.dq.dtype))
        if member == GROUP - 1:
            release(memory.k, n // GROUP, 1)
            release(memory.q, n // GROUP, 1)
            store_tokens(dq_ptr, memory.dq, start_ptr, chunk, head // GROUP * K, G // GROUP * K, K)

        if DELTA:
            wait_full(memory.x, n, 1)
            wait_full(memory.v, n, 1)
            x = memory.x.stages.index(0).permute((1, 0)).load(VALUES)
            v = memory.v.stages.index(0).load(VALUES)
            release(memory.x, n, 1)
            release(memory.v, n, 1)
            x_v = gl.sum(x.to(gl.float32) * v.to(gl.float32), 1)
            memory.dv.store(x)
            store_tokens(dv_ptr, memory.dv, start_ptr, chunk, head * V, G * V, V)

        # The decay of S over the chunk is exp(G_last), so its gradient goes to G_last, at place C - 1. In a
        # short chunk this place has no token, but it still has a summed decay.
        dtotal = gl.where(start + t < end, q_dq - memory.queries.index(1).load(ROWS), 0.0)
        dtotal += gl.where(t == C - 1, product, 0.0)
        wait_empty(memory.sums, n, 1)
        memory.sums.stages.index(0).store(dtotal)
        if DELTA:
            memory.sums.stages.index(1).store(x_v)
        mbarrier.arrive(memory.sums.full.index(0), count=1)


@gluon.jit
def _key_consumer(
    dk_ptr, dg_ptr, dbeta_ptr, number_ptr, start_ptr, memory, n_items, plane, scale,
    GROUP: gl.constexpr, G: gl.constexpr, K: gl.constexpr, DELTA: gl.constexpr,
):  # fmt: skip
    """dk, dg and (DELTA) dbeta. The tile ``memory.dk`` adds up the value heads of a key head."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, KEYS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, KEYS, 2)
    row = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, SCORES)), 1)
    column = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(0, SCORES)), 0)
    t = gl.arange(0, C, ROWS)
    for n in range(_count(n_items) * GROUP):
        zero = opaque_zero(n)
        q, k, do = memory.q.stages.index(zero), memory.k.stages.index(zero), memory.do.stages.index(zero)
        dstate = memory.dstate.stages.index(zero)
        news, new = _new_of(memory, zero, DELTA)
        chunk, head, member = _place(n, GROUP, G)
        item = chunk * G + head
        start, end = gl.load(start_ptr + chunk), gl.load(start_ptr + (chunk + 1))
        last = gl.load(number_ptr + (item * C + C - 1))
        is_token = start + t < end
        if DELTA:
            beta = gl.load(number_ptr + (BETA * plane + item * C + t), mask=is_token, other=1.0)
        wait_full(memory.factors, n, 1)
        wait_full(news, n, 1)
        wait_full(memory.do, n, 1)
        none = gl.zeros([C, C], gl.float32, SCORES)
        # The part of dk where k is a column: of the chunk's last state, P and A.
        dp = warpgroup_mma(new.permute((1, 0)), do.permute((1, 0)), none, use_acc=False, is_async=True)
        wait_full(memory.dstate, n, 1)
        none_k = gl.zeros([C, K], gl.float32, KEYS)
        dk = warpgroup_mma(new.permute((1, 0)), dstate, none_k, use_acc=False, is_async=True)
        if DELTA:
            state, x = memory.state.stages.index(zero), memory.x.stages.index(zero)
            wait_full(memory.x, n, 1)
            da = warpgroup_mma(new.permute((1, 0)), x, none, use_acc=False, is_async=True)
            wait_full(memory.k, n // GROUP, 1)
            kk = warpgroup_mma(k, k.permute((1, 0)), none, use_acc=False, is_async=True)
            gained, lost = _columns(memory, 0, SCORES), _rows(memory, 0, SCORES)
            dp, dk, da, kk = warpgroup_mma_wait(0, [dp, dk, da, kk])
            release(memory.do, n, 1)
            release(memory.dstate, n, 1)
            dp = _decayed(dp * (scale * _columns(memory, 2, SCORES)), gained, lost, row <= column)
            dp = gl.convert_layout(dp.to(k.dtype), OPERAND)
            da = _decayed(-da * _columns(memory, 1, SCORES), gained, lost, row < column)
            a_da = da * (kk * _rows(memory, 1, SCORES))
            memory.keys.index(0).store(gl.sum(a_da, 1))
            memory.keys.index(1).store(gl.sum(a_da, 0))
            da = gl.convert_layout(da.to(k.dtype), OPERAND)
            total = memory.factors.stages.index(0).load(ROWS)
            length = memory.factors.stages.index(1).load(ROWS)
            dk *= gl.expand_dims(gl.exp2(last - total), 1)
            from_last = gl.sum(dk * k.load(KEYS).to(gl.float32), 1) * length
            wait_full(memory.q, n // GROUP, 1)
            dk = warpgroup_mma(dp, q, dk, is_async=True)
            dk, dp = warpgroup_mma_wait(0, [dk, dp])
            dk = warpgroup_mma(da, k, dk, is_async=True)

            # The part of dk where k is a row: of A and e k S.
            db = warpgroup_mma(x.permute((1, 0)), new, none, use_acc=False, is_async=True)
            wait_full(memory.state, n, 1)
            dk_row = warpgroup_mma(x.permute((1, 0)), state, none_k, use_acc=False, is_async=True)
            dk, da, db, dk_row = warpgroup_mma_wait(0, [dk, da, db, dk_row])
            release(news, n, 1)
            release(memory.x, n, 1)
            release(memory.state, n, 1)
            db = _decayed(-db * _columns(memory, 1, SCORES), lost, gained, row > column)
            db = gl.convert_layout(db.to(k.dtype), OPERAND)
            release(memory.factors, n, 1)
            dk_row *= gl.expand_dims(-gl.exp2(total), 1)
            k_row = gl.sum(dk_row * k.load(KEYS).to(gl.float32), 1) * length + memory.keys.index(1).load(ROWS)
            dk = warpgroup_mma(db, k, dk + dk_row, is_async=True)
            dk, db = warpgroup_mma_wait(0, [dk, db])
            keys = k.load(KEYS).to(gl.float32)
            dk -= keys * gl.expand_dims(length * length * gl.sum(dk * keys, 1), 1)
            dk *= gl.expand_dims(length, 1)
        else:
            gained, lost = _columns(memory, 0, SCORES), _rows(memory, 0, SCORES)
            total = memory.factors.stages.index(0).load(ROWS)
            dp, dk = warpgroup_mma_wait(0, [dp, dk])
            release(memory.do, n, 1)
            release(memory.dstate, n, 1)
            release(news, n, 1)
            dp = _decayed(dp, gained, lost, (row <= column) & (start + column < end))
            dp = gl.convert_layout(dp.to(k.dtype), OPERAND)
            release(memory.factors, n, 1)
            dk *= gl.expand_dims(gl.exp2(last - total), 1)
            wait_full(memory.k, n // GROUP, 1)
            from_last = gl.where(is_token, gl.sum(dk * k.load(KEYS).to(gl.float32), 1), 0.0)
            wait_full(memory.q, n // GROUP, 1)
            dk = warpgroup_mma(dp, q, dk, is_async=True)
            dk, dp = warpgroup_mma_wait(0, [dk, dp])
        if member > 0:
            dk += memory.dk.load(KEYS).to(gl.float32)
        memory.dk.store(dk.to(memory.dk.dtype))
        if member == GROUP - 1:
            release(memory.q, n // GROUP, 1)
            release(memory.k, n // GROUP, 1)
            store_tokens(dk_ptr, memory.dk, start_ptr, chunk, head // GROUP * K, G // GROUP * K, K)

        wait_full(memory.sums, n, 1)
        dtotal = memory.sums.stages.index(0).load(ROWS)
        if DELTA:
            x_v = memory.sums.stages.index(1).load(ROWS)
        release(memory.sums, n, 1)
        if DELTA:
            place = (start + t).to(gl.int64) * G + head
            dbeta = (x_v + k_row) / beta
            gl.store(dbeta_ptr + place, dbeta.to(dbeta_ptr.dtype.element_ty), mask=is_token)
            dtotal += gl.where(is_token, k_row - from_last - memory.keys.index(0).load(ROWS), 0.0)
        else:
            dtotal -= from_last
        dtotal += gl.where(t == C - 1, gl.sum(from_last, 0), 0.0)
        memory.keys.index(2).store(dtotal)
        later = gl.expand_dims(memory.keys.index(2).load(gl.SliceLayout(0, SCORES)), 0)
        dg = gl.sum(gl.where(row <= column, later, 0.0), 1)
        place = (start + gl.arange(0, C, gl.SliceLayout(1, SCORES))).to(gl.int64) * G + head
        is_token = start + gl.arange(0, C, gl.SliceLayout(1, SCORES)) < end
        gl.store(dg_ptr + place, dg.to(dg_ptr.dtype.element_ty), mask=is_token)


@gluon.jit
def _ring_of(descriptor, READERS: gl.constexpr):
    """A ring with one stage for tiles of a descriptor."""
    shape: gl.constexpr = descriptor.block_type.shape
    stages = gl.allocate_shared_memory(descriptor.dtype, [1, shape[0], shape[1]], descriptor.layout)
    return make_ring(stages, 1, READERS)


@gluon.jit(do_not_specialize=["plane", "n_items"])
def _inputs_kernel(
    q_rows, k_rows, v_rows, do_rows, state_rows, dstate_rows, new_rows, x_rows, number_row, number_ptr,
    dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, start_ptr, plane, n_items, scale,
    GROUP: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, DELTA: gl.constexpr,
):  # fmt: skip
    """dq, dk, dg, and (DELTA) dv and dbeta: allocates shared memory and starts the three groups."""
    dtype: gl.constexpr = q_rows.dtype
    FLAT: gl.constexpr = number_row.layout
    factors = gl.allocate_shared_memory(gl.float32, [3, C], FLAT)
    sums = gl.allocate_shared_memory(gl.float32, [2, C], FLAT)
    if DELTA:
        new_ring = _ring_of(new_rows, 2)
        x_ring = _ring_of(x_rows, 2)
        dv = gl.allocate_shared_memory(dtype, [C, V], v_rows.layout)
    else:
        new_ring = None
        x_ring = None
        dv = None
    # The delta rule has no room for sums in fp32, and in its models few value heads share a key head.
    SUM: gl.constexpr = dtype if DELTA else gl.float32
    SUM_LAYOUT: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, K], SUM)
    memory = InputMemory(
        _ring_of(q_rows, 2),
        _ring_of(k_rows, 2),
        _ring_of(v_rows, 1 if DELTA else 2),
        _ring_of(do_rows, 2),
        _ring_of(state_rows, 2 if DELTA else 1),
        _ring_of(dstate_rows, 2),
        new_ring,
        x_ring,
        make_ring(factors, 1, 2),
        make_ring(sums, 1, 1),
        gl.allocate_shared_memory(gl.float32, [2, C], FLAT),
        gl.allocate_shared_memory(gl.float32, [3, C], FLAT),
        gl.allocate_shared_memory(SUM, [C, K], SUM_LAYOUT),
        gl.allocate_shared_memory(SUM, [C, K], SUM_LAYOUT),
        dv,
    )
    fence_async_shared()
    gl.warp_specialize(
        [
            (_key_consumer, (
                dk_ptr, dg_ptr, dbeta_ptr, number_ptr, start_ptr, memory, n_items, plane, scale, GROUP, G,
                K, DELTA,
            )),
            (_query_consumer, (
                dq_ptr, dv_ptr, number_ptr, start_ptr, memory, n_items, scale, GROUP, G, K, V, DELTA,
            )),
            (_producer, (
                q_rows, k_rows, v_rows, do_rows, state_rows, dstate_rows, new_rows, x_rows, number_row, plane,
                start_ptr, memory, n_items, GROUP, G, K, V, DELTA,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


def input_gradients(
    q: Tensor, k: Tensor, v: Tensor, do: Tensor, state: Tensor, dstate: Tensor, new: Tensor, x: Tensor,
    gradients: tuple[Tensor | None, ...], saved: Saved, chunks: Chunks,
) -> None:  # fmt: skip
    """Fills the gradients dq, dk, dg, and for a delta rule dv and dbeta."""
    (heads_k, width_k), (num_chunks, heads, width, _) = q.shape[1:], state.shape
    numbers, n_items = saved.numbers, num_chunks * heads_k
    tokens = [matrix(y, CHUNK, y.shape[-1]) for y in (q, k, v, do)]
    states = [rows_of(y, width) for y in (state, dstate)]
    states += [rows_of(y, width) if saved.has_delta else None for y in (new, x)]
    _inputs_kernel[(min(n_items, num_multiprocessors(q.device)),)](
        *tokens, *states, vector(numbers, CHUNK), numbers, *gradients, chunks.start, numbers.stride(0),
        n_items, width_k**-0.5 if saved.has_delta else 1.0, GROUP=heads // heads_k, G=heads, K=width_k,
        V=width, DELTA=saved.has_delta, num_warps=4,
    )  # fmt: skip
