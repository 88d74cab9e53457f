"""scripts/reliability/ notices what it looks for. Its campaigns take minutes to hours and run by hand."""

import csv
import importlib
import json
import os
import random
import runpy
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
SCRIPTS = ROOT / "scripts" / "reliability"


@pytest.fixture
def training(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import training

    return training


@pytest.fixture
def processes(training: ModuleType, tmp_path: Path) -> Callable[..., object]:
    """Returns a function that starts a function in a child, as ``training`` starts a rank."""

    def start(function: Callable[[], int]) -> object:
        output = tmp_path / "child.out"
        return training.Processes([training.fork(output, function)], [output])

    return start


@pytest.mark.exhaustive
def test_a_campaign_prints_and_appends_its_outcomes(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    command = [sys.executable, str(SCRIPTS / "run.py"), "lines", "--first", "4", "--trials", "2", "--csv"]
    result = subprocess.run([*command, str(path)], capture_output=True, text=True, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "own format         1          1     0" in result.stdout
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["trial"], row["kind"], row["recovered"]) for row in rows] == [
        ("4", "own format", "1"),
        ("5", "other formats", "1"),
    ]


def test_a_trial_that_loses_something_is_reported(
    training: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = runpy.run_path(str(SCRIPTS / "run.py"))
    campaign = ModuleType("leaky")
    campaign.KINDS = ("leak", "crash")  # type: ignore[attr-defined]

    def trial(kind: str, *_: object) -> str:
        training.check(kind != "leak", "step 3 is lost")
        raise ZeroDivisionError

    campaign.trial = trial  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "leaky", campaign)
    leak, crash = (run["Campaign"]("leaky", tmp_path).run(number) for number in (0, 1))
    assert (leak.kind, leak.lost) == ("leak", "step 3 is lost")
    assert "ZeroDivisionError" in crash.lost


def test_processes_report_statuses_and_tracebacks(training: ModuleType, processes) -> None:
    with processes(lambda: os.kill(os.getpid(), signal.SIGKILL)) as killed:
        assert killed.wait() == [128 + signal.SIGKILL]
    with processes(lambda: 1 // 0) as broken:
        assert broken.wait() == [1]
    with pytest.raises(training.LostError, match=r"shows a traceback.*ZeroDivisionError"):
        broken.check_no_traceback()
    with (
        processes(lambda: signal.pause()) as hung,
        pytest.raises(training.LostError, match="rank 0 did not end"),
    ):
        hung.wait(timeout_s=0.05)
    assert hung.wait() == [128 + signal.SIGKILL]  # the with block ended it


def test_a_refusal_is_one_line_and_status_2(training: ModuleType, processes) -> None:
    def refuse(text: str) -> int:
        print(text, file=sys.stderr)
        return 2

    with processes(lambda: refuse("train: error: no")) as refused:
        assert refused.refusal() == "train: error: no"
    with processes(lambda: refuse("more")) as refused, pytest.raises(training.LostError, match="one line"):
        refused.refusal()
    with processes(lambda: 0) as done, pytest.raises(training.LostError, match="instead of 2"):
        done.refusal()


def test_runs_notice_other_losses_and_files_that_vanish(training: ModuleType, tmp_path: Path) -> None:
    run, reference = training.Run(tmp_path / "run"), training.Run(tmp_path / "reference")
    for folder in (run.folder, reference.folder):
        folder.mkdir()
        (folder / "metrics.csv").write_text("step,loss,step_s\n1,2.5,0.1\n2,2.25,0.1\n")
    run.check_equals(reference)
    assert run.step() == 2
    (run.folder / "metrics.csv").write_text("step,loss,step_s\n1,2.5,0.3\n2,2.2500001,0.1\n")
    with pytest.raises(training.LostError, match="step 2: loss differ"):
        run.check_equals(reference)
    (run.folder / "metrics.csv").write_text("step,loss,step_s\n1,2.5,0.1\n")
    with pytest.raises(training.LostError, match="1 rows instead of 2"):
        run.check_equals(reference)

    run.plant()
    run.check_planted()
    assert run.unfinished() == []
    (run.checkpoints / "step-6.3f9a41c2.partial").mkdir()
    assert run.unfinished() == ["step-6.3f9a41c2.partial"]
    (run.checkpoints / "step-5-of-mine" / "notes.txt").unlink()
    with pytest.raises(training.LostError, match=r"step-5-of-mine/notes\.txt has vanished"):
        run.check_planted()


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_command_can_be_killed_and_started_again(training: ModuleType, tmp_path: Path) -> None:
    code = f"""
import signal, sys
from pathlib import Path
sys.path.insert(0, {str(SCRIPTS)!r})
import training
training.preload()
run = training.Run(Path({str(tmp_path)!r}) / "run", options=(*training.OPTIONS, "training.steps=5"))
with run.start() as processes:
    run.wait_for_step(4, processes)
    processes.send(signal.SIGKILL, [0])
    assert processes.wait() == [137], processes.text()
assert training.resumed_step(run.finish()) == 3
assert run.step() == 5
"""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_every_campaign_has_what_run_py_calls(training: ModuleType) -> None:
    import run

    for name in run.CAMPAIGNS:
        module = importlib.import_module(name)
        assert module.KINDS, name
        assert module.TRIALS >= 1, name
        assert callable(module.prepare), name
        assert callable(module.trial), name


@pytest.mark.slow
def test_the_campaign_of_servers_notices_a_key_and_a_wrong_turn(
    training: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import servers

    from titan_tree import errors
    from titan_tree.rl.server import client, vllm

    monkeypatch.setattr(client, "PAUSE_S", 0.01)
    monkeypatch.setattr(errors, "_secrets", {})

    def trials(kind: str, number: int) -> None:
        for seed in range(number):
            servers.trial(kind, random.Random(seed), tmp_path, tmp_path)

    for kind in ("bytes", "key repeated"):
        trials(kind, 5)
    with monkeypatch.context() as patch:
        patch.setattr(errors, "hide", lambda text: text)
        patch.setattr(client, "hide", lambda text: text)
        with pytest.raises(training.LostError, match="shows the key"):
            trials("key repeated", 10)
    monkeypatch.setattr(vllm, "_check_all", lambda *arguments: None)
    monkeypatch.setattr(client, "parse_json", lambda content, place: json.loads(content))
    with pytest.raises((training.LostError, TypeError, ValueError)):
        trials("value", 20)
