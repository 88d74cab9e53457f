"""Routed experts: sort token copies by expert, two grouped matrix products, and sum each token's copies.

Routing makes S = N k copies of N tokens and sorts them by expert. Making copies and summing them are each
other's transpose, so neither direction needs atomic additions. Both passes are deterministic and drop no
copy. In bf16 on a GPU, the host never waits for the device, unless ranks exchange copies.

N tokens, k experts of a token, S = N k copies, E experts, d hidden size, m intermediate size of an expert.
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
    """Sends token copies to the ranks that hold their experts, and returns the results.

    distributed/exchange.py implements it, so that this package does not depend on ranks.
    """

    def __call__(
        self,
        mlps: Callable[[Tensor, Tensor, Tensor], Tensor],
        copies: Tensor,
        scale: Tensor,
        num_copies: Tensor,
    ) -> Tensor:
        """Returns [S, d], the outputs of the experts for all copies.

        Args:
            mlps: computes this rank's e experts on the copies that it received. Its arguments are copies and
                scale, sorted by expert, and the exclusive end [e] of each expert's rows.
            copies: [S, d], sorted by expert.
            scale: [S, 1], the weight of each copy.
            num_copies: [E], copies per expert.
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
    """Returns the weighted sum of each token's experts, SwiGLU networks, as [N, d] in x's dtype.

    The weight multiplies an expert's hidden layer instead of its output. The sum is the same, and the hidden
    layer is narrower.

    Args:
        x: [N, d].
        gate_up: [E, 2 m, d] in x's dtype, for each expert the rows of the gate first.
        down: [E, d, m] in x's dtype.
        expert: [N, k] int64, different experts in each row.
        weight: [N, k], any dtype; its product with the hidden layer is rounded to x's dtype.
        num_copies: [E] int64, how often each expert occurs in ``expert``.
        dispatcher: with expert parallelism, sends copies to other ranks; ``gate_up`` and ``down`` then hold
            only this rank's experts.
    Raises:
        UserError: in bf16 on a GPU, d or m is not a multiple of 8.
    """
    order = expert.flatten().argsort(stable=True)
    inverse = inverse_permutation(order)
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


def inverse_permutation(order: Tensor) -> Tensor:
    """Returns [n] int64 with ``inverse[order] = arange(n)`` for a permutation [n] int64, without sorting."""
    return torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))


class _Spread(torch.autograd.Function):
    """Makes k copies of every row and permutes them: [N, d] -> [N k, d]. ``_Gather`` is its transpose."""

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
    """Sums the k copies of every row: [N k, d] -> [N, d]."""

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
    """Sums the k copies of every row in fp32 or wider: [N k, d] -> [N, d].

    It adds one copy of all rows at a time, so no gathered [N, k, d] is stored. Compiled, it is one pass over
    memory.
    """
    total: Tensor | None = None
    for rows in inverse.view(-1, k).unbind(1):
        one = copies[rows].to(torch.promote_types(copies.dtype, torch.float32))
        total = one if total is None else total + one
    assert total is not None
    return total.to(copies.dtype)


def grouped_linear(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Returns [S, n]: rows ends[e - 1] to ends[e] of x times weight[e].T, for every expert e.

    The gradient of an expert without rows is zero. In bf16 on a GPU, this is PyTorch's grouped matrix
    product, which does not support float64 and does not compile in float32. Everything else multiplies expert
    by expert, which waits for ``ends`` on a GPU.

    Args:
        x: [S, c], sorted by expert.
        weight: [E, n, c].
        ends: [E] int32, the exclusive end of each expert's rows.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        return grouped_mm(x, weight, ends)
    return linear_by_expert(x, weight, ends)


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Computes ``grouped_linear`` in one kernel, which needs rows of a multiple of 16 bytes."""
    if x.shape[1] % 8 or weight.shape[1] % 8:
        raise UserError(
            "experts: expected hidden_size and moe_intermediate_size to be multiples of 8 in bfloat16 on a "
            f"GPU, got a matrix with sides {weight.shape[2]} and {weight.shape[1]}"
        )
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)


# These are operators, because torch.compile would trace one graph per distribution of tokens over experts.


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
