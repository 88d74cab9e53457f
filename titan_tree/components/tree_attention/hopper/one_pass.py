"""Backward on Hopper in one pass: dk and dv stay in registers, dq is added to global memory.

With P = exp2(S - lse), dP = dO V^T, delta = rowsum(O * dO) and dS = P * (dP - delta):
dV = P^T dO, dK = scale * dS^T Q, dQ = scale * dS K.

A job is a key block and a range of query tiles (``plan``), for all G heads; heaviest first. Ranges of the
trunk are cut into several jobs, whose fp32 parts of dk and dv are summed in order. As in FlashAttention-3
(Shah et al., arXiv:2407.08608) a producer warp fetches queries and two groups of four warps hold 64 keys
each: the tensor cores give S^T and dP^T as they are needed, transposed. For dq the groups exchange dS through
shared memory, and each computes half of the columns, which TMA adds to global memory in fp32. The order of
these sums is not fixed.

Letters: N queries, M keys, H query heads, G = H / Hkv heads a key head serves, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton._C.libtriton import ir
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language._core import builtin
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from titan_tree.components.tree_attention.hopper.ring import (
    LN_2,
    LOG2_E,
    Ring,
    make_ring,
    matrix,
    opaque_zero,
    release,
    vector,
    wait_empty,
    wait_full,
)
from titan_tree.components.tree_attention.plan import JOBS, KEYS, TILE, Plan, max_parts
from titan_tree.components.tree_attention.portable import row_sums

# 1. Jobs.


class Job(NamedTuple):
    """A key block and tiles begin .. end - 1 of its queries, for G heads; full_begin .. full_end - 1 see
    all of its keys. Steps are the masked tiles of all heads, then the full tiles of all heads."""

    key: gl.tensor  # first row of the keys
    head_k: gl.tensor
    part: gl.tensor  # place of the fp32 sums among the parts of cut ranges; -1: not cut
    begin: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    end: gl.tensor


class Memory(NamedTuple):
    """Shared memory of a program."""

    k: gl.shared_memory_descriptor  # [1, BLOCK_K, D]
    v: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor  # barrier: k and v are there
    q: Ring  # slots [STAGES, BLOCK_Q, D]
    do: Ring
    lse: gl.shared_memory_descriptor  # [STAGES, BLOCK_Q], filled with q
    delta: gl.shared_memory_descriptor  # [STAGES, BLOCK_Q], filled with do
    ds: gl.shared_memory_descriptor  # [2, BLOCK_K, BLOCK_Q]
    ds_ready: gl.shared_memory_descriptor  # [4, 1] barriers: slot * 2 + group
    dq: gl.shared_memory_descriptor  # [2, BLOCK_Q, D / 2] fp32: each group's half on its way out


@gluon.jit
def _n_masked(job, G: gl.constexpr):
    return G * (job.full_begin - job.begin + job.end - job.full_end)


@gluon.jit
def _first_masked(job):
    return gl.where(job.begin < job.full_begin, job.begin, job.full_end)


@gluon.jit
def _next_masked(job, head, tile):
    """Head and tile of the masked step after this one."""
    tile += 1
    tile = gl.where(tile == job.full_begin, job.full_end, tile)
    wraps = tile == job.end
    return gl.where(wraps, head + 1, head), gl.where(wraps, _first_masked(job), tile)


@gluon.jit
def _next_full(job, head, tile):
    tile += 1
    wraps = tile == job.full_end
    return gl.where(wraps, head + 1, head), gl.where(wraps, job.full_begin, tile)


# 2. Producer.


@gluon.jit
def _load_queries(
    q_rows, do_rows, lse_row, delta_row, memory, i, head, row, lse_stride,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    s = i % STAGES
    wait_empty(memory.q, i, STAGES)
    full = memory.q.full.index(s)
    mbarrier.expect(full, q_rows.block_type.nbytes + lse_row.block_type.nbytes)
    tma.async_copy_global_to_shared(q_rows, [row, head * D], full, memory.q.slots.index(s))
    tma.async_copy_global_to_shared(lse_row, [head * lse_stride + row], full, memory.lse.index(s))
    wait_empty(memory.do, i, STAGES)
    full = memory.do.full.index(s)
    mbarrier.expect(full, do_rows.block_type.nbytes + delta_row.block_type.nbytes)
    tma.async_copy_global_to_shared(do_rows, [row, head * D], full, memory.do.slots.index(s))
    tma.async_copy_global_to_shared(delta_row, [head * lse_stride + row], full, memory.delta.index(s))


@gluon.jit
def _producer(
    q_rows, k_rows, v_rows, do_rows, lse_row, delta_row, memory, job, lse_stride,
    G: gl.constexpr, BLOCK_Q: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    mbarrier.expect(memory.kv_full, 2 * k_rows.block_type.nbytes)
    tma.async_copy_global_to_shared(k_rows, [job.key, job.head_k * D], memory.kv_full, memory.k.index(0))
    tma.async_copy_global_to_shared(v_rows, [job.key, job.head_k * D], memory.kv_full, memory.v.index(0))
    n_masked, n_steps = _n_masked(job, G), G * (job.end - job.begin)
    head, tile = job.head_k * G, _first_masked(job)
    for i in range(n_masked):
        row = tile * BLOCK_Q
        _load_queries(q_rows, do_rows, lse_row, delta_row, memory, i, head, row, lse_stride, D, STAGES)
        head, tile = _next_masked(job, head, tile)
    head, tile = job.head_k * G, job.full_begin
    for i in range(n_masked, n_steps):
        row = tile * BLOCK_Q
        _load_queries(q_rows, do_rows, lse_row, delta_row, memory, i, head, row, lse_stride, D, STAGES)
        head, tile = _next_full(job, head, tile)


# 3. Consumers.
#
# Exchange of dS, a step apart, so that the groups need not meet. Late in step i a group writes its half to
# slot i % 2 and arrives at its barrier of that slot. Early in step i + 1 it waits for the other group's, and
# multiplies. By then both are done with slot (i + 1) % 2 of step i - 1, which may be overwritten. Step 0
# multiplies what is not there yet and adds it to row N: nowhere.


@gluon.jit
def _dq_of_step_before(
    group: gl.constexpr, k, memory, i, D: gl.constexpr, BLOCK_Q: gl.constexpr, DQ: gl.constexpr,
):  # fmt: skip
    HALF_D: gl.constexpr = D // 2
    slot = (i + 1) % 2
    mbarrier.wait(memory.ds_ready.index(2 * slot + 1 - group), (((i + 1) // 2) & 1) ^ 1)
    zero = gl.zeros([BLOCK_Q, HALF_D], gl.float32, DQ)
    k_half = k.slice(group * HALF_D, HALF_D, 1)
    return warpgroup_mma(
        memory.ds.index(slot).permute((1, 0)), k_half, zero, use_acc=False, is_async=True
    )  # fmt: skip


@builtin
def _tma_add(descriptor, coordinates, source, _semantic=None):
    """TMA reduction: add a tile of shared memory to global memory. Gluon has the operation, but no name."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


