"""The payload of titan-tree xray against numbers that are counted conversation by conversation."""

import json
import os
import random
import time

import numpy as np
import pytest

from tests.support.datasets import sample_reader
from tests.support.formats import demo_tasks, write_document, write_lines
from tests.support.sessions import (
    CLAUDE,
    CODEX,
    OPENHANDS,
    PI,
    claude_answer,
    claude_user,
    tool_result,
    tool_use,
)
from tests.xray.payloads import GROUPS, tree_payload
from titan_tree.cli import main
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.advantages import advantages
from titan_tree.data.readers import read_records
from titan_tree.data.settings import ADVANTAGES
from titan_tree.data.turns import Turns
from titan_tree.errors import UserError
from titan_tree.xray import rendering
from titan_tree.xray.payload import Xray
from titan_tree.xray.rendering import KINDS, Renderer
from titan_tree.xray.runs import _curves
from titan_tree.xray.sources import Sources


def payload_of(*files, tokenizer=None, **options):
    renderer = Renderer(sample_reader("demo", tokenizer))
    return Xray(Sources([str(file) for file in files]), renderer, "name", **options).payload()


def counted(message):
    """Returns the bytes of a message: its text, and one byte before and after it."""
    size = 2 + len(message["content"].encode()) + len(message.get("reasoning_content", "").encode())
    for call in message.get("tool_calls", ()):
        arguments = call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        size += len(f"\n{call['function']['name']} {text}".encode())
    return size


def oracle(files):
    """Returns totals: each call's context and answer, summed one by one."""
    totals = dict.fromkeys(("groups", "samples", "calls", "n_calls", "n_flat"), 0)
    for file in files:
        for _, record in read_records(str(file)):
            totals["groups"] += 1
            for trajectory in record["trajectories"]:
                tools = record.get("tools")
                size = 2 + len(json.dumps(tools)) if tools else 0
                for message in trajectory["messages"]:
                    size += counted(message)
                    if message["role"] == "assistant":
                        end = size
                        if message.get("weight") != 0:
                            totals["calls"] += 1
                            totals["n_calls"] += size
                totals["samples"] += 1
                totals["n_flat"] += end
    return totals


@pytest.fixture
def sessions(tmp_path):
    files = [
        write_lines(tmp_path / f"{name}.jsonl", rows)
        for name, rows in (("claude", CLAUDE), ("codex", CODEX), ("pi", PI))
    ]
    return [*files, write_document(tmp_path / "openhands.json", {"history": OPENHANDS})]


def test_calls_are_counted_as_if_each_had_its_context_alone(sessions):
    payload = payload_of(*sessions)
    expected = oracle(sessions)
    assert {name: payload["totals"][name] for name in expected} == expected
    assert expected["calls"] == 6 + 5 + 4 + 3


def test_columns_add_up_to_the_totals(sessions, tmp_path):
    payload = payload_of(*sessions, write_lines(tmp_path / "f.jsonl", demo_tasks(1)))
    repeats = np.zeros(len(KINDS), int)
    for tree in payload["trees"]:
        columns = {name: np.array(tree[name]) for name in ("parent", "tokens", "paths", "calls", "kind")}
        assert (columns["parent"] < np.arange(len(columns["parent"]))).all()
        assert columns["tokens"].sum() == tree["n_tree"]
        assert (columns["tokens"] * columns["paths"]).sum() == tree["n_flat"]
        assert (columns["tokens"] * columns["calls"]).sum() == tree["n_calls"]
        again = columns["tokens"] * np.maximum(columns["calls"] - 1, 0)
        repeats += np.bincount(columns["kind"], again, minlength=len(KINDS)).astype(int)
        for sample in tree["samples"]:  # every answer is on the way from the root to the sample's end
            above, segment = set(), sample["segment"]
            while segment >= 0:
                above.add(segment)
                segment = tree["parent"][segment]
            assert {segment for turn in sample["turns"] for segment in turn} <= above
            assert all(tree["trained"][first] for first, _ in sample["turns"])
    assert payload["repeats"] == repeats.tolist()
    assert sum(len(tree["text"]) for tree in payload["trees"]) == sum(
        len(tree["parent"]) for tree in payload["trees"]
    )


