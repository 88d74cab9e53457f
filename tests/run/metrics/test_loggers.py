"""Loggers: what each one writes, what a resumed run keeps, and a logger of the user's own."""

import csv
import importlib
import sys
from collections.abc import Mapping
from contextlib import closing, suppress
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.summary.writer import event_file_writer

from tests.support.cases import for_each
from titan_tree.errors import UserError
from titan_tree.run.folder import forget_trackers
from titan_tree.run.metrics import Logger, Loggers
from titan_tree.run.metrics.builtin_loggers import ConsoleLogger, CsvLogger, TensorBoardLogger
from titan_tree.run.metrics.loggers import LOGGERS, Tracker


def read_rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return list(csv.DictReader(file))


@pytest.mark.parametrize("name", LOGGERS)
def test_every_registered_logger_is_a_logger(name: str) -> None:
    assert issubclass(LOGGERS[name], Logger)


def test_the_log_line_shows_formatted_values_and_the_metrics_of_the_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    values = {"loss": 0.2776, "grad_norm": 1.0, "lr": 1e-3, "por": 0.5, "err": 0.25, "step_s": 2.0}
    values |= {"leaf_tokens_per_s": 12345.0, "clip_fraction": 0.2774, "mfu": 0.4, "peak_memory_gib": 8.0}
    with caplog.at_level("INFO", "titan_tree"):
        ConsoleLogger(tmp_path, 0, 100).log(9, values)
    (line,) = caplog.messages
    assert line == (
        "step   9/100  loss 0.2776  clip_fraction 0.2774  grad 1.000  lr 1.00e-03  12,345 leaf tok/s  2.00 s"
    )


