"""The experts of one rank, computed while tokens travel (exchange.py).

``sharded_gate_up`` computes the hidden layers of the copies, and ``sharded_down`` the outputs, which return.
Rows of this rank's own tokens are copied and summed while others travel. In the backward pass, gradients
travel the same way in the opposite direction. The gradients of tokens return while those of the weights are
computed.

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
import torch.nn.functional as F
from torch import Tensor

from titan_tree.components.moe.experts import ExpertWeight
from titan_tree.components.moe.kernels import sum_rows, swiglu, swiglu_backward, write_sums
from titan_tree.distributed.experts.exchange import (
    Arrived,
    add_ranks,
    arrival,
    gather_tokens,
    make_copies,
    start_to_return,
    start_to_send,
)


class ShardedExperts:
    """The ``Dispatcher`` of a layer whose experts are sharded over the ranks of ``group``. Collective."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group.group_name

    def __call__(
        self, x: Tensor, gate_up: ExpertWeight, down: ExpertWeight, expert: Tensor, weight: Tensor
    ) -> Tensor:
        arrived = list(gather_tokens(x.detach(), expert, weight.detach(), len(gate_up.base), self.group))
        h = sharded_gate_up(x, *gate_up, arrived, self.group)
        return sharded_down(h, weight, *down, arrived, self.group)


# ``arrived`` is ``Arrived``, because operators know no named tuples. An ``ExpertWeight`` is three arguments,
# and a list in the backward pass.


@torch.library.custom_op("titan_tree::sharded_gate_up", mutates_args=())
def sharded_gate_up(
    x: Tensor,
    base: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    arrived: list[Tensor],
    group: str,
) -> Tensor:
    """Returns the gate and the up-projection of each copy, [C, 2 m] in x's dtype.

    Args:
        x: [N, d], what ``gather_tokens`` sent.
        base, a, b: the weight [e, 2 m, d] of this rank's experts, the rows of the gate first, in x's dtype.
        arrived: ``Arrived``.
        group: name of the process group.
    """
    tokens = Arrived(*arrived)
    return ExpertWeight(base, a, b).linear(
        make_copies(x, tokens.rows, arrival(tokens.rows), tokens), tokens.ends
    )


@torch.library.custom_op("titan_tree::sharded_gate_up_backward", mutates_args=())
def sharded_gate_up_backward(
    dh: Tensor,
    x: Tensor,
    weights: list[Tensor | None],
    arrived: list[Tensor],
    group: str,
    is_trained: list[bool],
) -> tuple[Tensor, list[Tensor]]:
    """Returns the gradients of x and of those of ``weights`` that ``is_trained`` selects.

    Args:
        dh: [C, 2 m], the gradient of ``sharded_gate_up``.
        weights: base, a and b.
    """
    tokens, weight = Arrived(*arrived), _expert_weight(weights)
    dcopies = weight.transposed(dh, tokens.ends)
    dx, wait = start_to_return(sum_rows(dcopies, tokens.copy), len(x), tokens.lengths, group)
    write_sums(dcopies, tokens.own_copy, dx[: len(x)])
    del dcopies
    gradients = weight.gradients(
        make_copies(x, tokens.rows, arrival(tokens.rows), tokens), dh, tokens.ends, is_trained
    )
    wait()
    return add_ranks(dx, len(tokens.lengths)), gradients


@torch.library.custom_op("titan_tree::sharded_down", mutates_args=())
def sharded_down(
    h: Tensor,
    weight: Tensor,
    base: Tensor,
    a: Tensor | None,
    b: Tensor | None,
    arrived: list[Tensor],
    group: str,
) -> Tensor:
    """Returns the weighted sum of each token's experts, [N, d] in h's dtype.

    Args:
        h: the result of ``sharded_gate_up``.
        weight: [N, k], the router weights that ``gather_tokens`` sent. Only their gradient is computed here.
        base, a, b: the weight [e, d, m] of this rank's experts, in h's dtype.
        arrived, group: as for ``sharded_gate_up``.
    """
    tokens = Arrived(*arrived)
    y = ExpertWeight(base, a, b).linear(swiglu(h, tokens.scale), tokens.ends)
    sums, wait = start_to_return(sum_rows(y, tokens.copy), len(weight), tokens.lengths, group)
    write_sums(y, tokens.own_copy, sums[: len(weight)])
    wait()
    return add_ranks(sums, len(tokens.lengths))


