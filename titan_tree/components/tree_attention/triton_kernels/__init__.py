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

from titan_tree.components.tree_attention import operator
from titan_tree.components.tree_attention.backend import Scoring, plain_only
from titan_tree.components.tree_attention.plan import KEYS, QUERIES, Plan, empty_lse, prepare
from titan_tree.components.tree_attention.triton_kernels import kernels
from titan_tree.tree.layout import TreeLayout

__all__ = ["attention", "backward", "forward", "is_automatic", "prepare", "refusal", "row_sums"]

INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"


def is_automatic(device: torch.device) -> bool:
    """Returns whether ``device`` is a GPU."""
    return device.type == "cuda"


def refusal(q: Tensor, v: Tensor, scoring: Scoring, deterministic: bool) -> str | None:
    """See ``AttentionBackend.refusal``."""
    if q.device.type != "cuda" and not INTERPRET:
        return f"needs a CUDA device, got {q.device}; use 'reference', or set TRITON_INTERPRET=1 to debug"
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        return f"expected bfloat16, float16 or float32, got {q.dtype}; use 'reference' for other dtypes"
    if q.shape[-1] not in (16, 32, 64, 128, 256):
        return f"expected head dim 16, 32, 64, 128 or 256, got {q.shape[-1]}; use 'flex' or 'reference'"
    return plain_only(q, v, scoring)


def attention(
    q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, layout: TreeLayout, plan: Plan,
    scoring: Scoring, deterministic: bool,
) -> Tensor:  # fmt: skip
    """See ``AttentionBackend.attention``."""
    return operator.attention("triton", q, k, v, context, layout, plan, deterministic)


class Tile(NamedTuple):
    """Tile sizes and launch options of one kernel. Tiles divide a plan's blocks of QUERIES and KEYS."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


class Tiles(NamedTuple):
    """Tile sizes of the three large kernels for one head dim."""

    forward: Tile
    dkdv: Tile
    dq: Tile


# By head dim; head dims below 64 use the row of 64. Chosen by measurement on an H200: in the backward pass,
# two programs of 4 warps per multiprocessor are faster than one of 8.
TILES_16BIT = {
    64: Tiles(Tile(128, 64, 4, 3), Tile(64, 64, 4, 3), Tile(64, 64, 4, 3)),
    128: Tiles(Tile(128, 128, 8, 2), Tile(64, 64, 4, 2), Tile(64, 64, 4, 2)),
    256: Tiles(Tile(128, 64, 8, 2), Tile(64, 64, 8, 1), Tile(128, 32, 8, 2)),
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


@functools.cache
def _shared_memory(device: int) -> int:
    """Returns the maximum bytes of shared memory of one block."""
    return triton.runtime.driver.active.utils.get_device_properties(device)["max_shared_mem"]


def _tiles(q: Tensor) -> Tiles:
    if q.dtype == torch.float32:
        table = TILES_FP32
    else:
        table = TILES_16BIT if _shared_memory(q.get_device()) > 200 * 1024 else TILES_16BIT_99K
    return table[max(q.shape[-1], 64)]


def _rows(x: Tensor, block: int) -> TensorDescriptor:
    """Returns a descriptor of x [N, H, D] as a matrix [N, H * D], in tiles of ``block`` rows of one head.

    Rows past the end read as zero and are not written. Coordinates are rows and columns, so no offset exceeds
    32 bits. On Hopper, Triton compiles these accesses to TMA transfers.
    """
    return TensorDescriptor.from_tensor(x.flatten(1), [block, x.shape[2]])


def _precision(q: Tensor) -> str:
    return "ieee" if q.dtype == torch.float32 else "tf32"  # has no effect on 16-bit operands


def forward(
    q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, plan: Plan
) -> tuple[Tensor, Tensor]:
    """See ``KernelBackend.forward``."""
    (n, heads, dim), (m, heads_k, _) = q.shape, k.shape
    o, lse = torch.empty_like(q), empty_lse(q)
    tile, group = _tiles(q).forward, heads // heads_k
    q_split = QUERIES // tile.block_q
    kernels._forward_kernel[(len(plan.query_order) * q_split * group, heads_k)](
        _rows(q, tile.block_q), _rows(k, tile.block_k), _rows(v, tile.block_k), _rows(o, tile.block_q),
        lse, end, column, plan.key_blocks, plan.n_partial, plan.n_visible, plan.query_order,
        n, m, plan.key_blocks.shape[1], lse.shape[1], dim**-0.5,
        G=group, D=dim, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, Q_SPLIT=q_split,
        K_SPLIT=KEYS // tile.block_k, PRECISION=_precision(q),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return o, lse


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, end: Tensor, column: Tensor,
    plan: Plan, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """See ``KernelBackend.backward``. The gradients are always deterministic."""
    delta = row_sums(do, o, lse)
    dk, dv = _key_gradients(do, q, k, v, lse, delta, end, column, plan)
    return _query_gradients(do, q, k, v, lse, delta, end, column, plan), dk, dv


def row_sums(do: Tensor, o: Tensor, lse: Tensor) -> Tensor:
    """Returns delta = rowsum(O * dO) in the shape of lse, 0 past row N. Backend "hopper" uses it too."""
    delta = torch.empty_like(lse)
    kernels._delta_kernel[(lse.shape[1] // 64, len(lse))](
        _rows(o, 64), _rows(do, 64), delta, lse.shape[1], D=o.shape[2], BLOCK=64
    )
    return delta


def _key_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, end: Tensor, column: Tensor,
    plan: Plan,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns dk and dv."""
    (n, heads, dim), (m, heads_k, _) = q.shape, k.shape
    dk, dv = torch.empty_like(k), torch.empty_like(v)
    tile = _tiles(q).dkdv
    k_split = KEYS // tile.block_k
    kernels._dkdv_kernel[(len(plan.range_order) * k_split, heads_k)](
        _rows(q, tile.block_q), _rows(k, tile.block_k), _rows(v, tile.block_k), _rows(do, tile.block_q),
        lse, delta, _rows(dk, tile.block_k), _rows(dv, tile.block_k), end, column,
        plan.first, plan.first_full, plan.end_full, plan.last, plan.range_order,
        n, m, lse.shape[1], dim**-0.5,
        G=heads // heads_k, D=dim, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, K_SPLIT=k_split,
        PRECISION=_precision(q), num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return dk, dv


def _query_gradients(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, end: Tensor, column: Tensor,
    plan: Plan,
) -> Tensor:  # fmt: skip
    """Returns dq."""
    (n, heads, dim), (m, heads_k, _) = q.shape, k.shape
    dq = torch.empty_like(q)
    tile, group = _tiles(q).dq, heads // heads_k
    q_split = QUERIES // tile.block_q
    kernels._dq_kernel[(len(plan.query_order) * q_split * group, heads_k)](
        _rows(q, tile.block_q), _rows(k, tile.block_k), _rows(v, tile.block_k), _rows(do, tile.block_q),
        lse, delta, _rows(dq, tile.block_q), end, column,
        plan.key_blocks, plan.n_partial, plan.n_visible, plan.query_order,
        n, m, plan.key_blocks.shape[1], lse.shape[1], dim**-0.5,
        G=group, D=dim, BLOCK_Q=tile.block_q, BLOCK_K=tile.block_k, Q_SPLIT=q_split,
        K_SPLIT=KEYS // tile.block_k, PRECISION=_precision(q),
        num_warps=tile.num_warps, num_stages=tile.num_stages,
    )  # fmt: skip
    return dq
