"""How passes over chains are launched: round by round, and beside other kernels."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from titan_tree.tree.chunks import Chains

Run = Callable[[int, int], None]  # runs a pass over chains, or chunks, first .. end - 1


def run_rounds(run: Run, chains: Chains) -> None:
    """Runs all chains, one launch per round: a round needs the slots that earlier rounds fill."""
    for first, end in itertools.pairwise(chains.rounds[:, 0].tolist()):
        run(first, end)


@functools.cache
def _side_stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority)


@contextmanager
def beside(x: Tensor, priority: int = 0) -> Iterator[None]:
    """Launches kernels beside those that follow on the current stream of x's GPU, after those before.

    priority: -1, if programs of these kernels go first. Without a GPU, nothing changes.
    """
    if not x.is_cuda:
        yield
        return
    stream = _side_stream(x.device, priority)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        yield


def join(x: Tensor, priority: int = 0) -> None:
    """Lets the current stream wait for the kernels that were launched ``beside`` it."""
    if x.is_cuda:
        torch.cuda.current_stream(x.device).wait_stream(_side_stream(x.device, priority))
