"""ChatTemplate renders a conversation as text with a Jinja template, exactly as Hugging Face does.

It adds one filter, ``text``, which makes a *text span* of its input. Control tokens in a text span are plain
text, so no message can begin a turn or end one. The built-in template chatml.jinja uses the filter. Templates
of published models do not: in their output, control tokens inside messages take effect, so that all ids equal
those of Hugging Face. All output is tokenized as one text.

Two characters that Unicode reserves for internal use mark a text span in the rendered string.
"""

from __future__ import annotations

import difflib
import pickle
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from titan_tree.components.tree_tokenizer.messages import REASONING_FIELDS, Message
from titan_tree.components.tree_tokenizer.template_process import PROCESS
from titan_tree.components.tree_tokenizer.tool_calls import printed
from titan_tree.config.files import regular
from titan_tree.errors import UserError, did_you_mean, require_unicode

BUILT_IN = ("chatml", "qwen3")
MAX_SOURCE = 1 << 18  # characters of a template
# Of samples, beside a template's variables.
SETTINGS = ("turns", "text_before_calls_is_reasoning", "part_separator")
OPEN, CLOSE = "\ufdd0", "\ufdd1"  # the marks of text spans, which sandbox.py makes
_MARKS = re.compile(f"[{OPEN}{CLOSE}]")


def _hint(name: str) -> str:
    """Returns which setting of samples was probably meant by an unknown variable."""
    close = difflib.get_close_matches(name, SETTINGS, n=1)
    return f", did you mean {close[0]!r}" if close else ""


class End(NamedTuple):
    """Where a chat template ends an answer.

    Attributes:
        token: the token at which an engine stops, or "" if the template has none.
        added: the text to add to a finished answer if the template writes the token only before the next
            message; otherwise "".
        times: how often the template writes the token after a last answer. Only the first one is trained.
    """

    token: str
    added: str = ""
    times: int = 1


class CallForm(NamedTuple):
    """How tool calls are given to a chat template: the first form in which it shows them.

    Attributes:
        as_text: whether arguments are JSON text, as DeepSeek's templates need, and not an object.
        null_content: whether empty content beside calls is null.
    """

    as_text: bool = False
    null_content: bool = False

    def of(self, message: Message) -> Message:
        """Returns a message in this form."""
        if not message.get("tool_calls"):
            return message
        message = {**message, "content": message["content"] or (None if self.null_content else "")}
        if self.as_text:
            message["tool_calls"] = [_with_text(call) for call in message["tool_calls"]]
        return message


def _with_text(call: Message) -> Message:
    function = call["function"]
    if isinstance(function["arguments"], dict):
        function = {**function, "arguments": printed(function["arguments"])}
    return {**call, "function": function}


