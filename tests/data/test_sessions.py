"""Sessions of Codex, Pi and OpenHands, and what the readers of all sessions refuse or report."""

import json

import pytest

from tests.support.cases import for_each
from tests.support.datasets import sample_reader
from tests.support.formats import write_document, write_lines
from tests.support.sessions import (
    CLAUDE,
    CODEX,
    OPENHANDS,
    OPENHANDS_NEWER,
    OPENHANDS_TOOL,
    PI,
    claude_answer,
    claude_event,
    claude_user,
    codex_line,
    codex_message,
    openhands_action,
    openhands_calls,
    openhands_event,
    pi_answer,
    pi_event,
    read,
    text,
)
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.readers import read_records
from titan_tree.errors import UserError


@for_each(
    "rows",
    [
        [*CLAUDE, claude_user("x", "gone", "q2")],
        [*PI, pi_event("10", "gone", {"role": "user", "content": "q2"})],
    ],
)
def test_a_missing_parent_is_said(tmp_path, caplog, rows):
    caplog.clear()
    _, skipped = read(write_lines(tmp_path / "f.jsonl", rows))
    assert skipped["missing parent"] == 1
    assert "some events name a parent that the file lacks" in caplog.text


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
    assert skipped == {
        "event user_message": 1,
        "event token_count": 1,
        "session_meta": 1,
        "turn_context": 1,
        **items,
    }
    assert "some reasoning items have no text" in caplog.text


def compacted(summary):
    """Returns how Pi shows the summary of a compaction."""
    before = "The conversation history before this point was compacted into the following summary:"
    return f"user: {before}\n\n<summary>\n{summary}\n</summary>"


