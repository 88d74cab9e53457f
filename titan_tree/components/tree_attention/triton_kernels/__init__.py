"""Backend "triton": kernels for any GPU, in 16 and 32 bits.

``kernels.py`` holds the device code. This file chooses tile sizes and launches it. Without a GPU, Triton's
interpreter runs the kernels if TRITON_INTERPRET=1.
"""

from __future__ import annotations

import functools
import os
from typing import NamedTuple

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from titan_tree.components.backends import PLAIN, Scoring
from titan_tree.components.tree_attention import operator
from titan_tree.components.tree_attention.block_lists import (
    DECODING_ROWS,
    KEYS,
    QUERIES,
    BlockLists,
    DecodingLists,
    WindowLists,
    empty_lse,
    prepare,
)
from titan_tree.components.tree_attention.triton_kernels import kernels
from titan_tree.tree.layout import TreeLayout

__all__ = ["attention", "backward", "decode", "forward", "is_automatic", "prepare", "refusal", "row_sums"]

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def is_automatic(device: torch.device) -> bool:
    """Returns whether ``device`` is a GPU."""
    return device.type == "cuda"


def refusal(q: Tensor, v: Tensor, scoring: Scoring, deterministic: bool) -> str | None:
    """See ``AttentionBackend.refusal``."""
    if q.device.type != "cuda" and not INTERPRET:
        return f"needs a CUDA device, got {q.device} (TRITON_INTERPRET=1 emulates one)"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"expected bfloat16, float16 or float32, got {q.dtype}"
    dims = q.shape[-1], v.shape[-1]
    if max(dims) > 256 or dims[0] % 8 or dims[1] % 8:
        return f"expected multiples of 8 up to 256 as head dims, got {dims[0]} and {dims[1]}"
    return None


def attention(
    q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, layout: TreeLayout,
    prepared: BlockLists | WindowLists, scale: float, scoring: Scoring, deterministic: bool,
) -> Tensor:  # fmt: skip
    """See ``AttentionBackend.attention``."""
    return operator.attention("triton", q, k, v, context, layout, prepared, scale, scoring, deterministic)


class Tile(NamedTuple):
    """Tile sizes and launch options of one kernel. Tiles divide the blocks of QUERIES and KEYS."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """Tile sizes of the three large kernels."""

    forward: Tile
    dkdv: Tile
    dq: Tile
    narrow_dkdv: Tile | None = None  # for scoring that needs more registers, if it needs a tile of its own


# By the larger head dim, of keys or values, rounded up to one of the table's; 192 is for values of up to 128.
# Chosen by measurement on an H200: in the backward pass, two programs of 4 warps per multiprocessor are
# faster than one of 8. The narrow tiles were chosen by ptxas's reports: the others would spill 300 to 830
# bytes per thread.
TILES_16BIT = {
    64: Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    128: Tiles(Tile(128, 128, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2), Tile(32, 64, 4, 2)),
    192: Tiles(Tile(128, 128, 8, 2), Tile(32, 64, 4, 2), Tile(128, 64, 8, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 1), Tile(128, 32, 8, 2), Tile(32, 64, 8, 2)),
}
# For GPUs with as little as 99 KiB of shared memory per block: Ada, consumer Ampere and consumer Blackwell.
TILES_16BIT_99K = {
    64: Tiles(Tile(128, 64, 4, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    128: Tiles(Tile(64, 64, 4, 2), Tile(64, 64, 4, 1), Tile(64, 64, 4, 1)),
    256: Tiles(Tile(64, 32, 4, 1), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
}
# float32 products run on the CUDA cores, with small tiles. TF32's error would be 1,000 times larger.
TILES_FP32 = {
    64: Tiles(Tile(64, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    128: Tiles(Tile(32, 32, 4, 2), Tile(32, 32, 4, 1), Tile(32, 32, 4, 1)),
    256: Tiles(Tile(32, 16, 4, 1), Tile(16, 16, 4, 1), Tile(16, 16, 4, 1)),
}
# A decoding pass has few queries. With more of them in a tile, fewer multiprocessors would have work.
DECODING = {128: Tile(DECODING_ROWS, 128, 4, 2), 256: Tile(DECODING_ROWS, 64, 4, 2)}  # 16 bits, by head dim
DECODING_FP32 = Tile(DECODING_ROWS, 16, 4, 1)


@functools.cache
def _shared_memory(device: int) -> int:
    """Returns the maximum bytes of shared memory of one block."""
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


def _padded(dim: int) -> int:
    """Returns a head dim rounded up to what the tensor cores' tiles can have."""
    return max(1 << (dim - 1).bit_length(), 16)


