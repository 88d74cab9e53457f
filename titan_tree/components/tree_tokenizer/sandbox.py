"""ChatEnvironment: Jinja as Hugging Face configures it for chat templates, but faster.

A template is code from the internet, so it runs in Jinja's sandbox. The sandbox checks every attribute that
the template reads. ChatEnvironment answers without these checks where their outcome is known. A template that
renders every prefix of a conversation reads the same objects again and again; their JSON text is kept.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from datetime import datetime
from types import BuiltinMethodType
from typing import Any, TypeVar

import jinja2
import jinja2.ext
import jinja2.nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, modifies_known_mutable
from jinja2.utils import Namespace

from titan_tree.components.tree_tokenizer.limits import (
    FREE,
    METHODS,
    REFUSED,
    LimitedContext,
    limited_filters,
    limited_method,
    measure,
    multiply,
)
from titan_tree.errors import UserError

T = TypeVar("T")
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # the marks of text spans
MARKS = re.compile(f"[{OPEN}{CLOSE}]")
JSON_TEXTS = "json texts"  # the variable that holds the JsonTexts of a rendering; no template can name it
JSON_CHARACTERS = 1 << 24  # capacity of JsonTexts, in characters

_DICT_ATTRIBUTES = frozenset(dir(dict))
_STR_METHODS = frozenset(name for name in dir(str) if not name.startswith("_")) - {
    *METHODS,
    *REFUSED[str],
}
_PLAIN = frozenset((str, int, bool, float, type(None), dict, list, tuple))
_MISSING = object()
_TICK = jinja2.nodes.ExprStmt(jinja2.nodes.Const(None))
_DEFAULTS = False, None, None, False


class _Code(CodeGenerator):
    """Reads the fields of messages without a function call, and reports what the limits count."""

    def visit_Getattr(self, node: jinja2.nodes.Getattr, frame: Frame) -> None:  # noqa: N802
        """Writes ``obj.attr`` as an expression that reads a dict and leaves other objects to the sandbox."""
        if node.attr in _DICT_ATTRIBUTES:
            super().visit_Getattr(node, frame)
            return
        # An inner expression is done with ``got`` before the outer one assigns it.
        self.write(f"(got[{node.attr!r}] if type(got := ")
        self.visit(node.node, frame)
        self.write(f") is dict and {node.attr!r} in got else environment.getattr(got, {node.attr!r}))")

    def visit_For(self, node: jinja2.nodes.For, frame: Frame) -> None:  # noqa: N802
        """Writes a loop that counts its iterations."""
        node.body = [_TICK, *node.body]
        super().visit_For(node, frame)

    def macro_body(self, node: Any, frame: Frame) -> Any:
        """Writes a macro that counts its calls."""
        node.body = [_TICK, *node.body]
        return super().macro_body(node, frame)

    def visit_ExprStmt(self, node: jinja2.nodes.ExprStmt, frame: Frame) -> None:  # noqa: N802
        if node is _TICK:
            self.writeline("context.tick()")
        else:
            super().visit_ExprStmt(node, frame)

    def visit_Add(self, node: jinja2.nodes.BinExpr, frame: Frame) -> None:  # noqa: N802
        """Writes ``a + b + c`` with one check of the sum."""
        terms: list[jinja2.nodes.Expr] = [node]
        while isinstance(first := terms[0], jinja2.nodes.Add):
            terms[:1] = [first.left, first.right]
        self._write_grown(lambda: self._write_joined(terms, " + ", lambda term: self.visit(term, frame)))

    def visit_Concat(self, node: jinja2.nodes.Concat, frame: Frame) -> None:  # noqa: N802
        def as_text(part: jinja2.nodes.Expr) -> None:
            self._output_child_pre(part, frame, None)
            self.visit(part, frame)
            self._output_child_post(part, frame, None)

        def join() -> None:
            self.write("''.join((")
            self._write_joined(node.nodes, ", ", as_text)
            self.write(",))")

        self._write_grown(join)

    def visit_Filter(self, node: jinja2.nodes.Filter, frame: Frame) -> None:  # noqa: N802
        visit = super().visit_Filter
        self._write_grown(lambda: visit(node, frame))

    def visit_Getitem(self, node: jinja2.nodes.Getitem, frame: Frame) -> None:  # noqa: N802
        visit = super().visit_Getitem
        if isinstance(node.arg, jinja2.nodes.Slice):
            self._write_grown(lambda: visit(node, frame))
        else:
            visit(node, frame)

    def visit_ScopedEvalContextModifier(self, node: Any, frame: Frame) -> None:  # noqa: N802
        self.fail("autoescape is not supported, because it would change the text of messages", node.lineno)

    def _output_child_pre(self, node: jinja2.nodes.Expr, frame: Frame, finalize: object) -> None:
        self.write("(got if type(got := ")

    def _output_child_post(self, node: jinja2.nodes.Expr, frame: Frame, finalize: object) -> None:
        self.write(") is str else context.text(got))")

    def _write_grown(self, write: Callable[[], None]) -> None:
        """Writes an expression whose value counts unless it is a short string."""
        self.write("(got if type(got := ")
        write()
        self.write(f") is str and len(got) < {FREE} else context.grown(got))")

    def _write_joined(self, parts: Sequence[T], separator: str, write: Callable[[T], None]) -> None:
        for index, part in enumerate(parts):
            self.write(separator if index else "")
            write(part)


class ChatEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the functions and filters of chat templates; templates.py explains ``text``."""

    code_generator_class = _Code
    context_class = LimitedContext
    intercepted_binops = frozenset(("*", "**", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
        )
        self.filters = limited_filters(self.filters | {"tojson": _to_json, "text": _text_span})
        del self.globals["lipsum"]
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
            if len(obj.__self__) >= FREE:  # the result is at most about as long
                context.grown(obj.__self__)  # type: ignore[attr-defined]
            return obj(*args, **kwargs)
        return context.grown(super().call(context, obj, *args, **kwargs))  # type: ignore[attr-defined]

    def call_binop(self, context: Context, operator: str, left: object, right: object) -> object:
        """Returns the product, the power, the remainder or the formatted text."""
        multiply(operator, left, right)
        return context.grown(super().call_binop(context, operator, left, right))  # type: ignore

    def is_safe_attribute(self, obj: object, attr: str, value: object) -> bool:
        """Also refuses ``dict.update`` and its like, with which a template could change a message."""
        if any(isinstance(obj, kind) and attr in names for kind, names in REFUSED.items()):
            return False
        return super().is_safe_attribute(obj, attr, value) and not (
            obj is dict and modifies_known_mutable({}, attr)
        )

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Returns a limited method for one that can make a text much longer; Jinja calls it for each one."""
        name, text = getattr(value, "__name__", None), getattr(value, "__self__", None)
        if not isinstance(text, str) or name not in METHODS:
            return super().wrap_str_format(value)
        return limited_method(name, text, super().wrap_str_format(value) or value)

    def _generate(self, *args: Any, **kwargs: Any) -> str:
        source = super()._generate(*args, **kwargs)
        # No text of a template matches, because it has no line breaks in the source.
        return source.replace("\n    concat = environment.concat\n", "\n    concat = context.concat\n")


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
        measure(value)
        if (indent if isinstance(indent, int) else measure(indent)) > 100 or measure(separators) > 100:
            raise jinja2.TemplateRuntimeError("tojson: the indent or the separators are too long")
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
        raise UserError("a message contains U+FDD0 or U+FDD1, which Unicode reserves; remove them")
    return f"{OPEN}{text}{CLOSE}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)
