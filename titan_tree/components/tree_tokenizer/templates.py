"""ChatTemplate renders a conversation as text with a Jinja template, exactly as Hugging Face does.

It adds one filter, ``text``, which makes a *text span* of its input. Control tokens in a text span are plain
text, so no message can begin a turn or end one. The built-in template chatml.jinja uses the filter. Templates
of published models do not: in their output, control tokens inside messages take effect, so that all ids equal
those of Hugging Face. All output is tokenized as one text.

Two characters that Unicode reserves for internal use mark a text span in the rendered string.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import jinja2
import jinja2.meta
import jinja2.nodes

from titan_tree.components.tree_tokenizer.limits import MAX_SOURCE
from titan_tree.components.tree_tokenizer.messages import Message
from titan_tree.components.tree_tokenizer.sandbox import (
    CLOSE,
    JSON_TEXTS,
    MARKS,
    OPEN,
    ChatEnvironment,
    JsonTexts,
)
from titan_tree.config.files import regular
from titan_tree.errors import UserError, require_unicode

BUILT_IN = ("chatml", "qwen3")
_FIELD_FILTERS = ("attr", "groupby", "rejectattr", "selectattr", "sum")  # their first argument is a field


class ChatTemplate:
    """A Jinja chat template.

    Args:
        source: the template's text.
        name: what error messages call it.
        constants: variables of every rendering, such as bos_token.

    Attributes:
        variables: names of all variables that the template reads.
        fields: names of all fields that the template reads by name, such as "role" in ``message.role``.
        has_text_spans: whether the template uses the filter ``text``.
        reads_clock: whether the template can read the current time, so that its text may change from day to
            day.

    Raises:
        UserError: a syntax error in the template.
    """

    def __init__(self, source: str, name: str, constants: Mapping[str, object] | None = None) -> None:
        self.source = source
        self.name = name
        self.constants = dict(constants or {})
        if len(source) > MAX_SOURCE:
            raise UserError(
                f"chat template {name}: expected at most {MAX_SOURCE:,} characters, got {len(source):,}"
            )
        try:
            syntax = _environment().parse(source)
            self.variables = jinja2.meta.find_undeclared_variables(syntax)
            self.fields = frozenset(_fields(syntax))
            self.reads_clock = any(n.name == "strftime_now" for n in syntax.find_all(jinja2.nodes.Name))
            self.has_text_spans = any(f.name == "text" for f in syntax.find_all(jinja2.nodes.Filter))
        except (jinja2.TemplateSyntaxError, RecursionError) as error:
            raise self._error(error) from None

    @staticmethod
    def load(template: str | Path, constants: Mapping[str, object] | None = None) -> ChatTemplate:
        """Loads a built-in template by its name, a file, or a template given as text.

        Raises:
            UserError: the template cannot be read, or has a syntax error.
        """
        name = str(template)
        if "{{" in name or "{%" in name:
            return ChatTemplate(name, "(text)", constants)
        path = Path(__file__).with_name(f"{name}.jinja") if name in BUILT_IN else Path(template)
        try:
            with open(path, encoding="utf-8-sig", opener=regular) as file:
                source = file.read(MAX_SOURCE + 1)
            return ChatTemplate(source, name, constants)
        except UserError:
            raise
        except (OSError, ValueError) as error:
            raise UserError(
                f"chat template {name}: expected {', '.join(BUILT_IN)}, a file or Jinja text; the file "
                f"cannot be read: {error}"
            ) from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
        json_texts: JsonTexts | None = None,
    ) -> str:
        """Returns the text of normalized messages with marked text spans; see ``spans`` and ``plain``.

        Args:
            messages: the messages to render.
            tools: JSON schemas of the tools.
            add_generation_prompt: whether the text ends with the header of the assistant's next message.
            variables: template variables.
            json_texts: speeds up several renderings of the same messages and tools.

        Raises:
            UserError: a variable that the template does not read, or an error in the template.
        """
        if unknown := sorted(variables.keys() - self.variables):
            raise UserError(
                f"chat template {self.name}: the template reads no variable {unknown[0]!r}; remove it, or "
                "correct its name"
            )
        try:
            template = _compiled(self.source)
            context = template.new_context(
                dict(
                    messages=messages,
                    tools=tools or None,
                    documents=None,
                    add_generation_prompt=add_generation_prompt,
                    **{**self.constants, **variables, JSON_TEXTS: json_texts or JsonTexts()},
                )
            )
            return context.concat(template.root_render_func(context))  # type: ignore[attr-defined]
        except (UserError, MemoryError):
            raise
        except Exception as error:  # a template can raise any exception
            raise self._error(error) from None

    def spans(self, rendered: str) -> list[tuple[str, bool]]:
        """Cuts rendered text, or the end of it, into (text, whether control tokens take effect), in order.

        One mark stands between two spans. A span may be empty.
        """
        if not self.has_text_spans:
            return [(rendered, True)]
        begins_inside = rendered.count(CLOSE) > rendered.count(OPEN)
        return [(part, index % 2 == begins_inside) for index, part in enumerate(MARKS.split(rendered))]

    def plain(self, rendered: str) -> str:
        """Returns rendered text without the marks of text spans.

        Raises:
            UserError: the text contains a lone surrogate, so it is not valid Unicode.
        """
        text = "".join(text for text, _ in self.spans(rendered))
        return require_unicode(text, f"text of chat template {self.name}")

    def _error(self, error: Exception) -> UserError:
        """Returns the UserError, in one line, for an exception that the template or Jinja raised."""
        where = f"chat template {self.name}"
        if isinstance(error, jinja2.TemplateSyntaxError):
            where += f", line {error.lineno}"
        message = (
            str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
        )
        printable = "".join(char if char.isprintable() else " " for char in message)
        return UserError(f"{where}: {' '.join(printable.split())}")


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


@lru_cache(maxsize=1)
def _environment() -> ChatEnvironment:
    return ChatEnvironment()


@lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    """Compiles a template. ChatTemplate does not store the result, which could not be pickled."""
    return _environment().from_string(source)