def test_the_tree_of_a_session(sessions):
    payload = payload_of(sessions[0])
    (tree,) = payload["trees"]
    columns = zip(tree["kind"], tree["text"], tree["calls"], strict=True)
    shown = [(KINDS[kind], text, calls) for kind, text, calls in columns]
    assert shown[1:9] == [
        ("user", "look\n", 4),
        ("assistant", "[assistant] ", 4),
        ("thought", "two folders", 4),
        ("assistant", '\nls {"path": "t1"}\nls {"path": "t2"}\n', 4),
        ("tool", "[tool] one\n[tool] two[image]\n", 3),
        ("assistant", "[assistant] ", 3),
        ("assistant", "done\n", 3),
        ("user", "[user] ", 2),
    ]
    reasons = [payload["reasons"][number][0] for number in tree["reason"] if number >= 0]
    assert sorted(reasons) == [
        "other text from the first message on",
        "other text from the first message on",
        "other text of the user",
    ]
    prompt = (
        1203 - (2 + len("count") + 1) / 4
    )  # the median of three first prompts; the API counted 1203 tokens
    times = (422 / 4 + 6 * prompt) / (208 / 4 + prompt)
    assert payload["notes"][1] == (
        "Session files leave out system prompts, tool schemas, or both, and so do the numbers above. By the "
        f"API's usage, that is about {prompt:,.0f} tokens per call. With it, trees would compute about "
        f"{times:.1f} times less than every call. Both are estimates."
    )


@pytest.mark.slow
def test_a_tokenizer_gives_the_samples_of_training(tmp_path):
    file = write_lines(tmp_path / "f.jsonl", demo_tasks(1))
    tokenizer = TreeTokenizer.byte_level()
    payload = payload_of(file, tokenizer=tokenizer)
    reader = sample_reader(file, tokenizer)
    trees = {group.id: reader.tree(group) for group in reader.files.groups()}
    assert {tree["id"]: tree["n_flat"] for tree in payload["trees"]} == {
        name: tree.stats.n_flat for name, tree in trees.items()
    }
    texts = {"system": "You are the clerk", "user": "How many", "tools": '"stock"'}
    for kind, text in texts.items():
        tree = payload["trees"][0]
        found = [KINDS[k] for k, t in zip(tree["kind"], tree["text"], strict=True) if text in t]
        assert kind in found


