"""StepLoader: makes the inputs of steps before training needs them, in worker processes or in a thread.

    worker w of W makes the steps w, w + W, w + 2 W, ... -> pipe -> thread of the training process -> training

Every worker follows the same stream of groups and renders only its own steps, so the stream does not depend
on W. Each item carries the position after its step. A worker sends a step through its pipe as two byte
strings: separate tensors would each take a file descriptor and a piece of /dev/shm, which is small in
containers.

A worker may die, stop, or wait for a file system that hangs. Training waits for a limited time, and then
kills the workers. The thread ends with them, because their pipes end.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import chain, count
from logging.handlers import QueueHandler
from math import inf
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.util import Finalize
from typing import Any, Generic, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from titan_tree.config.plugins import import_plugins, imported_plugins
from titan_tree.data.dataset import TreeDataset
from titan_tree.data.packing import MicroBatches
from titan_tree.data.tree_bytes import padding
from titan_tree.errors import UserError
from titan_tree.signals import SIGNALS

T = TypeVar("T")
Prepare = Callable[[MicroBatches], T]
Steps = Callable[[TreeDataset, int, int, int], Iterator[MicroBatches]]  # see ``TreeDataset.steps``
Position = dict[str, int]  # of the dataset after a step, and the "checksum" of the step's groups
# The input of a step, as it travels through a pipe: a pickle with (offset, shape, dtype) in place of every
# tensor, and the bytes of the tensors.
StepBytes = tuple[bytes, bytearray]

PREFETCH = 2  # steps that each worker makes in advance
KILL_S = 5.0  # longest wait for the end of a killed worker


def refuse_in_worker() -> None:
    """Raises UserError in a worker process, which imports the script. Training there would never end."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            "this script trains while a worker process imports it; put the training under if __name__ == "
            '"__main__":'
        )


class StepLoader(Generic[T]):
    """Iterates over (input, position) of the next steps. The position is the dataset's, after the step.

    With ``is_compared`` of the dataset, the position also has the "checksum" of the step's groups, for
    ``all_reduce_counts``.

    Args:
        dataset: the stream of micro-batches, at the position to start from.
        prepare: makes the input of a step from its micro-batches. With workers it must be picklable.
        num_steps: steps to make.
        workers: number of processes; 0 uses a thread.
        pin: makes the inputs in page-locked memory, from which a GPU copies without waiting.
        steps: yields the micro-batches of the dataset's steps. With workers it must be picklable. If it
            communicates with other ranks, all must use the same ``num_steps`` and ``workers``.
        start_timeout_s: longest time that training waits for the first step of each worker.
        timeout_s: the same, for later steps.

    Raises:
        UserError: bad data, also if a worker found it; or a worker died, stopped or hangs.
    """

    def __init__(
        self,
        dataset: TreeDataset,
        prepare: Prepare[T],
        num_steps: int,
        workers: int = 0,
        pin: bool = False,
        steps: Steps = TreeDataset.steps,
        start_timeout_s: float = inf,
        timeout_s: float = inf,
    ) -> None:
        self.dataset, self.prepare, self.steps = dataset, prepare, steps
        self.num_steps, self.workers, self.pin = num_steps, min(workers, num_steps), pin
        self.start_timeout_s, self.timeout_s = start_timeout_s, timeout_s

    def __iter__(self) -> Iterator[tuple[T, Position]]:
        """Starts to make the first steps, and returns an iterator over all of them."""
        if self.workers:
            with _safe_path():
                resource_tracker.ensure_running()  # if the first worker started it, it would unblock signals
        with _signals_blocked():  # the thread and the workers inherit this
            with _safe_path():
                workers = _Worker.start(self.workers)
            items = self._from_workers(workers) if workers else self._in_this_process()
            thread = ThreadPoolExecutor(1, thread_name_prefix="data")
            steps = self._one_ahead(items, thread, thread.submit(next, items, None), workers)
            # Also if nobody has taken the first step, and at the end of this process.
            Finalize(steps, _kill, (workers,), exitpriority=0)
        return steps

    def _one_ahead(
        self,
        items: Iterator[tuple[T, Position]],
        thread: ThreadPoolExecutor,
        upcoming: Future[tuple[T, Position] | None],
        workers: Sequence[_Worker],
    ) -> Iterator[tuple[T, Position]]:
        """Yields the items, of which ``upcoming`` is the first. The thread makes each one item ahead."""
        try:
            for number in count():
                limit_s = self.start_timeout_s if number < max(len(workers), 1) else self.timeout_s
                if not wait([upcoming], None if limit_s == inf else limit_s).done:
                    raise UserError(_late(number, workers, limit_s))
                if (item := upcoming.result()) is None:
                    return
                upcoming = thread.submit(next, items, None)
                yield item
        finally:
            _kill(workers)
            thread.shutdown(wait=False)  # without workers, a file system may hold it

    def _in_this_process(self) -> Iterator[tuple[T, Position]]:
        for micro_batches in self.steps(self.dataset, self.num_steps, 0, 1):
            step: Any = self.prepare(micro_batches)
            yield (step.pin_memory() if self.pin else step), _position(self.dataset)

    def _from_workers(self, workers: Sequence[_Worker]) -> Iterator[tuple[T, Position]]:
        content = pickle.dumps((self.dataset, self.prepare, self.num_steps, self.steps))
        logged: set[str] = set()
        number = 0
        try:
            for worker in workers:
                worker.connection.send_bytes(content)
            for number in range(self.num_steps):
                item = workers[number % len(workers)].next()
                if item is None:
                    return
                step_bytes, position, records = item
                for record in records:
                    warning = getattr(record, "warning", record.msg)
                    if warning not in logged:  # every worker gives it
                        logged.add(warning)
                        logging.getLogger(record.name).handle(record)
                if isinstance(step_bytes, UserError):
                    raise step_bytes
                yield from_bytes(step_bytes, self.pin), position
        except (EOFError, ConnectionError):
            process = workers[number % len(workers)].process
            process.join(KILL_S)
            raise UserError(
                f"data.workers: a worker process ended unexpectedly (status {process.exitcode}), see its "
                "messages; if host memory ran out, lower data.workers or data.global_batch_groups; a script "
                'that trains needs if __name__ == "__main__":, because each worker imports it'
            ) from None


