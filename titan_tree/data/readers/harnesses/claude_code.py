"""Sessions of Claude Code: ~/.claude/projects/PROJECT/SESSION.jsonl."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from titan_tree.data.readers import Record, Source
from titan_tree.data.readers.anthropic import BLOCKS, AnthropicReader
from titan_tree.data.readers.chat import Message
from titan_tree.data.readers.harnesses.sessions import (
    FORKED,
    MEDIA,
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

CONTINUED = "This session is being continued from a previous conversation"
PROMPT_COUNTS = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
KNOWN_BLOCKS = ("text", *BLOCKS, *MEDIA)
COMMAND = "system local_command"  # its output, which the model reads as a text of the user
CLEARED = "[Old tool result content cleared]"  # in place of a result that a microcompaction removed
# Kinds of lines, and subtypes of "system", that cannot change a prompt. A compaction is read.
NEUTRAL = (
    "summary", "progress", "file-history-snapshot", "file-history-delta", "queue-operation", "mode", "tag",
    "permission-mode", "custom-title", "ai-title", "last-prompt", "agent-name", "agent-color",
    "agent-setting", "pr-link", "worktree-state", "attribution-snapshot", "task-summary", "system",
    "message of Claude Code itself", "system compact_boundary", "system snip_boundary",
    "system microcompact_boundary", "system api_error", "system informational", "system stop_hook_summary",
    "system turn_duration", "system api_metrics", "system away_summary", "system bridge_status",
    "system memory_saved", "system permission_retry", "system agents_killed", "system thinking",
    "system scheduled_task_fire",
)  # fmt: skip


_files: dict[tuple[str, str | None], str] = {}  # the file in which this process found an answer first


@dataclass(eq=False)
class _Message:
    """A message of the API: one line, the lines of one answer, or the results of an answer's calls.

    It may also repeat a message that a compaction kept, or change the messages before it.
    """

    place: str
    uuid: str  # of its first line
    role: str
    blocks: list[Record]  # its content
    stop_reason: object = None
    is_root: bool = False  # whether nothing before it is in the prompt
    prompt_tokens: int | None = None
    answer: tuple[str, str | None] | None = None  # the ids of the answer and of its request, if it has one
    repeats: _Message | None = None  # the message that it repeats as context
    removes: Sequence[object] = ()  # ids of lines before it that the prompt has no more
    clears: Sequence[object] = ()  # ids of calls before it whose results the prompt has no more

    @property
    def results(self) -> set[str]:
        """The ids of the calls whose results the message has; empty if it has something else, too."""
        if any(block.get("type") != "tool_result" for block in self.blocks):
            return set()
        return {str(block.get("tool_use_id")) for block in self.blocks}


class ClaudeCodeReader(SessionReader):
    """Reads one event per line, with ``uuid``, ``parentUuid``, ``type`` and perhaps a ``message``.

    Lines with one ``message.id`` that follow each other are one answer. The results of its parallel calls,
    which the file attaches to different lines of the answer, follow it in one conversation. An ``attachment``
    is text of the user. The summary after a compaction is a root, which the messages that the compaction kept
    follow. A line that removes messages or results from the prompt (a snip, a microcompaction) is a root with
    the others. Messages that Claude Code wrote in the model's place, such as errors of the API, are left out.
    The system prompt and the tool schemas are not in the file.
    """

    def recognizes_row(self, row: Record) -> bool:
        return ("parentUuid" in row and "sessionId" in row) or (
            row.get("type") == "summary" and "leafUuid" in row
        )

    def events(self, rows: Iterator[tuple[str, Record]], source: Source) -> list[Event]:
        parents: dict[str, str | None] = {}  # of all lines with an id
        messages: dict[str, _Message] = {}  # by the ids of their lines
        compactions: list[tuple[str, Record]] = []  # each with its place
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
                    if isinstance(forked := row.get("forkedFrom"), dict):
                        warn_once(source.path, FORKED.format(as_text(forked.get("sessionId"))))
                    if (kind := _without_message(row)) is not None:
                        leave_out(source, kind, NEUTRAL)
                        if kind == "system compact_boundary":
                            compactions.append((place, row))
                        elif (change := _change(place, row)) is not None:
                            messages[change.uuid] = change
                        continue
                    message = _message(place, row, source)
            except UserError as error:
                source.skip_broken(error)
                continue
            messages[message.uuid] = message
        for parent in parents.values():
            if parent is not None and parent not in parents:
                orphaned(source)
        _join_lines(messages, parents)
        for answer in {message.answer for message in messages.values()}:
            if answer is None or answer[1] is None:  # gateways give no id of the request
                continue
            if (other := _files.setdefault(answer, source.path)) != source.path:
                warn_once(source.path, FORKED.format(other))
        for place, row in compactions:
            try:
                with errors_at(place):
                    _keep_messages(row, place, messages, parents)
            except UserError as error:
                source.skip_broken(error)
        return _events(messages, parents, source)


def _without_message(row: Record) -> str | None:
    """Returns what a row without a message of a conversation is, or None for one with a message."""
    kind, message = row.get("type"), row.get("message")
    if row.get("isApiErrorMessage") or (
        kind == "assistant" and isinstance(message, dict) and message.get("model") == "<synthetic>"
    ):
        return "message of Claude Code itself"
    if kind == "system" and row.get("subtype") is not None:
        kind = f"system {row['subtype']}"
    return None if kind in ("user", "assistant", "attachment", COMMAND) else as_text(kind)


def _message(place: str, row: Record, source: Source) -> _Message:
    """Returns the message of a row."""
    uuid = expect(row.get("uuid"), str, "uuid", "the name of the event")
    if row["type"] in ("attachment", "system"):
        attachment = row.get("attachment", row)
        content = attachment.get("content") if isinstance(attachment, dict) else None
        text = content if isinstance(content, str) else as_text(attachment)
        return _Message(place, uuid, "user", [{"type": "text", "text": text}])
    message = expect(row.get("message"), dict, "message", "an object with role and content")
    blocks: list[Record] = []
    content = without_media(message.get("content") or [], source)
    for block in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        block = expect(block, dict, "message.content", "text or blocks")
        if block.get("type") in KNOWN_BLOCKS:
            blocks.append(block)
        else:
            leave_out(source, block.get("type"), (), "block ")
    result = _Message(place, uuid, row["type"], blocks)
    if row["type"] == "user":
        first = blocks[0].get("text") if blocks else None
        is_continued = isinstance(first, str) and first.startswith(CONTINUED)
        result.is_root = bool(row.get("isCompactSummary")) or is_continued
        return result
    result.stop_reason = message.get("stop_reason")
    result.prompt_tokens = count_tokens(message.get("usage"), *PROMPT_COUNTS)
    if message.get("id") is not None:
        request = row.get("requestId")
        result.answer = as_text(message["id"]), None if request is None else as_text(request)
    return result


def _join_lines(messages: dict[str, _Message], parents: dict[str, str | None]) -> None:
    """Joins the lines of each answer, without those that repeat others.

    The lines follow each other, or results of the answer's calls, or the same message. Gateways may give one
    id to all answers: an answer to results has another prompt than the answer before them.
    """
    firsts: dict[object, _Message] = {}  # the first lines of answers, by the answer and the message before
    joins: dict[_Message, _Message] = {}
    for message in messages.values():
        if message.answer is None:
            continue
        before = above = _before(message, messages, parents)
        while above is not None and above.results:
            above = _before(above, messages, parents)
        if above is not None and above.answer == message.answer:
            if above is before or (message.prompt_tokens and message.prompt_tokens == above.prompt_tokens):
                joins[message] = above
        elif (first := firsts.setdefault((message.answer, before), message)) is not message:
            joins[message] = first
    for uuid, message in messages.items():
        answer = message
        while answer in joins:
            answer = joins[answer]
        if answer is not message:
            answer.blocks += [block for block in message.blocks if block not in answer.blocks]
            answer.stop_reason = message.stop_reason or answer.stop_reason
            messages[uuid] = answer


def _change(place: str, row: Record) -> _Message | None:
    """Returns what a line removes from the prompt of later answers, or None if it removes nothing."""
    found = [
        expect(expect(row.get(field) or {}, dict, field, "an object").get(name) or [], list, name, "a list")
        for field, name in (("snipMetadata", "removedUuids"), ("microcompactMetadata", "compactedToolIds"))
    ]
    if not any(found):
        return None
    uuid = expect(row.get("uuid"), str, "uuid", "the name of the event")
    return _Message(place, uuid, "user", [], removes=found[0], clears=found[1])


def _keep_messages(
    row: Record, place: str, messages: dict[str, _Message], parents: dict[str, str | None]
) -> None:
    """Adds copies of the messages that a compaction keeps, and moves what follows them behind the copies.

    Their lines stay as they are in the file, and lines after the compaction name them as their parents.
    The copies follow the anchor: the summary, or the boundary itself, whose summary then follows the copies.

    Raises:
        UserError: the file lacks a message that was kept.
    """
    metadata = expect(row.get("compactMetadata") or {}, dict, "compactMetadata", "an object")
    listed, segment = (
        expect(metadata.get(name) or {}, dict, f"compactMetadata.{name}", "an object")
        for name in ("preservedMessages", "preservedSegment")
    )
    if not listed and not segment:
        return
    boundary, anchor = str(row.get("uuid")), (segment or listed).get("anchorUuid")
    lines = expect(listed.get("uuids") or _segment(segment, parents), list, "uuids", "a list of events")
    if not all(isinstance(uuid, str) and uuid in parents for uuid in (boundary, anchor, *lines)):
        raise UserError(
            "compactMetadata: expected the messages that the compaction kept, but some are missing, so what "
            "later answers read is not known; remove the file"
        )
    copies: dict[object, str] = {}  # by line of the segment: the copy that the next message follows
    last = str(anchor)
    for uuid in lines:
        if (original := messages.get(uuid)) is not None and original.uuid not in copies:
            copy = _Message(place, f"{boundary}/{uuid}", original.role, [], repeats=original)
            messages[copy.uuid], parents[copy.uuid], last = copy, last, copy.uuid
        copies[uuid] = last
    copies[anchor] = last
    names = list(parents)
    for uuid in names[names.index(boundary) + 1 :]:
        is_copy = "/" in uuid  # of this compaction or of an earlier one
        parent = (parents[uuid] or "").rpartition("/")[2]
        if uuid not in copies and parent in copies and not is_copy:
            parents[uuid] = copies[parent]
            if uuid in messages:
                messages[uuid].is_root = False


def _segment(segment: Record, parents: dict[str, str | None]) -> list[object]:
    """Returns the ids of a segment's lines. The walk from the last one ends early if a parent is missing.

    A copy that an earlier compaction made counts as the line that it repeats.
    """
    line = segment.get("tailUuid")
    lines = [line]
    while isinstance(line, str) and line in parents and lines[-1] != segment.get("headUuid"):
        line = parents[line]
        lines.append(line and line.rpartition("/")[2])
        if len(lines) > len(parents):  # a cycle
            break
    return lines[::-1]


def _events(messages: dict[str, _Message], parents: dict[str, str | None], source: Source) -> list[Event]:
    """Returns the events of the messages, depth first.

    Raises:
        UserError: an event is its own ancestor.
    """
    following: dict[_Message | None, list[_Message]] = defaultdict(list)
    distinct = list(dict.fromkeys(messages.values()))
    for message in distinct:
        following[_before(message, messages, parents)].append(message)
    events, names = [], dict[object, object]()
    parts: dict[Event, list[tuple[_Message, list[Message]]]] = {}  # what each adds, by where it comes from
    made: dict[_Message, list[Message]] = {}
    joined: dict[_Message, _Message] = {}  # results -> the message that has them, too
    repeated = set[tuple[str, _Message]]()  # (compaction, message)
    reader = AnthropicReader()
    reader.path = source.path
    waiting: list[tuple[_Message, Event | None]] = [(root, None) for root in reversed(following[None])]
    while waiting:
        message, parent = waiting.pop()
        event = Event(parent, prompt_tokens=message.prompt_tokens)
        content = {"role": message.role, "content": message.blocks, "stop_reason": message.stop_reason}
        if message.removes or message.clears:
            event.parent, parts[event] = None, _changed(message, parent, parts, messages)
            event.messages = context([m for _, added in parts[event] for m in added])
        elif message.repeats is not None:
            original = joined.get(message.repeats, message.repeats)
            if (copy := (message.uuid.partition("/")[0], original)) not in repeated:
                event.messages = context(made.get(original, []))
                repeated.add(copy)
        else:
            try:
                with errors_at(message.place):
                    event.messages = reader.messages(content, names, "message")
            except UserError as error:
                source.skip_broken(error)
        made[message] = event.messages
        parts.setdefault(event, [(message.repeats or message, event.messages)])
        events.append(event)
        children = _joined_results(following[message], following, joined)
        waiting += [(child, event) for child in reversed(children)]
    if len(events) + len(joined) < len(distinct):
        raise UserError(f"{source.path}: parentUuid: expected a tree of events, got a cycle")
    return events


def _changed(
    change: _Message,
    last: Event | None,
    parts: dict[Event, list[tuple[_Message, list[Message]]]],
    messages: dict[str, _Message],
) -> list[tuple[_Message, list[Message]]]:
    """Returns the parts of the prompt up to the event ``last`` without what the change removes."""
    removed = {messages.get(str(uuid)) for uuid in change.removes}
    kept: list[tuple[_Message, list[Message]]] = []
    while last is not None:
        kept = [part for part in parts[last] if part[0] not in removed] + kept
        last = last.parent
    return [
        (origin, [{**m, "content": CLEARED} if m.get("tool_call_id") in change.clears else m for m in added])
        for origin, added in kept
    ]


def _before(
    message: _Message, messages: dict[str, _Message], parents: dict[str, str | None]
) -> _Message | None:
    """Returns the message before one: that of the nearest line above it that has a message.

    Raises:
        UserError: an event is its own ancestor.
    """
    uuid = None if message.is_root else parents[message.uuid]
    for _ in range(len(parents) + 1):
        if uuid is None:
            return None
        if (before := messages.get(uuid)) is not None:
            return before
        uuid = parents.get(uuid)
    raise UserError(f"{message.place}: parentUuid: expected a tree of events, got a cycle")


def _joined_results(
    children: Sequence[_Message],
    following: dict[_Message | None, list[_Message]],
    joined: dict[_Message, _Message],
) -> list[_Message]:
    """Returns the messages that follow an answer, with the results of different calls in one message.

    Messages that became a part of another one are added to ``joined``.
    """
    distinct: list[_Message] = []
    group: _Message | None = None  # the results so far, and the ids of their calls
    known = set[str]()
    for child in children:
        results = child.results
        if group is not None and results and not results & known:
            group.blocks = group.blocks + child.blocks
            following[group] = following[group] + following[child]
            joined[child] = group
        else:
            distinct.append(child)
            group = group or (child if results else None)
        known |= results
    return distinct
