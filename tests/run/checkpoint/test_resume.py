"""Runs resume exactly after they were killed, and refuse checkpoints that do not belong to them."""

import dataclasses
import errno
import fcntl
import json
import math
import multiprocessing
import os
import re
import resource
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

from tests.support.cases import for_each
from tests.support.processes import run_ranks
from tests.support.rl_runs import tiny
from tests.support.tiny_run import read_metrics, tiny_config, train, write_config, write_groups
from titan_tree.cli import main
from titan_tree.errors import UserError
from titan_tree.run.checkpoint import Checkpoints
from titan_tree.run.checkpoint.changes import config_changes
from titan_tree.run.checkpoint.lock import FolderLock
from titan_tree.run.trainer import Trainer

ROOT = Path(__file__).parents[2]


def kill_after_step_10(rank: int, ports: list[int], arguments: list[str]) -> None:
    """Trains in this process, which kills itself after step 10: three steps after a checkpoint."""
    train_step = Trainer.train_step

    def step_or_die(trainer: Trainer, inputs: Any) -> None:
        train_step(trainer, inputs)
        if trainer.progress.step == 10:
            os.kill(os.getpid(), signal.SIGKILL)

    Trainer.train_step = step_or_die  # type: ignore[method-assign]
    main(arguments)


def resume_after_step_7(rank: int, ports: list[int], arguments: list[str]) -> None:
    """Trains to the end in this process, from the last checkpoint."""
    steps = []
    train_step = Trainer.train_step

    def record_step(trainer: Trainer, inputs: Any) -> None:
        train_step(trainer, inputs)
        steps.append(trainer.progress.step)

    Trainer.train_step = record_step  # type: ignore[method-assign]
    main(arguments)
    assert steps == list(range(8, 19))


@pytest.mark.slow
def test_killed_and_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    options = ["training.steps=18", "checkpoint.interval=7", "lr_scheduler.warmup_steps=5"]
    (tmp_path / "killed").mkdir()
    arguments = ["train", str(write_config(tmp_path / "killed")), *options]
    with pytest.raises(mp.ProcessExitedException, match="SIGKILL"):
        run_ranks(kill_after_step_10, 1, arguments)
    killed = tiny_config(tmp_path / "killed")
    assert [row["step"] for row in read_metrics(killed)] == [str(step) for step in range(1, 11)]

    run_ranks(resume_after_step_7, 1, [*arguments, "data.workers=1"])
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


def test_partial_checkpoints_of_this_run_are_removed_and_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = tiny_config(tmp_path, checkpoint__interval=2)
    train(config)
    folder = Path(config.folder) / "checkpoints"
    run = json.loads((folder / "run.lock").read_text())["run"]
    (folder / "step-4").rename(folder / f"step-4.{run}.partial")  # as if the run had been interrupted
    expected = read_metrics(config)
    with caplog.at_level("INFO", "titan_tree"):
        trainer = train(config)
    assert f"removed {folder / 'step-4'}" in caplog.text
    assert f"resumed from {folder / 'step-2'}" in caplog.text
    assert trainer.optimizer_step.good_steps == 2
    assert read_metrics(config) == expected


def test_files_of_others_stay(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, checkpoint__interval=1, checkpoint__keep=2)
    folder = Path(config.folder) / "checkpoints"
    others = [folder / name for name in ("step-1.0123abcd.partial", "step-01", "step-2.old", "notes")]
    for other in others:
        other.mkdir(parents=True)
        (other / "file").write_text("important")
    train(config)
    train(tiny_config(tmp_path, checkpoint__interval=1, checkpoint__keep=2, training__steps=6))
    assert all((other / "file").read_text() == "important" for other in others)
    assert sorted(path.name for path in folder.glob("step-?")) == ["step-5", "step-6"]


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_something_else_that_is_called_like_a_checkpoint_is_refused(tmp_path: Path, kind: str) -> None:
    config = tiny_config(tmp_path, checkpoint__interval=2)
    other = Path(config.folder) / "checkpoints" / "step-99"
    if kind == "file":
        other.parent.mkdir(parents=True)
        other.write_text("mine")
    else:
        other.mkdir(parents=True)
    with pytest.raises(UserError, match=r"step-99: expected a checkpoint of this version"):
        train(config)
    assert other.exists()


