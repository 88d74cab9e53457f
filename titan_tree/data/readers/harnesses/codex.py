"""Sessions of the Codex CLI: ~/.codex/sessions/YYYY/MM/DD/rollout-*.jsonl."""

from __future__ import annotations

import json
from collections.abc import Iterator

from titan_tree.data.readers import Record, Source
from titan_tree.data.readers.chat import Message
from titan_tree.data.readers.harnesses.sessions import (
    Event,
    SessionReader,
    as_text,
    context,
    count_tokens,
    without_media,
)
from titan_tree.data.readers.openai_responses import OpenAIResponsesReader
from titan_tree.data.readers.row_reader import expect
from titan_tree.errors import UserError, errors_at

OUTPUTS = ("function_call_output", "custom_tool_call_output", "local_shell_call_output")
LINES = ("session_meta", "turn_context", "response_item", "event_msg", "compacted")
ITEMS = ("message", "reasoning", "function_call", "custom_tool_call", *OUTPUTS[:2])


class CodexReader(SessionReader):
    """Reads {"timestamp", "type", "payload"} lines: items of OpenAI's Responses API in ``response_item``.

    ``event_msg`` repeats the items for display. ``compacted`` replaces the history; what follows is a root.
    Reasoning is mostly encrypted and then left out. The system prompt is ``base_instructions`` of
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
        root: list[Message] = []  # messages before ``items`` of which nothing is trained
        prompt_tokens: int | None = None

        def end_history() -> None:
            """Makes the events of one history: a root, and its messages."""
            nonlocal items, prompt_tokens
            event = Event(None, [*system, *root])
            events.append(event)
            for message in responses.messages(items, "items"):
                event = Event(event, [message], prompt_tokens)
                events.append(event)
            items, prompt_tokens = [], None

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
                        history = payload.get("replacement_history")
                        if history is None:
                            history = [_text_item("user", payload.get("message"))]
                        kept = [
                            item
                            for entry in expect(history, list, "replacement_history", "a list of items")
                            if (item := _item(expect(entry, dict, "replacement_history", "items"), source))
                        ]
                        root = context(responses.messages(kept, "replacement_history"))
                        continue
                    if kind == "session_meta" and not system:
                        base = payload.get("base_instructions")
                        if isinstance(base, dict) and isinstance(base.get("text"), str):
                            system = [{"role": "system", "content": base["text"]}]
                    if prompt_tokens is None:
                        prompt_tokens = _prompt_tokens(payload)
                    source.skipped[as_text(kind)[:40]] += 1
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
        source.skipped[f"item {as_text(kind)[:40]}"] += 1
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


def _text_item(role: str, text: object) -> Record:
    return {"type": "message", "role": role, "content": expect(text, str, "message", "a string")}


def _prompt_tokens(payload: Record) -> int | None:
    """Returns the tokens of the last prompt, if the payload is an event that counts tokens."""
    info = payload.get("info") if payload.get("type") == "token_count" else None
    return count_tokens(info.get("last_token_usage"), "input_tokens") if isinstance(info, dict) else None
