"""Asynchronous checkpoints: training waits for the copies, not for the disk, and failures are reported."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.cases import slow_except
from tests.support.processes import as_rank, run_ranks
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.errors import UserError
from titan_tree.run.checkpoint import background
from titan_tree.run.checkpoint.background import BackgroundWriter
from titan_tree.run.checkpoint.storage import CheckpointWriter
from titan_tree.run.trainer import Trainer

ASYNC: dict[str, Any] = {"checkpoint__async_save": "true"}


def checkpoints(config: Any) -> dict[str, bytes]:
    """Returns the tensors of each checkpoint of a run, as they are in the file."""
    folder = Path(config.folder) / "checkpoints"
    return {path.name: (path / "__0_0.distcp").read_bytes() for path in folder.glob("step-?")}


@pytest.mark.parametrize("optimizer", slow_except(["adamw"], ["adamw", "adamw8bit"]))
def test_a_checkpoint_holds_the_values_at_its_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, optimizer: str
) -> None:
    """Copies and writes are slow, so that training would change the values if it did not wait."""
    options: dict[str, Any] = {
        "checkpoint__interval": 2,
        "training__steps": 7,
        "optimizer__name": optimizer,
        "model__overrides__intermediate_size": 128,  # some weights have 4,096 numbers: 8-bit states
        "router_bias__rate": 1e-2,
        "model__name": "qwen3_moe",
    }
    together = tiny_config(tmp_path / "sync", **options)
    train(together)
    copy, write, step = BackgroundWriter._copy, CheckpointWriter.write_data, Trainer.train_step
    written_after: list[int] = []
    trained = 0

    def copy_slowly(*args: Any) -> Any:
        time.sleep(0.002)
        return copy(*args)

    def write_slowly(writer: CheckpointWriter, *args: Any) -> Any:
        limit = time.monotonic() + 30
        while trained == writer.content["step"] < 7 and time.monotonic() < limit:
            time.sleep(0.01)
        written_after.append(trained - writer.content["step"])
        return write(writer, *args)

    def train_step(trainer: Trainer, *args: Any) -> None:
        nonlocal trained
        step(trainer, *args)
        trained = trainer.progress.step

    monkeypatch.setattr(BackgroundWriter, "_copy", copy_slowly)
    monkeypatch.setattr(CheckpointWriter, "write_data", write_slowly)
    monkeypatch.setattr(Trainer, "train_step", train_step)
    apart = tiny_config(tmp_path / "async", **options, **ASYNC)
    train(apart)
    assert read_metrics(apart) == read_metrics(together)
    assert min(written_after[:3]) >= 1, "the next step did not run beside the write"
    assert checkpoints(apart) == checkpoints(together)
    assert checkpoints(apart).keys() == {"step-4", "step-6", "step-7"}


@pytest.mark.slow
def test_host_memory_is_reused_and_two_checkpoints_never_overlap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    save, places, running = background.dcp.save, [], 0

    def save_alone(tensors: Any, **options: Any) -> None:
        nonlocal running
        running += 1
        time.sleep(0.2)
        assert running == 1
        places.append([t.data_ptr() for group in tensors.values() for t in group.values()])
        save(tensors, **options)
        running -= 1

    monkeypatch.setattr(background.dcp, "save", save_alone)
    train(tiny_config(tmp_path, checkpoint__interval=1, **ASYNC))
    assert len(places) == 4
    assert all(place == places[0] for place in places)


def write_or_fail(patch: pytest.MonkeyPatch, failing_step: int) -> None:
    write = CheckpointWriter.write_data

    def fail(writer: CheckpointWriter, *args: Any) -> Any:
        if writer.content["step"] == failing_step:
            raise OSError(28, "No space left on device")
        return write(writer, *args)

    patch.setattr(CheckpointWriter, "write_data", fail)


@pytest.mark.parametrize("failing_step", slow_except([6], [4, 6]))
def test_a_failed_write_is_reported_and_earlier_checkpoints_are_intact(
    tmp_path: Path, failing_step: int
) -> None:
    """The failure is reported at the next checkpoint, or at the end of the run."""
    options: dict[str, Any] = {"checkpoint__interval": 2, "training__steps": 6, **ASYNC}
    config = tiny_config(tmp_path / "run", **options)
    with pytest.MonkeyPatch.context() as patch:
        write_or_fail(patch, failing_step)
        newest = Path(config.folder) / "checkpoints" / f"step-{failing_step - 2}"
        message = rf"step-{failing_step}: writing .*No space left.*; the newest one is {newest}; if"
        with pytest.raises(UserError, match=message):
            train(config)
    folder = Path(config.folder) / "checkpoints"
    left = {path.name for path in folder.glob("step-*")}
    assert left == {f"step-{step}" for step in range(2, failing_step, 2)}
    resumed = train(config)
    assert resumed.optimizer_step.good_steps == 8 - failing_step
    whole = tiny_config(tmp_path / "whole", **options)
    train(whole)
    assert read_metrics(config) == read_metrics(whole)


def test_missing_host_memory_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty_like = torch.empty_like

    def refuse(value: torch.Tensor, **options: Any) -> torch.Tensor:
        if "pin_memory" in options:
            raise RuntimeError("CUDA error: out of memory\nmore lines")
        return empty_like(value, **options)

    monkeypatch.setattr(torch, "empty_like", refuse)
    config = tiny_config(tmp_path, checkpoint__interval=2, **ASYNC)
    message = r"8,192 bytes of host memory for model\.embed_tokens\.weight: CUDA error: out of memory; free"
    with pytest.raises(UserError, match=rf"checkpoint\.async_save: cannot allocate {message}"):
        train(config)
    assert not list(Path(config.folder).glob("checkpoints/step-*"))


def fail_on_rank_1(rank: int, ports: list[int], folder: Path) -> None:
    config = tiny_config(folder, checkpoint__interval=2, training__steps=6, **ASYNC)
    with as_rank(rank, 2, ports[0]), pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            write_or_fail(patch, 4)
        with pytest.raises(UserError, match=r"step-4: writing the checkpoint failed: .*No space left"):
            train(config)
    with as_rank(rank, 2, ports[1]):
        assert train(config).optimizer_step.good_steps == 4


@pytest.mark.slow
def test_all_ranks_report_the_failed_write_of_one(tmp_path: Path) -> None:
    tiny_config(tmp_path)
    run_ranks(fail_on_rank_1, 2, tmp_path, num_groups=2)
    assert not list(tmp_path.glob("run/checkpoints/*partial"))
