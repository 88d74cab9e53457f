"""Renders chat templates: the program of the process that template_process.py starts.

A template is code from the internet. Jinja's sandbox decides what it may read. The operating system limits
the time and the memory of this process, because no check inside the interpreter can: one comparison or one
regular expression may run for hours, or end the process. ``serve`` explains the requests.

ChatEnvironment is Jinja's sandbox as Hugging Face configures it for chat templates. The sandbox checks every
attribute that the template reads, except for fields of messages and of loops, where the outcome is known. A
template that renders every prefix of a conversation reads the same objects again and again; their JSON text
is kept.

To start at once, this file imports only Jinja and Python's library.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import resource
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from functools import lru_cache
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable
from jinja2.utils import Namespace

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # the marks of text spans; templates.py explains them
JSON_TEXTS = "json texts"  # the variable that holds the JsonTexts of a conversation; no template can name it
JSON_CHARACTERS = 1 << 24  # capacity of JsonTexts, in characters
ERROR_CHARACTERS = 1000  # of an error message
OUT_OF_MEMORY = 3  # exit status
FILES = 16  # open files; some of Python's modules are imported when a template first needs them

_DICT_ATTRIBUTES = frozenset(dir(dict))
_PLAIN = frozenset((str, int, bool, float, type(None), dict, list, tuple))
_MISSING = object()
_DEFAULTS = False, None, None, False
_FIELD_FILTERS = ("attr", "groupby", "rejectattr", "selectattr", "sum")  # their first argument is a field


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the functions and filters of chat templates; templates.py explains ``text``."""

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self.filters |= {"tojson": _to_json, "text": _text_span}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Returns what the sandbox returns for ``obj.attribute``."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:
            return obj.get(attribute) if attribute in obj else self.undefined(obj=obj, name=attribute)
        if (kind is LoopContext or kind is Namespace) and not attribute.startswith("_"):
            value = getattr(obj, attribute, _MISSING)
            if type(value) in _PLAIN:
                return value
        return super().getattr(obj, attribute)

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Also refuses ``dict.update`` and its like, with which a template could change a message."""
        return super().is_safe_attribute(obj, attr, value) and not (
            obj is dict and modifies_known_mutable({}, attr)
        )


class JsonTexts:
    """The JSON texts of objects that the renderings of one conversation share, by the objects' identity.

    The sandbox lets no template change an object. Objects are kept alive, so that no other object gets the
    same identity.
    """

    def __init__(self) -> None:
        self._texts: dict[int | tuple[int, str], tuple[object, str]] = {}
        self._characters = 0

    def dumps(self, value: object, *options: Any) -> str:
        """Returns the JSON text of ``value``; the options are ensure_ascii, indent, separators, sort_keys."""
        key = id(value) if options == _DEFAULTS else (id(value), repr(options))
        if (known := self._texts.get(key)) is not None:
            return known[1]
        ensure_ascii, indent, separators, sort_keys = options
        text = json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )
        self._characters += len(text)
        if self._characters > JSON_CHARACTERS:
            self._texts.clear()
            self._characters = len(text)
        self._texts[key] = value, text
        return text


class _Generation(jinja2.ext.Extension):
    """Renders ``{% generation %}`` blocks as their content. samples.py finds completions without the tags."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@jinja2.pass_context
