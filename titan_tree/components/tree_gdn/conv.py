"""tree_causal_conv1d in Triton, forward and backward, as an operator; elsewhere in plain torch.

A chunk (``data/chunks``) is a run of tokens, each the next one of the same path. A program walks along it
and keeps the last W - 1 rows in registers: a row is read once, however wide the window, and only the W - 1
before a chunk are looked up. The backward walks the same way, and past the chunk's end by up to W - 1 tokens
that go on from it: a token's dx is complete W - 1 tokens later. What goes from chunks that branch off to the
tokens before them is written down and summed by a second kernel, in a fixed order.

HBM traffic per token and channel, of b bytes each (bf16: 2): forward 2b (x, y), backward 3b (x, dy, dx) and
up to 0.5 of partial sums of dweight (W = 4). The W - 1 rows on either side of a chunk's edge are read twice,
mostly from L2. For a chunk that branches off, W - 1 rows are written and read in fp32, and as many of the
tokens before it.

N tokens, D channels, windows of W tokens, C chunks, R gateway rows, S exported tokens, E = (C + S) (W - 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from titan_tree.components.tree_gdn.reference import conv_sources
from titan_tree.errors import UserError
from titan_tree.tree.layout import TreeLayout

BLOCK = 256  # channels of a program, 4 per thread
WARPS = 2
TOKENS = 64  # that a program has at least, on average: it reads the weight and writes a sum of dweight
NOBODY = 2**31 - 1  # the target of what was not there to be read; sorted, it comes last


class ConvPlan(NamedTuple):
    """What the kernels read of a layout. A target is a token 0 .. N - 1 or, N and up, a row of the tails."""

    sources: Tensor  # [N, W] int32, see ``conv_sources``
    exported: Tensor  # [S, W - 1] int32: the same of the exported tails
    start: Tensor  # [C + 1] int32: chunk c holds tokens start[c] .. start[c + 1] - 1
    ahead: Tensor  # [C] int32: tokens after a chunk, W - 1 at most, that go on from its last one
    shared: Tensor  # [C] bool: its last tokens are also in windows of chunks that branch off, or exported
    # Gradients that leave a chunk, of the W - 1 rows before it, oldest first, then those of exported tails,
    # sorted by target.
    order: Tensor  # [E] int32, into the rows of both
    target: Tensor  # [E] int32
    stop: Tensor  # [E] int32: at the first of a target the end of its range, else 0
    place: Tensor  # [E] int32: of a target that is a token its row among the last W - 1 of all chunks


def prepare(layout: TreeLayout, width: int) -> ConvPlan:
    """The plan for windows of ``width`` tokens: once per batch, for all layers; on the layout's device."""
    assert layout.predecessor is not None
    assert layout.chunks is not None
    n, size = len(layout.predecessor), width - 1
    start, chunks = layout.chunks.start.long(), len(layout.chunks.before)
    first, end = start[:-1], start[1:]
    sources = conv_sources(layout.predecessor, width)
    exports = layout.state_exports
    exported = sources[:0, 1:] if exports is None else sources.index_select(0, exports)[:, 1:]

    ahead = torch.zeros_like(first)
    for i in range(size):
        token = end + i
        ahead += (token < n) & (sources[:, size - 1 - i].take(token.clamp(max=n - 1)) == end - 1)

    # A chunk that goes on from the token before it has written its share of that one's gradient there.
    before = sources.index_select(0, first)[:, :size]
    goes_on = layout.predecessor.index_select(0, first) == first - 1
    leaving = torch.cat([before.masked_fill(goes_on[:, None], -1), exported]).flatten()
    target, order = _targets(leaving, n, NOBODY).sort(stable=True)
    is_first = (target.diff(prepend=target.new_full((1,), -1)) > 0) & (target < NOBODY)
    stop = torch.searchsorted(target, target, right=True).where(is_first, 0)
    # All of them are among the last W - 1 tokens of a chunk: where others branch off or export, chunks end.
    chunk = torch.searchsorted(end, target, right=True).clamp(max=chunks - 1)
    place = chunk * size + target - (end[chunk] - size)
    shared = torch.searchsorted(target, first) < torch.searchsorted(target, end)
    columns = sources, exported, start, ahead, shared, order, target, stop, place
    return ConvPlan(*(x if x.dtype == torch.bool else x.int() for x in columns))


