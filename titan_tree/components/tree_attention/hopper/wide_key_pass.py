"""The backward pass on Hopper that keeps a block of keys, at head dim 256: dk and dv, in a fixed order.

The registers of one group cannot hold both gradients of 64 keys. So a program takes 64 keys, half of a job's.
One group computes P and dV, the other dP and dK. P goes from the first to the second through shared memory.
Everything else is as in ``key_pass.py``.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from titan_tree.components.rings import (
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
    next_masked,
    probabilities,
    producer,
    store_keys,
    sum_parts,
)
from titan_tree.components.tree_attention.triton_kernels.kernels import LN_2, LOG2_E


@gluon.jit
def _value_step(
    column_ptr, memory, p_ring, dv, key, end, i, row, N, scale,
    MASK: gl.constexpr, SQUARE: gl.constexpr, BLOCK_Q: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, DK: gl.constexpr,
):  # fmt: skip
    """S, P (also for the other group) and dV, for one tile of queries."""
    stage = i % STAGES
    do = memory.do.stages.index(stage)
    zero = gl.zeros([dv.shape[0], BLOCK_Q], gl.float32, SCORES)
    k = memory.k.index(opaque_zero(i))
    wait_full(memory.q, i, STAGES)
    q = memory.q.stages.index(stage)
    s = warpgroup_mma(k, q.permute((1, 0)), zero, use_acc=False, is_async=True)
    lse = memory.lse.index(stage).load(gl.SliceLayout(0, SCORES))
    s = warpgroup_mma_wait(0, [s])
    p = probabilities(s, lse, column_ptr, key, end, row, N, scale, MASK, SQUARE, BLOCK_Q, SCORES)
    operand = gl.convert_layout(p.to(do.dtype), gl.DotOperandLayout(0, DK, 2))
    wait_full(memory.do, i, STAGES)
    dv = warpgroup_mma(operand, do, dv, is_async=True)
    # For the other group, during the product.
    wait_empty(p_ring, i, 2)
    p_ring.stages.index(i % 2).store(p)
    mbarrier.arrive(p_ring.full.index(i % 2), count=1)
    dv, operand = warpgroup_mma_wait(0, [dv, operand])
    release(memory.q, i, STAGES)
    return dv


@gluon.jit
def _key_step(
    memory, p_ring, dk, i,
    BLOCK_Q: gl.constexpr, STAGES: gl.constexpr, SCORES: gl.constexpr, DK: gl.constexpr,
):  # fmt: skip
    """dP, and dK with the other group's P, for one tile of queries."""
    stage = i % STAGES
    q, do = memory.q.stages.index(stage), memory.do.stages.index(stage)
    zero = gl.zeros([dk.shape[0], BLOCK_Q], gl.float32, SCORES)
    v = memory.v.index(opaque_zero(i))
    wait_full(memory.do, i, STAGES)
    dp = warpgroup_mma(v, do.permute((1, 0)), zero, use_acc=False, is_async=True)
    delta = memory.delta.index(stage).load(gl.SliceLayout(0, SCORES))
    dp = warpgroup_mma_wait(0, [dp])
    wait_full(p_ring, i, 2)
    p = p_ring.stages.index(i % 2).load(SCORES)
    ds = (p * (dp - gl.expand_dims(delta, 0))).to(q.dtype)
    release(p_ring, i, 2)
    ds = gl.convert_layout(ds, gl.DotOperandLayout(0, DK, 2))
    wait_full(memory.q, i, STAGES)
    dk = warpgroup_mma(ds, q, dk, is_async=True)
    dk, ds = warpgroup_mma_wait(0, [dk, ds])
    release(memory.q, i, STAGES)
    return dk


@gluon.jit
def _value_consumer(
    dv_ptr, parts_ptr, end_ptr, column_ptr, memory, p_ring, job,
    N, M, heads_k, scale,
    G: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    SQUARE: gl.constexpr,
):  # fmt: skip
    """dv of half of the keys, and P for the group that computes their dk."""
    HALF_K: gl.constexpr = BLOCK_K // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    key = job.key + gl.arange(0, HALF_K, gl.SliceLayout(1, SCORES))
    end = gl.load(end_ptr + key, mask=key < M, other=0)
    dv = gl.zeros([HALF_K, D], gl.float32, DK)
    n_masked, n_steps = count_masked(job, G), G * (job.end - job.begin)
    mbarrier.wait(memory.kv_full, 0)
    head, tile = job.head_k * G, first_masked(job)
    for i in range(n_masked):
        dv = _value_step(
            column_ptr, memory, p_ring, dv, key, end, i, tile * BLOCK_Q, N, scale,
            True, SQUARE, BLOCK_Q, STAGES, SCORES, DK,
        )  # fmt: skip
        head, tile = next_masked(job, head, tile)
    for i in range(n_masked, n_steps):
        dv = _value_step(
            column_ptr, memory, p_ring, dv, key, end, i, 0, N, scale,
            False, SQUARE, BLOCK_Q, STAGES, SCORES, DK,
        )  # fmt: skip
    store_keys(dv, dv_ptr, parts_ptr + BLOCK_K * heads_k * D, job, 0, M, heads_k, D, BLOCK_K, DK)