WorkerItem = tuple[StepBytes | UserError, Position, list[logging.LogRecord]]


@dataclass(frozen=True)
class _Worker:
    """A process that makes the inputs of steps, as the training process sees it.

    Attributes:
        connection: takes the dataset to the worker, and steps back.
        turns: tells the worker, by a message for each step, that it may make one more. A semaphore would
            leave a name behind when this process ends at once, and Python would warn of it.
    """

    process: BaseProcess
    connection: Connection
    turns: Connection

    @classmethod
    def start(cls, number: int) -> list[Self]:
        """Starts workers, which wait for the dataset: its megabytes of vocabulary fill any pipe."""
        context = multiprocessing.get_context("spawn")  # a fork after CUDA has started may hang
        workers: list[Self] = []
        for index in range(number):
            ours, theirs = context.Pipe()
            their_turns, turns = context.Pipe(duplex=False)
            process = context.Process(
                target=_work, args=(index, number, imported_plugins(), theirs, their_turns), daemon=True
            )
            process.start()
            theirs.close()
            their_turns.close()
            workers.append(cls(process, ours, turns))
            for _ in range(PREFETCH):
                workers[-1].give_turn()
        return workers

    def next(self) -> WorkerItem | None:
        """Returns (step or error, position after it, log records), or None after the last step."""
        item: WorkerItem | None = pickle.loads(self.connection.recv_bytes())
        self.give_turn()
        return item

    def give_turn(self) -> None:
        with suppress(ConnectionError):  # the worker has made all its steps
            self.turns.send_bytes(b"")


def _kill(workers: Sequence[_Worker]) -> None:
    """Ends workers at once, also those that are stopped or hang. A worker has nothing to save."""
    for worker in workers:
        worker.process.kill()
    for worker in workers:
        worker.process.join(KILL_S)


def _work(worker: int, workers: int, plugins: list[str], connection: Connection, turns: Connection) -> None:
    """Makes every ``workers``-th step, and sends it as bytes, then None. A worker process runs it."""
    import_plugins(plugins)
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    torch.set_num_threads(1)
    # A thread sends, so that the worker makes a step while the pipe is full.
    with ThreadPoolExecutor(1) as thread:
        try:
            for item in chain(_worker_items(worker, workers, connection, turns), [None]):
                thread.submit(
                    connection.send_bytes, pickle.dumps(item)
                )  # fails only if nobody reads any more
        except EOFError:  # the training process has ended
            os._exit(1)