def tree_causal_conv1d(
    x: Tensor, weight: Tensor, layout: TreeLayout, tails: Tensor | None = None, plan: ConvPlan | None = None
) -> tuple[Tensor, Tensor | None]:
    """silu(sum_j weight[:, W - 1 - j] x[j-th token before on the path]) of N tokens, each channel for itself.

    Computed in fp32 at least, dweight summed so. Differentiable once; deterministic, float64 on a CPU only.

    Args:
        x: [N, D].
        weight: [D, W], of any dtype; the last column is that of the token itself.
        tails: of a partition [R, W - 1, D]: what the last tokens of a path left, the newest last.
        plan: from ``prepare(layout, W)``; without it, prepared here, at that cost in every call.
    Returns:
        [N, D], and of a partition the tails [S, W - 1, D] after the tokens ``layout.state_exports``.
    """
    _check(x, weight, layout, tails)
    if plan is None:
        plan = prepare(layout, weight.shape[1])
    y, exported = tree_conv(x, weight, tails, list(plan))
    return y, None if layout.state_exports is None else exported


def _check(x: Tensor, weight: Tensor, layout: TreeLayout, tails: Tensor | None) -> None:
    if layout.chunks is None or layout.predecessor is None or len(layout.predecessor) != len(x):
        raise UserError(
            f"tree_causal_conv1d: expected a layout of {len(x)} tokens with predecessors and chunks, as "
            "TreeBatch has it"
        )
    if layout.state_exports is not None and tails is None:
        raise UserError("tree_causal_conv1d: expected the gateway's tails for a partition, got none")
    fits = x.ndim == weight.ndim == 2 and len(weight) == x.shape[1]
    if tails is not None:
        size = weight.shape[1] - 1
        fits = fits and tails.shape[1:] == (size, x.shape[1]) and tails.dtype == x.dtype
    if not fits:
        shapes = ", ".join(f"{list(t.shape)} {t.dtype}" for t in (x, weight, tails) if t is not None)
        raise UserError(
            "tree_causal_conv1d: expected x [N, D], weight [D, W] and tails [R, W - 1, D] of x's dtype, "
            f"got {shapes}"
        )


