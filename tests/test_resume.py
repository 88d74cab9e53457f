"""Runs that are killed, resumed, or resumed from what must not be resumed."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import titan_tree.train
from tests.support.tiny_run import read_metrics, tiny_config, train, write_config
from titan_tree.errors import UserError

ROOT = Path(__file__).parents[1]


def command(config: Path, *overrides: str) -> list[str]:
    return [sys.executable, "-m", "titan_tree.train", "--config", str(config), *overrides]


def start(config: Path, *overrides: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        command(config, *overrides),
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    options = ["training.steps=60", "checkpoint.interval=7", "lr_scheduler.warmup_steps=5"]
    (tmp_path / "killed").mkdir()
    config = write_config(tmp_path / "killed")
    run = start(config, *options)
    whole = tiny_config(
        tmp_path / "whole", training__steps=60, checkpoint__interval=7, lr_scheduler__warmup_steps=5
    )
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the others: sums depend on it
    train(whole)
    torch.set_num_threads(threads)
    assert run.stdout is not None
    for line in run.stdout:
        if line.startswith("step 24/60"):
            os.kill(run.pid, signal.SIGKILL)
            break
    run.communicate()
    assert run.returncode == -signal.SIGKILL

    output, errors = start(config, *options).communicate()
    assert "resumed from" in output, errors
    rows = read_metrics(tiny_config(tmp_path / "killed"))
    assert [row["step"] for row in rows] == [str(step) for step in range(1, 61)]
    assert rows == read_metrics(whole)  # loss, gradient norm, learning rate and data, digit for digit


def test_half_written_checkpoints_are_removed_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(tmp_path, checkpoint__interval=2)
    train(config)
    folder = Path(config.folder) / "checkpoints"
    (folder / "step-4" / ".metadata").unlink()  # as if the writing had been cut off
    expected = read_metrics(config)
    with caplog.at_level("INFO", "titan_tree"):
        trainer = train(config)
    assert f"removed {folder / 'step-4'}" in caplog.text
    assert f"resumed from {folder / 'step-2'}" in caplog.text
    assert len(trainer.history) == 2
    assert read_metrics(config) == expected


def test_asynchronous_checkpoints_resume_as_well(tmp_path: Path) -> None:
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


def test_another_architecture_is_refused(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, checkpoint__interval=2))
    with pytest.raises(UserError, match=r"another model or optimizer: hidden_size = 32 \(now 64\)"):
        train(tiny_config(tmp_path, checkpoint__interval=2, model__overrides__hidden_size=64))


def test_other_data_order_is_refused(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, checkpoint__interval=2))
    with pytest.raises(UserError, match=r"data\.seed"):
        train(tiny_config(tmp_path, checkpoint__interval=2, data__seed=1))


def test_a_fresh_start_does_not_overwrite(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, checkpoint__interval=2))
    with pytest.raises(UserError, match=r"up to step 4.*resume is false"):
        train(tiny_config(tmp_path, checkpoint__interval=2, checkpoint__resume="false"))


def test_hyperparameters_come_from_the_configuration(tmp_path: Path) -> None:
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
