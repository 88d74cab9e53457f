"""Starts the ranks of a distributed run as processes of a test.

The test's own process hosts the stores through which ranks find each other, as torchrun does. The operating
system chooses their ports and they stay open, so that no other process can take one.

A test session keeps its pair of ranks, and its four ranks, of each start method: a test hands them a function
and its arguments. Starting processes for each test instead would take a second, and on GPUs ten and more.
"""

import functools
import gc
import importlib
import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support.isolation import restore_registries
from titan_tree.distributed import faults

ROOT = Path(__file__).parents[2]
# A rank may wait for another one that a loaded machine runs much later.
TIMEOUT = timedelta(minutes=10)
# Seconds that the other ranks get to report their own errors after one rank has failed.
GRACE_S = 5.0
# Numbers of ranks that a session keeps.
KEPT = (2, 4)
# What ranks import before they start, because it takes seconds.
PRELOADED = ["tests.support.tiny_run", "titan_tree.run.metrics.builtin_loggers"]


def run_ranks(
    function: Callable[..., None],
    num_ranks: int,
    *args: Any,
    num_groups: int = 1,
    start: str = "forkserver",
    fresh: bool = False,
) -> None:
    """Calls ``function(rank, ports, *args)`` in ``num_ranks`` processes and waits for all of them.

    Args:
        num_groups: process groups that the ranks form one after another. Each needs a port of its own; pass
            one of the ``num_groups`` ports to ``as_rank``.
        start: "forkserver" forks all ranks of a test session from one process that has imported titan_tree.
            Ranks on GPUs need "spawn", which starts fresh processes.
        fresh: starts new processes, for functions that end them.
    Raises:
        RankError: a rank of the session's has raised an error.
    """
    if num_ranks in KEPT and not fresh:
        if (num_ranks, start) not in _kept:
            _kept[num_ranks, start] = SessionRanks(num_ranks, start)
        _kept[num_ranks, start].run(function, *args, num_groups=num_groups)
        return
    ranks = start_ranks(function, num_ranks, *args, num_groups=num_groups, start=start)
    while not ranks.join():
        pass


def start_ranks(
    function: Callable[..., None], num_ranks: int, *args: Any, num_groups: int = 1, start: str = "forkserver"
) -> mp.ProcessContext:
    """Starts new processes that run what ``run_ranks`` runs, and returns them without waiting for them."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    stores = _stores(num_groups)
    ports = [store.port for store in stores]
    ranks = mp.start_processes(_run, (function, ports, *args), num_ranks, join=False, start_method=start)
    assert ranks is not None
    ranks.stores = stores  # they end with the ranks
    return ranks


def _stores(number: int) -> list[dist.TCPStore]:
    return [dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT) for _ in range(number)]


def _run(rank: int, function: Callable[..., None], ports: list[int], *args: Any) -> None:
    """Calls the function with one thread and one seed. fp32 on a GPU is fp32."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    function(rank, ports, *args)


class RankError(AssertionError):
    """A rank failed. The message contains its traceback."""


@dataclass
class _Answer:
    """What a rank sends back: the traceback if it failed, and the CPU time that the call took, in seconds."""

    error: str | None
    cpu_s: float


