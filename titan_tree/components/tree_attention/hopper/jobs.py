"""Code shared by the passes that keep a block of keys: jobs, the producer, and the sum of parts of dk and dv.

A job is a key block and a range of query tiles (``block_lists.py``), for all G query heads of one key head.
All queries see the trunk, so its key blocks have long ranges: these are cut into several jobs, each of which
stores fp32 parts of dk and dv. A last kernel sums the parts in a fixed order.

Key heads come one after the other, and the jobs of a key head in the order of their key blocks. Jobs that run
at the same time then mostly read the same tiles, which L2 holds. Only the last key head takes its heaviest
jobs first, so that all multiprocessors finish at about the same time.

A job visits first the tiles that need a mask, for all heads, and then the fully visible tiles, for all heads.
"""

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from titan_tree.components.rings import Ring, make_barriers, make_ring, wait_empty
from titan_tree.components.tree_attention.block_lists import JOBS, KEYS, BlockLists

# 1. Jobs.


class Job(NamedTuple):
    """A key block, and query tiles begin .. end - 1. Tiles full_begin .. full_end - 1 see all of its keys."""

    key: gl.tensor  # first row of the job's keys
    head_k: gl.tensor
    part: gl.tensor  # place of its fp32 sums among the parts of cut ranges; -1: the range is not cut
    begin: gl.tensor
    full_begin: gl.tensor
    full_end: gl.tensor
    end: gl.tensor


class Jobs(NamedTuple):
    """Tensors of ``BlockLists``, and the number of jobs."""

    first_full: gl.tensor
    end_full: gl.tensor
    block: gl.tensor
    begin: gl.tensor
    end: gl.tensor
    part: gl.tensor
    order: gl.tensor
    n_jobs: gl.tensor


class KeyPassMemory(NamedTuple):
    """The shared memory of a program."""

    k: gl.shared_memory_descriptor  # [1, BLOCK_K, D]
    v: gl.shared_memory_descriptor
    kv_full: gl.shared_memory_descriptor  # mbarrier: k and v have arrived
    q: Ring  # stages [STAGES, BLOCK_Q, D]
    do: Ring  # stages [STAGES, BLOCK_Q, D], released together with those of q
    lse: gl.shared_memory_descriptor  # [STAGES, BLOCK_Q], filled together with q
    delta: gl.shared_memory_descriptor  # [STAGES, BLOCK_Q], filled together with do


@gluon.jit
def job_of(jobs, index, BLOCK_Q: gl.constexpr, BLOCK_K: gl.constexpr, PROGRAM_K: gl.constexpr):
    """The job of program ``index``; its begin is -1 past the last job.

    PROGRAM_K: keys per program, BLOCK_K or half of it. In the latter case two programs share a job.
    """
    SPLIT: gl.constexpr = BLOCK_K // PROGRAM_K
    width = jobs.n_jobs * SPLIT
    j, head_k = index % width // SPLIT, index // width
    j = gl.where(index + width < gl.num_programs(0), j, gl.load(jobs.order + j))  # the last key head
    block, begin, end = gl.load(jobs.block + j), gl.load(jobs.begin + j), gl.load(jobs.end + j)
    full_begin = (gl.load(jobs.first_full + block) + BLOCK_Q - 1) // BLOCK_Q
    full_begin = gl.minimum(gl.maximum(full_begin, begin), end)
    full_end = gl.load(jobs.end_full + block) // BLOCK_Q
    full_end = gl.maximum(gl.minimum(full_end, end), full_begin)
    key = block * BLOCK_K + index % SPLIT * PROGRAM_K
    return Job(key, head_k, gl.load(jobs.part + j), begin, full_begin, full_end, end)


@gluon.jit
def make_memory(q_rows, k_rows, v_rows, do_rows, lse_row, delta_row, STAGES: gl.constexpr):
    """Allocates the shared memory. Rings have two readers: the consumer groups."""
    BLOCK_Q: gl.constexpr = q_rows.block_type.shape[0]
    D: gl.constexpr = q_rows.block_type.shape[1]
    PROGRAM_K: gl.constexpr = k_rows.block_type.shape[0]
    dtype: gl.constexpr = q_rows.dtype
    k = gl.allocate_shared_memory(dtype, [1, PROGRAM_K, D], k_rows.layout)
    v = gl.allocate_shared_memory(dtype, [1, PROGRAM_K, D], v_rows.layout)
    kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_full, count=1)
    q = make_ring(gl.allocate_shared_memory(dtype, [STAGES, BLOCK_Q, D], q_rows.layout), STAGES, 2)
    do_stages = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_Q, D], do_rows.layout)
    do = Ring(do_stages, make_barriers(STAGES, 1), q.empty)
    lse = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], lse_row.layout)
    delta = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_Q], delta_row.layout)
    return KeyPassMemory(k, v, kv_full, q, do, lse, delta)


@gluon.jit
def count_masked(job, G: gl.constexpr):
    """How many steps need a mask."""
    return G * (job.full_begin - job.begin + job.end - job.full_end)


@gluon.jit
def first_masked(job):
    """The first tile that needs a mask."""
    return gl.where(job.begin < job.full_begin, job.begin, job.full_end)


@gluon.jit
def next_masked(job, head, tile):
    """The head and tile of the next masked step."""
    tile += 1
    tile = gl.where(tile == job.full_begin, job.full_end, tile)
    wraps = tile == job.end
    return gl.where(wraps, head + 1, head), gl.where(wraps, first_masked(job), tile)


