"""ChatTemplate renders a conversation as text with a Jinja template, exactly as Hugging Face does.

It adds one filter, ``text``, which makes a *text span* of its input. A text span is tokenized separately and
as plain text, so no string in a message can act as a control token. The built-in template chatml.jinja uses
the filter. Templates of published models do not: their output is tokenized as one string, where control
tokens inside messages take effect, so that all ids equal those of Hugging Face.

Two characters that Unicode reserves for internal use mark a text span in the rendered string.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titan_tree.components.tree_tokenizer.messages import Message
from titan_tree.errors import UserError

BUILT_IN = ("chatml", "qwen3")
_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_FIELD_FILTERS = ("attr", "groupby", "rejectattr", "selectattr", "sum")  # their first argument is a field
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")


class ChatTemplate:
    """A Jinja chat template.

    Args:
        source: the template's text.
        name: what error messages call it.
        constants: variables of every rendering, such as bos_token.

    Attributes:
        variables: names of all variables that the template reads.
        fields: names of all fields that the template reads by name, such as "role" in ``message.role``.
        reads_clock: whether the template can read the current time, so that its text may change from day to
            day.

    Raises:
        UserError: a syntax error in the template.
    """

    def __init__(self, source: str, name: str, constants: Mapping[str, Any] | None = None) -> None:
        self.source = source
        self.name = name
        self.constants = dict(constants or {})
        try:
            syntax = _environment().parse(source)
        except jinja2.TemplateSyntaxError as error:
            raise UserError(f"chat template {name}, line {error.lineno}: {error.message}") from None
        self.variables = jinja2.meta.find_undeclared_variables(syntax)
        self.fields = frozenset(_fields(syntax))
        self.reads_clock = any(n.name == "strftime_now" for n in syntax.find_all(jinja2.nodes.Name))
        self._has_text_spans = any(f.name == "text" for f in syntax.find_all(jinja2.nodes.Filter))

    @staticmethod
    def load(template: str | Path, constants: Mapping[str, Any] | None = None) -> ChatTemplate:
        """Loads a built-in template by its name, a file, or a template given as text.

        Raises:
            UserError: the template cannot be read, or has a syntax error.
        """
        name = str(template)
        if "{{" in name or "{%" in name:
            return ChatTemplate(name, "(text)", constants)
        path = Path(__file__).with_name(f"{name}.jinja") if name in BUILT_IN else Path(template)
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), name, constants)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"chat template {name}: expected {', '.join(BUILT_IN)}, a file or Jinja text; the file "
                f"cannot be read: {error}"
            ) from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Returns the text of normalized messages with marked text spans; see ``spans`` and ``plain``.

        Raises:
            UserError: a variable that the template does not read, or an error in the template.
        """
        if unknown := sorted(variables.keys() - self.variables):
            raise UserError(
                f"chat template {self.name}: the template reads no variable {unknown[0]!r}; remove it, or "
                "correct its name"
            )
        try:
            return _compiled(self.source).render(
                messages=messages,
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **{**self.constants, **variables},
            )
        except UserError:
            raise
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise UserError(f"chat template {self.name}: {error}") from None

    def spans(self, rendered: str) -> list[tuple[str, bool]]:
        """Cuts rendered text into (text, whether control tokens in it take effect), in order."""
        if not self._has_text_spans:
            return [(rendered, True)]
        return [(part, index % 2 == 0) for index, part in enumerate(_MARKS.split(rendered)) if part]

    def plain(self, rendered: str) -> str:
        """Returns rendered text without the marks of text spans."""
        return "".join(text for text, _ in self.spans(rendered))


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


class _Generation(jinja2.ext.Extension):
    """Renders ``{% generation %}`` blocks as their content. samples.py finds completions without the tags."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Returns Jinja as transformers configures it for chat templates, with the filter ``text`` added."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.filters["text"] = _text_span
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
    return environment


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """Compiles a template. ChatTemplate does not store the result, which could not be pickled."""
    return _environment().from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Replaces Jinja's tojson, which escapes HTML characters and so would change a conversation's text."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _text_span(text: str) -> str:
    if _MARKS.search(text):
        raise UserError("a message contains U+FDD0 or U+FDD1, which Unicode reserves; remove them")
    return f"{_OPEN}{text}{_CLOSE}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
