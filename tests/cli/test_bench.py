"""Tests `titan-tree bench real`, and the rows, files and guard of all benchmarks."""

import runpy
import subprocess
from pathlib import Path

import pytest
import torch

from titan_tree.cli import main
from titan_tree.cli.bench import record
from titan_tree.cli.bench.real import compared, read_metrics, total
from titan_tree.errors import UserError

ROOT = Path(__file__).parents[2]
COMMON = {"step": 1.0, "loss": 2.0}
TREE = COMMON | {"step_s": 1.0, "executed_tokens": 10.0, "mfu": 0.4, "peak_memory_gib": 3.0}
ROWS = COMMON | {"step_s": 5.0, "executed_tokens": 80.0, "mfu": 0.5, "peak_memory_gib": 4.0, "loss": 2.5}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would use the GPU")
def test_a_quick_run_compares_both_layouts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    csv, folder = tmp_path / "rows.csv", ["--folder", str(tmp_path)]
    assert main(["bench", "real", "--quick", *folder, "--csv", str(csv)]) == 0
    rows = record.read_csv(csv)
    assert [row["step"] for row in rows] == ["1", "2", "3", "all"]
    assert {(row["bench"], row["device"], row["case"]) for row in rows} == {("real", "cpu", "demo")}
    assert all(float(str(row["loss difference"])) < 1e-3 for row in rows)
    assert float(str(rows[-1]["tokens x"])) > 1
    assert all(0 < float(str(row["tree optimizer share"])) < 1 for row in rows)
    assert f"rows: {csv}" in capsys.readouterr().out
    assert csv.with_suffix(".png").stat().st_size > 5000


@pytest.mark.slow
def test_the_picture_of_loss_curves_is_drawn_from_committed_rows(tmp_path):
    pytest.importorskip("matplotlib")
    drawn = tmp_path / "curves.png"
    rows = ROOT / "docs" / "data" / "curves.csv"
    assert main(["bench", "real", "--rows", str(rows), "--picture", str(drawn)]) == 0
    assert drawn.stat().st_size > 5000


@pytest.mark.parametrize("name", ["ratio", "input", "reel"])
def test_other_benchmarks_are_named_in_a_clone(name, capsys):
    assert main(["bench", name, "--quick"]) == 2
    assert capsys.readouterr() == (
        "",
        f"titan-tree: error: unknown benchmark {name!r}: the package has only real; for others, run "
        f"python -m benchmarks {name} in a clone of the repository\n",
    )


def test_the_speed_up_is_compared_with_tokens_and_operations() -> None:
    row = total([TREE, TREE], [ROWS, ROWS])
    assert (row["speed-up"], row["tokens x"], row["operations x"]) == (5.0, 8.0, 6.25)
    assert row["of operations"] == 0.8
    assert (row["tree MFU"], row["rows MFU"]) == (0.4, 0.5)
    assert (row["tree GiB"], row["rows GiB"]) == (3.0, 4.0)
    assert row["loss difference"] == "2.0e-01"


def test_each_step_has_a_row_with_both_losses() -> None:
    first, second = compared([TREE, TREE | {"step": 2.0, "step_s": 2.0}], [ROWS, ROWS | {"step": 2.0}])
    assert (first["step"], first["tree loss"], first["rows loss"]) == (1, 2.0, 2.5)
    assert (first["speed-up"], second["speed-up"]) == (5.0, 2.5)


def test_metrics_may_lack_values_but_no_step(tmp_path: Path) -> None:
    path = tmp_path / "metrics.csv"
    path.write_text("step,loss,validation_loss,bad_steps\n1,2.5,,\n2,2.0,3.0,\n")
    assert read_metrics(path) == [{"step": 1, "loss": 2.5}, {"step": 2, "loss": 2, "validation_loss": 3}]
    path.write_text(path.read_text() + "3,,,1\n")
    with pytest.raises(UserError, match=r"expected the loss of every step, but step 3 was skipped; see the"):
        read_metrics(path)


def test_the_guard_names_ratios_that_fell_by_more_than_3_percent():
    before = [
        {"device": "H200", "case": "a", "x peer": "1.0"},
        {"device": "H200", "case": "a", "x peer": "2.0"},  # the newest row counts
        {"device": "H100", "case": "b", "x peer": "9.0"},
        {"device": "H200", "case": "c", "x peer": "1.0"},
    ]

    def slower(case: str, ratio: float) -> tuple[int, list[str]]:
        row: record.Row = {"device": "H200", "case": case, "x peer": ratio}
        return record.slower([row], before, ["case"], ["x peer"])

    assert slower("a", 1.95) == (1, [])
    assert slower("a", 1.93) == (1, ["H200, a: x peer fell from 2.0 to 1.93, by 3.5%"])
    assert slower("c", 1.5) == (1, [])
    with pytest.raises(UserError, match=r"a row with the same device, case and .* ratios \(x peer\)"):
        slower("b", 1.0)  # other GPUs have other ratios


def test_rows_with_new_columns_are_appended_to_a_file(tmp_path):
    path = tmp_path / "folder" / "rows.csv"
    record.append_csv(path, [{"bench": "x", "what": "a", "ms": 1}])
    record.append_csv(path, [{"bench": "x", "what": "b", "ms": 2, "note": "new"}])
    assert path.read_text().splitlines() == ["bench,what,ms,note", "x,a,1,", "x,b,2,new"]


def test_a_file_of_someone_else_gets_no_rows(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match="expected a CSV file of a benchmark, which has a column bench"):
        record.append_csv(path, [{"bench": "x", "ms": 1}])
    assert path.read_text() == "a,b\n1,2\n"


def test_a_missing_package_is_named():
    with pytest.raises(UserError, match="no_such_package: expected this package, with which the benchmark"):
        record.environment(torch.device("cpu"), "no_such_package")


def test_a_commit_is_unknown_if_git_does_not_know_the_files(tmp_path):
    copied = tmp_path / "record.py"
    copied.write_text(Path(record.__file__).read_text())

    def git(*arguments: str) -> str:
        identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
        command = ["git", *identity, *arguments]
        return subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, check=True
        ).stdout.strip()

    commit = runpy.run_path(str(copied))["commit"]
    assert commit() == "unknown"  # no git
    git("init")
    git("add", "record.py")
    git("commit", "-m", "Add")
    assert commit() == git("rev-parse", "--short", "HEAD")
    copied.write_text("")
    assert commit() == git("rev-parse", "--short", "HEAD") + "-dirty"
    (tmp_path / ".git" / "index").unlink()
    assert commit() == "unknown"
