"""The backward pass on Hopper that keeps a block of keys: dk and dv, and on request dq. Head dim 64 and 128.

With P = exp2(S - lse) and delta = rowsum(O * dO):

    dP = dO V^T;   dS = P * (dP - delta);   dV = P^T dO;   dK = scale * dS^T Q;   dQ = scale * dS K

A program computes one job (``jobs.py``). As in FlashAttention-3 (Shah et al., arXiv:2407.08608), a producer
warp fetches queries, and two consumer groups of four warps hold 64 keys each. The products give S^T and dP^T,
transposed as dV and dK need them.

For dq both groups store dS in shared memory. A third group multiplies dS by K, so that the first two groups
do not wait for each other. TMA adds the third group's fp32 tiles to global memory in no fixed order. Without
dq there is no third group, and every sum has a fixed order.

Letters: N queries, M keys, H query heads, G = H / Hkv query heads per key head, D head dim.
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

from titan_tree.components.rings import (
    Ring,
    make_ring,
    matrix,
    opaque_zero,
    release,
    vector,
    wait_empty,
    wait_full,
)
from titan_tree.components.tree_attention.block_lists import KEYS, TILE, BlockLists, max_parts
from titan_tree.components.tree_attention.hopper.jobs import (
    Jobs,
    count_masked,
    first_masked,
    job_of,
    make_memory,
    next_full,
    next_masked,
    probabilities,
    producer,
    store_keys,
    sum_parts,
)
from titan_tree.components.tree_attention.triton_kernels.kernels import LN_2, LOG2_E


class Exchange(NamedTuple):
    """The shared memory between the two groups that compute dS and the group that computes dq."""

    ds: Ring  # stages [2, BLOCK_K, BLOCK_Q]: each group fills one half
    dq: gl.shared_memory_descriptor  # [2, BLOCK_Q, D / 2] fp32: the two halves of dq's columns


# 1. dk and dv.


@gluon.jit
def _step(
    group: gl.constexpr, column_ptr, memory, exchange, dk, dv, key, end, i, row, N, scale,
    MASK: gl.constexpr, SQUARE: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
    WITH_DQ: gl.constexpr, SCORES: gl.constexpr, DK: gl.constexpr,
):  # fmt: skip
    """Adds one tile of queries of one head to dk and dv of half of the keys."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, DK, 2)
    HALF_K: gl.constexpr = dk.shape[0]
    stage = i % STAGES
    q, do = memory.q.stages.index(stage), memory.do.stages.index(stage)
    zero = gl.zeros([HALF_K, BLOCK_Q], gl.float32, SCORES)
    zero_index = opaque_zero(i)
    k = memory.k.index(zero_index).slice(group * HALF_K, HALF_K, 0)
    v = memory.v.index(zero_index).slice(group * HALF_K, HALF_K, 0)

    wait_full(memory.q, i, STAGES)
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = memory.lse.index(stage).load(COLUMNS)
    s = warpgroup_mma_wait(0, [s])
    p = probabilities(s, lse, column_ptr, key, end, row, N, scale, MASK, SQUARE, BLOCK_Q, SCORES)
    wait_full(memory.do, i, STAGES)
    delta = gl.expand_dims(memory.delta.index(stage).load(COLUMNS), 0)
    dp = warpgroup_mma(v, do.permute((1, 0)), zero - delta, is_async=True)
    dp = warpgroup_mma_wait(0, [dp])
    ds = (p * dp).to(q.dtype)
    p = gl.convert_layout(p.to(q.dtype), OPERAND)
    dv = warpgroup_mma(p, do, dv, is_async=True)
    operand = gl.convert_layout(ds, OPERAND)
    dk = warpgroup_mma(operand, q, dk, is_async=True)
    if WITH_DQ:  # for the third group, during both products
        wait_empty(exchange.ds, i, 2)
        exchange.ds.stages.index(i % 2).slice(group * HALF_K, HALF_K, 0).store(ds)
        fence_async_shared()
        mbarrier.arrive(exchange.ds.full.index(i % 2), count=1)
    dv, p, dk, operand = warpgroup_mma_wait(0, [dv, p, dk, operand])
    release(memory.q, i, STAGES)  # once per step: it is a barrier over the group
    return dk, dv