def test_a_log_line_fits_100_columns(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    values = {"loss": 0.2776, "reward": 0.5, "grad_norm": 1.0, "lr": 1e-3, "por": 0.5, "step_s": 2.0}
    values |= {f"metric_{n}": float(n) for n in range(9)}
    values |= {"executed_tokens_per_s": 1e6, "leaf_tokens_per_s": 12345.0, "peak_memory_gib": 8.0}
    with caplog.at_level("INFO", "titan_tree"):
        ConsoleLogger(tmp_path, 0, 100).log(9, values)
        ConsoleLogger(tmp_path, 0, 100).log(9, {"loss": 1.0, "executed_tokens_per_s": 5.0})
    long, short = caplog.messages
    assert len(long) <= 100
    assert long == (
        "step   9/100  loss 0.2776  reward 0.500  metric_0 0.0000  metric_1 1.0000  12,345 leaf tok/s  2.00 s"
    )
    assert short == "step   9/100  loss 1.0000  5 executed tok/s"


def test_the_log_line_omits_nll_only_if_it_equals_the_loss(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    logger = ConsoleLogger(tmp_path, 0, 9)
    with caplog.at_level("INFO", "titan_tree"):
        logger.log(1, {"loss": 0.2776, "nll": 0.2776, "clip_fraction": 0.2776})
        logger.log(2, {"loss": 0.2776, "nll": 0.3})
    assert caplog.messages == [
        "step 1/9  loss 0.2776  clip_fraction 0.2776",
        "step 2/9  loss 0.2776  nll 0.3000",
    ]


def test_the_progress_bar_runs_from_the_first_step_to_the_end_of_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Console, "is_terminal", True)
    loggers = Loggers(["console"], tmp_path, 3, 9)
    console = loggers.loggers["console"]
    assert isinstance(console, ConsoleLogger)
    with pytest.raises(ZeroDivisionError), loggers:  # noqa: PT012
        assert console.progress.live.is_started
        assert console.progress.tasks[0].completed == 3
        loggers.advance(4)
        assert console.progress.tasks[0].completed == 4
        raise ZeroDivisionError
    assert not console.progress.live.is_started


def test_csv_rows_hold_every_digit_and_are_readable_at_once(tmp_path: Path) -> None:
    CsvLogger(tmp_path, 0, 9).log(1, {"loss": 0.1 + 0.2, "logical_tokens": 7})
    assert (tmp_path / "metrics.csv").read_text() == "step,loss,logical_tokens\n1,0.30000000000000004,7\n"


def test_a_new_value_adds_a_csv_column(tmp_path: Path) -> None:
    logger = CsvLogger(tmp_path, 0, 9)
    logger.log(1, {"loss": 1.0})
    logger.log(2, {"loss": 0.5, "replayed_rows": 3})
    logger.log(3, {"loss": 0.25})
    assert (tmp_path / "metrics.csv").read_text() == "step,loss,replayed_rows\n1,1.0,\n2,0.5,3\n3,0.25,\n"


def test_a_resumed_csv_drops_repeated_and_truncated_rows(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss,lr\n1,1.0,0.1\n2,0.5,0.1\n3,0.25,0.1\n1")
    CsvLogger(tmp_path, 2, 20).log(3, {"loss": 0.25, "lr": 0.1})
    assert [(row["step"], row["loss"]) for row in read_rows(tmp_path)] == [
        ("1", "1.0"),
        ("2", "0.5"),
        ("3", "0.25"),
    ]


def test_a_new_run_replaces_the_csv_of_an_earlier_run(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,loss\n1,1.0\n")
    CsvLogger(tmp_path, 0, 9).log(1, {"loss": 0.5})
    assert (tmp_path / "metrics.csv").read_text() == "step,loss\n1,0.5\n"


def test_tensorboard_holds_each_step_once_after_a_resume(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Names of files of the same second and process end in a count, and TensorBoard sorts 10 before 9.
    monkeypatch.setattr(event_file_writer, "_global_uid", event_file_writer.AtomicCounter(0))
    first = TensorBoardLogger(tmp_path, 0, 9)
    for step in (1, 2, 3):
        first.log(step, {"loss": step / 4, "lr": 0.5})
    first.close()
    resumed = TensorBoardLogger(tmp_path, 1, 9)
    resumed.log(2, {"loss": 8.0})
    resumed.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 0.25), (2, 8.0)]
    assert events.Tags()["scalars"] == ["loss", "lr"]


def test_tensorboard_shows_the_first_sample_as_it_is(tmp_path: Path) -> None:
    logger = TensorBoardLogger(tmp_path, 0, 9)
    logger.sample("a <b>\n⟦*c*⟧")
    logger.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    (event,) = events.Tensors("first_sample/text_summary")
    assert (event.step, event.tensor_proto.string_val[0].decode()) == (0, "    a <b>\n    ⟦*c*⟧")


@pytest.mark.slow
def test_mlflow_logs_values_sample_and_configuration_and_a_resumed_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path}/store")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.delenv("MLFLOW_EXPERIMENT_NAME", raising=False)
    (tmp_path / "config.toml").write_text("[optimizer]\nlr = 0.0625\n")
    first = LOGGERS["mlflow"](tmp_path, 0, 9)
    first.sample("⟦a⟧")
    first.log(1, {"loss": 0.5, "reward": 0.25})
    first.close()
    resumed = LOGGERS["mlflow"](tmp_path, 1, 9)
    resumed.log(2, {"loss": 0.125})
    with suppress(UserError), closing(resumed):
        raise UserError("step 3: loss is nan")
    client = mlflow.MlflowClient()
    run = client.get_run(first.id)
    assert resumed.id == first.id
    assert [(m.step, m.value) for m in client.get_metric_history(first.id, "loss")] == [(1, 0.5), (2, 0.125)]
    assert run.data.params == {"optimizer.lr": "0.0625"}
    assert run.data.metrics == {"loss": 0.125, "reward": 0.25}
    assert run.info.status == "FAILED"
    assert client.get_experiment(run.info.experiment_id).name == "titan_tree"
    assert mlflow.artifacts.load_text(f"{run.info.artifact_uri}/first_sample.txt") == "⟦a⟧"


@pytest.mark.slow
def test_wandb_logs_offline_and_a_resumed_run_keeps_its_id(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.delenv("WANDB_PROJECT", raising=False)
    (tmp_path / "config.toml").write_text("[optimizer]\nlr = 0.0625\n")

    def log(start_step: int) -> str:
        logger = LOGGERS["wandb"](tmp_path, start_step, 9)
        assert logger.run.project == "titan_tree"
        assert logger.run.config["optimizer"] == {"lr": 0.0625}
        if not start_step:
            logger.sample("⟦<a>⟧")
        logger.log(start_step + 1, {"loss": 0.15625, "grad_norm": start_step + 0.5})
        logger.close()
        return logger.run.id

    first, resumed, new = log(0), log(1), log(0)
    assert first == resumed != new
    written = b"".join(path.read_bytes() for path in tmp_path.glob(f"wandb/offline-run-*/run-{first}.wandb"))
    assert written.count(b"0.15625") >= 2
    for value in (b"grad_norm", b"0.5", b"1.5"):
        assert value in written
    (page,) = tmp_path.glob(f"wandb/offline-run-*-{first}/files/media/html/first_sample*.html")
    assert page.read_text() == "<pre>⟦&lt;a&gt;⟧</pre>"


def test_wandb_marks_a_run_that_fails_as_failed(tmp_path: Path) -> None:
    class Run:
        def finish(self, exit_code: int) -> None:
            codes.append(exit_code)

    codes: list[int] = []
    logger = object.__new__(LOGGERS["wandb"])
    logger.run, logger.id, logger.newest, logger.file = Run(), "id", 3, tmp_path / "wandb_run_id"
    loggers = object.__new__(Loggers)
    loggers.start_step, loggers.loggers = 0, {"wandb": logger}
    with loggers:
        pass
    loggers.loggers = {"wandb": logger}
    with pytest.raises(UserError), loggers:
        raise UserError("step 2: loss is nan")
    assert codes == [0, 1]


def test_wandb_without_an_account_is_an_error_that_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import wandb

    def refuse(**options: object) -> None:
        raise wandb.errors.UsageError("No API key configured.\nUse `wandb login`.")

    monkeypatch.setattr(wandb, "init", refuse)
    with pytest.raises(
        UserError, match=r"^metrics.loggers: 'wandb': No API key .*; run `wandb login`, or .*offline$"
    ):
        LOGGERS["wandb"](tmp_path, 0, 9)


def test_a_missing_wandb_is_an_error_that_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)  # import raises ImportError
    monkeypatch.delitem(sys.modules, "titan_tree.run.metrics.wandb", raising=False)
    with pytest.raises(UserError, match=r"^metrics.loggers: 'wandb' needs .* `pip install wandb`"):
        importlib.import_module("titan_tree.run.metrics.wandb")


def test_a_logger_of_your_own_takes_one_class_and_one_registration(tmp_path: Path) -> None:
    records: list[object] = []

    class Mine(Logger):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            records.append((step, dict(values)))

        def close(self) -> None:
            records.append("closed")

    LOGGERS.register("mine", Mine)
    with Loggers(["csv", "mine"], tmp_path, 0, 9) as loggers:
        loggers.log(1, {"loss": 0.5})
    assert records == [(1, {"loss": 0.5}), "closed"]
    assert [row["loss"] for row in read_rows(tmp_path)] == ["0.5"]


@for_each("row", ["x,0.5", "-1,0.5", "2", "2,0.5,0.1", "²,0.5", ",", "\x00", "9" * 5000 + ",0.5"])
def test_a_damaged_csv_is_one_line(tmp_path: Path, row: str) -> None:
    (tmp_path / "metrics.csv").write_text(f"step,loss\n1,1.0\n{row}\n3,0.25\n")
    with pytest.raises(UserError, match=r"metrics\.csv:3: expected a step and one value per column"):
        CsvLogger(tmp_path, 2, 10)


def test_a_logger_of_ones_own_that_fails_is_one_line(tmp_path: Path) -> None:
    class Broken(Logger):
        def log(self, step: int, values: Mapping[str, float]) -> None:
            sys.exit(0)

        def close(self) -> None:
            raise OSError("the tracker is away")

    class Narrow(Logger):
        def __init__(self) -> None:
            pass

    key = r"^logger 'mine' \(metrics\.loggers\)"
    with LOGGERS.registered("mine", Broken), Loggers(["mine"], tmp_path, 0, 9) as loggers:
        with pytest.raises(UserError, match=rf"{key}: .*\.py:\d+: SystemExit: 0"):
            loggers.log(1, {"loss": 1.0})
        with pytest.raises(UserError, match=rf"{key}: .*\.py:\d+: OSError: the tracker is away"):
            loggers.close()
    called = r", called with \(folder, start_step, total_steps\): TypeError: .* takes 1 positional"
    with LOGGERS.registered("mine", Narrow), pytest.raises(UserError, match=key + called):
        Loggers(["mine"], tmp_path, 0, 9)


def test_a_run_of_a_tracker_holds_no_step_with_two_configurations(tmp_path: Path) -> None:
    class Mine(Tracker):
        file_name = "mine_run_id"

        def __init__(self, folder: Path, start_step: int, total_steps: int) -> None:
            super().__init__(folder, start_step, total_steps)
            self.id = self.earlier_id() or f"run-{start_step}"
            self.file.write_text(self.id)

    def run(start: int, newest: int, *, ends: bool = True, changed: bool = True) -> str:
        if changed:
            forget_trackers(tmp_path, start)
        logger = Mine(tmp_path, start, 9)
        for step in range(start + 1, newest + 1):
            logger.log(step, {"loss": 1.0})
        if ends:
            logger.close()
        return logger.id

    assert run(0, 4) == "run-0"
    assert run(4, 6) == "run-0"  # no step again
    assert run(5, 6, changed=False) == "run-0"  # equal values again
    assert run(5, 7, ends=False) == "run-5"
    assert run(6, 6, changed=False) == "run-5"
    assert run(6, 7, ends=False) == "run-5"
    assert run(7, 8) == "run-7"  # the one before may have had more steps
    (tmp_path / "mine_run_id").write_text("")
    assert run(8, 9, changed=False) == "run-8"  # a crash has emptied the file
    assert len(list(tmp_path.glob("mine_run_id.until-step-*"))) == 2
