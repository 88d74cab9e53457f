"""The experts of one rank, computed while tokens travel (exchange.py).

``sharded_gate_up`` computes the hidden layers of the copies that have arrived, and ``sharded_down`` the
outputs, which return. If there are two parts, the first one is computed while the second one arrives, and the
second one while the results of the first one return. In the backward pass, gradients travel the same way in
the opposite direction. The gradients of tokens return while those of the weights are computed.

The backward pass copies rows and computes SwiGLU again. It keeps what arrived, and the hidden layers, which
need 4 m bytes per copy in bf16. With selective checkpointing it computes the hidden layers again, 2 of the 11
units of work that experts do in a step, and exchanges nothing for it.

Letters: as in exchange.py, and m intermediate size of an expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from titan_tree.components.moe.experts import ExpertWeight
from titan_tree.components.moe.kernels import copy_rows, sum_rows, swiglu, swiglu_backward
from titan_tree.distributed.experts.exchange import (
    Arrived,
    TokenPart,
    count_rows,
    dispatch,
    start_all_to_all,
    token_parts,
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
        gate_up: ExpertWeight,
        down: ExpertWeight,
        expert: Tensor,
        weight: Tensor,
        counted: tuple[Tensor, Tensor],
    ) -> Tensor:
        arrived = list(dispatch(x.detach(), weight.detach(), expert, *counted, self.group))
        h = sharded_gate_up(x, *gate_up, arrived, counted[1], self.group)
        return sharded_down(h, weight, *down, arrived, counted[1], self.group)


# ``arrived`` is ``Arrived``, because operators know no named tuples. An ``ExpertWeight`` is three arguments,
# and a list in the backward pass.


@torch.library.custom_op("titan_tree::sharded_gate_up", mutates_args=())
def sharded_gate_up(
    x: Tensor,
    base: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    arrived: list[Tensor],
    sizes: Tensor,
    group: str,
) -> Tensor:
    """Returns the gate and the up-projection of each copy, [C, 2 m] in x's dtype.

    Args:
        x: [N, d], what ``dispatch`` sent. Only its gradient is computed here.
        base, a, b: the weight [e, 2 m, d] of this rank's experts, the rows of the gate first, in x's dtype.
        arrived, sizes: the results of ``dispatch`` and ``count_rows``.
        group: name of the process group.
    """
    tokens, parts, weight = Arrived(*arrived), token_parts(sizes), ExpertWeight(base, a, b)
    hidden = []
    for part, ends, wait in zip(parts, tokens.ends, waits(tokens.rows, parts), strict=True):
        wait()
        hidden.append(weight.linear(_copies(tokens.rows[part.arrived], tokens, part), ends))
    return _join(hidden)


@torch.library.custom_op("titan_tree::sharded_gate_up_backward", mutates_args=())
def sharded_gate_up_backward(
    dh: Tensor,
    weights: list[Tensor | None],
    arrived: list[Tensor],
    sizes: Tensor,
    group: str,
    is_trained: list[bool],
) -> tuple[Tensor, list[Tensor]]:
    """Returns the gradients of x and of those of ``weights`` that ``is_trained`` selects.

    Args:
        dh: [C, 2 m], the gradient of ``sharded_gate_up``.
        weights: base, a and b.
    """
    tokens, parts, weight = Arrived(*arrived), token_parts(sizes), _expert_weight(weights)
    dx = dh.new_empty(len(tokens.token), tokens.rows.shape[1])
    returns, gradients = [], []
    for part, ends, wait in zip(parts, tokens.ends, waits(tokens.rows, parts), strict=True):
        wait()
        dcopies = weight.transposed(dh[part.copies], ends)
        drows = sum_rows(dcopies, tokens.copy[part.arrived])
        returns.append(start_all_to_all(dx[part.own], drows, part.sent, part.received, group))
        del dcopies
        copies = _copies(tokens.rows[part.arrived], tokens, part)
        gradients.append(weight.gradients(copies, dh[part.copies], ends, is_trained))
    for wait in returns:
        wait()
    return sum_rows(dx, tokens.row), _total(gradients)


@torch.library.custom_op("titan_tree::sharded_down", mutates_args=())
def sharded_down(
    h: Tensor,
    weight: Tensor,
    base: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    arrived: list[Tensor],
    sizes: Tensor,
    group: str,
) -> Tensor:
    """Returns the weighted sum of each token's experts, [N, d] in h's dtype.

    Args:
        h: the result of ``sharded_gate_up``.
        weight: [N, k], the router weights that ``dispatch`` sent. Only their gradient is computed here.
        base, a, b: the weight [e, d, m] of this rank's experts, in h's dtype.
        arrived, sizes, group: as for ``sharded_gate_up``.
    """
    tokens, experts = Arrived(*arrived), ExpertWeight(base, a, b)
    returned = h.new_empty(len(tokens.token), base.shape[1])
    returns = []
    for part, ends in zip(token_parts(sizes), tokens.ends, strict=True):
        y = experts.linear(swiglu(h[part.copies], tokens.scale[part.copies]), ends)
        rows = sum_rows(y, tokens.copy[part.arrived])
        returns.append(start_all_to_all(returned[part.own], rows, part.sent, part.received, group))
    for wait in returns:
        wait()
    return sum_rows(returned, tokens.row)


@torch.library.custom_op("titan_tree::sharded_down_backward", mutates_args=())
def sharded_down_backward(
    grad: Tensor,
    h: Tensor,
    weights: list[Tensor | None],
    arrived: list[Tensor],
    sizes: Tensor,
    group: str,
    is_trained: list[bool],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns the gradients of h, of the router weights, and of those of ``weights`` that are trained.

    Args:
        grad: [N, d], the gradient of ``sharded_down``.
        weights: base, a and b.
    """
    tokens, parts, experts = Arrived(*arrived), token_parts(sizes), _expert_weight(weights)
    dy = grad.new_empty(len(tokens.copy), grad.shape[1])
    arrivals = [
        start_all_to_all(
            dy[part.arrived], grad.index_select(0, tokens.token[part.own]), part.received, part.sent, group
        )
        for part in parts
    ]
    top_k = tokens.copy.shape[1]
    dchoices = tokens.scale.new_zeros(len(dy), top_k)
    dweight = tokens.scale.new_empty(len(tokens.token), top_k)
    dhidden, returns, gradients = [], [], []
    for part, ends, wait in zip(parts, tokens.ends, arrivals, strict=True):
        wait()
        dcopies = _copies(dy[part.arrived], tokens, part)
        hidden, dh, dscale = swiglu_backward(
            h[part.copies], tokens.scale[part.copies], experts.transposed(dcopies, ends)
        )
        dchoices.view(-1, 1).index_copy_(0, tokens.choice[part.copies].long(), dscale)
        returns.append(
            start_all_to_all(dweight[part.own], dchoices[part.arrived], part.sent, part.received, group)
        )
        dhidden.append(dh)
        gradients.append(experts.gradients(hidden, dcopies, ends, is_trained))
    for wait in returns:
        wait()
    return _join(dhidden), sum_rows(dweight, tokens.row), _total(gradients)