@gluon.jit
def _add_dq(group: gl.constexpr, dq_rows, memory, dq, head, row, D: gl.constexpr):
    tma.store_wait(0)
    memory.dq.index(group).store(dq)
    fence_async_shared()
    _tma_add(dq_rows, [row, head * D + group * (D // 2)], memory.dq.index(group))


@gluon.jit
def _step(
    group: gl.constexpr, dq_rows, column_ptr, memory, dk, dv, key, end, i, row, head_before, row_before, N,
    scale, MASK: gl.constexpr, SQUARE: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr,
    D: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, DK: gl.constexpr, DQ: gl.constexpr,
):  # fmt: skip
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    HALF_K: gl.constexpr = BLOCK_K // 2
    slot = i % STAGES
    q, do = memory.q.slots.index(slot), memory.do.slots.index(slot)
    zero_index = opaque_zero(i)
    k, v = memory.k.index(zero_index), memory.v.index(zero_index)
    k_half, v_half = k.slice(group * HALF_K, HALF_K, 0), v.slice(group * HALF_K, HALF_K, 0)
    zero = gl.zeros([HALF_K, BLOCK_Q], gl.float32, SCORES)

    wait_full(memory.q, i, STAGES)
    s = warpgroup_mma(k_half, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    dq = _dq_of_step_before(group, k, memory, i, D, BLOCK_Q, DQ)
    lse = memory.lse.index(slot).load(COLUMNS)
    s = warpgroup_mma_wait(1, [s])
    p = gl.exp2(s * scale - gl.expand_dims(lse, 0))
    if MASK:
        rows = row + gl.arange(0, BLOCK_Q, COLUMNS)
        if SQUARE:  # 16 registers less
            column = gl.expand_dims(rows, 0)
        else:
            column = gl.expand_dims(gl.load(column_ptr + rows, mask=rows < N, other=-1), 0)
        p = gl.where((gl.expand_dims(key, 1) <= column) & (column < gl.expand_dims(end, 1)), p, 0.0)
    p_operand = gl.convert_layout(p.to(q.dtype), OPERAND)
    dq = warpgroup_mma_wait(0, [dq])
    _add_dq(group, dq_rows, memory, dq, head_before, row_before, D)

    # dP not before dq has left its registers: 240 a thread are all there are.
    wait_full(memory.do, i, STAGES)
    dp = warpgroup_mma(v_half, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    dv = warpgroup_mma(p_operand, do, dv, is_async=True)
    dp = warpgroup_mma_wait(1, [dp])
    delta = memory.delta.index(slot).load(COLUMNS)
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(q.dtype)
    memory.ds.index(i % 2).slice(group * HALF_K, HALF_K, 0).store(ds)
    fence_async_shared()
    mbarrier.arrive(memory.ds_ready.index(2 * (i % 2) + group), count=1)
    ds = gl.convert_layout(ds, OPERAND)
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    dv, p_operand = warpgroup_mma_wait(1, [dv, p_operand])
    release(memory.do, i, STAGES)
    dk, ds = warpgroup_mma_wait(0, [dk, ds])
    release(memory.q, i, STAGES)
    return dk, dv


@gluon.jit
def _consumer(
    group: gl.constexpr, dq_rows, dk_ptr, dv_ptr, parts_ptr, end_ptr, column_ptr, memory, job, N, M, heads_k,
    scale, G: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, SQUARE: gl.constexpr,
):  # fmt: skip
    HALF_K: gl.constexpr = BLOCK_K // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D // 2, 16])
    key = job.key + group * HALF_K + gl.arange(0, HALF_K, gl.SliceLayout(1, SCORES))
    end = gl.load(end_ptr + key, mask=key < M, other=0)
    dk = gl.zeros([HALF_K, D], gl.float32, DK)
    dv = gl.zeros([HALF_K, D], gl.float32, DK)
    n_masked, n_steps = _n_masked(job, G), G * (job.end - job.begin)
    head_before, row_before = job.head_k * G, N
    mbarrier.wait(memory.kv_full, 0)
    head, tile = job.head_k * G, _first_masked(job)
    for i in range(n_masked):
        row = tile * BLOCK_Q
        dk, dv = _step(
            group, dq_rows, column_ptr, memory, dk, dv, key, end, i, row, head_before, row_before, N, scale,
            True, SQUARE, BLOCK_Q, BLOCK_K, D, STAGES, SCORES, DK, DQ,
        )  # fmt: skip
        head_before, row_before = head, row
        head, tile = _next_masked(job, head, tile)
    head, tile = job.head_k * G, job.full_begin
    for i in range(n_masked, n_steps):
        row = tile * BLOCK_Q
        dk, dv = _step(
            group, dq_rows, column_ptr, memory, dk, dv, key, end, i, row, head_before, row_before, N, scale,
            False, SQUARE, BLOCK_Q, BLOCK_K, D, STAGES, SCORES, DK, DQ,
        )  # fmt: skip
        head_before, row_before = head, row
        head, tile = _next_full(job, head, tile)
    dq = _dq_of_step_before(group, memory.k.index(0), memory, n_steps, D, BLOCK_Q, DQ)
    dq = warpgroup_mma_wait(0, [dq])
    _add_dq(group, dq_rows, memory, dq, head_before, row_before, D)

    dk *= scale * LN_2
    row_k = group * HALF_K + gl.arange(0, HALF_K, gl.SliceLayout(1, DK))
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, DK)), 0)
    if job.part < 0:
        row_k += job.key
        offset = gl.expand_dims((row_k.to(gl.int64) * heads_k + job.head_k) * D, 1) + d
        inside = gl.expand_dims(row_k < M, 1)
        gl.store(dk_ptr + offset, dk.to(dk_ptr.dtype.element_ty), mask=inside)
        gl.store(dv_ptr + offset, dv.to(dv_ptr.dtype.element_ty), mask=inside)
    else:
        row_k += job.part * 2 * BLOCK_K
        offset = gl.expand_dims((row_k.to(gl.int64) * heads_k + job.head_k) * D, 1) + d
        gl.store(parts_ptr + offset, dk)
        gl.store(parts_ptr + offset + BLOCK_K * heads_k * D, dv)
    tma.store_wait(0)


# 4. Launch.


@gluon.jit(do_not_specialize=["n_jobs", "N", "M", "lse_stride"])
def _backward_kernel(
    q_rows, k_rows, v_rows, do_rows, lse_row, delta_row, dq_rows, dk_ptr, dv_ptr, parts_ptr, end_ptr,
    column_ptr, first_full_ptr, end_full_ptr, job_block, job_begin, job_end, job_part, n_jobs,
    N, M, lse_stride, heads_k, scale,
    G: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, SQUARE: gl.constexpr,
):  # fmt: skip
    j, head_k = gl.program_id(0) % n_jobs, gl.program_id(0) // n_jobs
    block, begin, end = gl.load(job_block + j), gl.load(job_begin + j), gl.load(job_end + j)
    if begin < 0:
        return
    full_begin = (gl.load(first_full_ptr + block) + BLOCK_Q - 1) // BLOCK_Q
    full_begin = gl.minimum(gl.maximum(full_begin, begin), end)
    full_end = gl.load(end_full_ptr + block) // BLOCK_Q
    full_end = gl.maximum(gl.minimum(full_end, end), full_begin)
    job = Job(block * BLOCK_K, head_k, gl.load(job_part + j), begin, full_begin, full_end, end)

    dtype: gl.constexpr = q_rows.dtype
    ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_Q], dtype)
    q_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_Q, D], q_rows.layout)
    do_slots = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_Q, D], do_rows.layout)
    memory = Memory(
        gl.allocate_shared_memory(dtype, [1, BLOCK_K, D], k_rows.layout),
        gl.allocate_shared_memory(dtype, [1, BLOCK_K, D], v_rows.layout),
        gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout()),
        make_ring(q_slots, STAGES, 2),
        make_ring(do_slots, STAGES, 2),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], lse_row.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], delta_row.layout),
        gl.allocate_shared_memory(dtype, [2, BLOCK_K, BLOCK_Q], ds_layout),
        gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.float32, [2, BLOCK_Q, D // 2], dq_rows.layout),
    )
    mbarrier.init(memory.kv_full, count=1)
    for s in gl.static_range(4):
        mbarrier.init(memory.ds_ready.index(s), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consumer, (
                gl.constexpr(0), dq_rows, dk_ptr, dv_ptr, parts_ptr, end_ptr, column_ptr, memory, job,
                N, M, heads_k, scale, G, BLOCK_Q, BLOCK_K, D, STAGES, SQUARE,
            )),
            (_consumer, (
                gl.constexpr(1), dq_rows, dk_ptr, dv_ptr, parts_ptr, end_ptr, column_ptr, memory, job,
                N, M, heads_k, scale, G, BLOCK_Q, BLOCK_K, D, STAGES, SQUARE,
            )),
            (_producer, (
                q_rows, k_rows, v_rows, do_rows, lse_row, delta_row, memory, job, lse_stride,
                G, BLOCK_Q, D, STAGES,
            )),
        ],
        [4, 1], [240, 24],  # warps and registers of the workers; the first group has what is left, 240
    )  # fmt: skip