def _to_json(
    context: Context,
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's tojson, which escapes HTML characters and so would change a conversation's text."""
    texts: JsonTexts = context.parent[JSON_TEXTS]
    return texts.dumps(value, ensure_ascii, indent, separators, sort_keys)


def _text_span(text: str) -> str:
    if not isinstance(text, str):
        raise TypeError(f"the filter text expects a string, got {type(text).__name__}")
    if OPEN in text or CLOSE in text:
        raise jinja2.TemplateError("a message contains U+FDD0 or U+FDD1, which Unicode reserves; remove them")
    return f"{OPEN}{text}{CLOSE}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


@jinja2.pass_context
def _strftime_now(context: Context, format: str) -> str:
    """Prints the variable ``date`` in place of the clock: samples must not change from day to day."""
    if (date := context.get("date")) is None:
        raise jinja2.TemplateError(
            "it prints today's date; set the variable date to the day on which the answers were sampled, "
            "such as data.sample.date=2025-12-31"
        )
    try:
        day = datetime.fromisoformat(str(date))
    except ValueError:
        raise jinja2.TemplateError(f"the variable date: expected a day as 2025-12-31, got {date!r}") from None
    return day.strftime(format)


# Requests.


def describe(source: str) -> Iterator[dict[str, Any]]:
    """Yields what ChatTemplate needs to know about a template; its docstring explains the keys."""
    syntax = _environment().parse(source)
    variables = jinja2.meta.find_undeclared_variables(syntax)
    reads_clock = any(node.name == "strftime_now" for node in syntax.find_all(jinja2.nodes.Name))
    yield {
        "variables": sorted(variables | ({"date"} if reads_clock else set())),
        "fields": sorted(set(_fields(syntax))),
        "has_text_spans": any(node.name == "text" for node in syntax.find_all(jinja2.nodes.Filter)),
    }


def _fields(syntax: jinja2.nodes.Template) -> Iterator[str]:
    """Yields the names in x.name, x["name"], x.get("name"), "name" in x, x | attr("name") and the like."""
    for node in syntax.find_all(jinja2.nodes.Node):
        names: list[jinja2.nodes.Expr] = []
        match node:
            case jinja2.nodes.Getattr():
                yield node.attr
            case jinja2.nodes.Getitem():
                names = [node.arg]
            case jinja2.nodes.Call(node=jinja2.nodes.Getattr(attr="get")):
                names = node.args[:1]
            case jinja2.nodes.Compare() if any(operand.op in ("in", "notin") for operand in node.ops):
                names = [node.expr]
            case jinja2.nodes.Filter(name=name):
                names = [keyword.value for keyword in node.kwargs if keyword.key == "attribute"]
                names += node.args[:1] if name in _FIELD_FILTERS else []
        for constant in names:
            if isinstance(constant, jinja2.nodes.Const) and isinstance(constant.value, str):
                yield from constant.value.split(".")


def render(
    source: str,
    messages: Sequence[object],
    tools: Sequence[object] | None,
    prefixes: Sequence[tuple[int, bool]],
    variables: dict[str, object],
) -> Iterator[tuple[int, str]]:
    """Yields the texts of prefixes of a conversation.

    Most texts repeat the text before. Each one is yielded as (number of characters that it shares with the
    text before, the rest), so that little goes through the pipe.

    Args:
        prefixes: (number of messages, whether the generation prompt is added) of each text.
    """
    template, texts, before = _compiled(source), JsonTexts(), ""
    for count, add_generation_prompt in prefixes:
        context = template.new_context(
            {
                "documents": None,
                **variables,
                "messages": messages[:count],
                "tools": tools or None,
                "add_generation_prompt": add_generation_prompt,
                JSON_TEXTS: texts,
            }
        )
        text = "".join(template.root_render_func(context))
        shared = shared_length(before, text)
        yield shared, text[shared:]
        before = text


def shared_length(before: str, text: str) -> int:
    """Returns the number of characters with which both texts begin."""
    if text.startswith(before):
        return len(before)
    low, high = 0, min(len(before), len(text))  # the first ``low`` characters are equal
    while low < high:
        middle = (low + high + 1) // 2
        if text.startswith(before[low:middle], low):
            low = middle
        else:
            high = middle - 1
    return low


@lru_cache(maxsize=1)
def _environment() -> ChatEnvironment:
    return ChatEnvironment()


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    try:
        return _environment().from_string(source)
    except MemoryError:  # of Python's compiler, for a long chain of elif
        raise jinja2.TemplateError("it is too long or too deeply nested for Python's compiler") from None


# The process.


REQUESTS: dict[str, Callable[..., Iterator[object]]] = {"describe": describe, "render": render}
_seconds = 0.0


def serve(seconds: float, memory: int, parent: int) -> None:
    """Answers requests until the parent process has ended.

    A request on stdin is a pickle of (name of a function in REQUESTS, arguments). The answer on stdout is the
    JSON text of (what the function yields, error or None). Its length, 8 bytes, precedes each of them. An
    error is (line of the template or None, message). The process ends without an answer if a template exceeds
    a limit.

    Args:
        seconds: CPU time of each request.
        memory: bytes of address space.
        parent: the end of a pipe to which nothing is written. It is closed when the parent has ended. The
            signal SIGIO then ends this process, whatever the template does.
    """
    global _seconds
    _seconds = seconds
    _confine(memory)
    fcntl.fcntl(parent, fcntl.F_SETOWN, os.getpid())  # receives SIGIO
    fcntl.fcntl(parent, fcntl.F_SETFL, os.O_ASYNC)
    requests, answers = sys.stdin.buffer, sys.stdout.buffer
    try:
        while size := requests.read(8):
            request = requests.read(int.from_bytes(size))
            answer = _answer(request)
            answers.write(len(answer).to_bytes(8) + answer)
            answers.flush()
    except MemoryError:
        os._exit(OUT_OF_MEMORY)
    except BrokenPipeError:
        os._exit(1)


def _answer(request: bytes) -> bytes:
    # Lets the system end this process after more CPU time than a template may take.
    signal.setitimer(signal.ITIMER_PROF, _seconds)
    results: list[object] = []
    error: tuple[int | None, str] | None = None
    try:
        name, *arguments = pickle.loads(request)
        for result in REQUESTS[name](*arguments):
            results.append(result)
    except MemoryError:
        raise
    except Exception as raised:  # a template can raise any exception
        line = raised.lineno if isinstance(raised, jinja2.TemplateSyntaxError) else None
        kind = "" if isinstance(raised, jinja2.TemplateError) else f"{type(raised).__name__}: "
        error = line, f"{kind}{raised}"[:ERROR_CHARACTERS]
    return json.dumps((results, error), ensure_ascii=False).encode("utf-8", "surrogatepass")


def _confine(memory: int) -> None:
    """Takes from this process what no template needs."""
    limits = {
        resource.RLIMIT_AS: memory,
        resource.RLIMIT_FSIZE: 0,
        resource.RLIMIT_NOFILE: FILES,
        resource.RLIMIT_NPROC: 0,
        resource.RLIMIT_CORE: 0,
    }
    for kind, limit in limits.items():
        _, largest = resource.getrlimit(kind)
        limit = limit if largest == resource.RLIM_INFINITY else min(limit, largest)
        resource.setrlimit(kind, (limit, limit))
    for number in (signal.SIGPROF, signal.SIGIO):
        signal.signal(number, signal.SIG_DFL)  # which ends the process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGPROF, signal.SIGIO))
    sys.dont_write_bytecode = True
    # Python's runtime reports its fatal errors on stderr; the parent process reports them in one line.
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)
    os.close(null)


if __name__ == "__main__":
    serve(float(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