def _expert_weight(weights: Sequence[Tensor | None]) -> ExpertWeight:
    base, a, b = weights
    assert base is not None
    return ExpertWeight(base, a, b)


def _copies(rows: Tensor, tokens: Arrived, part: TokenPart) -> Tensor:
    """Returns the copies of the rows of a part."""
    return copy_rows(rows, tokens.copy[part.arrived], part.copies.stop - part.copies.start)


def _join(parts: list[Tensor]) -> Tensor:
    """Returns the rows of all parts, without a copy if there is one part."""
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _total(parts: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Returns the sums of the gradients of all parts."""
    first, *others = parts
    for other in others:
        for total, gradient in zip(first, other, strict=True):
            total.add_(gradient)
    return list(first)


def _like_trained(weights: Sequence[Tensor | None], is_trained: Sequence[bool]) -> list[Tensor]:
    return [
        torch.empty_like(w)
        for w, trained in zip(weights, is_trained, strict=True)
        if trained and w is not None
    ]


@sharded_gate_up.register_fake
def _(
    x: Tensor, base: Tensor, a: object, b: object, arrived: list[Tensor], sizes: object, group: str
) -> Tensor:
    return x.new_empty(Arrived(*arrived).scale.shape[0], base.shape[1])


@sharded_gate_up_backward.register_fake
def _(
    dh: Tensor,
    weights: list[Tensor | None],
    arrived: list[Tensor],
    sizes: Tensor,
    group: str,
    is_trained: list[bool],
) -> tuple[Tensor, list[Tensor]]:
    tokens = Arrived(*arrived)
    dx = dh.new_empty(tokens.row.shape[0], tokens.rows.shape[1])
    return dx, _like_trained(weights, is_trained)


@sharded_down.register_fake
def _(h: Tensor, weight: Tensor, base: Tensor, *others: object) -> Tensor:
    return h.new_empty(weight.shape[0], base.shape[1])


@sharded_down_backward.register_fake
def _(
    grad: Tensor,
    h: Tensor,
    weights: list[Tensor | None],
    arrived: list[Tensor],
    sizes: Tensor,
    group: str,
    is_trained: list[bool],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    tokens = Arrived(*arrived)
    dweight = tokens.scale.new_empty(grad.shape[0], tokens.copy.shape[1])
    return torch.empty_like(h), dweight, _like_trained(weights, is_trained)


def _setup_gate_up(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, *weights, arrived, sizes, ctx.group = inputs
    ctx.save_for_backward(*weights, sizes, *arrived)


def _gate_up_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | list[None] | None, ...]:
    weights, sizes, arrived = _saved(ctx.saved_tensors)
    is_trained = list(ctx.needs_input_grad[1:4])
    dx, gradients = sharded_gate_up_backward(
        grad.contiguous(), weights, arrived, sizes, ctx.group, is_trained
    )
    return dx, *_by_weight(gradients, is_trained), [None] * len(arrived), None, None


def _setup_down(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, _, *weights, arrived, sizes, ctx.group = inputs
    ctx.save_for_backward(h, *weights, sizes, *arrived)


def _down_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | list[None] | None, ...]:
    h, *others = ctx.saved_tensors
    weights, sizes, arrived = _saved(others)
    is_trained = list(ctx.needs_input_grad[2:5])
    dh, dweight, gradients = sharded_down_backward(
        grad.contiguous(), h, weights, arrived, sizes, ctx.group, is_trained
    )
    return dh, dweight, *_by_weight(gradients, is_trained), [None] * len(arrived), None, None


def _saved(tensors: Sequence[Any]) -> tuple[list[Tensor | None], list[Tensor], Any]:
    return list(tensors[:3]), tensors[3], list(tensors[4:])


def _by_weight(gradients: list[Tensor], is_trained: Sequence[bool]) -> list[Tensor | None]:
    """Returns the gradient of each weight, None for those that are not trained."""
    remaining = iter(gradients)
    return [next(remaining) if trained else None for trained in is_trained]


sharded_gate_up.register_autograd(_gate_up_gradients, setup_context=_setup_gate_up)
sharded_down.register_autograd(_down_gradients, setup_context=_setup_down)