@gluon.jit
def _key_consumer(
    dk_ptr, parts_ptr, memory, p_ring, job, M, heads_k, scale,
    G: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dk of half of the keys."""
    HALF_K: gl.constexpr = BLOCK_K // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_Q, 16])
    DK: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dk = gl.zeros([HALF_K, D], gl.float32, DK)
    mbarrier.wait(memory.kv_full, 0)
    for i in range(G * (job.end - job.begin)):
        dk = _key_step(
            memory, p_ring, dk, i, BLOCK_Q, STAGES, SCORES, DK,
        )  # fmt: skip
    store_keys(dk * (scale * LN_2), dk_ptr, parts_ptr, job, 0, M, heads_k, D, BLOCK_K, DK)


@gluon.jit(do_not_specialize=["n_jobs", "N", "M", "lse_stride"])
def _wide_keys_kernel(
    q_rows, k_rows, v_rows, do_rows, lse_row, delta_row, dk_ptr, dv_ptr, parts_ptr, end_ptr, column_ptr,
    first_full, end_full, job_block, job_begin, job_end, job_part, job_order, n_jobs,
    N, M, lse_stride, heads_k, scale,
    G: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    SQUARE: gl.constexpr,
):  # fmt: skip
    """Allocates shared memory and starts two consumer groups and the producer."""
    HALF_K: gl.constexpr = BLOCK_K // 2
    jobs = Jobs(first_full, end_full, job_block, job_begin, job_end, job_part, job_order, n_jobs)
    job = job_of(jobs, gl.program_id(0), BLOCK_Q, BLOCK_K, HALF_K)
    if (job.begin < 0) | (job.key >= M):
        return
    memory = make_memory(q_rows, k_rows, v_rows, do_rows, lse_row, delta_row, STAGES)
    # The layout of P: each block of 8 x 8 values is contiguous. The 32 threads of a warp hold such a block as
    # one pair of neighbors each, so no banks conflict.
    p_layout: gl.constexpr = gl.SharedLinearLayout(
        [
            [0, 1], [0, 2], [0, 4], [1, 0], [2, 0], [4, 0],
            [8, 0], [0, 8], [0, 16], [0, 32], [16, 0], [32, 0],
        ]
    )  # fmt: skip
    p_ring = make_ring(gl.allocate_shared_memory(gl.float32, [2, HALF_K, BLOCK_Q], p_layout), 2, 1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_value_consumer, (
                dv_ptr, parts_ptr, end_ptr, column_ptr, memory, p_ring, job,
                N, M, heads_k, scale, G, BLOCK_Q, BLOCK_K, D, STAGES, SQUARE,
            )),
            (_key_consumer, (
                dk_ptr, parts_ptr, memory, p_ring, job, M, heads_k, scale, G, BLOCK_Q, BLOCK_K, D, STAGES,
            )),
            (producer, (
                q_rows, k_rows, v_rows, do_rows, lse_row, delta_row, memory, job, lse_stride,
                G, BLOCK_Q, D, STAGES,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


STAGES = 2  # stages for query tiles: as many as fit into 227 KiB


def gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, end: Tensor, column: Tensor,
    lists: BlockLists, scale: float,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns dk and dv [M, Hkv, D] in the dtypes of k and v. delta: see ``triton_kernels.row_sums``."""
    (n, heads, dim), (m, heads_k, _) = q.shape, k.shape
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    parts = q.new_empty(max_parts(n, m), 2, KEYS, heads_k, dim, dtype=torch.float32)
    n_jobs = len(lists.job_block)
    _wide_keys_kernel[(2 * n_jobs * heads_k,)](
        matrix(q, TILE, dim), matrix(k, KEYS // 2, dim), matrix(v, KEYS // 2, dim), matrix(do, TILE, dim),
        vector(lse, TILE), vector(delta, TILE), dk, dv, parts, end, column, lists.first_full, lists.end_full,
        lists.job_block, lists.job_begin, lists.job_end, lists.job_part, lists.job_order, n_jobs,
        n, m, lse.shape[1], heads_k, scale * LOG2_E.value,
        G=heads // heads_k, BLOCK_Q=TILE, BLOCK_K=KEYS, D=dim, STAGES=STAGES, SQUARE=n == m, num_warps=4,
    )  # fmt: skip
    sum_parts(parts, dk, dv, lists)
    return dk, dv
