"""Sessions of Pi: JSON Lines whose events name the event before them in ``parentId``, or follow it."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from titan_tree.data.readers import Record, Source
from titan_tree.data.readers.chat import Message, assistant_messages, call, marked, text_of
from titan_tree.data.readers.harnesses.sessions import (
    FORKED,
    Event,
    SessionReader,
    as_text,
    context,
    count_tokens,
    leave_out,
    orphaned,
    without_media,
)
from titan_tree.data.readers.row_reader import expect, warn_once
from titan_tree.errors import UserError, errors_at

STOPS = {"toolUse": "tool_use"}  # marks that are spelled in another way than elsewhere
SUMMARIES = {  # how Pi shows the model a summary: the text before and after it
    "compaction": (
        "The conversation history before this point was compacted into the following summary:\n\n<summary>\n",
        "\n</summary>",
    ),
    "branch_summary": (
        "The following is a summary of a branch that this conversation came back from:\n\n<summary>\n",
        "</summary>",
    ),
}
FAILED = ("error", "aborted")  # how answers ended that Pi does not show the model again
NEUTRAL = ("session", "model_change", "thinking_level_change", "custom", "label", "session_info")


class PiReader(SessionReader):
    """Reads {"type": "message", "id", "parentId", "message": {"role", "content"}} and summaries, one a line.

    In the first version of the format, events have no ids, and each follows that of the line before. After a
    compaction, the context is its summary, the messages from ``firstKeptEntryId`` or ``firstKeptEntryIndex``
    on, and those that follow. It is a root, in which the kept answers are not trained again. Answers that
    failed or were aborted are trained as cut off, and are not in the context of later ones. The system
    prompt and the tool schemas are not in the file.
    """

    def recognizes_row(self, row: Record) -> bool:
        if row.get("type") == "message" and "parentId" not in row:
            message = row.get("message")
            return isinstance(message, dict) and "role" in message and "timestamp" in row
        return "parentId" in row and "id" in row and isinstance(row.get("type"), str)

    def events(self, rows: Iterator[tuple[str, Record]], source: Source) -> list[Event]:
        events: dict[str, Event] = {}  # parents precede children, because the file is only appended to
        above: dict[Event, Event | None] = {}  # the event before a compaction, too
        compactions = set[Event]()
        for place, row in rows:
            last = next(reversed(above), None)
            identifier, parent = row.get("id"), row.get("parentId")
            try:
                with errors_at(place):
                    if row.get("type") not in ("message", "custom_message", *SUMMARIES):
                        leave_out(source, row.get("type"), NEUTRAL)
                        if (forked := row.get("parentSession") or row.get("branchedFrom")) is not None:
                            warn_once(source.path, FORKED.format(as_text(forked)))
                        messages: list[Message] = []
                    else:
                        messages = _messages(row, source)
            except UserError as error:
                source.skip_broken(error)
                messages = []
            before = events.get(parent) if isinstance(parent, str) else None
            if "parentId" not in row:
                before = last
            if parent is not None and before is None:
                orphaned(source)
            message = row.get("message")
            usage = message.get("usage") if isinstance(message, dict) else None
            shown = before
            while shown is not None and _has_failed(shown):
                shown = shown.parent
            event = Event(shown, messages, count_tokens(usage, "input", "cacheRead", "cacheWrite"))
            above[event] = before
            if row.get("type") == "compaction":
                compactions.add(event)
                event.parent = None
                first = events.get(str(row.get("firstKeptEntryId")))
                if type(index := row.get("firstKeptEntryIndex")) is int:
                    first = next(islice(above, max(index, 0), None), None)
                kept = [e for e in _events_from(first, before, above) if e not in compactions]
                event.messages = messages + context(
                    [m for e in kept if not _has_failed(e) for m in e.messages]
                )
            if isinstance(identifier, str):
                events[identifier] = event
        return list(above)


def _events_from(first: Event | None, last: Event | None, above: dict[Event, Event | None]) -> list[Event]:
    """Returns the events from one to another below it; none if the first is not above the last."""
    events: list[Event] = []
    while last is not None:
        events.append(last)
        if last is first:
            return events[::-1]
        last = above[last]
    return []


def _has_failed(event: Event) -> bool:
    return any(message.get("finish_reason") in FAILED for message in event.messages)


def _messages(row: Record, source: Source) -> list[Message]:
    kind = row["type"]
    if kind in SUMMARIES:
        before, after = SUMMARIES[kind]
        summary = expect(row.get("summary"), str, "summary", "a string")
        is_shown = summary or kind == "compaction"
        return [{"role": "user", "content": f"{before}{summary}{after}"}] if is_shown else []
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
    if role == "bashExecution":
        return [] if message.get("excludeFromContext") else [{"role": "user", "content": _command(message)}]
    if role in ("user", "custom", "hookMessage"):
        return [{"role": "user", "content": text_of(content, "message.content")}]
    leave_out(source, role, (), "message of role ")
    return []


def _command(message: Message) -> str:
    """Returns the text by which Pi shows the model a command that the user ran."""
    output = message.get("output")
    text = f"Ran `{message.get('command')}`\n" + (f"```\n{output}\n```" if output else "(no output)")
    if message.get("cancelled"):
        text += "\n\n(command cancelled)"
    elif code := message.get("exitCode"):
        text += f"\n\nCommand exited with code {code}"
    if message.get("truncated") and (path := message.get("fullOutputPath")):
        text += f"\n\n[Output truncated. Full output: {path}]"
    return text


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
            leave_out(source, kind, (), "block ")
    mark = message.get("stopReason")
    answer = assistant_messages(parts) or [{"role": "assistant", "content": ""}]
    return marked(answer, STOPS.get(str(mark), mark), "message.stopReason")
