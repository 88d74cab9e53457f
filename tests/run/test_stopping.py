"""A run that must end early writes a checkpoint first, and says truthfully how to continue."""

import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from tests.support.cases import exhaustive, slow_except
from tests.support.processes import as_rank, run_ranks
from tests.support.tiny_run import read_metrics, tiny_config, train, write_config
from titan_tree import signals
from titan_tree.data.dataset import TreeDataset
from titan_tree.engine.bad_steps import BadStepError
from titan_tree.errors import AgreedError, UserError
from titan_tree.run import stopping, trainer
from titan_tree.run.checkpoint.storage import CheckpointWriter
from titan_tree.run.metrics.builtin_loggers import CsvLogger
from titan_tree.run.optimizer_step import OptimizerStep
from titan_tree.run.stopping import Notice
from titan_tree.run.trainer import Trainer
from titan_tree.signals import SIGNALS, Interrupted, Signals
from titan_tree.tree.token_tree import TokenTree

pytestmark = pytest.mark.usefixtures("default_signals")

ROOT = Path(__file__).parents[2]


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "run" / "checkpoints").glob("step-*"))


def act_after_step(monkeypatch: pytest.MonkeyPatch, step: int, action: Any) -> None:
    """Calls ``action(trainer)`` at the end of a step, as if it happened during the step."""
    train_step = Trainer.train_step

    def step_and_act(trainer: Trainer, inputs: Any) -> None:
        train_step(trainer, inputs)
        if trainer.progress.step == step:
            action(trainer)

    monkeypatch.setattr(Trainer, "train_step", step_and_act)


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_ends_the_run_after_a_checkpoint(
    number: signal.Signals,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    handlers = [signal.getsignal(each) for each in SIGNALS]
    config = tiny_config(tmp_path, checkpoint__interval=100)
    with monkeypatch.context() as patch:
        act_after_step(patch, 2, lambda trainer: signal.raise_signal(number))
        with pytest.raises(Interrupted) as left:
            train(config)
    assert left.value.code == 128 + number
    newest = tmp_path / "run" / "checkpoints" / "step-2"
    assert caplog.messages[-1] == (
        f"{number.name}: the run ended after step 2; the same command continues from {newest}"
    )
    assert f"{number.name}: the run ends after the current step" in capfd.readouterr().err
    assert [signal.getsignal(each) for each in SIGNALS] == handlers

    train(config)
    whole = tiny_config(tmp_path / "whole", checkpoint__interval=100)
    train(whole)
    assert read_metrics(config) == read_metrics(whole)


@pytest.mark.parametrize(
    ("options", "told", "saved"),
    [
        ({"interval": 0}, "step 2 without a checkpoint (checkpoint.interval = 0); the same command", []),
        (
            {"interval": 9, "resume": "false"},
            "command with checkpoint.resume=true continues from",
            ["step-2"],
        ),
        ({"interval": 9, "async_save": "true"}, "the same command continues from", ["step-2"]),
        ({"interval": 2}, "the same command continues from", ["step-2"]),
    ],
)
def test_what_is_told_is_true(
    options: dict[str, Any],
    told: str,
    saved: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    act_after_step(monkeypatch, 2, lambda trainer: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(Interrupted):
        train(tiny_config(tmp_path, **{f"checkpoint__{key}": value for key, value in options.items()}))
    assert told in caplog.messages[-1]
    assert checkpoints(tmp_path) == saved


@pytest.mark.slow
@pytest.mark.parametrize("number", exhaustive((signal.SIGTERM,), [signal.SIGINT, signal.SIGTERM]))
def test_a_signal_before_the_first_step_ends_the_run_at_once(number: signal.Signals, tmp_path: Path) -> None:
    arguments = [str(write_config(tmp_path)), f"folder={tmp_path / 'run'}"]
    command = [sys.executable, "-m", "titan_tree", "train", *arguments]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()  # a log line that precedes the first step
    process.send_signal(number)
    assert process.wait(30) == -number
    assert process.communicate()[1] == ""
    assert checkpoints(tmp_path) == []


def test_ctrl_c_ends_a_command_from_its_import_on(tmp_path: Path) -> None:
    """The import of the package sets the action of SIGINT."""
    report = "import signal, sys; print(repr(signal.getsignal(signal.SIGINT)), file=sys.stderr); sys.exit()"
    package = tmp_path / "titan_tree"
    package.mkdir()
    source = (ROOT / "titan_tree" / "__init__.py").read_text()
    (package / "__init__.py").write_text(source.replace("__version__ =", f"{report}\n__version__ =", 1))
    for command, expected in (
        (["-m", "titan_tree", "train"], "SIG_DFL"),
        (["-mtitan_tree"], "SIG_DFL"),
        (["-c", "import titan_tree"], "default_int_handler"),
    ):
        ended = subprocess.run([sys.executable, *command], cwd=tmp_path, capture_output=True, text=True)
        assert expected in ended.stderr


def test_a_signal_that_no_step_has_answered_is_sent_again() -> None:
    arrived = []
    earlier = signal.signal(signal.SIGUSR1, lambda number, frame: arrived.append(number))
    with Signals() as deferred:
        signal.raise_signal(signal.SIGUSR1)
        assert (arrived, deferred.received) == ([], signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, earlier)
    assert arrived == [signal.SIGUSR1]


def test_nothing_is_left_behind_if_all_signals_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(signals, "SIGNALS", ())
    with Signals():
        pass
    assert signal.set_wakeup_fd(-1) == -1


def test_an_ignored_signal_stays_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    """nohup ignores SIGHUP, so that a run survives its terminal."""
    earlier = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    with Signals():
        os.kill(os.getpid(), signal.SIGHUP)
    signal.signal(signal.SIGHUP, earlier)


def test_a_second_signal_ends_the_process_even_inside_a_long_call() -> None:
    """Such as a hanging collective, during which Python runs no handlers."""
    code = (
        "import ctypes, titan_tree.signals as s\n"
        "s.REPEAT_S = 0.05\n"
        "with s.Signals():\n"
        "    print('ready', flush=True)\n"
        "    while True:\n"
        "        ctypes.CDLL(None).pause()\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)  # of another kind
    time.sleep(0.3)
    assert process.poll() is None
    process.send_signal(signal.SIGINT)
    assert process.wait(5) == 130
    process.stdout.close()


def test_bad_data_end_the_run_after_a_checkpoint(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, checkpoint__interval=100, data__shuffle_buffer=0)
    data = tmp_path / "data.jsonl"
    lines = data.read_text().splitlines()
    (wrong,) = [i for i, line in enumerate(lines) if '"g7"' in line][:1]
    lines[wrong] = lines[wrong].replace('"tokens": [', '"tokens": ["x", ')
    data.write_text("\n".join(lines))
    with pytest.raises(
        UserError, match=rf"data\.jsonl:{wrong + 1}: .*after step 2; .*continues from .*step-2"
    ):
        train(config)


def fail_to_log(logger: CsvLogger, step: int, values: object) -> None:
    if step == 2:
        raise OSError(errno.ENOSPC, "No space left on device", "metrics.csv")


@pytest.mark.parametrize("is_bad", [False, True], ids=["good step", "bad step"])
@pytest.mark.parametrize("async_save", slow_except(["true"], ["false", "true"]))
@pytest.mark.parametrize("steps", slow_except([4], [2, 4]))
def test_metrics_that_cannot_be_written_end_the_run_after_a_checkpoint(
    steps: int, async_save: str, is_bad: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CsvLogger, "log", fail_to_log)
    update_weights = OptimizerStep.update_weights

    def update_or_refuse(*args: Any) -> Any:
        update = update_weights(*args)
        if is_bad:
            raise BadStepError("loss is nan")
        return update

    def write_slowly(*args: Any) -> Any:
        time.sleep(0.5)
        return write(*args)

    write = CheckpointWriter.write_data
    monkeypatch.setattr(OptimizerStep, "update_weights", update_or_refuse)
    monkeypatch.setattr(CheckpointWriter, "write_data", write_slowly)
    options = {"checkpoint__interval": 100, "checkpoint__async_save": async_save}
    config = tiny_config(tmp_path, training__steps=steps, **options)
    make_step = lambda **settings: OptimizerStep(**settings | {"max_bad_steps": 9})  # noqa: E731
    monkeypatch.setattr(trainer, "OptimizerStep", make_step)
    with pytest.raises(UserError, match=r"step 2: its metrics cannot be written: .*No space left"):
        train(config)
    assert checkpoints(tmp_path) == ["step-2"]


def test_loggers_that_fail_to_close_do_not_lose_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(logger: CsvLogger) -> None:
        assert checkpoints(tmp_path) == ["step-4"]
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(CsvLogger, "close", fail)
    with pytest.raises(OSError, match="No space left"):
        train(tiny_config(tmp_path, checkpoint__interval=4, checkpoint__async_save="true"))


def refuse_one_step(rank: int, ports: list[int], folder: Path) -> None:
    """The second of two ranks finds an error in its data, or receives a signal, which it alone sees."""
    for port, name in zip(ports, ("error", "signal"), strict=True):
        with as_rank(rank, 2, port), pytest.MonkeyPatch.context() as patch:
            if name == "signal" and rank == 1:
                act_after_step(patch, 2, lambda trainer: signal.raise_signal(signal.SIGUSR1))
            if name == "error" and rank == 1:
                patch.setattr(TreeDataset, "own_trees", fail_after_two_steps(TreeDataset.own_trees))
            config = tiny_config(folder / name, checkpoint__interval=100)
            with pytest.raises((AgreedError, Interrupted)) as left:
                train(config)
            if name == "error":
                assert str(left.value).startswith("line 7 is wrong; the run ended after step 2;")
            else:
                assert left.value.code == 128 + signal.SIGUSR1
            assert checkpoints(folder / name) == ["step-2"]


def fail_after_two_steps(read: Callable[..., list[TokenTree]]) -> Callable[..., list[TokenTree]]:
    steps = count()

    def read_or_fail(*args: Any) -> list[TokenTree]:
        if next(steps) == 2:
            raise UserError("line 7 is wrong")
        return read(*args)

    return read_or_fail


def test_all_ranks_leave_if_one_must(tmp_path: Path) -> None:
    for name in ("error", "signal"):
        (tmp_path / name).mkdir()
        write_config(tmp_path / name)
    run_ranks(refuse_one_step, 2, tmp_path, num_groups=2)


def test_minutes_write_checkpoints_between_those_of_the_interval(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter(range(0, 10_000, 45))  # 45 s per look at the clock
    monkeypatch.setattr(stopping.time, "monotonic", lambda: next(clock))
    train(tiny_config(tmp_path, checkpoint__interval=100, checkpoint__minutes=1.5, checkpoint__keep=0))
    assert checkpoints(tmp_path) == ["step-1", "step-3", "step-4"]


def test_ranks_follow_the_most_urgent_notice() -> None:
    """A refused step comes before a signal, and a signal before a checkpoint."""
    by_urgency = [
        Notice(),
        Notice(is_checkpoint_due=True),
        *(Notice(signal=number) for number in sorted(SIGNALS)),
        Notice(is_refused=True),
    ]
    codes = [notice.code() for notice in by_urgency]
    assert codes == sorted(set(codes))
    assert codes[0] == 0  # what ``all_reduce_counts`` sends by default
    for notice in [*by_urgency, Notice(is_refused=True, signal=signal.SIGTERM, is_checkpoint_due=True)]:
        assert Notice.of(notice.code()) == notice


def test_minutes_need_an_interval(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"checkpoint\.minutes: expected checkpoint\.interval > 0 as well"):
        tiny_config(tmp_path, checkpoint__minutes=5)
