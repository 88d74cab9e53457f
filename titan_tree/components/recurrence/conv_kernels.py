"""Kernels of the causal convolution on trees, in Triton. ``conv.py`` explains what they compute.

A program handles one group of chunks and one block of channels. Programs of one group have adjacent ids.

The window of a token is a tuple of rows and the weight a tuple of taps. Both are ordered by distance to the
token, the token itself first, and are fp32. Row numbers are int64 because N * D may exceed 2**31; offsets
within a chunk are int32. tl.where joins a mask and a condition on a scalar: the interpreter of Triton 3.9
cannot load with `mask & condition`.

Letters: D channels, windows of W tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _load(x, row, d, mask, D: tl.constexpr):
    return tl.load(x + row * D + d, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(x, row, value, d, mask, D: tl.constexpr):
    tl.store(x + row * D + d, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _place(group, D: tl.constexpr, BLOCK: tl.constexpr, num_chunks):
    """Returns a program's number, its channels, its first chunk and the chunk after its last one."""
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    program = tl.program_id(0) // blocks
    d = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    return program.to(tl.int64), d, program * group, tl.minimum((program + 1) * group, num_chunks)


@triton.jit
def _load_taps(weight, d, mask, W: tl.constexpr):
    taps = ()
    for j in tl.static_range(W):
        taps += (tl.load(weight + d * W + (W - 1 - j), mask=mask, other=0.0).to(tl.float32),)
    return taps


@triton.jit
def _load_bias(bias, d, mask, BLOCK: tl.constexpr):
    base = tl.zeros([BLOCK], tl.float32)
    if bias is not None:
        base += tl.load(bias + d, mask=mask, other=0.0).to(tl.float32)
    return base


@triton.jit
def _load_past(token, x, tails, sources, d, mask, D: tl.constexpr, W: tl.constexpr):
    """The W - 1 rows before a token on its path, newest first."""
    past = ()
    for j in tl.static_range(1, W):
        source = tl.load(sources + token * W + (W - 1 - j)).to(tl.int64)
        row = _load(x, source, d, tl.where(source >= 0, mask, False), D)
        if tails is not None:
            row += _load(tails, -2 - source, d, tl.where(source < -1, mask, False), D)
        past += (row,)
    return past


@triton.jit
def _push(row, rows):
    return (row,) + rows  # noqa: RUF005


@triton.jit
def _convolve(taps, base, row, past, W: tl.constexpr):
    z = base + taps[0] * row
    for j in tl.static_range(1, W):
        z += taps[j] * past[j - 1]
    return z


