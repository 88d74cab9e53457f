"""Signals that ask a run to end, such as Ctrl-C or a scheduler's SIGTERM, and lost standard streams."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
    """Defers ``SIGNALS`` while its ``with`` block runs, so that a run can end between two steps.

    The first signal only sets ``received``. A second one of the same kind, more than ``REPEAT_S`` later, ends
    the process at once, even if the main thread waits for other ranks. If the block ends without an exception
    after a signal, the signal is sent again, so that it ends what follows. Signals that the process ignores,
    as under nohup, stay ignored. Outside of the main thread, where Python allows no handlers, the block does
    nothing.

    Outside of the block, a signal has its default action, see ``titan_tree/__init__.py``: it ends the process
    at once. A run is prepared for that, as it is for SIGKILL.

    Args:
        effect: what the first signal does, for the line that announces it.
    """

    received = 0  # number of the first signal; 0: none

    def __init__(self, effect: str = "the run ends after the current step") -> None:
        self._effect = effect
        self._pipe: int | None = None  # open while the ``with`` block runs in the main thread
        self._earlier: dict[int, Callable[[int, FrameType | None], object] | int | None] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is not threading.main_thread():
            return self
        # The C part of a handler writes to this pipe at once. Its Python part waits for the main thread.
        reader, self._pipe = os.pipe()
        os.set_blocking(self._pipe, False)
        self._earlier_pipe = signal.set_wakeup_fd(self._pipe, warn_on_full_buffer=False)
        threading.Thread(target=self._watch, args=(reader,), name="signals", daemon=True).start()
        for number in SIGNALS:
            if signal.getsignal(number) not in (signal.SIG_IGN, None):
                self._earlier[number] = signal.signal(number, self._on_signal)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._pipe is None:
            return
        for number, handler in self._earlier.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._earlier_pipe)
        os.close(self._pipe)  # ends the thread
        if self.received and kind is None:
            signal.raise_signal(self.received)

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.received = self.received or number

    def _watch(self, reader: int) -> None:
        arrived: dict[int, float] = {}
        while byte := os.read(reader, 1):
            number, now = byte[0], time.monotonic()
            if number not in SIGNALS:  # a handler of someone else
                continue
            if number not in arrived:
                _announce(signal.Signals(number).name, self._effect)
            if now - arrived.setdefault(number, now) > REPEAT_S:
                os._exit(128 + number)
        os.close(reader)


@contextmanager
def keyboard_interrupts() -> Iterator[None]:
    """Lets Ctrl-C raise KeyboardInterrupt in its block, so that a progress bar can restore the terminal."""
    if (earlier := signal.getsignal(signal.SIGINT)) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, earlier)


def _announce(name: str, effect: str) -> None:
    text = f"{name}: {effect}; a second {name} ends it at once\n"
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


def open_standard_streams() -> None:
    """Opens stdin, stdout and stderr if the process was started without them, as a service may be.

    Otherwise the next file that it opens would get their number. stdin is then empty, writing to stdout fails
    as on a full disk, and what is written to stderr is dropped.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            flags = os.O_WRONLY if name == "stderr" else os.O_RDONLY
            os.set_inheritable(os.open(os.devnull, flags), True)  # gets the number, the smallest free one
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, "w" if number else "r", closefd=False))  # noqa: SIM115
