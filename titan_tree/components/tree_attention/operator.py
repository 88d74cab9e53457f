"""The operator tree_attention: all that autograd, torch.compile and activation checkpointing need to know.

It computes with one of two sets of kernels: "triton" (``triton_kernels``) or "hopper". Saved for the backward are
q, k, v, o and lse, as FlashAttention does; of a partition its own k and v only (``context``).
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from titan_tree.components.tree_attention import context as rows
from titan_tree.components.tree_attention import hopper, triton_kernels
from titan_tree.components.tree_attention.plan import PIECE, QUERIES, Plan
from titan_tree.errors import UserError
from titan_tree.tree.layout import TreeLayout

KERNELS: dict[str, ModuleType] = {"triton": triton_kernels, "hopper": hopper}


def attention(
    q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, layout: TreeLayout, plan: Plan, kernels: str,
    deterministic: bool,
) -> Tensor:  # fmt: skip
    """See ``TreeAttention.forward``. Raises UserError for a plan of another backend or of other sizes."""
    KERNELS[kernels].check(q)
    n_blocks, n_pieces = -(-q.shape[0] // QUERIES), -(-layout.subtree_end.shape[0] // PIECE)
    if not isinstance(plan, Plan) or plan.pieces.shape != (n_blocks, n_pieces + 3):
        raise UserError(
            "TreeAttention: the layout was prepared for another backend or has changed; prepare it again"
        )
    metadata = [layout.subtree_end, layout.key_index, *plan]
    source = None if context is None else layout.key_source
    return tree_attention(q, k, v, context, source, metadata, kernels, deterministic)[0]


@torch.library.custom_op("titan_tree::tree_attention", mutates_args=())
def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, source: Tensor | None,
    metadata: Sequence[Tensor], kernels: str, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """o [N, H, D] and lse, see ``triton_kernels.empty_lse``. metadata: subtree_end, key_index and the plan."""
    end, column, *plan = metadata
    q, k, v, end = map(_as_rows, (q, k, v, end))
    with torch.cuda.device_of(q):
        if context is not None and source is not None:
            k, v = rows.gather(k, v, context, source)
        return KERNELS[kernels].forward(q, k, v, end, column, Plan(*plan))


@torch.library.custom_op("titan_tree::tree_attention_backward", mutates_args=())
def tree_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, source: Tensor | None, o: Tensor,
    lse: Tensor, metadata: Sequence[Tensor], kernels: str, deterministic: bool,
) -> list[Tensor]:  # fmt: skip
    """dq, dk, dv and, where there is a context, its gradient, in the dtypes of q, k, v."""
    end, column, *plan = metadata
    do, q, k, v, end = map(_as_rows, (do, q, k, v, end))
    with torch.cuda.device_of(q):
        num_own = len(k)
        if context is not None and source is not None:
            k, v = rows.gather(k, v, context, source)
        inputs = do, q, k, v, o, lse, end, column, Plan(*plan), deterministic
        dq, dk, dv = KERNELS[kernels].backward(*inputs)
        if context is None or source is None:
            return [dq, dk, dv]
        return [dq, *rows.scatter(dk, dv, context, source, num_own)]


def _as_rows(x: Tensor) -> Tensor:
    """x, or a copy of it: contiguous and at an address that is a multiple of 16, as TMA needs it."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@tree_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, source: Tensor | None,
    metadata: Sequence[Tensor], kernels: str, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), triton_kernels.empty_lse(q)


@tree_attention_backward.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, source: Tensor | None, o: Tensor,
    lse: Tensor, metadata: Sequence[Tensor], kernels: str, deterministic: bool,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape) for x in (q, k, v, context) if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, context, source, metadata, ctx.kernels, ctx.deterministic = inputs
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, context, source, o, lse, *metadata)


def _autograd(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    # Once: checkpointing recomputes at each access.
    q, k, v, context, source, o, lse, *metadata = ctx.saved_tensors
    dq, dk, dv, *dcontext = tree_attention_backward(
        do, q, k, v, context, source, o, lse, metadata, ctx.kernels, ctx.deterministic
    )
    return dq, dk, dv, *(dcontext or [None]), None, [None] * len(metadata), None, None


tree_attention.register_autograd(_autograd, setup_context=_setup_context)
