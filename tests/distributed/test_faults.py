"""A rank that dies, hangs or diverges ends the run, and one line says which rank, where and what to do."""

import os
import pickle
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.support.processes import as_rank, run_ranks, start_ranks, torchrun
from tests.support.tiny_run import SMALL, read_metrics, tiny_config, train, write_config
from titan_tree.cli import main
from titan_tree.distributed import agreement, faults
from titan_tree.distributed.experts import exchange
from titan_tree.errors import UserError
from titan_tree.run.checkpoint import lock
from titan_tree.run.trainer import Trainer, in_background


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def hang() -> None:
    time.sleep(300)


def run_out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def fail_in_step_3(rank: int, ports: list[int], folder: Path, fault: Callable[[], None], model: str) -> None:
    """Rank 1 has a fault in step 3, in the middle of its first exchange of tokens if it has experts."""
    options: dict[str, Any] = {**SMALL[model], "checkpoint__interval": 2, "parallel__timeout_s": 2}
    if model.endswith("_moe"):
        options["parallel__expert_parallel"] = 2
    config = tiny_config(folder, **options)
    with as_rank(rank, 2, ports[0]):
        trainer = Trainer(config)
        sys.stderr = (folder / f"stderr{rank}").open("w", buffering=1)
        if rank == 1:
            inject(trainer, fault)
        with pytest.raises(UserError) as error:
            trainer.train()
        (folder / f"rank{rank}").write_text(str(error.value))
        os._exit(0)  # a rank that hangs never leaves the group


def inject(trainer: Trainer, fault: Callable[[], None]) -> None:
    send, forward = exchange._start_all_to_all, trainer.model.forward

    def faulty(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if trainer.progress.step == 2:
                fault()
            return function(*args, **kwargs)

        return call

    if trainer.model.experts:
        exchange._start_all_to_all = faulty(send)
    else:
        trainer.model.forward = faulty(forward)  # type: ignore[method-assign]


def wait_and_kill(ranks: mp.ProcessContext, file: Path) -> None:
    """Kills all ranks as soon as one has written a line to a file."""
    deadline = time.monotonic() + 100
    while not (file.exists() and file.stat().st_size) and time.monotonic() < deadline:
        time.sleep(0.05)
    for process in ranks.processes:
        process.kill()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "model", "reason"),
    [
        (die, "qwen3", "Connection (closed|reset) by peer"),
        (hang, "qwen3_moe", "(Timed out waiting 2000ms|Application timeout caused pair closure)"),
        (run_out_of_memory, "qwen3_moe", "Connection (closed|reset) by peer"),
    ],
)
def test_a_fault_of_a_rank_ends_the_others_with_one_line(
    fault: Callable[[], None], model: str, reason: str, tmp_path: Path
) -> None:
    write_config(tmp_path)
    line = tmp_path / "rank0"
    wait_and_kill(start_ranks(fail_in_step_3, 2, tmp_path, fault, model), line)
    message = line.read_text()
    assert re.fullmatch(
        rf"rank 0: \w+ failed in step 3 \(paths .*\): .*{reason}.*; another rank has ended or hangs, see its "
        r"messages; its last collectives are in .*rank_0; the run ended after step 2; the same command "
        r"continues from .*step-2",
        message,
    ), message
    trace = pickle.loads((tmp_path / "run" / "flight_recorder" / "rank_0").read_bytes())
    assert trace["entries"]
    if fault is hang:
        told = (tmp_path / "stderr1").read_text()
        assert re.match(
            r"rank 1: step 3 \(paths .* takes more than parallel.timeout_s = 2 s, at hang \(", told
        )


def differ_in_one_bit(rank: int, ports: list[int], folder: Path) -> None:
    """Rank 1 of three gathers another bit of one weight, or has another state of the data."""
    for port, what in zip(ports, ("norm.weight", "settings or data position"), strict=True):
        with as_rank(rank, 3, port), pytest.MonkeyPatch.context() as patch:
            trainer = Trainer(tiny_config(folder, checkpoint__interval=1))
            if rank == 1 and what == "norm.weight":
                flip_a_bit(patch, trainer.model.state_dict(keep_vars=True)[what])
            if rank == 1 and what != "norm.weight":
                another = in_background(lambda: {"files": ["another checksum"]})
                patch.setattr(trainer, "_data_state", another)
            with pytest.raises(UserError, match=f"step 1: rank 1 differs from the others in {what}; start"):
                trainer.train()
            trainer.close()
            assert not list((folder / "run" / "checkpoints").glob("step-*"))


