"""Sends a signal to a training command in its first second, from the start of Python on.

The command must end because of the signal: at once before the first step, or after a step and with its
checkpoint. It must print no traceback, except that of Python itself before it imports titan_tree.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from training import OPTIONS, PATIENCE_S, ROOT, TRACEBACK, check

TRIALS = 1000
KINDS = ("SIGTERM", "SIGINT", "SIGHUP", "SIGUSR1")
FIRST_S = 1.0  # trials of "signals" signal later moments


def prepare(work: Path) -> None:
    """Does nothing: trials need no reference."""


def trial(kind: str, draw: random.Random, work: Path, folder: Path) -> str:
    """Starts a run and signals it. Returns when, and how it ended."""
    number = signal.Signals[kind]
    config = str(ROOT / "train_configs" / "demo.toml")
    command = [
        sys.executable,
        "-m",
        "titan_tree",
        "train",
        config,
        f"folder={folder / 'run'}",
        *OPTIONS,
    ]
    delay_s = draw.uniform(0, FIRST_S)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    time.sleep(max(0.0, started + delay_s - time.monotonic()))
    has_ended = process.poll() is not None
    process.send_signal(number)
    text, _ = process.communicate(timeout=PATIENCE_S)
    moment = f"{delay_s:.3f} s after the start"
    if has_ended and process.returncode == 0:
        return f"{moment}, which had finished"
    if TRACEBACK in text and "/titan_tree/" not in text and "KeyboardInterrupt" in text:
        return f"{moment}, in Python's own start" + ", which ignored it" * ("Exception ignored in" in text)
    check(TRACEBACK not in text, f"a traceback, {moment}: {text[-300:]!r}")
    status = process.returncode
    check(status in (-number, 128 + number), f"exit status {status}, {moment}: {text[-300:]!r}")
    if "the run ended after step" in text:
        step = text.split("the run ended after step ")[1].split(";")[0]
        check((folder / "run" / "checkpoints" / f"step-{step}").is_dir(), f"no checkpoint of step {step}")
        return f"{moment}, ended after step {step}"
    return f"{moment}, ended at once"
