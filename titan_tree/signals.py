"""Signals that ask a run to end, such as Ctrl-C or a scheduler's SIGTERM."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)
# torchrun and a scheduler may both send the same signal. It counts as a second signal only after this time.
REPEAT_S = 1.0


class Interrupted(SystemExit):
    """A signal ended the run. As in a shell, the exit status is 128 plus the number of the signal."""

    def __init__(self, number: int) -> None:
        super().__init__(128 + number)


class Signals:
    """Handles ``SIGNALS`` while its ``with`` block runs, and restores the earlier handlers afterwards.

    A signal raises Interrupted in the main thread. After ``defer``, it only sets ``received``, so that the
    run can end between two steps. A second signal of the same kind, more than ``REPEAT_S`` later, ends the
    process at once, even if the main thread waits for other ranks. Signals that the process ignores, as under
    nohup, stay ignored. Outside of the main thread, where Python allows no handlers, the block does nothing.
    """

    received = 0  # number of the first signal after ``defer``; 0: none

    def __init__(self) -> None:
        self._is_deferred = False
        self._pipe: int | None = None  # open while the ``with`` block runs in the main thread
        self._earlier: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def defer(self) -> None:
        """Lets the next signal set ``received`` instead of raising Interrupted."""
        self._is_deferred = True

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        # The C part of a handler writes to this pipe at once. Its Python part waits for the main thread.
        reader, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._earlier[number] = signal.signal(number, self._on_signal)
        self._earlier_pipe = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._pipe is None:
            return
        signal.set_wakeup_fd(self._earlier_pipe)
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        os.close(self._pipe)  # ends the thread

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._is_deferred:
            raise Interrupted(number)
        self.received = self.received or number

    def _watch(self, reader: int) -> None:
        arrived: dict[int, float] = {}
        while byte := os.read(reader, 1):
            number, now = byte[0], time.monotonic()
            if number not in self._earlier:  # a handler of someone else
                continue
            if number not in arrived:
                self._announce(signal.Signals(number).name)
            if now - arrived.setdefault(number, now) > REPEAT_S:
                os._exit(128 + number)
        os.close(reader)

    def _announce(self, name: str) -> None:
        text = f"{name}: the run ends before its first step; the same command starts it again\n"
        if self._is_deferred:
            text = f"{name}: the run ends after the current step; a second {name} ends it at once\n"
        # A closed terminal must not end the run before its checkpoint.
        for descriptor, line in ((1, ""), (2, text if os.environ.get("RANK", "0") == "0" else "")):
            try:
                os.write(descriptor, line.encode())
            except OSError:
                discard(descriptor)


def discard(descriptor: int) -> None:
    """Redirects a file descriptor to /dev/null, because nobody can read its output any more."""
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, descriptor)
    os.close(null)
