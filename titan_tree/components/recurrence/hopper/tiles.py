"""The tiles of a chunk in the serial passes on Hopper: their shared memory, and how they get there and back.

The letters are those of ``triton_kernels/forward_kernels.py`` and ``backward_kernels.py``.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from titan_tree.components.recurrence.buffers import Factors
from titan_tree.components.rings import Ring, matrix, wait_empty
from titan_tree.tree.chunks import CHUNK

BLOCK_V = gl.constexpr(64)  # columns of V for a program: the rows of the tensor cores' products
C = gl.constexpr(CHUNK)
READ, WRITE, QUERY = (gl.constexpr(Factors._fields.index(name)) for name in ("read", "write", "query"))


class Work(NamedTuple):
    """The work of one program: a chain, for one head and BLOCK_V columns of V."""

    chain: gl.tensor
    first: gl.tensor  # its first chunk
    count: gl.tensor  # its number of chunks
    head: gl.tensor
    column: gl.tensor


class ChainMemory(NamedTuple):
    """The shared memory of a program: stages for a chunk's tiles, in one ring, and tiles to write."""

    ring: Ring  # its stages hold k: [STAGES, C, K]
    q: gl.shared_memory_descriptor  # [STAGES, C, K]
    v: gl.shared_memory_descriptor  # [STAGES, C, BLOCK_V]; in the backward pass do
    inverse: gl.shared_memory_descriptor  # [STAGES, C, C]; None without the delta rule
    p: gl.shared_memory_descriptor  # [STAGES, C, C]
    factors: gl.shared_memory_descriptor  # [3 * STAGES, C] fp32: read, write and query of ``Factors``
    state: gl.shared_memory_descriptor  # [BLOCK_V, K]
    out: gl.shared_memory_descriptor  # o [C, BLOCK_V]; n^T or X^T [BLOCK_V, C]


@gluon.jit
def work_of(first_ptr, end_ptr, first_chain, G: gl.constexpr, V: gl.constexpr):
    V_BLOCKS: gl.constexpr = V // BLOCK_V
    index = gl.program_id(0)
    chain = first_chain + index // (G * V_BLOCKS)
    first = gl.load(first_ptr + chain)
    count = gl.load(end_ptr + chain) - first
    return Work(chain, first, count, index // V_BLOCKS % G, index % V_BLOCKS * BLOCK_V)


@gluon.jit
def producer(
    q_rows, k_rows, v_rows, inverse_rows, p_rows, number_row, plane, start_ptr, memory, work,
    GROUP: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, STAGES: gl.constexpr,
    BACKWARDS: gl.constexpr, WITH_Q: gl.constexpr, DELTA: gl.constexpr,
):  # fmt: skip
    """Fetches the tiles of each chunk, from the chain's start or BACKWARDS.

    WITH_Q: also q and P. DELTA: also T.
    """
    key_bytes: gl.constexpr = k_rows.block_type.nbytes
    tile_bytes: gl.constexpr = (
        (1 + WITH_Q) * key_bytes
        + (DELTA + WITH_Q) * (key_bytes * C // K)  # of a tile [C, C]
        + v_rows.block_type.nbytes
        + (1 + DELTA + WITH_Q) * C * 4
    )
    key_column = work.head // GROUP * K
    for i in range(work.count):
        if BACKWARDS:
            chunk = work.first + work.count - 1 - i
        else:
            chunk = work.first + i
        start = gl.load(start_ptr + chunk)
        row = (chunk * G + work.head) * C
        s = i % STAGES
        wait_empty(memory.ring, i, STAGES)
        full = memory.ring.full.index(s)
        mbarrier.expect(full, tile_bytes)
        tma.async_copy_global_to_shared(k_rows, [start, key_column], full, memory.ring.stages.index(s))
        tma.async_copy_global_to_shared(v_rows, [start, work.head * V + work.column], full, memory.v.index(s))
        if DELTA:
            tma.async_copy_global_to_shared(inverse_rows, [row, 0], full, memory.inverse.index(s))
            tma.async_copy_global_to_shared(
                number_row, [READ * plane + row], full, memory.factors.index(3 * s)
            )
        tma.async_copy_global_to_shared(
            number_row, [WRITE * plane + row], full, memory.factors.index(3 * s + 1)
        )
        if WITH_Q:
            tma.async_copy_global_to_shared(q_rows, [start, key_column], full, memory.q.index(s))
            tma.async_copy_global_to_shared(p_rows, [row, 0], full, memory.p.index(s))
            tma.async_copy_global_to_shared(
                number_row, [QUERY * plane + row], full, memory.factors.index(3 * s + 2)
            )


@gluon.jit
def decay_of(number_ptr, chunk, work, G: gl.constexpr):
    """The logarithm of the decay over a chunk, in base 2."""
    return gl.load(number_ptr + ((chunk * G + work.head) * C + C - 1))


@gluon.jit
def factor(memory, i, LAYOUT: gl.constexpr):
    """One factor per token, for tiles whose columns are tokens."""
    return gl.expand_dims(memory.factors.index(i).load(gl.SliceLayout(0, LAYOUT)), 0)


@gluon.jit
def tile_of(slot, work, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr, LAYOUT: gl.constexpr):
    """Offsets of the program's part of a state in [.., G, V, K]."""
    rows = work.column + gl.arange(0, BLOCK_V, gl.SliceLayout(1, LAYOUT))
    columns = gl.arange(0, K, gl.SliceLayout(0, LAYOUT))
    tile = gl.expand_dims(rows, 1) * K + gl.expand_dims(columns, 0)
    return (slot.to(gl.int64) * G + work.head) * (K * V) + tile


@gluon.jit
def store_tokens(ptr, tile, start_ptr, chunk, column, WIDTH: gl.constexpr, D: gl.constexpr):
    """Stores a chunk's tokens [C, D] from shared memory into a matrix [N, WIDTH], beginning at a column."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [4, 1], [1, 0])
    start, end = gl.load(start_ptr + chunk), gl.load(start_ptr + (chunk + 1))
    token = start + gl.arange(0, C, gl.SliceLayout(1, LAYOUT))
    columns = column + gl.arange(0, D, gl.SliceLayout(0, LAYOUT))
    place = gl.expand_dims(token.to(gl.int64) * WIDTH, 1) + gl.expand_dims(columns, 0)
    gl.store(ptr + place, tile.load(LAYOUT).to(ptr.dtype.element_ty), mask=gl.expand_dims(token < end, 1))


def rows_of(x: Tensor, rows: int) -> TensorDescriptor:
    """Returns a descriptor of x [.., D] in tiles of ``rows`` rows."""
    return matrix(x.view(-1, 1, x.shape[-1]), rows, x.shape[-1])
