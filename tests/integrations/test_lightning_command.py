"""titan-tree train --trainer lightning: its table, its signals, and runs that another trainer continues."""

import signal
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import pytest
import torch
import torch.distributed as dist

from tests.support.cases import exhaustive
from tests.support.lightning_run import expected, fit, lightning_trainer, logged
from tests.support.tiny_run import tiny_config, train, write_config, write_groups
from titan_tree.cli import main
from titan_tree.integrations.lightning import TreeCheckpoints
from titan_tree.run.trainer import Trainer
from titan_tree.signals import SIGNALS

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("lightning")]

TOML = """
[lightning.trainer]
enable_progress_bar = false
enable_model_summary = false
[lightning.loggers.CSVLogger]
save_dir = "{0}"
name = ""
version = "log"
[lightning.callbacks."{1}:StopAfter"]
steps = 3
"""


def train_with_lightning(config: Path, *overrides: str) -> int:
    return main(["train", str(config), *overrides, "--trainer", "lightning"])


class StopAfter(L.Callback):
    """A callback of a user, which a configuration names."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        trainer.should_stop |= trainer.global_step == self.steps


def test_either_trainer_continues_a_run_of_the_other(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command trains steps 1 to 3, the trainer step 4, and Lightning in Python steps 5 to 7."""
    validation = {"validation__files": write_groups(tmp_path / "v.jsonl", 3, 1), "validation__interval": 3}
    options = {"training__steps": 7, "optimizer__lr": 4e-3} | validation
    saved = options | {"checkpoint__interval": 2}
    whole = tiny_config(tmp_path / "whole", **options)
    want = train(whole).model.state_dict()
    path = tmp_path / "lightning.toml"
    path.write_text(write_config(tmp_path).read_text() + TOML.format(tmp_path, __name__))
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in saved.items()]
    assert train_with_lightning(path, *overrides, "profiler.enable=true") == 0
    warning = "keys without effect with --trainer lightning: metrics.loggers, profiler.enable\n"
    assert warning in capsys.readouterr().out
    values = logged(tmp_path)
    config = tiny_config(tmp_path, **saved)
    trainer = Trainer(config)
    assert trainer.progress.step == 3
    trainer.train_step(trainer.inputs())
    trainer.checkpoints.save(due=True)
    trainer.close()
    fit(config, lightning_trainer(tmp_path, TreeCheckpoints()))
    values |= logged(tmp_path)
    assert values == {step: of for step, of in expected(whole).items() if step != 4}
    final = Trainer(config)
    final.close()
    assert final.progress.step == 7
    weights = final.model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in want.items())


class SignalAfter(L.Callback):
    def __init__(self, steps: int, number: int) -> None:
        self.steps, self.number = steps, number

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any) -> None:
        if trainer.global_step == self.steps:
            signal.raise_signal(self.number)


@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("number", exhaustive((signal.SIGTERM,), [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_ends_the_command_after_a_checkpoint(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: signal.Signals
) -> None:
    handlers = [signal.getsignal(each) for each in SIGNALS]
    path = write_config(tmp_path)
    callback = f'[lightning.callbacks."{__name__}:SignalAfter"]\nsteps = 2\nnumber = {number:d}\n'
    quiet = "[lightning.trainer]\nenable_progress_bar = false\n"
    path.write_text(path.read_text() + callback + quiet)
    assert train_with_lightning(path, "checkpoint.interval=100") == 128 + number
    dist.destroy_process_group()
    newest = tmp_path / "run" / "checkpoints" / "step-2"
    ended = f"{number.name}: the run ended after step 2; the same command continues from {newest}\n"
    assert ended in capsys.readouterr().out
    assert newest.is_dir()
    assert [signal.getsignal(each) for each in SIGNALS] == handlers


WRONG: list[tuple[str, str]] = [
    ("lightning.trainer.devices=2", "lightning.trainer.devices: expected no value, because --nproc-per-node"),
    ("lightning.trainer.max_tme=1", "'max_tme'; did you mean 'max_time'?"),
    ("lightning.trainer.max_time=soon", "lightning.trainer: "),
    (
        "lightning.trainer.precision=bf16-mixed",
        "precision: expected '32-true', got 'bf16-mixed'; set training",
    ),
    ("lightning.callbacks.Timr={}", "unknown class in [lightning.callbacks], 'Timr'; did you mean 'Timer'?"),
    ("lightning.callbacks.Timer.durtion=1", "lightning.callbacks.Timer: Timer.__init__() got an unexpected"),
    ("lightning.callbacks.Timer=1", "lightning.callbacks: expected a table of options for each class, got"),
    (
        "lightning.loggers.gone:Log={}",
        "lightning.loggers: 'gone:Log' cannot be imported: No module named 'gone'",
    ),
    (
        "lightning.callbacks.EarlyStopping.monitor=gone",
        "[lightning]: Early stopping conditioned on metric `gone` which is not available. Pass in",
    ),
    ("lightning.logger=1", "unknown key 'lightning.logger'; did you mean 'lightning.loggers'?"),
]


@pytest.mark.parametrize(("override", "message"), WRONG, ids=lambda value: value[:30])
def test_wrong_settings_of_the_command_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], override: str, message: str
) -> None:
    path = write_config(tmp_path)
    status = train_with_lightning(path, override)
    if dist.is_initialized():  # Lightning itself has refused the setting
        dist.destroy_process_group()
    assert status == 2
    error = capsys.readouterr().err
    assert error.startswith("titan-tree: error: ")
    assert message in error
    assert error.count("\n") == 1
