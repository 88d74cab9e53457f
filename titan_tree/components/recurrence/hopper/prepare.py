"""What the serial passes need of each chunk, on Hopper, in Gluon: T, P, and the factors of its tokens.

The algebra is that of ``triton_kernels/forward_kernels.py``. One program computes a chunk and a value head.
Few registers matter more here than few products, because a program waits most of the time: several of them
must fit on a multiprocessor.

T = (I + A)^-1 diag(beta) comes from the inverses D of the 16 x 16 blocks on the diagonal of I + A and from
Z = D times A off these blocks: (I + A)^-1 = (I - Z) (I + Z^2) D, since Z^4 = 0. These products have operands
in float16, whose mantissa is as long as TF32's, and which may be transposed in shared memory. Entries are
small (at most 1 if beta is, else 2), because a step of the delta rule never makes a vector longer.
"""

from __future__ import annotations

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
from titan_tree.components.recurrence.hopper.tiles import QUERY, READ, WRITE, C, rows_of
from titan_tree.components.recurrence.launch import Run
from titan_tree.components.recurrence.reference import EPSILON
from titan_tree.components.rings import matrix
from titan_tree.tree.chunks import CHUNK, Chunks

BETA, LENGTH, Q_LENGTH = (
    gl.constexpr(Factors._fields.index(name)) for name in ("beta", "length", "q_length")
)
B = gl.constexpr(16)  # tokens of a block on the diagonal of A
NORM_EPSILON = gl.constexpr(EPSILON)


