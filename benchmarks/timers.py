"""Timers of benchmarks, and contenders that take turns."""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import TypeVar

import torch
import torch.distributed as dist
import triton

from titan_tree.cli.bench.record import Row


@dataclass
class Contender:
    """One of several things that a benchmark times side by side.

    Attributes:
        name: its label in tables.
        measure: takes one measurement or several of them; each maps names to numbers.
        scale: factor from what is measured to the whole, for contenders that measure a sample of the work.
        note: a remark for tables.
        samples: all measurements so far, by name, not scaled.
    """

    name: str
    measure: Callable[[], Iterable[dict[str, float]]]
    scale: float = 1.0
    note: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Returns the median of all measurements of ``name``, times ``scale``."""
        return self.scale * median(self.samples[name])


AnyContender = TypeVar("AnyContender", bound=Contender)


def run_rounds(contenders: Sequence[Contender], rounds: int) -> None:
    """Measures all contenders in turn, ``rounds`` times, so that clock changes affect all equally."""
    for _ in range(rounds):
        for contender in contenders:
            for sample in contender.measure():
                for name, value in sample.items():
                    contender.samples.setdefault(name, []).append(value)


def benchmark(
    contenders: Sequence[AnyContender],
    rounds: int,
    row: Callable[[AnyContender], Row],
    beside: Sequence[Contender] = (),
) -> list[Row]:
    """Measures all contenders in turn, and returns a row of each. Those of ``beside`` have none."""
    run_rounds([*beside, *contenders], rounds)
    return [row(contender) for contender in contenders]


def add_rounds(parser: argparse.ArgumentParser) -> None:
    """Declares ``--rounds``, the rounds of ``run_rounds``."""
    help = "measurements of each contender, in turn (default: %(default)s)"
    parser.add_argument("--rounds", type=int, default=3, help=help)


def time_ms(function: Callable[[], object], repeat: int = 0) -> float:
    """Returns the milliseconds of a call on this device, without the first one, which compiles.

    Args:
        function: what to call.
        repeat: takes the mean of so many calls. Ranks that communicate need it, because all of them must make
            the same calls. 0: takes the median. A GPU then repeats calls for 100 ms; on a CPU, three calls
            show that the benchmark runs, no more.
    """
    function()
    if repeat:
        dist.barrier()

        def calls() -> None:
            for _ in range(repeat):
                function()

        return 1e3 * wall_s(calls) / repeat
    if torch.cuda.is_available():
        return triton.testing.do_bench(function, warmup=20, rep=100, return_mode="median")
    return median(1e3 * wall_s(function) for _ in range(3))


def replay_ms(function: Callable[[], object]) -> float:
    """Returns the median milliseconds of a call in replays of a CUDA graph, so that the host does not count.

    The calls before the capture compile and tune. Caches are not flushed. On a CPU, this is ``time_ms``.
    """
    if not torch.cuda.is_available():
        return time_ms(function)
    synchronize()  # the calls run on streams that do not wait for the one that made their inputs
    return triton.testing.do_bench_cudagraph(function, rep=100, return_mode="median")


def plan_ms(prepare: Callable[[], object]) -> tuple[float | None, float]:
    """Returns the milliseconds of a plan on the GPU and on the host, medians of five calls.

    The first number is None without a GPU. The GPU is kept busy until all work is enqueued, so that its time
    does not contain that of the host.
    """
    times = []
    for _ in range(7):
        if torch.cuda.is_available():
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            torch.cuda._sleep(100_000_000)  # cycles: 50 ms
            began = time.perf_counter()
            start.record()
            prepare()
            end.record()
            host = 1e3 * (time.perf_counter() - began)
            end.synchronize()
            times.append((start.elapsed_time(end), host))
        else:
            times.append((0.0, 1e3 * wall_s(prepare)))
    gpu, host = (round(median(ms), 3) for ms in zip(*times[2:], strict=True))
    return (gpu if torch.cuda.is_available() else None), host


def wall_s(function: Callable[[], object]) -> float:
    """Returns the seconds of one call on the host's clock. Waits for the GPU before and after the call."""
    synchronize()
    started = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - started


def synchronize() -> None:
    """Waits until the GPU, if there is one, has finished all work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def reset_peak_memory(device: torch.device) -> None:
    """Starts a new measurement of ``peak_memory``."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory(device: torch.device) -> int:
    """Returns the largest number of bytes that tensors took since the reset. Returns 0 on a CPU."""
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
