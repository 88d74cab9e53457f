"""Combines failures in one run: a second run starts in its folder, the disk fills up, and a signal arrives.

The second run must be refused in one line. The first one must name the checkpoint that it cannot write. The
same command must then reach the losses of an uninterrupted run. A limit on the size of files imitates a full
disk, because it needs no privileges.
"""

from __future__ import annotations

import random
import signal
from pathlib import Path

from signals import check_named_checkpoints
from training import (
    GRACE_S,
    PATIENCE_S,
    STEPS,
    TIMEOUT_S,
    Run,
    check,
    limit_file_size,
    reference,
    resumed_step,
)
from training import (
    prepare as prepare,
)

TRIALS = 20
BEFORE, AFTER = "second run, full disk, then a signal", "second run, a signal, full disk while leaving"
KINDS = tuple(f"{order}, {ranks}" for order in (BEFORE, AFTER) for ranks in ("1 rank", "2 ranks"))
FULL_AT = 100_000  # bytes: larger than the log files, smaller than any checkpoint


def trial(kind: str, draw: random.Random, work: Path, folder: Path) -> str:
    """Causes all failures, then resumes. Returns when they happened."""
    run = Run(folder / "run", int(kind.split()[-2]))
    run.plant()
    number = draw.choice((signal.SIGTERM, signal.SIGINT, signal.SIGHUP))
    with run.start() as first:
        run.wait_for_step(1, first)
        with run.start() as second:
            refusal = second.refusal()
        check(str(run.folder) in refusal, f"the refusal does not name the folder: {refusal}")
        moment = run.wait_for_moment(draw, first, first=1)
        limit_file_size(first, FULL_AT)
        if kind.startswith(AFTER):
            first.send(number, range(run.ranks))
        statuses = first.wait(timeout_s=PATIENCE_S)
    first.check_no_traceback()
    check(all(statuses) or run.step() == STEPS, f"exit statuses {statuses} on a full disk")
    done, failed = run.step(), "writing the checkpoint failed" in first.text()
    check_named_checkpoints(run, first)
    if kind.startswith(BEFORE):
        with run.start() as third:
            run.wait_for_moment(draw, third)
            third.send(number, range(run.ranks))
            third.wait(timeout_s=TIMEOUT_S + GRACE_S)
        third.check_no_traceback()
        check_named_checkpoints(run, third)
    resumed = resumed_step(run.finish())
    # A run that ends right after a checkpoint does not write another one.
    check(failed or resumed >= done, f"resumed from step {resumed} after {done} steps without an error")
    run.check_planted()
    run.check_equals(reference(work, run.ranks))
    return f"full disk {moment}; {refusal}"