@gluon.jit
def _row(x, m, step: gl.constexpr, LAYOUT: gl.constexpr):
    """Row ``step`` of the block that each row of x [C, B] belongs to; m: a row's place in its block."""
    blocks = gl.reshape(gl.where(m == step, x, 0.0), [C // B, B, B])
    row = gl.expand_dims(gl.sum(blocks, 1), 1) + gl.zeros_like(blocks)
    return gl.convert_layout(gl.reshape(row, [C, B]), LAYOUT)


@gluon.jit
def inverse_of(a, i, j, SCORES: gl.constexpr, WARPS: gl.constexpr):
    """(I + a)^-1 of a strictly lower triangular a [C, C]. i, j: the numbers of its rows and columns."""
    HALF: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], gl.float16)
    off = gl.allocate_shared_memory(gl.float16, [C, C], HALF)
    square = gl.allocate_shared_memory(gl.float16, [C, C], HALF)
    diagonal = gl.allocate_shared_memory(gl.float16, [C, C], HALF)
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0, 1])
    columns = gl.allocate_shared_memory(gl.float32, [C, B], FLAT)
    # A thread has all rows of one column of one block, so each step is an update of its registers.
    BLOCKS: gl.constexpr = gl.BlockedLayout([B, 1], [2, B], [WARPS, 1], [1, 0])
    same_block = i // B == j // B
    parts = gl.reshape(gl.where(same_block, a, 0.0), [C, C // B, B])
    PARTS: gl.constexpr = parts.type.layout
    columns.store(gl.sum(parts, 1))
    off.store(gl.where(same_block, 0.0, a).to(gl.float16))
    m = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, BLOCKS)), 1) % B
    n = gl.expand_dims(gl.arange(0, B, gl.SliceLayout(0, BLOCKS)), 0)
    x = gl.where(m == n, 1.0, gl.zeros([C, B], gl.float32, BLOCKS))
    for step in gl.static_range(B - 1):
        x -= columns.slice(step, 1, 1).load(BLOCKS) * _row(x, m, step, BLOCKS)
    x = gl.convert_layout(x, gl.SliceLayout(1, PARTS))
    d = gl.expand_dims(x, 1) + gl.zeros([C, C // B, B], gl.float32, PARTS)
    d = gl.where(same_block, gl.convert_layout(gl.reshape(d, [C, C]), SCORES), 0.0)

    diagonal.store(d.to(gl.float16))
    fence_async_shared()
    none = gl.zeros([C, C], gl.float32, SCORES)
    z = warpgroup_mma(diagonal, off, none, use_acc=False, is_async=True)
    z = warpgroup_mma_wait(0, [z])
    square.store(z.to(gl.float16))
    fence_async_shared()
    zz = warpgroup_mma(square, square, none, use_acc=False, is_async=True)
    zz = warpgroup_mma_wait(0, [zz])
    off.store(zz.to(gl.float16))
    fence_async_shared()
    y = warpgroup_mma(off, diagonal, d, is_async=True)
    y = warpgroup_mma_wait(0, [y])
    off.store((-y).to(gl.float16))
    fence_async_shared()
    y = warpgroup_mma(square, off, y, is_async=True)
    return warpgroup_mma_wait(0, [y])


@gluon.jit(do_not_specialize=["plane", "first"])
def _prepare_kernel(
    q_rows, k_rows, inverse_rows, p_rows, number_ptr, start_ptr, plane, scale, first,
    GROUP: gl.constexpr, G: gl.constexpr, K: gl.constexpr, DELTA: gl.constexpr, INVERSE: gl.constexpr,
):  # fmt: skip
    """s P of one chunk and value head. INVERSE: also T, and the factors that depend on keys and queries."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, K, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    dtype: gl.constexpr = k_rows.dtype
    q = gl.allocate_shared_memory(dtype, [C, K], q_rows.layout)
    k = gl.allocate_shared_memory(dtype, [C, K], k_rows.layout)
    p_tile = gl.allocate_shared_memory(dtype, [C, C], p_rows.layout)
    item = first + gl.program_id(0)
    chunk, key_head = item // G, item % G // GROUP
    start, end = gl.load(start_ptr + chunk), gl.load(start_ptr + (chunk + 1))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, q_rows.block_type.nbytes + k_rows.block_type.nbytes)
    tma.async_copy_global_to_shared(k_rows, [start, key_head * K], full, k)
    tma.async_copy_global_to_shared(q_rows, [start, key_head * K], full, q)
    row, column = gl.arange(0, C, ROWS), gl.arange(0, C, COLUMNS)
    i, j = gl.expand_dims(row, 1), gl.expand_dims(column, 0)
    is_row = start + row < end
    is_seen = (i >= j) & gl.expand_dims(is_row, 1)
    number = number_ptr + item * C
    total = gl.load(number + row)
    totals = gl.expand_dims(gl.load(number + column), 0)
    gain = gl.where(is_seen, gl.exp2(gl.where(is_seen, gl.expand_dims(total, 1) - totals, 0.0)), 0.0)
    mbarrier.wait(full, 0)
    mbarrier.invalidate(full)
    none = gl.zeros([C, C], gl.float32, SCORES)
    if DELTA:
        kk = warpgroup_mma(k, k.permute((1, 0)), none, use_acc=False, is_async=True)
        queries = q.load(KEYS).to(gl.float32)
        q_length = gl.convert_layout(1.0 / gl.sqrt(gl.sum(queries * queries, 1) + NORM_EPSILON), ROWS)
        q_length = gl.where(is_row, q_length, 0.0)
        kk = warpgroup_mma_wait(0, [kk])
        length = 1.0 / gl.sqrt(gl.sum(gl.where(i == j, kk, 0.0), 1) + NORM_EPSILON)
        length = gl.where(is_row, length, 0.0)
        gain *= gl.expand_dims(gl.convert_layout(length, COLUMNS), 0)
    p = warpgroup_mma(q, k.permute((1, 0)), none, use_acc=False, is_async=True)
    if INVERSE:
        last = gl.load(number + (C - 1))
        beta = gl.load(number + (BETA * plane + row))
        betas = gl.expand_dims(gl.load(number + (BETA * plane + column)), 0)
        gl.store(number + (READ * plane + row), -gl.exp2(total) * length)
        gl.store(number + (WRITE * plane + row), gl.exp2(last - total) * length)
        gl.store(number + (LENGTH * plane + row), length)
        gl.store(number + (QUERY * plane + row), scale * q_length * gl.exp2(total))
        gl.store(number + (Q_LENGTH * plane + row), q_length)
        a = gl.where(i > j, kk * gain * gl.expand_dims(beta * length, 1), 0.0)
    p = warpgroup_mma_wait(0, [p]) * gain
    if DELTA:
        p *= gl.expand_dims(scale * q_length, 1)
    p_tile.store(p.to(dtype))
    if INVERSE:
        inverse_tile = gl.allocate_shared_memory(dtype, [C, C], inverse_rows.layout)
        inverse = inverse_of(a, i, j, SCORES, 4) * betas
        inverse_tile.store(inverse.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(inverse_rows, [item * C, 0], inverse_tile)
    # Last, so that the compiler keeps this tile apart from the others until the copy has read it.
    fence_async_shared()
    tma.async_copy_shared_to_global(p_rows, [item * C, 0], p_tile)
    tma.store_wait(0)


def prepare(
    q: Tensor, k: Tensor, v: Tensor, saved: Saved, chunks: Chunks, inverse: bool
) -> tuple[Tensor, Run]:
    """Returns s P [chunks, G, 64, 64] in the dtype of q, uninitialized, and a pass over chunks that fills it.

    s P is 0 past a chunk's last token. inverse: the pass also fills ``saved.inverse`` and the factors of
    queries and keys.
    """
    (heads_k, width_k), heads, delta = k.shape[1:], v.shape[1], saved.has_delta
    scores = q.new_empty(saved.num_chunks, heads, CHUNK, CHUNK)
    tiles = [matrix(q, CHUNK, width_k), matrix(k, CHUNK, width_k)]
    tiles += [rows_of(saved.inverse, CHUNK) if delta else None, rows_of(scores, CHUNK)]

    def run(first: int, end: int) -> None:
        _prepare_kernel[((end - first) * heads,)](
            *tiles, saved.numbers, chunks.start, saved.numbers.stride(0), width_k**-0.5, first * heads,
            GROUP=heads // heads_k, G=heads, K=width_k, DELTA=delta, INVERSE=inverse, num_warps=4,
        )  # fmt: skip

    return scores, run


def make_scores(q: Tensor, k: Tensor, v: Tensor, saved: Saved, chunks: Chunks) -> Tensor:
    """Returns s P of all chunks."""
    scores, run = prepare(q, k, v, saved, chunks, inverse=False)
    run(0, saved.num_chunks)
    return scores
