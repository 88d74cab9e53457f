"""Kills a run with SIGKILL, then starts the same command again.

Of ten trials, five kill a run at any time, three while it saves a checkpoint, and two kill one rank of two.
The other rank must then end by itself. Only the steps after the newest checkpoint may be repeated, and the
user's own files in the run's folder must stay.
"""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

from training import (
    GRACE_S,
    INTERVAL,
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

TRIALS = 100
ANY, SAVING, RANK = "kill at any time", "kill while saving", "kill of one rank of two"
KINDS = (ANY, SAVING, ANY, RANK, ANY, SAVING, ANY, SAVING, ANY, RANK)


def trial(kind: str, draw: random.Random, work: Path, folder: Path) -> str:
    """Kills a run and resumes it. Returns when it was killed."""
    run = Run(folder / "run", 2 if kind == RANK else 1)
    run.plant()
    with run.start() as processes:
        if kind == SAVING:
            moment = _wait_for_save(run, draw, processes)
        else:
            moment = run.wait_for_moment(draw, processes)
        rank = draw.randrange(run.ranks)
        processes.send(signal.SIGKILL, [rank])
        started = time.monotonic()
        statuses = processes.wait(timeout_s=TIMEOUT_S + GRACE_S)
        seconds = time.monotonic() - started
    processes.check_no_traceback()
    done = run.step()
    check(all(statuses) or done == STEPS, f"exit statuses {statuses} although rank {rank} was killed")
    resumed = resumed_step(run.finish())
    # The checkpoint of the last step may have been incomplete.
    check(resumed >= max(done - 1, 0) // INTERVAL * INTERVAL, f"resumed from {resumed} after {done} steps")
    run.check_planted()
    run.check_equals(reference(work, run.ranks))
    waited = f", rank {1 - rank} ended {seconds:.1f} s later" if run.ranks == 2 else ""
    return f"rank {rank} {moment}{waited}; resumed from step {resumed} of {done}"


def _wait_for_save(run: Run, draw: random.Random, processes: Processes) -> str:
    save, delay_s = draw.randrange(4), draw.uniform(0, 0.03)
    run.wait_for_step(save * INTERVAL, processes)
    while run.unfinished() and processes.running():
        time.sleep(0.001)  # until the save of that step has ended
    run.wait_until_saving(processes)
    time.sleep(delay_s)
    return f"{delay_s:.3f} s into a save after step {run.step()}"
