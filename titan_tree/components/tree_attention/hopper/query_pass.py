"""The backward pass on Hopper that keeps a block of queries: dq, with every sum in a fixed order.

With P = exp2(S - lse), dP = dO V^T and delta = rowsum(O * dO):

    dQ = scale * (P * (dP - delta)) K

Work items and key groups are those of the forward pass. In the loop of a group, S and dP of step n overlap
with dQ += dS K of step n - 1.

Letters: N queries, M keys, H query heads, G = H / Hkv query heads per key head, D head dim.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
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
from titan_tree.components.tree_attention.block_lists import KEY_GROUP as KEY_GROUP_SIZE
from titan_tree.components.tree_attention.block_lists import QUERIES, BlockLists
from titan_tree.components.tree_attention.hopper.key_groups import (
    KEY_GROUP,
    GroupLists,
    count_rounds,
    count_steps,
    heads_together,
    load_ends,
    load_key_groups,
    visible,
    work_item,
)
from titan_tree.components.tree_attention.triton_kernels.kernels import LN_2, LOG2_E


class QueryPassMemory(NamedTuple):
    """The shared memory of a program. A group has half of q, do and dq, and its own barriers in q's ring."""

    q: Ring  # stages [1, BLOCK_Q, D], barriers [2, 1]
    do: gl.shared_memory_descriptor  # [1, BLOCK_Q, D], filled with q
    k: Ring  # stages [STAGES_K, BLOCK_K, D]
    v: Ring  # stages [STAGES_V, BLOCK_K, D]
    end: gl.shared_memory_descriptor  # [STAGES_K, BLOCK_K], filled together with k if a mask is needed
    dq: gl.shared_memory_descriptor  # [1, BLOCK_Q, D]: the output


@gluon.jit
def _half(stages, group: gl.constexpr, zero, SIZE: gl.constexpr):
    """The group's rows of the only stage. zero: 0 or ``opaque_zero``."""
    return stages.index(zero).slice(group * SIZE, SIZE, 0)


@gluon.jit
def _producer(
    q_rows, do_rows, k_groups, v_groups, k_rows, v_rows, end_row, memory, lists,
    G: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr,
    STAGES_K: gl.constexpr, STAGES_V: gl.constexpr,
):  # fmt: skip
    """Fetches, per work item, both halves of q and do, and k, ``end`` and v step by step."""
    GROUPS: gl.constexpr = BLOCK_K // KEY_GROUP
    HALF_Q: gl.constexpr = BLOCK_Q // 2
    stage_bytes: gl.constexpr = k_rows.block_type.nbytes
    n = 0
    for turn in range(count_rounds(lists.n_items)):
        block, head, head_k = work_item(lists, turn, G)
        list_ptr = lists.key_groups + block.to(gl.int64) * lists.stride
        _, n_masked, n_steps = count_steps(lists, block, GROUPS)
        for group in gl.static_range(2):
            mbarrier.wait(memory.q.empty.index(group), (turn & 1) ^ 1)
            full = memory.q.full.index(group)
            mbarrier.expect(full, 2 * q_rows.block_type.nbytes)
            row = block * BLOCK_Q + group * HALF_Q
            q, do = _half(memory.q.stages, group, 0, HALF_Q), _half(memory.do, group, 0, HALF_Q)
            tma.async_copy_global_to_shared(q_rows, [row, head * D], full, q)
            tma.async_copy_global_to_shared(do_rows, [row, head * D], full, do)
        for i in range(n_steps):
            s = n % STAGES_K
            wait_empty(memory.k, n, STAGES_K)
            full = memory.k.full.index(s)
            if i < n_masked:
                mbarrier.expect(full, stage_bytes + BLOCK_K * 4)
                load_ends(end_row, list_ptr, full, memory.end.index(s), GROUPS)
            else:
                mbarrier.expect(full, stage_bytes)
            load_key_groups(k_groups, k_rows, head_k * D, list_ptr, full, memory.k.stages.index(s), GROUPS)
            s = n % STAGES_V
            wait_empty(memory.v, n, STAGES_V)
            full = memory.v.full.index(s)
            mbarrier.expect(full, stage_bytes)
            load_key_groups(v_groups, v_rows, head_k * D, list_ptr, full, memory.v.stages.index(s), GROUPS)
            list_ptr += GROUPS
            n += 1


