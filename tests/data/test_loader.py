"""StepLoader: the same steps from a thread and from worker processes; steps travel as bytes."""

import json
import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.datasets import tree_dataset
from titan_tree.data.loader import StepLoader, from_bytes, to_bytes
from titan_tree.data.packing import MicroBatches
from titan_tree.errors import UserError
from titan_tree.signals import SIGNALS
from titan_tree.tree.batch import TreeBatch

NUM_GROUPS = 7
OPTIONS: dict[str, Any] = {"global_batch_groups": 2, "max_tokens": 64, "shuffle_buffer": 3}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "groups.jsonl"
    write(path, [{"tokens": [9, group, 100 + group]} for group in range(NUM_GROUPS)])
    return path


def write(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def as_batches(micro_batches: MicroBatches) -> list[TreeBatch]:
    return [TreeBatch.from_trees(trees) for trees in micro_batches]


def tokens(step: list[TreeBatch]) -> list[list[int]]:
    return [batch.tokens.tolist() for batch in step]


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("merge", ["group", "batch"])
def test_the_steps_of_all_workers_together_are_the_stream(file: Path, workers: int, merge: str) -> None:
    def steps(first: int, stride: int) -> list[tuple[Any, dict[str, int]]]:
        dataset = tree_dataset(file, merge=merge, **OPTIONS)
        stream = dataset.steps(9, first, stride)
        return [(tokens(as_batches(trees)), dataset.state_dict()) for trees in stream]

    whole = steps(0, 1)
    assert len(whole) == 9
    for worker in range(workers):
        assert steps(worker, workers) == whole[worker::workers]


@pytest.mark.slow
def test_workers_resume_anywhere_and_report_what_a_thread_reports(
    file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The steps of two processes equal those of a thread: data, positions, one warning, and one error."""
    lines = [{"tokens": [9, group], "routed_experts": [[[0]], [[0]]]} for group in range(NUM_GROUPS)]
    write(file, [*lines, {"tokens": [9, "x"]}])
    options = OPTIONS | {"shuffle_buffer": 0}

    def load(workers: int) -> tuple[list[Any], str, list[str]]:
        caplog.clear()
        dataset = tree_dataset(file, **options)
        dataset.load_state_dict(dataset.state_dict() | {"group": 1})
        dataset.reader.tokenizer = b"more than a pipe holds" * 1_000_000  # type: ignore[assignment]
        items, steps = [], iter(StepLoader(dataset, as_batches, 8, workers))
        for step, position in islice(steps, 3):
            items.append((tokens(step), position))
        with pytest.raises(UserError) as error:
            next(steps)
        return items, str(error.value), [record.getMessage() for record in caplog.records]

    with caplog.at_level(logging.WARNING, "titan_tree"):
        of_thread, of_workers = load(0), load(2)
    assert f"{file}:8: tokens" in of_thread[1]
    assert len(of_thread[2]) == 1
    assert of_thread == of_workers


def test_reading_checksums_does_not_change_what_another_thread_pickles(file: Path) -> None:
    """A dictionary that grows while it is pickled is a RuntimeError."""
    dataset = tree_dataset(file)
    before = set(vars(dataset.reader))
    assert dataset.reader.files.checksums
    assert set(vars(dataset.reader)) == before


def test_workers_import_nothing_from_the_current_directory(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("multiprocessing", "pickle", "threading"):
        Path(f"{name}.py").write_text("raise SystemExit('a module of the current directory ran')")
    assert len(list(StepLoader(tree_dataset(file, **OPTIONS), as_batches, 2, workers=1))) == 2
    assert not os.environ["PYTHONSAFEPATH"]


def die(micro_batches: MicroBatches) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_a_dead_worker_is_one_line(file: Path) -> None:
    loader = StepLoader(tree_dataset(file, **OPTIONS), die, 4, workers=1)
    with pytest.raises(
        UserError, match=r"a worker process ended unexpectedly \(status -9\).* lower data\.workers.*__main__"
    ):
        list(loader)


def stopped_after_first_step(file: Path) -> tuple[Iterator[Any], list[int]]:
    """Returns an iterator whose worker is stopped, and the worker's process id."""
    loader = StepLoader(
        tree_dataset(file, **OPTIONS), as_batches, 50, workers=1, start_timeout_s=60, timeout_s=0.5
    )
    others = set(multiprocessing.active_children())  # ranks of the session
    steps = iter(loader)
    pids = [process.pid or 0 for process in set(multiprocessing.active_children()) - others]
    next(steps)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    return steps, pids


def check_ended(pids: list[int]) -> None:
    """Fails unless the worker and the thread that waits for it end within two seconds."""
    assert len(pids) == 1
    deadline = time.monotonic() + 2
    while any(map(is_running, pids)) or any(t.name.startswith("data") for t in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.mark.slow
def test_a_stopped_worker_is_one_line(file: Path) -> None:
    steps, pids = stopped_after_first_step(file)
    with pytest.raises(UserError) as error:
        list(steps)
    assert str(error.value) == (
        f"data.workers: worker process 0 (pid {pids[0]}) did not make the input of a step within 0.5 s; it "
        "may be stopped, or a file system may hang; if steps need longer, raise parallel.timeout_s"
    )
    check_ended(pids)


@pytest.mark.slow
def test_an_iterator_that_is_dropped_ends_its_stopped_worker(file: Path) -> None:
    steps, pids = stopped_after_first_step(file)
    del steps
    check_ended(pids)


def test_a_thread_that_hangs_is_one_line(file: Path) -> None:
    hold = threading.Event()
    loader = StepLoader(tree_dataset(file, **OPTIONS), lambda trees: hold.wait(60), 4, start_timeout_s=0.1)
    with pytest.raises(UserError, match=r"the thread that reads data did not .* within 0\.1 s"):
        next(iter(loader))
    hold.set()


def test_the_loader_makes_the_given_number_of_steps(file: Path) -> None:
    dataset = tree_dataset(file, **OPTIONS)
    loader = StepLoader(dataset, as_batches, 5)
    steps = [tokens(step) for step, _ in loader]
    assert steps == [tokens(as_batches(trees)) for trees in islice(tree_dataset(file, **OPTIONS), 5)]


class Unpicklable:
    def __str__(self) -> str:
        return "a.json"

    def __reduce__(self) -> Any:
        raise TypeError


def full_pipe(micro_batches: MicroBatches) -> Tensor:
    (tree,) = micro_batches[0]
    logging.getLogger("titan_tree.data.test").warning("%s: %s", Unpicklable(), tree.tokens[1])
    return torch.zeros(1 << 20)


def wait_for_death(file: str, pids: Any) -> None:
    steps = iter(
        StepLoader(tree_dataset(Path(file), **OPTIONS | {"global_batch_groups": 1}), full_pipe, 7, 2)
    )
    next(steps)
    for process in multiprocessing.active_children():
        pids.send(process.pid)
    time.sleep(100)


@pytest.mark.slow
def test_workers_end_with_a_process_that_was_killed(file: Path) -> None:
    """Also if they wait to write an item that nobody reads any more."""
    spawn = multiprocessing.get_context("spawn")
    receiver, sender = spawn.Pipe()
    trainer = spawn.Process(target=wait_for_death, args=(str(file), sender))
    trainer.start()
    sender.close()
    workers = [receiver.recv(), receiver.recv()]
    time.sleep(0.5)  # until the pipe is full
    for number in SIGNALS:  # they are for the training process, but may be sent to the whole group
        os.kill(workers[0], number)
    time.sleep(0.3)
    assert all(map(is_running, workers))
    trainer.kill()
    deadline = time.monotonic() + 3
    while any(map(is_running, workers)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/status")
    return status.exists() and "\nState:\tZ" not in status.read_text()


@pytest.mark.slow
def test_workers_pass_on_all_different_warnings(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    options = OPTIONS | {"global_batch_groups": 1, "shuffle_buffer": 0}
    with caplog.at_level(logging.WARNING, "titan_tree"):
        list(StepLoader(tree_dataset(file, **options), full_pipe, 9, workers=1))
    assert [record.getMessage() for record in caplog.records] == [f"a.json: {n}" for n in range(NUM_GROUPS)]


@dataclass
class Record:
    name: str
    tensors: list[Tensor | None]


def test_packed_tensors_keep_their_values_types_and_shapes() -> None:
    tensors = [
        torch.randn(3, 4).t(),  # not contiguous
        torch.tensor([True, False, True]),
        torch.empty(0, 5, dtype=torch.int32),
        torch.tensor(7, dtype=torch.int16),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16, requires_grad=True),
        torch.empty(0, dtype=torch.bool),
        torch.arange(5).expand(2, 5),
        torch.arange(6)[1:2],
        None,
    ]
    copy = from_bytes(to_bytes(Record("é", tensors)))
    assert copy.name == "é"
    assert copy.tensors[-1] is None
    for ours, theirs in zip(copy.tensors[:-1], tensors[:-1], strict=True):
        assert isinstance(theirs, Tensor)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert from_bytes(to_bytes({"no": "tensors"})) == {"no": "tensors"}
    ours[0] = 9  # views of a buffer that can be written
