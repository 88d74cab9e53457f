"""JSON Lines: one JSON object per line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import BinaryIO

from titan_tree.data.readers import Place, Record
from titan_tree.errors import UserError


def json_objects(file: BinaryIO, name: str) -> Iterator[tuple[Place, Record]]:
    """Yields the JSON object on each line that is not blank. Other readers of JSON Lines can build on it.

    Raises:
        UserError: a line that is not one JSON object in UTF-8.
    """
    for number, line in enumerate(file, start=1):
        if line.strip():
            place = f"{name}:{number}"
            yield place, _parse(line, place)


def _parse(line: bytes, place: Place) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{place}: broken JSON at character {error.pos + 1}: {error.msg}; expected one object per line"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{place}: expected UTF-8 text: {error.reason} at byte {error.start + 1}") from None
    except (RecursionError, ValueError) as error:  # thousands of nested brackets, or of digits in a number
        raise UserError(f"{place}: broken JSON: {error}") from None
    if not isinstance(record, dict):
        raise UserError(f"{place}: expected one JSON object per line, got {type(record).__name__}")
    return record
