"""The operator titan_tree::tree_attention, for backends that have kernels of their own (``KernelBackend``).

Autograd, torch.compile and activation checkpointing see this operator and nothing below it. As in
FlashAttention, the backward pass reads q, k, v, o and lse, the log-sum-exp of each row's scores. A partition
saves its own k and v only: keys and values of its ancestors are gathered a second time (``context.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from titan_tree.components.tree_attention import context as columns
from titan_tree.components.tree_attention.plan import PIECE, QUERIES, Plan, empty_lse
from titan_tree.errors import UserError
from titan_tree.registry import ATTENTION_BACKENDS
from titan_tree.tree.layout import TreeLayout


def attention(
    backend: str, q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, layout: TreeLayout, plan: Plan,
    deterministic: bool,
) -> Tensor:  # fmt: skip
    """Runs ``AttentionBackend.attention`` with the forward and backward kernels of the backend ``backend``.

    Raises:
        UserError: the plan belongs to another backend or to a layout of other sizes.
    """
    n_blocks, n_pieces = -(-q.shape[0] // QUERIES), -(-layout.subtree_end.shape[0] // PIECE)
    if not isinstance(plan, Plan) or plan.pieces.shape != (n_blocks, n_pieces + 3):
        raise UserError(
            "TreeAttention: the layout was prepared for another backend or has changed; prepare it again"
        )
    metadata = [layout.subtree_end, layout.key_index, *plan]
    source = None if context is None else layout.key_source
    return tree_attention(q, k, v, context, source, metadata, backend, deterministic)[0]


@torch.library.custom_op("titan_tree::tree_attention", mutates_args=())
def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, source: Tensor | None,
    metadata: Sequence[Tensor], backend: str, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns o [N, H, D] and lse, see ``plan.empty_lse``. metadata: subtree_end, key_index and the plan."""
    end, column, *plan = metadata
    q, k, v, end = map(_for_tma, (q, k, v, end))
    with torch.cuda.device_of(q):
        if context is not None and source is not None:
            k, v = columns.gather(k, v, context, source)
        return ATTENTION_BACKENDS[backend].forward(q, k, v, end, column, Plan(*plan))


@torch.library.custom_op("titan_tree::tree_attention_backward", mutates_args=())
def tree_attention_backward(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, source: Tensor | None, o: Tensor,
    lse: Tensor, metadata: Sequence[Tensor], backend: str, deterministic: bool,
) -> list[Tensor]:  # fmt: skip
    """Returns dq, dk, dv and, with a context, its gradient; in the dtypes of q, k, v."""
    end, column, *plan = metadata
    do, q, k, v, end = map(_for_tma, (do, q, k, v, end))
    with torch.cuda.device_of(q):
        num_own = len(k)
        if context is not None and source is not None:
            k, v = columns.gather(k, v, context, source)
        inputs = do, q, k, v, o, lse, end, column, Plan(*plan), deterministic
        dq, dk, dv = ATTENTION_BACKENDS[backend].backward(*inputs)
        if context is None or source is None:
            return [dq, dk, dv]
        return [dq, *columns.scatter(dk, dv, context, source, num_own)]


def _for_tma(x: Tensor) -> Tensor:
    """Returns x contiguous and aligned to 16 bytes, as TMA requires; copies it if needed."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@tree_attention.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, source: Tensor | None,
    metadata: Sequence[Tensor], backend: str, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), empty_lse(q)


@tree_attention_backward.register_fake
def _(
    do: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, source: Tensor | None, o: Tensor,
    lse: Tensor, metadata: Sequence[Tensor], backend: str, deterministic: bool,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape) for x in (q, k, v, context) if x is not None]


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, context, source, metadata, ctx.backend, ctx.deterministic = inputs
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, context, source, o, lse, *metadata)


def _autograd(ctx: Any, do: Tensor, dlse: Tensor) -> tuple[Any, ...]:
    # Read saved_tensors once: with activation checkpointing, every access recomputes the forward pass.
    q, k, v, context, source, o, lse, *metadata = ctx.saved_tensors
    dq, dk, dv, *dcontext = tree_attention_backward(
        do, q, k, v, context, source, o, lse, metadata, ctx.backend, ctx.deterministic
    )
    return dq, dk, dv, *(dcontext or [None]), None, [None] * len(metadata), None, None


tree_attention.register_autograd(_autograd, setup_context=_setup_context)
