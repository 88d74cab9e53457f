"""Routed experts: sort token copies by expert, two grouped matrix products, and sum each token's copies.

Routing makes S = N k copies of N tokens and sorts them by expert. Making copies and summing them are each
other's transpose, so neither direction needs atomic additions. Both passes are deterministic and drop no
copy. In bf16 on a GPU, the host never waits for the device.

N tokens, k experts of a token, S = N k copies, E experts, d hidden size, m intermediate size of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_tree.components.moe.kernels import copy_rows, sum_rows, swiglu, swiglu_backward
from titan_tree.errors import UserError


class ExpertWeight(NamedTuple):
    """A weight of all experts, and the factors of LoRA's update, in the dtype of the computation."""

    base: Tensor  # [E, n, c]
    a: Tensor | None = None  # [E, rank, c]
    b: Tensor | None = None  # [E, n, rank], times the scaling

    def linear(self, x: Tensor, ends: Tensor) -> Tensor:
        """Returns ``grouped_linear`` of x [S, c] with the updated weight: [S, n]."""
        out = grouped_linear(x, self.base, ends)
        if self.a is None or self.b is None:
            return out
        return out + grouped_linear(grouped_linear(x, self.a, ends), self.b, ends)

    def transposed(self, dy: Tensor, ends: Tensor) -> Tensor:
        """Returns the gradient [S, c] of x for the gradient [S, n] of ``linear``."""
        dx = grouped_linear(dy, self.base.transpose(1, 2), ends)
        if self.a is None or self.b is None:
            return dx
        inner = grouped_linear(dy, self.b.transpose(1, 2), ends)
        return dx + grouped_linear(inner, self.a.transpose(1, 2), ends)

    def gradients(self, x: Tensor, dy: Tensor, ends: Tensor, is_trained: Sequence[bool]) -> list[Tensor]:
        """Returns the gradients of those of base, a and b that ``is_trained`` selects."""
        gradients = []
        if is_trained[0]:
            gradients.append(grouped_outer(dy, x, ends))
        if is_trained[1] and self.b is not None:
            gradients.append(grouped_outer(grouped_linear(dy, self.b.transpose(1, 2), ends), x, ends))
        if is_trained[2] and self.a is not None:
            gradients.append(grouped_outer(dy, grouped_linear(x, self.a, ends), ends))
        return gradients


class Dispatcher(Protocol):
    """Computes experts that are sharded over ranks. All ranks make the same calls in the same order.

    distributed/experts/sharded_experts.py implements it, so that this package does not depend on ranks.
    """

    def __call__(
        self, x: Tensor, gate_up: ExpertWeight, down: ExpertWeight, expert: Tensor, weight: Tensor
    ) -> Tensor:
        """Returns what ``expert_mlps`` returns. ``gate_up`` and ``down`` hold only this rank's experts."""


def expert_mlps(
    x: Tensor,
    gate_up: ExpertWeight,
    down: ExpertWeight,
    expert: Tensor,
    weight: Tensor,
    num_copies: Tensor,
) -> Tensor:
    """Returns the weighted sum of each token's experts, SwiGLU networks, as [N, d] in x's dtype.

    The weight multiplies an expert's hidden layer instead of its output. The sum is the same, and the hidden
    layer is narrower.

    Args:
        x: [N, d].
        gate_up: [E, 2 m, d] in x's dtype, for each expert the rows of the gate first.
        down: [E, d, m] in x's dtype.
        expert: [N, k] int64, different experts in each row.
        weight: [N, k] fp32, or float64 if x is.
        num_copies: [E] int64, how often each expert occurs in ``expert``.
    Raises:
        UserError: d, m or the rank of an update is not a multiple of 8, for bf16 on a GPU.
    """
    index = sort_copies(expert)
    copies = Spread.apply(x, index)
    ends = num_copies.cumsum(0).to(torch.int32)
    h = gate_up.linear(copies, ends)
    y = _SwiGLULinear.apply(h, spread_values(weight, index).unsqueeze(1), ends, *down)
    return Gather.apply(y, index)


