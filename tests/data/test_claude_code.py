"""Sessions of Claude Code: lines of one answer, forks, compactions, and what lines remove from prompts."""

import json
from collections import Counter

import pytest

from tests.support.cases import for_each
from tests.support.datasets import sample_reader
from tests.support.formats import write_lines
from tests.support.sessions import (
    CLAUDE,
    SUMMARY,
    claude_answer,
    claude_event,
    claude_user,
    read,
    text,
    tool_result,
    tool_use,
)
from titan_tree.cli import main
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.readers import read_records
from titan_tree.errors import UserError


def test_a_claude_code_session(tmp_path, caplog):
    trajectories, skipped = read(write_lines(tmp_path / "f.jsonl", CLAUDE))
    start = ["user: look", "assistant:  !t1 !t2", "tool: one", "tool: two[image]", "assistant: done"]
    context = [f"*{turn}" if turn.startswith("assistant") else turn for turn in start]
    assert trajectories == [
        (1203, [*start, "user: once more", "assistant: again"]),
        (1203, [*context, "user: something else", "user: no todos", "assistant: fine"]),
        (1203, ["user: count", "assistant: 3"]),
        (1203, [f"user: {SUMMARY}", "assistant: ok"]),
    ]
    assert skipped == {
        "file-history-snapshot": 1,
        "progress": 1,
        "system compact_boundary": 1,
        "summary": 1,
        "image": 1,
        "message without an answer": 1,
    }
    assert "images became the text [image]" in caplog.text


def test_a_session_is_trained_once_per_answer(tmp_path):
    """Six answers, in a tree that holds each of them once."""
    tokenizer = TreeTokenizer.byte_level()
    reader = sample_reader(write_lines(tmp_path / "f.jsonl", CLAUDE), tokenizer)
    (group,) = reader.files.groups()
    paths = reader.paths(group)
    answers = [tokenizer.decode(path.tokens[path.loss_mask > 0]) for path in paths]
    assert answers[1:] == [f"{text}<|im_end|>" for text in ("done", "again", "fine", "3", "ok")]
    assert "two folders" in answers[0]
    assert reader.files.sizes().samples == len(paths) == 6
    assert sum(reader.files.skipped.values()) == 6