def test_asynchronous_checkpoints_resume_exactly(tmp_path: Path) -> None:
    options = {"training__steps": 6, "checkpoint__interval": 2, "checkpoint__async_save": "true"}
    config = tiny_config(tmp_path, **options)
    train(config)
    expected = read_metrics(config)
    shutil.rmtree(Path(config.folder) / "checkpoints" / "step-6")
    assert train(config).optimizer_step.good_steps == 2
    assert read_metrics(config) == expected


def test_only_the_newest_checkpoints_are_kept(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, checkpoint__interval=1, checkpoint__keep=2, training__steps=5)
    train(config)
    kept = sorted(path.name for path in (Path(config.folder) / "checkpoints").glob("step-*"))
    assert kept == ["step-4", "step-5"]


def test_an_interrupted_deletion_does_not_block_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, checkpoint__interval=1, checkpoint__keep=2, training__steps=3)

    def delete_half(path: Path, **options: object) -> None:
        for name in ("checkpoint.json", "tensors.json"):
            (path / name).unlink()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("titan_tree.run.checkpoint.checkpoints.shutil.rmtree", delete_half)
        with pytest.raises(KeyboardInterrupt):
            train(config)
    train(config)
    kept = sorted(path.name for path in (Path(config.folder) / "checkpoints").glob("step-*"))
    assert kept == ["step-2", "step-3"]


def test_a_checkpoint_that_cannot_be_deleted_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(path: Path, **options: object) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr("titan_tree.run.checkpoint.checkpoints.shutil.rmtree", fail)
    train(tiny_config(tmp_path, checkpoint__interval=1, checkpoint__keep=2, training__steps=3))
    assert any("step-1: cannot be deleted: [Errno 16] Device" in message for message in caplog.messages)


def test_copies_of_checkpoints_under_other_names_stay(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, checkpoint__interval=1, checkpoint__keep=2, training__steps=2)
    train(config)
    folder = Path(config.folder) / "checkpoints"
    shutil.copytree(folder / "step-1", folder / "step-01")
    config.training.steps = 4
    train(config)
    assert sorted(path.name for path in folder.glob("step-*")) == ["step-01", "step-3", "step-4"]


def test_checkpoints_of_another_architecture_are_refused(tmp_path: Path) -> None:
    train(tiny_config(tmp_path, checkpoint__interval=2))
    with pytest.raises(UserError, match=r"another model or optimizer: hidden_size = 32 \(now 64\)"):
        train(tiny_config(tmp_path, checkpoint__interval=2, model__overrides__hidden_size=64))
    with pytest.raises(UserError, match=r"another model or optimizer: optimizer\.options = None \(now"):
        train(tiny_config(tmp_path, checkpoint__interval=2, optimizer__options="{amsgrad: true}"))
    assert sorted(path.name for path in (tmp_path / "run" / "checkpoints").glob("step-*")) == [
        "step-2",
        "step-4",
    ]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"data__seed": 1}, r"data\.seed: 0 -> 1"),
        ({"data__layout": "flat"}, r"data\.layout: 'tree' -> 'flat'"),
        ({"data__merge": "batch"}, r"data\.merge: 'group' -> 'batch'"),
        ({"loss__reduction": "token_mean"}, r"loss\.reduction: 'path_mean' -> 'token_mean'"),
    ],
)
def test_changes_that_make_the_curve_misleading_are_refused_unless_allowed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changed: dict[str, Any], message: str
) -> None:
    train(tiny_config(tmp_path, checkpoint__interval=2, training__steps=2))
    options = {"checkpoint__interval": 2, "training__steps": 3, **changed}
    with pytest.raises(UserError, match=message):
        train(tiny_config(tmp_path, **options))
    with caplog.at_level("INFO", "titan_tree"):
        trainer = train(tiny_config(tmp_path, **options, checkpoint__allow_changes="true"))
    assert re.search("changed since the checkpoint: " + message, caplog.text)
    assert trainer.progress.step == 3


def test_other_changes_are_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tiny_config(tmp_path, checkpoint__interval=2))
    with caplog.at_level("INFO", "titan_tree"):
        train(tiny_config(tmp_path, checkpoint__interval=2, training__steps=5, optimizer__lr=1e-4))
    named = re.findall("changed since the checkpoint: (.*)", caplog.text)
    assert named == ["optimizer.lr: 0.001 -> 0.0001", "training.steps: 4 -> 5"]
    kept = Path(tmp_path / "run" / "config.toml.until-step-4").read_text()
    assert "lr = 0.001" in kept