class ChatTemplate:
    """A Jinja chat template. It runs in a process of its own (template_process.py).

    Args:
        source: the template's text.
        name: what error messages call it.
        constants: variables of every rendering, such as bos_token.

    Attributes:
        variables: names of all variables that the template reads, apart from those that every rendering
            sets: messages, tools and add_generation_prompt. ``date`` is what strftime_now prints.
        fields: names of all fields that the template reads by name, such as "role" in ``message.role``.
        has_text_spans: whether the template uses the filter ``text``.
        shown: kinds of messages that the template shows, for each kind of variables and tools, as probes.py
            has found.
        ends: where the template ends answers of each kind, as probes.py has found.
        separator: what stands between two text parts of a message; None: not known yet.
        call_form: how calls are given to the template; None: not known yet.

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
        (description,) = self._request("describe")
        self.variables = frozenset(description["variables"]) - {"messages", "tools", "add_generation_prompt"}
        self.fields = frozenset(description["fields"])
        self.has_text_spans: bool = description["has_text_spans"]
        self._reasoning_fields = [name for name in REASONING_FIELDS if name in self.fields]
        self.shown: dict[Hashable, set[Hashable]] = {}
        self.ends: dict[Hashable, End] = {}
        self.separator: str | None = None
        self.call_form: CallForm | None = None

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
        expected = f"chat template {name}: expected {', '.join(BUILT_IN)}, a file or Jinja text"
        try:
            with open(path, encoding="utf-8-sig", opener=regular) as file:
                source = file.read(MAX_SOURCE + 1)
            return ChatTemplate(source, name, constants)
        except UserError:
            raise
        except FileNotFoundError:
            raise UserError(f"{expected}, got no such file{did_you_mean(name, BUILT_IN)}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or error
            raise UserError(f"{expected}; the file cannot be read: {reason}") from None

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None,
        add_generation_prompt: bool,
        variables: Mapping[str, object],
    ) -> str:
        """Returns the text of normalized messages with marked text spans; see ``spans`` and ``plain``.

        Args:
            messages: the messages to render.
            tools: JSON schemas of the tools.
            add_generation_prompt: whether the text ends with the header of the assistant's next message.
            variables: template variables.

        Raises:
            UserError: a variable that the template does not read, an error in the template, or a limit of
                time, memory or text that it exceeds.
        """
        return next(self.prefixes(messages, tools, [(len(messages), add_generation_prompt)], variables))

    def prefixes(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, object]] | None,
        prefixes: Sequence[tuple[int, bool]],
        variables: Mapping[str, object],
    ) -> Iterator[str]:
        """Yields the text of each prefix, given as (number of messages, ``add_generation_prompt``).

        One request renders all of them. An error in the template is raised in place of its text. Reasoning
        is given under all names that the template reads, such as ``thinking`` in gpt-oss's.
        """
        if unknown := sorted(variables.keys() - self.variables):
            raise UserError(
                f"chat template {self.name}: the template reads no variable {unknown[0]!r}"
                f"{_hint(unknown[0])}; remove it, or correct its name"
            )
        if (names := self._reasoning_fields) not in ([], ["reasoning_content"]):
            messages = [
                message | dict.fromkeys(names, message["reasoning_content"])
                if "reasoning_content" in message
                else message
                for message in messages
            ]
        if self.call_form is not None and any(self.call_form):
            messages = [self.call_form.of(message) for message in messages]
        text = ""
        constants = {**self.constants, **variables}
        for shared, rest in self._request("render", messages, tools, prefixes, constants):
            text = text[:shared] + rest
            yield text

    def spans(self, rendered: str) -> list[tuple[str, bool]]:
        """Cuts rendered text, or the end of it, into (text, whether control tokens take effect), in order.

        One mark stands between two spans. A span may be empty.
        """
        if not self.has_text_spans:
            return [(rendered, True)]
        begins_inside = rendered.count(CLOSE) > rendered.count(OPEN)
        return [(part, index % 2 == begins_inside) for index, part in enumerate(_MARKS.split(rendered))]

    def reopened(self, before: str, text: str) -> str:
        """Returns ``text``, with a mark in front if ``before``, which precedes it, ends in a text span."""
        is_open = self.has_text_spans and before.rfind(OPEN) > before.rfind(CLOSE)
        return OPEN + text if is_open else text

    def plain(self, rendered: str) -> str:
        """Returns rendered text without the marks of text spans.

        Raises:
            UserError: the text contains a lone surrogate, so it is not valid Unicode.
        """
        text = "".join(text for text, _ in self.spans(rendered))
        return require_unicode(text, f"text of chat template {self.name}")

    def _request(self, name: str, *arguments: object) -> Iterator[Any]:
        """Yields what a function of sandbox.py yields for this template, and raises its error."""
        where = f"chat template {self.name}"
        try:
            results, error = PROCESS.request(name, self.source, *arguments)
        except (pickle.PicklingError, TypeError, AttributeError, RecursionError) as unsent:
            raise UserError(
                f"{where}: {type(unsent).__name__}: {unsent}; give messages and variables of plain values"
            ) from None
        yield from results
        if error is not None:
            line, message = error
            where += f", line {line}" if line is not None else ""
            printable = "".join(char if char.isprintable() else " " for char in message)
            raise UserError(f"{where}: {' '.join(printable.split())}")
