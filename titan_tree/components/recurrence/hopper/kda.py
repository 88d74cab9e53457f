"""The costliest kernels of Kimi Delta Attention on Hopper, in Gluon.

``triton_kernels/kda_forward.py`` and ``kda_backward.py`` explain the algebra and its levels, and have the
other kernels. Levels cost most: each has factors of its own for all tokens and channels. A thread has many
tokens of two channels. So most of the tokens m, from which decays are measured, are in its own registers.

``_prepare_kernel`` computes ``Prepared``, and T. ``_input_kernel`` computes the gradients of q, k and g.
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

from titan_tree.components.recurrence.buffers import Saved
from titan_tree.components.recurrence.hopper.prepare import NORM_EPSILON, inverse_of
from titan_tree.components.recurrence.hopper.tiles import C, rows_of
from titan_tree.components.recurrence.triton_kernels.backward_kernels import head_gradient, sum_heads
from titan_tree.components.recurrence.triton_kernels.forward_kernels import (
    LOG2_E,
    SMALLEST_BETA,
    SMALLEST_GATE,
)
from titan_tree.components.recurrence.triton_kernels.kda_backward import pair_gradients
from titan_tree.components.recurrence.triton_kernels.kda_forward import Prepared, empty_prepared
from titan_tree.components.rings import matrix
from titan_tree.tree.chunks import CHUNK, Chunks

LEVELS = gl.constexpr(CHUNK.bit_length() - 1)
BLOCK_K = gl.constexpr(64)  # channels of a program of ``_input_kernel``
WARPS = gl.constexpr(8)  # of such a program


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def _row(x, row: gl.constexpr, ROWS: gl.constexpr):
    """One row of each of the blocks [.., ROWS, K] of x [C, K], as [.., K]; exact for any number."""
    # A sum of integers with zeros costs nothing where a thread has all of the rows.
    parts = gl.reshape(x.to(gl.int32, bitcast=True), [C // ROWS, ROWS, x.shape[1]])
    place = gl.arange(0, ROWS, gl.SliceLayout(0, gl.SliceLayout(2, parts.type.layout)))
    chosen = gl.expand_dims(gl.expand_dims(place == row, 0), 2)
    return gl.sum(gl.where(chosen, parts, 0), 1).to(gl.float32, bitcast=True)


@gluon.jit
def _level_decay(total, level: gl.constexpr):
    """2 ** -|G - G_m| of each token; m is the token in the middle of its block at this level."""
    SIZE: gl.constexpr = 2 << level
    parts = gl.reshape(total, [C // SIZE, SIZE, total.shape[1]])
    middle = gl.expand_dims(_row(total, SIZE // 2, SIZE), 1)
    decay = gl.exp2(gl.abs(parts - middle) * -1.0)
    return gl.reshape(decay, [C, total.shape[1]])


@gluon.jit
def _decayed(x, decay, is_kept, level: gl.constexpr, K: gl.constexpr):
    """x * decay where ``is_kept``, else 0."""
    if 2 << level <= K // 8:  # the compiler knows which of a thread's tokens are kept
        y = gl.where(is_kept, x * decay, 0.0)
    else:
        y = x * gl.where(is_kept, decay, 0.0)
    return y


@gluon.jit
def _store_tokens(
    ptr, tile, size, G: gl.constexpr, K: gl.constexpr, D: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Stores the first ``size`` tokens of a tile [C, D]. ptr: to the first one, in a tensor [N, G, K]."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // D, D // 8], [WARPS, 1], [1, 0])
    t = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, LAYOUT)), 1)
    d = gl.expand_dims(gl.arange(0, D, gl.SliceLayout(0, LAYOUT)), 0)
    gl.store(ptr + (t * (G * K) + d), tile.load(LAYOUT), mask=t < size)


@gluon.jit
def _prepare_kernel(
    q_rows, k_rows, g_rows, inverse_rows, p_rows, beta_ptr, total_ptr, query_ptr, read_ptr, write_ptr,
    keep_ptr, q_length_ptr, length_ptr, start_ptr, scale,
    GROUP: gl.constexpr, G: gl.constexpr, K: gl.constexpr, INVERSE: gl.constexpr,
):  # fmt: skip
    """``Prepared`` of one chunk and head. INVERSE: T in place of ``total`` and the lengths."""
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, C // 2, 16])
    CHANNELS: gl.constexpr = gl.BlockedLayout([K // 8, 2], [1, 32], [512 // K, K // 64], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, SCORES)
    COLUMNS: gl.constexpr = gl.SliceLayout(0, SCORES)
    TOKENS: gl.constexpr = gl.SliceLayout(1, CHANNELS)
    VECTORS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // K, K // 8], [8, 1], [1, 0])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    dtype: gl.constexpr = k_rows.dtype
    numbers = gl.allocate_shared_memory(gl.float32, [3, C], FLAT)  # 1 / |k|, 1 / |q|, and q.k of each token
    q_tile = gl.allocate_shared_memory(dtype, [C, K], q_rows.layout)
    k_tile = gl.allocate_shared_memory(dtype, [C, K], k_rows.layout)
    total_tile = gl.allocate_shared_memory(gl.float32, [C, K], g_rows.layout)
    item = gl.program_id(0)
    chunk, head = item // G, item % G
    start, end = gl.load(start_ptr + chunk), gl.load(start_ptr + (chunk + 1))
    full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(full, count=1)
    fence_async_shared()
    mbarrier.expect(full, q_rows.block_type.nbytes + k_rows.block_type.nbytes + g_rows.block_type.nbytes)
    tma.async_copy_global_to_shared(g_rows, [start, head * K], full, total_tile)
    tma.async_copy_global_to_shared(k_rows, [start, head // GROUP * K], full, k_tile)
    tma.async_copy_global_to_shared(q_rows, [start, head // GROUP * K], full, q_tile)
    t, d = gl.arange(0, C, TOKENS), gl.arange(0, K, gl.SliceLayout(0, CHANNELS))
    row, column = gl.arange(0, C, ROWS), gl.arange(0, C, COLUMNS)
    i, j = gl.expand_dims(row, 1), gl.expand_dims(column, 0)
    is_token = gl.expand_dims(start + t < end, 1)
    token = start.to(gl.int64) * G + head
    mbarrier.wait(full, 0)
    mbarrier.invalidate(full)
    if end - start < C:  # the tiles also contain other chunks' tokens
        q_tile.store(gl.where(is_token, q_tile.load(CHANNELS), 0.0).to(dtype))
        k_tile.store(gl.where(is_token, k_tile.load(CHANNELS), 0.0).to(dtype))
    queries, keys = q_tile.load(VECTORS).to(gl.float32), k_tile.load(VECTORS).to(gl.float32)
    numbers.index(0).store(1.0 / gl.sqrt(gl.sum(keys * keys, 1) + NORM_EPSILON))
    numbers.index(1).store(1.0 / gl.sqrt(gl.sum(queries * queries, 1) + NORM_EPSILON))
    numbers.index(2).store(gl.sum(queries * keys, 1))
    gates = total_tile.load(CHANNELS) * LOG2_E
    gates = gl.where(is_token, gl.where(gates < SMALLEST_GATE, SMALLEST_GATE, gates), 0.0)
    total = gl.associative_scan(gates, 0, _add)
    if not INVERSE:
        total_tile.store(total)
        _store_tokens(total_ptr + token * K, total_tile, end - start, G, K, K, 8)
        gl.store(length_ptr + (item * C + row), numbers.index(0).load(ROWS))
        gl.store(q_length_ptr + (item * C + row), numbers.index(1).load(ROWS))
    # Tokens past the end do not decay.
    last = gl.convert_layout(gl.reshape(_row(total, C - 1, C), [K]), gl.SliceLayout(0, CHANNELS))
    gl.store(keep_ptr + (item * K + d), gl.exp2(last))
    query = gl.allocate_shared_memory(dtype, [C, K], q_rows.layout)
    read = gl.allocate_shared_memory(dtype, [C, K], k_rows.layout)
    write = gl.allocate_shared_memory(dtype, [C, K], k_rows.layout)
    gain = gl.exp2(total)
    queries = q_tile.load(CHANNELS).to(gl.float32) * gl.expand_dims(numbers.index(1).load(TOKENS) * scale, 1)
    query.store((queries * gain).to(dtype))
    keys = k_tile.load(CHANNELS).to(gl.float32) * gl.expand_dims(numbers.index(0).load(TOKENS), 1)
    read.store((gain * keys * -1.0).to(dtype))
    write.store((gl.exp2(gl.expand_dims(last, 0) - total) * keys).to(dtype))
    _store_tokens(query_ptr + token * K, query, end - start, G, K, K, 8)
    _store_tokens(read_ptr + token * K, read, end - start, G, K, K, 8)
    _store_tokens(write_ptr + token * K, write, end - start, G, K, K, 8)

    # At each level, queries and keys in right halves are multiplied by keys in left halves. What this adds to
    # pairs of different blocks, which meet at higher levels, is removed before the next level.
    TRANSPOSED: gl.constexpr = gl.NVMMASharedLayout.get_default_for([K, C], dtype)
    query = gl.allocate_shared_memory(dtype, [K, C], TRANSPOSED)
    left = gl.allocate_shared_memory(dtype, [K, C], TRANSPOSED)
    right = gl.allocate_shared_memory(dtype, [K, C], TRANSPOSED)
    none = gl.zeros([C, C], gl.float32, SCORES)
    p, kk = none, none
    for level in gl.static_range(LEVELS):
        if level > 0:
            # Before the barriers of ``_level_decay``: the compiler adds no other one before the next stores.
            p, kk = warpgroup_mma_wait(0, [p, kk])
            is_done = (i ^ j) < 1 << level
            p, kk = gl.where(is_done, p, 0.0), gl.where(is_done, kk, 0.0)
        decay = gl.convert_layout(_level_decay(total, level), CHANNELS)
        is_right = gl.expand_dims((t >> level) & 1 == 1, 1)
        queries, keys = q_tile.load(CHANNELS).to(gl.float32), k_tile.load(CHANNELS).to(gl.float32)
        query.permute((1, 0)).store(_decayed(queries, decay, is_right, level, K).to(dtype))
        left.permute((1, 0)).store(_decayed(keys, decay, is_right ^ True, level, K).to(dtype))
        if INVERSE:
            right.permute((1, 0)).store(_decayed(keys, decay, is_right, level, K).to(dtype))
        fence_async_shared()
        p = warpgroup_mma(query.permute((1, 0)), left, p, use_acc=level > 0, is_async=True)
        if INVERSE:
            kk = warpgroup_mma(right.permute((1, 0)), left, kk, use_acc=level > 0, is_async=True)
    p, kk = warpgroup_mma_wait(0, [p, kk])
    lengths = gl.expand_dims(numbers.index(0).load(COLUMNS), 0)
    p = gl.where(i == j, gl.expand_dims(numbers.index(2).load(ROWS), 1), p)
    p *= gl.expand_dims(numbers.index(1).load(ROWS) * scale, 1) * lengths
    p_tile = gl.allocate_shared_memory(dtype, [C, C], p_rows.layout)
    p_tile.store(p.to(dtype))
    if INVERSE:
        is_row, is_column = start + row < end, start + column < end
        beta = gl.load(beta_ptr + token + row * G, mask=is_row, other=0.0).to(gl.float32)
        betas = gl.load(beta_ptr + token + column * G, mask=is_column, other=0.0).to(gl.float32)
        beta = gl.where(is_row & (beta == 0.0), SMALLEST_BETA, beta)
        betas = gl.where(is_column & (betas == 0.0), SMALLEST_BETA, betas)
        a = kk * gl.expand_dims(beta * numbers.index(0).load(ROWS), 1) * lengths
        inverse_tile = gl.allocate_shared_memory(dtype, [C, C], inverse_rows.layout)
        inverse = inverse_of(a, i, j, SCORES, 8) * gl.expand_dims(betas, 0)
        inverse_tile.store(inverse.to(dtype))
        fence_async_shared()
        tma.async_copy_shared_to_global(inverse_rows, [item * C, 0], inverse_tile)
    # Last, so that the compiler keeps this tile apart from the others until the copy has read it.
    fence_async_shared()
    tma.async_copy_shared_to_global(p_rows, [item * C, 0], p_tile)
    tma.store_wait(0)


@gluon.jit
def _store_pairs_of_level(tile, source, level: gl.constexpr):
    """Stores the pairs of ``source`` [C, C] that meet at this level into ``tile``, and 0 for all others."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [WARPS, 1], [1, 0])
    WORDS: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C // 2], gl.int32)
    i = gl.expand_dims(gl.arange(0, C, gl.SliceLayout(1, LAYOUT)), 1)
    j = gl.expand_dims(gl.arange(0, C // 2, gl.SliceLayout(0, LAYOUT)), 0) * 2  # of a word's first number
    words = source._reinterpret(gl.int32, [C, C // 2], WORDS).load(LAYOUT)
    if level == 0:
        words = gl.where((i ^ j) >> 1 == 0, words & gl.where(i & 1 == 1, 0xFFFF, -0x10000), 0)
    else:
        words = gl.where((i ^ j) >> level == 1, words, 0)
    tile._reinterpret(gl.int32, [C, C // 2], WORDS).store(words.to(gl.int32))


@gluon.jit
def _add_level(q_tile, k_tile, total_tile, dp, da, dq, dk, dtotal, level: gl.constexpr):
    """dq, dk and dtotal, with what passes through the pairs that meet at this level."""
    TILE: gl.constexpr = dq.type.layout
    dtype: gl.constexpr = q_tile.dtype
    MEMORY: gl.constexpr = gl.NVMMASharedLayout.get_default_for([C, C], dtype)
    p_pairs = gl.allocate_shared_memory(dtype, [C, C], MEMORY)
    a_pairs = gl.allocate_shared_memory(dtype, [C, C], MEMORY)
    mixed = gl.allocate_shared_memory(dtype, [BLOCK_K, C], MEMORY)
    key = gl.allocate_shared_memory(dtype, [BLOCK_K, C], MEMORY)
    _store_pairs_of_level(p_pairs, dp, level)
    _store_pairs_of_level(a_pairs, da, level)
    total = total_tile.permute((1, 0)).load(TILE)
    decay = gl.permute(_level_decay(gl.permute(total, (1, 0)), level), (1, 0))
    decay = gl.convert_layout(decay, TILE)
    is_row = gl.expand_dims((gl.arange(0, C, gl.SliceLayout(0, TILE)) >> level) & 1 == 1, 0)
    q, k = q_tile.permute((1, 0)).load(TILE), k_tile.permute((1, 0)).load(TILE)
    mixed.store((gl.where(is_row, q, k).to(gl.float32) * decay).to(dtype))
    key.store((k.to(gl.float32) * decay).to(dtype))
    fence_async_shared()
    # One product at a time: both results do not fit into the registers.
    none = gl.zeros([BLOCK_K, C], gl.float32, TILE)
    from_p = warpgroup_mma(mixed, p_pairs, none, use_acc=False, is_async=True)
    from_p, dq, dk, dtotal = warpgroup_mma_wait(0, [from_p, dq, dk, dtotal])
    by_p = mixed.load(TILE).to(gl.float32) * from_p
    dtotal = gl.where(is_row, dtotal + by_p, dtotal - by_p)
    dq = gl.where(is_row, dq + decay * from_p, dq)
    dk = gl.where(is_row, dk, dk + decay * from_p)
    from_a = warpgroup_mma(key, a_pairs, none, use_acc=False, is_async=True)
    from_a, dq, dk, dtotal = warpgroup_mma_wait(0, [from_a, dq, dk, dtotal])
    by_a = key.load(TILE).to(gl.float32) * from_a
    dtotal = gl.where(is_row, dtotal + by_a, dtotal - by_a)
    return dq, dk + decay * from_a, dtotal


@gluon.jit
def _input_kernel(
    q_rows, k_rows, do_rows, state_rows, dstate_rows, new_rows, x_rows, total_rows, dp_rows, da_rows,
    total_ptr, dp_ptr, q_dq_ptr, k_dk_ptr, q_length_ptr, length_ptr, dq_ptr, dk_ptr, dg_ptr, start_ptr, scale,
    GROUP: gl.constexpr, G: gl.constexpr, K: gl.constexpr, V: gl.constexpr,
):  # fmt: skip
    """dq, dk and dg of one chunk, head and block of channels. Tokens are the columns of all tiles."""
    TILE: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS // 2, 2], [16, C // 2, 16])
    CHANNELS: gl.constexpr = gl.SliceLayout(1, TILE)
    TOKENS: gl.constexpr = gl.SliceLayout(0, TILE)
    SUMS: gl.constexpr = gl.BlockedLayout([C // 4, 1], [1, 32], [4, BLOCK_K // 32], [1, 0])
    dtype: gl.constexpr = k_rows.dtype
    q_tile = gl.allocate_shared_memory(dtype, [C, BLOCK_K], q_rows.layout)
    k_tile = gl.allocate_shared_memory(dtype, [C, BLOCK_K], k_rows.layout)
    total_tile = gl.allocate_shared_memory(gl.float32, [C, BLOCK_K], total_rows.layout)
    do = gl.allocate_shared_memory(dtype, [C, V], do_rows.layout)
    x = gl.allocate_shared_memory(dtype, [V, C], x_rows.layout)
    state = gl.allocate_shared_memory(dtype, [V, BLOCK_K], state_rows.layout)
    dstate = gl.allocate_shared_memory(dtype, [V, BLOCK_K], dstate_rows.layout)
    dp = gl.allocate_shared_memory(dtype, [C, C], dp_rows.layout)
    da = gl.allocate_shared_memory(dtype, [C, C], da_rows.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(full.index(0), count=1)
    mbarrier.init(full.index(1), count=1)
    fence_async_shared()
    # The blocks of a chunk and head are neighbors, so that the tiles that all of them read stay in the cache.
    item, column = gl.program_id(0) // (K // BLOCK_K), gl.program_id(0) % (K // BLOCK_K) * BLOCK_K
    chunk, head = item // G, item % G
    start, end = gl.load(start_ptr + chunk), gl.load(start_ptr + (chunk + 1))
    token = start.to(gl.int64) * G + head
    first = full.index(0)
    mbarrier.expect(
        first,
        q_rows.block_type.nbytes + k_rows.block_type.nbytes + total_rows.block_type.nbytes
        + do_rows.block_type.nbytes + x_rows.block_type.nbytes + state_rows.block_type.nbytes
        + dstate_rows.block_type.nbytes + dp_rows.block_type.nbytes + da_rows.block_type.nbytes,
    )  # fmt: skip
    tma.async_copy_global_to_shared(do_rows, [start, head * V], first, do)
    tma.async_copy_global_to_shared(state_rows, [item * V, column], first, state)
    tma.async_copy_global_to_shared(x_rows, [item * V, 0], first, x)
    tma.async_copy_global_to_shared(total_rows, [start, head * K + column], first, total_tile)
    tma.async_copy_global_to_shared(q_rows, [start, head // GROUP * K + column], first, q_tile)
    tma.async_copy_global_to_shared(k_rows, [start, head // GROUP * K + column], first, k_tile)
    tma.async_copy_global_to_shared(dstate_rows, [item * V, column], first, dstate)
    tma.async_copy_global_to_shared(dp_rows, [item * C, 0], first, dp)
    tma.async_copy_global_to_shared(da_rows, [item * C, 0], first, da)
    t, d = gl.arange(0, C, TOKENS), gl.arange(0, BLOCK_K, CHANNELS)
    is_token = gl.expand_dims(start + t < end, 0)
    mbarrier.wait(first, 0)
    mbarrier.invalidate(first)
    if end - start < C:  # the tiles also contain other chunks' tokens
        for tile in gl.static_range(3):
            memory = (q_tile, k_tile, total_tile)[tile].permute((1, 0))
            memory.store(gl.where(is_token, memory.load(TILE), 0.0).to(memory.dtype))

    # Through the chunk's first state, and through its last one.
    none = gl.zeros([BLOCK_K, C], gl.float32, TILE)
    dq = warpgroup_mma(state.permute((1, 0)), do.permute((1, 0)), none, use_acc=False, is_async=True)
    dk = warpgroup_mma(state.permute((1, 0)), x, none, use_acc=False, is_async=True)
    square = gl.zeros([BLOCK_K, BLOCK_K], gl.float32, TILE)
    product = warpgroup_mma(state.permute((1, 0)), dstate, square, use_acc=False, is_async=True)
    dq, dk, product = warpgroup_mma_wait(0, [dq, dk, product])
    new = gl.allocate_shared_memory(dtype, [V, C], new_rows.layout)
    mbarrier.expect(full.index(1), new_rows.block_type.nbytes)
    tma.async_copy_global_to_shared(new_rows, [item * V, 0], full.index(1), new)
    is_diagonal = gl.expand_dims(d, 1) == gl.expand_dims(gl.arange(0, BLOCK_K, TOKENS), 0)
    last = gl.load(total_ptr + (token + (end - start - 1) * G) * K + column + d)
    dlast = gl.sum(gl.where(is_diagonal, product, 0.0), 1) * gl.exp2(last)
    total = total_tile.permute((1, 0)).load(TILE)
    gain = gl.exp2(total)
    length = gl.expand_dims(gl.load(length_ptr + item * C + t), 0)
    q_length = gl.expand_dims(gl.load(q_length_ptr + item * C + t), 0) * scale
    dq *= gain * q_length
    dk *= gain * length * -1.0
    q = q_tile.permute((1, 0)).load(TILE).to(gl.float32)
    k = k_tile.permute((1, 0)).load(TILE).to(gl.float32)
    dtotal = q * dq + k * dk
    mbarrier.wait(full.index(1), 0)
    mbarrier.invalidate(full.index(1))
    written = warpgroup_mma(dstate.permute((1, 0)), new, none, use_acc=False, is_async=True)
    written = warpgroup_mma_wait(0, [written])
    written *= gl.where(is_token, gl.exp2(gl.expand_dims(last, 1) - total), 0.0) * length
    dk += written
    written *= k
    dtotal -= written
    dlast += gl.sum(written, 1)

    # Through P and A.
    dp_self = gl.expand_dims(gl.load(dp_ptr + item.to(gl.int64) * (C * C) + t * (C + 1)).to(gl.float32), 0)
    dq += dp_self * k
    dk += dp_self * q
    for level in gl.static_range(LEVELS):
        # Always true. Without blocks of their own, the compiler mixes levels and spills most of the sums.
        if end > start:
            dq, dk, dtotal = _add_level(q_tile, k_tile, total_tile, dp, da, dq, dk, dtotal, level)

    q_dq = gl.expand_dims(gl.load(q_dq_ptr + item * C + t), 0)
    k_dk = gl.expand_dims(gl.load(k_dk_ptr + item * C + t), 0)
    q_length = gl.expand_dims(gl.load(q_length_ptr + item * C + t), 0)
    length = gl.expand_dims(gl.load(length_ptr + item * C + t), 0)
    total_tile.permute((1, 0)).store(gl.where(is_token, dtotal, 0.0))
    dq -= q_tile.permute((1, 0)).load(TILE).to(gl.float32) * (q_dq * q_length * q_length)
    q_tile.permute((1, 0)).store(dq.to(dtype))
    dk -= k_tile.permute((1, 0)).load(TILE).to(gl.float32) * (k_dk * length * length)
    k_tile.permute((1, 0)).store(dk.to(dtype))
    place = token * K + column
    _store_tokens(dq_ptr + place, q_tile, end - start, G, K, BLOCK_K, WARPS)
    _store_tokens(dk_ptr + place, k_tile, end - start, G, K, BLOCK_K, WARPS)
    # Sums from the end. A reverse scan would shuffle all numbers.
    dtotal = total_tile.load(SUMS)
    dlast = gl.convert_layout(dlast, gl.SliceLayout(0, SUMS)) + gl.sum(dtotal, 0)
    dg = gl.expand_dims(dlast, 0) - (gl.associative_scan(dtotal, 0, _add) - dtotal)
    t, d = gl.arange(0, C, gl.SliceLayout(1, SUMS)), gl.arange(0, BLOCK_K, gl.SliceLayout(0, SUMS))
    tile = gl.expand_dims(t, 1) * (G * K) + gl.expand_dims(d, 0)
    gl.store(dg_ptr + place + tile, dg, mask=gl.expand_dims(start + t < end, 1))


def prepare(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, chunks: Chunks, inverse: Tensor | None = None
) -> Prepared:
    """See ``kda_forward.prepare``. With ``inverse``, ``total`` is empty, and the lengths are not filled."""
    q, k, g, beta = (x.contiguous() for x in (q, k, g, beta))
    prepared, (_, heads, width_k) = empty_prepared(q, g, beta, chunks, with_total=inverse is None), g.shape
    tiles = [matrix(x, CHUNK, width_k) for x in (q, k, g.float())]
    tiles += [None if inverse is None else rows_of(inverse, CHUNK), rows_of(prepared.scores, CHUNK)]
    _prepare_kernel[(len(prepared.scores) * heads,)](
        *tiles, beta, *prepared[:7], chunks.start, width_k**-0.5, GROUP=heads // q.shape[1], G=heads,
        K=width_k, INVERSE=inverse is not None, num_warps=8, maxnreg=128,
    )  # fmt: skip
    return prepared


def input_gradients(
    prepared: Prepared, q: Tensor, k: Tensor, v: Tensor, do: Tensor, state: Tensor, dstate: Tensor,
    new: Tensor, x: Tensor, gradients: tuple[Tensor, ...], saved: Saved, chunks: Chunks,
) -> None:  # fmt: skip
    """Fills the gradients dq, dk, dv, dg and dbeta."""
    dq, dk, dv, dg, dbeta = gradients
    (_, heads_k, width_k), (_, heads, width) = q.shape, v.shape
    q_part, k_part = head_gradient(dq, v), head_gradient(dk, v)
    dp, da, q_dq, k_dk = pair_gradients(prepared, v, do, state, new, x, dv, dbeta, saved, chunks)
    block = BLOCK_K.value
    tiles = [matrix(q, CHUNK, block), matrix(k, CHUNK, block), matrix(do, CHUNK, width)]
    tiles += [matrix(y.view(-1, 1, width_k), width, block) for y in (state, dstate)]
    tiles += [rows_of(y, width) for y in (new, x)]
    tiles += [matrix(prepared.total, CHUNK, block), rows_of(dp, CHUNK), rows_of(da, CHUNK)]
    _input_kernel[(len(state) * heads * (width_k // block),)](
        *tiles, prepared.total, dp, q_dq, k_dk, prepared.q_length, prepared.length, q_part, k_part, dg,
        chunks.start, width_k**-0.5, GROUP=heads // heads_k, G=heads, K=width_k, V=width,
        num_warps=WARPS.value, maxnreg=128,
    )  # fmt: skip
    sum_heads(q_part, dq)
    sum_heads(k_part, dk)
