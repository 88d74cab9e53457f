"""The experts of one rank, computed while tokens travel (exchange.py).

``sharded_experts`` computes the first half of the tokens while the second half arrives, and the second half
while the results of the first one return. In the backward pass, gradients travel the same way in the opposite
direction. The results of each half return while the gradients of the weights are computed.

The backward pass needs only what arrived. It repeats the first matrix product and SwiGLU, 2 of the 11 units
of work that experts do in a step. That saves 4 m bytes per copy in bf16, more than all that is kept.

Letters: as in exchange.py, and m intermediate size of an expert.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_tree.components.moe.experts import grouped_linear, grouped_outer
from titan_tree.components.moe.kernels import sum_rows, swiglu, swiglu_backward
from titan_tree.distributed.exchange import (
    Arrived,
    Half,
    count_rows,
    dispatch,
    halves,
    start_all_to_all,
    waits,
)


class ShardedExperts:
    """The ``Dispatcher`` of a layer whose experts are sharded over the ranks of ``group``. Collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group.group_name

    def count(self, is_chosen: Tensor) -> tuple[Tensor, Tensor]:
        return count_rows(is_chosen, self.group)

    def __call__(
        self,
        x: Tensor,
        gate_up: Tensor,
        down: Tensor,
        expert: Tensor,
        weight: Tensor,
        counted: tuple[Tensor, Tensor],
    ) -> Tensor:
        arrived = dispatch(x.detach(), weight.detach(), expert, *counted, self.group)
        return sharded_experts(x, weight, gate_up, down, list(arrived), counted[1], self.group)


# ``arrived`` is ``Arrived``, because operators know no named tuples.


@torch.library.custom_op("titan_tree::sharded_experts", mutates_args=())
def sharded_experts(
    x: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, arrived: list[Tensor], sizes: Tensor, group: str
) -> Tensor:
    """Returns the weighted sum of each token's experts, SwiGLU networks, as [N, d] in x's dtype.

    Args:
        x, weight: what ``dispatch`` sent. Only their gradients are computed here.
        gate_up: [e, 2 m, d] in x's dtype, for each expert of this rank the rows of the gate first.
        down: [e, d, m] in x's dtype.
        arrived, sizes: from ``dispatch`` and ``count_rows``.
        group: name of the process group.
    """
    a = Arrived(*arrived)
    returned = x.new_empty(len(a.token), x.shape[1])
    returns = []
    for half, ends, wait in zip(halves(sizes), a.ends, waits(a.rows), strict=True):
        wait()
        y = a.rows[half.arrived]
        if len(y):
            h = grouped_linear(y.index_select(0, _source(a, half)), gate_up, ends)
            y = grouped_linear(swiglu(h, a.scale[half.copies]), down, ends)
            y = sum_rows(y, a.copy[half.arrived])
        returns.append(start_all_to_all(returned[half.own], y, half.sent, half.received, group))
    for wait in returns:
        wait()
    return sum_rows(returned, a.row)


