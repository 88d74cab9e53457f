"""JobQueue: runs what requests ask for in one thread, and gives requests their results.

Jobs that wait with equal keys run as one: passes as one forest, samples as one batch.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from titan_tree.errors import UserError

logger = logging.getLogger(__name__)
GATHER_S = 0.02  # seconds until jobs of no model, which are samples, make a batch
Result = bytes | dict[str, Any]


@dataclass(eq=False)
class Future:
    """The result of a request, once it has one. An error is a result, too."""

    done: asyncio.Event = field(default_factory=asyncio.Event)
    result: Result = b""


@dataclass(eq=False)
class Job:
    """What the engine does for a request.

    Attributes:
        run: takes the values of all jobs that run at once, and returns their results.
        model: the model that the job changes or reads, whose jobs stay in their order. "": it has none.
        key: jobs with equal keys may run at once. None: the job runs alone.
    """

    run: Callable[[Sequence[Any]], Sequence[Result]]
    value: Any = None
    model: str = ""
    key: tuple[object, ...] | None = None
    future: Future = field(default_factory=Future)


class JobQueue:
    """The jobs that wait, and the thread that runs them."""

    def __init__(self) -> None:
        self._jobs: deque[Job] = deque()
        self._change = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._work, name="titan_tree tinker", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def close(self) -> None:
        """Ends the thread after what it is doing. Other jobs stay without results."""
        with self._change:
            self._is_closed = True
            self._change.notify()
        self._thread.join()

    def put(self, jobs: Sequence[Job]) -> None:
        """Adds jobs. The server's thread calls it."""
        self._loop = asyncio.get_running_loop()
        with self._change:
            self._jobs.extend(jobs)
            self._change.notify()

    def _work(self) -> None:
        while (jobs := self._take()) is not None:
            try:
                results = list(jobs[0].run([job.value for job in jobs]))
            except UserError as error:
                results = [{"error": str(error), "category": "user"}] * len(jobs)
            except Exception as error:
                logger.error("%s: %s", jobs[0].model, "internal error", exc_info=error)
                message = "internal error; the log of the server says more"
                results = [{"error": message, "category": "server"}] * len(jobs)
            with suppress(RuntimeError):  # the server's thread has ended
                for job, result in zip(jobs, results, strict=True):
                    self._loop.call_soon_threadsafe(_finish, job.future, result)

    def _take(self) -> list[Job] | None:
        """Waits for a job. Returns it with those that run at once, or None at the end."""
        with self._change:
            self._change.wait_for(lambda: self._jobs or self._is_closed)
            if self._is_closed:
                return None
            if self._jobs[0].model == "":  # samples of other clients may be on their way
                self._change.wait_for(lambda: self._is_closed, GATHER_S)
            first = self._jobs.popleft()
            jobs, left, is_open = [first], deque[Job](), True
            for job in self._jobs:
                if is_open and job.key is not None and job.key == first.key:
                    jobs.append(job)
                else:
                    left.append(job)
                    is_open = is_open and (job.model != first.model or not first.model)
            self._jobs = left
            return jobs


def _finish(future: Future, result: Result) -> None:
    future.result = result
    future.done.set()
