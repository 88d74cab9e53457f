"""titan-tree inspect: its table, its JSON, its reports and its errors."""

import io
import json
import subprocess
import sys

import pytest

from tests.support.datasets import REAL_DATA
from titan_tree import build_model, cli
from titan_tree.models.pretrained import save_pretrained


@pytest.fixture
def file(tmp_path):
    """Returns a file. Group a: 3 paths of 12 tokens, 8 of them distinct. Group b: one path of 3 tokens."""
    rows = [("a", [1, 2, 3, 4]), ("a", [1, 2, 3, 5]), ("a", [1, 6, 7, 7]), ("b", [1, 2, 3])]
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"group_id": g, "tokens": t}) + "\n" for g, t in rows))
    return str(path)


def inspect(capsys, *args):
    status = cli.main(["inspect", *map(str, args)])
    out, err = capsys.readouterr()
    return status, out, err


def rows(out):
    """Returns the eleven cells of each row, by tree name."""
    table = [line.rsplit(maxsplit=11) for line in out.splitlines()]
    return {name.strip(): cells for name, *cells in filter(None, table) if cells and cells[0][0].isdigit()}


def test_table_has_a_row_per_group_and_totals(capsys, file):
    status, out, err = inspect(capsys, file)
    assert (status, err) == (0, "")
    # paths, N_flat, N_leaf, N_tree, POR, POR samples, bound, nodes, depth, fan-out, longest
    assert rows(out) == {
        "a": ["3", "12", "12", "8", "0.333", "0.333", "1.50x", "5", "3", "2.00", "4"],
        "b": ["1", "3", "3", "3", "0.000", "0.000", "1.00x", "1", "1", "0.00", "3"],
        "all 2": ["4", "15", "15", "11", "0.267", "0.267", "1.36x", "6", "3", "2.00", "4"],
    }
    assert "largest tree: a, 8 tokens; partitioned if above data.max_tokens" in out


def test_json_has_every_tree_and_their_sums(capsys, file):
    status, out, err = inspect(capsys, file, "--json", "--limit", 1)
    assert (status, err) == (0, "")
    found = json.loads(out)
    a = {
        "id": "a",
        "n_paths": 3,
        "n_leaves": 3,
        "n_flat": 12,
        "n_leaf": 12,
        "n_tree": 8,
        "n_nodes": 5,
        "por": pytest.approx(1 / 3),
        "por_samples": pytest.approx(1 / 3),
        "bound": 1.5,
        "branching": 2.0,
        "n_branches": 2,
        "n_branch_children": 4,
        "max_depth": 3,
        "longest_path": 4,
        "n_rows": 0,
        "n_disagreeing": 0,
    }
    assert list(found) == ["trees", "all", "answers"]
    assert found["trees"][0] == a
    assert [tree["id"] for tree in found["trees"]] == ["a", "b"]
    del a["id"]
    assert found["all"] == a | {
        "n_paths": 4,
        "n_leaves": 4,
        "n_flat": 15,
        "n_leaf": 15,
        "n_tree": 11,
        "n_nodes": 6,
        "por": pytest.approx(4 / 15),
        "por_samples": pytest.approx(4 / 15),
        "bound": pytest.approx(15 / 11),
    }


def test_the_bound_by_operations_is_that_of_the_rows_of_leaf_paths(capsys, tmp_path):
    """Group b has one path. Group a has three; the second is a prefix of the first."""
    samples = [
        ("a", [1, 2, 3, 4, 5], [0, 0, 0, 1, 1]),
        ("a", [1, 2, 3], [0, 0, 1]),
        ("a", [1, 2, 6], [0, 1, 1]),
        ("b", [1, 2], [0, 1]),
    ]
    file, model = tmp_path / "rows.jsonl", build_model("qwen3", "debug")
    keys = ("group_id", "tokens", "loss_mask")
    file.write_text("".join(json.dumps(dict(zip(keys, row, strict=True))) + "\n" for row in samples))
    costs = model.costs()

    def operations(tokens, visible_pairs, edges):
        work = costs.flops_per_token * tokens + costs.flops_per_visible_pair * visible_pairs
        return work + costs.flops_per_edge * edges

    a = (
        operations(5, 15, 3) + operations(3, 6, 2),
        operations(6, 15 + 3, 5),
    )  # the rows of two leaves; the tree
    b = operations(2, 3, 1)
    save_pretrained(model, tmp_path / "snapshot")
    for name in ("qwen3:debug", tmp_path / "snapshot"):
        found = json.loads(inspect(capsys, file, "--model", name, "--json")[1])
        assert [tree["operation_bound"] for tree in found["trees"]] == pytest.approx(
            [a[0] / a[1], 1], rel=1e-12
        )
        assert found["all"]["operation_bound"] == pytest.approx((a[0] + b) / (a[1] + b), rel=1e-12)
        assert found["trees"][0]["bound"] == 8 / 6
    status, out, _ = inspect(capsys, file, "--model", "qwen3:debug")
    assert (status, out.count(f" 1.33x     {a[0] / a[1]:.2f}x ")) == (0, 1)
    assert "op bound: the same by operations of the model, those of attention included" in out


