"""TreeAttention's kernels for Hopper GPUs, in Gluon: TMA, asynchronous tensor cores, specialised warps.

``forward_pass``; ``key_pass``, the backward. Where dq has to be equal bit for bit, and at head dim 256, whose
key pass is ``wide_key_pass``, a second pass computes it: ``query_pass``.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan_tree.components.rings import is_hopper
from titan_tree.components.tree_attention import triton_kernels
from titan_tree.components.tree_attention.hopper import key_pass, query_pass, wide_key_pass
from titan_tree.components.tree_attention.hopper.forward_pass import SLOTS, forward
from titan_tree.components.tree_attention.plan import Plan
from titan_tree.errors import UserError

__all__ = ["backward", "check", "forward", "supports"]


def supports(q: Tensor) -> bool:
    """Whether these kernels take q: a Hopper GPU, 16 bits, head dim 64, 128 or 256."""
    return is_hopper(q.device) and q.dtype in (torch.bfloat16, torch.float16) and q.shape[-1] in SLOTS


def check(q: Tensor) -> None:
    """The limits of these kernels."""
    if not supports(q):
        raise UserError(
            "TreeAttention: backend 'hopper' needs a GPU of compute capability 9.0, bfloat16 or float16, and "
            f"head dim {', '.join(map(str, SLOTS))}; got {q.device}, {q.dtype}, {q.shape[-1]}; use 'triton'"
        )


def backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, end: Tensor, column: Tensor,
    plan: Plan, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the dtypes of q, k, v."""
    inputs = do, q, k, v, lse, triton_kernels.row_sums(do, o, lse), end, column, plan
    if q.shape[-1] in key_pass.SLOTS:
        dk, dv, dq = key_pass.gradients(*inputs, with_dq=not deterministic)
    else:
        (dk, dv), dq = wide_key_pass.gradients(*inputs), None
    return query_pass.gradient(*inputs) if dq is None else dq, dk, dv
