"""TreeAttention's kernels for Hopper GPUs, in Gluon: TMA, asynchronous tensor cores, specialised warps.

``forward_pass`` and ``one_pass``, the backward. What that does not do, head dim 256 and gradients that are
equal bit for bit, the portable kernels do, on the same plan.
"""

from __future__ import annotations

import torch
from torch import Tensor

from titan_tree.components.tree_attention import portable
from titan_tree.components.tree_attention.hopper import one_pass
from titan_tree.components.tree_attention.hopper.forward_pass import SLOTS, forward
from titan_tree.components.tree_attention.plan import Plan
from titan_tree.errors import UserError

__all__ = ["backward", "check", "forward", "supports"]


def supports(q: Tensor) -> bool:
    """Whether these kernels take q: a Hopper GPU, 16 bits, head dim 64, 128 or 256."""
    if q.device.type != "cuda" or q.dtype not in (torch.bfloat16, torch.float16) or q.shape[-1] not in SLOTS:
        return False
    device = torch.cuda.get_device_properties(q.device)
    return (device.major, device.minor) == (9, 0)


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
    if deterministic or q.shape[-1] not in one_pass.SLOTS:
        return portable.backward(do, q, k, v, o, lse, end, column, plan, deterministic)
    return one_pass.backward(do, q, k, v, o, lse, end, column, plan)
