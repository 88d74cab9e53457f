"""Failures of ranks: timeouts, and error messages of failed collectives.

If a rank dies, collectives on gloo fail at once, and torchrun ends the ranks that wait in NCCL. If a rank
hangs, the others wait for parallel.timeout_s. The flight recorder of torch then writes the last collectives
of each rank into the run's folder. ``torchfrtrace`` compares them.
"""

from __future__ import annotations

import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _world

from titan_tree.errors import UserError

START_TIMEOUT_S = 3600.0  # until the first step is done: the time to compile differs between ranks
FLIGHT_RECORDER = "flight_recorder"  # a folder in the run's folder

_STARTED = time.time()
_variables: dict[str, str] = {}  # the environment variables that ``record_collectives`` has set


def start_timeout(timeout_s: float) -> float:
    """Returns the timeout in seconds while a rank may compile, or write the exported weights."""
    return max(START_TIMEOUT_S, timeout_s)


def record_collectives(folder: Path) -> None:
    """Turns on the flight recorder. Call it before NCCL starts. Variables that the user has set stay."""
    with suppress(OSError):  # rank 0 reports it when it writes config.toml
        (folder / FLIGHT_RECORDER).mkdir(parents=True, exist_ok=True)
    prefix = str(folder / FLIGHT_RECORDER / "rank_")
    for name, value in {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "5000",  # the process ends only after several times this
        "TORCH_FR_DUMP_TEMP_FILE": prefix,
    }.items():
        if os.environ.get(name) == _variables.get(name):  # unset, or from an earlier run of this process
            os.environ[name] = _variables[name] = value


def set_timeout(seconds: float) -> None:
    """Sets how long the collectives of all groups of this rank may take from now on."""
    for group in list(_world.pg_map):
        for device in group._device_types:
            group._get_backend(device)._set_default_timeout(timedelta(seconds=seconds))


@contextmanager
def failures_named(
    what: Callable[[], str], advice: Callable[[], str], timeout_s: float | None = None
) -> Iterator[None]:
    """Converts a failed collective into a UserError of one line.

    If the block runs for more than ``timeout_s``, it also prints where this rank is.

    Args:
        what: returns what this rank is doing, such as its step and trees.
        advice: returns how the user can continue.
    Raises:
        UserError: a collective failed because another rank has ended or did not come in time.
    """
    timer = threading.Timer(timeout_s or 0.0, _report_delay, (threading.get_ident(), what, timeout_s))
    timer.daemon = True
    if timeout_s is not None:
        timer.start()
    try:
        yield
    except RuntimeError as error:
        if not is_lost_rank(error):
            raise
        raise UserError(
            f"rank {_rank()}: {_collective(error)} failed in {what()}: {lost_rank_reason(error)}; another "
            f"rank has ended or hangs, see its messages; {_dump()}{advice()}"
        ) from None
    finally:
        timer.cancel()


def is_lost_rank(error: BaseException) -> bool:
    """Returns whether a collective failed because another rank has ended or did not come in time."""
    text = str(error)  # gloo's name is missing if another collective of this rank has timed out first
    return isinstance(error, dist.DistError) or "/gloo/" in text or "pair closure" in text


def lost_rank_reason(error: BaseException) -> str:
    """Returns torch's reason for an error of ``is_lost_rank``, without its advice and its line of source."""
    text = str(error).partition("This is typically")[0].splitlines()[0]
    return re.sub(r"^\[\S+\] ", "", text).strip(". ")


def _report_delay(thread: int, what: Callable[[], str], timeout_s: float) -> None:
    """Prints where a thread is. NCCL ends a process that waits too long without naming its trees."""
    frame = traceback.extract_stack(sys._current_frames()[thread])[-1]
    place = f"{frame.name} ({frame.filename}:{frame.lineno})"
    text = f"rank {_rank()}: {what()} takes more than parallel.timeout_s = {timeout_s:g} s, at {place}"
    print(text, file=sys.stderr, flush=True)


def _collective(error: BaseException) -> str:
    """Returns the name of the collective that raised ``error``, as far as the traceback shows it."""
    frames = traceback.extract_tb(error.__traceback__)
    calls = [frame.name for frame in frames if frame.filename.endswith("distributed_c10d.py")]
    places = (
        os.path.join("torch", "distributed"),
        os.path.join("titan_tree", "distributed", "experts", "exchange"),
    )
    waits = [frame.name for frame in frames if any(place in frame.filename for place in places)]
    return calls[0] if calls else waits[-1] if waits else "a collective"


def _rank() -> str:
    """Returns the number of this rank, also before it has joined the process group."""
    return os.environ.get("RANK", "0")


def _dump() -> str:
    """Writes the last collectives of this rank, and returns where, as a part of a sentence."""
    path = Path(f"{os.environ.get('TORCH_FR_DUMP_TEMP_FILE', '')}{_rank()}")
    # NCCL writes its own if it times out.
    if not path.exists() or path.stat().st_mtime < _STARTED:
        try:
            dump: Any = torch._C._distributed_c10d
            path.write_bytes(dump._dump_fr_trace(True, True, False))
        except (OSError, AttributeError):  # not writable; a torch without a recorder for gloo
            return ""
    return f"its last collectives are in {path}; "
