"""Expert parallelism (GShard, arXiv:2006.16668): copies of tokens travel to the ranks of their experts.

The P ranks of a group hold e = E / P consecutive experts each, and tokens of their own. A layer's copies, in
a row by expert, so stand in a row by rank; one all-to-all takes them there, another brings them back. What
arrives is sorted by sender; ``order`` puts it in a row by expert, a sender's copies after those of the one
before. Nothing is dropped or rounded, and all of it is a permutation: the same rows in the same products as
on one rank, gradients likewise. Both directions are each other's transpose.

How many rows arrive, each rank must know on the host: one small copy from the device per layer and forward,
which waits for it; the backward knows. The ranks must run the same sequence of forwards and backwards
(lockstep.py).

Operators, because torch.compile cannot know how many rows arrive. What travels at once is one operator's: two
that nothing orders might run in another order on another rank.

S copies of a rank, R rows that arrive at it, E experts, of them e here; P ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group


class Exchange:
    """The ``Dispatcher`` of a layer whose experts the ranks of ``group`` share out."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group.group_name

    def __call__(
        self,
        mlps: Callable[[Tensor, Tensor, Tensor], Tensor],
        copies: Tensor,
        scale: Tensor,
        num_copies: Tensor,
    ) -> Tensor:
        """[S, d] of copies [S, d] and scale [S, 1], see ``Dispatcher``. Collective."""
        sizes, order, ends = plan_exchange(num_copies, self.group)
        copies_here, scale_here = to_experts([copies, scale], sizes, order, self.group)
        y = mlps(copies_here, scale_here, ends)
        return from_experts([y], sizes, order, copies.shape[0], self.group)[0]


# What the operators below hand on, of one forward of one layer:
#   sizes  [2, P] int64 on the host: rows that go to each rank, and that come from it
#   order  [max(R, 1)] int64: which of the rows that arrive comes next, in a row by expert. Where nothing
#          arrives there is one row of zeros, of no expert: kernels need no case for none.
#   ends   [e] int32: where the rows of each expert end


def _group(name: str) -> dist.ProcessGroup:
    """Operators take no process groups."""
    return _resolve_process_group(cast(Any, name))


@torch.library.custom_op("titan_tree::plan_exchange", mutates_args=())
def plan_exchange(num_copies: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """sizes, order and ends, given the [E] int64 copies that each expert gets from this rank."""
    process_group = _group(group)
    leave = num_copies.view(process_group.size(), -1)  # [P, e]
    arrive = torch.empty_like(leave)
    dist.all_to_all_single(arrive, leave.contiguous(), group=process_group)
    sizes = torch.stack([leave.sum(1), arrive.sum(1)]).cpu()
    num_ranks, num_experts = arrive.shape
    expert = torch.arange(num_experts, device=arrive.device).repeat(num_ranks)
    num_rows = int(sizes[1].sum())
    order = expert.repeat_interleave(arrive.flatten(), output_size=num_rows).argsort(stable=True)
    order = order if num_rows else order.new_zeros(1)
    return sizes, order, arrive.sum(0).cumsum(0).to(torch.int32)


@plan_exchange.register_fake
def _(num_copies: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    num_ranks = _group(group).size()
    return (
        torch.empty(2, num_ranks, dtype=torch.int64, device="cpu"),
        num_copies.new_empty(torch.library.get_ctx().new_dynamic_size(min=1)),
        num_copies.new_empty(num_copies.shape[0] // num_ranks, dtype=torch.int32),
    )


@torch.library.custom_op("titan_tree::to_experts", mutates_args=())
def to_experts(rows: list[Tensor], sizes: Tensor, order: Tensor, group: str) -> list[Tensor]:
    """[S, c] each, in a row by expert -> [max(R, 1), c] on the ranks that hold them."""
    leave, arrive = sizes.tolist()
    arrived = [_all_to_all(x, leave, arrive, group) for x in rows]
    return [x[order] if len(x) else x.new_zeros(1, x.shape[1]) for x in arrived]


@torch.library.custom_op("titan_tree::from_experts", mutates_args=())
def from_experts(
    rows: list[Tensor], sizes: Tensor, order: Tensor, num_copies: int, group: str
) -> list[Tensor]:
    """[max(R, 1), c] each -> [S, c], the way back."""
    leave, arrive = sizes.tolist()
    inverse = order.argsort()[: sum(arrive)]
    return [_all_to_all(x[inverse], arrive, leave, group) for x in rows]


def _all_to_all(x: Tensor, leave: list[int], arrive: list[int], group: str) -> Tensor:
    """The rows of x [sum(leave), c] that are meant for this rank, sender after sender."""
    out = x.new_empty(sum(arrive), x.shape[1])
    dist.all_to_all_single(out, x.contiguous(), arrive, leave, group=_group(group))
    return out


@to_experts.register_fake
def _(rows: list[Tensor], sizes: Tensor, order: Tensor, group: str) -> list[Tensor]:
    return [x.new_empty(order.shape[0], x.shape[1]) for x in rows]


@from_experts.register_fake
def _(rows: list[Tensor], sizes: Tensor, order: Tensor, num_copies: int, group: str) -> list[Tensor]:
    return [x.new_empty(num_copies, x.shape[1]) for x in rows]


def _setup_to(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    rows, sizes, order, ctx.group = inputs
    ctx.num_copies = rows[0].shape[0]
    ctx.save_for_backward(sizes, order)


def _setup_from(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, sizes, order, _, ctx.group = inputs
    ctx.save_for_backward(sizes, order)


def _backward_of_to(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    return from_experts(gradients, *ctx.saved_tensors, ctx.num_copies, ctx.group), None, None, None


def _backward_of_from(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    return to_experts(gradients, *ctx.saved_tensors, ctx.group), None, None, None, None


to_experts.register_autograd(_backward_of_to, setup_context=_setup_to)
from_experts.register_autograd(_backward_of_from, setup_context=_setup_from)
