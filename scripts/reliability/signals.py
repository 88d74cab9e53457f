"""Sends a signal that asks a run to end, then starts the same command again.

All ranks must end with status 128 + n and write a checkpoint of the last step, so that no step is repeated.
Each checkpoint that the text names must exist. With two ranks, a trial signals one of them or both.
"""

from __future__ import annotations

import random
import re
import signal
from pathlib import Path

from training import (
    GRACE_S,
    STEPS,
    TIMEOUT_S,
    Processes,
    Run,
    check,
    reference,
    resumed_step,
)
from training import (
    prepare as prepare,
)

TRIALS = 50
KINDS = tuple(
    f"{name}, {ranks}"
    for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
    for ranks in ("1 rank", "2 ranks")
)


def trial(kind: str, draw: random.Random, work: Path, folder: Path) -> str:
    """Signals a run and resumes it. Returns when it was signalled, and the step of the resume."""
    number, ranks = signal.Signals[kind.split(",")[0]], int(kind.split()[1])
    run = Run(folder / "run", ranks)
    run.plant()
    with run.start() as processes:
        moment = run.wait_for_moment(draw, processes)
        signalled = list(range(ranks)) if draw.random() < 0.5 else [draw.randrange(ranks)]
        processes.send(number, signalled)
        statuses = processes.wait(timeout_s=TIMEOUT_S + GRACE_S)
    processes.check_no_traceback()
    done = run.step()
    expected = {128 + number}
    if done == 0 and len(signalled) < ranks:
        expected |= {2}  # ranks agree between steps; during the start, the other one sees a failed collective
    if done < STEPS:  # a finished run may end as usual
        check(set(statuses) <= expected, f"exit statuses {statuses} instead of {expected}, {moment}")
    check_named_checkpoints(run, processes)
    resumed = resumed_step(run.finish())
    check(resumed == done, f"resumed from step {resumed} after {done} steps, {moment}")
    run.check_planted()
    run.check_equals(reference(work, ranks))
    return f"to ranks {signalled} {moment}; resumed from step {resumed}"


def check_named_checkpoints(run: Run, processes: Processes) -> None:
    """Raises LostError unless all checkpoints that the processes name exist, except those that failed."""
    for line in processes.text().splitlines():
        if "writing the checkpoint failed" not in line:
            for name in re.findall(r"step-\d+(?![\w.])", line):
                check((run.checkpoints / name).is_dir(), f"{name} does not exist, but the text says: {line}")