def test_json_keeps_names_as_they_are(capsys, tmp_path):
    name = "a [b] " + "é" * 200
    (tmp_path / "f").write_text(json.dumps({"id": name, "tokens": [1]}))
    _, out, _ = inspect(capsys, tmp_path / "f", "--json")
    assert json.loads(out)["trees"][0]["id"] == name


def test_limit_shortens_the_table_but_not_the_totals(capsys, file):
    _, out, _ = inspect(capsys, file, "--limit", 1)
    table = rows(out)
    assert "b" not in table
    assert "... 1 more" in out
    assert table["all 2"][1] == "15"


def test_merge_chooses_which_paths_share_a_tree(capsys, file):
    _, out, _ = inspect(capsys, file, "data.merge=batch")
    assert rows(out)["all 1"][:4] == ["4", "15", "12", "8"]  # b's path is a prefix of a path of a
    _, out, _ = inspect(capsys, file, "data.merge=batch", "data.global_batch_groups=1")
    assert rows(out)["all 2"][:4] == ["4", "15", "15", "11"]
    _, out, _ = inspect(capsys, file, "data.merge=batch", "data.max_tokens=5")
    assert {name: cells[3] for name, cells in rows(out).items() if name.startswith("batch")} == {
        "batch 0 tree 0": "5",
        "batch 0 tree 1": "4",
    }


@pytest.mark.slow
def test_sample_settings_change_the_paths(capsys):
    counts = {}
    for name, options in {
        "each": [],
        "whole": ["data.sample.turns=whole"],
        "last": ["data.sample.turns=last"],
        "stripped": ["data.sample.keep_reasoning=false"],
        "qwen3": ["--template", "qwen3"],
    }.items():
        status, out, _ = inspect(capsys, "demo", "--limit", 1, *options)
        assert status == 0
        assert "these tokens are bytes" in out
        counts[name] = [int(n.replace(",", "")) for n in rows(out)["all 64"][:4]]
    assert counts["whole"][0] == 64 * 4
    assert counts["each"][0] == counts["stripped"][0] == 64 * (2 * 4 + 2 * 5)
    # Earlier turns are prefixes of the last.
    assert counts["each"][2:] == counts["whole"][2:] == counts["last"][2:]
    assert (counts["each"][3], counts["qwen3"][3]) == (97_885, 116_529)  # the quickstart has these numbers
    assert counts["stripped"][1] < counts["each"][1]


def test_report_shows_where_one_tree_diverges(capsys, file):
    status, out, _ = inspect(capsys, file, "--report", "a")
    assert status == 0
    assert "3 paths, 2 branch points" in out
    assert '1 token deep, 3 paths  "1"' in out
    assert "N_tree" not in out
    _, out, _ = inspect(capsys, "demo", "--report", "shop-3", "--picture")
    assert out.count("└──") > 3
    assert "path ends here" in out


def test_errors_are_one_line_with_status_2(capsys, file, tmp_path):
    odd = tmp_path / "odd.jsonl"
    odd.write_text('{"id": "a", "tokens": [65, 282]}')
    for args, message in (
        ([tmp_path / "none.jsonl"], "no such file"),
        ([file, "--report", "c"], "--report c: no tree has this name; the first ones are a, b"),
        ([file, "--report", "aa"], "the closest are a\n"),
        (
            [file, "--model", "qwen3"],
            "--model qwen3: no such folder; expected that of a Hugging Face snapshot, or NAME:FLAVOR, such "
            "as qwen3:debug, qwen3:0.6B, qwen3:1.7B, qwen3:4B, qwen3:8B, qwen3:14B, qwen3:32B",
        ),
        ([file, "--model", "qwen3:0.6b"], "unknown flavor of qwen3 '0.6b'; did you mean '0.6B'?"),
        (
            [file, "--model", "qwen3:0.6B", "--show", "a"],
            "--model: expected no --report or --show, which print",
        ),
        ([file, "--picture"], "--picture: expected --report ID as well; add it, or remove --picture"),
        ([file, "--show", "c"], "--show c: no sample or tree has this id; the first ones are a, b"),
        (["demo", "--show", "shop-3/trial9"], "the closest are shop-3/trial"),
        (["demo", "--show", "shp-63"], "the closest are shop-63, "),
        ([file, "--tokenizer", tmp_path], "tokenizer.json"),
        (
            [odd, "--tokenizer", "byte", "--show", "a"],
            f"{odd}:1: path a: token id 282 at token 1: expected ids below",
        ),
        (["demo", "--template", "qwen3", "data.sample.keep_reasoning=false"], "keep_reasoning"),
    ):
        status, out, err = inspect(capsys, *args)
        assert (status, out) == (2, "")
        assert err.startswith("titan-tree: error: ")
        assert message in err
        assert err.count("\n") == 1
    message = "argument --report: expected one argument; titan-tree inspect --help lists the arguments"
    assert inspect(capsys, "demo", "--report") == (2, "", f"titan-tree: error: {message}\n")


