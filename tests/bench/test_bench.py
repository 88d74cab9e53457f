"""Tests `titan-tree bench`: every benchmark with --quick, its files, and the guard against slowness."""

import runpy
import subprocess
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from titan_tree.bench import BENCHES, por, record
from titan_tree.bench.por import binary_nodes
from titan_tree.bench.trees import random_paths
from titan_tree.cli import main
from titan_tree.errors import UserError
from titan_tree.tree.token_tree import TokenTree

ROOT = Path(__file__).parents[2]
OTHER_RULES = ("recurrence --rule kda", "recurrence --rule ssd")
EXHAUSTIVE = {"memory", "rl", "trl", *OTHER_RULES}  # tests/rl runs rl, too
MEASUREMENTS = (
    *BENCHES,
    *OTHER_RULES,
    "trl --lora 4",
    "attention --tree bushy --cases gpt-oss DeepSeek-V3",
)
NOT_QUICK = {("real", "of operations"), ("input", "workers 1")}  # they need a GPU, or a second core
PICTURES = {  # of docs/img: the benchmark and its rows in docs/data
    "attention": ("attention", "attention_sweep"),
    "gdn": ("recurrence", "gdn"),
    "step": ("step", "step"),
    "partitions": ("memory", "partitions"),
    "por": ("por", "por"),
    "ratio": ("ratio", "ratio"),
    "curves": ("real", "curves"),
    "quality": ("quality", "quality"),
    "rl": ("rl", "rl"),
    "rl_search": ("rl", "rl_search"),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="benchmarks would use the GPU")