def _cap(scoring: Scoring) -> float | None:
    """Returns the soft cap of scores in base 2."""
    return None if scoring.softcap is None else scoring.softcap * kernels.LOG2_E.value


def _tiles(q: Tensor, v: Tensor) -> Tiles:
    if q.dtype == torch.float32:
        table = TILES_FP32
    else:
        table = TILES_16BIT if _shared_memory(q.get_device()) > 200 * 1024 else TILES_16BIT_99K
    dim = max(q.shape[2], _padded(v.shape[2]))
    return table[min(size for size in table if size >= dim)]


def _decoding_tile(q: Tensor) -> Tile:
    return DECODING_FP32 if q.dtype == torch.float32 else DECODING[128 if q.shape[2] <= 128 else 256]


def _dkdv_tile(q: Tensor, v: Tensor, lists: BlockLists | WindowLists, cap: float | None) -> Tile:
    tiles = _tiles(q, v)
    windows_spill = max(q.shape[2], v.shape[2]) > 128
    if tiles.narrow_dkdv and (cap is not None or (windows_spill and isinstance(lists, WindowLists))):
        return tiles.narrow_dkdv
    return tiles.dkdv


def _rows(x: Tensor, block: int) -> TensorDescriptor:
    """Returns a descriptor of x [N, H, D] in tiles of ``block`` rows of one head.

    If x is contiguous and D a power of two, it is a matrix [N, H * D]. Otherwise it is an array [H, N, D],
    whose tiles are padded to a power of two. Elements past an end read as zero and are not written.
    Coordinates are indices, so no offset exceeds 32 bits. On Hopper, Triton compiles these accesses to TMA
    transfers.
    """
    n, heads, dim = x.shape
    if _padded(dim) == dim and x.is_contiguous():
        return TensorDescriptor(x, [n, heads * dim], [heads * dim, 1], [block, dim])
    return TensorDescriptor(x, [heads, n, dim], [x.stride(1), x.stride(0), 1], [1, block, _padded(dim)])


def _in_parts(x: Tensor, block: int) -> tuple[TensorDescriptor, TensorDescriptor | None]:
    """Returns ``_rows`` of the first columns of each head, the most that are a power of two, and of the rest.

    The tensor cores then compute with fewer zeros: 192 columns are 128 and 64, not 256.
    """
    first = 1 << (x.shape[2].bit_length() - 1)
    if first in (x.shape[2], 8):
        return _rows(x, block), None
    return _rows(x[..., :first], block), _rows(x[..., first:], block)


def _window(lists: BlockLists | WindowLists | DecodingLists) -> tuple[Tensor | None, Tensor | None]:
    """Returns what kernels read about windows."""
    return (lists.depth, lists.window_start) if isinstance(lists, WindowLists) else (None, None)


def _queries(lists: BlockLists | WindowLists) -> tuple[Tensor | None, ...]:
    """Returns what ``_dkdv_kernel`` reads about the queries of key blocks: ranges or lists, and the order."""
    if isinstance(lists, BlockLists):
        ranges = lists.first, lists.first_full, lists.end_full, lists.last
        return *ranges, None, None, None, lists.range_order
    blocks = lists.query_blocks, lists.n_partial_queries, lists.n_visible_queries
    return None, None, None, None, *blocks, lists.key_order


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"  # has no effect on 16-bit operands


