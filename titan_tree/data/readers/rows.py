"""Rows: the JSON objects of a file, whatever holds them, and the base class of readers that convert rows."""

from __future__ import annotations

import functools
import logging
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from titan_tree.data.readers import Place, Reader, Record, Source, arrow
from titan_tree.data.readers.json_document import load_document, parse_beginning
from titan_tree.data.readers.jsonl import json_objects
from titan_tree.data.readers.strict_json import parse_text
from titan_tree.errors import UserError, errors_at, shorten

logger = logging.getLogger(__name__)

FIRST_ROWS = 8  # rows that a reader sees when it recognizes a file
# Columns that may hold JSON text.
JSON_COLUMNS = ("messages", "tools", "functions", "trajectories", "conversations", "nodes")
MEDIA_COLUMNS = ("images", "image", "videos", "video", "audios", "audio")
PAIR_COLUMNS = ("chosen", "rejected")
PREFERENCE_COLUMNS = (*PAIR_COLUMNS, "preferred_output", "non_preferred_output", "kto_tag")


def rows(source: Source) -> Iterator[tuple[Place, Record]]:
    """Yields the rows of a file, each with its place.

    The container is recognized by content: JSON Lines, a JSON array of objects, one JSON object that spans
    several lines, a Parquet file, or a folder that ``datasets.save_to_disk`` wrote.

    Raises:
        UserError: a malformed file, or a row that is not an object.
    """
    if arrow.is_arrow(source):
        yield from arrow.arrow_rows(source)
    elif not _is_document(source.head):
        with source.open() as file:
            yield from json_objects(file, source.path)
    elif isinstance(document := load_document(source), dict):
        yield source.path, document
    else:
        for index, row in enumerate(document):
            place = f"{source.path}:[{index}]"
            if not isinstance(row, dict):
                raise UserError(f"{place}: expected a JSON object, got {type(row).__name__}")
            yield place, row


@functools.lru_cache(maxsize=1)
def first_rows(source: Source) -> list[Record]:
    """Returns the first rows for recognition. A row that is longer than ``source.head`` lacks members.

    Content that is not JSON has no rows.
    """
    if arrow.is_arrow(source):
        return [row for _, row in islice(arrow.arrow_rows(source, batch_rows=FIRST_ROWS), FIRST_ROWS)]
    text = source.head.decode(errors="replace").lstrip()
    if _is_document(source.head):
        value = parse_beginning(text)
        found = value if isinstance(value, list) else [value]
    else:
        found = [parse_beginning(line) for line in text.split("\n")[:FIRST_ROWS] if line.strip()]
    return [row for row in found[:FIRST_ROWS] if isinstance(row, dict)]


class RowReader(Reader):
    """Reads a format in which every row is one record. Subclasses recognize and convert a row."""

    path = ""  # of the file that is being read, for warnings
    reads_pairs = False  # whether ``convert`` reads the columns chosen and rejected

    @abstractmethod
    def claims(self, row: Record) -> bool:
        """Returns whether a row is of this format. Long rows may lack their last members."""

    @abstractmethod
    def convert(self, row: Record) -> Record:
        """Returns the row in titan_tree's schema. Unknown members are kept: nothing is dropped silently.

        Raises:
            UserError: a malformed row. The message starts with the field; the caller adds the place.
        """

    def recognizes(self, source: Source) -> bool:
        """Returns whether the first row is of this format."""
        return any(self.claims(row) for row in first_rows(source)[:1])

    def records(self, source: Source) -> Iterator[tuple[Place, Record]]:
        self.path = source.path
        for place, row in rows(source):
            with errors_at(place):
                refuse_columns(row, PAIR_COLUMNS if self.reads_pairs else ())
                record = self.convert(decoded_columns(row))
            yield place, record

    def warn(self, message: str) -> None:
        """Logs a warning about the file once."""
        warn_once(self.path, message)


@functools.cache
def warn_once(path: str, message: str) -> None:
    """Logs a warning about a file, once per process."""
    logger.warning("%s: %s", path, message)


def expect(value: Any, kind: type, where: str, expected: str) -> Any:
    """Returns the value. Raises UserError if it is of another type; ``where`` names the field."""
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise UserError(f"{where}: expected {expected}, got {shorten(value)}")
    return value


def decoded_columns(row: Record) -> Record:
    """Returns the row with the JSON text of columns such as "messages" parsed."""
    texts = {name: row[name] for name in JSON_COLUMNS if isinstance(row.get(name), str)}
    return {**row, **{name: _decoded(text, name) for name, text in texts.items()}} if texts else row


def _decoded(text: str, name: str) -> Any:
    return parse_text(text, f"{name} (JSON text)") if text.strip() else None


def refuse_columns(row: Record, allowed: Sequence[str] = ()) -> None:
    """Raises UserError for images and audio, and for preferences except for the ``allowed`` columns."""
    for name in MEDIA_COLUMNS:
        if row.get(name):
            raise UserError(
                f"{name}: titan_tree trains on text, and this row has other media; remove the row"
            )
    for name in PREFERENCE_COLUMNS:
        if row.get(name) is not None and name not in allowed:
            raise UserError(
                f"{name}: this format has no preference pairs; give rows of messages in prompt, chosen and "
                "rejected (data.format = 'openai_chat'), or trajectories with the field preference"
            )


def _is_document(head: bytes) -> bool:
    """Returns whether the head begins one JSON value over several lines, rather than JSON Lines."""
    text = head.lstrip()
    if text.startswith(b"["):
        return text[1:].lstrip()[:1] in (b"{", b"]")
    first_line, newline, rest = text.partition(b"\n")
    return text.startswith(b"{") and bool(newline and rest.strip()) and first_line.rstrip()[-1:] in b"{[,:"
