"""How expert-parallel ranks exchange tokens while they compute.

P ranks hold e = E / P consecutive experts each, and each rank has tokens of its own. In every layer:

1. ``gather_tokens``: Every rank sends all other ranks the *choices* of its tokens, which are the number and
   the router weight of each expert, and then the tokens. While tokens travel, a rank sorts the choices of its
   own experts by expert. Each of them is one *copy* of a token.
2. sharded_experts.py: A rank computes its experts, sums the outputs for each token, and returns one row for
   each token that arrived. The token's rank adds what all ranks have computed.

A token also travels to ranks that hold none of its experts. With 8 of 128 experts, this is 0.4 % of the rows
for two ranks, 10 % for four, and 34 % for eight. In return, no rank has to choose rows, to count them, or to
tell others how many will come.

Nothing is dropped. Sums have a fixed order, in fp32 or wider: a rank adds the experts of a token in the order
of the router's choice; then the token's rank adds its own sum and those of other ranks in ascending order.
Every run therefore gives the same bits. Results differ from those of one rank by the order of these sums, and
in bf16 by the rounding of the returned rows.

Ranks tell each other their numbers of tokens through the host. The host waits for the GPU once per layer and
forward pass: it must know the number of copies. The backward pass never waits. All ranks of a group must run
the same sequence of passes (engine/schedule.py). Each operator needs the results of the one before, so all
ranks start their collectives in the same order.

All of this is done by custom operators, because torch.compile cannot know how many rows and copies there are.

Letters: N tokens of this rank, k experts of a token, E experts, e experts on this rank, P ranks, d hidden
size, S tokens of the other ranks, C copies for this rank's experts.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from titan_tree.components.moe.kernels import sum_rows, write_copies
from titan_tree.distributed.collectives import named_group

Wait = Callable[[], object]

# For tensors that are still being filled, by address: a function that waits.
_unfinished: dict[int, Wait] = {}


class Arrived(NamedTuple):
    """What a rank knows of the tokens of all ranks. Rows are sorted by rank and token, copies by expert."""

    lengths: Tensor  # [P] int64 on the host: the number of tokens of each rank
    rows: Tensor  # [S, d] in x's dtype, still arriving, see ``arrival``
    scale: Tensor  # [C, 1] in the weight's dtype: the router weight of each copy
    own_copy: Tensor  # [N, k] int32: the copy of each choice of this rank's tokens, or -1 for none
    copy: Tensor  # [S, k] int32: the same for ``rows``
    ends: Tensor  # [e] int32: where the copies of each expert end


def start_to_send(x: Tensor, lengths: Tensor, group: str) -> tuple[Tensor, Wait]:
    """Starts to send the rows of x [N, c] to all other ranks. Returns what arrives, [S, c], and how to wait.

    Args:
        lengths: [P] int64 on the host: the number of rows of each rank.
        group: name of the process group.
    """
    others = _of_others(lengths, group)
    out = x.new_empty(sum(others), x.shape[1])
    num_others = len(others) - 1
    every = x.repeat(num_others, 1) if num_others > 1 else x[: num_others * len(x)]
    return out, _start_all_to_all(out, every.contiguous(), others, _of_others(len(x), group), group)


def start_to_return(rows: Tensor, num_tokens: int, lengths: Tensor, group: str) -> tuple[Tensor, Wait]:
    """Starts to return rows [S, c], one for each token that arrived, to the ranks of the tokens.

    Returns:
        [P N, c], and how to wait for it. Its first N rows are for what this rank has computed for its own N
        tokens. The others arrive, sorted by rank.
    """
    out = rows.new_empty(len(lengths) * num_tokens, rows.shape[1])
    received, sent = _of_others(num_tokens, group), _of_others(lengths, group)
    return out, _start_all_to_all(out[num_tokens:], rows, received, sent, group)


def add_ranks(sums: Tensor, num_ranks: int) -> Tensor:
    """Returns [N, c]: the sum over ranks of what ``start_to_return`` has received."""
    if num_ranks == 1:
        return sums
    places = torch.arange(len(sums), dtype=torch.int32, device=sums.device)
    return sum_rows(sums, places.view(num_ranks, -1).t())


def arrival(rows: Tensor) -> Wait:
    """Returns how to wait for the rows of ``gather_tokens``, which may have arrived already."""
    return _unfinished.pop(rows.data_ptr(), lambda: None)


def make_copies(x: Tensor, rows: Tensor, wait: Wait, tokens: Arrived) -> Tensor:
    """Returns the copies [C, d] of x [N, d] and of rows [S, d]. Copies x before it waits for the rows."""
    copies = x.new_empty(len(tokens.scale), x.shape[1])
    write_copies(x, tokens.own_copy, copies)
    wait()
    write_copies(rows, tokens.copy, copies)
    return copies


def _of_others(lengths: Tensor | int, group: str) -> list[int]:
    """Returns the numbers of rows of each rank, 0 for this one."""
    of = named_group(group)
    numbers = [lengths] * of.size() if isinstance(lengths, int) else lengths.tolist()
    numbers[of.rank()] = 0
    return numbers


def _start_all_to_all(out: Tensor, x: Tensor, received: list[int], sent: list[int], group: str) -> Wait:
    """Starts to send the rows of x, and to fill out, both sorted by rank.

    Returns a function that makes the current stream wait for the end; on a CPU, the host waits.
    """
    work = dist.all_to_all_single(out, x, received, sent, group=named_group(group), async_op=True)

    def all_to_all() -> None:  # distributed/faults.py prints this name if it fails
        assert work is not None
        work.wait()

    return all_to_all


@torch.library.custom_op("titan_tree::gather_tokens", mutates_args=())
def gather_tokens(
    x: Tensor, expert: Tensor, weight: Tensor, num_experts: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Starts to send tokens to all other ranks, and sorts the choices. Returns ``Arrived``.

    Not differentiable.

    Args:
        x: [N, d].
        expert: [N, k] int64, different experts in each row.
        weight: [N, k] fp32 or wider, the router weights.
        num_experts: e.
        group: name of the process group.
    """
    assert weight.element_size() >= 4, "numbers of experts travel in the weight's dtype"
    (num_tokens, top_k), of = expert.shape, named_group(group)
    lengths = torch.empty(of.size(), dtype=torch.int64)
    dist.all_gather(list(lengths.split(1)), torch.tensor([num_tokens]), group=of)
    own = torch.cat([expert.to(weight.dtype), weight], 1)
    others, choices_arrive = start_to_send(own, lengths, group)
    rows, rows_arrive = start_to_send(x, lengths, group)
    _unfinished[rows.data_ptr()] = rows_arrive
    choices_arrive()
    number, scale = torch.cat([own, others]).split(top_k, 1)
    local = number - num_experts * of.rank()
    is_here = (local >= 0) & (local < num_experts)
    num_copies = _to_host(is_here.sum())
    # All of this runs while the host waits. A narrow key sorts in fewer passes.
    key = local.where(is_here, num_experts).to(torch.int16)
    in_order, choice = key.flatten().sort(stable=True)  # one choice after the other, own tokens first
    experts = torch.arange(num_experts, dtype=key.dtype, device=key.device)
    ends = torch.searchsorted(in_order, experts, right=True, out_int32=True)
    places = torch.arange(len(choice), dtype=torch.int32, device=key.device)
    places = places.where(in_order < num_experts, -1)
    copy = torch.empty_like(places).scatter_(0, choice, places).view(-1, top_k)
    own_copy, copy = copy[:num_tokens].clone(), copy[num_tokens:].clone()
    scale = scale.reshape(-1, 1).index_select(0, choice)
    return lengths, rows, scale[: num_copies()], own_copy, copy, ends


def _to_host(number: Tensor) -> Callable[[], int]:
    """Starts to copy a number to the host. Returns a function that waits for it and returns it."""
    if not number.is_cuda:
        return lambda: int(number)
    on_host = torch.empty((), dtype=number.dtype, pin_memory=True)
    on_host.copy_(number, non_blocking=True)
    copied = torch.cuda.current_stream().record_event()

    def wait() -> int:
        copied.synchronize()
        return int(on_host)

    return wait


@gather_tokens.register_fake
def _(
    x: Tensor, expert: Tensor, weight: Tensor, num_experts: int, group: str
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    num_rows, num_copies = (torch.library.get_ctx().new_dynamic_size() for _ in range(2))

    def integers(*shape: int | torch.SymInt) -> Tensor:
        return expert.new_empty(shape, dtype=torch.int32)

    return (
        torch.empty(named_group(group).size(), dtype=torch.int64, device="cpu"),
        x.new_empty(num_rows, x.shape[1]),
        weight.new_empty(num_copies, 1),
        integers(*expert.shape),
        integers(num_rows, expert.shape[1]),
        integers(num_experts),
    )
