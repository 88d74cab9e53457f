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
    "samples": ("demo --template chatml --rounds 1", "template"),
    "input": ("demo --rounds 1 --workers 0 --seconds 0.1", "source"),
    "live": (
        "train_configs/demo.toml folder=outputs/benchmark data.max_tokens=512 data.global_batch_groups=1 "
        "--warmup 1 --steps 1 --repeat 1",
        "config",
    ),
    "balance": ("demo --trees 4 --ranks 2 --max-tokens 1024 --rounds 2", "trees"),
    "checkpoint": ("--gigabytes 0.001 --rounds 1 --folder outputs/benchmark/checkpoint", "GB"),
    "trl_step": (
        "--model debug --groups 2 --completions 4 --prompt 32 --completion 16 --micro-batch 4 --rounds 1 "
        "--steps 1 --max-tokens 24",
        "trainer",
    ),
    "partitions": (
        "--flavor debug --tokens 256 --longest 64 --fits 128 --max-tokens 32 --wider 80 --steps 1 "
        "--no-compile",
        "run",
    ),
}

EXHAUSTIVE = {"partitions", "trl_step"}


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
