"""How expert-parallel ranks exchange tokens while they compute.

P ranks hold e = E / P consecutive experts each, and each rank has tokens of its own. In every layer:

1. ``count_rows``: Right after the router, the ranks tell each other how many rows they will send. The numbers
   go to the host on a side stream.
2. ``dispatch``: A rank sends a token once to every rank that holds at least one of the token's experts. Its
   *choices* travel with it: the number and the router weight of each expert. The receiver sorts those of its
   own experts by expert. Each of them is one *copy* of the token.
3. sharded_experts.py: The receiver computes its experts, sums the outputs of each row, and returns one row
   for each row that it received. The sender sums the returned rows of each token.

Nothing is dropped. Sums have a fixed order, in fp32 or wider: the receiver adds the experts of a row in the
order of the router's choice, and the sender adds ranks in ascending order. Every run therefore gives the same
bits. Results differ from those of one rank by the order of these sums, and in bf16 by the rounding of the
returned rows.

With more than two ranks, each rank splits its tokens into two *parts*, so that the second part can travel
while ranks compute the first one. Two ranks have one part: rows travel while copies are sorted, and return
while the gradients of the weights are computed, and one large product is faster than two.

The host must know how many rows arrive. It waits for the numbers of ``count_rows`` once per layer and forward
pass, and for nothing else. The backward pass never waits. All ranks of a group must run the same sequence of
passes (engine/schedule.py). Each operator needs the results of the one before, so all ranks start their
collectives in the same order.

The steps are custom operators, because torch.compile cannot know how many rows arrive.

Letters: N tokens, k experts of a token, E experts, e experts on this rank, P ranks, d hidden size, S rows
sent, R rows received, C copies for this rank's experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from titan_tree.distributed.collectives import named_group

Wait = Callable[[], object]

# For tensors that are still being filled, by address: one function per part that waits for this part.
_unfinished: dict[int, list[Wait]] = {}


class TokenPart(NamedTuple):
    """Where one part of the tokens is in the buffers of a rank."""

    sent: list[int]  # [P] rows that this rank sends to each rank
    received: list[int]  # [P] rows that it receives from each rank
    own: slice  # among the S rows sent
    arrived: slice  # among the R rows received
    copies: slice  # among the C copies


class Arrived(NamedTuple):
    """What a rank knows after ``dispatch``.

    Rows sent are sorted by part, receiver and token; rows received by part, sender and token; copies by part
    and expert.
    """

    rows: Tensor  # [R, d] in x's dtype, still arriving, see ``waits``
    scale: Tensor  # [C, 1] in the weight's dtype: the router weight of each copy
    choice: Tensor  # [C] int32: the choice of each copy. Row r has the choices r k to r k + k - 1.
    copy: Tensor  # [R, k] int32: the copy of each choice, counted from its part's first, or -1 for none
    ends: Tensor  # [parts, e] int32: where the copies of each expert end, counted from their part's first
    token: Tensor  # [S] int32: the token of each row sent
    row: Tensor  # [N, P] int32: for each token the row that is sent to each rank, or -1


def num_parts(num_ranks: int) -> int:
    """Returns the number of parts in which ``num_ranks`` ranks exchange their tokens."""
    return 1 if num_ranks == 2 else 2


def token_parts(sizes: Tensor) -> list[TokenPart]:
    """Returns the parts for the sizes of ``count_rows``."""
    num_ranks, parts = sizes.shape[1] // 2, []
    starts = [0, 0, 0]
    for *rows, num_copies in sizes.tolist():
        sent, received = rows[:num_ranks], rows[num_ranks:]
        ends = [a + n for a, n in zip(starts, (sum(sent), sum(received), num_copies), strict=True)]
        parts.append(TokenPart(sent, received, *map(slice, starts, ends)))
        starts = ends
    return parts


def waits(tensor: Tensor, parts: Sequence[object]) -> list[Wait]:
    """Returns functions that wait for the parts of ``tensor``, which may be complete already."""
    return _unfinished.pop(tensor.data_ptr(), [lambda: None] * len(parts))


def start_all_to_all(
    out: Tensor, x: Tensor, received: list[int] | None, sent: list[int] | None, group: str
) -> Wait:
    """Starts to send the rows of x [sum(sent), c], and to fill out [sum(received), c], sorted by sender.

    Without numbers of rows, all ranks exchange equal shares. Returns a function that makes the current stream
    wait for the end; on a CPU, the host waits.
    """
    work = dist.all_to_all_single(out, x, received, sent, group=named_group(group), async_op=True)

    def all_to_all() -> None:  # distributed/faults.py prints this name if it fails
        assert work is not None
        work.wait()

    return all_to_all


@torch.library.custom_op("titan_tree::count_rows", mutates_args=())
def count_rows(is_chosen: Tensor, group: str) -> tuple[Tensor, Tensor]:
    """Starts to exchange the numbers of rows and copies.

    Args:
        is_chosen: [N, E] bool, the experts of this rank's tokens.
        group: name of the process group.
    Returns:
        counts [P, parts, 1 + e] int64: from each rank, in each part, rows and then copies for each expert
        here. sizes [parts, 2 P + 1] int64 on the host: in each part, rows sent to each rank, rows received
        from each rank, and all copies. Both are still being filled; only ``dispatch`` may read them first.
    """
    (num_tokens, num_experts), num_ranks = is_chosen.shape, named_group(group).size()
    parts = num_parts(num_ranks)
    length = -(-num_tokens // parts)
    padded = F.pad(is_chosen, (0, 0, 0, parts * length - num_tokens))
    chosen = padded.view(parts, length, num_ranks, num_experts // num_ranks)
    sent = torch.cat([chosen.any(-1).sum(1).unsqueeze(-1), chosen.sum(1)], -1).transpose(0, 1).contiguous()
    counts = sent.new_empty(sent.shape)
    sizes = torch.empty(parts, 2 * num_ranks + 1, dtype=torch.int64, pin_memory=sent.is_cuda)

    def exchange() -> None:
        start_all_to_all(counts, sent, None, None, group)()
        rows = torch.cat([sent[..., 0], counts[..., 0], counts[..., 1:].sum((0, 2)).unsqueeze(0)])
        sizes.copy_(rows.t(), non_blocking=True)

    if not sent.is_cuda:
        exchange()
        return counts, sizes
    side = _side_stream(sent.device)
    side.wait_stream(torch.cuda.current_stream())
    sent.record_stream(side)
    with torch.cuda.stream(side):
        exchange()
        _unfinished[sizes.data_ptr()] = [side.record_event().synchronize]
    return counts, sizes


@functools.cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@count_rows.register_fake
def _(is_chosen: Tensor, group: str) -> tuple[Tensor, Tensor]:
    num_ranks, (_, num_experts) = named_group(group).size(), is_chosen.shape
    parts = num_parts(num_ranks)
    return (
        is_chosen.new_empty(num_ranks, parts, 1 + num_experts // num_ranks, dtype=torch.int64),
        torch.empty(parts, 2 * num_ranks + 1, dtype=torch.int64, device="cpu"),
    )


@torch.library.custom_op("titan_tree::dispatch", mutates_args=())
def dispatch(
    x: Tensor, weight: Tensor, expert: Tensor, counts: Tensor, sizes: Tensor, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Starts to send tokens to the ranks of their experts. Returns ``Arrived``. Not differentiable.

    Args:
        x: [N, d].
        weight: [N, k] fp32 or wider, the router weights.
        expert: [N, k] int64, different experts in each row.
        counts, sizes: the results of ``count_rows``.
        group: name of the process group.
    """
    assert weight.element_size() >= 4, "numbers of experts travel in the weight's dtype"
    num_experts, top_k = counts.shape[2] - 1, expert.shape[1]
    row, token, receiver = _sort_rows(expert // num_experts, counts.shape[0])
    local = expert.index_select(0, token) - num_experts * receiver.unsqueeze(1)
    is_there = (local >= 0) & (local < num_experts)
    there = local.where(is_there, num_experts).to(weight.dtype)
    outgoing = torch.cat([there, weight.index_select(0, token).where(is_there, 0)], 1)
    narrow_row, narrow_token = row.int(), token.int()
    for wait in _unfinished.pop(sizes.data_ptr(), ()):
        wait()  # all work above is in the device's queue
    parts = token_parts(sizes)
    num_sent, num_received = parts[-1].own.stop, parts[-1].arrived.stop
    incoming = outgoing.new_empty(num_received, 2 * top_k)
    choices_arrive = [
        start_all_to_all(incoming[part.arrived], outgoing[part.own], part.received, part.sent, group)
        for part in parts
    ]
    rows = x.new_empty(num_received, x.shape[1])
    _unfinished[rows.data_ptr()] = [
        start_all_to_all(
            rows[part.arrived], x.index_select(0, token[part.own]), part.received, part.sent, group
        )
        for part in parts
    ]
    for wait in choices_arrive:
        wait()
    local, scale = incoming.split(top_k, 1)
    choice, copy = _sort_copies(local, parts, num_experts)
    ends = counts[..., 1:].sum(0).cumsum(-1)
    scale = scale.reshape(-1, 1).index_select(0, choice)
    return rows, scale, choice.int(), copy.int(), ends.int(), narrow_token[:num_sent], narrow_row


def _sort_rows(needed: Tensor, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sorts the rows to send by part, receiver and token, without knowing their number S.

    Args:
        needed: [N, k] int64, the ranks of each token's experts.
    Returns:
        Three int64 tensors:

        row: [N, P], see ``Arrived.row``.
        token: [at least S], the token of each row. Only the first S entries are valid.
        receiver: like ``token``, the rank to which each row goes.
    """
    num_tokens = len(needed)
    parts = num_parts(num_ranks)
    length = -(-num_tokens // parts)
    grid = needed.new_zeros(parts * length, num_ranks, dtype=torch.bool)
    grid[:num_tokens].scatter_(1, needed, True)
    is_sent = grid.view(parts, length, num_ranks).transpose(1, 2).reshape(-1)
    row = (is_sent.cumsum(0) - 1).where(is_sent, -1)
    cells = torch.arange(len(row), device=row.device)
    cell = torch.zeros_like(F.pad(row, (0, 1))).scatter_(0, row.where(is_sent, len(row)), cells)[:-1]
    token = cell // (num_ranks * length) * length + cell % length
    row = row.view(parts, num_ranks, length).transpose(1, 2).reshape(grid.shape)[:num_tokens].contiguous()
    return row, token, cell // length % num_ranks


def _sort_copies(local: Tensor, parts: list[TokenPart], num_experts: int) -> tuple[Tensor, Tensor]:
    """Returns ``Arrived.choice`` and ``Arrived.copy`` in int64. local: the expert of each choice, or e."""
    num_rows, top_k = local.shape
    # A narrow key sorts in fewer passes. The largest is 2 e + 1.
    key = local.to(torch.int16 if num_experts < 2**14 else torch.int32)
    key[parts[0].arrived.stop :] += num_experts + 1
    by_expert = key.flatten().argsort(stable=True)
    lengths = [part.copies.stop - part.copies.start for part in parts]
    starts = [part.arrived.start * top_k for part in parts]
    choice = torch.cat([by_expert[a : a + n] for a, n in zip(starts, lengths, strict=True)])
    places = torch.cat([torch.arange(n, device=choice.device) for n in lengths])
    copy = choice.new_full((num_rows * top_k,), -1).scatter_(0, choice, places)
    return choice, copy.view(num_rows, top_k)


@dispatch.register_fake
def _(
    x: Tensor, weight: Tensor, expert: Tensor, counts: Tensor, sizes: Tensor, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_ranks, _, width = counts.shape
    num_rows, num_copies, num_sent = (torch.library.get_ctx().new_dynamic_size() for _ in range(3))

    def integers(*shape: int | torch.SymInt) -> Tensor:
        return expert.new_empty(shape, dtype=torch.int32)

    return (
        x.new_empty(num_rows, x.shape[1]),
        weight.new_empty(num_copies, 1),
        integers(num_copies),
        integers(num_rows, expert.shape[1]),
        integers(num_parts(num_ranks), width - 1),
        integers(num_sent),
        integers(x.shape[0], num_ranks),
    )