@torch.library.custom_op("titan_tree::sharded_down_backward", mutates_args=())
def sharded_down_backward(
    grad: Tensor,
    h: Tensor,
    weights: list[Tensor | None],
    arrived: list[Tensor],
    group: str,
    is_trained: list[bool],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Returns the gradients of h, of the router weights, and of those of ``weights`` that are trained.

    Args:
        grad: [N, d], the gradient of ``sharded_down``.
        weights: base, a and b.
    """
    tokens, experts = Arrived(*arrived), _expert_weight(weights)
    dcopies = make_copies(grad, *start_to_send(grad, tokens.lengths, group), tokens)
    hidden, dh, dscale = swiglu_backward(h, tokens.scale, experts.transposed(dcopies, tokens.ends))
    dscale = F.pad(dscale.flatten(), (0, 1))  # of the copy -1: 0
    dweight, wait = start_to_return(dscale[tokens.copy], len(grad), tokens.lengths, group)
    dweight[: len(grad)] = dscale[tokens.own_copy]
    gradients = experts.gradients(hidden, dcopies, tokens.ends, is_trained)
    wait()
    return dh, add_ranks(dweight, len(tokens.lengths)), gradients


def _expert_weight(weights: Sequence[Tensor | None]) -> ExpertWeight:
    base, a, b = weights
    assert base is not None
    return ExpertWeight(base, a, b)


def _like_trained(weights: Sequence[Tensor | None], is_trained: Sequence[bool]) -> list[Tensor]:
    return [
        torch.empty_like(w)
        for w, trained in zip(weights, is_trained, strict=True)
        if trained and w is not None
    ]


@sharded_gate_up.register_fake
def _(x: Tensor, base: Tensor, a: object, b: object, arrived: list[Tensor], group: str) -> Tensor:
    return x.new_empty(Arrived(*arrived).scale.shape[0], base.shape[1])


@sharded_gate_up_backward.register_fake
def _(
    dh: Tensor,
    x: Tensor,
    weights: list[Tensor | None],
    arrived: list[Tensor],
    group: str,
    is_trained: list[bool],
) -> tuple[Tensor, list[Tensor]]:
    return torch.empty_like(x), _like_trained(weights, is_trained)


@sharded_down.register_fake
def _(h: Tensor, weight: Tensor, base: Tensor, *others: object) -> Tensor:
    return h.new_empty(weight.shape[0], base.shape[1])


@sharded_down_backward.register_fake
def _(
    grad: Tensor,
    h: Tensor,
    weights: list[Tensor | None],
    arrived: list[Tensor],
    group: str,
    is_trained: list[bool],
) -> tuple[Tensor, Tensor, list[Tensor]]:
    tokens = Arrived(*arrived)
    dweight = tokens.scale.new_empty(tokens.own_copy.shape)
    return torch.empty_like(h), dweight, _like_trained(weights, is_trained)


# Saved: x or h, base, a, b, and the tensors of ``Arrived``.


def _setup_gate_up(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, *weights, arrived, ctx.group = inputs
    ctx.save_for_backward(x, *weights, *arrived)


def _gate_up_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | list[None] | None, ...]:
    x, base, a, b, *arrived = ctx.saved_tensors
    weights, is_trained = [base, a, b], list(ctx.needs_input_grad[1:4])
    dx, gradients = sharded_gate_up_backward(grad.contiguous(), x, weights, arrived, ctx.group, is_trained)
    return dx, *_by_weight(gradients, is_trained), [None] * len(arrived), None


def _setup_down(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    h, _, *weights, arrived, ctx.group = inputs
    ctx.save_for_backward(h, *weights, *arrived)


def _down_gradients(ctx: Any, grad: Tensor) -> tuple[Tensor | list[None] | None, ...]:
    h, base, a, b, *arrived = ctx.saved_tensors
    weights, is_trained = [base, a, b], list(ctx.needs_input_grad[2:5])
    dh, dweight, gradients = sharded_down_backward(
        grad.contiguous(), h, weights, arrived, ctx.group, is_trained
    )
    return dh, dweight, *_by_weight(gradients, is_trained), [None] * len(arrived), None


def _by_weight(gradients: list[Tensor], is_trained: Sequence[bool]) -> list[Tensor | None]:
    """Returns the gradient of each weight, None for those that are not trained."""
    remaining = iter(gradients)
    return [next(remaining) if trained else None for trained in is_trained]


sharded_gate_up.register_autograd(_gate_up_gradients, setup_context=_setup_gate_up)
sharded_down.register_autograd(_down_gradients, setup_context=_setup_down)
