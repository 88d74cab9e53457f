"""Sessions of Pi: JSON Lines whose events name the event before them in ``parentId``."""

from __future__ import annotations

from collections.abc import Iterator

from titan_tree.data.readers import Record, Source
from titan_tree.data.readers.chat import Message, assistant_messages, call, marked, text_of
from titan_tree.data.readers.harnesses.sessions import (
    Event,
    SessionReader,
    as_text,
    context,
    count_tokens,
    without_media,
)
from titan_tree.data.readers.row_reader import expect
from titan_tree.errors import UserError, errors_at

STOPS = {"toolUse": "tool_use"}  # marks that are spelled in another way than elsewhere
SUMMARIES = ("compaction", "branch_summary")


class PiReader(SessionReader):
    """Reads {"type": "message", "id", "parentId", "message": {"role", "content"}} and summaries, one a line.

    After a compaction, the context is its summary, the messages from ``firstKeptEntryId`` on, and those that
    follow. It is a root, in which the kept answers are not trained again. The system prompt and the tool
    schemas are not in the file.
    """

    def recognizes_row(self, row: Record) -> bool:
        return "parentId" in row and "id" in row and isinstance(row.get("type"), str)

    def events(self, rows: Iterator[tuple[str, Record]], source: Source) -> list[Event]:
        events: dict[str, Event] = {}  # parents precede children, because the file is only appended to
        above: dict[Event, Event | None] = {}  # the event before a compaction, too
        for place, row in rows:
            identifier, parent = row.get("id"), row.get("parentId")
            try:
                with errors_at(place):
                    if row.get("type") not in ("message", "custom_message", *SUMMARIES):
                        source.skipped[as_text(row.get("type"))[:40]] += 1
                        messages: list[Message] = []
                    else:
                        messages = _messages(row, source)
            except UserError as error:
                source.skip_broken(error)
                messages = []
            before = events.get(parent) if isinstance(parent, str) else None
            if parent is not None and before is None:
                source.skipped["missing parent"] += 1
            message = row.get("message")
            usage = message.get("usage") if isinstance(message, dict) else None
            event = Event(before, messages, count_tokens(usage, "input", "cacheRead", "cacheWrite"))
            above[event] = before
            if row.get("type") == "compaction":
                event.parent = None
                first = events.get(str(row.get("firstKeptEntryId")))
                event.messages = messages + context(_kept(before, first, above))
            if isinstance(identifier, str):
                events[identifier] = event
        return list(above)


def _kept(last: Event | None, first: Event | None, above: dict[Event, Event | None]) -> list[Message]:
    """Returns the messages from one event to another below it; none if the first is not above the last."""
    kept: list[Event] = []
    while last is not None:
        kept.append(last)
        if last is first:
            return [message for event in reversed(kept) for message in event.messages]
        last = above[last]
    return []


def _messages(row: Record, source: Source) -> list[Message]:
    kind = row["type"]
    if kind in SUMMARIES:
        return [{"role": "user", "content": expect(row.get("summary"), str, "summary", "a string")}]
    said = row if kind == "custom_message" else row.get("message")
    message = expect(said, dict, "message", "an object with role and content")
    role = "user" if kind == "custom_message" else message.get("role")
    content = without_media(message.get("content"), source)
    if role == "assistant":
        return _answer(message, content, source)
    if role == "toolResult":
        result = {"role": "tool", "content": text_of(content, "message.content")}
        if isinstance(name := message.get("toolName"), str):
            result["name"] = name
        return [{**result, "tool_call_id": message.get("toolCallId")}]
    if role == "user":
        return [{"role": "user", "content": text_of(content, "message.content")}]
    source.skipped[f"message of role {as_text(role)[:40]}"] += 1
    return []


def _answer(message: Message, content: object, source: Source) -> list[Message]:
    parts: list[tuple[str, object]] = []
    blocks = content if isinstance(content, list) else [{"type": "text", "text": content}]
    for index, block in enumerate(blocks):
        where = f"message.content[{index}]"
        block = expect(block, dict, where, "a content block")
        kind = block.get("type")
        if kind == "text":
            parts.append(("text", text_of([block], where)))
        elif kind == "thinking":
            parts.append(("reasoning", expect(block.get("thinking"), str, f"{where}.thinking", "a string")))
        elif kind == "toolCall":
            parts.append(("call", call(block.get("name"), block.get("arguments"), block.get("id"))))
        else:
            source.skipped[f"block {as_text(kind)[:40]}"] += 1
    mark = message.get("stopReason")
    answer = assistant_messages(parts) or [{"role": "assistant", "content": ""}]
    return marked(answer, STOPS.get(str(mark), mark), "message.stopReason")
