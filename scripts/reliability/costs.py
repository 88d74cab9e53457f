"""Measures the time of cross-rank checks: two ranks train with a check in every step, and without checks.

Runs of both kinds alternate, so that changes of the clock rate affect them alike. The cost of a check is the
difference between the median times of a step. Run this campaign alone, on a machine without other work.
"""

from __future__ import annotations

import csv
import random
from pathlib import Path
from statistics import median

from training import OPTIONS, Run, check, preload

TRIALS = 1
KINDS = ("cross-rank checks",)
ROUNDS = 5
STEPS, FIRST = 60, 5  # of a run; steps before FIRST are not counted
SHARE = 0.005  # largest share of the time of a step that checks may take, at the default interval


def prepare(work: Path) -> None:
    preload()


def trial(kind: str, draw: random.Random, work: Path, folder: Path) -> str:
    """Times steps with and without checks. Returns the cost of a check, and its share of a step."""
    from titan_tree.distributed.settings import ParallelConfig

    seconds: dict[int, list[float]] = {0: [], 1: []}
    for number in range(ROUNDS):
        for interval in seconds:
            own = (f"parallel.check_interval={interval}", f"training.steps={STEPS}", "checkpoint.interval=0")
            run = Run(folder / f"run-{number}-{interval}", ranks=2, options=OPTIONS + own)
            run.finish()
            with (run.folder / "metrics.csv").open(newline="") as file:
                seconds[interval] += [float(row["step_s"]) for row in csv.DictReader(file)][FIRST:]
    step, cost = median(seconds[0]), median(seconds[1]) - median(seconds[0])
    every = ParallelConfig().check_interval
    share = cost / every / step if every else 0.0
    note = f"a check takes {1e3 * cost:.2f} ms, a step {1e3 * step:.0f} ms"
    check(share <= SHARE, f"{note}; every {every} steps: {share:.3%}")
    return f"{note}; every {every} steps: {share:.3%}"
