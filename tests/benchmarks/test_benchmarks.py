"""Tests `python -m benchmarks`: every benchmark with --quick, its files, and the guard against slowness."""

import json
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from benchmarks import BENCHES, ELSEWHERE, images, por
from benchmarks.__main__ import main
from benchmarks.por import binary_nodes
from benchmarks.trees import random_paths
from titan_tree.cli.bench import record
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
    "ranks --way experts --model qwen3_moe --routing balanced",
)
PICTURES = {  # of docs/img: the benchmark and its rows in docs/data
    "attention": ("attention", "attention_sweep"),
    "gdn": ("recurrence", "gdn"),
    "step": ("step", "step"),
    "partitions": ("memory", "partitions"),
    "por": ("por", "por"),
    "ratio": ("ratio", "ratio"),
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
    bench = import_module(f"benchmarks.{name}")
    csv = tmp_path / "rows.csv"
    assert main([name, "--quick", *arguments, "--csv", str(csv)]) == 0
    rows = record.read_csv(csv)
    assert rows
    assert {(row["bench"], row["device"]) for row in rows} == {(name, "cpu")}
    assert all(row["commit"] for row in rows)
    keys = [tuple(row[key] for key in bench.KEYS) for row in rows]
    assert len(set(keys)) == len(keys)  # KEYS name a row
    assert all(ratio in rows[-1] for ratio in bench.RATIOS)
    if name in ("por", "ratio"):
        assert all(0 < float(row["tree optimizer share"]) < 1 for row in rows)
    if name == "trl":
        first = float(rows[0]["grad norm"])  # TRL's own
        assert [float(row["grad norm"]) for row in rows] == pytest.approx([first] * len(rows), rel=1e-3)
        assert {row["lora"] for row in rows} == {arguments[-1] if arguments else "0"}
    if name == "images":
        counted = [(row["layout"], row["images"], row["encodings"], row["tokens"]) for row in rows]
        rows_tokens, tree_tokens = 16 * (1 + 64 + 100 + 8), 1 + 64 + 100 + 16 * 8
        each = [("rows", "16", "16", str(rows_tokens)), ("tree", "16", "1", str(tree_tokens))]
        assert counted == 2 * each  # with a frozen tower, and with a trained one
        assert all(float(row["difference"]) < 1e-6 for row in rows)
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
    assert main([name, *arguments]) == 0
    assert drawn.stat().st_size > 5000
    assert (ROOT / "docs" / "img" / drawn.name).exists()


def test_screenshots_are_read_as_tasks_with_equal_texts_in_equal_tokens(tmp_path):
    pillow = pytest.importorskip("PIL.Image")
    for number in (1, 2):
        pillow.new("RGB", (256, 256), (number, 0, 0)).save(tmp_path / f"{number}.png")
    image = {"role": "user", "content": [{"image_url": {"url": "1.png"}}]}
    older = {"role": "user", "content": [{"text": "left out"}]}
    answer = {"role": "assistant", "content": "12345678"}
    newer = {"role": "user", "content": [{"image_url": {"url": "2.png"}}]}
    records = [
        {"group_id": "a", "turns": "last", "messages": [image, answer]},
        {"group_id": "a", "turns": "last", "messages": [older, answer, newer, answer]},
    ]
    (tmp_path / "rollouts_last1.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (case,) = images.recorded(tmp_path, 2, "unused")
    ((first, second),) = case.groups
    assert case.name == "last 1"
    assert [[len(image) for _, image in path.images] for path in (first, second)] == [[256], [256]]
    user, assistant = len("<|im_start|>user") // 4, -(-len("<|im_start|>assistant") // 4)
    assert len(first.tokens) == 1500 + user + 256 + assistant + 2
    assert len(second.tokens) == 1500 + 2 * user + 2 + 256 + 2 * (assistant + 2)
    assert first.loss_mask.nonzero()[0].tolist() == [len(first.tokens) - 2, len(first.tokens) - 1]
    assert second.loss_mask.nonzero()[0].tolist() == [len(second.tokens) - 2, len(second.tokens) - 1]
    tree = TokenTree.from_paths([first, second])
    assert tree.stats.n_tree == len(first.tokens) + len(second.tokens) - 1500 - user
    rows = [TokenTree.from_paths(paths) for paths in images.rows(case)]
    keys = {image.key for row in rows for image in row.images}
    assert len(keys) == 2
    assert not keys & {image.key for image in tree.images}
    with pytest.raises(UserError, match=r"^--data .*: expected one of rollouts_last1.jsonl, "):
        list(images.recorded(tmp_path / "none", 2, "unused"))


def test_a_failure_keeps_the_rows_before_it(tmp_path, monkeypatch):
    csv = tmp_path / "rows.csv"

    def run(args: Namespace) -> Iterator[record.Row]:
        yield {"case": "first"}
        assert record.read_csv(csv)[0]["case"] == "first"
        raise UserError("the GPU is out of memory")

    monkeypatch.setattr(por, "run", run)
    assert main(["por", "--quick", "--csv", str(csv)]) == 2
    assert [row["case"] for row in record.read_csv(csv)] == ["first"]


def test_against_fails_if_a_ratio_fell(tmp_path, capsys):
    columns, start = (
        "bench,model,case,trees,N_leaf,N_tree,POR,device",
        "por,qwen3 0.6B,POR 0.5,8,64,32,0.5,H200",
    )
    new, old = tmp_path / "new.csv", tmp_path / "old.csv"
    columns += ",speed-up,operations x,of operations\n"
    new.write_text(f"{columns}{start},1.8,2.0,0.9\n")
    old.write_text(f"{columns}{start},1.9,2.0,0.95\n")
    arguments = ["por", "--rows", str(new), "--picture", str(tmp_path / "a.png"), "--against"]
    assert main([*arguments, str(new)]) == 0
    assert f"ratios compared with {new}: 1; none fell by more than 3%\n" in capsys.readouterr().out
    assert main([*arguments, str(old)]) == 1
    assert "of operations fell from 0.95 to 0.9, by 5.3%" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("bench", "rows", "message"),
    [
        ("por", None, "expected a CSV file of python -m benchmarks por, found none"),
        ("por", "bench,ms\n", "column bench says so, found rows of none; choose a file of this benchmark"),
        ("por", "bench,device\nratio,cpu\n,cpu\n", "found rows of ratio, unknown; choose"),
        (
            "por",
            "bench,device,model,case\npor,cpu,,\n",
            "but the file lacks trees, N_leaf, N_tree; measure again",
        ),
        (
            "quality",
            "bench,device,reward\nquality,cpu,1\n",
            "--against: python -m benchmarks quality has no ratios to compare; remove the argument",
        ),
        (
            "memory",
            "bench,device,model,flavor,layers,activation_checkpoint,run,distinct,TFLOP/s x\n"
            "memory,A100,,,,,,,1.0\nmemory,cpu,,,,,,,\n",
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
    assert main([bench, "--quick", "--against", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert message in err


def test_wrong_arguments_are_one_line(capsys):
    assert main(["por", "--rows", str(ROOT / "docs" / "data" / "ratio.csv")]) == 2
    assert "ratio.csv: expected rows of python -m benchmarks por, whose column" in capsys.readouterr().err
    assert main(["pro"]) == 2
    assert "unknown benchmark 'pro'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_benchmark_that_left_names_what_to_do(name, capsys):
    assert main([name, "--quick"]) == 2
    _, err = capsys.readouterr()
    assert err == f"python -m benchmarks: error: benchmark {name!r} is not here anymore: {ELSEWHERE[name]}\n"
    assert ELSEWHERE[name].startswith("run ") or (ROOT / ELSEWHERE[name].split()[0]).exists()


@pytest.mark.parametrize("por", [0.2, 0.5, 0.6, 0.62, 0.8, 0.92])
def test_binary_trees_have_the_overlap_and_the_paths_that_the_paper_asks_for(por):
    nodes = binary_nodes(2048, por)
    assert len(nodes) == 31
    tree = TokenTree.from_paths(random_paths(nodes, 1000))
    assert [int(b - a) for a, b in pairwise(tree.path_offsets)] == [2048] * 16
    assert tree.stats.por == pytest.approx(por, abs=2e-3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ["--rows={}"],
            "{}: expected a CSV file of a benchmark, but 'utf-8' codec can't decode byte",
        ),
        (["--quick", "--csv", "{}"], "{}: expected a CSV file of a benchmark, but 'utf-8' codec"),
        (
            ["--quick", "--picture", "{}"],
            "--picture {}: expected a file whose name ends in .png, .pdf, .svg",
        ),
    ],
)
def test_files_are_refused_before_anything_is_measured(arguments, message, tmp_path, capsys):
    file = tmp_path / "bytes"
    file.write_bytes(b"\x80")
    assert main(["por", *(argument.format(file) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith(f"python -m benchmarks: error: {message.format(file)}")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("ratio --quick --rounds 0", "--rounds: expected a number > 0, got 0"),
        ("por --quick --por 0", "--por: expected a number > 0, got 0.0"),
        ("ratio --quick --scale nan", "--scale: expected a number > 0, got nan"),
        ("partition --quick --max-tokens 64 -1", "--max-tokens: expected a number > 0, got -1"),
        ("rl --quick --seed -1", "--seed: expected a number of at least 0, got -1"),
    ],
)
def test_numbers_are_checked_before_anything_is_measured(arguments, message, capsys):
    assert main(arguments.split()) == 2
    assert capsys.readouterr() == ("", f"python -m benchmarks: error: {message}\n")


def test_an_overlap_that_16_leaves_cannot_have_is_refused(capsys):
    assert main(["por", "--quick", "--por", "0.5", "0.95"]) == 2
    message = "--por: expected less than 0.9375, as trees have 16 leaves, got 0.95"
    assert capsys.readouterr().err == f"python -m benchmarks: error: {message}\n"
