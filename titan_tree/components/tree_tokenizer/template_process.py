"""TemplateProcess starts the process in which chat templates run, sends it requests and ends it."""

from __future__ import annotations

import atexit
import json
import os
import pickle
import signal
import subprocess
import sys
import threading
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

from titan_tree.signals import SIGNALS, open_standard_streams

MAX_SECONDS = 60.0  # CPU time of all texts of one conversation
MAX_MEMORY = 2 << 30  # bytes of address space
MAX_ANSWER = 1 << 28  # bytes of all texts of one conversation, without what each repeats of the one before
OUT_OF_MEMORY = 3  # the exit status in sandbox.py
# All that the process inherits of the environment: where Python finds its packages, and the time zone.
VARIABLES = ("HOME", "LD_LIBRARY_PATH", "PYTHONHOME", "PYTHONPATH", "PYTHONUSERBASE", "TZ")


class Answer(NamedTuple):
    """What a request yielded, and the error that ended it: (line of the template or None, message)."""

    results: list[Any]
    error: tuple[int | None, str] | None = None


class TemplateProcess:
    """Runs sandbox.py in a process of its own, within limits that the operating system enforces.

    The process starts with the first request, and again after a template has ended it. Other threads and
    Python's signal handlers run while a request waits. The process ignores the signals that end a run, and
    ends together with this one.

    Args:
        seconds: CPU time of one request.
        memory: bytes of address space.
        answer: bytes of all texts of one request, without what each one repeats of the text before.
    """

    def __init__(
        self, seconds: float = MAX_SECONDS, memory: int = MAX_MEMORY, answer: int = MAX_ANSWER
    ) -> None:
        self.seconds, self.memory, self.answer = seconds, memory, answer
        self.forget()

    def forget(self) -> None:
        """Leaves the process to another owner: after a fork, it is that of the parent."""
        self._process: subprocess.Popen[bytes] | None = None
        self._alive: FileIO | None = None  # its end tells the process that this one has ended
        self._lock = threading.Lock()

    def request(self, name: str, *arguments: object) -> Answer:
        """Returns the answer of a function of sandbox.py. Its error may be a limit that it exceeded."""
        request = pickle.dumps((name, *arguments), pickle.HIGHEST_PROTOCOL)
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            try:
                answer = self._exchange(request)
            except _LimitError as error:
                self.stop()
                return Answer([], (None, str(error)))
            except BaseException:  # such as a signal's; the answer must not become that of the next request
                self.stop()
                raise
        return Answer(*json.loads(answer.decode("utf-8", "surrogatepass")))

    def stop(self) -> int:
        """Ends the process. The next request starts another one.

        Returns:
            The status with which the process ended: -n after signal n. 0 if there was none.
        """
        process, self._process = self._process, None
        if self._alive:
            self._alive.close()
        if process is None:
            return 0
        with process:
            process.kill()  # does not change the status of a process that is ending
            return process.wait()

    def _start(self) -> None:
        self.stop()
        open_standard_streams()  # whose numbers the pipes below must not get
        program = Path(__file__).with_name("sandbox.py")
        end, own = os.pipe()
        self._alive = FileIO(own, "w")
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # which the process inherits
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", str(program), str(self.seconds), str(self.memory), str(end)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                pass_fds=[end],
                env={name: os.environ[name] for name in VARIABLES if name in os.environ},
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            os.close(end)

    def _exchange(self, request: bytes) -> bytes:
        """Returns the answer. Raises _LimitError if there is none, or if it is too long."""
        assert self._process is not None
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None
        assert stdout is not None
        remaining = memoryview(len(request).to_bytes(8) + request)
        try:
            while remaining:  # unbuffered, so that no fork of this process can write it again
                remaining = remaining[os.write(stdin.fileno(), remaining) :]
        except BrokenPipeError:
            raise self._limit_error() from None
        size = int.from_bytes(stdout.read(8))
        if size > self.answer:
            raise _LimitError(f"its texts of one conversation take more than {self.answer >> 20:,} MiB")
        answer = stdout.read(size)
        if not answer or len(answer) < size:
            raise self._limit_error()
        return answer

    def _limit_error(self) -> _LimitError:
        status = self.stop()
        if status == -signal.SIGPROF:
            return _LimitError(f"it takes more than {self.seconds:g} seconds of CPU time for a conversation")
        if status == OUT_OF_MEMORY:
            return _LimitError(f"it takes more than {self.memory >> 20:,} MiB of memory")
        end = f"signal {signal.Signals(-status).name}" if status < 0 else f"status {status}"
        return _LimitError(f"the process that renders it ended with {end}")


class _LimitError(Exception):
    """The template exceeded a limit, and its process has ended."""


PROCESS = TemplateProcess()  # of all templates of this process
os.register_at_fork(after_in_child=PROCESS.forget)
atexit.register(PROCESS.stop)