@pytest.mark.parametrize(
    "measurement",
    [
        pytest.param(
            name, marks=pytest.mark.exhaustive if EXHAUSTIVE & {name, name.split()[0]} else pytest.mark.slow
        )
        for name in MEASUREMENTS
    ],
)
def test_a_quick_benchmark_writes_its_rows_and_picture(measurement, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    name, *arguments = measurement.split()
    bench = import_module(f"titan_tree.bench.{name}")
    csv = tmp_path / "rows.csv"
    assert main(["bench", name, "--quick", *arguments, "--csv", str(csv)]) == 0
    rows = record.read_csv(csv)
    assert rows
    assert {(row["bench"], row["device"]) for row in rows} == {(name, "cpu")}
    assert all(row["commit"] for row in rows)
    keys = [tuple(row[key] for key in bench.KEYS) for row in rows]
    assert len(set(keys)) == len(keys)  # KEYS name a row
    assert all((ratio in rows[-1]) != ((name, ratio) in NOT_QUICK) for ratio in bench.RATIOS)
    if name in ("por", "ratio", "real"):
        assert all(0 < float(row["tree optimizer share"]) < 1 for row in rows)
    if name == "trl":
        first = float(rows[0]["grad norm"])  # TRL's own
        assert [float(row["grad norm"]) for row in rows] == pytest.approx([first] * len(rows), rel=1e-3)
        assert {row["lora"] for row in rows} == {arguments[-1] if arguments else "0"}
    out = capsys.readouterr().out
    assert str(csv) in out
    assert "--quick shows that the benchmark runs; its sizes are too small for speeds to mean" in out
    if hasattr(bench, "draw") and pytest.importorskip("matplotlib"):
        assert csv.with_suffix(".png").stat().st_size > 5000


@pytest.mark.slow
@pytest.mark.parametrize("picture", PICTURES)
def test_the_pictures_of_the_docs_are_drawn_from_committed_rows(picture, tmp_path):
    pytest.importorskip("matplotlib")
    name, rows = PICTURES[picture]
    drawn = tmp_path / f"{picture}.png"
    arguments = ["--rows", str(ROOT / "docs" / "data" / f"{rows}.csv"), "--picture", str(drawn)]
    assert main(["bench", name, *arguments]) == 0
    assert drawn.stat().st_size > 5000
    assert (ROOT / "docs" / "img" / drawn.name).exists()


def test_a_failure_keeps_the_rows_before_it(tmp_path, monkeypatch):
    csv = tmp_path / "rows.csv"

    def run(args: Namespace) -> Iterator[record.Row]:
        yield {"case": "first"}
        assert record.read_csv(csv)[0]["case"] == "first"
        raise UserError("the GPU is out of memory")

    monkeypatch.setattr(por, "run", run)
    assert main(["bench", "por", "--quick", "--csv", str(csv)]) == 2
    assert [row["case"] for row in record.read_csv(csv)] == ["first"]


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


def test_against_fails_if_a_ratio_fell(tmp_path, capsys):
    columns, start = (
        "bench,model,case,trees,N_leaf,N_tree,POR,device",
        "por,qwen3 0.6B,POR 0.5,8,64,32,0.5,H200",
    )
    new, old = tmp_path / "new.csv", tmp_path / "old.csv"
    columns += ",speed-up,operations x,of operations\n"
    new.write_text(f"{columns}{start},1.8,2.0,0.9\n")
    old.write_text(f"{columns}{start},1.9,2.0,0.95\n")
    arguments = ["bench", "por", "--rows", str(new), "--picture", str(tmp_path / "a.png"), "--against"]
    assert main([*arguments, str(new)]) == 0
    assert f"ratios compared with {new}: 1; none fell by more than 3%\n" in capsys.readouterr().out
    assert main([*arguments, str(old)]) == 1
    assert "of operations fell from 0.95 to 0.9, by 5.3%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bench", "rows", "message"),
    [
        ("por", None, "expected a CSV file of titan-tree bench por, found none"),
        ("por", "bench,ms\n", "column bench says so, found rows of none; choose a file of this benchmark"),
        ("por", "bench,device\nratio,cpu\n,cpu\n", "found rows of ratio, unknown; choose"),
        (
            "por",
            "bench,device,model,case\npor,cpu,,\n",
            "but the file lacks trees, N_leaf, N_tree; measure again",
        ),
        (
            "checkpoint",
            "bench,device,GB\ncheckpoint,cpu,1\n",
            "--against: titan-tree bench checkpoint has no ratios to compare; remove the argument",
        ),
        (
            "memory",
            "bench,device,model,flavor,activation_checkpoint,run,distinct,TFLOP/s x\n"
            "memory,A100,,,,,,1.0\nmemory,cpu,,,,,,\n",
            "rows of cpu with a value in the columns of ratios (TFLOP/s x), found rows of A100, cpu; measure",
        ),
    ],
)
def test_rows_that_cannot_be_compared_are_refused_before_a_measurement(
    bench, rows, message, tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr(record, "default_device", lambda: torch.device("cpu"))
    path = tmp_path / "rows.csv"
    if rows is not None:
        path.write_text(rows)
    assert main(["bench", bench, "--quick", "--against", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_wrong_arguments_are_one_line(capsys):
    assert main(["bench", "por", "--rows", str(ROOT / "docs" / "data" / "ratio.csv")]) == 2
    assert "ratio.csv: expected rows of titan-tree bench por, whose column" in capsys.readouterr().err
    assert main(["bench", "pro"]) == 2
    assert "unknown benchmark 'pro'" in capsys.readouterr().err
    assert main(["bench", "live", "no.toml"]) == 2  # --config, which other commands have, is not named
    assert capsys.readouterr().err.startswith("titan-tree: error: unknown configuration file 'no.toml' (")


@pytest.mark.parametrize("por", [0.2, 0.5, 0.6, 0.62, 0.8, 0.92])
def test_binary_trees_have_the_overlap_and_the_paths_that_the_paper_asks_for(por):
    nodes = binary_nodes(2048, por)
    assert len(nodes) == 31
    tree = TokenTree.from_paths(random_paths(nodes, 1000))
    assert [int(b - a) for a, b in pairwise(tree.path_offsets)] == [2048] * 16
    assert tree.stats.por == pytest.approx(por, abs=2e-3)


def test_rows_with_new_columns_are_appended_to_a_file(tmp_path):
    path = tmp_path / "folder" / "rows.csv"
    record.append_csv(path, [{"what": "a", "ms": 1}])
    record.append_csv(path, [{"what": "b", "ms": 2, "note": "new"}])
    assert path.read_text().splitlines() == ["what,ms,note", "a,1,", "b,2,new"]


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


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--rows={}"],
            "{}: expected a CSV file of titan-tree bench, but 'utf-8' codec can't decode byte",
        ),
        (["--quick", "--csv", "{}"], "{}: expected a CSV file of titan-tree bench, but 'utf-8' codec"),
        (
            ["--quick", "--picture", "{}"],
            "--picture {}: expected a file whose name ends in .png, .pdf, .svg",
        ),
    ],
)
def test_files_are_refused_before_anything_is_measured(arguments, message, tmp_path, capsys):
    file = tmp_path / "bytes"
    file.write_bytes(b"\x80")
    assert main(["bench", "por", *(argument.format(file) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"titan-tree: error: {message.format(file)}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("ratio --quick --rounds 0", "--rounds: expected a number > 0, got 0"),
        ("por --quick --por 0", "--por: expected a number > 0, got 0.0"),
        ("ratio --quick --scale nan", "--scale: expected a number > 0, got nan"),
        ("partition --quick --max-tokens 64 -1", "--max-tokens: expected a number > 0, got -1"),
        ("input --quick --workers -1", "--workers: expected a number of at least 0, got -1"),
    ],
)
def test_numbers_are_checked_before_anything_is_measured(arguments, message, capsys):
    assert main(["bench", *arguments.split()]) == 2
    assert capsys.readouterr() == ("", f"titan-tree: error: {message}\n")


def test_an_overlap_that_16_leaves_cannot_have_is_refused(capsys):
    assert main(["bench", "por", "--quick", "--por", "0.5", "0.95"]) == 2
    message = "--por: expected less than 0.9375, as trees have 16 leaves, got 0.95"
    assert capsys.readouterr().err == f"titan-tree: error: {message}\n"
