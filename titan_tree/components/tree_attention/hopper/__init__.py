"""Backend "hopper": kernels for Hopper GPUs in Gluon, Triton's low-level language.

They use TMA (asynchronous copies between global and shared memory), asynchronous tensor core products (wgmma)
and specialized warps. Read them in this order:

    ../../rings.py    rings of shared memory between a producer warp and consumer warps
    key_groups.py     work items and lists of keys, for the passes that keep a block of queries
    forward_pass.py   o and lse
    jobs.py           work items, for the passes that keep a block of keys
    key_pass.py       dk and dv, and on request dq; head dim 64 and 128
    wide_key_pass.py  dk and dv; head dim 256
    query_pass.py     dq in a pass of its own: at head dim 256, and where gradients must be deterministic
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan_tree.components.backends import Scoring
from titan_tree.components.rings import is_hopper
from titan_tree.components.tree_attention import operator, triton_kernels
from titan_tree.components.tree_attention.block_lists import BlockLists, prepare
from titan_tree.components.tree_attention.hopper import forward_pass, key_pass, query_pass, wide_key_pass
from titan_tree.components.tree_attention.operator import plain_only
from titan_tree.tree.layout import TreeLayout

__all__ = ["attention", "backward", "forward", "is_automatic", "prepare", "refusal"]


def is_automatic(device: torch.device) -> bool:
    """Returns whether ``device`` is a Hopper GPU."""
    return is_hopper(device)


def refusal(q: Tensor, v: Tensor, scoring: Scoring, deterministic: bool) -> str | None:
    """See ``AttentionBackend.refusal``."""
    dims = forward_pass.STAGES
    if is_hopper(q.device) and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] in dims:
        return plain_only(q, v, scoring)
    return (
        "needs a GPU of compute capability 9.0, bfloat16 or float16, and head dim "
        f"{', '.join(map(str, dims))}; got {q.device}, {q.dtype}, {q.shape[-1]}"
    )


def attention(
    q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, layout: TreeLayout, prepared: BlockLists,
    scale: float, scoring: Scoring, deterministic: bool,
) -> Tensor:  # fmt: skip
    """See ``AttentionBackend.attention``."""
    return operator.attention("hopper", q, k, v, context, layout, prepared, scale, scoring, deterministic)


def forward(
    q: Tensor, k: Tensor, v: Tensor, end: Tensor, column: Tensor, lists: BlockLists, scale: float,
    scoring: Scoring,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """See ``KernelBackend.forward``."""
    return forward_pass.forward(q, k, v, end, column, lists, scale)


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, end: Tensor, column: Tensor,
    lists: BlockLists, scale: float, scoring: Scoring, deterministic: bool,
) -> list[Tensor]:  # fmt: skip
    """See ``KernelBackend.backward``."""
    inputs = do, q, k, v, lse, triton_kernels.row_sums(do, o, lse), end, column, lists, scale
    if q.shape[-1] in key_pass.STAGES:
        dk, dv, dq = key_pass.gradients(*inputs, with_dq=not deterministic)
    else:
        (dk, dv), dq = wide_key_pass.gradients(*inputs), None
    return [query_pass.gradient(*inputs) if dq is None else dq, dk, dv]
