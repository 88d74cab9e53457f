"""Sessions of Claude Code: ~/.claude/projects/PROJECT/SESSION.jsonl."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titan_tree.data.readers import Record, Source
from titan_tree.data.readers.anthropic import BLOCKS, AnthropicReader
from titan_tree.data.readers.harnesses.sessions import (
    MEDIA,
    Event,
    SessionReader,
    as_text,
    count_tokens,
    without_media,
)
from titan_tree.data.readers.row_reader import expect
from titan_tree.errors import UserError, errors_at

CONTINUED = "This session is being continued from a previous conversation"
PROMPT_COUNTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
KNOWN_BLOCKS = ("text", *BLOCKS, *MEDIA)


@dataclass(eq=False)
class _Message:
    """A message of the API: one line, the lines of one answer, or the results of an answer's calls."""

    place: str
    uuid: str  # of its first line
    role: str
    blocks: list[Record]  # its content
    stop_reason: object = None
    is_root: bool = False  # whether nothing before it is in the prompt
    prompt_tokens: int | None = None

    @property
    def results(self) -> set[str]:
        """The ids of the calls whose results the message has; empty if it has something else, too."""
        if any(block.get("type") != "tool_result" for block in self.blocks):
            return set()
        return {str(block.get("tool_use_id")) for block in self.blocks}


class ClaudeCodeReader(SessionReader):
    """Reads one event per line, with ``uuid``, ``parentUuid``, ``type`` and perhaps a ``message``.

    Lines with one ``message.id`` are one answer. The results of its parallel calls, which the file attaches
    to different lines of the answer, follow it in one conversation. An ``attachment`` is text of the user.
    The summary after a compaction is a root. Messages that Claude Code wrote in the model's place, such as
    errors of the API, are left out. The system prompt and the tool schemas are not in the file.
    """

    def recognizes_row(self, row: Record) -> bool:
        return ("parentUuid" in row and "sessionId" in row) or (
            row.get("type") == "summary" and "leafUuid" in row
        )

    def events(self, rows: Iterator[tuple[str, Record]], source: Source) -> list[Event]:
        parents: dict[str, str | None] = {}  # of all lines with an id
        messages: dict[str, _Message] = {}  # by the ids of their lines
        answers: dict[str, _Message] = {}  # by the ids of the API
        for place, row in rows:
            uuid = row.get("uuid")
            if isinstance(uuid, str):
                if uuid in parents:
                    source.skipped["repeated event"] += 1
                    continue
                parents[uuid] = None
            try:
                with errors_at(place):
                    if isinstance(uuid, str) and row.get("parentUuid") is not None:
                        parents[uuid] = expect(row["parentUuid"], str, "parentUuid", "the name of an event")
                    if (kind := _without_message(row)) is not None:
                        source.skipped[kind] += 1
                        continue
                    message, identifier = _message(place, row, source)
            except UserError as error:
                source.skip_broken(error)
                continue
            if identifier is not None and (answer := answers.setdefault(identifier, message)) is not message:
                answer.blocks += message.blocks
                answer.stop_reason = message.stop_reason or answer.stop_reason
                message = answer
            messages[message.uuid if uuid is None else str(uuid)] = message
        return _events(messages, parents, source)


def _without_message(row: Record) -> str | None:
    """Returns what a row without a message of a conversation is, or None for one with a message."""
    kind, message = row.get("type"), row.get("message")
    if row.get("isApiErrorMessage") or (
        kind == "assistant" and isinstance(message, dict) and message.get("model") == "<synthetic>"
    ):
        return "message of Claude Code itself"
    return None if kind in ("user", "assistant", "attachment") else as_text(kind)[:40]


def _message(place: str, row: Record, source: Source) -> tuple[_Message, str | None]:
    """Returns the message of a row, and for an answer the id that the API gave it."""
    uuid = expect(row.get("uuid"), str, "uuid", "the name of the event")
    if row["type"] == "attachment":
        attachment = row.get("attachment")
        content = attachment.get("content") if isinstance(attachment, dict) else None
        text = content if isinstance(content, str) else as_text(attachment)
        return _Message(place, uuid, "user", [{"type": "text", "text": text}]), None
    message = expect(row.get("message"), dict, "message", "an object with role and content")
    blocks: list[Record] = []
    content = without_media(message.get("content"), source)
    for block in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        block = expect(block, dict, "message.content", "text or blocks")
        if block.get("type") in KNOWN_BLOCKS:
            blocks.append(block)
        else:
            source.skipped[f"block {as_text(block.get('type'))[:40]}"] += 1
    result = _Message(place, uuid, row["type"], blocks)
    if row["type"] == "user":
        first = blocks[0].get("text") if blocks else None
        is_continued = isinstance(first, str) and first.startswith(CONTINUED)
        result.is_root = bool(row.get("isCompactSummary")) or is_continued
        return result, None
    result.stop_reason = message.get("stop_reason")
    result.prompt_tokens = count_tokens(message.get("usage"), *PROMPT_COUNTS)
    identifier = message.get("id")
    return result, identifier if isinstance(identifier, str) else None


def _events(messages: dict[str, _Message], parents: dict[str, str | None], source: Source) -> list[Event]:
    """Returns the events of the messages, depth first.

    Raises:
        UserError: an event is its own ancestor.
    """
    following: dict[_Message | None, list[_Message]] = defaultdict(list)
    distinct = list(dict.fromkeys(messages.values()))
    for message in distinct:
        following[_before(message, messages, parents, source)].append(message)
    events, names = [], dict[object, object]()
    reader = AnthropicReader()
    reader.path = source.path
    waiting: list[tuple[_Message, Event | None]] = [(root, None) for root in reversed(following[None])]
    num_joined = 0
    while waiting:
        message, parent = waiting.pop()
        event = Event(parent, prompt_tokens=message.prompt_tokens)
        content = {"role": message.role, "content": message.blocks, "stop_reason": message.stop_reason}
        try:
            with errors_at(message.place):
                event.messages = reader.messages(content, names, "message")
        except UserError as error:
            source.skip_broken(error)
        events.append(event)
        children = _joined_results(following[message], following)
        num_joined += len(following[message]) - len(children)
        waiting += [(child, event) for child in reversed(children)]
    if len(events) + num_joined < len(distinct):
        raise UserError(f"{source.path}: parentUuid: expected a tree of events, got a cycle")
    return events


def _before(
    message: _Message, messages: dict[str, _Message], parents: dict[str, str | None], source: Source
) -> _Message | None:
    """Returns the message before one: that of the nearest line above it that has a message."""
    uuid = None if message.is_root else parents[message.uuid]
    for _ in range(len(parents) + 1):
        if uuid is None:
            return None
        if (before := messages.get(uuid)) is not None:
            return before
        if uuid not in parents:
            source.skipped["missing parent"] += 1
            return None
        uuid = parents[uuid]
    raise UserError(f"{message.place}: parentUuid: expected a tree of events, got a cycle")


def _joined_results(
    children: Sequence[_Message], following: dict[_Message | None, list[_Message]]
) -> list[_Message]:
    """Returns the messages that follow an answer, with the results of different calls in one message."""
    joined: list[_Message] = []
    group: _Message | None = None  # the results so far, and the ids of their calls
    known = set[str]()
    for child in children:
        results = child.results
        if group is not None and results and not results & known:
            group.blocks = group.blocks + child.blocks
            following[group] = following[group] + following[child]
        else:
            joined.append(child)
            group = group or (child if results else None)
        known |= results
    return joined
