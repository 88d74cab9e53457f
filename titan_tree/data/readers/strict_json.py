"""Strict JSON: what ``json.loads`` would accept and silently change is an error that names the field.

Refused are keys that appear twice in an object, NaN, Infinity and numbers that float64 cannot hold, lone
surrogates (half of a character that UTF-16 writes in two units), and text that is not UTF-8.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import NamedTuple

from titan_tree.errors import UserError, encoding_hint, hide, require_unicode, utf16_hint

# Only content with one of these can hold a lone surrogate, a constant such as NaN, or a number above 1e308.
# Other content is not walked. In _NUMBERS, 0 stands for any digit, and e also for E: bytes are found faster
# than patterns.
_MARKS = (b"\\ud", b"\\uD", b"NaN", b"Infinity")
_NUMBERS = (b"0e000", b"0e+000", b"0" * 300)
_ALIKE = bytes.maketrans(b"123456789E", b"000000000e")


class _Constant(NamedTuple):
    name: str  # NaN, Infinity or -Infinity


def parse_text(text: str, place: str) -> object:
    """Returns the JSON value that a string holds, such as a field with JSON text; see ``parse_json``."""
    return parse_json(text.encode(errors="surrogatepass"), place)


def parse_json(content: bytes, place: str) -> object:
    """Returns the JSON value that ``content`` holds.

    Args:
        content: one JSON value in UTF-8.
        place: the content's place, with which errors start.

    Raises:
        UserError: the content is not strict JSON.
    """
    try:
        text = content.decode("utf-8-sig")
        value = json.loads(text, object_pairs_hook=_object, parse_constant=_Constant)
        alike = content.translate(_ALIKE)
        if any(mark in content for mark in _MARKS) or any(number in alike for number in _NUMBERS):
            _check(value, "")
    except UserError as error:
        raise UserError(f"{place}: {error}") from None
    except json.JSONDecodeError as error:
        line = f"line {error.lineno}, " if error.lineno > 1 else ""
        hint = _json_hint(error)
        problem = error.msg.removesuffix(" starting at").removesuffix(" at")
        raise UserError(f"{place}: broken JSON at {line}character {error.colno}: {problem}{hint}") from None
    except UnicodeDecodeError as error:
        reason = f"{error.reason} at byte {error.start + 1}{encoding_hint(content)}"
        raise UserError(f"{place}: expected UTF-8 text: {reason}") from None
    except RecursionError:
        raise UserError(f"{place}: broken JSON: brackets are nested too deeply") from None
    except ValueError as error:  # thousands of digits in a number
        raise UserError(f"{place}: broken JSON: {error}") from None
    return value


def _json_hint(error: json.JSONDecodeError) -> str:
    before, char = error.doc[: error.pos][-1:], error.doc[error.pos : error.pos + 1]
    if char == "\x1e":
        return "; it is a JSON text sequence: tr -d '\\036' < FILE makes lines of it"
    if before == "\r":
        return "; its lines end in carriage returns: tr '\\r' '\\n' < FILE converts them"
    if error.msg == "Extra data":
        known = "" if char.isprintable() else f"; the character U+{ord(char):04X} there is no line break"
        return f"; write one value per line, or a list of all{known}"
    if hint := content_hint(error.doc):
        return hint
    if not char.isprintable():
        advice = "escape" if error.msg.startswith("Invalid control") else "remove"
        return f"; {advice} the character U+{ord(char):04X}"
    if char == "'":
        return "; JSON has double quotes: write it with json.dumps, not str"
    if error.msg.startswith("Unterminated") or error.pos >= len(error.doc.rstrip()) > 0:
        return "; it ends too early: write it again, or remove it"
    return "; expected an object in {} or a list in []" if error.pos == 0 else ""


def content_hint(text: str) -> str:
    """Returns what content that is neither JSON nor Parquet may be, and what to do; "" if it is not known."""
    if "\0" in text[:512]:
        binary = "; it is binary, such as a tar archive: unpack it, or convert it"
        return utf16_hint(text[:64].encode()) or binary
    if text.lstrip().startswith("<"):
        return "; it is a web page or XML: download the data themselves, or convert them"
    if text.startswith("version https://git-lfs"):
        return "; it is a pointer of Git LFS: git lfs pull downloads the file"
    return ""


def _object(pairs: list[tuple[str, object]]) -> dict[str, object]:
    result = dict(pairs)
    if len(result) < len(pairs):
        counts = Counter(name for name, _ in pairs)
        name = next(name for name in counts if counts[name] > 1)
        raise UserError(
            f"{hide(name):.60}: expected every key once, got it {counts[name]} times in one object"
        )
    return result


def _check(value: object, where: str) -> None:
    """Raises UserError for constants, infinite numbers and lone surrogates in a value, at any depth."""
    if isinstance(value, dict):
        for name, item in value.items():
            shown = f"{hide(name):.60}"
            inner = f"{where}.{shown}" if where else shown
            _check(name, inner)
            _check(item, inner)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check(item, f"{where}[{index}]")
    elif isinstance(value, _Constant):
        raise UserError(f"{where or 'value'}: expected a finite number, got {value.name}")
    elif isinstance(value, float) and math.isinf(value):
        raise UserError(f"{where or 'value'}: expected a finite number, got one beyond 1.8e308")
    elif isinstance(value, str):
        require_unicode(value, where or "value")
