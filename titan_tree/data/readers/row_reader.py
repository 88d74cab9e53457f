"""RowReader: the base class of readers in whose format every row is one record."""

from __future__ import annotations

import json
import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import TypeVar

from titan_tree.data.readers import Reader, Record, Source
from titan_tree.data.readers.strict_json import parse_text
from titan_tree.errors import UserError, count, errors_at, printable, shorten

T = TypeVar("T")
logger = logging.getLogger(__name__)
_warned: set[tuple[str, str]] = set()  # (file, message)

# Columns that may hold JSON text.
JSON_COLUMNS = (
    "messages", "tools", "functions", "trajectories", "conversations", "nodes", "triplets",
    "chat_template_kwargs",
)  # fmt: skip
NO_MEDIA = (
    "not read; give images as parts of messages or beside token ids (docs/images.md), or remove the row"
)
MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
PAIR_COLUMNS = ("chosen", "rejected")
TOOL_CHOICE = (
    "some requests restrict the choice of tools (tool_choice), and the samples show all tools; if the server "
    "left them out of the prompt, remove tools from these rows"
)
ANSWER_SCHEMA = (
    "some requests have a schema for their answer (response_format), which the samples leave out; if the "
    "server showed it to the model, add its text to the system message"
)
# Where rows of an API's log have the answer. ``convert`` takes it out of the row; elsewhere the name means
# something else, and the column stays.
ANSWER_COLUMNS = ("response", "choices", "output")
SAMPLED = "sampled"  # holds the token ids of an answer that the response records, until its group is known
TEXT_COLUMNS = ("messages", "tools", "turns")  # what the token ids hold
PREFERENCE_COLUMNS = (*PAIR_COLUMNS, "preferred_output", "non_preferred_output", "kto_tag")


class RowReader(Reader):
    """Reads a format in which every row is one record. Subclasses recognize and convert a row.

    Logs of an API rarely name groups. So calls without a ``group_id`` form a group if their messages agree up
    to the first one of the user: the samples and turns of one task. They may be anywhere in the file, and are
    held in memory until its end.
    """

    path = ""  # the file that is being read, for warnings
    reads_images = False  # whether ``convert`` reads the column images
    reads_pairs = False  # whether ``convert`` reads the columns chosen and rejected
    reads_calls = False  # whether rows whose answer ``convert`` takes from ANSWER_COLUMNS are calls of an API

    @abstractmethod
    def convert(self, row: Record) -> Record:
        """Returns the row in titan_tree's schema. Unknown members are kept: nothing is dropped silently.

        Raises:
            UserError: a malformed row. The message starts with the field; the caller adds the place.
        """

    def recognizes(self, source: Source) -> bool:
        return any(self.recognizes_row(row) for row in source.first_rows[:1])

    def records(self, source: Source) -> Iterator[tuple[str, Record]]:
        self.path = source.path
        calls: dict[str, list[tuple[str, Record]]] = {}  # without a group_id, by how they begin
        for place, row in self.rows(source):
            try:
                with errors_at(place):
                    record = self._record(row)
            except UserError as error:
                source.refuse_row(error)
                continue
            answers = (name for name in ANSWER_COLUMNS if row.get(name) is not None)
            is_call = self.reads_calls and any(name not in record for name in answers)
            if is_call and record.get("group_id") is None:
                calls.setdefault(_beginning(record), []).append((place, _as_sampled(record)))
            else:
                yield place, _as_sampled(record)
        num_calls = sum(map(len, calls.values()))
        if num_calls > len(calls):
            self.warn(
                f"{num_calls:,} calls without group_id form {count(len(calls), 'group')}, by their messages "
                "up to the first one of the user; to group otherwise, give each call a group_id"
            )
        for members in calls.values():
            group = {"group_id": members[0][0]} if len(members) > 1 else {}
            yield from ((place, record | group) for place, record in members)

    def _record(self, row: Record) -> Record:
        if any(map(asks_for_schema, (row, row.get("request")))):
            self.warn(ANSWER_SCHEMA)
        if any(map(restricts_tools, (row, row.get("request")))):
            self.warn(TOOL_CHOICE)
        refuse_columns(row, (*PAIR_COLUMNS * self.reads_pairs, *("images",) * self.reads_images))
        record = self.convert(decoded_columns(row))
        if not isinstance(record, dict):
            name = type(self).__name__
            raise UserError(f"{name}.convert: expected a dict, got {type(record).__name__}; return a record")
        return record

    def rows(self, source: Source) -> Iterator[tuple[str, Record]]:
        """Yields the rows of a file, each with its place."""
        return source.rows()

    def warn(self, message: str) -> None:
        """Logs a warning about the file once."""
        warn_once(self.path, message)


