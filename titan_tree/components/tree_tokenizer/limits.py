"""Limits on the rendering of a chat template: number of repetitions, CPU time, and size of values.

A template that loops without end, or that makes gigabytes of text from a few bytes, fails with a
TemplateRuntimeError. Ordinary templates stay far below every limit. The code that sandbox.py generates counts
repetitions, and adds up the sizes of values with at least ``FREE`` characters. Operations that can multiply
the size of their input, such as ``*`` or ``center``, are checked before they run.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import wraps
from itertools import chain, islice, pairwise, repeat
from types import NoneType
from typing import Any, TypeVar

from jinja2 import TemplateRuntimeError
from jinja2.environment import Environment
from jinja2.nodes import EvalContext
from jinja2.runtime import Context, Undefined
from jinja2.utils import Namespace

T = TypeVar("T")
Filter = Callable[..., object]

MAX_REPEATS = 1 << 20  # iterations of loops and calls of macros
MAX_SECONDS = 20  # CPU time of one rendering
MAX_SIZE = 1 << 26  # characters of a text, items of a list
MAX_TOTAL = 1 << 31  # sum of the sizes of all values of at least FREE characters
MAX_SOURCE = 1 << 18  # characters of a template
MAX_WIDTH = 100_000  # largest number that a method or filter takes, such as the width of padded text
MAX_BITS = 1 << 17  # of an integer
FREE = 4096  # smaller values are not counted; MAX_REPEATS bounds their number

_VIEWS: list[type[Iterable[object]]] = [type({}.keys()), type({}.values()), type({}.items())]
_CONTAINERS: tuple[type[Iterable[object]], ...] = (list, tuple, set, *_VIEWS)
_SHORT = (int, float, NoneType, Undefined)  # an integer has at most 4,300 digits as text
_CHECKED_REPEATS = 128  # repetitions between two checks of the CPU time
_CONVERSION = re.compile(r"%(\([^)]*\))?[-#0 +]*(\*|\d{5}|\d*\.(\*|\d{5}))")  # a width, in "%" formatting
_FIELD = re.compile(r"\{[^{}]*:[^{}]*(\d{5}|\{)")  # the same in str.format
# Filters that neither convert their input to text nor repeat it.
_HARMLESS = """
abs attr count d default dictsort first float groupby int items last length list map max min random reject
rejectattr reverse select selectattr sort text tojson unique
"""


class LimitedContext(Context):
    """The variables of a rendering, and how much of its limits it has used.

    Attributes:
        tick: called at each repetition; raises if there are too many, or if they take too long.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._total = 0
        self.tick: Callable[[], None] = chain.from_iterable(_ticks()).__next__

    def grown(self, value: T) -> T:
        """Returns ``value``. Raises if it, or the sum of all values, is too large."""
        if isinstance(value, str | list | tuple | bytes | dict) and (size := len(value)) >= FREE:
            require(size)
            self._total += size
            if self._total > MAX_TOTAL:
                raise TemplateRuntimeError(f"its values take more than {MAX_TOTAL:,} characters in all")
        return value

    def text(self, value: object) -> str:
        if isinstance(value, _SHORT):
            return str(value)
        measure(value)
        return self.grown(str(value))

    def concat(self, chunks: Iterable[str]) -> str:
        """Returns the joined chunks of a rendering, of a macro or of a block."""
        if isinstance(chunks, list) and sum(map(len, chunks)) < FREE:
            return "".join(chunks)
        parts: list[str] = []
        size, remaining = 0, iter(chunks)
        while some := list(islice(remaining, 256)):
            size += sum(map(len, some))
            require(size)
            parts += some
        return self.grown("".join(parts))