def test_broken_files_in_a_folder_are_counted(tmp_path, sessions, capsys):
    (tmp_path / "notes.json").write_text('{"a": 1}')
    (tmp_path / "zz.jsonl").write_text(json.dumps(CLAUDE[1]) + "\n")
    (tmp_path / "yy.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in CLAUDE[:10]) + '{"typ')
    payload = payload_of(tmp_path)
    assert payload["totals"]["groups"] == 5
    assert payload["skipped"]["file that no reader knows"] == 1
    assert payload["skipped"]["broken line"] == 1
    assert payload["notes"][-1] == (
        f"1 part could not be read, such as {tmp_path}/zz.jsonl: expected an answer of a model in the "
        "session; remove the file."
    )
    (tmp_path / "empty").mkdir()
    assert main(["xray", str(tmp_path / "empty")]) == 2
    assert capsys.readouterr().err == (
        f"titan-tree: error: nothing to show: {tmp_path}/empty: no file that a reader knows; expected a "
        "format of docs/data.md in files that end with .jsonl, .json, .ndjson, .traj, .parquet, also "
        "with .gz or .zst\n"
    )


def test_the_command_prints_three_sentences_and_writes_a_page(sessions, tmp_path, capsys):
    page = tmp_path / "page.html"
    assert main(["xray", sessions[0], "-o", str(page)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [
        "Token trees compute 208 bytes for 6 model calls in 1 group: 2.0 times less than every call as a "
        "sample of its own (422), and 1.4 times less than one row per leaf path (289).",
        "What the calls repeat is history: earlier answers 59%, results of tools 16%, earlier thoughts 15%, "
        "messages of the user 10%. The files leave out what comes before it.",
        "Branches diverge at 2 points, and hold 98 bytes from there on: other text from the first message "
        "on (1), other text of the user (1).",
    ]
    assert lines[-1] == f"The page: {page}"
    assert page.read_text().startswith("<!doctype html>")


def test_the_page_replaces_an_earlier_one_but_no_other_file(sessions, tmp_path, capsys):
    page, notes, read = (tmp_path / name for name in ("page.html", "notes.html", "claude.jsonl"))
    notes.write_text("<p>mine</p>")
    before = read.read_bytes()
    assert main(["xray", sessions[0], "-o", str(page)]) == 0
    first = page.read_bytes()
    assert main(["xray", sessions[0], "--no-text", "-o", str(page)]) == 0
    assert page.read_bytes() != first
    capsys.readouterr()
    no_page = "this file exists, and the command did not write it; name another one, or replace it with"
    is_read = "the command reads this file; name another one to write\n"
    for out, force, message in ((notes, [], no_page), (read, ["--force"], is_read)):
        for source in (sessions[0], str(tmp_path)):
            assert main(["xray", source, "-o", str(out), *force]) == 2
            assert capsys.readouterr().err.startswith(f"titan-tree: error: {out}: {message}")
    assert (notes.read_text(), read.read_bytes()) == ("<p>mine</p>", before)
    assert main(["xray", sessions[0], "-o", str(notes), "--force"]) == 0
    assert b'content="titan-tree xray"' in notes.read_bytes()[:200]


def test_arguments_and_numbers_that_are_out_of_range(tmp_path, capsys):
    file = tmp_path / "d.jsonl"
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    file.write_text(json.dumps({"messages": turns, "prompt_tokens": 10**400}))
    assert main(["xray", *[str(file)] * 5, "--json"]) == 0  # a prompt of more tokens than a float can hold
    assert json.loads(capsys.readouterr().out)["name"] == f"{', '.join([str(file)] * 3)} and 2 more"
    for words, message in (
        (["--ranks", "1000000000"], "argument --ranks: expected an integer from 1 to 1,000,000, got"),
        (["--json", "-o", "page.html"], "--out: expected no page together with --json; remove one of them"),
        (["-o", ""], ": expected the name of a file to write, got a folder"),
    ):
        assert main(["xray", str(file), *words]) == 2
        assert capsys.readouterr().err.startswith(f"titan-tree: error: {message}")


def test_no_text_leaves_out_all_texts(sessions, tmp_path, capsys):
    bad = write_lines(tmp_path / "bad.jsonl", [{"messages": [{"role": "look", "content": "look"}]}])
    assert main(["xray", sessions[0], bad, "--no-text", "--json"]) == 0
    output = capsys.readouterr().out
    payload = json.loads(output)
    assert payload["trees"][0]["text"] is None
    assert payload["notes"][-1] == "1 part could not be read."
    assert "look" not in output
    unknown = write_lines(tmp_path / "pi.jsonl", [*PI, {"type": "look", "id": "zz", "parentId": None}])
    assert payload_of(unknown)["skipped"]["look"] == 1
    payload = payload_of(unknown, has_text=False)
    assert payload["skipped"] == {"part": 3}
    assert "Left out: 3 x part." in payload["notes"]


def test_branches_do_not_count_tokens_twice(tmp_path):
    """The second path leaves the first one early; the third leaves it late, below the second branch point."""
    rows = [[1, 2, 3, 4, 5], [1, 7, 8, 9, 9, 9, 9], [1, 7, 8, 2], [1, 7, 3]]
    file = write_lines(
        tmp_path / "f.jsonl",
        [{"group_id": "g", "tokens": row, "loss_mask": [0] + [1] * (len(row) - 1)} for row in rows],
    )
    payload = payload_of(file)
    assert payload["reasons"] == [("other text in an answer", 3, 4 + 1 + 1)]
    assert payload["sentences"][1] == (  # whether the first token is of a system prompt is not known
        "Of what the calls repeat, 50% is history (earlier answers 50%); 50% is of an unknown kind."
    )
    assert payload["totals"] == {
        "groups": 1,
        "samples": 4,
        "calls": 4,
        "n_calls": 19,
        "n_flat": 19,
        "n_leaf": 19,
        "n_tree": 13,
        "points": 3,
        "path_images": 0,
        "images": 0,
    }


def test_a_point_with_two_reasons_is_one_point(tmp_path):
    answers = [{"content": "aaaaa"}, {"content": "b"}, {"content": "a", "reasoning_content": "c"}]
    rows = [
        {"group_id": "g", "messages": [{"role": "user", "content": "q"}, {"role": "assistant"} | answer]}
        for answer in answers
    ]
    payload = payload_of(write_lines(tmp_path / "f.jsonl", rows))
    assert sorted(payload["reasons"]) == [
        ("other text in a thought", 1, 3),
        ("other text in an answer", 1, 2),
    ]
    assert payload["sentences"][1].endswith("100% history (messages of the user 75%, earlier answers 25%).")
    assert payload["sentences"][2].startswith("Branches diverge at 1 point, and hold 5 bytes from there on: ")


def test_scored_files_have_the_loss_of_trees_and_segments(tmp_path):
    rows = [
        {"tokens": [1, 2, 3], "loss_mask": [0, 1, 1], "old_logprobs": [None, -1.0, -2.0]},
        {"tokens": [1, 2, 4], "loss_mask": [0, 1, 1], "old_logprobs": [None, -3.0, -5.0]},
    ]
    harder = {"tokens": [1, 2], "loss_mask": [0, 1], "old_logprobs": [None, -9.0], "group_id": "hard"}
    lines = [row | {"group_id": "easy", "reward": i} for i, row in enumerate(rows)]
    payload = payload_of(write_lines(tmp_path / "f.jsonl", [*lines, harder]))
    assert [(tree["id"], tree["loss"]) for tree in payload["trees"]] == [("hard", 9.0), ("easy", 2.75)]
    assert payload["trees"][1]["logprob"] == [None, -2.0, -2.0, -5.0]
    assert [sample["reward"] for sample in payload["trees"][1]["samples"]] == [0, 1]


@pytest.mark.slow
def test_partitions_and_ranks_cover_the_trees(tmp_path):
    payload = payload_of(write_lines(tmp_path / "f.jsonl", demo_tasks(4)), max_tokens=[256], ranks=[2])
    for tree in payload["trees"]:
        covered = [np.zeros(size, int) for size in tree["tokens"]]
        sizes = {}
        for segment, first, end, partition in tree["partitions"]["256"]:
            covered[segment][first:end] += 1
            sizes[partition] = sizes.get(partition, 0) + end - first
        assert all((times == 1).all() for times in covered)
        assert max(sizes.values()) <= 256
    assert {tree["rank"]["2"] for tree in payload["trees"]} == {0, 1}


@pytest.mark.slow
def test_the_folder_of_a_run_has_its_curves_and_its_data(tmp_path, capsys):
    file = write_lines(tmp_path / "f.jsonl", demo_tasks(1))
    (tmp_path / "config.toml").write_text(
        f'folder = "x"\n[data]\nfiles = ["{file}"]\ntokenizer = "byte"\nadvantage = "mean"\n'
        '[model]\nname = "qwen3"\nflavor = "debug"\n'
    )
    (tmp_path / "metrics.csv").write_text("step,loss,epoch,nll\n1,3.5,0,\n2,2.5,0,nan\n")
    assert main(["xray", str(tmp_path), "--json"]) == 0
    payload = json.loads(capsys.readouterr().out)
    assert payload["run"]["curves"] == {"loss": [[1, 2], [3.5, 2.5]]}
    (sample,) = payload["run"]["samples"]
    assert [trained for _, trained in sample["excerpts"]] == [0, 1, 0]
    (tree,) = payload["trees"]
    rewards = [sample["reward"] for sample in tree["samples"]]
    values = [sample["advantage"] for sample in tree["samples"]]
    mean = np.mean([task["reward"] for task in demo_tasks(1)[0]["trajectories"]])
    for reward, value in zip(rewards, values, strict=True):
        assert value == pytest.approx([reward - mean] * len(value), abs=1e-6)


def test_bytes_that_differ_inside_of_a_character_are_other_text(tmp_path):
    rows = [
        {"group_id": "g", "messages": [{"role": "user", "content": c}, {"role": "assistant", "content": "b"}]}
        for c in "éè"
    ]
    payload = payload_of(write_lines(tmp_path / "d.jsonl", rows))
    assert [name for name, _, _ in payload["reasons"]] == ["other text of the user"]


@pytest.mark.parametrize("row", [b"1,x", b"1,\xff", b"1,\0", b'1,"' + b"9" * 200_000, b"1,2,3"])
def test_a_damaged_row_of_metrics_is_named(row, tmp_path):
    (tmp_path / "metrics.csv").write_bytes(b"step,loss\n" + row + b"\n")
    with pytest.raises(UserError, match=r"metrics.csv:[12]: expected a step and numbers; repair the line"):
        _curves(str(tmp_path / "metrics.csv"))


def test_warnings_are_counted_by_file(sessions, tmp_path):
    copy = write_lines(tmp_path / "copy.jsonl", CLAUDE)
    assert payload_of(sessions[0], copy)["notes"][-1].startswith("In 2 files: images became the text [image]")


@pytest.mark.exhaustive
def test_ten_megabytes_of_sessions_take_six_seconds(tmp_path):
    """A tenth of the promise: 100 MB in a minute."""
    draw, rows, parent = random.Random(0), [], None
    for number in range(2_000):
        result = "".join(draw.choices("abcdefghij ", k=4_000))
        rows += [
            claude_answer(f"a{number}", parent, f"m{number}", tool_use(f"t{number}"), "tool_use"),
            claude_user(f"r{number}", f"a{number}", [tool_result(f"t{number}", result)]),
        ]
        parent = f"r{number}" if draw.random() > 0.01 else f"r{draw.randrange(number + 1)}"  # a fork
    files = [write_lines(tmp_path / f"{i}.jsonl", [CLAUDE[1], *rows]) for i in range(1)]
    assert os.path.getsize(files[0]) > 8_000_000
    start = time.process_time()
    payload_of(*files)
    assert time.process_time() - start < 6


def test_advantages_are_those_of_training():
    """Every estimator, on random trees with rollouts of several paths."""
    compared = 0
    for paths, rewards, owners in GROUPS:
        found = tree_payload("group", paths, rewards, owners)["advantages"]
        assert list(found) == list(ADVANTAGES)
        for name, values in found.items():
            arrays = advantages(name, paths, rewards, owners)
            turns = Turns(paths, rewards, owners).turns
            assert values == pytest.approx([arrays[turn.path][turn.start] for turn in turns], rel=1e-6), name
            compared += len(values)
    assert compared > 2000


def test_a_tree_with_a_sample_without_a_reward_has_no_advantages():
    paths, rewards, owners = GROUPS[0]
    assert len(rewards) > 1
    for unknown in (None, 1e31):
        assert tree_payload("group", paths, [*rewards[:-1], unknown], owners)["advantages"] == {}


def test_a_group_that_would_fill_the_memory_is_left_out(sessions, monkeypatch):
    monkeypatch.setattr(rendering, "MOST_BYTES", 288)  # one less than the first session has
    payload = payload_of(*sessions[:2])
    assert payload["totals"]["groups"] == 1
    assert payload["notes"][-1].endswith(
        "trajectories[3]: the conversations of this group have more than 288 bytes together; split it."
    )


def test_segments_end_where_an_answer_of_any_path_does(tmp_path):
    """Both paths train token 4, so the mask of the tree does not show where the second answer lies."""
    rows = [{"tokens": [1, 2, 3, 4, 5], "loss_mask": mask} for mask in ([0, 1, 1, 1, 1], [0, 0, 1, 1, 0])]
    (tree,) = payload_of(write_lines(tmp_path / "f.jsonl", [row | {"group_id": "g"} for row in rows]))[
        "trees"
    ]
    assert tree["tokens"] == [1, 1, 2, 1]
    assert [sample["turns"] for sample in tree["samples"]] == [[[1, 3]], [[2, 2]]]
    assert tree["calls"] == [2, 2, 2, 1]
    assert tree["n_calls"] == 5 + 4


def test_the_first_sentence_says_no_times_where_trees_do_not_compute_less(tmp_path):
    def sentence(*rows):
        lines = [{"group_id": "g", "tokens": tokens, "loss_mask": mask} for tokens, mask in rows]
        return payload_of(write_lines(tmp_path / "f.jsonl", lines))["sentences"][0]

    call, leaf = "every call as a sample of its own", "one row per leaf path"
    begins = "Token trees compute"
    assert sentence(([1], [0])) == (
        f"{begins} 1 token for 0 model calls in 1 group: more than {call} (0), and as many as {leaf} (1)."
    )
    long = [*range(40)], [0] + [1] * 39
    assert sentence(long, ([0, 50], [0, 1])) == (
        f"{begins} 41 tokens for 2 model calls in 1 group: about as many as {call} (42), and about as "
        f"many as {leaf} (42)."
    )
    assert sentence(long, long) == (
        f"{begins} 40 tokens for 2 model calls in 1 group: 2.0 times less than {call} (80), and as many as "
        f"{leaf} (40)."
    )


def test_bytes_and_token_ids_are_not_added(tmp_path):
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    ids = {"tokens": [1, 2000], "loss_mask": [0, 1]}
    for first, second, total in (({"messages": messages}, ids, 6), (ids, {"messages": messages}, 2)):
        file = write_lines(tmp_path / "f.jsonl", [first, second])
        payload = payload_of(file)
        assert payload["totals"]["n_tree"] == total
        assert payload["notes"][-1] == (
            f"1 part could not be read, such as {file}:2: bytes of conversations and token ids do not add "
            "up; give --tokenizer, or read them one after the other."
        )


def test_a_call_that_failed_is_left_out(tmp_path):
    request = {"messages": [{"role": "user", "content": "q" * 98}]}
    good = {"choices": [{"message": {"role": "assistant", "content": "a" * 8}}]}
    calls = [{"request": request, "response": response} for response in (good, {"error": "limit"}, good)]
    payload = payload_of(write_lines(tmp_path / "log.jsonl", calls))
    assert (payload["totals"]["groups"], payload["totals"]["n_flat"]) == (1, 220)
    assert payload["notes"][-1] == (
        f"1 part could not be read, such as {tmp_path}/log.jsonl:2: response.choices: expected a non-empty "
        "list, got None; remove a failed call."
    )


def test_lines_without_a_group_are_compared_with_one_tree(tmp_path):
    """A log of calls does not say which task a call belongs to."""
    prompt = {"role": "user", "content": "q" * 98}  # 100 bytes
    lines = [{"messages": [prompt, {"role": "assistant", "content": f"{i}" * 8}]} for i in range(5)]
    payload = payload_of(write_lines(tmp_path / "log.jsonl", lines))
    assert payload["totals"]["n_tree"] == 5 * 110
    assert payload["notes"][0] == (
        "5 lines without group_id share prefixes: one tree instead of 5 would hold 146 tokens instead of "
        '550; give the lines of a task the same group_id, or set data.merge = "batch".'
    )
    grouped = [{"group_id": "task", **line} for line in lines]
    payload = payload_of(write_lines(tmp_path / "grouped.jsonl", grouped))
    assert (payload["totals"]["n_tree"], payload["totals"]["n_leaf"]) == (146, 550)
    assert not any("group_id" in note for note in payload["notes"])
