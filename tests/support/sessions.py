"""Hand-made sessions of coding agents, one of each kind, and what their readers make of one, as text."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from titan_tree.data.readers import read_records

Row = dict[str, Any]


def claude_event(uuid: str, parent: str | None, kind: str, **fields: Any) -> Row:
    return {
        "parentUuid": parent,
        "isSidechain": False,
        "sessionId": "s1",
        "type": kind,
        "uuid": uuid,
    } | fields


def claude_user(uuid: str, parent: str | None, content: Any, **fields: Any) -> Row:
    return claude_event(uuid, parent, "user", message={"role": "user", "content": content}, **fields)


def claude_answer(uuid: str, parent: str | None, identifier: str, block: Row, stop: str | None = None) -> Row:
    usage = {"input_tokens": 3, "cache_read_input_tokens": 1000, "cache_creation_input_tokens": 200}
    message = {"id": identifier, "role": "assistant", "model": "m", "content": [block], "stop_reason": stop}
    return claude_event(uuid, parent, "assistant", message=message | {"usage": usage})


def text(value: str) -> Row:
    return {"type": "text", "text": value}


def tool_use(identifier: str) -> Row:
    return {"type": "tool_use", "id": identifier, "name": "ls", "input": {"path": identifier}}


def tool_result(identifier: str, content: Any) -> Row:
    return {"type": "tool_result", "tool_use_id": identifier, "content": content}


SUMMARY = "This session is being continued from a previous conversation. Look."

# One answer on three lines with two parallel calls, a fork of the last question, a sub-agent, a compaction.
CLAUDE = [
    {"type": "file-history-snapshot", "messageId": "x", "snapshot": {}},
    claude_user("u1", None, "look"),
    claude_event("p1", "u1", "progress", data={}),
    claude_answer("a1", "p1", "m1", {"type": "thinking", "thinking": "two folders", "signature": "z"}),
    claude_answer("a2", "a1", "m1", tool_use("t1")),
    claude_user("r1", "a2", [tool_result("t1", "one")], toolUseResult="one"),
    claude_answer("a3", "a2", "m1", tool_use("t2"), "tool_use"),
    claude_user("r2", "a3", [tool_result("t2", [text("two"), {"type": "image", "source": {}}])]),
    claude_answer("a4", "r2", "m2", text("done"), "end_turn"),
    claude_user("u2", "a4", "once more"),
    claude_answer("a5", "u2", "m3", text("again"), "end_turn"),
    claude_user("u3", "a4", "something else"),
    claude_event("at", "u3", "attachment", attachment={"type": "todo", "content": "no todos"}),
    claude_answer("a6", "at", "m4", text("fine"), "end_turn"),
    claude_user("s1", None, "count", isSidechain=True),
    claude_answer("s2", "s1", "m5", text("3"), "end_turn"),
    claude_event("c", "a6", "system", subtype="compact_boundary"),
    claude_user("u4", "c", SUMMARY, isCompactSummary=True),
    claude_answer("a7", "u4", "m6", text("ok"), "end_turn"),
    claude_user("u5", "a7", "never answered"),
    {"type": "summary", "summary": "s", "leafUuid": "a7"},
]


def codex_line(kind: str, **payload: Any) -> Row:
    return {"type": kind, "payload": payload}


def codex_message(role: str, value: str) -> Row:
    kind = "output_text" if role == "assistant" else "input_text"
    return codex_line("response_item", type="message", role=role, content=[{"type": kind, "text": value}])


CODEX_SUMMARY = {"type": "compaction", "encrypted_content": "x"}
# Calls of two kinds, items and events that are left out, and two compactions.
CODEX = [
    codex_line("session_meta", id="c1", instructions=None, base_instructions={"text": "Be brief."}),
    codex_line("turn_context", model="m"),
    codex_message("user", "look"),
    codex_line("event_msg", type="user_message", message="look"),
    codex_line("response_item", type="reasoning", summary=[], encrypted_content="x"),
    codex_line("response_item", type="function_call", name="ls", arguments="{}", call_id="c1"),
    codex_line("response_item", type="function_call_output", call_id="c1", output="one"),
    codex_line("event_msg", type="token_count", info={"last_token_usage": {"input_tokens": 500}}),
    codex_line("response_item", type="local_shell_call", call_id="c2", action={"command": ["ls"]}),
    codex_line("response_item", type="local_shell_call_output", call_id="c2", output="two"),
    codex_line("response_item", type="web_search_call", id="w"),
    codex_message("assistant", "done"),
    codex_line("compacted", message="You looked."),
    codex_message("user", "and again"),
    codex_message("assistant", "again"),
    codex_line("compacted", replacement_history=[{"role": "user", "content": "kept"}, CODEX_SUMMARY]),
    codex_message("user", "more"),
    codex_message("assistant", "ok"),
]


def pi_event(identifier: str, parent: str | None, message: Row) -> Row:
    return {"type": "message", "id": identifier, "parentId": parent, "message": message}


def pi_answer(*blocks: Row, stop: str = "stop") -> Row:
    usage = {"input": 10, "output": 5, "cacheRead": 300, "cacheWrite": 0}
    return {"role": "assistant", "content": list(blocks), "stopReason": stop, "usage": usage}


PI_CALL = {"type": "toolCall", "id": "t", "name": "ls", "arguments": {}}
# A call, a fork of the answer to its result, and a compaction that keeps the last answer.
PI = [
    {"type": "session", "id": "p", "cwd": "/"},
    pi_event("1", None, {"role": "user", "content": "look"}),
    pi_event("2", "1", pi_answer(PI_CALL, stop="toolUse")),
    pi_event("3", "2", {"role": "toolResult", "toolCallId": "t", "toolName": "ls", "content": [text("one")]}),
    pi_event("4", "3", pi_answer(text("done"))),
    pi_event("5", "3", pi_answer({"type": "thinking", "thinking": "hm"}, text("nothing"))),
    {"type": "compaction", "id": "6", "parentId": "5", "summary": "Looked.", "firstKeptEntryId": "5"},
    pi_event("7", "6", {"role": "user", "content": [text("more")]}),
    pi_event("8", "7", pi_answer(text("ok"))),
    {"type": "model_change", "id": "9", "parentId": "8", "modelId": "m"},
]


def openhands_action(number: int, action: str, source: str = "agent", **args: Any) -> Row:
    return {"id": number, "source": source, "action": action, "args": args}


def openhands_result(number: int, cause: int, content: str, **fields: Any) -> Row:
    return {"id": number, "observation": "run", "content": content, "cause": cause} | fields


def openhands_calls(identifier: str, *calls: str) -> Row:
    functions = [{"id": c, "function": {"name": "run", "arguments": "{}"}} for c in calls]
    message = {"role": "assistant", "content": "go", "tool_calls": functions, "function_call": None}
    choice = {"message": message, "finish_reason": "tool_calls"}
    return {"tool_call_metadata": {"model_response": {"id": identifier, "choices": [choice]}}}


OPENHANDS_TOOL = {"type": "function", "function": {"name": "run"}}
# An answer with two calls, an action without a response, and a condensation.
OPENHANDS = [
    openhands_action(0, "system", content="Be brief.", tools=[OPENHANDS_TOOL]),
    openhands_action(1, "message", "user", content="look"),
    {"id": 2, "source": "environment", "observation": "agent_state_changed", "content": ""},
    openhands_action(3, "run") | openhands_calls("m1", "t1", "t2"),
    openhands_action(4, "run") | openhands_calls("m1", "t1", "t2"),
    openhands_result(5, 3, "one", tool_call_metadata={"tool_call_id": "t1", "function_name": "run"}),
    openhands_result(6, 4, "two", tool_call_metadata={"tool_call_id": "t2", "function_name": "run"}),
    openhands_action(7, "read", path="a", thought="the file"),
    openhands_result(8, 7, "text"),
    openhands_action(
        9, "condensation", forgotten_event_ids=[3, 4, 5, 6], summary="Ran it.", summary_offset=2
    ),
    openhands_action(10, "message", content="done"),
]


def openhands_event(name: str, kind: str, source: str = "agent", **fields: Any) -> Row:
    return {"id": name, "kind": kind, "source": source} | fields


def openhands_newer_action(name: str, identifier: str, response: str, thought: str = "") -> Row:
    made = {"id": identifier, "name": "run", "arguments": "{}", "origin": "completion"}
    fields = {"tool_name": "run", "tool_call_id": identifier, "tool_call": made, "llm_response_id": response}
    return openhands_event(
        name, "ActionEvent", thought=[text(thought)], action={"kind": "RunAction"}, **fields
    )


def openhands_newer_result(name: str, identifier: str, value: str) -> Row:
    fields = {"tool_name": "run", "tool_call_id": identifier}
    observation = {"content": [text(value)], "is_error": False, "kind": "RunObservation"}
    return openhands_event(name, "ObservationEvent", "environment", observation=observation, **fields)


# Events of version 1: an answer with two calls, and a condensation.
OPENHANDS_NEWER = [
    openhands_event("e0", "SystemPromptEvent", system_prompt=text("Be brief."), tools=[{"title": "run"}]),
    openhands_event("e1", "MessageEvent", "user", llm_message={"role": "user", "content": [text("look")]}),
    openhands_event("e2", "ConversationStateUpdateEvent", "environment", key="x", value="y"),
    openhands_newer_action("e3", "t1", "m1", "go"),
    openhands_newer_action("e4", "t2", "m1"),
    openhands_newer_result("e5", "t1", "one"),
    openhands_newer_result("e6", "t2", "two"),
    openhands_event(
        "e7",
        "Condensation",
        forgotten_event_ids=["e3", "e4", "e5", "e6"],
        summary="Ran it.",
        summary_offset=2,
    ),
    openhands_event("e8", "MessageEvent", llm_message={"role": "assistant", "content": [text("done")]}),
]


def turns(messages: list[Row]) -> list[str]:
    """Returns role and text of each message; * marks an answer that is not trained, ! a call."""
    return [
        ("*" if message.get("weight") == 0 else "")
        + f"{message['role']}: {message['content']}"
        + "".join(f" !{call['id']}" for call in message.get("tool_calls", ()))
        for message in messages
    ]


def read(file: str | Path) -> tuple[list[tuple[int | None, list[str]]], dict[str, int]]:
    """Returns the trajectories of the only record as (prompt tokens, turns), and what was left out."""
    skipped: Counter[str] = Counter()
    ((_, record),) = read_records(str(file), skipped=skipped)
    trajectories = record["trajectories"]
    assert [t["rollout_id"] for t in trajectories] == [record["id"]] * len(trajectories)
    return [(t["prompt_tokens"], turns(t["messages"])) for t in trajectories], dict(skipped)
