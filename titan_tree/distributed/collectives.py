"""Collective operations over all ranks. Every rank makes the same calls in the same order.

A single rank gets its arguments back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import _resolve_process_group

from titan_tree.errors import AgreedError, UserError

T = TypeVar("T")


def world_size() -> int:
    """Returns the number of ranks; 1 without a process group."""
    return dist.get_world_size() if dist.is_initialized() else 1


def world_group() -> dist.ProcessGroup | None:
    """Returns the group of all ranks; None for a single rank."""
    return dist.group.WORLD if world_size() > 1 else None


def rank() -> int:
    """Returns the number of this rank; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def named_group(name: str) -> dist.ProcessGroup:
    """Returns the group called ``name``: arguments of custom operators cannot be process groups."""
    return _resolve_process_group(cast(Any, name))


def all_reduce_sum(values: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Returns the sum of ``values`` over ``group``, or over all ranks, and leaves ``values`` unchanged."""
    return _all_reduce(values, dist.ReduceOp.SUM, group)


def all_reduce_max(values: Tensor) -> Tensor:
    """Returns the elementwise maximum of ``values`` over all ranks and leaves ``values`` unchanged."""
    return _all_reduce(values, dist.ReduceOp.MAX)


def _all_reduce(
    values: Tensor, operation: dist.ReduceOp.RedOpType, group: dist.ProcessGroup | None = None
) -> Tensor:
    if world_size() == 1:
        return values
    reduced = values.clone()
    dist.all_reduce(reduced, operation, group)
    return reduced


def all_reduce_named(loss: Tensor, sums: dict[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
    """Sums the loss and named values over all ranks in one all-reduce.

    Ranks may pass different names: a rank that ran only dummy batches does not know the metrics of the loss.
    A name that a rank does not pass counts as 0 there.

    Args:
        loss: 0-dim fp32.
        sums: 0-dim tensors of any dtype.
    Returns:
        The summed loss, and the sums in fp32, in alphabetical order of the names of all ranks.
    """
    if world_size() == 1:
        return loss, sums
    names_by_rank: list[list[str]] = [[]] * world_size()
    dist.all_gather_object(names_by_rank, list(sums))
    names = sorted({name for names in names_by_rank for name in names})
    zero = torch.zeros_like(loss)
    total = torch.stack([loss, *(sums.get(name, zero).float() for name in names)])
    dist.all_reduce(total)
    return total[0], dict(zip(names, total[1:], strict=True))


def call_and_gather(function: Callable[[], T]) -> list[T]:
    """Calls a function on every rank. All return the results by rank, or raise the first error of any."""
    result, error = _outcome(function)
    return cast(list[T], _gather(result, error))


def call_on_all_ranks_keep_rank0(function: Callable[[], T]) -> T:
    """Calls a function on every rank. All return rank 0's result, or raise the first error of any rank."""
    return call_and_gather(function)[0]


def call_on_all_ranks(function: Callable[[], T]) -> T:
    """Calls a function on every rank and returns this rank's result, which does not travel to other ranks.

    Raises:
        AgreedError: the function raised a UserError on some rank. All ranks raise the first one.
    """
    result, error = _outcome(function)
    try:
        _gather(None, error)
    except UserError as first:
        raise AgreedError(str(first)) from None
    return cast(T, result)


def _outcome(function: Callable[[], T]) -> tuple[T | None, Exception | None]:
    """Returns what a function returns, or the error that it raises."""
    try:
        return function(), None
    except Exception as error:
        return None, error


def _gather(result: object, error: Exception | None) -> list[object]:
    """Returns the results of all ranks, or raises the first error of any."""
    outcome = result, error
    of_ranks = [outcome] * world_size()
    if world_size() > 1:
        dist.all_gather_object(of_ranks, outcome)
        of_ranks[rank()] = outcome  # its error has a traceback
    for _, failure in of_ranks:
        if failure is not None:
            raise failure
    return [result for result, _ in of_ranks]


def call_on_rank_0(function: Callable[[], T]) -> T:
    """Calls a function on rank 0 only. All ranks return its result, or raise its error."""
    return call_on_all_ranks_keep_rank0(function if rank() == 0 else lambda: cast(T, None))
