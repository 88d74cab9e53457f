"""StepLoader: makes the inputs of steps before training needs them, in worker processes or in a thread.

    worker w of W makes the steps w, w + W, w + 2 W, ... -> pipe -> thread of the training process -> training

Every worker follows the same stream of groups and renders only its own steps, so the stream does not depend
on W. Each item carries the position after its step. A worker sends a step through its pipe as two byte
strings: separate tensors would each take a file descriptor and a piece of /dev/shm, which is small in
containers.
"""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from logging.handlers import QueueHandler
from multiprocessing import resource_tracker
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from titan_tree.data.dataset import TreeDataset, TreeSharing
from titan_tree.data.packing import MicroBatches
from titan_tree.data.tree_bytes import padding
from titan_tree.errors import UserError
from titan_tree.signals import SIGNALS

T = TypeVar("T")
Prepare = Callable[[MicroBatches], T]
Position = dict[str, int]
# The input of a step, as it travels through a pipe: a pickle with (offset, shape, dtype) in place of every
# tensor, and the bytes of the tensors.
StepBytes = tuple[bytes, bytearray]

PREFETCH = 2  # steps that each worker makes in advance


def refuse_in_worker() -> None:
    """Raises UserError in a worker process, which imports the script. Training there would never end."""
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        raise UserError(
            "this script trains while a worker process imports it; put the training under if __name__ == "
            '"__main__":'
        )


class StepLoader(Generic[T]):
    """Iterates over (input, position) of the next steps. The position is the dataset's, after the step.

    Args:
        dataset: the stream of micro-batches, at the position to start from.
        prepare: makes the input of a step from its micro-batches. With workers it must be picklable.
        num_steps: steps to make.
        workers: number of processes; 0 uses a thread.
        pin: makes the inputs in page-locked memory, from which a GPU copies without waiting.
        sharing: balances trees over ranks, all of which must use the same ``num_steps`` and ``workers``.
            None: the dataset distributes the groups.

    Raises:
        UserError: bad data, also if a worker found it; or a worker died.
    """

    def __init__(
        self,
        dataset: TreeDataset,
        prepare: Prepare[T],
        num_steps: int,
        workers: int = 0,
        pin: bool = False,
        sharing: TreeSharing | None = None,
    ) -> None:
        self.dataset, self.prepare, self.sharing = dataset, prepare, sharing
        self.num_steps, self.workers, self.pin = num_steps, min(workers, num_steps), pin

    def __iter__(self) -> Iterator[tuple[T, Position]]:
        """Starts to make the first steps, and returns an iterator over all of them."""
        items = self._from_workers() if self.workers else self._in_this_process()
        thread = ThreadPoolExecutor(1, thread_name_prefix="data", initializer=_block_signals)
        return self._one_ahead(items, thread, thread.submit(next, items, None))

    def _one_ahead(
        self,
        items: Iterator[tuple[T, Position]],
        thread: ThreadPoolExecutor,
        upcoming: Future[tuple[T, Position] | None],
    ) -> Iterator[tuple[T, Position]]:
        """Yields the items, of which ``upcoming`` is the first. The thread makes each one item ahead."""
        with thread:
            while (item := upcoming.result()) is not None:
                upcoming = thread.submit(next, items, None)
                yield item

    def _in_this_process(self) -> Iterator[tuple[T, Position]]:
        try:
            if self.sharing:
                self.sharing.join(0)
            for micro_batches in self.dataset.steps(self.num_steps, sharing=self.sharing):
                step: Any = self.prepare(micro_batches)
                yield (step.pin_memory() if self.pin else step), self.dataset.position()
        finally:
            if self.sharing:
                self.sharing.leave()

    def _from_workers(self) -> Iterator[tuple[T, Position]]:
        resource_tracker.ensure_running()  # if the first worker started it, it would unblock some signals
        _block_signals()
        steps = DataLoader(
            _WorkerSteps(self.dataset, self.prepare, self.num_steps, self.sharing),
            batch_size=None,
            num_workers=self.workers,
            collate_fn=_unchanged,
            multiprocessing_context="spawn",  # a fork after CUDA has started may hang
            prefetch_factor=PREFETCH,
        )
        logged: set[str] = set()
        try:
            for step_bytes, position, records in steps:
                for record in records:
                    warning = getattr(record, "warning", record.msg)
                    if warning not in logged:  # every worker gives it
                        logged.add(warning)
                        logging.getLogger(record.name).handle(record)
                if isinstance(step_bytes, UserError):
                    raise step_bytes
                yield from_bytes(step_bytes, self.pin), position
        except RuntimeError as error:
            if "DataLoader worker (pid" not in str(error):  # torch's words for a dead worker
                raise
            raise UserError(
                f"data.workers: a worker process ended unexpectedly ({str(error).splitlines()[0]}); if host "
                "memory ran out, lower data.workers or data.global_batch_groups; a script that trains needs "
                'if __name__ == "__main__":, because each worker imports it'
            ) from None


class _WorkerSteps(IterableDataset):
    """Iterates over the steps of one worker, as bytes.

    The dataset is pickled once into shared memory. Sent through the start-up pipe (64 KiB), its megabytes of
    vocabulary would make worker start-ups wait for one another.
    """

    def __init__(
        self, dataset: TreeDataset, prepare: Prepare[Any], num_steps: int, sharing: TreeSharing | None = None
    ) -> None:
        pickled = bytearray(pickle.dumps((dataset, prepare, num_steps, sharing)))
        self.pickled = torch.frombuffer(pickled, dtype=torch.uint8).share_memory_()

    def __iter__(self) -> Iterator[tuple[StepBytes | UserError, Position, list[logging.LogRecord]]]:
        """Yields (step or error, position after it, log records) of each step."""
        threading.Thread(target=_exit_with_parent, daemon=True).start()
        threading.Thread(target=_exit_if_terminated, daemon=True).start()
        worker = get_worker_info()
        assert worker is not None
        dataset, prepare, num_steps, sharing = pickle.loads(self.pickled.numpy())
        collected = _Collector()
        package = logging.getLogger("titan_tree")
        package.addHandler(collected)
        package.propagate = False
        try:
            if sharing:
                sharing.join(worker.id)
            for micro_batches in dataset.steps(num_steps, worker.id, worker.num_workers, sharing):
                step_bytes = to_bytes(prepare(micro_batches))
                yield step_bytes, dataset.position(), collected.take()
        except UserError as error:
            yield error, {}, collected.take()


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


def _block_signals() -> None:
    """Blocks the signals that end a run in this thread and in the processes that it starts.

    They are for the main thread, which finishes its step and writes a checkpoint before it ends the workers.
    Ctrl-C, a closed terminal and torchrun send them to all processes of a group.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _exit_if_terminated() -> None:
    """Ends this worker on a SIGTERM of its parent. Those that are sent to the whole group have no effect."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != os.getppid():
        pass
    os._exit(1)


def _exit_with_parent() -> None:
    """Ends this process as soon as its parent has ended, even if it was killed.

    torch's workers only look between items. One that writes an item into a full pipe would wait forever.
    """
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _unchanged(item: T) -> T:
    return item


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
