"""The operator tree_attention: all that autograd, torch.compile and activation checkpointing need to know.

It computes with one of two sets of kernels: "triton" (``portable``) or "hopper". Saved for the backward are
q, k, v, o and lse, as FlashAttention does.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from titan_tree.components.tree_attention import hopper, portable
from titan_tree.components.tree_attention.plan import PIECE, QUERIES, Plan
from titan_tree.data.layout import TreeLayout
from titan_tree.errors import UserError

KERNELS: dict[str, ModuleType] = {"triton": portable, "hopper": hopper}


def attention(
    q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, plan: Plan, kernels: str, deterministic: bool
) -> Tensor:
    """See ``TreeAttention.forward``. Raises UserError for a plan of another backend or of other sizes."""
    KERNELS[kernels].check(q)
    n_blocks, n_pieces = -(-q.shape[0] // QUERIES), -(-k.shape[0] // PIECE)
    if not isinstance(plan, Plan) or plan.pieces.shape != (n_blocks, n_pieces + 3):
        raise UserError(
            "TreeAttention: the layout was prepared for another backend or has changed; prepare it again"
        )
    metadata = [layout.subtree_end, layout.key_index, *plan]
    return tree_attention(q, k, v, metadata, kernels, deterministic)[0]


@torch.library.custom_op("titan_tree::tree_attention", mutates_args=())
def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, metadata: Sequence[Tensor], kernels: str, deterministic: bool
) -> tuple[Tensor, Tensor]:
    """o [N, H, D] and lse, see ``portable.empty_lse``. metadata: subtree_end, key_index and the plan."""
    end, column, *plan = metadata
    q, k, v, end = map(_as_rows, (q, k, v, end))
    with torch.cuda.device_of(q):
        return KERNELS[kernels].forward(q, k, v, end, column, Plan(*plan))


@torch.library.custom_op("titan_tree::tree_attention_backward", mutates_args=())
def tree_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, metadata: Sequence[Tensor],
    kernels: str, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq, dk, dv in the dtypes of q, k, v."""
    end, column, *plan = metadata
    do, q, k, v, end = map(_as_rows, (do, q, k, v, end))
    with torch.cuda.device_of(q):
        return KERNELS[kernels].backward(do, q, k, v, o, lse, end, column, Plan(*plan), deterministic)


def _as_rows(x: Tensor) -> Tensor:
    """x, or a copy of it: contiguous and at an address that is a multiple of 16, as TMA needs it."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@tree_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, metadata: Sequence[Tensor], kernels: str, deterministic: bool
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), portable.empty_lse(q)


@tree_attention_backward.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, metadata: Sequence[Tensor],
    kernels: str, deterministic: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, metadata, ctx.kernels, ctx.deterministic = inputs
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, o, lse, *metadata)


def _autograd(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    q, k, v, o, lse, *metadata = ctx.saved_tensors  # once: checkpointing recomputes at each access
    gradients = tree_attention_backward(do, q, k, v, o, lse, metadata, ctx.kernels, ctx.deterministic)
    return *gradients, [None] * len(metadata), None, None


tree_attention.register_autograd(_autograd, setup_context=_setup_context)