def test_changed_files_are_refused_unless_allowed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    train(tiny_config(tmp_path, checkpoint__interval=2, training__steps=2))
    write_groups(tmp_path / "data.jsonl", seed=1)
    options = {"checkpoint__interval": 2, "training__steps": 3}
    with pytest.raises(UserError, match=r"data\.jsonl: .*checkpoint\.allow_changes = true"):
        train(tiny_config(tmp_path, **options))
    with caplog.at_level("INFO", "titan_tree"):
        train(tiny_config(tmp_path, **options, checkpoint__allow_changes="true"))
    assert re.search(r"changed since the checkpoint: .*data\.jsonl", caplog.text)


# What changes after step 3 of 9: 2 epochs of 9 groups, 2 groups each. 6 groups of epoch 1 are trained.
# The number of groups in the file, other options, and the further steps or the refusal.
RESUMES: dict[str, tuple[int, dict[str, Any], int | str]] = {
    "nothing": (9, {}, 6),
    "a larger batch": (9, {"data__global_batch_groups": 4}, 3),
    "a batch of two epochs": (9, {"data__global_batch_groups": 18}, 1),
    "a warm-up longer than a run of this batch": (
        9, {"data__global_batch_groups": 18, "lr_scheduler__warmup_steps": 4}, 1,
    ),
    "a smaller batch": (9, {"data__global_batch_groups": 1}, 12),
    "fewer epochs": (9, {"training__epochs": 1}, 2),
    "more epochs": (9, {"training__epochs": 3}, 11),
    "steps": (9, {"training__epochs": "null", "training__steps": 5}, 2),
    "fewer steps than are done": (9, {"training__epochs": "null", "training__steps": 2}, 0),
    "a longer file": (12, {}, 9),
    "a shorter file": (7, {}, 4),
    "a shorter file and a larger batch": (7, {"data__global_batch_groups": 3}, 3),
    "a file that ends where training stands": (6, {}, 3),
    "a file that ends before": (5, {}, r"data\.jsonl: 5 groups, but the checkpoint was written after 6 g"),
    "a file that ends before, and steps": (
        5, {"training__epochs": "null", "training__steps": 9}, "5 groups, but the checkpoint was written aft",
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def third_step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("resumes")
    train(tiny_config(folder, checkpoint__interval=3, **EPOCHS))
    for step in (6, 9):
        shutil.rmtree(folder / "run" / "checkpoints" / f"step-{step}")
    return folder


EPOCHS = {"training__steps": "null", "training__epochs": 2, "data__global_batch_groups": 2}
EPOCHS |= {"lr_scheduler__warmup_steps": 0, "checkpoint__allow_changes": "true"}


@for_each("groups, changed, expected", list(RESUMES.values()))
def test_a_resume_trains_what_is_left_or_is_refused_before_it_starts(
    third_step: Path, tmp_path: Path, groups: int, changed: dict[str, Any], expected: int | str
) -> None:
    shutil.copytree(third_step / "run", tmp_path / "run")
    write_groups(tmp_path / "data.jsonl", groups)
    config = tiny_config(tmp_path, checkpoint__interval=3, **EPOCHS | changed)
    before = [row["loss"] for row in read_metrics(config)[:3]]
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            Trainer(config)
        return
    trainer = train(config)
    rows = read_metrics(config)
    assert [row["loss"] for row in rows[:3]] == before
    assert [int(row["step"]) for row in rows[3:]] == list(range(4, 4 + expected))
    assert trainer.num_steps == changed.get("training__steps", 3 + expected)
    if expected:
        lr, steps, warmup = config.optimizer.lr, trainer.num_steps, config.lr_scheduler.warmup_steps
        share = (4 if warmup else 1 + math.cos(math.pi * 3 / steps)) / (4 if warmup else 2)
        assert float(rows[3]["lr"]) == pytest.approx(lr * share, rel=1e-6)


def hold_lock(folder: Path, is_held: Any) -> None:
    FolderLock(folder)
    is_held.set()
    time.sleep(600)


def test_a_second_run_in_the_folder_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, checkpoint__interval=2)
    fork = multiprocessing.get_context("fork")
    is_held = fork.Event()
    holder = fork.Process(target=hold_lock, args=(Path(config.folder), is_held), daemon=True)
    holder.start()
    assert is_held.wait(60)
    with pytest.raises(UserError, match=rf"another run uses this folder \(process {holder.pid} on"):
        train(config)
    holder.kill()  # the lock ends with its process
    holder.join()
    train(config)


def test_a_fork_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        lock.release()  # the fork cannot unlock the folder of its parent
        os.read(reader, 1)
        os._exit(0)
    try:
        FolderLock(tmp_path)  # replaces the first one
        lock.release()
        with (tmp_path / "run.lock").open() as file:
            with pytest.raises(BlockingIOError):
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            FolderLock(tmp_path).release()
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    finally:
        os.write(writer, b".")
        os.waitpid(child, 0)


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


@pytest.mark.parametrize(
    ("table", "key", "value", "change"),
    [
        ("loss", "entropy", 0.1, "loss.entropy: 0.0 -> 0.1"),
        ("data", "paths", "longest", "data.paths: 'all' -> 'longest'"),
        ("rl", "async_steps", 1, "rl.async_steps: 0 -> 1"),
    ],
)
def test_a_checkpoint_without_newer_keys_has_their_defaults(
    table: str, key: str, value: object, change: str, tmp_path: Path
) -> None:
    now = tiny(tmp_path) if table == "rl" else tiny_config(tmp_path)
    before = dataclasses.asdict(now)
    del before[table][key]
    assert config_changes(before, now) == ([], [])
    setattr(getattr(now, table), key, value)
    assert config_changes(before, now) == ([change], [])


def test_user_errors_are_one_line_and_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["train", str(write_config(tmp_path)), "training.stepz=3"])
    assert status == 2
    assert capsys.readouterr().err == (
        "titan-tree: error: argument 'training.stepz=3': unknown key 'training.stepz'; "
        "did you mean 'training.steps'?\n"
    )