class SessionRanks:
    """Ranks that live until the session ends or one of them fails."""

    def __init__(self, num_ranks: int, start: str) -> None:
        multiprocessing.set_forkserver_preload(PRELOADED)
        context: Any = multiprocessing.get_context(start)
        self.cpu_s = 0.0  # CPU time of all calls so far
        self._processes: list[BaseProcess] = []
        self._connections: list[Connection] = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            # Data loading starts processes of its own, so a rank cannot be a daemon.
            process = context.Process(target=_serve, args=(rank, theirs))
            process.start()
            theirs.close()
            self._processes.append(process)
            self._connections.append(ours)

    def run(self, function: Callable[..., None], *args: Any, num_groups: int) -> None:
        """Calls ``function(rank, ports, *args)`` in each rank.

        Raises:
            RankError: a rank raised an error or died. All ranks are ended, since others may wait for it.
        """
        stores = _stores(num_groups)
        ports = [store.port for store in stores]
        for connection in self._connections:
            connection.send((function, ports, args))
        errors: dict[int, str] = {}
        waiting = dict(enumerate(self._connections))
        while waiting:
            ready = wait(list(waiting.values()), GRACE_S if errors else None)
            if not ready:
                break
            for rank in [rank for rank, connection in waiting.items() if connection in ready]:
                try:
                    answer = waiting.pop(rank).recv()
                except EOFError:
                    self._processes[rank].join(GRACE_S)
                    answer = _Answer(f"the process ended with status {self._processes[rank].exitcode}", 0.0)
                self.cpu_s += answer.cpu_s
                if answer.error is not None:
                    errors[rank] = answer.error
        if errors:
            self.stop()
            raise RankError("\n".join(f"rank {rank}: {error}" for rank, error in errors.items()))

    def stop(self) -> None:
        """Ends the processes. The next test that needs ranks starts new ones."""
        for kind, ranks in list(_kept.items()):
            if ranks is self:
                del _kept[kind]
        for process, connection in zip(self._processes, self._connections, strict=True):
            connection.close()
            process.kill()
        for process in self._processes:
            process.join()


_kept: dict[tuple[int, str], SessionRanks] = {}  # by their number and start method


def stop_session_ranks() -> None:
    """Ends all ranks that the session keeps."""
    for ranks in list(_kept.values()):
        ranks.stop()


def session_cpu_s() -> float:
    """Returns the CPU time that the calls of all kept ranks took, in seconds."""
    return sum(ranks.cpu_s for ranks in _kept.values())


def _serve(rank: int, connection: Connection) -> None:
    """Calls the functions that the session sends until it closes the connection."""
    for module in PRELOADED:
        importlib.import_module(module)
    caches, environment = _mesh_caches(), dict(os.environ)
    gc.freeze()  # what is imported by now takes half a second to search and to collect after each call
    while True:
        try:
            function, ports, args = connection.recv()
        except EOFError:
            return
        start, error = time.process_time(), None
        try:
            _run(rank, function, ports, *args)
        except BaseException:
            error = traceback.format_exc()
        connection.send(_Answer(error, time.process_time() - start))
        if error is not None:  # other ranks may wait for this one, so the session ends them all
            return
        _forget(caches)
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


def _forget(caches: list[Any]) -> None:
    """Removes what a call left behind, in ``caches`` too, so that the next one does not depend on it."""
    if dist.is_initialized():
        dist.destroy_process_group()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()
    restore_registries()
    faults._variables.clear()
    clear = getattr(torch._C, "_clear_DTensor_sharding_propagator_cache", None)
    if clear is not None:
        clear()
    for cache in [*caches, *_mesh_caches()]:
        cache.cache_clear()
    gc.collect()
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()  # other processes share the GPU


def _mesh_caches() -> list[Any]:
    """Returns the caches of DTensors: they compare meshes by their ranks, but the groups have ended.

    They are those of objects that are not frozen.
    """
    found = []
    for value in gc.get_objects():
        with suppress(ReferenceError):
            if type(value) is functools._lru_cache_wrapper and (value.__module__ or "").startswith(
                "torch.distributed."
            ):
                found.append(value)
    return found


@contextmanager
def as_rank(rank: int, num_ranks: int, port: int) -> Iterator[None]:
    """Sets the environment variables that torchrun sets for one of its processes."""
    variables = {
        "RANK": rank,
        "WORLD_SIZE": num_ranks,
        "LOCAL_RANK": rank,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,  # no rank hosts the store
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, str(value))
        yield


@contextmanager
def process_group(rank: int, num_ranks: int, port: int) -> Iterator[None]:
    """Joins a gloo group and leaves it at the end."""
    with as_rank(rank, num_ranks, port):
        dist.init_process_group("gloo")
        yield
        dist.destroy_process_group()


def torchrun(*arguments: object, **environment: str) -> str:
    """Runs a command on two ranks, as torchrun does, and returns what it prints."""
    path = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node=2",
            *map(str, arguments),
        ],
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | environment,
        cwd=ROOT,
        text=True,
        capture_output=True,
        timeout=200,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout
