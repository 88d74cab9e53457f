"""The environment variables with which torchrun starts a rank, and the store through which ranks meet.

All variables are checked before anything waits. A rank that waits for the others, or for a program that is
not one of them, ends with one line.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from titan_tree.errors import UserError, shorten

POLL_S = 0.1  # interval at which a rank that waits for the others reads the store
JOIN_S = 30.0  # the least time that a rank waits for the others: imports take seconds on a loaded machine
ANSWER_S = 2.0  # longer than torch needs to report a timeout of its own
ENDING_S = 60.0  # longer than a process needs to end on a loaded machine
LOCAL = "LOCAL_WORLD_SIZE"
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def ranks_of_machine(default: int = 1) -> int:
    """Returns how many ranks torchrun started on this machine. Raises UserError if that is no number."""
    return _integer(os.environ, LOCAL, 1) if LOCAL in os.environ else default


@dataclass(frozen=True)
class Launch:
    """What torchrun tells a rank.

    Attributes:
        rank: number of this rank.
        num_ranks: number of ranks.
        local_rank: number of this rank on its machine.
        host, port: address of the store, which rank 0 or torchrun serves.
    """

    rank: int
    num_ranks: int
    local_rank: int
    host: str
    port: int

    @staticmethod
    def of(variables: Mapping[str, str] = os.environ) -> Launch | None:
        """Returns what the variables say, or None for a process that trains alone.

        Raises:
            UserError: a variable is missing, or has a value that torchrun never sets.
        """
        if "RANK" not in variables and variables.get("WORLD_SIZE", "1") == "1":
            return None
        for name in NAMES:
            if not variables.get(name, "").strip():
                given = ", ".join(other for other in NAMES if variables.get(other, "").strip())
                raise _wrong(
                    name, "a value, because other variables of torchrun are set", f"none besides {given}"
                )
        num_ranks = _integer(variables, "WORLD_SIZE", 1)
        on_this_machine = num_ranks
        if LOCAL in variables:
            on_this_machine = _integer(variables, LOCAL, 1, num_ranks, "WORLD_SIZE")
        rank = _integer(variables, "RANK", 0, num_ranks - 1, "WORLD_SIZE - 1")
        least = min((rank, "RANK"), (on_this_machine - 1, "the ranks of a machine - 1"))
        return Launch(
            rank=rank,
            num_ranks=num_ranks,
            local_rank=_integer(variables, "LOCAL_RANK", 0, *least),
            host=variables["MASTER_ADDR"],
            port=_integer(variables, "MASTER_PORT", 1, 65535),
        )

    def join(self, timeout_s: float) -> dist.Store:
        """Returns a store that all ranks of this start share, and no earlier one has used. Collective.

        Args:
            timeout_s: how long this rank waits for the others, but at least JOIN_S.
        Raises:
            UserError: ranks did not come in time, or another program serves the address.
        """
        timeout_s = max(timeout_s, JOIN_S)
        deadline = time.monotonic() + timeout_s
        # Torch's client waits without limit for the answer of a program that accepts connections.
        connected: Future[dist.Store] = Future()
        threading.Thread(target=self._connect, args=(connected, timeout_s), daemon=True).start()
        try:
            if not wait([connected], timeout_s + ANSWER_S).done:
                raise dist.DistStoreError("nothing there answers as torch's store does")
            return self._store_of_this_start(connected.result(), deadline)
        except (RuntimeError, ValueError) as error:  # torch raises both
            if isinstance(error, UserError):
                raise
            reason = str(error).splitlines()[0].strip(". ") or type(error).__name__
            raise UserError(
                f"rank {self.rank}: cannot meet the other ranks at MASTER_ADDR:MASTER_PORT = "
                f"{shorten(self.host)[1:-1]}:{self.port}: {reason}; expected all {self.num_ranks} ranks "
                f"within {timeout_s:g} s (parallel.timeout_s), and no other program on this port; to train "
                "alone, unset RANK and WORLD_SIZE"
            ) from None

    def _connect(self, connected: Future[dist.Store], timeout_s: float) -> None:
        # A client of torch that gives up prints a stack, so ``join`` gives up first, and the process ends.
        timeout = timedelta(seconds=timeout_s + (ENDING_S if self.rank else 0))
        try:
            connected.set_result(next(rendezvous("env://", timeout=timeout))[0])
        except BaseException as error:
            connected.set_exception(error)

    def _store_of_this_start(self, store: dist.Store, deadline: float) -> dist.Store:
        """Returns a part of ``store`` that no earlier start has used. Collective.

        When torchrun restarts all ranks, they may get the same store, which has the addresses of dead ranks.
        No variable numbers the starts: each machine has its own TORCHELASTIC_RESTART_COUNT, and a machine
        that rejoins begins at 0. Therefore each rank writes a new id, and rank 0 lists the ids. The list may
        contain ids of dead ranks that are not replaced yet. Ranks count themselves in each list that has
        their id, so only a list without dead ranks gets a full count.

        Raises:
            dist.DistStoreError: a rank did not come in time.
            UserError: this rank has another WORLD_SIZE than rank 0.
        """
        new_id, names = secrets.token_hex(8), [f"rank {other}" for other in range(self.num_ranks)]
        store.set(names[self.rank], new_id)
        counted = ""
        while True:
            if self.rank == 0:
                if missing := [name for name in names if not store.check([name])]:
                    _wait_until(deadline, f"{missing[0]} has not started")
                    continue
                store.set("ranks", " ".join(id.decode() for id in store.multi_get(names)))
            ids = store.get("ranks").decode().split() if store.check(["ranks"]) else []
            start = f"start {hashlib.sha256(' '.join(ids).encode()).hexdigest()}"
            if new_id in ids and len(ids) != self.num_ranks:
                raise _wrong("WORLD_SIZE", f"{len(ids)}, as on rank 0", str(self.num_ranks))
            if new_id in ids and start != counted:
                store.add(start, 1)
                counted = start
            if counted and store.add(counted, 0) == self.num_ranks:
                return dist.PrefixStore(counted, store)
            _wait_until(deadline, "not all ranks have started")


def _wait_until(deadline: float, reason: str) -> None:
    """Waits for a short time. Raises DistStoreError with the reason after the deadline."""
    if time.monotonic() > deadline:
        raise dist.DistStoreError(reason)
    time.sleep(POLL_S)


def _integer(
    variables: Mapping[str, str], name: str, low: int, high: int | None = None, limit: str = ""
) -> int:
    text = variables[name].strip()
    number = int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else -1
    if number < low or (high is not None and number > high):
        upper = "" if high is None else f" to {high}" + f" ({limit})" * bool(limit)
        raise _wrong(name, f"an integer from {low}{upper}", shorten(text))
    return number


def _wrong(name: str, expected: str, got: str) -> UserError:
    return UserError(
        f"environment variable {name}: expected {expected}, got {got}; start with torchrun, or remove RANK "
        "and WORLD_SIZE to train with one process"
    )
