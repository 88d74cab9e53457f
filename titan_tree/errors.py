"""UserError, the exception for wrong input, and helpers that check arguments, word messages, hide secrets."""

import base64
import difflib
import logging
import os
import re
import reprlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

SNAPSHOT = "a local Hugging Face snapshot"


class UserError(ValueError):
    """An error that the user can fix. Its message is one line: what is wrong, where, and how to fix it.

    Commands print only the message and exit with status 2. Every other exception is a bug in titan_tree and
    shows a traceback. Messages may quote data: the constructor applies ``hide`` and ``printable``.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(hide(message)))


class AgreedError(UserError):
    """A UserError that all ranks raise between the same two steps, so they can still write a checkpoint."""


class LostRankError(UserError):
    """Another rank has ended or hangs. If that rank has an error of its own, it says more than this one."""


def printable(text: str) -> str:
    r"""Returns ``text`` as one line without control characters, which could change what a terminal shows.

    Characters that ``str.isprintable`` refuses are escaped as in ``repr``: line breaks and other control
    characters, invisible characters such as those that reverse the direction of text, and lone surrogates,
    which no file can hold.

    >>> print(printable("two\nlines, \x1b[31mred"))
    two\nlines, \x1b[31mred
    """
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def count(number: int, noun: str) -> str:
    """Returns a number with its noun in the singular or the plural: "1 call" or "2 calls"."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def secret_of(variable: str, key: str) -> str:
    """Returns the secret in the environment variable that a key of the configuration names.

    Raises:
        UserError: it is not set. The message does not show its name, which may be the secret itself.
    """
    if (value := os.environ.get(variable)) is None:
        raise UserError(
            f"{key}: expected the name of an environment variable that is set; export the variable, and "
            "write its name here, not the secret itself"
        )
    return value


def keep_secret(secret: str) -> None:
    """Lets ``hide`` replace a secret, such as an API key, from now on.

    Its spellings in URLs, in JSON and in base64 (also as part of a longer text) are replaced, too. A secret
    of fewer than 4 characters is ignored, because it would occur in many words.
    """
    secret = secret.strip()
    if len(secret) < 4:
        return
    spellings = ["".join(map(_spelled, secret))]
    for before in range(3):  # number of bytes, modulo 3, that precede the secret in a longer text
        content = b" " * before + secret.encode(errors="replace")
        own = slice(
            -(-before * 8 // 6), len(content) * 8 // 6
        )  # characters that hold bits of the secret only
        for symbols in (b"+/", b"-_"):
            spellings.append(re.escape(base64.b64encode(content, symbols).decode()[own]))
    _secrets[secret] = re.compile("|".join(spellings), re.IGNORECASE)


def hide(text: str) -> str:
    """Returns ``text`` with ``***`` in place of registered secrets, and of users and passwords in URLs.

    >>> print(hide("cannot reach http://user:password@host:8000"))
    cannot reach http://***@host:8000
    """
    for secret in _secrets.values():
        text = secret.sub("***", text)
    return _URL_USER.sub("***@", text)


def _spelled(char: str) -> str:
    """Returns a regular expression for a character as it is, percent-encoded, or escaped in JSON."""
    encoded = "".join(f"%{byte:02x}" for byte in char.encode(errors="replace"))
    return rf"(?:\\?{re.escape(char)}|{encoded}|\\u{ord(char):04x})"


def shorten(value: object) -> str:
    """Returns ``repr(value)`` in at most 60 characters, also if the value is huge or deeply nested.

    Secrets are hidden before the text is cut.

    >>> print(shorten({"a": [1] * 1000}))
    {'a': [1, 1, 1, 1, 1, 1, ...]}
    """
    try:
        text = _SHORT.repr(value)
    except ValueError:  # Python does not print integers of more than 4,300 digits
        return f"a value of type {type(value).__name__}"
    text = hide(text)
    return text if len(text) <= 60 else f"{text[:57]}..."


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UserError:
    """Returns the error for a name that does not exist. It suggests the closest known name."""
    known = list(known)
    return UserError(
        f"unknown {kind} {name!r}{did_you_mean(name, known)} (known: {', '.join(known) or 'none'})"
    )


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Returns the end of an error message about an unknown name: the known name that is close to it."""
    names = {each.lower(): each for each in known}
    close = difflib.get_close_matches(str(name).lower()[:60], names, n=1)
    return f"; did you mean {names[close[0]]!r}?" if close else ""


def utf16_hint(content: bytes) -> str:
    """Returns how to convert UTF-16 without a byte-order mark; "" if the content does not begin with it."""
    for order, others in (("LE", content[1:64:2]), ("BE", content[:64:2])):
        if others and not others.strip(b"\0") and b"\0\0" not in content[:64]:
            return f"; it is UTF-16: convert it with iconv -f UTF-16{order} -t UTF-8"
    return ""


def encoding_hint(content: bytes) -> str:
    """Returns how to turn ``content``, which is not UTF-8, into what can be read."""
    for start, kind in ((b"PK\x03\x04", "a zip archive"), (b"BZh", "bzip2"), (b"\xfd7zXZ", "xz")):
        if content.startswith(start):
            return f"; it is {kind}: unpack it"
    if content.startswith((b"\xff\xfe", b"\xfe\xff")):
        return "; it is UTF-16: convert it with iconv -f UTF-16 -t UTF-8"
    return utf16_hint(content) or "; if it is Latin-1, convert it with iconv -f LATIN1 -t UTF-8"


def missing_snapshot(folder: object, kind: str = SNAPSHOT) -> str:
    """Returns what is wrong with a missing folder, and how to download what has the name of a hub id."""
    name = str(folder)
    if os.path.isfile(name):
        return f"expected {kind}, got a file; name the folder that holds it"
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not name.startswith(".")
    hint = f"; download it: hf download {name} --local-dir FOLDER, and name that folder" if is_id else ""
    return f"no such folder; expected {kind}{hint}"


def require_unicode(text: str, where: str) -> str:
    """Returns ``text``. Raises UserError, which begins with ``where``, for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        before, after = (
            hide(text[: error.start]),
            hide(text[error.start + 1 :]),
        )  # first, since a cut splits secrets
        near = f"{before[-20:]}{text[error.start]}{after[:19]}"
        raise UserError(f"{where}: expected Unicode text, got a lone surrogate in {near!r}") from None
    return text


def require_list(values: object, kind: type, where: str, hint: str) -> None:
    """Raises UserError, which begins with ``where``, unless ``values`` is a sequence of ``kind``.

    Args:
        hint: what to pass instead.
    """
    got = type(values).__name__
    if isinstance(values, Sequence) and not isinstance(values, str):
        others = [type(value).__name__ for value in values if not isinstance(value, kind)]
        if not others:
            return
        got = f"{got} of {others[0]}"
    raise UserError(f"{where}: expected a list of {kind.__name__}s, got {got}; {hint}")


@contextmanager
def warnings_hidden() -> Iterator[None]:
    """Hides log records of the level WARNING and below. A caller that hides more keeps hiding it."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.WARNING))
    try:
        yield
    finally:
        logging.disable(before)


class errors_at:  # noqa: N801  # used as a function; a class costs less than a generator for each record
    """Puts the place, such as "file:line", in front of the messages of UserErrors.

    Values that are nested too deeply to walk become UserErrors, too.
    """

    __slots__ = ("place",)

    def __init__(self, place: str) -> None:
        self.place = place

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, UserError):
            # A path without an id has its place as id.
            message = str(error).removeprefix(f"path {self.place}: ")
            raise UserError(f"{self.place}: {message}") from None
        if isinstance(error, RecursionError):
            raise UserError(f"{self.place}: brackets are nested too deeply to read") from None


class _Repr(reprlib.Repr):
    def repr_str(self, x: str, level: int) -> str:
        return super().repr_str(hide(x), level)

    def repr_int(self, x: int, level: int) -> str:
        repr(x)  # raises ValueError if it is too long; Python 3.14's reprlib prints its address then
        return super().repr_int(x, level)


_secrets: dict[str, re.Pattern[str]] = {}  # each with its spellings
_URL_USER = re.compile(r"(?<=://)[^/\s]*@")
_SHORT = _Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 60, 60