@torch.library.custom_op("titan_tree::sharded_experts_backward", mutates_args=())
def sharded_experts_backward(
    grad: Tensor,
    gate_up: Tensor,
    down: Tensor,
    arrived: list[Tensor],
    sizes: Tensor,
    group: str,
    trains_experts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns the gradients of x, weight, gate_up and down for the gradient [N, d] of ``sharded_experts``.

    Without ``trains_experts``, those of gate_up and down are empty tensors.
    """
    a, parts = Arrived(*arrived), halves(sizes)
    top_k = a.copy.shape[1]
    dy = torch.empty_like(a.rows)
    gradients_arrive = [
        start_all_to_all(
            dy[half.arrived], grad.index_select(0, a.token[half.own]), half.received, half.sent, group
        )
        for half in parts
    ]
    dx, dweight = grad.new_empty(len(a.token), grad.shape[1]), a.scale.new_empty(len(a.token), top_k)
    dslots = a.scale.new_zeros(len(dy), top_k)
    dexperts: list[Tensor] = []  # of gate_up and down
    returns = []
    for half, ends, *arrivals in zip(parts, a.ends, waits(a.rows), gradients_arrive, strict=True):
        for wait in arrivals:
            wait()
        drows = dy[half.arrived]
        factors: list[tuple[Tensor, Tensor]] = []
        if len(drows):
            dcopies, dscale, factors = _backward_of_half(a, half, ends, drows, gate_up, down)
            drows = sum_rows(dcopies, a.copy[half.arrived])
            dslots.view(-1, 1).index_copy_(0, a.slot[half.copies].long(), dscale)
        for out, rows in ((dx, drows), (dweight, dslots[half.arrived])):
            returns.append(start_all_to_all(out[half.own], rows, half.sent, half.received, group))
        if trains_experts and factors:
            products = [grouped_outer(left, right, ends) for left, right in factors]
            dexperts = (
                [total.add_(new) for total, new in zip(dexperts, products, strict=True)]
                if dexperts
                else products
            )
    for wait in returns:
        wait()
    if not dexperts:
        dexperts = [torch.zeros_like(w) if trains_experts else w.new_empty(0) for w in (gate_up, down)]
    dgate_up, ddown = dexperts
    return sum_rows(dx, a.row), sum_rows(dweight, a.row), dgate_up, ddown


def _source(a: Arrived, half: Half) -> Tensor:
    """Returns for each copy of a half the row of the half that it is a copy of."""
    return a.slot[half.copies] // a.copy.shape[1] - half.arrived.start


def _backward_of_half(
    a: Arrived, half: Half, ends: Tensor, drows: Tensor, gate_up: Tensor, down: Tensor
) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
    """Computes gradients from those of the rows of a half.

    Returns:
        The gradients of the copies and of their scale, and the arguments with which ``grouped_outer`` returns
        those of gate_up and down.
    """
    source, scale = _source(a, half), a.scale[half.copies]
    copies, dy = a.rows[half.arrived].index_select(0, source), drows.index_select(0, source)
    h = grouped_linear(copies, gate_up, ends)
    dhidden = grouped_linear(dy, down.transpose(1, 2), ends)
    hidden, dh, dscale = swiglu_backward(h, scale, dhidden)
    return grouped_linear(dh, gate_up.transpose(1, 2), ends), dscale, [(dh, copies), (dy, hidden)]


@sharded_experts.register_fake
def _(
    x: Tensor, weight: Tensor, gate_up: Tensor, down: Tensor, arrived: list[Tensor], sizes: Tensor, group: str
) -> Tensor:
    return torch.empty_like(x)


@sharded_experts_backward.register_fake
def _(
    grad: Tensor,
    gate_up: Tensor,
    down: Tensor,
    arrived: list[Tensor],
    sizes: Tensor,
    group: str,
    trains_experts: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, scale, _, copy, *_ = arrived
    dgate_up, ddown = (torch.empty_like(w) if trains_experts else w.new_empty(0) for w in (gate_up, down))
    return torch.empty_like(grad), scale.new_empty(grad.shape[0], copy.shape[1]), dgate_up, ddown


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, gate_up, down, arrived, sizes, ctx.group = inputs
    ctx.save_for_backward(gate_up, down, sizes, *arrived)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    gate_up, down, sizes, *arrived = ctx.saved_tensors
    trains_experts = any(ctx.needs_input_grad[2:4])
    dx, dweight, dgate_up, ddown = sharded_experts_backward(
        grad.contiguous(), gate_up, down, arrived, sizes, ctx.group, trains_experts
    )
    dexperts = (dgate_up, ddown) if trains_experts else (None, None)
    return dx, dweight, *dexperts, [None] * len(arrived), None, None


sharded_experts.register_autograd(_autograd, setup_context=_setup_context)