@gluon.jit
def _step(
    group: gl.constexpr, memory, ds_before, dq, lse, delta, column, list_ptr, i, n, scale,
    FIRST: gl.constexpr, MASK: gl.constexpr, DIAGONAL: gl.constexpr, BLOCK_K: gl.constexpr,
    STAGES_K: gl.constexpr, STAGES_V: gl.constexpr, SCORES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """dS of step n, which overlaps with dq += dS k of step n - 1. FIRST: there is no step n - 1."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    HALF_Q: gl.constexpr = dq.shape[0]
    zero = gl.zeros([HALF_Q, BLOCK_K], gl.float32, SCORES)
    zero_index = opaque_zero(n)
    q, do = _half(memory.q.stages, group, zero_index, HALF_Q), _half(memory.do, group, zero_index, HALF_Q)
    wait_full(memory.k, n, STAGES_K)
    k = memory.k.stages.index(n % STAGES_K)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    wait_full(memory.v, n, STAGES_V)
    v = memory.v.stages.index(n % STAGES_V + zero_index)
    dp = warpgroup_mma(do, v.permute((1, 0)), zero, use_acc=False, is_async=True)
    if FIRST:
        s = warpgroup_mma_wait(1, [s])
    else:
        dq = warpgroup_mma(ds_before, memory.k.stages.index((n - 1) % STAGES_K), dq, is_async=True)
        s = warpgroup_mma_wait(2, [s])
    p = gl.exp2(s * scale - gl.expand_dims(lse, 1))
    if MASK:
        end = memory.end.index(n % STAGES_K).load(COLUMNS)
        p = gl.where(visible(column, end, list_ptr, i, DIAGONAL, BLOCK_K, COLUMNS), p, 0.0)
    if FIRST:
        dp = warpgroup_mma_wait(0, [dp])
    else:
        dp = warpgroup_mma_wait(1, [dp])
    release(memory.v, n, STAGES_V)
    ds = (p * (dp - gl.expand_dims(delta, 1))).to(k.dtype)
    ds = gl.convert_layout(ds, gl.DotOperandLayout(0, OUT, 2))
    if not FIRST:
        dq, ds_before = warpgroup_mma_wait(0, [dq, ds_before])
        release(memory.k, n - 1, STAGES_K)
    return ds, dq


@gluon.jit
def _consumer(
    group: gl.constexpr, dq_rows, lse_ptr, delta_ptr, column_ptr, memory, lists, N, lse_stride, scale,
    G: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES_K: gl.constexpr,
    STAGES_V: gl.constexpr, DQ_IN_Q: gl.constexpr,
):  # fmt: skip
    """dq of half of the queries of each work item. DQ_IN_Q: dq is staged in q's memory, for lack of room."""
    HALF_Q: gl.constexpr = BLOCK_Q // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    dq_half = _half(memory.dq, group, 0, HALF_Q)
    n = 0
    for turn in range(count_rounds(lists.n_items)):
        block, head, _ = work_item(lists, turn, G)
        list_ptr = lists.key_groups + block.to(gl.int64) * lists.stride
        n_diagonal, n_masked, n_steps = count_steps(lists, block, BLOCK_K // KEY_GROUP)
        row = block * BLOCK_Q + group * HALF_Q
        rows = row + gl.arange(0, HALF_Q, gl.SliceLayout(1, SCORES))
        column = gl.load(column_ptr + rows, mask=rows < N, other=-1)
        lse = gl.load(lse_ptr + head.to(gl.int64) * lse_stride + rows)  # +inf past N
        delta = gl.load(delta_ptr + head.to(gl.int64) * lse_stride + rows)
        dq = gl.zeros([HALF_Q, D], gl.float32, OUT)
        ds = gl.zeros([HALF_Q, BLOCK_K], dq_rows.dtype, gl.DotOperandLayout(0, OUT, 2))
        mbarrier.wait(memory.q.full.index(group), turn & 1)
        ds, dq = _step(
            group, memory, ds, dq, lse, delta, column, list_ptr, 0, n, scale,
            True, True, True, BLOCK_K, STAGES_K, STAGES_V, SCORES, OUT,
        )  # fmt: skip
        for i in range(1, n_diagonal):
            ds, dq = _step(
                group, memory, ds, dq, lse, delta, column, list_ptr, i, n + i, scale,
                False, True, True, BLOCK_K, STAGES_K, STAGES_V, SCORES, OUT,
            )  # fmt: skip
        for i in range(n_diagonal, n_masked):
            ds, dq = _step(
                group, memory, ds, dq, lse, delta, column, list_ptr, i, n + i, scale,
                False, True, False, BLOCK_K, STAGES_K, STAGES_V, SCORES, OUT,
            )  # fmt: skip
        for i in range(n_masked, n_steps):
            ds, dq = _step(
                group, memory, ds, dq, lse, delta, column, list_ptr, i, n + i, scale,
                False, False, False, BLOCK_K, STAGES_K, STAGES_V, SCORES, OUT,
            )  # fmt: skip
        n += n_steps

        if not DQ_IN_Q:
            mbarrier.arrive(memory.q.empty.index(group), count=1)
        dq = warpgroup_mma(ds, memory.k.stages.index((n - 1) % STAGES_K), dq, is_async=True)
        dq, ds = warpgroup_mma_wait(0, [dq, ds])
        release(memory.k, n - 1, STAGES_K)
        tma.store_wait(0)
        dq_half.store((dq * (scale * LN_2)).to(dq_rows.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(dq_rows, [row, head * D], dq_half)
        if DQ_IN_Q:
            tma.store_wait(0)
            mbarrier.arrive(memory.q.empty.index(group), count=1)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["stride", "n_blocks", "n_items", "heads", "N", "lse_stride"])
def _queries_kernel(
    q_rows, do_rows, k_groups, v_groups, k_rows, v_rows, dq_rows, end_row, lse_ptr, delta_ptr, column_ptr,
    key_groups, n_diagonal, n_masked, n_key_groups, query_order, stride, n_blocks, n_items, heads,
    N, lse_stride, scale,
    G: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr, STAGES_K: gl.constexpr,
    STAGES_V: gl.constexpr, DQ_IN_Q: gl.constexpr,
):  # fmt: skip
    """Allocates shared memory and starts two consumer groups and the producer."""
    dtype: gl.constexpr = q_rows.dtype
    q_stages = gl.allocate_shared_memory(dtype, [1, BLOCK_Q, D], q_rows.layout)
    do_stages = gl.allocate_shared_memory(dtype, [1, BLOCK_Q, D], do_rows.layout)
    k_stages = gl.allocate_shared_memory(dtype, [STAGES_K, BLOCK_K, D], k_rows.layout)
    v_stages = gl.allocate_shared_memory(dtype, [STAGES_V, BLOCK_K, D], v_rows.layout)
    end_stages = gl.allocate_shared_memory(gl.int32, [STAGES_K, BLOCK_K], end_row.layout)
    if DQ_IN_Q:
        dq_stages = q_stages
    else:
        dq_stages = gl.allocate_shared_memory(dtype, [1, BLOCK_Q, D], dq_rows.layout)
    q_ring = make_ring(q_stages, 2, 1)  # one stage per group: its half of q. Its barriers also guard dO.
    k_ring, v_ring = make_ring(k_stages, STAGES_K, 2), make_ring(v_stages, STAGES_V, 2)
    memory = QueryPassMemory(q_ring, do_stages, k_ring, v_ring, end_stages, dq_stages)
    fence_async_shared()
    lists = GroupLists(
        key_groups, n_diagonal, n_masked, n_key_groups, query_order, stride, n_blocks, n_items, heads
    )
    gl.warp_specialize(
        [
            (_consumer, (
                gl.constexpr(0), dq_rows, lse_ptr, delta_ptr, column_ptr, memory, lists,
                N, lse_stride, scale, G, BLOCK_Q, BLOCK_K, D, STAGES_K, STAGES_V, DQ_IN_Q,
            )),
            (_consumer, (
                gl.constexpr(1), dq_rows, lse_ptr, delta_ptr, column_ptr, memory, lists,
                N, lse_stride, scale, G, BLOCK_Q, BLOCK_K, D, STAGES_K, STAGES_V, DQ_IN_Q,
            )),
            (_producer, (
                q_rows, do_rows, k_groups, v_groups, k_rows, v_rows, end_row, memory, lists,
                G, BLOCK_Q, BLOCK_K, D, STAGES_K, STAGES_V,
            )),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


class Stages(NamedTuple):
    """Keys per stage, and stages per ring."""

    keys: int
    k: int
    v: int


# By head dim: as much as fits into 240 registers per thread and 227 KiB.
STAGES = {64: Stages(128, 3, 3), 128: Stages(64, 4, 4), 256: Stages(64, 2, 1)}


def gradient(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, end: Tensor, column: Tensor,
    lists: BlockLists, scale: float,
) -> Tensor:  # fmt: skip
    """Returns dq [N, H, D] in the dtype of q. delta: see ``triton_kernels.row_sums``."""
    (n, heads, dim), heads_k = q.shape, k.shape[1]
    stages = STAGES[dim]
    dq = torch.empty_like(q)
    n_blocks = len(lists.query_order)
    n_items = n_blocks * heads
    _queries_kernel[(min(n_items, num_multiprocessors(q.device)),)](
        matrix(q, QUERIES // 2, dim), matrix(do, QUERIES // 2, dim), matrix(k, KEY_GROUP_SIZE, dim),
        matrix(v, KEY_GROUP_SIZE, dim), matrix(k, stages.keys, dim), matrix(v, stages.keys, dim),
        matrix(dq, QUERIES // 2, dim), vector(end, KEY_GROUP_SIZE), lse, delta, column,
        lists.key_groups, lists.n_diagonal, lists.n_masked, lists.n_key_groups, lists.query_order,
        lists.key_groups.shape[1], n_blocks, n_items, heads_together(n_blocks, heads, heads_k),
        n, lse.shape[1], scale * LOG2_E.value,
        G=heads // heads_k, BLOCK_Q=QUERIES, BLOCK_K=stages.keys, D=dim, STAGES_K=stages.k,
        STAGES_V=stages.v, DQ_IN_Q=dim == 256, num_warps=4,
    )  # fmt: skip
    return dq
