"""Runs scripts/benchmark/ on the smallest sizes, so that its scripts keep up with the package."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
# Arguments with which each benchmark runs on a CPU, and the column that names its rows.
BENCHMARKS = {
    "attention": ("--tree chain bushy --tokens 64 --rounds 1 --heads 2 1 --head-dim 16", "attention"),
    "gdn": ("--tree chain bushy --tokens 64 --rounds 1 --heads 1 2 --head-dim 16", "what"),
    "step": ("--flavor debug --tokens 64 --rounds 1 --warmup 0 --steps 1 --peer --no-compile", "step of"),
    "partitions": (
        "--flavor debug --tokens 256 --longest 64 --fits 128 --max-tokens 32 --wider 80 --steps 1 "
        "--no-compile",
        "run",
    ),
}


def run(script: str, *arguments: object) -> subprocess.CompletedProcess:
    """Runs a script as its documentation says: from the root, with the package on PYTHONPATH."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "Agg"}
    command = [sys.executable, f"scripts/benchmark/{script}.py", *map(str, arguments)]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_benchmark_runs_on_a_cpu_and_writes_its_rows(name, tmp_path):
    arguments, column = BENCHMARKS[name]
    path = tmp_path / "rows.csv"
    result = run(name, *arguments.split(), "--csv", path)
    assert result.returncode == 0, result.stderr
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) >= 2
    for row in rows:
        assert row["device"] == "cpu"
        assert row["commit"]
        assert row[column] in result.stdout


def test_rows_with_new_columns_are_appended_to_a_file(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "benchmark"))
    from common import append_csv

    path = tmp_path / "rows.csv"
    append_csv(path, [{"what": "a", "ms": 1}])
    append_csv(path, [{"what": "b", "ms": 2, "note": "new"}])
    assert path.read_text().splitlines() == ["what,ms,note", "a,1,", "b,2,new"]


@pytest.mark.slow
def test_all_pictures_are_drawn_from_the_committed_rows(tmp_path):
    pytest.importorskip("matplotlib")
    result = run("plots", "--folder", tmp_path)
    assert result.returncode == 0, result.stderr
    assert {path.name for path in tmp_path.iterdir()} == {
        p.name for p in (ROOT / "docs" / "img").glob("*.png")
    }
