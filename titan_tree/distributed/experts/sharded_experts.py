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

from titan_tree.components.moe.experts import ExpertWeight
from titan_tree.components.moe.kernels import copy_rows, sum_rows, swiglu, swiglu_backward
from titan_tree.distributed.experts.exchange import (
    Arrived,
    TokenHalf,
    count_rows,
    dispatch,
    halves,
    start_all_to_all,
    waits,
)

# For the matrix product of a weight: its inputs, and the gradients of its outputs.
Product = tuple[Tensor, Tensor]


class ShardedExperts:
    """The ``Dispatcher`` of a layer whose experts are sharded over the ranks of ``group``. Collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group.group_name

    def count(self, is_chosen: Tensor) -> tuple[Tensor, Tensor]:
        return count_rows(is_chosen, self.group)

    def __call__(
        self,
        x: Tensor,
        gate_up: ExpertWeight,
        down: ExpertWeight,
        expert: Tensor,
        weight: Tensor,
        counted: tuple[Tensor, Tensor],
    ) -> Tensor:
        arrived = dispatch(x.detach(), weight.detach(), expert, *counted, self.group)
        return sharded_experts(x, weight, *gate_up, *down, list(arrived), counted[1], self.group)


# ``arrived`` is ``Arrived``, because operators know no named tuples. An ``ExpertWeight`` is three arguments.


@torch.library.custom_op("titan_tree::sharded_experts", mutates_args=())
def sharded_experts(
    x: Tensor,
    weight: Tensor,
    gate_up: Tensor,
    gate_up_a: Tensor | None,
    gate_up_b: Tensor | None,
    down: Tensor,
    down_a: Tensor | None,
    down_b: Tensor | None,
    arrived: list[Tensor],
    sizes: Tensor,
    group: str,
) -> Tensor:
    """Returns the weighted sum of each token's experts, SwiGLU networks, as [N, d] in x's dtype.

    Args:
        x, weight: what ``dispatch`` sent. Only their gradients are computed here.
        gate_up: [e, 2 m, d] in x's dtype, for each expert of this rank the rows of the gate first.
        down: [e, d, m] in x's dtype.
        gate_up_a, gate_up_b, down_a, down_b: factors of their updates, see ``ExpertWeight``.
        arrived, sizes: the results of ``dispatch`` and ``count_rows``.
        group: name of the process group.
    """
    a = Arrived(*arrived)
    first, second = ExpertWeight(gate_up, gate_up_a, gate_up_b), ExpertWeight(down, down_a, down_b)
    returned = x.new_empty(len(a.token), x.shape[1])
    returns = []
    for half, ends, wait in zip(halves(sizes), a.ends, waits(a.rows), strict=True):
        wait()
        y = a.rows[half.arrived]
        if len(y):
            h = first.linear(_copies(y, a, half), ends)
            y = second.linear(swiglu(h, a.scale[half.copies]), ends)
            y = sum_rows(y, a.copy[half.arrived])
        returns.append(start_all_to_all(returned[half.own], y, half.sent, half.received, group))
    for wait in returns:
        wait()
    return sum_rows(returned, a.row)


@torch.library.custom_op("titan_tree::sharded_experts_backward", mutates_args=())
def sharded_experts_backward(
    grad: Tensor,
    weights: list[Tensor | None],
    arrived: list[Tensor],
    sizes: Tensor,
    group: str,
    is_trained: list[bool],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns the gradients of x, weight and the experts for the gradient [N, d] of ``sharded_experts``.

    Args:
        weights: gate_up and down, three tensors each.
        is_trained: whether to return the gradient of each of ``weights``.
    """
    a, parts = Arrived(*arrived), halves(sizes)
    gate_up, down = _expert_weights(weights)
    top_k = a.copy.shape[1]
    dy = torch.empty_like(a.rows)
    gradients_arrive = [
        start_all_to_all(
            dy[half.arrived], grad.index_select(0, a.token[half.own]), half.received, half.sent, group
        )
        for half in parts
    ]
    dx, dweight = grad.new_empty(len(a.token), grad.shape[1]), a.scale.new_empty(len(a.token), top_k)
    dchoices = a.scale.new_zeros(len(dy), top_k)
    dexperts: list[Tensor] = []
    returns = []
    for half, ends, *arrivals in zip(parts, a.ends, waits(a.rows), gradients_arrive, strict=True):
        for wait in arrivals:
            wait()
        drows = dy[half.arrived]
        new: list[Tensor] = []
        products: tuple[Product, Product] | None = None
        if len(drows):
            dcopies, dscale, products = _backward_of_half(a, half, ends, drows, gate_up, down)
            drows = sum_rows(dcopies, a.copy[half.arrived])
            dchoices.view(-1, 1).index_copy_(0, a.choice[half.copies].long(), dscale)
        for out, rows in ((dx, drows), (dweight, dchoices[half.arrived])):
            returns.append(start_all_to_all(out[half.own], rows, half.sent, half.received, group))
        if products is not None:
            new = gate_up.gradients(*products[0], ends, is_trained[:3])
            new += down.gradients(*products[1], ends, is_trained[3:])
            dexperts = [total.add_(n) for total, n in zip(dexperts, new, strict=True)] if dexperts else new
    for wait in returns:
        wait()
    if not dexperts:
        dexperts = [torch.zeros_like(w) for w in _trained(weights, is_trained)]
    return sum_rows(dx, a.row), sum_rows(dweight, a.row), dexperts


