"""Processes: runs programs, each in a working folder of its own with limits, and leaves no process behind.

    this process -> supervisor.py -> program -> its descendants

No program inherits the environment of this process. What needs stronger walls, such as a network of its own
or another user, brings them in its command, for example ``bwrap``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, Self

from titan_tree.errors import UserError, shorten

SUPERVISOR = Path(__file__).with_name("supervisor.py")
TAIL = 2000  # bytes of output that ``Ended`` holds


class Limits(NamedTuple):
    """Limits of a program. Those of the system stay if they are lower."""

    time_s: float = 600.0  # until it is killed
    cpu_s: int = 24 * 3600  # CPU time of each of its processes
    file_bytes: int = 2**32  # size of each file that it writes
    open_files: int = 4096  # of each process
    processes: int = 2**15  # and threads, of all programs of its user; root has no such limit
    output_bytes: int = 2**20  # of the newest output, which is kept


class Ended(NamedTuple):
    """How a program has ended."""

    status: int  # exit status; -n after signal n; 127 if it could not be started
    cause: Literal["exit", "time limit", "stop"]  # "exit": it ended by itself
    seconds: float
    tail: str  # the end of its output


class Processes:
    """Runs programs in the threads that call ``run``. ``stop``, or the end of this process, kills them.

    It is a context manager. All calls of ``run`` must have returned when it exits.
    """

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()  # its end stops all programs
        self._is_stopped = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        os.close(self._reader)

    def stop(self) -> None:
        """Kills all programs, and those that start later."""
        if not self._is_stopped:
            self._is_stopped = True
            os.close(self._writer)

    def run(
        self,
        command: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        limits: Limits,
        output: Path,
    ) -> Ended:
        """Runs a program to its end. Afterwards, none of its descendants is alive.

        Args:
            command: the program, which PATH finds, and its arguments. No shell reads them.
            folder: its working folder, which is also its HOME. It gets a folder ``tmp``.
            environment: variables beside PATH, HOME, LANG and TMPDIR.
            output: the file that gets stdout and stderr.

        Raises:
            UserError: something else has killed the supervisor.
        """
        started, folder = time.monotonic(), folder.absolute()
        (folder / "tmp").mkdir(exist_ok=True)
        own = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(folder), "TMPDIR": f"{folder}/tmp"}
        words = [json.dumps(limits._asdict()), str(output.absolute()), *command]
        with subprocess.Popen(
            [sys.executable, "-I", "-S", str(SUPERVISOR), *words],
            stdin=self._reader,
            stdout=subprocess.PIPE,
            cwd=folder,
            env=own | {"LANG": "C.UTF-8", **environment},
            start_new_session=True,  # Ctrl-C in a terminal is for this process alone
        ) as supervisor:
            try:
                report, _ = supervisor.communicate()
            except BaseException:
                self.stop()
                raise
        if supervisor.returncode:
            raise UserError(
                f"{shorten(list(command))}: expected its supervisor to end it, but that ended with status "
                f"{supervisor.returncode}; a program must not kill processes that it did not start"
            )
        status, cause = json.loads(report)
        tail = output.read_bytes()[-TAIL:].decode(errors="replace")
        return Ended(status, cause, time.monotonic() - started, tail)