def test_sample_values_follow_yaml(capsys):
    """Text, such as "n", is true for chatml."""
    totals = []
    for value in ("false", "no", "n", "true"):
        keys = "data.sample.turns=last", f"data.sample.keep_reasoning={value}"
        _, out, _ = inspect(capsys, "demo", "--json", *keys)
        totals.append(json.loads(out)["all"]["n_flat"])
    assert totals[0] == totals[1] < totals[2] == totals[3]


def test_it_runs_as_a_module(file):
    run = subprocess.run(
        [sys.executable, "-m", "titan_tree", "inspect", file, "--limit", "0"],
        capture_output=True,
        text=True,
    )
    assert run.returncode == 2
    assert "--limit: expected an integer from 1 to 1,000,000,000, got '0'" in run.stderr


def test_show_prints_a_sample_with_its_trained_tokens(capsys, file):
    status, out, err = inspect(capsys, file, "--show", "a/2")
    assert (status, err) == (0, "")
    assert out == "a/2: 4 tokens, 3 trained, weight 1\n⟦trained tokens⟧\n\n 1 ⟦ 2 3 5 ⟧\n"
    _, out, _ = inspect(capsys, "demo", "--show", "shop-63/trial2/4")
    assert out.startswith("shop-63/trial2/4: 850 tokens, 19 trained, weight 1\n")
    assert (
        '{"type": "object", "properties": {"item": {"type": "string"}}, "required": ["item"]}}}\n</tools>'
        in out
    )
    assert "\n<|im_start|>assistant\n⟦<think>\n" in out
    assert out.endswith(
        "<|im_end|>⟧\n\nthese tokens are bytes; use --tokenizer FOLDER to see those of your model\n"
    )


def test_show_accepts_trees_and_trajectories(capsys):
    """It shows their first sample and lists the others."""
    for name, number, others in (
        ("shop-3", 18, [f"shop-3/trial{t}/{turn}" for t in range(4) for turn in range(1, 5 + t % 2)][1:]),
        ("shop-3/trial1", 5, [f"shop-3/trial1/{turn}" for turn in range(2, 6)]),
    ):
        _, out, _ = inspect(capsys, "demo", "--show", name)
        assert out.startswith(f"shop-3/trial{int(number == 5)}/1: ")
        note = out.partition("this is the first of ")[2].partition("these tokens")[0]
        assert " ".join(note.split()) == f"{number} samples; the others are {', '.join(others)}"
    _, out, _ = inspect(capsys, "demo", "--show", "shop-3", "--limit", 2)
    assert "the others are shop-3/trial0/2, shop-3/trial0/3, and 15 more\n" in out


def test_show_prints_all_samples_of_one_id(capsys, tmp_path):
    (tmp_path / "f").write_text('{"id": "a", "tokens": [1, 2]}\n{"id": "a", "tokens": [1, 3]}\n')
    _, out, _ = inspect(capsys, tmp_path / "f", "--show", "a")
    assert [line for line in out.splitlines() if line.startswith(" ")] == [" 1 ⟦ 2 ⟧", " 1 ⟦ 3 ⟧"]


@pytest.fixture
def wide_file(tmp_path):
    """Returns a file whose numbers are too wide for a table of 80 columns."""
    path = tmp_path / "wide.jsonl"
    name, tokens = "0f8fad5b-d9cb-469f-a165-70867728950e", list(range(10_000))
    path.write_text("".join(json.dumps({"group_id": name, "tokens": [*tokens, n]}) + "\n" for n in range(10)))
    return str(path)


@pytest.mark.parametrize("width", [60, 80, 130])
def test_the_table_fits_the_terminal(capsys, monkeypatch, wide_file, width):
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = inspect(capsys, wide_file)
    assert max(map(len, out.splitlines())) <= width
    rule, folded = out.splitlines()[1], ""
    for line in out.split(f"{rule}\n")[1].splitlines():
        folded += line.split(" ")[1]
    assert folded == "0f8fad5b-d9cb-469f-a165-70867728950e"
    for number in (" 100,010 ", " 10,010 ", " 0.900 ", " 9.99x ", " 10,001\n"):
        assert number in out
    assert ("hidden at this width: fan-out, depth" in out) == (width < 130)
    assert ("\nfan-out: " in out) == (width == 130)


