"""The causal convolution on trees: Triton kernels on GPUs, plain PyTorch on CPUs and in float64.

A chunk (``tree/chunks.py``) is a run of tokens, each the successor of the one before on the same path. A
program walks along a few chunks, one after another, and keeps the last W - 1 rows in registers. So it reads
each row once for a window of any width; only the W - 1 rows before a chunk are looked up.

The backward kernel walks the same way. A token's dx is complete W - 1 tokens later, so the kernel continues
past the chunk's end by up to W - 1 tokens of the same path. A chunk that branches off also has gradients for
the W - 1 tokens before it, which are in other chunks. The kernel stores them, and a second kernel sums them
in a fixed order.

Memory traffic per token and channel, with b bytes per element (bf16: 2), for W = 4: forward 2b (x, y);
backward 3b (x, dy, dx) and up to 0.5 bytes of partial sums of dweight. Rows next to a chunk's edge are read
twice, mostly from L2. Each chunk that branches off costs W - 1 more fp32 rows, written and read, for the
gradients that it sends to the tokens before it. Each chunk that holds such tokens also costs W - 1 fp32
rows, written and read: the gradients that its own program computes for its last W - 1 tokens.

Letters: N tokens, D channels, windows of W tokens, C chunks, R gateway rows, S exported tokens, E = (C + S)
(W - 1).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

import titan_tree.components.recurrence.conv_kernels as conv_kernels
from titan_tree.components.operators import as_operator
from titan_tree.components.recurrence.reference import conv_sources
from titan_tree.errors import UserError
from titan_tree.tree.layout import TreeLayout

BLOCK = 256  # channels per program, 4 per thread
WARPS = 2
# The fewest tokens per program, on average. Each program reads the weight and writes a partial sum of
# dweight.
TOKENS = 64
NOBODY = 2**31 - 1  # the target of a row that does not exist; it sorts last


class ConvIndex(NamedTuple):
    """What the kernels read of a layout.

    A *tail* is the W - 1 inputs up to a token, which the gateway cache stores (``tree_causal_conv1d``). A
    *target* is a row that gets gradients: a token 0 .. N - 1, or N + i for row i of the tails.
    """

    sources: Tensor  # [N, W] int32, see ``conv_sources``
    exported: Tensor  # [S, W - 1] int32: the same for the exported tails
    start: Tensor  # [C + 1] int32: chunk c holds tokens start[c] .. start[c + 1] - 1
    ahead: Tensor  # [C] int32: how many tokens after a chunk continue its path, at most W - 1
    shared: Tensor  # [C] bool: other branches or exports also read the chunk's last tokens
    # The E gradients that leave their chunk: first those of the W - 1 rows before each chunk, oldest row
    # first, then those of the exported tails. The remaining fields list them sorted by target.
    order: Tensor  # [E] int32: the number of each gradient before sorting
    target: Tensor  # [E] int32
    stop: Tensor  # [E] int32: for the first gradient of each target, the end of the target's range; else 0
    # [E] int32: for a target that is a token, its row among the last W - 1 tokens of all chunks
    place: Tensor


def prepare(layout: TreeLayout, width: int) -> ConvIndex:
    """Returns the index for windows of ``width`` tokens. All layers of a batch share it."""
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

    # A chunk that continues the chunk right before it sends no gradients. The program of the chunk before it
    # walks past its own end and computes them.
    before = sources.index_select(0, first)[:, :size]
    goes_on = layout.predecessor.index_select(0, first) == first - 1
    leaving = torch.cat([before.masked_fill(goes_on[:, None], -1), exported]).flatten()
    target, order = _targets(leaving, n, NOBODY).sort(stable=True)
    is_first = (target.diff(prepend=target.new_full((1,), -1)) > 0) & (target < NOBODY)
    stop = torch.searchsorted(target, target, right=True).where(is_first, 0)
    # Every target is among the last W - 1 tokens of a chunk, because chunks end at branches and at exports.
    chunk = torch.searchsorted(end, target, right=True).clamp(max=chunks - 1)
    place = chunk * size + target - (end[chunk] - size)
    shared = torch.searchsorted(target, first) < torch.searchsorted(target, end)
    columns = sources, exported, start, ahead, shared, order, target, stop, place
    return ConvIndex(*(x if x.dtype == torch.bool else x.int() for x in columns))


def tree_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    layout: TreeLayout,
    tails: Tensor | None = None,
    index: Sequence[Tensor] | None = None,
    bias: Tensor | None = None,
    silu: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Computes a depthwise causal convolution along each path, followed by SiLU.

    y[t] = silu(bias + sum_j weight[:, W - 1 - j] * x[j-th token before t on its path]), for each channel by
    itself. The computation, and the sums for dweight and dbias, are in fp32 or wider. The operator is
    differentiable once and deterministic.

    Args:
        x: [N, D].
        weight: [D, W], of any dtype. The last column belongs to the token itself.
        layout: layout of N tokens, with predecessors and chunks.
        tails: [R, W - 1, D] in x's dtype, the last inputs of ancestors' paths, newest last; None outside of
            partitions.
        index: a ``ConvIndex`` from ``prepare(layout, W)``. Without it, every call makes a new one.
        bias: [D], of any dtype; None: 0.
        silu: False: y is the convolution itself.

    Returns:
        y [N, D] in x's dtype; for a partition also the tails [S, W - 1, D] after the tokens
        ``layout.state_exports``, otherwise None.

    Raises:
        UserError: shapes or dtypes do not fit, or a partition has no tails.
    """
    _check(x, weight, layout, tails, bias)
    if index is None:
        index = prepare(layout, weight.shape[1])
    y, exported = _TreeConv.apply(silu, x, weight, bias, tails, *index)
    return y, None if layout.state_exports is None else exported


