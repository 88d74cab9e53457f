"""Trains 1,000 steps on irregular trees with four ranks, and checks that the memory of no rank grows.

Trees branch at random, and samples differ in length. The ranks therefore get different numbers of trees,
micro-batches and partitions. After step 400, caches are full. The trial fits a line to the resident memory of
each rank from there on. The line may rise by at most 1 % of the rank's memory.
"""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path
from statistics import linear_regression

from training import ROOT, Processes, Run, check, preload

TRIALS = 1
KINDS = ("1,000 steps on four ranks",)
STEPS, SETTLED, GROUPS = 1000, 400, 300
GROWTH = 0.01  # of the memory, from step SETTLED to step STEPS
VOCABULARY = 64  # of the data of tests/support/tiny_run.py


def prepare(work: Path) -> None:
    sys.path.insert(0, str(ROOT))  # for tests/
    preload()


def trial(kind: str, draw: random.Random, work: Path, folder: Path) -> str:
    """Trains and samples the memory of each rank. Returns how fast it grew."""
    from tests.support.tiny_run import write_groups

    data = write_groups(folder / "data.jsonl", GROUPS, seed=draw.randrange(2**32))
    options = (
        f"training.steps={STEPS}",
        "checkpoint.interval=0",
        f"data.files={data}",
        "data.tokenizer=null",
        "data.global_batch_groups=6",
        "data.max_tokens=48",
        f"model.overrides.vocab_size={VOCABULARY}",
        "model.overrides.hidden_size=32",
        "model.overrides.head_dim=16",
        "metrics.loggers=[console,csv]",
    )
    run = Run(folder / "run", ranks=4, options=options)
    steps, memory = [], []
    with run.start() as processes:
        while len(processes.running()) == run.ranks:
            if (step := run.step()) > (steps[-1] if steps else 0) and step < STEPS:
                steps.append(step)
                memory.append(_resident_mb(processes))
            time.sleep(0.1)
        statuses = processes.wait()
    processes.check_no_traceback()
    check(not any(statuses), f"exit statuses {statuses}: {processes.text()[-300:]!r}")
    settled = [i for i, step in enumerate(steps) if step >= SETTLED]
    notes, grown = [], False
    for rank in range(run.ranks):
        of_rank = [memory[i][rank] for i in settled]
        slope = linear_regression([steps[i] for i in settled], of_rank).slope
        growth = slope * (STEPS - SETTLED)
        notes.append(f"rank {rank}: {growth:+.2f} MB of {of_rank[-1]:.0f} MB")
        grown |= growth > GROWTH * of_rank[0]
    note = f"growth in {STEPS - SETTLED} steps: {', '.join(notes)}"
    check(not grown, note)
    return note


def _resident_mb(processes: Processes) -> list[float]:
    """Returns the resident memory of each rank in MB."""
    pages = [int(Path(f"/proc/{pid}/statm").read_text().split()[1]) for pid in processes.pids]
    return [os.sysconf("SC_PAGE_SIZE") * number / 1e6 for number in pages]