def flip_a_bit(patch: pytest.MonkeyPatch, weight: torch.Tensor) -> None:
    fingerprint = agreement._fingerprint
    patch.setattr(agreement, "_fingerprint", lambda tensor: fingerprint(tensor) + (tensor is weight))


@pytest.mark.slow
def test_a_rank_that_differs_ends_the_run(tmp_path: Path) -> None:
    write_config(tmp_path)
    run_ranks(differ_in_one_bit, 3, tmp_path, num_groups=2)


def test_variables_of_the_user_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCH_FR_BUFFER_SIZE", "7")
    for name in ("TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_FR_DUMP_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(faults, "_variables", {})
    for folder in ("a", "b"):  # of two runs in one process
        faults.record_collectives(tmp_path / folder)
    assert os.environ["TORCH_FR_BUFFER_SIZE"] == "7"
    assert os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert os.environ["TORCH_FR_DUMP_TEMP_FILE"] == f"{tmp_path}/b/flight_recorder/rank_"


def train_in_another_folder(rank: int, ports: list[int], folder: Path) -> None:
    """Rank 1 sees other checkpoints than rank 0, as if the folder were on a disk of each machine."""
    config = tiny_config(folder, checkpoint__interval=1, checkpoint__folder=folder / f"disk{rank}")
    message = f"{folder}/disk1: .* does not see this folder of rank 0; all machines must share it"
    with as_rank(rank, 2, ports[0]), pytest.MonkeyPatch.context() as patch:
        patch.setattr(lock, "VISIBLE_S", 0.1)
        with pytest.raises(UserError, match=message):
            Trainer(config)


def test_all_machines_need_the_same_folder(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "disk1").mkdir()
    (tmp_path / "disk1" / "run.lock").write_text('{"run": "0123abcd"}')  # of another run
    run_ranks(train_in_another_folder, 2, tmp_path)


KILL_ONCE = """
import os, signal, sys
from titan_tree.cli import main
from titan_tree.run.trainer import Trainer
from titan_tree.run.trainer import Trainer, in_background

train_step = Trainer.train_step

def step_or_die(trainer, inputs):
    train_step(trainer, inputs)
    rank, restarts = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    if trainer.progress.step == 3 and rank == "1" and restarts == "0":
        os.kill(os.getpid(), signal.SIGKILL)

Trainer.train_step = step_or_die
os._exit(main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.exhaustive
def test_torchrun_restarts_from_the_newest_checkpoint(tmp_path: Path) -> None:
    options = {"training__steps": 5, "checkpoint__interval": 2}
    (script := tmp_path / "script.py").write_text(KILL_ONCE)
    killed = tiny_config(tmp_path / "killed", **options)
    config = tmp_path / "killed" / "config.toml"
    overrides = ["training.steps=5", "checkpoint.interval=2"]
    assert "resumed from" in torchrun("--max-restarts=1", script, "train", config, *overrides)
    run_ranks(train_whole, 2, tmp_path / "whole", options)
    whole = tiny_config(tmp_path / "whole")
    assert [row["step"] for row in read_metrics(whole)] == ["1", "2", "3", "4", "5"]
    assert read_metrics(killed) == read_metrics(whole)


def train_whole(rank: int, ports: list[int], folder: Path, options: dict[str, Any]) -> None:
    with as_rank(rank, 2, ports[0]):
        train(tiny_config(folder, **options))


def die_at_the_start(rank: int, ports: list[int], folder: Path) -> None:
    """Rank 1 dies before the first step, while rank 0 waits for it."""
    if rank == 1:
        Trainer.inputs = lambda trainer: os._exit(1)  # type: ignore[method-assign,assignment]
    sys.stderr = (folder / f"stderr{rank}").open("w", buffering=1)
    with as_rank(rank, 2, ports[0]):
        main(["train", str(folder / "config.toml")])
    (folder / "rank0").write_text("ended")


def test_a_rank_that_dies_before_the_first_step_is_one_line_too(tmp_path: Path) -> None:
    write_config(tmp_path)
    wait_and_kill(start_ranks(die_at_the_start, 2, tmp_path), tmp_path / "rank0")
    error = (tmp_path / "stderr0").read_text()
    assert re.fullmatch(r"titan-tree: error: rank 0: \w+ failed in .*by peer.*\n", error), error
