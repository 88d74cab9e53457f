"""The operator titan_tree::tree_attention, for backends that have kernels of their own (``KernelBackend``).

Autograd, torch.compile and activation checkpointing see this operator and nothing below it. As in
FlashAttention, the backward pass reads q, k, v, o and lse, the log-sum-exp of each row's scores. A partition
saves its own k and v only: keys and values of its ancestors are gathered a second time (``context.py``).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

import titan_tree.components.tree_attention.context as columns
from titan_tree.components.backends import ATTENTION_BACKENDS, KernelBackend, Scoring
from titan_tree.components.operators import as_operator
from titan_tree.components.tree_attention.block_lists import (
    KEYS,
    QUERIES,
    BlockLists,
    WindowLists,
    empty_lse,
    lists_of,
)
from titan_tree.errors import UserError
from titan_tree.tree.layout import TreeLayout


def plain_only(q: Tensor, v: Tensor, scoring: Scoring) -> str | None:
    """Returns a reason to refuse everything but plain softmax over heads of one size, or None."""
    if given := [name for name, value in scoring._asdict().items() if value is not None]:
        return f"has no {' and '.join(given)}"
    if v.shape[-1] != q.shape[-1]:
        return f"expected values as wide as queries, {q.shape[-1]}, got {v.shape[-1]}"
    return None


def attention(
    backend: str, q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, layout: TreeLayout,
    lists: BlockLists | WindowLists, scale: float, scoring: Scoring, deterministic: bool,
) -> Tensor:  # fmt: skip
    """Runs ``AttentionBackend.attention`` with the forward and backward kernels of the backend ``backend``.

    Raises:
        UserError: the lists belong to another backend or to a layout of other sizes.
    """
    n_blocks = -(-q.shape[0] // QUERIES), -(-layout.subtree_end.shape[0] // KEYS)
    if not isinstance(lists, BlockLists | WindowLists) or lists.key_blocks.shape != n_blocks:
        raise UserError(
            "TreeAttention: the layout was prepared for another backend or has changed; prepare it again"
        )
    source = None if context is None else layout.key_source
    tensors = q, k, v, context, scoring.sinks, source, layout.subtree_end, layout.key_index, *lists
    return _TreeAttention.apply((backend, scale, scoring.softcap, deterministic), *tensors)


class _TreeAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, options: tuple[Any, ...], *tensors: Tensor | None) -> Tensor:
        o, lse = tree_attention(*tensors[:6], tensors[6:], *options)
        ctx.options = options
        ctx.save_for_backward(o, lse, *tensors)
        return o

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        # Read saved_tensors once: with activation checkpointing, every access recomputes the forward pass.
        o, lse, *tensors = ctx.saved_tensors
        gradients = iter(tree_attention_backward(do, o, lse, *tensors[:6], tensors[6:], *ctx.options))
        of_inputs = [None if x is None else next(gradients) for x in tensors[:5]]
        return None, *of_inputs, *[None] * len(tensors[5:])


@as_operator
def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, sinks: Tensor | None, source: Tensor | None,
    metadata: Sequence[Tensor], backend: str, scale: float, softcap: float | None, deterministic: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Returns o [N, H, Dv] and lse, see ``empty_lse``. metadata: subtree_end, key_index, block lists."""
    end, column, *lists = metadata
    q, k, v, end = map(_for_tma, (q, k, v, end))
    with torch.cuda.device_of(q):
        if context is not None and source is not None:
            k, v = columns.gather(k, v, context, source)
        options = lists_of(lists), scale, Scoring(softcap=softcap, sinks=sinks)
        return _kernels(backend).forward(q, k, v, end, column, *options)


@as_operator
def tree_attention_backward(
    do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Tensor | None,
    sinks: Tensor | None, source: Tensor | None, metadata: Sequence[Tensor], backend: str, scale: float,
    softcap: float | None, deterministic: bool,
) -> list[Tensor]:  # fmt: skip
    """Returns the gradients of q, k, v and of context and sinks, if given, in the dtypes of these."""
    end, column, *lists = metadata
    do, q, k, v, end = map(_for_tma, (do, q, k, v, end))
    with torch.cuda.device_of(q):
        num_own = len(k)
        if context is not None and source is not None:
            k, v = columns.gather(k, v, context, source)
        options = lists_of(lists), scale, Scoring(softcap=softcap, sinks=sinks), deterministic
        inputs = do, q, k, v, o, lse, end, column, *options
        dq, dk, dv, *dsinks = _kernels(backend).backward(*inputs)
        if context is None or source is None:
            return [dq, dk, dv, *dsinks]
        return [dq, *columns.scatter(dk, dv, context, source, num_own), *dsinks]


def _kernels(backend: str) -> KernelBackend:
    return cast(KernelBackend, ATTENTION_BACKENDS[backend])


def _for_tma(x: Tensor) -> Tensor:
    """Returns x contiguous and aligned to 16 bytes, as TMA requires; copies it if needed."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x


@torch.library.register_fake("titan_tree::tree_attention")
def _(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    return q.new_empty(*q.shape[:2], v.shape[2]), empty_lse(q)


@torch.library.register_fake("titan_tree::tree_attention_backward")
def _(
    do: Tensor, o: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Tensor | None,
    sinks: Tensor | None, *_: Any,
) -> list[Tensor]:  # fmt: skip
    return [x.new_empty(x.shape) for x in (q, k, v, context, sinks) if x is not None]