@triton.jit(do_not_specialize=["num_chunks", "group"])
def _forward_kernel(
    x, weight, bias, tails, y, sources, start, num_chunks, group,
    D: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """y of one group of chunks, ROWS tokens at a time."""
    _, d, first_chunk, last_chunk = _place(group, D, BLOCK, num_chunks)
    mask = d < D
    taps = _load_taps(weight, d, mask, W)
    base = _load_bias(bias, d, mask, BLOCK)
    for chunk in range(first_chunk, last_chunk):
        first = tl.load(start + chunk).to(tl.int64)
        length = tl.load(start + chunk + 1) - tl.load(start + chunk)
        past = _load_past(first, x, tails, sources, d, mask, D, W)
        for begin in range(0, length, ROWS):
            rows = ()
            for i in tl.static_range(ROWS):  # issue all loads before using any, so that they overlap
                rows += (_load(x + first * D, begin + i, d, tl.where(begin + i < length, mask, False), D),)
            for i in tl.static_range(ROWS):
                z = _convolve(taps, base, rows[i], past, W)
                if SILU:
                    z *= tl.sigmoid(z)
                _store(y + first * D, begin + i, z, d, tl.where(begin + i < length, mask, False), D)
                past = _push(rows[i], past)[: W - 1]


@triton.jit(do_not_specialize=["num_chunks", "group"])
def _backward_kernel(
    dy, x, weight, bias, tails, dx, partial, first_rows, last_rows, sources, start, ahead, shared, num_chunks,
    group, D: tl.constexpr, W: tl.constexpr, SILU: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dx, and per program a partial sum of dweight and, with a bias, of its gradient.

    For a chunk that branches off, the gradients of the W - 1 rows before it go into ``first_rows``. For a
    shared chunk, the gradients of its last W - 1 tokens go into ``last_rows``, in fp32: ``_sum_kernel`` adds
    to them.
    """
    program, d, first_chunk, last_chunk = _place(group, D, BLOCK, num_chunks)
    mask = d < D
    taps = _load_taps(weight, d, mask, W)
    base = _load_bias(bias, d, mask, BLOCK)
    zero = tl.zeros([BLOCK], tl.float32)
    dtaps = (zero,) * W
    dbias = zero
    sums_of: tl.constexpr = W if bias is None else W + 1  # rows of ``partial`` per program
    for chunk in range(first_chunk, last_chunk):
        first = tl.load(start + chunk).to(tl.int64)
        length = tl.load(start + chunk + 1) - tl.load(start + chunk)
        live = length + tl.load(ahead + chunk)
        # Upper bounds on ``token`` for the stores into first_rows and into last_rows. 0: nothing is stored.
        to_first = tl.where(tl.load(sources + first * W + W - 2) != first - 1, W - 1, 0)
        to_last = tl.where(tl.load(shared + chunk) != 0, length + W - 1, 0)
        edge = tl.cast(chunk, tl.int64) * (W - 1) * D
        past = _load_past(first, x, tails, sources, d, mask, D, W)
        sums = (zero,) * (W - 1)  # the gradients of these rows, so far
        for begin in range(0, length + W - 1, ROWS):
            rows = ()
            upstream = ()
            for i in tl.static_range(ROWS):
                is_live = tl.where(begin + i < live, mask, False)
                rows += (_load(x + first * D, begin + i, d, is_live, D),)
                upstream += (_load(dy + first * D, begin + i, d, is_live, D),)
            for i in tl.static_range(ROWS):
                token = begin + i
                z = _convolve(taps, base, rows[i], past, W)
                slope = 1.0
                if SILU:
                    s = tl.sigmoid(z)
                    slope = s + z * s * (1 - s)
                dz = upstream[i] * slope
                own = tl.where(token < length, dz, 0.0)
                dbias += own
                window = _push(rows[i], past)
                old = _push(zero, sums)
                new = ()
                new_dtaps = ()
                for j in tl.static_range(W):
                    new += (old[j] + taps[j] * dz,)
                    new_dtaps += (dtaps[j] + own * window[j],)
                dtaps = new_dtaps
                past = window[: W - 1]
                sums = new[: W - 1]
                # The token W - 1 before this one is in no later window: its gradient is complete.
                done = token - (W - 1)
                is_own = (done >= 0) & (done < length)
                _store(dx + first * D, done, new[W - 1], d, tl.where(is_own, mask, False), D)
                _store(first_rows + edge, token, new[W - 1], d, tl.where(token < to_first, mask, False), D)
                is_last = (token >= length) & (token < to_last) & (done >= 0)
                _store(last_rows + edge, token - length, new[W - 1], d, tl.where(is_last, mask, False), D)
    for j in tl.static_range(W):
        _store(partial, program * sums_of + (W - 1 - j), dtaps[j], d, mask, D)
    if bias is not None:
        _store(partial, program * sums_of + W, dbias, d, mask, D)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _sum_kernel(
    dexported, first_rows, last_rows, dx, dtails, order, target, stop, place, num_tokens, num_rows,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Sums the gradients of one target.

    There is one program per entry of ``order`` and block of channels. The program of a target's first entry
    computes the sum; all other programs return at once.
    """
    blocks: tl.constexpr = (D + BLOCK - 1) // BLOCK
    entry = tl.program_id(0) // blocks
    d = tl.program_id(0) % blocks * BLOCK + tl.arange(0, BLOCK)
    mask = d < D
    end = tl.load(stop + entry)
    if end == 0:
        return
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(entry, end, ROWS):
        index = i + tl.arange(0, ROWS)
        row = tl.load(order + index, mask=index < end, other=0).to(tl.int64)[:, None]
        here = (index < end)[:, None] & mask[None, :]
        rows = _load(first_rows, row, d[None, :], here & (row < num_rows), D)
        rows += _load(dexported, row - num_rows, d[None, :], here & (row >= num_rows), D)
        total += tl.sum(rows, 0)
    to = tl.load(target + entry).to(tl.int64)
    if to < num_tokens:
        total += _load(last_rows, tl.load(place + entry).to(tl.int64), d, mask, D)
        _store(dx, to, total, d, mask, D)
    elif dtails is not None:
        _store(dtails, to - num_tokens, total, d, mask, D)
