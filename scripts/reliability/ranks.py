"""Suspends or kills one of two ranks, or raises an error in it, with a dense model and with sharded experts.

The other rank must end within ``parallel.timeout_s`` and some seconds. It must print a line with a rank and a
step. The same command then continues from the newest checkpoint.
"""

from __future__ import annotations

import random
import re
import signal
import time
from pathlib import Path
from typing import Any

from training import GRACE_S, OPTIONS, STEPS, TIMEOUT_S, Run, check, preload

TRIALS = 20
STOPPED, KILLED, RAISING = "stopped", "killed", "raising"
MODELS = {"dense": "demo", "experts": "demo_qwen3_moe"}
KINDS = tuple(f"{harm} rank, {model}" for model in MODELS for harm in (STOPPED, KILLED, RAISING))


def prepare(work: Path) -> None:
    preload()
    for model in MODELS:
        _run(work / f"reference-{model}", model).finish()


def _run(folder: Path, model: str) -> Run:
    experts = ("parallel.expert_parallel=2",) if model == "experts" else ()
    return Run(folder, 2, MODELS[model], OPTIONS + experts)


def trial(kind: str, draw: random.Random, work: Path, folder: Path) -> str:
    """Harms a rank, and resumes. Returns which one, when, and what the other rank said."""
    harm, model = kind.split()[0], kind.split()[-1]
    run, rank, step = _run(folder / "run", model), draw.randrange(2), draw.randrange(2, STEPS)
    run.plant()
    with run.start(lambda own: _raise_at(step) if own == rank and harm == RAISING else None) as processes:
        moment = f"in step {step}"
        if harm != RAISING:
            # The first step may take longer than parallel.timeout_s.
            moment = run.wait_for_moment(draw, processes, first=1)
            processes.send(signal.SIGSTOP if harm == STOPPED else signal.SIGKILL, [rank])
        else:
            run.wait_for_step(step - 1, processes)
        started = time.monotonic()
        status = processes.wait([1 - rank], timeout_s=TIMEOUT_S + GRACE_S)[0]
        seconds = time.monotonic() - started
    done = run.step()
    processes.check_no_traceback(except_of=rank)
    said = processes.stdout(1 - rank) + processes.stderr(1 - rank)
    lines = [line for line in said.splitlines() if re.search(r"rank", line) and re.search(r"step \d+", line)]
    if done < STEPS:
        check(status, f"rank {1 - rank} ended with status 0, although rank {rank} was {kind} {moment}")
        check(lines, f"rank {1 - rank} names no rank and step, {moment}: {said[-300:]!r}")
    run.finish()
    run.check_planted()
    run.check_equals(_run(work / f"reference-{model}", model))
    return f"rank {rank} {moment}; the other ended {seconds:.1f} s later: {lines[0] if lines else 'finished'}"


def _raise_at(step: int) -> None:
    """Makes this process raise an exception in a step, as a bug or a lack of memory would."""
    from titan_tree.run.trainer import Trainer

    train_step = Trainer.train_step

    def raise_at(trainer: Trainer, *args: Any) -> None:
        if trainer.progress.step == step - 1:
            raise RuntimeError("out of memory")
        train_step(trainer, *args)

    Trainer.train_step = raise_at  # type: ignore[method-assign]