def _ticks() -> Iterator[Iterable[None]]:
    """Yields iterables that together have one item per allowed repetition."""
    start = time.thread_time()
    for _ in range(MAX_REPEATS // _CHECKED_REPEATS):
        yield repeat(None, _CHECKED_REPEATS)
        if time.thread_time() - start > MAX_SECONDS:
            raise TemplateRuntimeError(f"it runs for more than {MAX_SECONDS} seconds")
    raise TemplateRuntimeError(f"it repeats loops and macros more than {MAX_REPEATS:,} times")


def require(size: int) -> None:
    """Raises if a value of this size is too large."""
    if size > MAX_SIZE:
        raise TemplateRuntimeError(f"a value is larger than {MAX_SIZE:,} characters")


def measure(*values: object) -> int:
    """Returns the approximate number of characters of values as text. Raises if it is too large.

    A list can hold another list many times, so its text can be exponentially longer than the list.
    """
    size, remaining = 0, list[object](values)
    while remaining:
        value = remaining.pop()
        size += len(value) + 16 if isinstance(value, str | bytes) else 64
        if isinstance(value, Namespace):
            value = value._Namespace__attrs
        if isinstance(value, dict):
            remaining += value.keys()
            remaining += value.values()
        elif isinstance(value, _CONTAINERS):
            remaining += value
        require(size + len(remaining))
    return size


def multiply(operator: str, left: object, right: object) -> None:
    """Raises if ``left * right``, ``left ** right`` or ``left % right`` is too large."""
    if operator == "%":
        if isinstance(left, str):
            _check_format(left, _CONVERSION, left.count("%"), right)
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() + right.bit_length()
        if (left.bit_length() * right if operator == "**" else bits) > MAX_BITS:
            raise TemplateRuntimeError(f"an integer has more than {MAX_BITS:,} bits")
    elif operator == "*":
        for sequence, count in ((left, right), (right, left)):
            if isinstance(sequence, str | list | tuple | bytes) and isinstance(count, int):
                require(len(sequence) * count)


def _check_format(template: str, width: re.Pattern[str], fields: int, *values: object) -> None:
    if width.search(template):
        raise TemplateRuntimeError(f"a format has a computed width, or one above 9,999: {template!r:.60}")
    require(fields * (10_000 + measure(*values)) if fields > 1 else measure(*values))


def _check_method(name: str, text: str, args: tuple[object, ...], kwargs: dict[str, object]) -> None:
    """Raises if the result of a method of ``str``, or of the filter of this name, is too large."""
    values = [*args, *kwargs.values()]
    strings = [value for value in values if isinstance(value, str)]
    if any(isinstance(value, int) and value > MAX_WIDTH for value in values):
        raise TemplateRuntimeError(f"{name}: a number is larger than {MAX_WIDTH:,}")
    if name == "format":
        _check_format(text, _FIELD, text.count("{"), *values)
    elif name == "replace":
        for old, new in pairwise(strings):
            require(len(text) + (text.count(old) if len(new) > len(old) else 0) * len(new))
    elif name == "indent":
        width = max([4, *(value if isinstance(value, int) else len(str(value)) for value in values)])
        require(len(text) + (text.count("\n") + 1) * width)
    elif name in ("wordwrap", "urlize"):
        require((len(text) + 1) * (1 + sum(map(len, strings))))


# Methods of str whose results are checked before they run, and attributes that no template can read.
METHODS = ("center", "format", "join", "ljust", "replace", "rjust", "zfill")
REFUSED = {str: ("expandtabs", "format_map", "translate"), int: ("to_bytes",), bytes: dir(bytes)}


def limited_method(name: str, text: str, method: Callable[..., str]) -> Callable[..., str]:
    """Returns a method of ``text`` whose result is limited."""

    def call(*args: Any, **kwargs: object) -> str:
        if name == "join" and len(args) == 1:
            return method(_joined(text, args[0]))
        _check_method(name, text, args, kwargs)
        return method(*args, **kwargs)

    return call


def _joined(separator: str, items: Iterable[T]) -> list[T]:
    items = list(items)
    require(measure(items) + len(separator) * len(items))
    return items


def limited_filters(filters: Mapping[str, Filter]) -> dict[str, Filter]:
    """Returns ``filters`` with a check of the input around those that make or repeat text."""
    return {name: f if name in _HARMLESS.split() else _limited_filter(name, f) for name, f in filters.items()}


def _limited_filter(name: str, function: Filter) -> Filter:
    @wraps(function)  # also copies the mark of filters that get the context
    def call(*args: Any, **kwargs: Any) -> Any:
        first = int(isinstance(args[0], Context | EvalContext | Environment))
        value, rest = args[first], args[first + 1 :]
        if isinstance(value, Iterator):
            value = list(value)
        if type(value) is not str:
            measure(value)
        if name == "join":
            value = _joined(str(rest[0] if rest else kwargs.get("d", "")), value)
        elif name == "format":
            multiply("%", str(value), rest or kwargs)
        elif rest or kwargs:
            _check_method(name, str(value), rest, kwargs)
        return function(*args[:first], value, *rest, **kwargs)

    return call