@gluon.jit
def _consumer(
    group: gl.constexpr, dk_ptr, dv_ptr, parts_ptr, end_ptr, column_ptr, memory, exchange, job,
    N, M, heads_k, scale,
    G: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    SQUARE: gl.constexpr, WITH_DQ: gl.constexpr,
):  # fmt: skip
    """dk and dv of half of the keys: masked steps first, then steps without a mask."""
    HALF_K: gl.constexpr = BLOCK_K // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    key = job.key + group * HALF_K + gl.arange(0, HALF_K, gl.SliceLayout(1, SCORES))
    end = gl.load(end_ptr + key, mask=key < M, other=0)
    dk = gl.zeros([HALF_K, D], gl.float32, DK)
    dv = gl.zeros([HALF_K, D], gl.float32, DK)
    n_masked, n_steps = count_masked(job, G), G * (job.end - job.begin)
    mbarrier.wait(memory.kv_full, 0)
    head, tile = job.head_k * G, first_masked(job)
    for i in range(n_masked):
        dk, dv = _step(
            group, column_ptr, memory, exchange, dk, dv, key, end, i, tile * BLOCK_Q, N, scale,
            True, SQUARE, BLOCK_Q, STAGES, WITH_DQ, SCORES, DK,
        )  # fmt: skip
        head, tile = next_masked(job, head, tile)
    for i in range(n_masked, n_steps):
        dk, dv = _step(
            group, column_ptr, memory, exchange, dk, dv, key, end, i, 0, N, scale,
            False, SQUARE, BLOCK_Q, STAGES, WITH_DQ, SCORES, DK,
        )  # fmt: skip
    store_keys(dk * (scale * LN_2), dk_ptr, parts_ptr, job, group * HALF_K, M, heads_k, D, BLOCK_K, DK)
    parts_ptr += BLOCK_K * heads_k * D
    store_keys(dv, dv_ptr, parts_ptr, job, group * HALF_K, M, heads_k, D, BLOCK_K, DK)


# 2. dq.


@builtin
def _tma_add(descriptor, coordinates, source, _semantic=None):
    """Adds a tile of shared memory to global memory by TMA. Gluon exports no function for this."""
    coordinates = _semantic._convert_to_ir_values(coordinates, require_i64=False)
    _semantic.builder.create_async_tma_reduce(
        ir.DESCRIPTOR_REDUCE_KIND.ADD, descriptor.handle, coordinates, source.handle
    )


@gluon.jit
def _add_dq(dq_rows, k, exchange, i, head, row, BLOCK_Q: gl.constexpr, D: gl.constexpr):
    """dq += dS K of step i, one half of the columns after the other."""
    HALF_D: gl.constexpr = D // 2
    DQ: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF_D, 16])
    zero = gl.zeros([BLOCK_Q, HALF_D], gl.float32, DQ)
    wait_full(exchange.ds, i, 2)
    ds = exchange.ds.stages.index(i % 2).permute((1, 0))
    for half in gl.static_range(2):
        k_half = k.slice(half * HALF_D, HALF_D, 1)
        dq = warpgroup_mma(ds, k_half, zero, use_acc=False, is_async=True)
        tma.store_wait(1)  # the previous step's tile of this half has been read
        dq = warpgroup_mma_wait(0, [dq])
        if half == 1:
            release(exchange.ds, i, 2)
        exchange.dq.index(half).store(dq)
        fence_async_shared()
        _tma_add(dq_rows, [row, head * D + half * HALF_D], exchange.dq.index(half))


@gluon.jit
def _dq_consumer(
    dq_rows, memory, exchange, job, G: gl.constexpr, BLOCK_Q: gl.constexpr, D: gl.constexpr
):  # fmt: skip
    """The job's part of dq, for the steps of the two other groups."""
    n_masked, n_steps = count_masked(job, G), G * (job.end - job.begin)
    k = memory.k.index(0)
    mbarrier.wait(memory.kv_full, 0)
    head, tile = job.head_k * G, first_masked(job)
    for i in range(n_masked):
        _add_dq(dq_rows, k, exchange, i, head, tile * BLOCK_Q, BLOCK_Q, D)
        head, tile = next_masked(job, head, tile)
    head, tile = job.head_k * G, job.full_begin
    for i in range(n_masked, n_steps):
        _add_dq(dq_rows, k, exchange, i, head, tile * BLOCK_Q, BLOCK_Q, D)
        head, tile = next_full(job, head, tile)
    tma.store_wait(0)


# 3. Launch.