def _worker_items(
    worker: int, workers: int, connection: Connection, turns: Connection
) -> Iterator[WorkerItem]:
    dataset, prepare, num_steps, steps = pickle.loads(connection.recv_bytes())
    collected = _Collector()
    package = logging.getLogger("titan_tree")
    package.addHandler(collected)
    package.propagate = False
    try:
        turns.recv_bytes()
        for micro_batches in steps(dataset, num_steps, worker, workers):
            step_bytes = to_bytes(prepare(micro_batches))
            yield step_bytes, _position(dataset), collected.take()
            turns.recv_bytes()
    except UserError as error:
        yield error, {}, collected.take()


def _position(dataset: TreeDataset) -> Position:
    return dataset.position() | ({"checksum": dataset.checksum} if dataset.is_compared else {})


def _late(number: int, workers: Sequence[_Worker], limit_s: float) -> str:
    maker = "the thread that reads data"
    if workers:
        index = number % len(workers)
        maker = f"worker process {index} (pid {workers[index].process.pid})"
    return (
        f"data.workers: {maker} did not make the input of a step within {limit_s:g} s; it may be stopped, or "
        "a file system may hang; if steps need longer, raise parallel.timeout_s"
    )


class _Collector(QueueHandler):
    """Keeps log records, as plain text that can be pickled, until the next item takes them along."""

    def __init__(self) -> None:
        super().__init__(queue=None)  # type: ignore[arg-type]  # ``enqueue`` replaces the queue
        self.records: list[logging.LogRecord] = []

    def enqueue(self, record: logging.LogRecord) -> None:
        self.records.append(record)

    def take(self) -> list[logging.LogRecord]:
        records, self.records = self.records, []
        return records


@contextmanager
def _safe_path() -> Iterator[None]:
    """Keeps Python processes that start in its block from importing modules from the current directory."""
    before = os.environ.get("PYTHONSAFEPATH", "")
    os.environ["PYTHONSAFEPATH"] = "1"
    try:
        yield
    finally:
        os.environ["PYTHONSAFEPATH"] = before  # an empty one has no effect


@contextmanager
def _signals_blocked() -> Iterator[None]:
    """Blocks the signals that end a run, in this thread until the end of the block, and in what it starts.

    They are for the main thread, which finishes its step and writes a checkpoint before it ends the workers.
    Ctrl-C, a closed terminal and torchrun send them to all processes of a group.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _exit_with_parent() -> None:
    """Ends this process as soon as its parent has ended, even if it was killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def to_bytes(value: object) -> StepBytes:
    """Turns an object that contains CPU tensors into two byte strings."""
    file, content = io.BytesIO(), bytearray()
    _Pickler(file, content).dump(value)
    return file.getvalue(), content


def from_bytes(step_bytes: StepBytes, pin: bool = False) -> Any:
    """Returns the object. Its tensors are views of one buffer, page-locked with ``pin``."""
    skeleton, content = step_bytes
    buffer = torch.frombuffer(content or bytearray(1), dtype=torch.uint8)
    unpickler = pickle.Unpickler(io.BytesIO(skeleton))
    buffer = buffer.pin_memory() if pin else buffer

    def tensor(location: tuple[int, tuple[int, ...], torch.dtype]) -> Tensor:
        offset, shape, dtype = location
        size = int(np.prod(shape)) * dtype.itemsize
        return buffer[offset : offset + size].view(dtype).view(shape)

    unpickler.persistent_load = tensor  # type: ignore[method-assign]
    return unpickler.load()


class _Pickler(pickle.Pickler):
    """Appends the bytes of tensors to ``content`` and pickles (offset, shape, dtype) instead."""

    def __init__(self, file: io.BytesIO, content: bytearray) -> None:
        super().__init__(file, protocol=pickle.HIGHEST_PROTOCOL)
        self.content = content

    def persistent_id(self, value: object) -> object:
        if not isinstance(value, Tensor):
            return None
        self.content += padding(len(self.content))
        offset = len(self.content)
        values = value.detach().clone(memory_format=torch.contiguous_format)
        self.content += values.view(-1).view(torch.uint8).numpy().tobytes()  # NumPy has no bfloat16
        return offset, tuple(value.shape), value.dtype
