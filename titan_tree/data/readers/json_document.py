"""JSON documents: one JSON value per file, such as an array of records. The file is read as a whole."""

from __future__ import annotations

import json
import re
from typing import Any

from titan_tree.data.readers import Source
from titan_tree.data.readers.strict_json import parse_json

STRINGS_AND_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{},]', re.DOTALL)
MAX_DEPTH = 200  # brackets that may be open where the beginning of a document ends


def load_document(source: Source) -> Any:
    """Returns the JSON value that a file holds.

    Raises:
        UserError: the file is not one JSON value, see ``parse_json``.
    """
    with source.open() as file:
        return parse_json(file.read(), source.path)


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