@pytest.mark.parametrize("which", ["run", "checkpoints"])
def test_a_folder_that_cannot_be_written_is_found_at_the_start(tmp_path: Path, which: str) -> None:
    (tmp_path / "file").write_text("")
    config = tiny_config(tmp_path, checkpoint__interval=2)
    if which == "run":
        config.folder = str(tmp_path / "file" / "run")
    else:
        config.checkpoint.folder = str(tmp_path / "file" / "run")
    with pytest.raises(UserError, match=r"file/run: cannot be written: Not a directory"):
        Trainer(config)
    torch.distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["run.lock", "config.toml"])
def test_a_fifo_in_the_folder_of_a_run_is_refused(tmp_path: Path, name: str) -> None:
    config = tiny_config(tmp_path, checkpoint__interval=2)
    Path(config.folder).mkdir()
    os.mkfifo(Path(config.folder) / name)
    with pytest.raises(UserError, match=rf"{name}: cannot be written: .*a FIFO|a FIFO.*{name}"):
        Trainer(config).train()
    torch.distributed.destroy_process_group()


def test_a_failed_write_does_not_promise_deleted_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(tmp_path, checkpoint__interval=2)
    save = Checkpoints.save

    def save_to_deleted_folder(checkpoints: Checkpoints, due: bool = False) -> bool:
        if checkpoints.progress.step == 4:
            shutil.rmtree(config.folder)
        return save(checkpoints, due)

    monkeypatch.setattr(Checkpoints, "save", save_to_deleted_folder)
    with pytest.raises(UserError, match=r"writing the checkpoint failed: .*; there is none in its folder"):
        train(config)


def test_a_disk_that_is_full_at_the_start_is_reported(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, checkpoint__interval=2)
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    for bytes_written, file in (
        (0, "run.lock: cannot be written"),
        (100, "config.toml: cannot be written: File too large"),
    ):
        resource.setrlimit(resource.RLIMIT_FSIZE, (bytes_written, limit[1]))
        try:
            with pytest.raises(UserError, match=file):
                Trainer(config)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limit)
            torch.distributed.destroy_process_group()
    train(config)


def test_a_new_run_and_a_new_export_keep_the_files_of_earlier_ones(tmp_path: Path) -> None:
    for lr in (1e-3, 1e-4):
        train(tiny_config(tmp_path, checkpoint__export_hf="true", optimizer__lr=lr, training__steps=1))
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert {"metrics.csv", "metrics.csv.earlier", "hf", "hf.earlier", "config.toml.until-step-0"} <= names
    assert not any("partial" in name for name in names)
