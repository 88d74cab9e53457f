"""Runs resume exactly after they were killed, and refuse checkpoints that do not belong to them."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

import titan_tree.train
from tests.support.processes import run_ranks
from tests.support.tiny_run import read_metrics, tiny_config, train, write_config
from titan_tree.errors import UserError
from titan_tree.trainer import Trainer

ROOT = Path(__file__).parents[1]


def kill_after_step_10(rank: int, ports: list[int], arguments: list[str]) -> None:
    """Trains in this process, which kills itself after step 10: three steps after a checkpoint."""
    train_step = Trainer.train_step

    def step_or_die(trainer: Trainer, inputs: Any) -> None:
        train_step(trainer, inputs)
        if trainer.progress.step == 10:
            os.kill(os.getpid(), signal.SIGKILL)

    Trainer.train_step = step_or_die  # type: ignore[method-assign]
    titan_tree.train.main(arguments)


@pytest.mark.distributed
@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    options = ["training.steps=18", "checkpoint.interval=7", "lr_scheduler.warmup_steps=5"]
    (tmp_path / "killed").mkdir()
    arguments = ["--config", str(write_config(tmp_path / "killed")), *options]
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        run_ranks(kill_after_step_10, 1, arguments)
    killed = tiny_config(tmp_path / "killed")
    assert [row["step"] for row in read_metrics(killed)] == [str(step) for step in range(1, 11)]

    resumed = subprocess.run(
        [sys.executable, "-m", "titan_tree.train", *arguments, "data.workers=1"],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "resumed from" in resumed.stdout, resumed.stderr
    whole = tiny_config(
        tmp_path / "whole", training__steps=18, checkpoint__interval=7, lr_scheduler__warmup_steps=5
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in the other processes: the order of sums depends on it
    train(whole)
    torch.set_num_threads(threads)
    rows = read_metrics(killed)
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 19)]
    assert rows == read_metrics(whole)  # loss, gradient norm, learning rate and data, digit for digit


def test_incomplete_checkpoints_are_removed_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(tmp_path, checkpoint__interval=2)
    train(config)
    folder = Path(config.folder) / "checkpoints"
    (folder / "step-4" / ".metadata").unlink()  # as if the run had been interrupted
    expected = read_metrics(config)
    with caplog.at_level("INFO", "titan_tree"):
        trainer = train(config)
    assert f"removed {folder / 'step-4'}" in caplog.text
    assert f"resumed from {folder / 'step-2'}" in caplog.text
    assert len(trainer.history) == 2
    assert read_metrics(config) == expected


def test_asynchronous_checkpoints_resume_exactly(tmp_path: Path) -> None:
    options = {"training__steps": 6, "checkpoint__interval": 2, "checkpoint__async_save": "true"}
    config = tiny_config(tmp_path, **options)
    train(config)
    expected = read_metrics(config)
    shutil.rmtree(Path(config.folder) / "checkpoints" / "step-6")
    assert len(train(config).history) == 2
    assert read_metrics(config) == expected


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, checkpoint__interval=1, checkpoint__keep=2, training__steps=5)
    train(config)
    kept = sorted(path.name for path in (Path(config.folder) / "checkpoints").glob("step-*"))
    assert kept == ["step-4", "step-5"]


def test_checkpoints_of_another_architecture_are_refused(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, checkpoint__interval=2))
    with pytest.raises(UserError, match=r"another model or optimizer: hidden_size = 32 \(now 64\)"):
        train(tiny_config(tmp_path, checkpoint__interval=2, model__overrides__hidden_size=64))


def test_another_order_of_the_data_is_refused(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, checkpoint__interval=2))
    with pytest.raises(UserError, match=r"data\.seed"):
        train(tiny_config(tmp_path, checkpoint__interval=2, data__seed=1))


def test_a_new_run_does_not_overwrite_checkpoints(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, checkpoint__interval=2))
    with pytest.raises(UserError, match=r"up to step 4.*resume is false"):
        train(tiny_config(tmp_path, checkpoint__interval=2, checkpoint__resume="false"))


def test_hyperparameters_of_the_configuration_override_the_checkpoint(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, checkpoint__interval=2))
    changed = train(
        tiny_config(
            tmp_path,
            checkpoint__interval=2,
            training__steps=5,
            optimizer__lr=3e-4,
            optimizer__weight_decay=0.7,
            lr_scheduler__min_lr_factor=1.0,
        )
    )
    groups = [group for optimizer in changed.optimizers for group in optimizer.param_groups]
    assert [group["weight_decay"] for group in groups] == [0.0, 0.7]
    assert read_metrics(changed.config)[-1]["lr"] == "0.0003"


def test_user_errors_are_one_line_and_status_2(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(titan_tree.train, "_log_to_stdout", lambda rank: None)
    status = titan_tree.train.main(["--config", str(write_config(tmp_path)), "training.stepz=3"])
    assert status == 2
    assert capsys.readouterr().err == (
        "titan_tree.train: error: argument 'training.stepz=3': unknown key 'training.stepz'; "
        "did you mean 'training.steps'?\n"
    )
