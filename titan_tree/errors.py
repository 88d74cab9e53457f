"""UserError, the exception for wrong input, and helpers that check arguments, add places or quote data."""

import reprlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class UserError(ValueError):
    """An error that the user can fix. Its message is one line: what is wrong, where, and how to fix it.

    Commands print only the message and exit with status 2. Every other exception is a bug in titan_tree and
    shows a traceback. Messages may quote data: the constructor escapes what ``printable`` escapes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


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


def shorten(value: object) -> str:
    """Returns ``repr(value)`` in at most 60 characters, also if the value is huge or deeply nested.

    >>> print(shorten({"a": [1] * 1000}))
    {'a': [1, 1, 1, 1, 1, 1, ...]}
    """
    try:
        text = _SHORT.repr(value)
    except ValueError:  # Python does not print integers of more than 4,300 digits
        return f"a value of type {type(value).__name__}"
    return text if len(text) <= 60 else f"{text[:57]}..."


def require_unicode(text: str, where: str) -> str:
    """Returns ``text``. Raises UserError, which begins with ``where``, for a lone surrogate."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        near = text[max(error.start - 20, 0) : error.start + 20]
        raise UserError(f"{where}: expected Unicode text, got a lone surrogate in {near!r}") from None
    return text


def require_list(values: object, kind: type, where: str, hint: str) -> None:
    """Raises UserError, which begins with ``where``, unless ``values`` is a sequence of ``kind``.

    Args:
        hint: what to pass instead.
    """
    got = type(values).__name__
    if isinstance(values, Sequence):
        others = [type(value).__name__ for value in values if not isinstance(value, kind)]
        if not others:
            return
        got = f"{got} of {others[0]}"
    raise UserError(f"{where}: expected a list of {kind.__name__}s, got {got}; {hint}")


@contextmanager
def errors_at(place: str) -> Iterator[None]:
    """Puts the place, such as "file:line", in front of the messages of UserErrors.

    Values that are nested too deeply to walk become UserErrors, too.
    """
    try:
        yield
    except UserError as error:
        message = str(error).removeprefix(f"path {place}: ")  # a path without an id has its place as id
        raise UserError(f"{place}: {message}") from None
    except RecursionError:
        raise UserError(f"{place}: brackets are nested too deeply to read") from None


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 60, 60