@gluon.jit
def next_full(job, head, tile):
    """The head and tile of the next step without a mask."""
    tile += 1
    wraps = tile == job.full_end
    return gl.where(wraps, head + 1, head), gl.where(wraps, job.full_begin, tile)


# 2. Producer.


@gluon.jit
def _load_queries(
    q_rows, do_rows, lse_row, delta_row, memory, i, head, row, lse_stride,
    D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fetches q, lse, do and delta of step i."""
    s = i % STAGES
    wait_empty(memory.q, i, STAGES)
    full = memory.q.full.index(s)
    mbarrier.expect(full, q_rows.block_type.nbytes + lse_row.block_type.nbytes)
    tma.async_copy_global_to_shared(q_rows, [row, head * D], full, memory.q.stages.index(s))
    tma.async_copy_global_to_shared(lse_row, [head * lse_stride + row], full, memory.lse.index(s))
    full = memory.do.full.index(s)
    mbarrier.expect(full, do_rows.block_type.nbytes + delta_row.block_type.nbytes)
    tma.async_copy_global_to_shared(do_rows, [row, head * D], full, memory.do.stages.index(s))
    tma.async_copy_global_to_shared(delta_row, [head * lse_stride + row], full, memory.delta.index(s))


@gluon.jit
def producer(
    q_rows, k_rows, v_rows, do_rows, lse_row, delta_row, memory, job, lse_stride,
    G: gl.constexpr, BLOCK_Q: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Fetches k and v once, then the queries of every step."""
    mbarrier.expect(memory.kv_full, 2 * k_rows.block_type.nbytes)
    tma.async_copy_global_to_shared(k_rows, [job.key, job.head_k * D], memory.kv_full, memory.k.index(0))
    tma.async_copy_global_to_shared(v_rows, [job.key, job.head_k * D], memory.kv_full, memory.v.index(0))
    n_masked, n_steps = count_masked(job, G), G * (job.end - job.begin)
    head, tile = job.head_k * G, first_masked(job)
    for i in range(n_masked):
        row = tile * BLOCK_Q
        _load_queries(q_rows, do_rows, lse_row, delta_row, memory, i, head, row, lse_stride, D, STAGES)
        head, tile = next_masked(job, head, tile)
    head, tile = job.head_k * G, job.full_begin
    for i in range(n_masked, n_steps):
        row = tile * BLOCK_Q
        _load_queries(q_rows, do_rows, lse_row, delta_row, memory, i, head, row, lse_stride, D, STAGES)
        head, tile = next_full(job, head, tile)


# 3. Parts of the consumers.


@gluon.jit
def probabilities(
    s, lse, column_ptr, key, end, row, N, scale,
    MASK: gl.constexpr, SQUARE: gl.constexpr, BLOCK_Q: gl.constexpr, SCORES: gl.constexpr,
):  # fmt: skip
    """P^T = exp2(S^T - lse), and 0 where a key is not visible.

    SQUARE: every key is a query, so that a query's key column is its row and need not be loaded.
    """
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    p = gl.exp2(s * scale - gl.expand_dims(lse, 0))
    if MASK:
        rows = row + gl.arange(0, BLOCK_Q, COLUMNS)
        if SQUARE:  # saves 16 registers
            column = gl.expand_dims(rows, 0)
        else:
            column = gl.expand_dims(gl.load(column_ptr + rows, mask=rows < N, other=-1), 0)
        p = gl.where((gl.expand_dims(key, 1) <= column) & (column < gl.expand_dims(end, 1)), p, 0.0)
    return p


@gluon.jit
def store_keys(
    x, rows_ptr, parts_ptr, job, offset, M, heads_k,
    D: gl.constexpr, BLOCK_K: gl.constexpr, DK: gl.constexpr,
):  # fmt: skip
    """Stores the gradient of keys from job.key + offset on; for a cut range, stores it as a part."""
    row = job.key + offset + gl.arange(0, x.shape[0], gl.SliceLayout(1, DK))
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, DK)), 0)
    if job.part < 0:
        place = gl.expand_dims((row.to(gl.int64) * heads_k + job.head_k) * D, 1) + d
        gl.store(rows_ptr + place, x.to(rows_ptr.dtype.element_ty), mask=gl.expand_dims(row < M, 1))
    else:
        row = job.part * 2 * BLOCK_K + row % BLOCK_K
        gl.store(parts_ptr + gl.expand_dims((row.to(gl.int64) * heads_k + job.head_k) * D, 1) + d, x)


@triton.jit(do_not_specialize=["M"])
def _sum_parts_kernel(
    parts_ptr, dk_ptr, dv_ptr, order_ptr, stop_ptr, M, heads_k,
    D: tl.constexpr, BLOCK_K: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums the parts of dk and dv of the i-th heaviest key block, if its range was cut."""
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


def sum_parts(parts: Tensor, dk: Tensor, dv: Tensor, lists: BlockLists) -> None:
    """Fills dk and dv of key blocks whose ranges were cut, from their parts [P, 2, KEYS, Hkv, D]."""
    m, heads_k, dim = dk.shape
    if len(parts):
        _sum_parts_kernel[(min(JOBS, len(lists.range_order)), heads_k, KEYS // 32)](
            parts, dk, dv, lists.range_order, lists.job_stop, m, heads_k, D=dim, BLOCK_K=KEYS, ROWS=32
        )
