"""Runs scripts/benchmark/ on the smallest sizes, so that its scripts keep up with the package."""

import csv
import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "scripts" / "benchmark"
# Arguments with which each benchmark runs on a CPU, and the column that names its rows.
BENCHMARKS = {
    "partitions": (
        "--flavor debug --tokens 256 --longest 64 --fits 128 --max-tokens 32 --wider 80 --steps 1 "
        "--no-compile",
        "run",
    ),
}

EXHAUSTIVE = {"partitions"}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Returns a function that runs a script from the root, as its documentation says."""

    def run(script: str, *arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(SCRIPTS / f"{script}.py"), run_name="__main__")

    monkeypatch.chdir(ROOT)
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("MPLBACKEND", "Agg")
    return run


@pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks would use the GPU")
@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=getattr(pytest.mark, mark))
        for name in BENCHMARKS
        for mark in ["exhaustive" if name in EXHAUSTIVE else "slow"]
    ],
)
def test_benchmark_runs_on_a_cpu_and_writes_its_rows(name, run, tmp_path, capsys):
    arguments, column = BENCHMARKS[name]
    path = tmp_path / "rows.csv"
    run(name, *arguments.split(), "--csv", path)
    printed = capsys.readouterr().out
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert rows
    for row in rows:
        assert row["device"] == "cpu"
        assert row["commit"]
        assert row[column] in printed
