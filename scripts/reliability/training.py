"""A training run as its user sees it: a command, its processes, what they print, and the files they write.

Importing titan_tree takes seconds. ``preload`` imports it once, and every start forks from that process.
Nothing here looks inside a run: the rows of metrics.csv and the names of folders show how far it is.
"""

from __future__ import annotations

import csv
import os
import random
import re
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from pathlib import Path

ROOT = Path(__file__).parents[2]
STEPS, INTERVAL = 12, 3  # of every run, and between its checkpoints
TIMEOUT_S = 10  # parallel.timeout_s of runs with several ranks
GRACE_S = 30  # more than a rank needs to notice, write a checkpoint and end, on a loaded machine
PATIENCE_S = 300  # a process that runs longer than this hangs
OPTIONS = (
    f"training.steps={STEPS}",
    f"checkpoint.interval={INTERVAL}",
    "checkpoint.keep=0",
    "data.global_batch_groups=2",
    "model.overrides.hidden_size=32",
    "model.overrides.head_dim=16",
    "metrics.loggers=[console,csv]",
)
# Columns of metrics.csv that measure time, and therefore differ between equal runs.
MEASURED = (
    *("step_s", "leaf_tokens_per_s", "executed_tokens_per_s", "idle_share"),
    *("passes_share", "optimizer_share", "exchange_share", "host_share"),
)
FOREIGN = "step-6.0123abcd.partial"  # an unfinished checkpoint of another run
TRACEBACK = "Traceback (most recent call last)"


class LostError(Exception):
    """The user's work was lost, or a failure was not reported."""


def check(condition: object, problem: str) -> None:
    """Raises LostError with ``problem`` unless the condition holds."""
    if not condition:
        raise LostError(problem)


def preload() -> None:
    """Imports everything that a training run needs. It starts no thread, so that this process can fork."""
    for module in ("titan_tree.cli.train", "titan_tree.run.trainer"):
        import_module(module)
    threads = len(os.listdir("/proc/self/task"))
    assert threads == 1, f"expected one thread before a fork, got {threads}"


@dataclass
class Processes:
    """The ranks of one start of a command. They are killed at the end of a ``with`` block."""

    pids: list[int]
    outputs: list[Path]  # of each rank; its stderr is in the file with the suffix .err
    statuses: dict[int, int] = field(default_factory=dict)  # by rank, of those that have ended

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.running():
            os.kill(self.pids[rank], signal.SIGKILL)
        self.wait(range(len(self.pids)))

    def running(self) -> list[int]:
        """Returns the ranks that have not ended."""
        for rank in set(range(len(self.pids))) - self.statuses.keys():
            pid, status = os.waitpid(self.pids[rank], os.WNOHANG)
            if pid:
                self.statuses[rank] = os.waitstatus_to_exitcode(status)
        return [rank for rank in range(len(self.pids)) if rank not in self.statuses]

    def send(self, number: signal.Signals, ranks: Sequence[int]) -> None:
        """Sends a signal to the ranks that have not ended."""
        for rank in set(ranks) & set(self.running()):
            os.kill(self.pids[rank], number)

    def wait(self, ranks: Sequence[int] | None = None, timeout_s: float = PATIENCE_S) -> list[int]:
        """Waits for ``ranks`` (default: all) and returns their exit statuses: 128 + n after signal n, as a
        shell shows it. Raises LostError after ``timeout_s``."""
        ranks = range(len(self.pids)) if ranks is None else ranks
        deadline = time.monotonic() + timeout_s
        while waiting := set(ranks) & set(self.running()):
            check(time.monotonic() < deadline, f"rank {min(waiting)} did not end within {timeout_s:.0f} s")
            time.sleep(0.01)
        return [status if status >= 0 else 128 - status for status in map(self.statuses.__getitem__, ranks)]

    def stdout(self, rank: int = 0) -> str:
        return self.outputs[rank].read_text(errors="replace")

    def stderr(self, rank: int = 0) -> str:
        """Returns what a rank wrote to stderr, without the log lines of torch's C++ code."""
        lines = self.outputs[rank].with_suffix(".err").read_text(errors="replace").splitlines(True)
        return "".join(line for line in lines if not re.match(r"\[(rank\d+\]:)?\[?[WI]\d+ ", line))

    def text(self) -> str:
        """Returns what all ranks wrote."""
        return "".join(self.stdout(rank) + self.stderr(rank) for rank in range(len(self.pids)))

    def check_no_traceback(self, *, except_of: int | None = None) -> None:
        for rank in range(len(self.pids)):
            shown = rank != except_of and TRACEBACK in self.stdout(rank) + self.stderr(rank)
            check(not shown, f"rank {rank} shows a traceback: {self.stderr(rank)[-300:]!r}")

    def refusal(self) -> str:
        """Returns the one line with which the command refused. Raises LostError if it did anything else."""
        check(self.wait() == [2] * len(self.pids), f"exit statuses {self.wait()} instead of 2")
        self.check_no_traceback()
        line = self.stderr()
        check(line.count("\n") == 1 and "error: " in line, f"expected one line on stderr, got {line!r}")
        return line.strip()