def sort_copies(expert: Tensor) -> Tensor:
    """Returns the row of each copy, if copies are sorted by expert and then by token: [N, k] int64.

    Args:
        expert: [N, k] integers below 2^15.
    """
    order = expert.flatten().to(torch.int16).argsort(stable=True)  # a narrow key sorts in fewer passes
    rows = torch.arange(len(order), device=order.device)
    return torch.empty_like(order).scatter(0, order, rows).view(expert.shape)


def spread_values(values: Tensor, index: Tensor) -> Tensor:
    """Returns the values [N, k] of copies in the order of ``index`` [N, k]: [N k]. Differentiable."""
    return values.new_empty(index.numel()).scatter(0, index.flatten(), values.flatten())


class Spread(torch.autograd.Function):
    """Puts each row at the k places that ``index`` [N, k] names: [N, d] -> [N k, d]."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return copy_rows(x, index, index.numel())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return sum_rows(grad, *ctx.saved_tensors), None


class Gather(torch.autograd.Function):
    """Sums the k rows that ``index`` [N, k] names, the transpose of ``Spread``: [N k, d] -> [N, d]."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, index: Tensor) -> Tensor:
        ctx.save_for_backward(index)
        return sum_rows(y, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        return copy_rows(grad, index, index.numel()), None


class _SwiGLULinear(torch.autograd.Function):
    """``ExpertWeight.linear`` of the result of ``swiglu``, which the backward pass computes again."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, scale: Tensor, ends: Tensor, base: Tensor, a: Tensor | None, b: Tensor | None
    ) -> Tensor:
        ctx.save_for_backward(h, scale, ends, base, a, b)
        return ExpertWeight(base, a, b).linear(swiglu(h, scale), ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, scale, ends, *weights = ctx.saved_tensors
        down, is_trained = ExpertWeight(*weights), ctx.needs_input_grad[3:]
        hidden, dh, dscale = swiglu_backward(h, scale, down.transposed(dy, ends))
        gradients = iter(down.gradients(hidden, dy, ends, is_trained))
        return dh, dscale, None, *(next(gradients) if trained else None for trained in is_trained)


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


def grouped_outer(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    """Returns [E, n, c]: the gradient of ``grouped_linear`` for weight.

    Args:
        left: [S, n], the gradient of the result.
        right: [S, c], the first argument of ``grouped_linear``.
        ends: see ``grouped_linear``.
    """
    if left.is_cuda and left.dtype == torch.bfloat16:
        return F.grouped_mm(left.t(), right, offs=ends)
    return outer_by_expert(left, right, ends)


def grouped_mm(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """Computes ``grouped_linear`` in one kernel, which needs rows of a multiple of 16 bytes."""
    if x.shape[1] % 8 or weight.shape[1] % 8:
        raise UserError(
            "experts: expected hidden_size, moe_intermediate_size and lora.rank to be multiples of 8 in "
            f"bfloat16 on a GPU, got a matrix with sides {weight.shape[2]} and {weight.shape[1]}"
        )
    return F.grouped_mm(x, weight.transpose(-2, -1), offs=ends)


# These are operators, because torch.compile would trace one graph per distribution of tokens over experts.


@torch.library.custom_op("titan_tree::linear_by_expert", mutates_args=())
def linear_by_expert(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    out = x.new_empty(x.shape[0], weight.shape[1])
    for e, rows in _rows(ends):
        out[rows] = x[rows] @ weight[e].t()
    return out


@torch.library.custom_op("titan_tree::outer_by_expert", mutates_args=())
def outer_by_expert(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    out = left.new_empty(len(ends), left.shape[1], right.shape[1])
    for e, rows in _rows(ends):
        out[e] = left[rows].t() @ right[rows]
    return out


def _rows(ends: Tensor) -> list[tuple[int, slice]]:
    return [(e, slice(*rows)) for e, rows in enumerate(pairwise([0, *ends.tolist()]))]


@linear_by_expert.register_fake
def _(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@outer_by_expert.register_fake
def _(left: Tensor, right: Tensor, ends: Tensor) -> Tensor:
    return left.new_empty(ends.shape[0], left.shape[1], right.shape[1])


def _setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, ends = ctx.saved_tensors
    dx = linear_by_expert(grad, weight.transpose(1, 2), ends)
    return dx, outer_by_expert(grad, x, ends) if ctx.needs_input_grad[1] else None, None


linear_by_expert.register_autograd(_autograd, setup_context=_setup_context)
