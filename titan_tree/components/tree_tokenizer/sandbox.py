"""ChatEnvironment: Jinja as Hugging Face configures it for chat templates, but faster.

A template is code from the internet, so it runs in Jinja's sandbox. The sandbox checks every attribute that
the template reads. ChatEnvironment answers without these checks where their outcome is known. A template that
renders every prefix of a conversation reads the same objects again and again; their JSON text is kept.
"""

from __future__ import annotations

import json
import re
from datetime import datetime
from types import BuiltinMethodType
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable
from jinja2.utils import Namespace

from titan_tree.errors import UserError

OPEN, CLOSE = "\ufdd0", "\ufdd1"  # the marks of text spans
MARKS = re.compile(f"[{OPEN}{CLOSE}]")
JSON_TEXTS = "json texts"  # the variable that holds the JsonTexts of a rendering; no template can name it
JSON_CHARACTERS = 1 << 24  # capacity of JsonTexts, in characters

_DICT_ATTRIBUTES = frozenset(dir(dict))
_STR_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {"format", "format_map"}
_PLAIN = frozenset((str, int, bool, float, type(None), dict, list, tuple))
_MISSING = object()
_DEFAULTS = False, None, None, False


class _Code(CodeGenerator):
    """Reads the fields of messages without a function call."""

    def visit_Getattr(self, node: jinja2.nodes.Getattr, frame: Frame) -> None:  # noqa: N802
        """Writes ``obj.attr`` as an expression that reads a dict and leaves other objects to the sandbox."""
        if node.attr in _DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
            return
        # An inner expression is done with ``got`` before the outer one assigns it.
        self.write(f"(got[{node.attr!r}] if type(got := ")
        self.visit(node.node, frame)
        self.write(f") is dict and {node.attr!r} in got else environment.getattr(got, {node.attr!r}))")


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the functions and filters of chat templates; templates.py explains ``text``."""

    code_generator_class = _Code

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self.filters |= {"tojson": _to_json, "text": _text_span}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def getattr(self, obj: Any, attribute: str) -> Any:
        """Returns what the sandbox returns for ``obj.attribute``."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_ATTRIBUTES:  # missing, or read by a filter
            return obj.get(attribute) if attribute in obj else self.undefined(obj=obj, name=attribute)
        if kind is str and attribute in _STR_METHODS:
            return getattr(obj, attribute)
        if (kind is LoopContext or kind is Namespace) and not attribute.startswith("_"):
            value = getattr(obj, attribute, _MISSING)
            if type(value) in _PLAIN:
                return value
        return super().getattr(obj, attribute)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Returns ``obj(*args, **kwargs)`` if the sandbox allows the call."""
        if type(obj) is BuiltinMethodType and type(obj.__self__) is str:
            kwargs.pop("_loop_vars", None)  # Jinja adds these two for functions that read the context
            kwargs.pop("_block_vars", None)
            return obj(*args, **kwargs)
        return super().call(context, obj, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
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
    value: Any,
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
        raise UserError("a message contains U+FDD0 or U+FDD1, which Unicode reserves; remove them")
    return f"{OPEN}{text}{CLOSE}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