@gluon.jit(do_not_specialize=["n_jobs", "N", "M", "lse_stride"])
def _keys_kernel(
    q_rows, k_rows, v_rows, do_rows, lse_row, delta_row, dq_rows, dk_ptr, dv_ptr, parts_ptr, end_ptr,
    column_ptr, first_full, end_full, job_block, job_begin, job_end, job_part, job_order, n_jobs,
    N, M, lse_stride, heads_k, scale,
    G: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    SQUARE: gl.constexpr, WITH_DQ: gl.constexpr,
):  # fmt: skip
    """Allocates shared memory and starts the groups; programs past the last job return."""
    jobs = Jobs(first_full, end_full, job_block, job_begin, job_end, job_part, job_order, n_jobs)
    job = job_of(jobs, gl.program_id(0), BLOCK_Q, BLOCK_K, BLOCK_K)
    if job.begin < 0:
        return

    memory = make_memory(q_rows, k_rows, v_rows, do_rows, lse_row, delta_row, STAGES)
    loads = (
        q_rows, k_rows, v_rows, do_rows, lse_row, delta_row, memory, job, lse_stride, G, BLOCK_Q, D, STAGES,
    )  # fmt: skip
    # The two lists at the end of each call are warps and registers of all functions but the first. The first
    # group gets as many registers as the second.
    if WITH_DQ:
        ds_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_K, BLOCK_Q], q_rows.dtype)
        ds_stages = gl.allocate_shared_memory(q_rows.dtype, [2, BLOCK_K, BLOCK_Q], ds_layout)
        dq_stages = gl.allocate_shared_memory(gl.float32, [2, BLOCK_Q, D // 2], dq_rows.layout)
        exchange = Exchange(make_ring(ds_stages, 2, 1, 2), dq_stages)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_consumer, (
                    gl.constexpr(0), dk_ptr, dv_ptr, parts_ptr, end_ptr, column_ptr, memory, exchange, job,
                    N, M, heads_k, scale, G, BLOCK_Q, BLOCK_K, D, STAGES, SQUARE, WITH_DQ,
                )),
                (_consumer, (
                    gl.constexpr(1), dk_ptr, dv_ptr, parts_ptr, end_ptr, column_ptr, memory, exchange, job,
                    N, M, heads_k, scale, G, BLOCK_Q, BLOCK_K, D, STAGES, SQUARE, WITH_DQ,
                )),
                (_dq_consumer, (dq_rows, memory, exchange, job, G, BLOCK_Q, D)),
                (producer, loads),
            ],
            [4, 4, 1], [208, 72, 24],
        )  # fmt: skip
    else:
        fence_async_shared()
        gl.warp_specialize(
            [
                (_consumer, (
                    gl.constexpr(0), dk_ptr, dv_ptr, parts_ptr, end_ptr, column_ptr, memory, None, job,
                    N, M, heads_k, scale, G, BLOCK_Q, BLOCK_K, D, STAGES, SQUARE, WITH_DQ,
                )),
                (_consumer, (
                    gl.constexpr(1), dk_ptr, dv_ptr, parts_ptr, end_ptr, column_ptr, memory, None, job,
                    N, M, heads_k, scale, G, BLOCK_Q, BLOCK_K, D, STAGES, SQUARE, WITH_DQ,
                )),
                (producer, loads),
            ],
            [4, 1], [240, 24],
        )  # fmt: skip


@triton.jit
def _scale_kernel(x_ptr, y_ptr, size, scale, BLOCK: tl.constexpr):
    """y = scale * x, in the dtype of y."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + i, mask=i < size)
    tl.store(y_ptr + i, (x * scale).to(y_ptr.dtype.element_ty), mask=i < size)


# Stages for query tiles by head dim, with dq and without: as many as fit into 227 KiB.
STAGES = {64: (4, 4), 128: (3, 4)}


def gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, end: Tensor, column: Tensor,
    lists: BlockLists, scale: float, with_dq: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """Returns dk, dv and, if with_dq, dq, in the dtypes of their inputs. delta: see ``row_sums``."""
    (n, heads, dim), (m, heads_k, _) = q.shape, k.shape
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    dq_sum = torch.zeros_like(q, dtype=torch.float32) if with_dq else None
    parts = q.new_empty(max_parts(n, m), 2, KEYS, heads_k, dim, dtype=torch.float32)
    n_jobs = len(lists.job_block)
    _keys_kernel[(n_jobs * heads_k,)](
        matrix(q, TILE, dim), matrix(k, KEYS, dim), matrix(v, KEYS, dim), matrix(do, TILE, dim),
        vector(lse, TILE), vector(delta, TILE),
        None if dq_sum is None else matrix(dq_sum, TILE, dim // 2), dk, dv, parts, end, column,
        lists.first_full, lists.end_full, lists.job_block, lists.job_begin, lists.job_end, lists.job_part,
        lists.job_order, n_jobs, n, m, lse.shape[1], heads_k, scale * LOG2_E.value,
        G=heads // heads_k, BLOCK_Q=TILE, BLOCK_K=KEYS, D=dim, STAGES=STAGES[dim][not with_dq],
        SQUARE=n == m, WITH_DQ=with_dq, num_warps=4,
    )  # fmt: skip
    sum_parts(parts, dk, dv, lists)
    if dq_sum is None:
        return dk, dv, None
    dq = torch.empty_like(q)
    _scale_kernel[(triton.cdiv(q.numel(), 4096),)](dq_sum, dq, q.numel(), scale, BLOCK=4096, num_warps=8)
    return dk, dv, dq
