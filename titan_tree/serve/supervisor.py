"""Runs one program, and then ends all of its descendants: a script that ``process.py`` starts.

    python -I -S supervisor.py LIMITS OUTPUT COMMAND...

The program gets the environment and the working folder of this process. Linux gives this process each
descendant of the program that loses its parent, also one in a session of its own. The end of stdin stops the
program: whoever holds the other end of this pipe has closed it, or has ended.
"""

import ctypes
import json
import os
import resource
import select
import signal
import sys
import time
from contextlib import suppress

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # of prctl
POLL_S = 0.05  # seconds until the end of the program is noticed, at the latest
LIMITS = {"CPU": "cpu_s", "FSIZE": "file_bytes", "NOFILE": "open_files", "NPROC": "processes", "CORE": "core"}
libc = ctypes.CDLL(None)


def become(command: list[str], limits: dict[str, float], writer: int) -> None:
    """Replaces this process, a child of the supervisor, by the program."""
    try:
        os.setsid()
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGPIPE, signal.SIGXFSZ):
            signal.signal(number, signal.SIG_DFL)
        for descriptor, copied in enumerate((os.open(os.devnull, os.O_RDONLY), writer, writer)):
            os.dup2(copied, descriptor)
        for name, field in LIMITS.items():
            kind = getattr(resource, f"RLIMIT_{name}")
            hard = resource.getrlimit(kind)[1]
            value = int(limits.get(field, 0))
            value = value if hard == resource.RLIM_INFINITY else min(value, hard)
            resource.setrlimit(kind, (value, value))
        os.execvp(command[0], command)
    except OSError as error:
        os.write(2, f"cannot start {command[0]}: {error.strerror}\n".encode())
    finally:
        os._exit(127)  # as in a shell


class Supervisor:
    """Supervises the process ``program``, whose output comes from ``reader``."""

    def __init__(self, program: int, reader: int, limits: dict[str, float]) -> None:
        self.program, self.reader = program, reader
        self.deadline, self.output_bytes = time.monotonic() + limits["time_s"], int(limits["output_bytes"])
        self.output = bytearray()
        self.status: int | None = None

    def watch(self) -> str:
        """Returns why the program ends: "exit", "time limit" or "stop"."""
        watched = [0, self.reader]
        while time.monotonic() < self.deadline:
            ready, _, _ = select.select(watched, [], [], POLL_S)
            if self.reader in ready and not self.read():
                watched.remove(self.reader)
            self.reap()
            if self.status is not None:
                return "exit"
            if 0 in ready:
                return "stop"
        return "time limit"

    def end(self) -> None:
        """Kills children until there are none: those of a child that ends become children of this process."""
        while self.reap():
            with open(f"/proc/self/task/{os.getpid()}/children") as children:
                for child in children.read().split():
                    os.kill(int(child), signal.SIGKILL)
            time.sleep(0.002)
        with suppress(BlockingIOError):  # of a pipe that a stranger holds
            while self.read():
                pass

    def reap(self) -> bool:
        """Collects children that have ended. Returns whether others are left."""
        try:
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                if ended[0] == self.program:
                    self.status = os.waitstatus_to_exitcode(ended[1])
        except ChildProcessError:
            return False
        return True

    def read(self) -> bool:
        """Reads output, and keeps the newest part. Returns whether there was some."""
        piece = os.read(self.reader, 2**16)
        self.output = (self.output + piece)[-self.output_bytes :]
        return bool(piece)


def main(limits: dict[str, float], output: str, command: list[str]) -> None:
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # stdin alone stops the program
    reader, writer = os.pipe()
    if (program := os.fork()) == 0:
        become(command, limits, writer)
    os.close(writer)
    os.set_blocking(reader, False)
    supervisor = Supervisor(program, reader, limits)
    cause = supervisor.watch()
    supervisor.end()
    with open(output, "wb") as file:
        file.write(supervisor.output)
    print(json.dumps([supervisor.status, cause]))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]), sys.argv[2], sys.argv[3:])