def test_inspect_counts_what_is_left_out(tmp_path, capsys):
    assert main(["inspect", write_lines(tmp_path / "f.jsonl", CLAUDE)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("left out")]
    assert line == (
        "left out of sessions: 1 x file-history-snapshot, 1 x progress, 1 x image, "
        "1 x system compact_boundary, 1 x summary, 1 x message without an answer"
    )


def test_a_result_that_is_given_twice_is_a_fork(tmp_path):
    again = claude_user("r3", "a2", [tool_result("t1", "other")])
    more = claude_answer("a8", "r3", "m8", text("so"), "end_turn")
    trajectories, _ = read(write_lines(tmp_path / "f.jsonl", [*CLAUDE, again, more]))
    assert (1203, ["user: look", "*assistant:  !t1 !t2", "tool: other", "assistant: so"]) in trajectories
    assert len(trajectories) == 5


def gateway_answer(uuid, parent, block, prompt=0, **fields):
    """Returns an answer behind a gateway that gives one id to all of them."""
    row = claude_answer(uuid, parent, "same", block)
    row["message"]["usage"] = {"input_tokens": prompt}
    return row | fields


ASKED, ANSWERED = claude_user("u1", None, "q1"), ["user: q1", "assistant: a1", "user: q2", "assistant: a2"]
RESULT = claude_user("r1", "a1", [tool_result("t1", "one")])
CALLED = ["user: q1", "assistant:  !t1", "tool: one", "assistant: a2"]


@for_each(
    ("rows", "expected"),
    [
        (
            [
                gateway_answer("a1", "u1", text("a1")),
                claude_user("u2", "a1", "q2"),
                gateway_answer("a2", "u2", text("a2")),
            ],
            ANSWERED,
        ),
        (
            [gateway_answer("a1", "u1", tool_use("t1")), RESULT, gateway_answer("a2", "r1", text("a2"))],
            CALLED,
        ),
        (
            [
                gateway_answer("a1", "u1", tool_use("t1"), 5, requestId="x"),
                RESULT,
                gateway_answer("a2", "r1", text("a2"), 5, requestId="y"),
            ],
            CALLED,
        ),
        (  # results between the lines of one answer
            [
                gateway_answer("a1", "u1", tool_use("t1"), 5),
                RESULT,
                gateway_answer("a2", "r1", tool_use("t2"), 5),
                claude_user("r2", "a2", [tool_result("t2", "two")]),
                gateway_answer("a3", "r2", text("a2"), 9),
            ],
            ["user: q1", "assistant:  !t1 !t2", "tool: one", "tool: two", "assistant: a2"],
        ),
        (  # lines that were written again
            [
                gateway_answer("a0", "u1", tool_use("t1"), 5),
                gateway_answer("a1", "a0", tool_use("t1"), 5),
                gateway_answer("b1", "u1", tool_use("t1"), 5),
                RESULT,
                gateway_answer("a2", "r1", text("a2"), 9),
            ],
            CALLED,
        ),
    ],
)
def test_lines_of_an_answer_follow_each_other(tmp_path, rows, expected):
    trajectories, _ = read(write_lines(tmp_path / "f.jsonl", [ASKED, *rows]))
    assert [turns for _, turns in trajectories] == [expected]


def claude_boundary(anchor, parent=None, **metadata):
    fields = {"anchorUuid": anchor}
    kept = {"compactMetadata": {name: fields | value for name, value in metadata.items()}}
    return claude_event("b", parent, "system", subtype="compact_boundary", **kept)


CLAUDE_KEPT = [
    claude_user("u0", None, "first"),
    claude_answer("a0", "u0", "m0", text("0"), "end_turn"),
    claude_user("k1", "a0", "kept"),
    claude_answer("k2", "k1", "m1", tool_use("t1")),
    claude_user("k3", "k2", [tool_result("t1", "one")]),
    claude_answer("k4", "k2", "m1", tool_use("t2"), "tool_use"),
    claude_user("k5", "k4", [tool_result("t2", "two")]),
    claude_answer("k6", "k5", "m2", text("1"), "end_turn"),
]
FIRST_TURNS = ["user: kept", "assistant:  !t1 !t2", "tool: one", "tool: two", "assistant: 1"]
FIRST_CONTEXT = (1203, ["user: first", "assistant: 0", *FIRST_TURNS])
KEPT = ["user: kept", "*assistant:  !t1 !t2", "tool: one", "tool: two", "*assistant: 1"]
KEPT_SEGMENT = {"preservedSegment": {"headUuid": "k1", "tailUuid": "k6"}}


@for_each(
    ("anchor", "metadata", "summary_parent", "start"),
    [
        ("s", KEPT_SEGMENT, "b", ["user: Sum.", *KEPT]),
        ("s", {"preservedMessages": {"uuids": [f"k{n}" for n in range(1, 7)]}}, "b", ["user: Sum.", *KEPT]),
        ("b", KEPT_SEGMENT, "b", [*KEPT, "user: Sum."]),  # the summary is of what came after
    ],
)
def test_messages_that_a_compaction_kept_follow_its_summary(
    tmp_path, anchor, metadata, summary_parent, start
):
    """Their lines stay where they were, and later lines name them as their parents."""
    file = write_lines(
        tmp_path / "f.jsonl",
        [
            *CLAUDE_KEPT,
            claude_boundary(anchor, **metadata),
            claude_user("s", summary_parent, "Sum.", isCompactSummary=True),
            claude_user("u1", "s" if anchor == "b" else "k6", "new"),
            claude_answer("a1", "u1", "m3", text("2"), "end_turn"),
            claude_user("u2", "a1", "end"),
            claude_answer("a2", "u2", "m4", text("3"), "end_turn"),
        ],
    )
    trajectories, _ = read(file)
    last = (None, [*start, "user: new", "assistant: 2", "user: end", "assistant: 3"])
    assert trajectories == [FIRST_CONTEXT, last]
    tokenizer = TreeTokenizer.byte_level()
    reader = sample_reader(file, tokenizer)
    (group,) = reader.files.groups()
    assert len(reader.paths(group)) == 5  # each answer once


def test_the_last_of_two_compactions_that_kept_a_message_applies(tmp_path):
    """The segment of the second one reaches over the first one."""
    rows = [ASKED, claude_answer("a1", "u1", "m1", text("a1"))]
    for number, last in ((1, "a1"), (2, "a2")):
        boundary, summary = f"b{number}", f"s{number}"
        segment = {"headUuid": "u1", "tailUuid": last, "anchorUuid": summary}
        metadata = {"preservedSegment": segment}
        rows += [
            claude_event(boundary, None, "system", subtype="compact_boundary", compactMetadata=metadata),
            claude_user(summary, boundary, f"Sum {number}.", isCompactSummary=True),
            claude_user(f"u{number + 1}", summary, f"q{number + 1}"),
            claude_answer(f"a{number + 1}", f"u{number + 1}", f"m{number + 1}", text(f"a{number + 1}")),
        ]
    rows += [claude_user("u4", "a1", "q4"), claude_answer("a4", "u4", "m4", text("a4"))]  # a rewind
    trajectories, _ = read(write_lines(tmp_path / "f.jsonl", rows))
    kept = ["user: q1", "*assistant: a1"]
    assert sorted(turns for _, turns in trajectories) == [
        ["user: Sum 1.", *kept, "user: q2", "assistant: a2"],
        ["user: Sum 2.", *kept, "user: q2", "*assistant: a2", "user: q3", "assistant: a3"],
        ["user: Sum 2.", *kept, "user: q4", "assistant: a4"],
        ["user: q1", "assistant: a1"],
    ]


def test_a_compaction_without_its_messages_is_refused(tmp_path):
    segment = {"preservedSegment": {"headUuid": "gone", "tailUuid": "k6"}}
    summary = claude_user("s", "b", "Sum.", isCompactSummary=True)
    file = write_lines(tmp_path / "f.jsonl", [*CLAUDE_KEPT, claude_boundary("s", **segment), summary])
    with pytest.raises(UserError, match=r"f.jsonl:9: compactMetadata: expected the messages that the compac"):
        read(file)


@for_each(
    ("fields", "context"),
    [
        ({"subtype": "snip_boundary", "snipMetadata": {"removedUuids": ["u0", "a0"]}}, KEPT),
        (
            {"subtype": "microcompact_boundary", "microcompactMetadata": {"compactedToolIds": ["t1"]}},
            ["user: first", "*assistant: 0", *KEPT[:2], "tool: [Old tool result content cleared]", *KEPT[3:]],
        ),
    ],
)
def test_what_a_line_removes_is_not_in_later_contexts(tmp_path, fields, context):
    lines = [
        *CLAUDE_KEPT,
        claude_event("b", "k6", "system", **fields),
        claude_user("u1", "b", "new"),
        claude_answer("a1", "u1", "m3", text("2"), "end_turn"),
    ]
    trajectories, _ = read(write_lines(tmp_path / "f.jsonl", lines))
    assert trajectories == [FIRST_CONTEXT, (None, [*context, "user: new", "assistant: 2"])]


def test_content_that_is_null_is_an_empty_text(tmp_path):
    rows = [claude_user("u1", None, None), claude_answer("a1", "u1", "m1", text("ok"))]
    trajectories, _ = read(write_lines(tmp_path / "f.jsonl", rows))
    assert trajectories == [(1203, ["user: ", "assistant: ok"])]


def test_output_of_local_commands_is_read(tmp_path):
    command = claude_event("c", "k6", "system", subtype="local_command", content="<stdout>x")
    lines = [*CLAUDE_KEPT, command, claude_answer("a1", "c", "m3", text("2"), "end_turn")]
    ((_, turns_read),), _ = read(write_lines(tmp_path / "f.jsonl", lines))
    assert turns_read[-2:] == ["user: <stdout>x", "assistant: 2"]


def test_answers_of_two_files_are_named(tmp_path, caplog):
    rows = [ASKED, gateway_answer("a1", "u1", text("a1"), requestId="of two files")]
    read(write_lines(tmp_path / "f.jsonl", rows))
    read(write_lines(tmp_path / "f.jsonl", rows))
    assert "continues a copy" not in caplog.text
    read(write_lines(tmp_path / "g.jsonl", rows))
    assert f"g.jsonl: this session continues a copy of {tmp_path / 'f.jsonl'}" in caplog.text


def test_the_order_of_lines_does_not_matter(tmp_path):
    lines = [line for line in CLAUDE if "uuid" in line]
    expected, _ = read(write_lines(tmp_path / "f.jsonl", lines))
    shuffled, _ = read(write_lines(tmp_path / "g.jsonl", [lines[-1], *lines[:-1]]))
    assert sorted(shuffled) == sorted(expected)


def test_broken_lines_can_be_counted(tmp_path):
    file, skipped = tmp_path / "f.jsonl", Counter()
    lines = [
        *map(json.dumps, CLAUDE[:9]),
        '{"parentUuid": "a4", "uu',
        json.dumps({"type": "user", "uuid": "v"}),
    ]
    file.write_text("\n".join(lines))
    ((_, record),) = read_records(str(file), skipped=skipped, skips_broken=True)
    assert len(record["trajectories"]) == 1
    assert skipped["broken line"] == 2
