"""Checks that ranks agree: on what they run and read, and on the weights that they hold."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_tree.distributed.collectives import world_size
from titan_tree.errors import UserError

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size in bytes
SHOWN = 60  # characters of a value that a message shows


def check_agreement(
    facts: Mapping[str, object], when: str, advice: str = "", error: type[UserError] = UserError
) -> None:
    """Compares facts of all ranks, by name. Collective.

    Args:
        facts: values with a ``repr`` that is the same on equal ranks. A message shows those that are strings.
        when: the beginning of a message, such as "step 3".
        advice: the end of a message: what to do if files and settings are the same.
        error: what to raise.
    Raises:
        UserError: any two ranks differ. All ranks raise it, and it names the first difference.
    """
    if world_size() == 1:
        return
    by_rank: list[dict[str, object]] = [{}] * world_size()
    dist.all_gather_object(by_rank, dict(facts))
    ((common, votes),) = Counter(map(repr, by_rank)).most_common(1)
    if votes == len(by_rank):
        return
    names = dict.fromkeys(name for facts in by_rank for name in facts)
    different = [name for name in names if len({repr(facts.get(name)) for facts in by_rank}) > 1]
    is_majority = votes > len(by_rank) / 2
    odd = [rank for rank, facts in enumerate(by_rank) if not (is_majority and repr(facts) == common)]
    differ = "differs from the others" if is_majority else "differ"
    more = f" and {len(different) - 1} more" if len(different) > 1 else ""
    values = _values([facts.get(different[0]) for facts in by_rank])
    raise error(
        f"{when}: rank {', '.join(map(str, odd))} {differ} in {different[0]}{values}{more}; start all ranks "
        f"with the same files and settings{advice}"
    )


def _values(by_rank: Sequence[object]) -> str:
    """Returns the value of rank 0 and the first other one, in brackets, or nothing for fingerprints."""
    first = by_rank[0]
    rank, other = next((rank, value) for rank, value in enumerate(by_rank) if value != first)
    if not (isinstance(first, str) and isinstance(other, str)):
        return ""
    return f" (rank 0: {_short(first)}; rank {rank}: {_short(other)})"


def _short(text: str) -> str:
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def check_weights(model: nn.Module, schedule: object, step: int, interval: int) -> None:
    """Compares the weights that ranks gather, their buffers and their schedules. Collective.

    A fingerprint is the sum of a tensor's bits, read as integers. It is exact, so its order does not matter,
    and any single flipped bit changes it. Sharded weights are gathered one by one.

    Args:
        schedule: what decides the next steps, with a ``repr`` that is the same on every rank.
        interval: steps since the last check.
    Raises:
        UserError: any two ranks differ. All ranks raise it.
    """
    tensors = model.state_dict(keep_vars=True)  # sharded, even if the step has left gathered weights in place
    sums = torch.stack([_fingerprint(tensor) for tensor in tensors.values()]).tolist()
    check_agreement(
        {"settings or data position": hashlib.sha256(repr(schedule).encode()).digest()}
        | dict(zip(tensors, sums, strict=True)),
        f"step {step}",
        "; if weights differ, a GPU or a link may be faulty: remove the checkpoints of the last "
        f"{interval} steps (parallel.check_interval), then continue without it",
    )


def _fingerprint(tensor: Tensor) -> Tensor:
    """Returns the sum of the bits of a tensor, which may be sharded, as an int64 number on its device."""
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    whole = whole.to(whole.dtype)  # dequantizes a quantized weight, and leaves others as they are
    return whole.contiguous().view(INTEGERS[whole.element_size()]).sum(dtype=torch.int64)
