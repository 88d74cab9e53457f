"""titan-tree inspect: its numbers, its names and its errors."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from titan_tree import cli

SHARED = Path(__file__).parents[2] / "shared" / "data"


@pytest.fixture
def file(tmp_path):
    """Group a: 3 paths, 12 tokens, 8 distinct. Group b: one path of 3."""
    rows = [("a", [1, 2, 3, 4]), ("a", [1, 2, 3, 5]), ("a", [1, 6, 7, 7]), ("b", [1, 2, 3])]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"group_id": g, "tokens": t}) + "\n" for g, t in rows))
    return str(path)


def inspect(capsys, *args):
    status = cli.main(["inspect", *map(str, args)])
    out, err = capsys.readouterr()
    return status, out, err


def rows(out):
    """Cells of the table, by tree name: nine of them, without spaces."""
    table = [line.rsplit(maxsplit=9) for line in out.splitlines()]
    return {name.strip(): cells for name, *cells in filter(None, table) if cells and cells[0][0].isdigit()}


def test_table(capsys, file):
    status, out, err = inspect(capsys, file)
    assert (status, err) == (0, "")
    # paths, N_flat, N_tree, POR, bound, nodes, depth, fan-out, longest
    assert rows(out) == {
        "a": ["3", "12", "8", "0.333", "1.50x", "5", "3", "2.00", "4"],
        "b": ["1", "3", "3", "0.000", "1.00x", "1", "1", "0.00", "3"],
        "all 2": ["4", "15", "11", "0.267", "1.36x", "6", "3", "2.00", "4"],
    }
    assert "largest tree: a with 8 tokens; above data.max_tokens it is cut" in out


def test_limit_leaves_the_totals_alone(capsys, file):
    _, out, _ = inspect(capsys, file, "--limit", 1)
    table = rows(out)
    assert "b" not in table
    assert "... 1 more" in out
    assert table["all 2"][1] == "15"


def test_merge_all_and_batch(capsys, file):
    _, out, _ = inspect(capsys, file, "--merge", "all")
    assert rows(out)["all"][:3] == ["4", "15", "8"]  # b's path lies inside a's
    _, out, _ = inspect(capsys, file, "--merge", "batch", "--global-batch-groups", 1)
    assert rows(out)["all 2"][:3] == ["4", "15", "11"]
    _, out, _ = inspect(capsys, file, "--merge", "batch", "--max-tokens", 5)
    assert {name: cells[2] for name, cells in rows(out).items() if name.startswith("batch")} == {
        "batch 0 tree 0": "5",
        "batch 0 tree 1": "4",
    }


def test_sample_options_change_the_paths(capsys):
    counts = {}
    for name, options in {
        "each": [],
        "whole": ["--turns", "whole"],
        "stripped": ["--strip-reasoning"],
    }.items():
        status, out, _ = inspect(capsys, "demo", "--limit", 1, *options)
        assert status == 0
        assert "tokens are bytes here" in out
        counts[name] = [int(n.replace(",", "")) for n in rows(out)["all 64"][:3]]
    assert counts["whole"][0] == 64 * 4
    assert counts["each"][0] == counts["stripped"][0] == 64 * (2 * 4 + 2 * 5)
    assert counts["each"][2] == counts["whole"][2]  # earlier turns lie inside the last one's path
    assert counts["stripped"][1] < counts["each"][1]


def test_report(capsys, file):
    status, out, _ = inspect(capsys, file, "--report", "a")
    assert status == 0
    assert "3 paths, 2 branch points" in out
    assert '1 token deep, 3 paths  "1"' in out
    assert "N_tree" not in out
    _, out, _ = inspect(capsys, "demo", "--report", "shop-3", "--picture")
    assert out.count("└──") > 3
    assert "path ends here" in out


def test_errors_are_one_line_and_status_2(capsys, file, tmp_path):
    for args, message in (
        ([tmp_path / "none.jsonl"], "no such file"),
        ([file, "--report", "c"], "--report c: no tree has this name"),
        ([file, "--tokenizer", tmp_path], "tokenizer.json"),
        (["demo", "--template", "qwen3", "--strip-reasoning"], "keep_reasoning"),
    ):
        status, out, err = inspect(capsys, *args)
        assert (status, out) == (2, "")
        assert err.startswith("titan-tree: error: ")
        assert message in err
        assert err.count("\n") == 1


def test_runs_as_a_module(file):
    run = subprocess.run(
        [sys.executable, "-m", "titan_tree.cli", "inspect", file, "--limit", "0"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert "--limit: expected at least 1, got 0" in run.stderr


@pytest.mark.skipif(not SHARED.is_dir(), reason="needs the shared samples")
def test_real_rollouts(capsys):
    """Figures counted by another program, with Qwen's tokens, thoughts of earlier turns dropped."""
    _, out, _ = inspect(
        capsys,
        SHARED / "webdancer_think.jsonl.gz",
        "--tokenizer",
        SHARED / "qwen.tiktoken.gz",
        "--strip-reasoning",
    )
    assert rows(out)["all 100"] == [
        "210",
        "317,892",
        "233,271",
        "0.266",
        "1.36x",
        "320",
        "4",
        "2.00",
        "2,800",
    ]
