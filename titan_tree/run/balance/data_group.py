"""DataGroup: a group of processes, one per rank, that make the inputs of the same steps.

It is separate from the group that trains: workers are processes of their own, and a thread must not use the
collectives of another thread.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from titan_tree.distributed.collectives import call_on_rank_0
from titan_tree.distributed.faults import is_lost_rank, lost_rank_reason
from titan_tree.errors import LostRankError, UserError

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class DataAddress:
    """Where the processes that make inputs meet: a part of torchrun's store. It can be pickled.

    Attributes:
        host, port: address of the store.
        prefix: start of all keys in the store.
        rank: number of this rank.
        num_ranks: number of ranks.
        start_timeout_s: seconds that a process waits for those of other ranks in its first ``start_steps``
            steps. They are made before any rank has finished its first step, which may take long.
        timeout_s: the same, in later steps.
        start_steps: number of these first steps.
    """

    host: str
    port: int
    prefix: str
    rank: int
    num_ranks: int
    start_timeout_s: float
    timeout_s: float
    start_steps: int

    @staticmethod
    def new(start_timeout_s: float, timeout_s: float, start_steps: int) -> DataAddress:
        """Returns a new address at the store of this run, the same on every rank. Collective."""
        return DataAddress(
            host=os.environ["MASTER_ADDR"],
            port=int(os.environ["MASTER_PORT"]),
            # The store may know earlier starts.
            prefix=f"data {call_on_rank_0(lambda: secrets.token_hex(8))}",
            rank=dist.get_rank(),
            num_ranks=dist.get_world_size(),
            start_timeout_s=start_timeout_s,
            timeout_s=timeout_s,
            start_steps=start_steps,
        )

    def store(self) -> dist.Store:
        timeout = timedelta(seconds=self.start_timeout_s)
        return dist.PrefixStore(self.prefix, dist.TCPStore(self.host, self.port, timeout=timeout))

    def publish_costs(self, version: int, costs: Sequence[float]) -> None:
        """Makes a version of the costs known to all processes that make inputs."""
        self.store().set(f"costs {version}", json.dumps(costs))


class DataGroup:
    """The workers with the same number of all ranks, which make the same steps.

    Creating it waits until the workers of all ranks have joined.

    Raises:
        LostRankError: another worker has ended, or did not come in time. All methods may raise it.
    """

    def __init__(self, address: DataAddress, worker: int) -> None:
        self.address, self.worker = address, worker
        self._steps = 0
        self._costs: dict[int, list[float]] = {}
        with self._named():
            self._store = address.store()
            store = dist.PrefixStore(f"worker {worker}", self._store)
            timeout = timedelta(seconds=address.start_timeout_s)
            group = dist.ProcessGroupGloo(store, address.rank, address.num_ranks, timeout)
        self._gloo: Any = group  # torch's stubs lack its collectives

    def gather(self, make: Callable[[], T], encode: Callable[[T], bytes]) -> tuple[T, list[bytes]]:
        """Calls ``make`` on every rank. Returns this rank's result, and those of all ranks, encoded, by rank.

        Raises:
            UserError: ``make`` raised it on some rank. All ranks raise the error of the first such rank.
        """
        result: T | None = None
        try:
            result = make()
            message = b"\0" + encode(result)
        except UserError as error:
            message = b"\1" + str(error).encode()
        if self._steps == self.address.start_steps:
            self._gloo._set_default_timeout(timedelta(seconds=self.address.timeout_s))
        self._steps += 1
        with self._named():
            parts = self._all_gather(message)
        for part in parts:
            if part[:1] == b"\1":
                raise UserError(part[1:].decode())
        return cast(T, result), [part[1:] for part in parts]

    def exchange(self, parts: Sequence[bytes]) -> list[bytes]:
        """Sends ``parts[r]`` to rank r, and returns what each rank has sent to this one."""
        with self._named():
            sizes = torch.tensor(list(map(len, parts)))
            from_ranks = torch.empty_like(sizes)
            self._gloo.alltoall_base(from_ranks, sizes, [], []).wait()
            received = torch.empty(int(from_ranks.sum()), dtype=torch.uint8)
            splits = from_ranks.tolist()
            self._gloo.alltoall_base(received, _tensor(b"".join(parts)), splits, sizes.tolist()).wait()
        return [part.numpy().tobytes() for part in received.split(splits)]

    def costs(self, version: int) -> Sequence[float]:
        """Returns the coefficients of a version as soon as rank 0 has published them."""
        if version not in self._costs:
            with self._named():
                self._costs[version] = json.loads(self._store.get(f"costs {version}"))
        return self._costs[version]

    def _all_gather(self, mine: bytes) -> list[bytes]:
        sizes = [torch.empty(1, dtype=torch.int64) for _ in range(self.address.num_ranks)]
        self._gloo.allgather([sizes], [torch.tensor([len(mine)])]).wait()
        longest = max(map(int, sizes))
        received = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
        self._gloo.allgather([received], [_tensor(mine.ljust(longest, b"\0"))]).wait()
        return [part[: int(size)].numpy().tobytes() for part, size in zip(received, sizes, strict=True)]

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Converts the error of a lost rank into a line."""
        try:
            yield
        except RuntimeError as error:
            if not is_lost_rank(error):
                raise
            raise LostRankError(
                f"rank {self.address.rank}: data worker {self.worker} cannot exchange trees: "
                f"{lost_rank_reason(error)}; the data worker of another rank has ended or hangs, see its "
                "messages"
            ) from None


def _tensor(content: bytes) -> Tensor:
    return torch.from_numpy(np.frombuffer(bytearray(content), np.uint8))