def _as_sampled(record: Record) -> Record:
    """Returns the record with recorded token ids in place of the messages and tools that they hold."""
    answers = record.get("trajectories", [record])
    if not any(isinstance(answer, dict) and SAMPLED in answer for answer in answers):
        return record
    answers = [
        {k: v for k, v in answer.items() if k not in (SAMPLED, *TEXT_COLUMNS)} | answer[SAMPLED]
        if SAMPLED in answer
        else answer
        for answer in answers
    ]
    return record | {"trajectories": answers} if "trajectories" in record else answers[0]


def _beginning(call: Record) -> str:
    """Returns the messages of a call up to the first one of the user, or the first one, as JSON.

    Of a call with token ids, it returns those of the prompt.
    """
    first = call.get("trajectories", [call])[0]
    if "messages" not in first:
        return json.dumps(first["tokens"][: first["loss_mask"].index(1)])
    messages = first["messages"]
    of_user = (n for n, message in enumerate(messages, start=1) if message.get("role") == "user")
    return json.dumps(messages[: next(of_user, 1)], sort_keys=True)


def asks_for_schema(request: object) -> bool:
    """Returns whether a request has a JSON schema for its answer."""
    if not isinstance(request, dict):
        return False
    text, config = request.get("text"), request.get("output_config")
    formats = [request.get("response_format"), request.get("output_format")]
    formats += [part.get("format") for part in (text, config) if isinstance(part, dict)]
    return any(isinstance(format, dict) and format.get("type") != "text" for format in formats)


def restricts_tools(request: object) -> bool:
    """Returns whether a request with tools forbids or demands calls."""
    if not isinstance(request, dict) or not (request.get("tools") or request.get("functions")):
        return False
    choices = (request.get("tool_choice"), request.get("function_call"))
    kinds = (choice.get("type") if isinstance(choice, dict) else choice for choice in choices)
    return any(choice is not None and kind != "auto" for choice, kind in zip(choices, kinds, strict=True))


def warn_once(path: str, message: str, place: str = "") -> None:
    """Logs a warning about a file, once per process. It begins with ``place``, if one is given."""
    if (path, message) not in _warned:
        _warned.add((path, message))
        logger.warning("%s: %s", printable(place or path), message, extra={"warning": (path, message)})


def file_of(place: str) -> str:
    """Returns the file of a place in one of its lines."""
    return place.partition(": ")[0].rpartition(":")[0]


def expect(value: object, kind: type[T], where: str, expected: str) -> T:
    """Returns the value. Raises UserError if it is of another type; ``where`` names the field."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{where}: expected {expected}, got {shorten(value)}")
    return value


def decoded_columns(row: Record) -> Record:
    """Returns the row with the JSON text of columns such as "messages" parsed."""
    texts = {name: row[name] for name in JSON_COLUMNS if isinstance(row.get(name), str)}
    if not texts:
        return row
    return row | {
        name: parse_text(text, f"{name} (JSON text)") if text.strip() else None
        for name, text in texts.items()
    }


def refuse_columns(row: Record, allowed: Sequence[str] = ()) -> None:
    """Raises UserError for media and preferences, except for the ``allowed`` columns."""
    for name in MEDIA_COLUMNS:
        if row.get(name) and name not in allowed:
            raise UserError(f"{name}: {NO_MEDIA}")
    for name in PREFERENCE_COLUMNS:
        if row.get(name) is not None and name not in allowed:
            raise UserError(
                f"{name}: this format has no preference pairs; give rows of messages in prompt, chosen and "
                "rejected (data.format = 'openai_chat'), or trajectories with the field preference"
            )