@dataclass
class Run:
    """A training command with a folder of its own. It can be started again and again."""

    folder: Path
    ranks: int = 1
    config: str = "demo"
    options: tuple[str, ...] = OPTIONS
    starts: int = 0

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def start(self, in_child: Callable[[int], None] = lambda rank: None) -> Processes:
        """Starts the command on all ranks, as torchrun does. ``in_child`` is called with each rank first."""
        self.starts += 1
        logs = self.folder.parent / f"{self.folder.name}.logs"
        logs.mkdir(parents=True, exist_ok=True)
        parallel = [f"parallel.timeout_s={TIMEOUT_S}"] if self.ranks > 1 else []
        config = str(ROOT / "train_configs" / f"{self.config}.toml")
        arguments = ["train", config, f"folder={self.folder}", *self.options, *parallel]
        port = _free_port()
        processes = Processes([], [])
        for rank in range(self.ranks):
            output = logs / f"{os.getpid()}-{self.starts}-{rank}.out"
            variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": self.ranks}
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            processes.outputs.append(output)
            processes.pids.append(fork(output, partial(_train, arguments, rank, variables, in_child)))
        return processes

    def finish(self) -> Processes:
        """Runs the command to its end. Raises LostError if it fails."""
        with self.start() as processes:
            statuses = processes.wait()
        processes.check_no_traceback()
        check(not any(statuses), f"exit statuses {statuses}: {processes.text()[-300:]!r}")
        return processes

    def rows(self) -> list[dict[str, str]]:
        """Returns the rows of metrics.csv without the columns that measure time."""
        with (self.folder / "metrics.csv").open(newline="") as file:
            return [{k: v for k, v in row.items() if k not in MEASURED} for row in csv.DictReader(file)]

    def step(self) -> int:
        """Returns the number of complete rows in metrics.csv, one per step."""
        path = self.folder / "metrics.csv"
        return max(path.read_text().count("\n") - 1, 0) if path.exists() else 0

    def wait_for_step(self, step: int, processes: Processes) -> None:
        """Waits until ``step`` steps are done. Raises LostError if a rank ends before."""
        deadline = time.monotonic() + PATIENCE_S
        while self.step() < step:
            ended = len(processes.running()) < self.ranks
            check(not ended or self.step() >= step, f"ended before step {step}: {processes.text()[-300:]!r}")
            check(time.monotonic() < deadline, f"step {step} was not reached within {PATIENCE_S} s")
            time.sleep(0.002)

    def wait_for_moment(self, draw: random.Random, processes: Processes, first: int = 0) -> str:
        """Waits for a random moment of the run, at the earliest after step ``first``, and describes it."""
        step = draw.randrange(first, STEPS)
        delay_s = draw.uniform(0, 0.4 if step else 2.0)  # about a step, or all that precedes the first one
        self.wait_for_step(step, processes)
        time.sleep(delay_s)
        return f"{delay_s:.3f} s after step {step}"

    def unfinished(self) -> list[str]:
        """Returns the names of the checkpoint folders that the run is writing, or was when it was killed."""
        names = os.listdir(self.checkpoints) if self.checkpoints.is_dir() else []
        return [name for name in names if name.endswith(".partial") and name != FOREIGN]

    def wait_until_saving(self, processes: Processes) -> None:
        """Waits until a checkpoint folder under a temporary name appears."""
        while not self.unfinished():
            check(processes.running(), "no checkpoint was seen while it was saved")

    def check_equals(self, reference: Run) -> None:
        """Raises LostError unless both runs logged the same numbers in all steps, digit for digit."""
        rows, expected = self.rows(), reference.rows()
        check(len(rows) == len(expected), f"metrics.csv has {len(rows)} rows instead of {len(expected)}")
        for ours, theirs in zip(rows, expected, strict=True):
            names = [name for name in theirs if ours.get(name) != theirs[name]]
            check(not names, f"step {theirs['step']}: {', '.join(names)} differ from an uninterrupted run")

    def plant(self) -> None:
        """Puts files of the user between those of the run."""
        for path in self._planted():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("mine\n")

    def check_planted(self) -> None:
        """Raises LostError if a file of the user has vanished or changed."""
        for path in self._planted():
            check(path.is_file() and path.read_text() == "mine\n", f"the user's file {path} has vanished")

    def _planted(self) -> list[Path]:
        return [
            self.folder / "notes.txt",
            self.checkpoints / "notes.txt",
            self.checkpoints / "step-5-of-mine" / "notes.txt",
            self.checkpoints / FOREIGN / "notes.txt",
        ]


