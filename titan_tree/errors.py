"""UserError, the exception for wrong input, and helpers that make data safe to show in messages."""

import reprlib


class UserError(ValueError):
    """An error that the user can fix. Its message is one line: what is wrong, where, and how to fix it.

    Commands print only the message and exit with status 2. Any other exception is a bug in titan_tree and
    shows a traceback. Messages may quote data: the constructor escapes what ``printable`` escapes.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))


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
    text = _SHORT.repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother = 3, 60, 60