def _expert_weights(weights: list[Tensor | None]) -> tuple[ExpertWeight, ExpertWeight]:
    gate_up, gate_up_a, gate_up_b, down, down_a, down_b = weights
    assert gate_up is not None
    assert down is not None
    return ExpertWeight(gate_up, gate_up_a, gate_up_b), ExpertWeight(down, down_a, down_b)


def _trained(weights: list[Tensor | None], is_trained: list[bool]) -> list[Tensor]:
    return [w for w, trained in zip(weights, is_trained, strict=True) if trained and w is not None]


def _copies(rows: Tensor, a: Arrived, half: TokenHalf) -> Tensor:
    """Returns the copies of the rows of a half."""
    return copy_rows(rows, a.copy[half.arrived], half.copies.stop - half.copies.start)


def _backward_of_half(
    a: Arrived, half: TokenHalf, ends: Tensor, drows: Tensor, gate_up: ExpertWeight, down: ExpertWeight
) -> tuple[Tensor, Tensor, tuple[Product, Product]]:
    """Computes gradients from those of the rows of a half: of the copies, and of their scale.

    It also returns what the gradients of gate_up and of down are computed from.
    """
    copies, dy = _copies(a.rows[half.arrived], a, half), _copies(drows, a, half)
    h = gate_up.linear(copies, ends)
    hidden, dh, dscale = swiglu_backward(h, a.scale[half.copies], down.transposed(dy, ends))
    return gate_up.transposed(dh, ends), dscale, ((copies, dh), (hidden, dy))


@sharded_experts.register_fake
def _(x: Tensor, weight: Tensor, *others: object) -> Tensor:
    return torch.empty_like(x)


@sharded_experts_backward.register_fake
def _(
    grad: Tensor,
    weights: list[Tensor | None],
    arrived: list[Tensor],
    sizes: Tensor,
    group: str,
    is_trained: list[bool],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    _, scale, _, copy, *_ = arrived
    dexperts = [torch.empty_like(w) for w in _trained(weights, is_trained)]
    return torch.empty_like(grad), scale.new_empty(grad.shape[0], copy.shape[1]), dexperts


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, _, *weights, arrived, sizes, ctx.group = inputs
    ctx.save_for_backward(*weights, sizes, *arrived)


def _autograd(ctx: Any, grad: Tensor) -> tuple[Tensor | list[None] | None, ...]:
    saved, is_trained = ctx.saved_tensors, list(ctx.needs_input_grad[2:8])
    weights, sizes, arrived = list(saved[:6]), saved[6], list(saved[7:])
    dx, dweight, dexperts = sharded_experts_backward(
        grad.contiguous(), weights, arrived, sizes, ctx.group, is_trained
    )
    gradients = iter(dexperts)
    by_weight = [next(gradients) if trained else None for trained in is_trained]
    return dx, dweight, *by_weight, [None] * len(arrived), None, None


sharded_experts.register_autograd(_autograd, setup_context=_setup_context)
