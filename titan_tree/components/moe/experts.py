"""Routed experts: tokens sorted by expert, two grouped matrix products, and back to where they were.

The routing of ``N`` tokens is a permutation of their S = N k copies that puts the copies of each expert in a
row. Permuting and summing copies are each other's transpose, so neither direction needs atomic additions:
forward and backward are deterministic, no copy is ever dropped, and nothing waits for the device.

N tokens, k experts of each, S = N k copies, E experts, d hidden size, m intermediate size of an expert.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_tree.errors import UserError


class Dispatcher(Protocol):
    """Takes copies of tokens to the ranks that hold their experts, and back.

    Handed in (distributed/exchange.py): nothing here knows of ranks.
    """

    def __call__(
        self,
        mlps: Callable[[Tensor, Tensor, Tensor], Tensor],
        copies: Tensor,
        scale: Tensor,
        num_copies: Tensor,
    ) -> Tensor:
        """[S, d]: what ``mlps`` makes of copies [S, d] with scale [S, 1] on the ranks of their experts.

        mlps: gets copies, scale and ends [e] of what has arrived for the e experts here, in a row by expert.
        num_copies: [E] of the S copies for each expert, in whose order they stand.
        """


def expert_mlps(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    expert: Tensor,
    weight: Tensor,
    num_copies: Tensor,
    dispatcher: Dispatcher | None = None,
) -> Tensor:
    """Sum over each token's experts of weight times SwiGLU, [N, d] in x's dtype.

    The weight multiplies an expert's hidden layer, which is narrower than its output: the same sum.

    Args:
        x: [N, d]. gate_up: [E, 2 m, d], rows of the gate first. down: [E, d, m]. All of x's dtype.
        expert: [N, k] int64, all different in a row.
        weight: [N, k], any dtype; the product with the hidden layer is rounded to x's.
        num_copies: [E] int64: how often each expert stands in ``expert``.
        dispatcher: where other ranks hold part of the experts; the weights are then of the e that are here.
    Raises:
        UserError: in bf16 on a GPU, sizes that are no multiples of 8.
    """
    order = expert.flatten().argsort(stable=True)
    inverse = order.argsort()
    copies = _Spread.apply(x, order, inverse, expert.shape[1])
    scale = _Spread.apply(weight.reshape(-1, 1), order, inverse, 1)

    def mlps(copies: Tensor, scale: Tensor, ends: Tensor) -> Tensor:
        gate, up = grouped_linear(copies, gate_up, ends).chunk(2, dim=-1)
        hidden = (F.silu(gate) * up * scale).to(x.dtype)
        return grouped_linear(hidden, down, ends)

    if dispatcher is None:
        y = mlps(copies, scale, num_copies.cumsum(0).to(torch.int32))
    else:
        y = dispatcher(mlps, copies, scale, num_copies)
    return _Gather.apply(y, order, inverse, expert.shape[1])


class _Spread(torch.autograd.Function):
    """[N, d] -> [N k, d]: k copies of every row, permuted. ``_Gather`` is the transpose."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(inverse)
        ctx.k = k
        return x[order // k]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (inverse,) = ctx.saved_tensors
        return _sum_copies(grad, inverse, ctx.k), None, None, None


class _Gather(torch.autograd.Function):
    """[N k, d] -> [N, d]: the sum of every row's k copies."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, order: Tensor, inverse: Tensor, k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.k = k
        return _sum_copies(y, inverse, k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (order,) = ctx.saved_tensors
        return grad[order // ctx.k], None, None, None


def _sum_copies(copies: Tensor, inverse: Tensor, k: int) -> Tensor:
    """[N k, d] -> [N, d], summed in fp32 at least, one copy of all rows after another: no gathered copy is
    ever stored, and compiled it is one pass over memory."""
    total: Tensor | None = None
    for rows in inverse.view(-1, k).unbind(1):
        one = copies[rows].to(torch.promote_types(copies.dtype, torch.float32))
        total = one if total is None else total + one
    assert total is not None
    return total.to(copies.dtype)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """[S, n]: rows ends[e - 1] to ends[e] of x [S, c] times weight[e].T, for weight [E, n, c].

    Experts without rows have zero gradients, not none. In bf16 on a GPU this is PyTorch's grouped matrix
    product. It takes no float64 and compiles in no float32, so everything else, on a CPU and for
    comparisons on a GPU, multiplies expert by expert; on a GPU that waits for ``ends``.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        return grouped_mm(x, weight, ends)
    return linear_by_expert(x, weight, ends)


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """``grouped_linear`` in one kernel, whose rows must be multiples of 16 bytes."""
    if x.shape[1] % 8 or weight.shape[1] % 8:
        raise UserError(
            "experts: expected hidden_size and moe_intermediate_size to be multiples of 8 in bfloat16 on a "
            f"GPU, got {weight.shape[2]} and {weight.shape[1]} for the sides of a matrix"
        )
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)


# Operators, because torch.compile would make one graph per distribution of tokens over experts.


@torch.library.custom_op("titan_tree::linear_by_expert", mutates_args=())
def linear_by_expert(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1])
    for e, rows in _rows(ends):
        out[rows] = x[rows] @ weight[e].t()
    return out


@torch.library.custom_op("titan_tree::linear_by_expert_backward", mutates_args=())
def linear_by_expert_backward(grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    dx, dweight = torch.empty_like(x), torch.empty_like(weight)
    for e, rows in _rows(ends):
        dx[rows] = grad[rows] @ weight[e]
        dweight[e] = grad[rows].t() @ x[rows]
    return dx, dweight


def _rows(ends: Tensor) -> list[tuple[int, slice]]:
    return [(e, slice(*rows)) for e, rows in enumerate(pairwise([0, *ends.tolist()]))]


@linear_by_expert.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@linear_by_expert_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, ends: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(weight)


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return *linear_by_expert_backward(grad, *ctx.saved_tensors), None


linear_by_expert.register_autograd(_autograd, setup_context=_setup_context)