def _check(x: Tensor, weight: Tensor, layout: TreeLayout, tails: Tensor | None, bias: Tensor | None) -> None:
    if layout.chunks is None or layout.predecessor is None or len(layout.predecessor) != len(x):
        raise UserError(
            f"tree_causal_conv1d: expected a layout of {len(x)} tokens with predecessors and chunks, as "
            "TreeBatch makes it"
        )
    if layout.state_exports is not None and tails is None:
        raise UserError("tree_causal_conv1d: expected the gateway's tails for a partition, got none")
    fits = x.ndim == weight.ndim == 2 and len(weight) == x.shape[1]
    fits = fits and (bias is None or bias.shape == weight.shape[:1])
    if tails is not None:
        size = weight.shape[1] - 1
        fits = fits and tails.shape[1:] == (size, x.shape[1]) and tails.dtype == x.dtype
    if not fits:
        shapes = ", ".join(f"{list(t.shape)} {t.dtype}" for t in (x, weight, bias, tails) if t is not None)
        raise UserError(
            "tree_causal_conv1d: expected x [N, D], weight [D, W], bias [D] if any, and tails [R, W - 1, D] "
            f"of x's dtype, got {shapes}"
        )


class _TreeConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, silu: bool, *tensors: Tensor | None) -> tuple[Tensor, Tensor]:
        ctx.silu = silu
        ctx.save_for_backward(*tensors)
        result: tuple[Tensor, Tensor] = tree_conv(*tensors[:4], tensors[4:], silu)
        return result

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, dexported: Tensor) -> tuple[Tensor | None, ...]:
        # Read saved_tensors once: with activation checkpointing, every access recomputes the forward pass.
        tensors = ctx.saved_tensors
        inputs, metadata = tensors[:4], tensors[4:]
        grads = iter(tree_conv_backward(dy, dexported, *inputs, metadata, ctx.silu))
        return None, *(None if x is None else next(grads) for x in inputs), *[None] * len(metadata)


