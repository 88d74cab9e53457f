"""JSON documents: one JSON value per file, such as an array of records. The file is read as a whole."""

from __future__ import annotations

import json
import re
from typing import Any

from titan_tree.data.readers import Source
from titan_tree.errors import UserError

STRINGS_AND_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{},]', re.DOTALL)
MAX_DEPTH = 200  # brackets that may be open where the beginning of a document ends


def load_document(source: Source) -> Any:
    """Returns the JSON value that a file holds.

    Raises:
        UserError: the file is not one JSON value in UTF-8.
    """
    with source.open() as file:
        text = file.read()
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{source.path}:{error.lineno}: broken JSON at character {error.colno}: {error.msg}; "
            "expected one JSON value per file"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(
            f"{source.path}: expected UTF-8 text: {error.reason} at byte {error.start + 1}"
        ) from None
    except (RecursionError, ValueError) as error:  # thousands of nested brackets, or of digits in a number
        raise UserError(f"{source.path}: broken JSON: {error}") from None


def parse_beginning(text: str) -> Any:
    """Returns the value of which ``text`` is the beginning, without the members that are cut off.

    For example, '[{"a": 1, "b": [2' becomes [{"a": 1, "b": []}]. Returns None if this fails.
    """
    closers: list[str] = []
    cut, tail = 0, ""  # where to cut the text, and the brackets that close it there
    for match in STRINGS_AND_BRACKETS.finditer(text):
        token = match[0]
        if token in "[{":
            closers.append("]" if token == "[" else "}")
        elif token in "]}":
            if not closers:
                return None
            closers.pop()
        elif token != ",":
            continue
        cut, tail = match.start() if token == "," else match.end(), "".join(reversed(closers))
        if not closers or len(closers) > MAX_DEPTH:
            break
    try:
        return json.loads(text[:cut] + tail)
    except (ValueError, RecursionError):
        return None
