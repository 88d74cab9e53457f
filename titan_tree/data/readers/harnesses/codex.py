"""Sessions of the Codex CLI: ~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterator

from titan_tree.data.readers import Record, Source
from titan_tree.data.readers.chat import Message, text_of
from titan_tree.data.readers.harnesses.sessions import (
    FORKED,
    Event,
    SessionReader,
    as_text,
    context,
    count_tokens,
    leave_out,
    without_media,
)
from titan_tree.data.readers.openai_responses import OpenAIResponsesReader
from titan_tree.data.readers.row_reader import expect, warn_once
from titan_tree.errors import UserError, errors_at

OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
LINES = ("session_meta", "turn_context", "response_item", "event_msg", "compacted")
ITEMS = ("message", "reasoning", "function_call", "custom_tool_call", *OUTPUTS[:2])
# Lines, their events and items that cannot change a prompt. Events mostly repeat items for display.
NEUTRAL = (
    "session_meta", "turn_context", "user_message", "agent_message", "agent_reasoning",
    "agent_reasoning_raw_content", "agent_reasoning_section_break", "token_count", "thread_goal_updated",
    "thread_name_updated", "thread_settings_applied", "context_compacted", "entered_review_mode",
    "exited_review_mode", "turn_aborted", "turn_started", "task_started", "turn_complete", "task_complete",
    "sub_agent_activity", "item_started", "item_completed", "exec_command_begin", "exec_command_end",
    "patch_apply_begin", "patch_apply_end", "mcp_tool_call_begin", "mcp_tool_call_end", "web_search_begin",
    "web_search_end", "image_generation_end", "view_image_tool_call", "dynamic_tool_call_request",
    "dynamic_tool_call_response", "plan_update", "turn_diff", "error", "stream_error", "warning",
    "background_event", "deprecation_notice", "session_configured", "undo_started", "undo_completed",
    "collab_agent_spawn_end", "collab_agent_interaction_end", "collab_waiting_end", "collab_close_end",
    "collab_resume_end", "guardian_assessment", "guardian_warning", "model_reroute", "ghost_snapshot",
)  # fmt: skip
# How texts begin that Codex wrote in the user's place. They begin no turn that a rollback counts.
NO_TURN = (
    "<environment_context>", "<user_instructions>", "# AGENTS.md instructions", "<turn_aborted>", "<skill>",
    "<user_shell_command>", "<subagent_notification>",
)  # fmt: skip
SHORT_SUMMARY = (
    "of a compaction, the file has the summary only; what Codex repeated of the user's messages beside it is "
    "missing in the context of the answers that follow"
)


class CodexReader(SessionReader):
    """Reads {"timestamp", "type", "payload"} lines: items of OpenAI's Responses API in ``response_item``.

    ``event_msg`` repeats the items for display, except for ``thread_rolled_back``: the last turns of the user
    are taken back, and what follows forks off before them. ``compacted`` replaces the history; what follows
    is a root. Reasoning is mostly encrypted and then left out. The system prompt is ``base_instructions`` of
    ``session_meta`` where the file has it. The tool schemas are not in the file.
    """

    def recognizes_row(self, row: Record) -> bool:
        return isinstance(row.get("payload"), dict) and row.get("type") in LINES

    def events(self, rows: Iterator[tuple[str, Record]], source: Source) -> list[Event]:
        responses = OpenAIResponsesReader()
        responses.path = source.path
        events: list[Event] = []
        system: list[Message] = []
        items: list[Record] = []
        root: list[Message] | None = None  # what a compaction left before ``items``; nothing of it is trained
        history: list[Event] = []  # the root, and the events of ``items`` up to the last rollback
        prompt_tokens: int | None = None

        def end_history(num_kept: int = 0) -> None:
            """Makes the events of the items, and drops all but the first ``num_kept`` items."""
            nonlocal items, history, prompt_tokens
            if not history:
                history = [Event(None, [*system, *(root or [])])]
                events.append(history[0])
            for message in responses.messages(items, "items")[len(history) - 1 :]:
                history.append(Event(history[-1], [message], prompt_tokens))
                events.append(history[-1])
            items, prompt_tokens = items[:num_kept], None
            history = history[: 1 + len(responses.messages(items, "items"))] if num_kept else []

        for place, row in rows:
            kind = row.get("type")
            try:
                with errors_at(place):
                    payload = expect(row.get("payload"), dict, "payload", "an object")
                    if kind == "response_item":
                        if (item := _item(payload, source)) is not None:
                            responses.messages([item], "payload")  # refuses a broken item here, with its line
                            items.append(item)
                        continue
                    if kind == "compacted":
                        end_history()
                        kept = _replacement(payload, source)
                        root = context(responses.messages(kept, "replacement_history"))
                        continue
                    if kind == "event_msg" and payload.get("type") == "thread_rolled_back":
                        end_history(_num_kept(items, payload, is_compacted=root is not None))
                        continue
                    if kind == "session_meta" and (forked := payload.get("forked_from_id")) is not None:
                        warn_once(source.path, FORKED.format(as_text(forked)))
                    if kind == "session_meta" and not system:
                        base = payload.get("base_instructions")
                        if isinstance(base, dict) and isinstance(base.get("text"), str):
                            system = [{"role": "system", "content": base["text"]}]
                    if prompt_tokens is None:
                        prompt_tokens = _prompt_tokens(payload)
                    if kind == "event_msg":
                        leave_out(source, payload.get("type"), NEUTRAL, "event ")
                    else:
                        leave_out(source, kind, NEUTRAL)
            except UserError as error:
                source.skip_broken(error)
        end_history()
        return events


def _item(payload: Record, source: Source) -> Record | None:
    """Returns an item in the form of the Responses API, or None for one that is not text."""
    kind = payload.get("type") or ("message" if "role" in payload else None)
    if kind == "local_shell_call":
        arguments = json.dumps(payload.get("action"), ensure_ascii=False)
        identifier = payload.get("call_id") or payload.get("id")
        return {"type": "function_call", "name": "local_shell", "arguments": arguments, "call_id": identifier}
    if kind == "local_shell_call_output":
        kind = "function_call_output"
    if kind not in ITEMS:
        leave_out(source, kind, NEUTRAL, "item ")
        return None
    item = {**payload, "type": kind}
    if kind in OUTPUTS:
        output = payload.get("output")
        if isinstance(output, dict):  # {"content", "success"}
            output = output.get("content")
        item["output"] = without_media(output, source) if isinstance(output, list) else as_text(output)
    elif kind == "message":
        item["content"] = without_media(payload.get("content"), source)
    return item


def _replacement(payload: Record, source: Source) -> list[Record]:
    """Returns the items that a compaction puts in place of the history."""
    replacement = payload.get("replacement_history")
    if replacement is None:
        warn_once(source.path, SHORT_SUMMARY)
        summary = expect(payload.get("message"), str, "message", "a string")
        return [{"type": "message", "role": "user", "content": summary}]
    entries = expect(replacement, list, "replacement_history", "a list of items")
    items = (_item(expect(entry, dict, "replacement_history", "items"), source) for entry in entries)
    return [item for item in items if item is not None]


def _num_kept(items: list[Record], payload: Record, is_compacted: bool) -> int:
    """Returns how many items a rollback of the last turns of the user leaves.

    Raises:
        UserError: it takes back a compaction, too.
    """
    number = expect(payload.get("num_turns"), int, "payload.num_turns", "an integer")
    turns = [index for index, item in enumerate(items) if item["type"] == "message" and _begins_turn(item)]
    if number > len(turns) and is_compacted:
        raise UserError(
            "payload.num_turns: the rollback takes back a compaction, too, so what later answers read is not "
            "known; remove the file"
        )
    return len(items) if number <= 0 or not turns else turns[max(len(turns) - number, 0)]


def _begins_turn(item: Record) -> bool:
    text = text_of(item.get("content"), "payload.content")
    return item.get("role") == "user" and not text.lstrip().startswith(NO_TURN)


def _prompt_tokens(payload: Record) -> int | None:
    """Returns the tokens of the last prompt, if the payload is an event that counts tokens."""
    info = payload.get("info") if payload.get("type") == "token_count" else None
    return count_tokens(info.get("last_token_usage"), "input_tokens") if isinstance(info, dict) else None