@triton.jit(do_not_specialize=["M"])
def _sum_parts_kernel(
    parts_ptr, dk_ptr, dv_ptr, order_ptr, stop_ptr, M, heads_k,
    D: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dk and dv of the i-th heaviest key block, where its range was cut: the sum of its jobs' parts."""
    i, head_k, row = tl.program_id(0), tl.program_id(1), tl.program_id(2) * ROWS
    stop = tl.load(stop_ptr + i)
    start = tl.load(stop_ptr + i - 1, mask=i > 0, other=0)
    if stop - start > 1:
        rows = row + tl.arange(0, ROWS)
        d = tl.arange(0, D)[None, :]
        dk = tl.zeros([ROWS, D], tl.float32)
        dv = tl.zeros([ROWS, D], tl.float32)
        for part in range(start, stop):
            part_rows = (part * 2 * BLOCK_K + rows).to(tl.int64)
            offset = ((part_rows * heads_k + head_k) * D)[:, None] + d
            dk += tl.load(parts_ptr + offset)
            dv += tl.load(parts_ptr + offset + BLOCK_K * heads_k * D)
        rows += tl.load(order_ptr + i) * BLOCK_K
        offset = ((rows.to(tl.int64) * heads_k + head_k) * D)[:, None] + d
        tl.store(dk_ptr + offset, dk.to(dk_ptr.dtype.element_ty), mask=rows[:, None] < M)
        tl.store(dv_ptr + offset, dv.to(dv_ptr.dtype.element_ty), mask=rows[:, None] < M)


@triton.jit
def _scale_kernel(x_ptr, y_ptr, size, scale, BLOCK: tl.constexpr):
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size)
    tl.store(y_ptr + i, (x * scale).to(y_ptr.dtype.element_ty), mask=i < size)