@torch.library.custom_op("titan_tree::tree_conv", mutates_args=())
def tree_conv(
    x: Tensor, weight: Tensor, tails: Tensor | None, metadata: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """y [N, D] and the exported tails [S, W - 1, D]. metadata: the plan."""
    plan = ConvPlan(*metadata)
    exported = _rows(x, tails, plan.exported)
    if not _use_kernels(x):
        return F.silu(_before_silu(*_windows(x, weight, tails, plan))).to(x.dtype), exported
    x, weight = x.contiguous(), weight.contiguous()
    tails = None if tails is None else tails.contiguous()
    channels, width = weight.shape
    programs, group = _groups(plan)
    y = torch.empty_like(x)
    with torch.cuda.device_of(x):
        _forward_kernel[(programs * triton.cdiv(channels, BLOCK),)](
            x, weight, tails, y, plan.sources, plan.start, len(plan.ahead), group, channels, width, BLOCK,
            ROWS=8, num_warps=WARPS,
        )  # fmt: skip
    return y, exported


@torch.library.custom_op("titan_tree::tree_conv_backward", mutates_args=())
def tree_conv_backward(
    dy: Tensor, dexported: Tensor, x: Tensor, weight: Tensor, tails: Tensor | None, metadata: Sequence[Tensor]
) -> list[Tensor]:
    """dx, dweight and, where there are tails, their gradient."""
    plan = ConvPlan(*metadata)
    if not _use_kernels(x):
        return _plain_backward(dy, dexported, x, weight, tails, plan)
    dy, dexported, x, weight = (t.contiguous() for t in (dy, dexported, x, weight))
    tails = None if tails is None else tails.contiguous()
    channels, width = weight.shape
    chunks, blocks = len(plan.ahead), triton.cdiv(channels, BLOCK)
    programs, group = _groups(plan)
    dx = torch.empty_like(x)
    dtails = None if tails is None else torch.zeros_like(tails)  # some rows may be in no window
    partial = x.new_empty(programs, width, channels, dtype=torch.float32)
    first_rows, last_rows = x.new_empty(2, chunks, width - 1, channels, dtype=torch.float32)
    with torch.cuda.device_of(x):
        _backward_kernel[(programs * blocks,)](
            dy, x, weight, tails, dx, partial, first_rows, last_rows, plan.sources, plan.start, plan.ahead,
            plan.shared, chunks, group, channels, width, BLOCK, ROWS=4, num_warps=WARPS,
        )  # fmt: skip
        _sum_kernel[(len(plan.order) * blocks,)](
            dexported, first_rows, last_rows, dx, dtails, plan.order, plan.target, plan.stop, plan.place,
            len(x), chunks * (width - 1), channels, BLOCK, ROWS=8,
        )  # fmt: skip
    dweight = partial.sum(0).t().to(weight.dtype).contiguous()
    return [dx, dweight] if dtails is None else [dx, dweight, dtails]


@tree_conv.register_fake
def _(x: Tensor, weight: Tensor, tails: Tensor | None, metadata: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(*metadata[1].shape, x.shape[1])


@tree_conv_backward.register_fake
def _(
    dy: Tensor, dexported: Tensor, x: Tensor, weight: Tensor, tails: Tensor | None, metadata: Sequence[Tensor]
) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in (x, weight, tails) if t is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, tails, metadata = inputs
    ctx.save_for_backward(x, weight, tails, *metadata)


def _autograd(ctx: Any, dy: Tensor, dexported: Tensor) -> tuple[Any, ...]:
    # Once: checkpointing recomputes at each access.
    x, weight, tails, *metadata = ctx.saved_tensors
    dx, dweight, *dtails = tree_conv_backward(dy, dexported, x, weight, tails, metadata)
    return dx, dweight, *(dtails or [None]), [None] * len(metadata)


tree_conv.register_autograd(_autograd, setup_context=_setup_context)


def _use_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


def _groups(plan: ConvPlan) -> tuple[int, int]:
    """How many groups of chunks, and how many chunks each has: of TOKENS tokens or more, on average."""
    chunks = len(plan.ahead)
    group = triton.cdiv(chunks, triton.cdiv(len(plan.sources), TOKENS))
    return triton.cdiv(chunks, group), group


# Plain torch: CPUs and float64.


def _targets(sources: Tensor, n: int, nobody: int) -> Tensor:
    """Of ``conv_sources``: tokens 0 .. n - 1, gateway rows n .., or ``nobody``."""
    return torch.where(sources < -1, n - 2 - sources, sources.masked_fill(sources == -1, nobody))


def _rows(x: Tensor, tails: Tensor | None, sources: Tensor) -> Tensor:
    """[*sources.shape, D]: rows of x, of the tails, or zeros."""
    zero = x.new_zeros(1, x.shape[1])
    elsewhere = zero if tails is None else torch.cat([tails.flatten(0, 1), zero])
    row = torch.where(sources < -1, -2 - sources, len(elsewhere) - 1)
    return torch.where((sources >= 0)[..., None], x[sources.clamp(min=0)], elsewhere[row])


def _windows(x: Tensor, weight: Tensor, tails: Tensor | None, plan: ConvPlan) -> tuple[Tensor, Tensor]:
    """Windows [N, W, D] and the weight [W, D], to compute with."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return _rows(x, tails, plan.sources).to(wide), weight.to(wide).t()


def _before_silu(window: Tensor, weight: Tensor) -> Tensor:
    return (window * weight).sum(1)


def _plain_backward(
    dy: Tensor, dexported: Tensor, x: Tensor, weight: Tensor, tails: Tensor | None, plan: ConvPlan
) -> list[Tensor]:
    n, channels = x.shape
    window, taps = _windows(x, weight, tails, plan)
    z = _before_silu(window, taps)
    s = z.sigmoid()
    dz = dy.to(z.dtype) * s * (1 + z * (1 - s))
    leaving = torch.cat([(dz[:, None] * taps).flatten(0, 1), dexported.flatten(0, 1).to(z.dtype)])
    rows = n if tails is None else n + tails.shape[0] * tails.shape[1]
    target = _targets(torch.cat([plan.sources.flatten(), plan.exported.flatten()]), n, rows)
    dinputs = z.new_zeros(rows + 1, channels).index_add_(0, target, leaving)
    dweight = torch.einsum("nd,nwd->dw", dz, window)
    grads = [dinputs[:n].to(x.dtype, copy=True), dweight.to(weight.dtype).contiguous()]
    if tails is not None:
        grads.append(dinputs[n:rows].view(tails.shape).to(tails.dtype, copy=True))
    return grads


# Kernels: one program per group of chunks and block of channels, those of one group side by side. Tuples are
# of rows or taps by their distance to a token, fp32. Numbers of rows are int64, as N * D may pass 2**31;
# within a chunk they need not be.


@triton.jit
def _load(x, row, d, mask, D: tl.constexpr):
    return tl.load(x + row * D + d, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _store(x, row, value, d, mask, D: tl.constexpr):
    tl.store(x + row * D + d, value.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _place(group, D: tl.constexpr, BLOCK: tl.constexpr, num_chunks):
    """Of a program its number, its channels, and its first chunk and the one after its last."""
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
def _load_past(token, x, tails, sources, d, mask, D: tl.constexpr, W: tl.constexpr):
    """Of the path the W - 1 rows before a token, the newest first."""
    past = ()
    for j in tl.static_range(1, W):
        source = tl.load(sources + token * W + (W - 1 - j)).to(tl.int64)
        row = _load(x, source, d, mask & (source >= 0), D)
        if tails is not None:
            row += _load(tails, -2 - source, d, mask & (source < -1), D)
        past += (row,)
    return past


@triton.jit
def _push(row, rows):
    return (row,) + rows  # noqa: RUF005


@triton.jit
def _convolve(taps, row, past, W: tl.constexpr):
    z = taps[0] * row
    for j in tl.static_range(1, W):
        z += taps[j] * past[j - 1]
    return z


@triton.jit(do_not_specialize=["num_chunks", "group"])
def _forward_kernel(
    x, weight, tails, y, sources, start, num_chunks, group,
    D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    _, d, first_chunk, last_chunk = _place(group, D, BLOCK, num_chunks)
    mask = d < D
    taps = _load_taps(weight, d, mask, W)
    for chunk in range(first_chunk, last_chunk):
        first = tl.load(start + chunk).to(tl.int64)
        length = tl.load(start + chunk + 1) - tl.load(start + chunk)
        past = _load_past(first, x, tails, sources, d, mask, D, W)
        for begin in range(0, length, ROWS):
            rows = ()
            for i in tl.static_range(ROWS):  # all loads before any use, to have them under way at once
                rows += (_load(x + first * D, begin + i, d, mask & (begin + i < length), D),)
            for i in tl.static_range(ROWS):
                z = _convolve(taps, rows[i], past, W)
                _store(y + first * D, begin + i, z * tl.sigmoid(z), d, mask & (begin + i < length), D)
                past = _push(rows[i], past)[: W - 1]


@triton.jit(do_not_specialize=["num_chunks", "group"])
def _backward_kernel(
    dy, x, weight, tails, dx, partial, first_rows, last_rows, sources, start, ahead, shared, num_chunks,
    group, D: tl.constexpr, W: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Gradients of the W - 1 rows before a chunk that branches off also go into ``first_rows``; those of the
    last W - 1 tokens of a shared chunk, not rounded, into ``last_rows``."""
    program, d, first_chunk, last_chunk = _place(group, D, BLOCK, num_chunks)
    mask = d < D
    taps = _load_taps(weight, d, mask, W)
    zero = tl.zeros([BLOCK], tl.float32)
    dtaps = (zero,) * W
    for chunk in range(first_chunk, last_chunk):
        first = tl.load(start + chunk).to(tl.int64)
        length = tl.load(start + chunk + 1) - tl.load(start + chunk)
        live = length + tl.load(ahead + chunk)
        # Of the W - 1 rows before the chunk, and of its last W - 1 ones, how many are wanted.
        to_first = tl.where(tl.load(sources + first * W + W - 2) != first - 1, W - 1, 0)
        to_last = tl.where(tl.load(shared + chunk) != 0, length + W - 1, 0)
        edge = tl.cast(chunk, tl.int64) * (W - 1) * D
        past = _load_past(first, x, tails, sources, d, mask, D, W)
        sums = (zero,) * (W - 1)  # of the gradients of these rows
        for begin in range(0, length + W - 1, ROWS):
            rows = ()
            upstream = ()
            for i in tl.static_range(ROWS):
                is_live = mask & (begin + i < live)
                rows += (_load(x + first * D, begin + i, d, is_live, D),)
                upstream += (_load(dy + first * D, begin + i, d, is_live, D),)
            for i in tl.static_range(ROWS):
                token = begin + i
                z = _convolve(taps, rows[i], past, W)
                s = tl.sigmoid(z)
                dz = upstream[i] * (s + z * s * (1 - s))
                own = tl.where(token < length, dz, 0.0)
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
                # No later window has the token W - 1 before this one.
                done = token - (W - 1)
                _store(dx + first * D, done, new[W - 1], d, mask & (done >= 0) & (done < length), D)
                _store(first_rows + edge, token, new[W - 1], d, mask & (token < to_first), D)
                is_last = (token >= length) & (token < to_last) & (done >= 0)
                _store(last_rows + edge, token - length, new[W - 1], d, mask & is_last, D)
    for j in tl.static_range(W):
        _store(partial, program * W + (W - 1 - j), dtaps[j], d, mask, D)


@triton.jit(do_not_specialize=["num_tokens", "num_rows"])
def _sum_kernel(
    dexported, first_rows, last_rows, dx, dtails, order, target, stop, place, num_tokens, num_rows,
    D: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """A program per entry of ``order``, of which the first of a target sums all of it."""
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
