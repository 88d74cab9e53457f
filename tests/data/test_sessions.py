"""Sessions of coding agents: what becomes a conversation, what is trained, and what is left out."""

import json
from collections import Counter

import pytest

from tests.support.datasets import sample_reader
from tests.support.formats import write_document, write_lines
from tests.support.sessions import (
    CLAUDE,
    CODEX,
    OPENHANDS,
    OPENHANDS_NEWER,
    OPENHANDS_TOOL,
    PI,
    SUMMARY,
    claude_answer,
    claude_user,
    text,
    tool_result,
)
from titan_tree.cli import main
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.readers import read_records
from titan_tree.errors import UserError


def turns(messages):
    """Returns role and text of each message; * marks an answer that is not trained, ! a call."""
    return [
        ("*" if message.get("weight") == 0 else "")
        + f"{message['role']}: {message['content']}"
        + "".join(f" !{call['id']}" for call in message.get("tool_calls", ()))
        for message in messages
    ]


def read(file):
    """Returns the trajectories of the only record as (prompt tokens, turns), and what was left out."""
    skipped = Counter()
    ((_, record),) = read_records(str(file), skipped=skipped)
    trajectories = record["trajectories"]
    assert [t["rollout_id"] for t in trajectories] == [record["id"]] * len(trajectories)
    return [(t["prompt_tokens"], turns(t["messages"])) for t in trajectories], dict(skipped)


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
        "system": 1,
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
        "left out of sessions: 1 x file-history-snapshot, 1 x progress, 1 x image, 1 x system, 1 x summary, "
        "1 x message without an answer"
    )


def test_a_result_that_is_given_twice_is_a_fork(tmp_path):
    again = claude_user("r3", "a2", [tool_result("t1", "other")])
    more = claude_answer("a8", "r3", "m8", text("so"), "end_turn")
    trajectories, _ = read(write_lines(tmp_path / "f.jsonl", [*CLAUDE, again, more]))
    assert (1203, ["user: look", "*assistant:  !t1 !t2", "tool: other", "assistant: so"]) in trajectories
    assert len(trajectories) == 5


def test_a_codex_session(tmp_path, caplog):
    trajectories, skipped = read(write_lines(tmp_path / "f.jsonl", CODEX))
    assert trajectories == [
        (
            500,
            [
                *("system: Be brief.", "user: look", "assistant:  !c1", "tool: one"),
                *("assistant:  !c2", "tool: two", "assistant: done"),
            ],
        ),
        (None, ["system: Be brief.", "user: You looked.", "user: and again", "assistant: again"]),
        (None, ["system: Be brief.", "user: kept", "user: more", "assistant: ok"]),
    ]
    items = {"item web_search_call": 1, "item compaction": 1}
    assert skipped == {"event_msg": 2, "session_meta": 1, "turn_context": 1, **items}
    assert "some reasoning items have no text" in caplog.text


def test_a_pi_session(tmp_path):
    trajectories, skipped = read(write_lines(tmp_path / "f.jsonl", PI))
    assert trajectories == [
        (310, ["user: look", "assistant:  !t", "tool: one", "assistant: done"]),
        (310, ["user: look", "*assistant:  !t", "tool: one", "assistant: nothing"]),
        (None, ["user: Looked.", "*assistant: nothing", "user: more", "assistant: ok"]),
    ]
    assert skipped == {"session": 1, "model_change": 1}


def test_an_openhands_session_is_a_file_or_a_folder(tmp_path):
    pairs = [*OPENHANDS[:2], OPENHANDS[2:4], *OPENHANDS[4:]]  # of older versions
    files = [
        write_document(tmp_path / "f.json", {"history": OPENHANDS}),
        write_lines(tmp_path / "f.jsonl", [{"instance_id": "f", "instruction": "look", "history": pairs}]),
        tmp_path / "f",
        tmp_path / "f" / "events",
    ]
    files[-1].mkdir(parents=True)
    for event in OPENHANDS:
        (files[-1] / f"{event['id']}.json").write_text(json.dumps(event))
    for file in files:
        trajectories, skipped = read(file)
        assert trajectories == [
            (
                None,
                [
                    *("system: Be brief.", "user: look", "assistant: go !t1 !t2", "tool: one", "tool: two"),
                    "assistant: the file !event7",
                ],
            ),
            (
                None,
                [
                    *("system: Be brief.", "user: look", "user: Ran it.", "*assistant: the file !event7"),
                    *("tool: text", "assistant: done"),
                ],
            ),
        ]
        assert skipped == {"observation agent_state_changed": 1, "message without an answer": 1}
        ((_, record),) = read_records(str(file))
        assert record["id"] == "f"
        assert record["tools"] == [OPENHANDS_TOOL]


def test_newer_events_of_openhands(tmp_path):
    folder = tmp_path / "f" / "events"
    folder.mkdir(parents=True)
    for number, event in enumerate(OPENHANDS_NEWER):
        (folder / f"event-{number:05}-{event['id']}.json").write_text(json.dumps(event))
    for file in (folder, write_lines(tmp_path / "f.jsonl", [{"history": OPENHANDS_NEWER}])):
        trajectories, skipped = read(file)
        assert trajectories == [
            (None, ["system: Be brief.", "user: look", "assistant: go !t1 !t2"]),
            (None, ["system: Be brief.", "user: look", "user: Ran it.", "assistant: done"]),
        ]
        assert skipped == {
            "ConversationStateUpdateEvent": 1,
            "tool schemas in another form": 1,
            "message without an answer": 2,
        }


def test_the_order_of_lines_does_not_matter(tmp_path):
    lines = [line for line in CLAUDE if "uuid" in line]
    expected, _ = read(write_lines(tmp_path / "f.jsonl", lines))
    shuffled, _ = read(write_lines(tmp_path / "g.jsonl", [lines[-1], *lines[:-1]]))
    assert sorted(shuffled) == sorted(expected)


CYCLE = [claude_user("a", "b", "x"), claude_answer("b", "a", "m", text("y"))]
BROKEN = {
    "f.jsonl:2: broken JSON at character 5: ": [CLAUDE[1], '{"a"', CLAUDE[8]],
    "f.jsonl:2: uuid: expected the name of the event, got None": [
        CLAUDE[1],
        {**CLAUDE[8], "uuid": None},
        CLAUDE[8],
    ],
    "f.jsonl:2: message: expected an object with role and content, got None": [
        CLAUDE[1],
        {**CLAUDE[8], "uuid": "z", "message": None},
        CLAUDE[8],
    ],
    "f.jsonl: parentUuid: expected a tree of events, got a cycle": CYCLE,
    "f.jsonl: expected an answer of a model in the session; remove the file": [CLAUDE[1]],
    "f.jsonl:2: payload: expected an object, got 3": [CODEX[2], {"type": "event_msg", "payload": 3}],
}


@pytest.mark.parametrize("message", BROKEN)
def test_a_broken_line_is_named(tmp_path, message):
    file = tmp_path / "f.jsonl"
    file.write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in BROKEN[message])
    )
    with pytest.raises(UserError, match=message.replace("[", r"\[")):
        list(read_records(str(file)))


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
