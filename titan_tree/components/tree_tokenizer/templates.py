"""ChatTemplate: conversations -> text, by Jinja as Hugging Face renders chat templates.

One thing is added: the filter ``text``. What a template passes through it is a *text span*: tokenised on
its own and as plain text, so that no string in a message can act as a control token, and token boundaries
are message boundaries. chatml.jinja uses it. Templates of published models do not, so their text is
tokenised as one string, control tokens inside messages included: the ids of Hugging Face, to the last one.

A text span is marked in the rendered string by two noncharacters, which Unicode keeps for internal use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
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
_MARKS = re.compile(f"[{_OPEN}{_CLOSE}]")


class ChatTemplate:
    """A Jinja chat template.

    Args:
        source: the template text.
        name: for error messages.
        constants: variables for every rendering, such as bos_token.

    Raises UserError for a syntax error.
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
        self._has_text_spans = any(f.name == "text" for f in syntax.find_all(jinja2.nodes.Filter))

    @staticmethod
    def load(template: str | Path, constants: Mapping[str, Any] | None = None) -> ChatTemplate:
        """From the name of a built-in template, a file, or a template text. UserError where it is none."""
        name = str(template)
        if "{{" in name or "{%" in name:
            return ChatTemplate(name, "(text)", constants)
        path = Path(__file__).with_name(f"{name}.jinja") if name in BUILT_IN else Path(template)
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), name, constants)
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(
                f"chat template {name}: expected {', '.join(BUILT_IN)}, a file or Jinja text; "
                f"as a file it cannot be read: {error}"
            ) from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """The text of normalised messages, text spans marked: see ``spans`` and ``plain``.

        Raises UserError for a variable the template does not read, and for the template's own errors.
        """
        if unknown := sorted(variables.keys() - self.variables):
            raise UserError(f"chat template {self.name}: it reads no variable {unknown[0]!r}")
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
        """(text, may it hold control tokens?) in order."""
        if not self._has_text_spans:
            return [(rendered, True)]
        return [(part, index % 2 == 0) for index, part in enumerate(_MARKS.split(rendered)) if part]

    def plain(self, rendered: str) -> str:
        """The rendered text without marks."""
        return "".join(text for text, _ in self.spans(rendered))


class _Generation(jinja2.ext.Extension):
    """``{% generation %}`` marks what the model writes. Read as its content: samples are cut by rendering."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Jinja as transformers sets it up for chat templates, and the filter ``text``."""
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
    """Outside of ChatTemplate, which so can be pickled for data workers."""
    return _environment().from_string(source)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own tojson escapes HTML characters; the text of a conversation must not change."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _text_span(text: str) -> str:
    if _MARKS.search(text):
        raise UserError("a message holds U+FDD0 or U+FDD1, which are no characters; remove them")
    return f"{_OPEN}{text}{_CLOSE}"


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