def test_control_characters_do_not_reach_the_terminal(capsys, tmp_path):
    name = "\x1b[31m\x9b\u202e\n[red]"
    messages = [{"role": "user", "content": name}, {"role": "assistant", "content": name}]
    (tmp_path / "f").write_text(
        json.dumps({"id": name, "messages": messages})
        + "\n"
        + json.dumps({"id": "x", "messages": messages * 2})
    )
    for options in (
        [],
        ["--report", name, "--picture"],
        ["--report", "x", "--picture"],
        ["--show", name],
        ["--show", "x"],
        ["--show", "\x1b"],
        ["--report", "\x1b"],
        ["--json"],
    ):
        _, out, err = inspect(capsys, tmp_path / "f", *options)
        assert out or err
        assert all(char.isprintable() or char in "\n" for char in out + err), options
    assert "\\x1b[31m\\x9b\\u202e\\n[red]" in inspect(capsys, tmp_path / "f")[1]


def test_a_closed_pipe_ends_the_command_quietly(file):
    for options in ([], ["--json"]):
        command = [sys.executable, "-m", "titan_tree", "inspect", file, *options]
        run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        run.stdout.close()
        assert run.stderr.read() == b""
        assert run.wait() == 1


def test_terminals_that_are_not_unicode(monkeypatch, file):
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stdout)
    assert cli.main(["inspect", file, "--show", "a/2"]) == 0
    assert stdout.buffer.getvalue().endswith(rb" 1 \u27e6 2 3 5 \u27e7" + b"\n")


def test_trained_tokens_of_the_template_are_counted(capsys, tmp_path):
    """An answer holds control tokens, plain text under chatml only. Another has an empty think block."""
    turns = [("user", "?"), ("assistant", "<|im_end|><|im_start|>"), ("user", "<think>\n\n</think>")]
    turns += [("assistant", "<think>\n\n</think>fine")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "a.jsonl").write_text(json.dumps({"messages": messages}))
    ends, starts = "trained control tokens: 2 x <|im_end|>\n", "3 x <|im_end|>, 1 x <|im_start|>\n"
    blocks = " empty think blocks are trained; some templates write them for turns without reasoning"
    advice = "; to avoid it, set data.sample.empty_blocks to false"
    for template, settings, control, n_blocks, says in (
        ("chatml", (), ends, 1, ""),
        ("qwen3", (), starts, 2, advice),
        ("qwen3", ("data.sample.enable_thinking=false",), starts, 0, ""),
        ("qwen3", ("data.sample.empty_blocks=false",), starts, 0, ""),
    ):
        _, out, _ = inspect(capsys, tmp_path / "a.jsonl", "--template", template, *settings)
        assert control in out
        assert (f"\n{n_blocks}{blocks}{says}\n" in out) == (n_blocks > 0), template


def test_lines_without_a_group_id_that_share_prefixes_are_told(capsys, tmp_path):
    (tmp_path / "f").write_text("".join(json.dumps({"tokens": [1, 2, 3, n]}) + "\n" for n in range(12)))
    told = (
        "12 lines without group_id share prefixes: one tree instead of 12 would hold 15 tokens instead of 48"
    )
    assert told in inspect(capsys, tmp_path / "f")[1]
    assert "lines without" not in inspect(capsys, tmp_path / "f", "data.merge=batch")[1]
    line = {"trajectories": [{"tokens": [1, 2, 3]}]}  # a task is a group
    (tmp_path / "g").write_text(f"{json.dumps(line)}\n" * 2)
    assert "lines without" not in inspect(capsys, tmp_path / "g")[1]


@pytest.mark.skipif(not REAL_DATA.is_dir(), reason="needs the real rollouts")
def test_statistics_of_real_rollouts(capsys):
    """Numbers from an independent program: Qwen's tokens, without the reasoning of earlier turns."""
    _, out, _ = inspect(
        capsys,
        REAL_DATA / "webdancer_think.jsonl.gz",
        "--tokenizer",
        REAL_DATA / "qwen.tiktoken.gz",
        "data.sample.keep_reasoning=false",
    )
    assert rows(out)["all 100"] == [
        "210",
        "312,710",
        "312,710",
        "230,531",
        "0.263",
        "0.263",
        "1.36x",
        "320",
        "4",
        "2.00",
        "2,775",
    ]
    assert "\ntrained control tokens: 210 x <|im_end|>\n" in out
    assert "think blocks" not in out
