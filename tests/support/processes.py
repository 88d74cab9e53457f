"""Starts the ranks of a distributed run as processes of a test.

The test's own process hosts the stores through which ranks find each other, as torchrun does. The operating
system chooses their ports and they stay open, so that no other process can take one.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# A rank may wait for another one that a loaded machine runs much later.
TIMEOUT = timedelta(minutes=10)


def run_ranks(
    function: Callable[..., None], num_ranks: int, *args: Any, num_groups: int = 1, start: str = "forkserver"
) -> None:
    """Calls ``function(rank, ports, *args)`` in ``num_ranks`` processes and waits for all of them.

    Args:
        num_groups: process groups that the ranks form one after another. Each needs a port of its own; pass
            one of the ``num_groups`` ports to ``as_rank``.
        start: "forkserver" forks all ranks of a test session from one process that has imported titan_tree,
            which takes seconds. Ranks on a GPU need "spawn".
    """
    ranks = start_ranks(function, num_ranks, *args, num_groups=num_groups, start=start)
    while not ranks.join():
        pass


def start_ranks(
    function: Callable[..., None], num_ranks: int, *args: Any, num_groups: int = 1, start: str = "forkserver"
) -> mp.ProcessContext:
    """Starts what ``run_ranks`` runs, and returns the processes without waiting for them."""
    if start == "forkserver":
        multiprocessing.set_forkserver_preload(["tests.support.tiny_run"])
    stores = [dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=TIMEOUT) for _ in range(num_groups)]
    ports = [store.port for store in stores]
    ranks = mp.start_processes(_run, (function, ports, *args), num_ranks, join=False, start_method=start)
    assert ranks is not None
    ranks.stores = stores  # they end with the ranks
    return ranks


def _run(rank: int, function: Callable[..., None], ports: list[int], *args: Any) -> None:
    torch.set_num_threads(1)
    function(rank, ports, *args)


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
