"""The forward pass on Hopper.

The algorithm is FlashAttention-3 (Shah et al., arXiv:2407.08608). A producer warp fills rings of shared
memory by TMA. Two consumer groups of four warps hold 64 queries each. Their tensor core products are
asynchronous, so one group's softmax overlaps with the other group's products.

What the tree changes is the keys: a query block reads a list of key groups (``key_groups.py``). The mask is
one comparison of a query with ``end[k]``, which is fetched together with the keys; only steps on the diagonal
also compare k <= q. Three loops run one after the other: steps on the diagonal, other masked steps, fully
visible steps.

In the loop of a group, S of step n and P V of step n - 1 run on the tensor cores at the same time. The
softmax of S then overlaps with the rest of P V and with the other group.

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
    release,
    vector,
    wait_empty,
    wait_full,
)
from titan_tree.components.tree_attention.block_lists import KEY_GROUP as KEY_GROUP_SIZE
from titan_tree.components.tree_attention.block_lists import QUERIES, BlockLists, empty_lse
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
from titan_tree.components.tree_attention.triton_kernels.kernels import LOG2_E, MASKED

# 1. Memory.


class ForwardMemory(NamedTuple):
    """The shared memory of a program."""

    q: Ring  # stages [2, BLOCK_Q / 2, D]: one half for each group
    k: Ring  # [STAGES, BLOCK_K, D]
    v: Ring  # [STAGES, BLOCK_K, D]
    end: gl.shared_memory_descriptor  # [STAGES, BLOCK_K], filled together with k if a mask is needed
    o: gl.shared_memory_descriptor  # [2, BLOCK_Q / 2, D]: each group's half of the output


# 2. Producer.


@gluon.jit
def _producer(
    q_rows, k_groups, v_groups, k_rows, v_rows, end_row, memory, lists,
    G: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr,
):  # fmt: skip
    """Fetches, per work item, both halves of q, and k, ``end`` and v step by step."""
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
            mbarrier.expect(full, q_rows.block_type.nbytes)
            row = block * BLOCK_Q + group * HALF_Q
            tma.async_copy_global_to_shared(q_rows, [row, head * D], full, memory.q.stages.index(group))
        for i in range(n_steps):
            s = n % STAGES
            wait_empty(memory.k, n, STAGES)
            full = memory.k.full.index(s)
            if i < n_masked:
                mbarrier.expect(full, stage_bytes + BLOCK_K * 4)
                load_ends(end_row, list_ptr, full, memory.end.index(s), GROUPS)
            else:
                mbarrier.expect(full, stage_bytes)
            load_key_groups(k_groups, k_rows, head_k * D, list_ptr, full, memory.k.stages.index(s), GROUPS)
            wait_empty(memory.v, n, STAGES)
            full = memory.v.full.index(s)
            mbarrier.expect(full, stage_bytes)
            load_key_groups(v_groups, v_rows, head_k * D, list_ptr, full, memory.v.stages.index(s), GROUPS)
            list_ptr += GROUPS
            n += 1


# 3. Consumers.


@gluon.jit
def _softmax(s, peak, total, scale):
    """One step of online softmax in base 2: p, the new peak and total, and the decay of the old total."""
    new_peak = gl.maximum(peak, gl.max(s, 1) * scale)
    p = gl.exp2(s * scale - gl.expand_dims(new_peak, 1))
    decay = gl.exp2(peak - new_peak)
    return p, new_peak, total * decay + gl.sum(p, 1), decay


@gluon.jit
def _step(
    q, memory, p_before, acc, peak, total, column, list_ptr, i, n, scale,
    MASK: gl.constexpr, DIAGONAL: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr,
    SCORES: gl.constexpr, OUT: gl.constexpr,
):  # fmt: skip
    """S = q k_n^T, which overlaps with acc += p v_{n-1}; then the softmax of S. Returns p of step n."""
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    zero = gl.zeros([p_before.shape[0], BLOCK_K], gl.float32, SCORES)
    wait_full(memory.k, n, STAGES)
    k = memory.k.stages.index(n % STAGES)
    s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
    wait_full(memory.v, n - 1, STAGES)
    acc = warpgroup_mma(p_before, memory.v.stages.index((n - 1) % STAGES), acc, is_async=True)
    s = warpgroup_mma_wait(1, [s])
    if MASK:
        end = memory.end.index(n % STAGES).load(COLUMNS)
        s = gl.where(visible(column, end, list_ptr, i, DIAGONAL, BLOCK_K, COLUMNS), s, MASKED)
    release(memory.k, n, STAGES)
    p, peak, total, decay = _softmax(s, peak, total, scale)
    p = gl.convert_layout(p.to(k.dtype), gl.DotOperandLayout(0, OUT, 2))
    acc, p_before = warpgroup_mma_wait(0, [acc, p_before])
    release(memory.v, n - 1, STAGES)
    acc *= gl.expand_dims(gl.convert_layout(decay, gl.SliceLayout(1, OUT)), 1)
    return p, acc, peak, total


@gluon.jit
def _consumer(
    group: gl.constexpr, o_rows, lse_ptr, column_ptr, memory, lists, N, lse_stride, scale,
    G: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, O_IN_Q: gl.constexpr,
):  # fmt: skip
    """o and lse of half of the queries of each work item.

    The first step is on the diagonal and has no product P V to overlap with, so it runs before the loops.
    O_IN_Q: the output is staged in q's memory, because there is no room for both.
    """
    HALF_Q: gl.constexpr = BLOCK_Q // 2
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_K, 16])
    OUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    q, o = memory.q.stages.index(group), memory.o.index(group)
    n = 0
    for turn in range(count_rounds(lists.n_items)):
        block, head, _ = work_item(lists, turn, G)
        list_ptr = lists.key_groups + block.to(gl.int64) * lists.stride
        n_diagonal, n_masked, n_steps = count_steps(lists, block, BLOCK_K // KEY_GROUP)
        row = block * BLOCK_Q + group * HALF_Q
        rows = row + gl.arange(0, HALF_Q, ROWS)
        column = gl.load(column_ptr + rows, mask=rows < N, other=-1)
        peak = gl.full([HALF_Q], -float("inf"), gl.float32, ROWS)
        total = gl.zeros([HALF_Q], gl.float32, ROWS)
        acc = gl.zeros([HALF_Q, D], gl.float32, OUT)

        zero = gl.zeros([HALF_Q, BLOCK_K], gl.float32, SCORES)
        mbarrier.wait(memory.q.full.index(group), turn & 1)
        wait_full(memory.k, n, STAGES)
        k = memory.k.stages.index(n % STAGES)
        s = warpgroup_mma(q, k.permute((1, 0)), zero, use_acc=False, is_async=True)
        end = memory.end.index(n % STAGES).load(COLUMNS)
        s = warpgroup_mma_wait(0, [s])
        s = gl.where(visible(column, end, list_ptr, 0, True, BLOCK_K, COLUMNS), s, MASKED)
        release(memory.k, n, STAGES)
        p, peak, total, _ = _softmax(s, peak, total, scale)
        p = gl.convert_layout(p.to(k.dtype), gl.DotOperandLayout(0, OUT, 2))
        for i in range(1, n_diagonal):
            p, acc, peak, total = _step(
                q, memory, p, acc, peak, total, column, list_ptr, i, n + i, scale,
                True, True, BLOCK_K, STAGES, SCORES, OUT,
            )  # fmt: skip
        for i in range(n_diagonal, n_masked):
            p, acc, peak, total = _step(
                q, memory, p, acc, peak, total, column, list_ptr, i, n + i, scale,
                True, False, BLOCK_K, STAGES, SCORES, OUT,
            )  # fmt: skip
        for i in range(n_masked, n_steps):
            p, acc, peak, total = _step(
                q, memory, p, acc, peak, total, column, list_ptr, i, n + i, scale,
                False, False, BLOCK_K, STAGES, SCORES, OUT,
            )  # fmt: skip
        n += n_steps

        if not O_IN_Q:
            mbarrier.arrive(memory.q.empty.index(group), count=1)
        wait_full(memory.v, n - 1, STAGES)
        acc = warpgroup_mma(p, memory.v.stages.index((n - 1) % STAGES), acc, is_async=True)
        acc, p = warpgroup_mma_wait(0, [acc, p])
        release(memory.v, n - 1, STAGES)
        acc /= gl.expand_dims(gl.convert_layout(total, gl.SliceLayout(1, OUT)), 1)
        tma.store_wait(0)
        o.store(acc.to(o_rows.dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(o_rows, [row, head * D], o)
        if O_IN_Q:
            tma.store_wait(0)
            mbarrier.arrive(memory.q.empty.index(group), count=1)
        lse = gl.where(rows < N, peak + gl.log2(total), float("inf"))
        gl.store(lse_ptr + head.to(gl.int64) * lse_stride + rows, lse)
    tma.store_wait(0)


# 4. Launch.


@gluon.jit(do_not_specialize=["stride", "n_blocks", "n_items", "heads", "N", "lse_stride"])
def _forward_kernel(
    q_rows, k_groups, v_groups, k_rows, v_rows, o_rows, end_row, lse_ptr, column_ptr,
    key_groups, n_diagonal, n_masked, n_key_groups, query_order, stride, n_blocks, n_items, heads,
    N, lse_stride, scale,
    G: gl.constexpr, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, D: gl.constexpr,
    STAGES: gl.constexpr, O_IN_Q: gl.constexpr,
):  # fmt: skip
    """Allocates shared memory and starts two consumer groups and the producer."""
    dtype: gl.constexpr = q_rows.dtype
    q_stages = gl.allocate_shared_memory(dtype, [2, BLOCK_Q // 2, D], q_rows.layout)
    k_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, D], k_rows.layout)
    v_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_K, D], v_rows.layout)
    if O_IN_Q:
        o_stages = q_stages
    else:
        o_stages = gl.allocate_shared_memory(dtype, [2, BLOCK_Q // 2, D], o_rows.layout)
    memory = ForwardMemory(
        make_ring(q_stages, 2, 1),
        make_ring(k_stages, STAGES, 2),
        make_ring(v_stages, STAGES, 2),
        gl.allocate_shared_memory(gl.int32, [STAGES, BLOCK_K], end_row.layout),
        o_stages,
    )
    fence_async_shared()
    lists = GroupLists(
        key_groups, n_diagonal, n_masked, n_key_groups, query_order, stride, n_blocks, n_items, heads
    )
    gl.warp_specialize(
        [
            (_consumer, (
                gl.constexpr(0), o_rows, lse_ptr, column_ptr, memory, lists, N, lse_stride, scale,
                G, BLOCK_Q, BLOCK_K, D, STAGES, O_IN_Q,
            )),
            (_consumer, (
                gl.constexpr(1), o_rows, lse_ptr, column_ptr, memory, lists, N, lse_stride, scale,
                G, BLOCK_Q, BLOCK_K, D, STAGES, O_IN_Q,
            )),
            (_producer, (
                q_rows, k_groups, v_groups, k_rows, v_rows, end_row, memory, lists,
                G, BLOCK_Q, BLOCK_K, D, STAGES,
            )),
        ],
        # Warps and registers of the second and third function. The first one gets the rest, 240 registers.
        [4, 1], [240, 24],
    )  # fmt: skip


# By head dim: keys per stage, and stages per ring. As many as fit into 227 KiB together with queries and
# output.
STAGES = {64: (128, 3), 128: (128, 2), 256: (64, 2)}


def forward(
    q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, lists: BlockLists, scale: float
) -> tuple[Tensor, Tensor]:
    """See ``KernelBackend.forward``."""
    (n, heads, dim), heads_k = q.shape, k.shape[1]
    block_k, stages = STAGES[dim]
    o, lse = torch.empty_like(q), empty_lse(q)
    n_blocks = len(lists.query_order)
    n_items = n_blocks * heads
    _forward_kernel[(min(n_items, num_multiprocessors(q.device)),)](
        matrix(q, QUERIES // 2, dim), matrix(k, KEY_GROUP_SIZE, dim), matrix(v, KEY_GROUP_SIZE, dim),
        matrix(k, block_k, dim), matrix(v, block_k, dim), matrix(o, QUERIES // 2, dim),
        vector(end, KEY_GROUP_SIZE), lse, column,
        lists.key_groups, lists.n_diagonal, lists.n_masked, lists.n_key_groups, lists.query_order,
        lists.key_groups.shape[1], n_blocks, n_items, heads_together(n_blocks, heads, heads_k),
        n, lse.shape[1], scale * LOG2_E.value,
        G=heads // heads_k, BLOCK_Q=QUERIES, BLOCK_K=block_k, D=dim, STAGES=stages,
        O_IN_Q=dim == 256, num_warps=4,
    )  # fmt: skip
    return o, lse
