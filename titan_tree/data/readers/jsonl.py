"""JSON Lines: one JSON object per line."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import BinaryIO

from titan_tree.data.readers import Place, Record
from titan_tree.data.readers.strict_json import parse_json
from titan_tree.errors import UserError

MAX_LINE_BYTES = 1 << 28  # a longer line would be a damaged file, or one that is meant to fill the memory


def json_objects(file: BinaryIO, name: str) -> Iterator[tuple[Place, Record]]:
    """Yields the JSON object on each line that is not blank. Other readers of JSON Lines can build on it.

    Raises:
        UserError: a line that is not one JSON object, see ``parse_json``.
    """
    for number in count(1):
        line = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        place = f"{name}:{number}"
        if len(line) > MAX_LINE_BYTES:
            raise UserError(f"{place}: expected at most {MAX_LINE_BYTES:,} bytes per line; split the record")
        if line.strip():
            yield place, _parse(line, place)


def _parse(line: bytes, place: Place) -> Record:
    record = parse_json(line.rstrip(b"\r\n"), place)
    if not isinstance(record, dict):
        raise UserError(f"{place}: expected one JSON object per line, got {type(record).__name__}")
    return record
