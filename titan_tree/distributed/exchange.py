"""The all-to-all exchange of expert parallelism: token copies go to the ranks of their experts and back.

P ranks hold e = E / P consecutive experts each, and each rank has tokens of its own. In every layer:

1. dispatch: Token copies are sorted by expert and therefore by rank. One all-to-all sends them to the ranks
   of their experts. They arrive sorted by sender; ``order`` sorts them by expert, and copies of one expert by
   sender.
2. The rank computes its experts on the copies that arrived.
3. combine: A second all-to-all returns the results to the ranks and positions that the copies came from.

Nothing is dropped or rounded. Both steps are permutations and each other's transpose, so the backward pass
of dispatch is combine and vice versa. The experts multiply the same rows as on one
rank that has all experts and all trees.

Every rank must know on the host how many rows it receives. This needs one small copy from the device per
layer and forward pass, which waits for the device. The backward pass reuses the numbers. All ranks of a group
must run the same sequence of passes (engine/lockstep.py).

The exchange consists of custom operators, because torch.compile cannot know how many rows arrive. One call of
``dispatch`` sends both the copies and their scales. Two calls would not depend on each other's data, so ranks
might run them in different orders.

Letters: S copies on this rank, R rows received, E experts, e experts on this rank, P ranks, c any width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from titan_tree.components.moe.experts import inverse_permutation


class Exchange:
    """The ``Dispatcher`` of a layer whose experts are sharded over the ranks of ``group``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group.group_name

    def __call__(
        self,
        mlps: Callable[[Tensor, Tensor, Tensor], Tensor],
        copies: Tensor,
        scale: Tensor,
        num_copies: Tensor,
    ) -> Tensor:
        """Returns [S, d] for copies [S, d] and scale [S, 1], see ``Dispatcher``. Collective."""
        sizes, order, ends = plan_exchange(num_copies, self.group)
        copies_here, scale_here = dispatch([copies, scale], sizes, order, self.group)
        y = mlps(copies_here, scale_here, ends)
        return combine([y], sizes, order, copies.shape[0], self.group)[0]


# ``plan_exchange`` returns the plan of one forward pass of one layer, which the other operators follow:
#   sizes  [2, P] int64 on the host: rows that this rank sends to each rank, and receives from each rank
#   order  [max(R, 1)] int64: indices that sort the received rows by expert. A rank that receives nothing
#          computes one row of zeros that belongs to no expert, so that kernels never see an empty tensor.
#   ends   [e] int32: where the sorted rows of each expert end


def _group(name: str) -> dist.ProcessGroup:
    """Returns the group called ``name``: an operator's arguments cannot be process groups."""
    return _resolve_process_group(cast(Any, name))


@torch.library.custom_op("titan_tree::plan_exchange", mutates_args=())
def plan_exchange(num_copies: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    """Returns sizes, order and ends for [E] int64: the number of this rank's copies for each expert."""
    process_group = _group(group)
    sent = num_copies.view(process_group.size(), -1)  # [P, e]
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent.contiguous(), group=process_group)
    sizes = torch.stack([sent.sum(1), received.sum(1)]).cpu()
    num_ranks, num_experts = received.shape
    expert = torch.arange(num_experts, device=received.device).repeat(num_ranks)
    num_rows = int(sizes[1].sum())
    order = expert.repeat_interleave(received.flatten(), output_size=num_rows).argsort(stable=True)
    order = order if num_rows else order.new_zeros(1)
    return sizes, order, received.sum(0).cumsum(0).to(torch.int32)


@plan_exchange.register_fake
def _(num_copies: Tensor, group: str) -> tuple[Tensor, Tensor, Tensor]:
    num_ranks = _group(group).size()
    return (
        torch.empty(2, num_ranks, dtype=torch.int64, device="cpu"),
        num_copies.new_empty(torch.library.get_ctx().new_dynamic_size(min=1)),
        num_copies.new_empty(num_copies.shape[0] // num_ranks, dtype=torch.int32),
    )


@torch.library.custom_op("titan_tree::dispatch", mutates_args=())
def dispatch(rows: list[Tensor], sizes: Tensor, order: Tensor, group: str) -> list[Tensor]:
    """Sends rows [S, c], sorted by expert, to the ranks of their experts. Returns [max(R, 1), c] for each."""
    sent, received = sizes.tolist()
    arrived = [_all_to_all(x, sent, received, group) for x in rows]
    return [x[order] if len(x) else x.new_zeros(1, x.shape[1]) for x in arrived]


@torch.library.custom_op("titan_tree::combine", mutates_args=())
def combine(rows: list[Tensor], sizes: Tensor, order: Tensor, num_copies: int, group: str) -> list[Tensor]:
    """Sends rows [max(R, 1), c] back to their senders. Returns [S, c] for each. Transpose of ``dispatch``."""
    sent, received = sizes.tolist()
    inverse = inverse_permutation(order)[: sum(received)]
    return [_all_to_all(x[inverse], received, sent, group) for x in rows]


def _all_to_all(x: Tensor, sent: list[int], received: list[int], group: str) -> Tensor:
    """Exchanges the rows of x [sum(sent), c]. Returns [sum(received), c], sorted by sender."""
    out = x.new_empty(sum(received), x.shape[1])
    dist.all_to_all_single(out, x.contiguous(), received, sent, group=_group(group))
    return out


@dispatch.register_fake
def _(rows: list[Tensor], sizes: Tensor, order: Tensor, group: str) -> list[Tensor]:
    return [x.new_empty(order.shape[0], x.shape[1]) for x in rows]


@combine.register_fake
def _(rows: list[Tensor], sizes: Tensor, order: Tensor, num_copies: int, group: str) -> list[Tensor]:
    return [x.new_empty(num_copies, x.shape[1]) for x in rows]


def _setup_dispatch(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    rows, sizes, order, ctx.group = inputs
    ctx.num_copies = rows[0].shape[0]
    ctx.save_for_backward(sizes, order)


def _setup_combine(ctx: Any, inputs: tuple[Any, ...], output: list[Tensor]) -> None:
    _, sizes, order, _, ctx.group = inputs
    ctx.save_for_backward(sizes, order)


def _dispatch_backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    return combine(gradients, *ctx.saved_tensors, ctx.num_copies, ctx.group), None, None, None


def _combine_backward(ctx: Any, gradients: list[Tensor]) -> tuple[Any, ...]:
    return dispatch(gradients, *ctx.saved_tensors, ctx.group), None, None, None, None


dispatch.register_autograd(_dispatch_backward, setup_context=_setup_dispatch)
combine.register_autograd(_combine_backward, setup_context=_setup_combine)