def test_a_pi_session(tmp_path):
    trajectories, skipped = read(write_lines(tmp_path / "f.jsonl", PI))
    assert trajectories == [
        (310, ["user: look", "assistant:  !t", "tool: one", "assistant: done"]),
        (310, ["user: look", "*assistant:  !t", "tool: one", "assistant: nothing"]),
        (None, [compacted("Looked."), "*assistant: nothing", "user: more", "assistant: ok"]),
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


def rolled_back(number):
    return codex_line("event_msg", type="thread_rolled_back", num_turns=number)


def codex_turn(number, question=None):
    return [codex_message("user", question or f"q{number}"), codex_message("assistant", f"a{number}")]


@for_each(
    ("number", "kept"),
    [(1, ["user: q1", "*assistant: a1"]), (2, []), (9, []), (0, ["user: q1", "*assistant: a1", "user: q2"])],
)
def test_turns_that_codex_rolled_back_are_a_branch(tmp_path, number, kept):
    context = codex_message("user", "<environment_context>here</environment_context>")
    rows = [context, *codex_turn(1), context, *codex_turn(2), rolled_back(number), *codex_turn(3)]
    trajectories, _ = read(write_lines(tmp_path / "f.jsonl", rows))
    here = "user: <environment_context>here</environment_context>"
    first = (None, [here, "user: q1", "assistant: a1", here, "user: q2", "assistant: a2"])
    if number == 0:
        assert trajectories == [(None, [*first[1], "user: q3", "assistant: a3"])]
        return
    after = [here, *kept, *([here] if kept else []), "user: q3", "assistant: a3"]
    assert trajectories == [first, (None, after)]


@for_each("replacement", [None, []])
def test_a_rollback_behind_a_compaction_is_refused(tmp_path, replacement):
    compaction = codex_line("compacted", message="Sum.", replacement_history=replacement)
    rows = [*codex_turn(1), compaction, *codex_turn(2), rolled_back(2)]
    with pytest.raises(
        UserError, match=r"f.jsonl:6: payload.num_turns: the rollback takes back a compaction"
    ):
        read(write_lines(tmp_path / "f.jsonl", [*rows, *codex_turn(3)]))


def pi_question(name, parent, content):
    return pi_event(name, parent, {"role": "user", "content": content})


def pi_compaction(name, parent, summary, first):
    row = {"type": "compaction", "id": name, "parentId": parent}
    return row | {"summary": summary, "firstKeptEntryId": first}


PI_COMMAND = {"role": "bashExecution", "command": "ls", "output": "a", "truncated": True, "exitCode": 2}
BRANCH = (
    "The following is a summary of a branch that this conversation came back from:\n\n<summary>\nS</summary>"
)


@for_each(
    ("rows", "expected"),
    [
        (  # failed answers are in no later context
            [
                pi_event("2", "1", pi_answer(text("half"), stop="aborted")),
                pi_event("3", "2", pi_answer(stop="error")),
                pi_question("4", "3", "again"),
                pi_event("5", "4", pi_answer(text("a2"))),
                pi_compaction("6", "5", "S", "2"),
                pi_event("7", "6", pi_answer(text("a3"))),
            ],
            [
                ["user: q1", "assistant: half"],
                ["user: q1", "user: again", "assistant: a2"],
                [compacted("S"), "user: again", "*assistant: a2", "assistant: a3"],
            ],
        ),
        (  # the second compaction keeps messages from before the first one
            [
                pi_event("2", "1", pi_answer(text("a1"))),
                pi_compaction("3", "2", "S", "2"),
                pi_event("4", "3", pi_answer(text("a2"))),
                pi_compaction("5", "4", "T", "2"),
                pi_event("6", "5", pi_answer(text("a3"))),
            ],
            [
                ["user: q1", "assistant: a1"],
                [compacted("S"), "*assistant: a1", "assistant: a2"],
                [compacted("T"), "*assistant: a1", "*assistant: a2", "assistant: a3"],
            ],
        ),
        (
            [
                {"type": "branch_summary", "id": "2", "parentId": "1", "summary": "S"},
                {"type": "branch_summary", "id": "3", "parentId": "2", "summary": ""},
                pi_event("4", "3", PI_COMMAND | {"fullOutputPath": "/b"}),
                pi_event("5", "4", pi_answer(text("a1"))),
            ],
            [
                [
                    *("user: q1", f"user: {BRANCH}"),
                    "user: Ran `ls`\n```\na\n```\n\nCommand exited with code 2\n\n"
                    "[Output truncated. Full output: /b]",
                    "assistant: a1",
                ]
            ],
        ),
    ],
)
def test_what_pi_shows_the_model(tmp_path, rows, expected):
    header = {"type": "session", "id": "p"}
    trajectories, _ = read(write_lines(tmp_path / "f.jsonl", [header, pi_question("1", None, "q1"), *rows]))
    assert [turns for _, turns in trajectories] == expected


def pi_old(message):
    return {"type": "message", "timestamp": "t", "message": message}


def test_the_first_version_of_pi_has_no_ids(tmp_path):
    rows = [
        {"type": "session", "id": "p", "provider": "x"},
        pi_old({"role": "user", "content": "look"}),
        pi_old(pi_answer(text("one"))),
        pi_old({"role": "bashExecution", "command": "ls", "output": "a", "exitCode": 1}),
        pi_old({"role": "bashExecution", "command": "pwd", "output": "b", "excludeFromContext": True}),
        pi_old(pi_answer(text("two"))),
        {"type": "compaction", "timestamp": "t", "summary": "Sum.", "firstKeptEntryIndex": 5},
        pi_old({"role": "user", "content": "more"}),
        pi_old(pi_answer(text("three"))),
        {"type": "compaction", "timestamp": "t", "summary": "End.", "firstKeptEntryIndex": 8},
    ]
    file = write_lines(tmp_path / "f.jsonl", rows)
    command = "user: Ran `ls`\n```\na\n```\n\nCommand exited with code 1"
    assert read(file) == (
        [
            (310, ["user: look", "assistant: one", command, "assistant: two"]),
            (None, [compacted("Sum."), "*assistant: two", "user: more", "assistant: three"]),
        ],
        {"session": 1, "message without an answer": 1},  # the last compaction
    )
    reader = sample_reader(file, TreeTokenizer.byte_level())
    assert [len(reader.paths(group)) for group in reader.files.groups()] == [3]


def openhands_said(name, source, content, **fields):
    said = {"role": "assistant" if source == "agent" else "user", "content": [text(content)]}
    return openhands_event(name, "MessageEvent", source, llm_message=said | fields)


def test_the_last_summary_of_openhands_replaces_others(tmp_path):
    rows = [openhands_said("e0", "user", "look")]
    for number in (1, 2):
        rows.append(openhands_said(f"e{number}", "agent", f"a{number}", reasoning_content=f"r{number}"))
        forgotten = {"forgotten_event_ids": [f"e{number}"], "summary": f"S{number}", "summary_offset": 1}
        rows.append(openhands_event(f"c{number}", "Condensation", "environment", **forgotten))
    rows.append(openhands_event("c3", "Condensation", "environment", forgotten_event_ids=["c1-summary"]))
    rows.append(openhands_said("e3", "agent", "done"))
    file = write_document(tmp_path / "f.json", {"history": rows})
    trajectories, _ = read(file)
    assert [turns for _, turns in trajectories] == [
        ["user: look", "assistant: a1"],
        ["user: look", "user: S1", "assistant: a2"],
        ["user: look", "user: S2", "assistant: done"],
    ]
    ((_, record),) = read_records(str(file))
    assert record["trajectories"][1]["messages"][-1]["reasoning_content"] == "r2"


def test_a_delegate_of_openhands_has_a_context_of_its_own(tmp_path):
    history = [
        openhands_action(0, "message", "user", content="look"),
        openhands_action(1, "delegate", agent="Browser", thought="browse"),
        openhands_action(2, "message", "user", content="browse it"),
        openhands_action(3, "message", content="found"),
        {"id": 4, "observation": "delegate", "content": "found", "cause": 1},
        openhands_action(5, "message", content="done"),
    ]
    trajectories, _ = read(write_document(tmp_path / "f.json", {"history": history}))
    assert trajectories == [
        (None, ["user: browse it", "assistant: found"]),
        (None, ["user: look", "assistant: browse !event1", "tool: found", "assistant: done"]),
    ]


@for_each(
    ("rows", "kind"),
    [
        ([*CLAUDE, claude_event("x", "a7", "content-replacement")], "content-replacement"),
        ([*CLAUDE, claude_event("x", "a7", "system", subtype="rewound")], "system rewound"),
        ([*codex_turn(1), codex_line("event_msg", type="history_edited")], "event history_edited"),
        ([*codex_turn(1), codex_line("world_state")], "world_state"),
        ([*PI, {"type": "leaf", "id": "x", "parentId": "1"}], "leaf"),
        ([{"history": [*OPENHANDS, openhands_action(11, "loop_recovery", "user")]}], "action loop_recovery"),
    ],
)
def test_events_that_may_have_changed_a_prompt_are_named(tmp_path, caplog, rows, kind):
    caplog.clear()
    read(write_lines(tmp_path / "f.jsonl", rows))
    (line,) = [r.message for r in caplog.records if "not known whether it changed" in r.message]
    assert f"f.jsonl: {kind}: this kind of event is left out" in line


@for_each(
    "rows",
    [
        [*codex_turn(1), codex_line("session_meta", forked_from_id="other")],
        [{"type": "session", "id": "p", "parentSession": "other"}, *PI[1:]],
        [row | {"forkedFrom": {"sessionId": "other"}} for row in CLAUDE],
    ],
)
def test_a_copied_session_is_named(tmp_path, caplog, rows):
    caplog.clear()
    read(write_lines(tmp_path / "f.jsonl", rows))
    assert "this session continues a copy of other" in caplog.text


def test_responses_of_openhands_without_an_id_are_told_apart(tmp_path):
    rows = [openhands_action(0, "message", "user", content="look")]
    for number in (1, 3):
        response = openhands_calls(None, f"t{number}")
        rows += [openhands_action(number + n, "run") | response for n in (0, 1)]  # one answer, two actions
    trajectories, _ = read(write_document(tmp_path / "f.json", {"history": rows}))
    assert trajectories == [(None, ["user: look", "assistant: go !t1", "assistant: go !t3"])]


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
    "f.jsonl:3: compactMetadata: expected the messages that the compaction kept": [
        CLAUDE[1],
        CLAUDE[8],
        claude_event(
            *("b", None, "system"),
            subtype="compact_boundary",
            compactMetadata={"preservedSegment": {"tailUuid": ["x"], "anchorUuid": "u1"}},
        ),
    ],
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