# Slots for query tiles by head dim: as many as fit into 227 KiB.
SLOTS = {64: 4, 128: 3}


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, end: Tensor, column: Tensor,
    plan: Plan,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the dtypes of q, k, v."""
    (n, heads, dim), (m, heads_k, _) = q.shape, k.shape
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    dq_sum, delta = torch.zeros_like(q, dtype=torch.float32), row_sums(do, o, lse)
    parts = q.new_empty(max_parts(n, m), 2, KEYS, heads_k, dim, dtype=torch.float32)
    n_jobs = len(plan.job_block)
    _backward_kernel[(n_jobs * heads_k,)](
        matrix(q, TILE, dim), matrix(k, KEYS, dim), matrix(v, KEYS, dim), matrix(do, TILE, dim),
        vector(lse, TILE), vector(delta, TILE), matrix(dq_sum, TILE, dim // 2), dk, dv, parts,
        end, column, plan.first_full, plan.end_full,
        plan.job_block, plan.job_begin, plan.job_end, plan.job_part, n_jobs,
        n, m, lse.shape[1], heads_k, dim**-0.5 * LOG2_E,
        G=heads // heads_k, BLOCK_Q=TILE, BLOCK_K=KEYS, D=dim, STAGES=SLOTS[dim], SQUARE=n == m,
        num_warps=4,
    )  # fmt: skip
    if len(parts):
        _sum_parts_kernel[(min(JOBS, len(plan.range_order)), heads_k, KEYS // 32)](
            parts, dk, dv, plan.range_order, plan.job_stop, m, heads_k, D=dim, BLOCK_K=KEYS, ROWS=32
        )
    _scale_kernel[(triton.cdiv(q.numel(), 4096),)](dq_sum, dq, q.numel(), dim**-0.5, BLOCK=4096, num_warps=8)
    return dq, dk, dv