def forward(
    q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor,
    lists: BlockLists | WindowLists | DecodingLists, scale: float, scoring: Scoring,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See ``KernelBackend.forward``."""
    (n, heads, _), (m, heads_k, dim_v) = q.shape, v.shape
    o, lse = q.new_empty(n, heads, dim_v), empty_lse(q)
    sinks = None if scoring.sinks is None else scoring.sinks.contiguous()
    is_decoding, group = isinstance(lists, DecodingLists), heads // heads_k
    tile = _decoding_tile(q) if is_decoding else _tiles(q, v).forward
    q_split = (DECODING_ROWS if is_decoding else QUERIES) // tile.block_q
    kernels._forward_kernel[(len(lists.query_order) * q_split * group, heads_k)](
        *_in_parts(q, tile.block_q), *_in_parts(k, tile.block_k), _rows(v, tile.block_k),
        _rows(o, tile.block_q), lse, end, column,
        lists.key_blocks, lists.n_partial, lists.n_visible, lists.query_order, *_window(lists), sinks,
        n, m, lists.key_blocks.shape[1], lse.shape[1], scale,
        G=group, DV=_padded(dim_v), BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, Q_SPLIT=q_split,
        K_SPLIT=KEYS // tile.block_k, CAP=_cap(scoring), PRECISION=_precision(q),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return o, lse


def decode(q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, lists: DecodingLists) -> Tensor:
    """Returns the attention [N, H, D] of one query per path on the keys of a tree.

    Args:
        q: [N, H, D].
        k, v: [M, Hkv, D]. Values must be finite, even if no query sees them.
        end, column: see ``KernelBackend.forward``. A column lies between those that ``lists`` was made for.
    """
    return forward(q, k, v, end, column, lists, q.shape[2] ** -0.5, PLAIN)[0]


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, end: Tensor, column: Tensor,
    lists: BlockLists | WindowLists, scale: float, scoring: Scoring, deterministic: bool,
) -> list[Tensor]:  # fmt: skip
    """See ``KernelBackend.backward``. The gradients are always deterministic."""
    delta = row_sums(do, o, lse)
    inputs = do, q, k, v, lse, delta, end, column, lists, scale, _cap(scoring)
    gradients = [_query_gradients(*inputs), *_key_gradients(*inputs)]
    if scoring.sinks is not None:  # the softmax gives sink h the weight w[h, n], but it has no value
        w = torch.exp2(scoring.sinks.float()[:, None] * kernels.LOG2_E.value - lse)
        gradients.append(-(w * delta).sum(1).to(scoring.sinks.dtype))
    return gradients


def row_sums(do: Tensor, o: Tensor, lse: Tensor) -> Tensor:
    """Returns delta = rowsum(O * dO) in the shape of lse, 0 past row N. Backend "hopper" uses it too."""
    delta = torch.empty_like(lse)
    kernels._delta_kernel[(lse.shape[1] // 64, len(lse))](
        _rows(o, 64), _rows(do, 64), delta, lse.shape[1], BLOCK=64
    )
    return delta


def _key_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, end: Tensor, column: Tensor,
    lists: BlockLists | WindowLists, scale: float, cap: float | None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns dk and dv."""
    (n, heads, dim), (m, heads_k, dim_v) = q.shape, v.shape
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    tile = _dkdv_tile(q, v, lists, cap)
    k_split = KEYS // tile.block_k
    kernels._dkdv_kernel[(triton.cdiv(m, KEYS) * k_split, heads_k)](
        _rows(q, tile.block_q), _rows(k, tile.block_k), _rows(v, tile.block_k), _rows(do, tile.block_q),
        lse, delta, _rows(dk, tile.block_k), _rows(dv, tile.block_k), end, column,
        *_queries(lists), *_window(lists), n, m, lists.key_blocks.shape[0], lse.shape[1], scale,
        G=heads // heads_k, D=_padded(dim), DV=_padded(dim_v), BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k,
        Q_SPLIT=QUERIES // tile.block_q, K_SPLIT=k_split, CAP=cap, PRECISION=_precision(q),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return dk, dv


def _query_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, end: Tensor, column: Tensor,
    lists: BlockLists | WindowLists, scale: float, cap: float | None,
) -> Tensor:  # fmt: skip
    """Returns dq."""
    (n, heads, dim), (m, heads_k, _) = q.shape, k.shape
    dq = torch.empty_like(q)
    tile, group = _tiles(q, v).dq, heads // heads_k
    q_split = QUERIES // tile.block_q
    kernels._dq_kernel[(len(lists.query_order) * q_split * group, heads_k)](
        _rows(q, tile.block_q), _rows(k, tile.block_k), _rows(v, tile.block_k), _rows(do, tile.block_q),
        lse, delta, _rows(dq, tile.block_q), end, column,
        lists.key_blocks, lists.n_partial, lists.n_visible, lists.query_order, *_window(lists),
        n, m, lists.key_blocks.shape[1], lse.shape[1], scale,
        G=group, D=_padded(dim), BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, Q_SPLIT=q_split,
        K_SPLIT=KEYS // tile.block_k, CAP=cap, PRECISION=_precision(q),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return dq