def prepare(work: Path) -> None:
    """Trains the uninterrupted runs that ``reference`` returns."""
    preload()
    for ranks in (1, 2):
        reference(work, ranks).finish()


def reference(work: Path, ranks: int = 1) -> Run:
    """Returns the uninterrupted run on a number of ranks."""
    return Run(work / f"reference-{ranks}", ranks)


def resumed_step(processes: Processes) -> int:
    """Returns the step of the checkpoint from which a run says that it resumed, or 0."""
    found = re.search(r"resumed from \S*?step-(\d+)", processes.stdout())
    return int(found[1]) if found else 0


def limit_file_size(processes: Processes, num_bytes: int) -> None:
    """Makes writes beyond ``num_bytes`` of a file fail, as on a full disk. -1 removes the limit."""
    for rank in processes.running():
        resource.prlimit(processes.pids[rank], resource.RLIMIT_FSIZE, (num_bytes, -1))


def fork(output: Path, function: Callable[[], int]) -> int:
    """Runs a function that returns an exit status in a child, with its output in files.

    Args:
        output: receives stdout. The file with the suffix .err receives stderr.
    Returns:
        The child's process id.
    """
    for path in (output, output.with_suffix(".err")):
        path.touch()
    sys.stdout.flush()
    sys.stderr.flush()
    ready, started = os.pipe()
    pid = os.fork()
    if pid:
        os.close(started)
        os.read(ready, 1)  # nothing: the child closes its end when it can be signalled
        os.close(ready)
        return pid
    status = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
            signal.signal(number, signal.SIG_DFL)
        for path, descriptor in ((output, 1), (output.with_suffix(".err"), 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), descriptor)
        os.close(started)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w", buffering=1)
        status = function()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _train(
    arguments: list[str], rank: int, variables: dict[str, object], in_child: Callable[[int], None]
) -> int:
    from titan_tree.cli import main

    if variables["WORLD_SIZE"] != 1:
        os.environ.update({name: str(value) for name, value in variables.items()})
    in_child(rank)
    return main(arguments)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