@as_operator
def tree_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor | None, metadata: Sequence[Tensor],
    silu: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns y [N, D] and the exported tails [S, W - 1, D]. metadata: the columns of ConvIndex."""
    index = ConvIndex(*metadata)
    exported = _rows(x, tails, index.exported)
    if not _use_kernels(x):
        z = _before_silu(*_windows(x, weight, tails, index), bias)
        return (F.silu(z) if silu else z).to(x.dtype), exported
    x, weight = x.contiguous(), weight.contiguous()
    tails = None if tails is None else tails.contiguous()
    channels, width = weight.shape
    programs, group = _groups(index)
    y = torch.empty_like(x)
    with torch.cuda.device_of(x):
        conv_kernels._forward_kernel[(programs * triton.cdiv(channels, BLOCK),)](
            x, weight, bias, tails, y, index.sources, index.start, num_chunks=len(index.ahead), group=group,
            D=channels, W=width, SILU=silu, BLOCK=BLOCK, ROWS=8, num_warps=WARPS,
        )  # fmt: skip
    return y, exported


@as_operator
def tree_conv_backward(
    dy: Tensor, dexported: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor | None,
    metadata: Sequence[Tensor], silu: bool,
) -> list[Tensor]:  # fmt: skip
    """Returns dx, dweight and, with bias or tails, their gradients."""
    index = ConvIndex(*metadata)
    if not _use_kernels(x):
        return _plain_backward(dy, dexported, x, weight, bias, tails, index, silu)
    dy, dexported, x, weight = (t.contiguous() for t in (dy, dexported, x, weight))
    tails = None if tails is None else tails.contiguous()
    channels, width = weight.shape
    chunks, blocks = len(index.ahead), triton.cdiv(channels, BLOCK)
    programs, group = _groups(index)
    dx = torch.empty_like(x)
    dtails = None if tails is None else torch.zeros_like(tails)  # some rows may be outside of every window
    # The last row is for dbias.
    partial = x.new_empty(programs, width + (bias is not None), channels, dtype=torch.float32)
    first_rows, last_rows = x.new_empty(2, chunks, width - 1, channels, dtype=torch.float32)
    with torch.cuda.device_of(x):
        conv_kernels._backward_kernel[(programs * blocks,)](
            dy, x, weight, bias, tails, dx, partial, first_rows=first_rows, last_rows=last_rows,
            sources=index.sources, start=index.start, ahead=index.ahead, shared=index.shared,
            num_chunks=chunks, group=group, D=channels, W=width, SILU=silu, BLOCK=BLOCK, ROWS=4,
            num_warps=WARPS,
        )  # fmt: skip
        conv_kernels._sum_kernel[(len(index.order) * blocks,)](
            dexported, first_rows, last_rows, dx, dtails, order=index.order, target=index.target,
            stop=index.stop, place=index.place, num_tokens=len(x), num_rows=chunks * (width - 1),
            D=channels, BLOCK=BLOCK, ROWS=8,
        )  # fmt: skip
    sums = partial.sum(0)
    grads = [dx, sums[:width].t().to(weight.dtype).contiguous()]
    if bias is not None:
        grads.append(sums[width].to(bias.dtype, copy=True))
    return grads if dtails is None else [*grads, dtails]


@torch.library.register_fake("titan_tree::tree_conv")
def _(
    x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor | None, metadata: Sequence[Tensor], *_: Any
) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(*metadata[1].shape, x.shape[1])


@torch.library.register_fake("titan_tree::tree_conv_backward")
def _(dy: Tensor, dexported: Tensor, *inputs: Any) -> list[Tensor]:
    return [t.new_empty(t.shape) for t in inputs[:4] if t is not None]


def _use_kernels(x: Tensor) -> bool:
    return x.is_cuda and x.dtype != torch.float64


def _groups(index: ConvIndex) -> tuple[int, int]:
    """Returns (number of groups, chunks per group), so that a group has at least TOKENS tokens on average."""
    chunks = len(index.ahead)
    group = triton.cdiv(chunks, triton.cdiv(len(index.sources), TOKENS))
    return triton.cdiv(chunks, group), group


# Plain PyTorch, for CPUs and float64.


def _targets(sources: Tensor, n: int, nobody: int) -> Tensor:
    """Returns targets for ``conv_sources``: tokens 0 .. n - 1, gateway rows from n on, or ``nobody``."""
    return torch.where(sources < -1, n - 2 - sources, sources.masked_fill(sources == -1, nobody))


def _rows(x: Tensor, tails: Tensor | None, sources: Tensor) -> Tensor:
    """Returns [*sources.shape, D]: the rows of x or of the tails that ``sources`` names, or zeros."""
    zero = x.new_zeros(1, x.shape[1])
    elsewhere = zero if tails is None else torch.cat([tails.flatten(0, 1), zero])
    row = torch.where(sources < -1, -2 - sources, len(elsewhere) - 1)
    return torch.where((sources >= 0)[..., None], x[sources.clamp(min=0)], elsewhere[row])


def _windows(x: Tensor, weight: Tensor, tails: Tensor | None, index: ConvIndex) -> tuple[Tensor, Tensor]:
    """Returns windows [N, W, D] and the weight [W, D], in the dtype of the computation."""
    wide = torch.promote_types(x.dtype, torch.float32)
    return _rows(x, tails, index.sources).to(wide), weight.to(wide).t()


def _before_silu(window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    z = (window * weight).sum(1)
    return z if bias is None else z + bias.to(z.dtype)


def _plain_backward(
    dy: Tensor, dexported: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, tails: Tensor | None,
    index: ConvIndex, silu: bool,
) -> list[Tensor]:  # fmt: skip
    n, channels = x.shape
    window, taps = _windows(x, weight, tails, index)
    z = _before_silu(window, taps, bias)
    dz = dy.to(z.dtype)
    if silu:
        s = z.sigmoid()
        dz = dz * s * (1 + z * (1 - s))
    leaving = torch.cat([(dz[:, None] * taps).flatten(0, 1), dexported.flatten(0, 1).to(z.dtype)])
    rows = n if tails is None else n + tails.shape[0] * tails.shape[1]
    target = _targets(torch.cat([index.sources.flatten(), index.exported.flatten()]), n, rows)
    dinputs = z.new_zeros(rows + 1, channels).index_add_(0, target, leaving)
    dweight = torch.einsum("nd,nwd->dw", dz, window)
    grads = [dinputs[:n].to(x.dtype, copy=True), dweight.to(weight.dtype).contiguous()]
    if bias is not None:
        grads.append(dz.sum(0).to(bias.dtype, copy=True))
    if tails is not None:
        grads.append(dinputs[n:rows].view(tails.shape).to(tails.dtype, copy=True))
    return grads
