"""What a chat template shows of a conversation, and where it ends answers.

A probe is a copy of a conversation with a mark in place of each of its texts. A mark that is missing in the
rendered text was left out by the template. TRL's tests of templates do the same with one fixed conversation.
Here the marks are planted once per template and kind of message, so that other conversations cost nothing.
A second probe has texts that are longer than the real ones, because templates may cut long texts.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from functools import partial
from itertools import count as numbers

from titan_tree.components.tree_tokenizer.messages import IMAGE_TOKEN, Message, images_of, texts_of
from titan_tree.components.tree_tokenizer.templates import CallForm, ChatTemplate, End
from titan_tree.components.tree_tokenizer.tool_calls import parse_object
from titan_tree.errors import UserError, count

Tools = Sequence[Mapping[str, object]]
Variables = Mapping[str, object]
Marks = list[tuple[str, str]]  # (field, mark) of each text of a message or of the tools, in order
LONG = 100_000  # characters of the text that takes the place of a shorter one
MARK = re.compile(r"zq\d+qz")


class Probe:
    """A conversation and its tools with marks in place of their texts; long texts in the messages ``long``.

    If ``long`` contains -1, one tool of each form also has a long description.
    """

    def __init__(self, messages: Sequence[Message], tools: Tools | None, long: Collection[int] = ()) -> None:
        self._mark = map("zq{}qz".format, numbers()).__next__
        self.tools, self.tool_marks = self._tools(tools or (), -1 in long)
        planted = [self.message(message, index in long) for index, message in enumerate(messages)]
        self.messages, self.marks = [m for m, _ in planted], [marks for _, marks in planted]

    def message(self, message: Message, is_long: bool = False) -> tuple[Message, Marks]:
        """Returns a message with marks, and the marks that a prompt must have: not those of thoughts."""
        marks: Marks = []
        size = _size(message) if is_long else 0
        planted = {field: value for field, value in message.items() if field != "prefill"}
        if message.get("reasoning_content"):
            planted["reasoning_content"] = self._mark()
        content = message["content"]
        if isinstance(content, list):
            planted["content"] = [
                {**part, "text": self._text("content", size, marks)} if part.get("text", "").strip() else part
                for part in content
            ]
        elif content.strip():
            planted["content"] = self._text("content", size, marks)
        if calls := message.get("tool_calls"):
            planted["tool_calls"] = [
                self._call(call, f"tool_calls[{index}]", size, marks) for index, call in enumerate(calls)
            ]
        return planted, marks

    def _text(self, field: str, size: int, marks: Marks) -> str:
        """Returns a mark, or ``size`` characters with three. Adds them to ``marks``."""
        planted = [self._mark() for _ in range(3 if size else 1)]
        marks += [(field, mark) for mark in planted]
        words = size // 24  # in many lines and in a long one, because a template may cut either
        return ("\ntitan" * words + " titan" * words + " ").join(planted)

    def _call(self, call: Message, where: str, size: int, marks: Marks) -> Message:
        arguments: object = call["function"]["arguments"]
        name, field = self._text(f"{where}.name", 0, marks), f"{where}.arguments"
        parsed = parse_object(arguments) if isinstance(arguments, str) else arguments
        if parsed is not None:
            planted = {self._text(field, 0, marks): self._text(field, size, marks)}
            arguments = planted if arguments is parsed else json.dumps(planted)
        elif arguments:  # the text of a custom tool, or broken JSON
            arguments = self._text(field, size, marks)
        return {**call, "function": {"name": name, "arguments": arguments}}

    def _tools(self, tools: Tools, is_long: bool) -> tuple[list[dict[str, object]], Marks]:
        marks: Marks = []
        planted = []
        long = {_tool_form(tool): index for index, tool in enumerate(tools)}.values() if is_long else ()
        for index, tool in enumerate(tools):
            inner = tool.get("function")
            function = {**(inner if isinstance(inner, dict) else tool)}
            for field in ("name", "description"):
                if isinstance(text := function.get(field), str) and text.strip():
                    size = _size({"content": text}) if index in long and field == "description" else 0
                    function[field] = self._text(f"tools[{index}].{field}", size, marks)
            parameters = function.get("parameters")
            if isinstance(parameters, dict) and isinstance(types := parameters.get("properties"), dict):
                names = [self._mark() for _ in types]
                types = dict(zip(names, types.values(), strict=True))
                function["parameters"] = {**parameters, "properties": types}
                marks += [(f"tools[{index}].parameters", name) for name in names]
            planted.append({**tool, "function": function} if isinstance(inner, dict) else function)
        return planted, marks


def _missing(marks: Marks, shown: Collection[str]) -> str | None:
    """Returns the first field with a mark that is not among those that a template shows."""
    return next((field for field, mark in marks if mark not in shown), None)


def _marks(text: str) -> set[str]:
    """Returns the marks in a rendered text. A template may change the case."""
    return set(MARK.findall(text.lower()))


def _size(message: Message) -> int:
    """Returns how many characters the long texts in place of a message's texts have: more than these."""
    calls = message.get("tool_calls", ())
    texts = *texts_of(message["content"]), *[str(call["function"]["arguments"]) for call in calls]
    return LONG << (max(map(len, texts), default=0) // LONG).bit_length()


def check_context(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Tools | None,
    turns: Sequence[int],
    variables: Variables,
) -> None:
    """Raises UserError unless the prompts of these turns show all messages, images, calls, results and tools.

    Thoughts of earlier turns may be missing: templates drop them on purpose, so the model did not see them.
    """
    shared = repr(sorted(variables.items())), frozenset(map(_tool_form, tools or ()))
    shown = template.shown.get(shared)
    kinds = list(_kinds(messages[: turns[-1]]))
    new = [index for index, kind in enumerate(kinds) if shown is None or kind not in shown]
    if shown is not None and not new:
        return
    # The next prompt after each message of a new kind, and the last prompt.
    chosen = sorted({next(turn for turn in turns if turn > index) for index in new} | {turns[-1]})
    names = [f"messages[{index}] ({message['role']}) " for index, message in enumerate(messages)]
    oldest = {kinds[index][1:3]: index for index in reversed(new)}.values()  # of each form
    for long, prompts in ((), chosen), ((-1, *oldest), turns[-1:]):
        probe, prefixes = Probe(messages, tools, long), [(turn, True) for turn in prompts]
        try:
            texts = list(template.prefixes(probe.messages, probe.tools, prefixes, variables))
        except UserError:  # the template refuses the conversation, or depends on its texts
            if not long:
                return
            break  # it refuses long texts, so it cuts none
        for turn, text in zip(prompts, texts, strict=True):
            images = sum(len(images_of(message["content"])) for message in messages[:turn])
            if (num_shown := text.count(IMAGE_TOKEN)) != images:
                raise UserError(
                    f"messages[{turn}]: the chat template {template.name} shows {num_shown} of the "
                    f"{count(images, 'image')} in the prompt, so it would be trained without what the model "
                    "read; choose a data.template that shows images of all roles, or remove the sample"
                )
            rendered = _marks(text)
            for where, marks in [("", probe.tool_marks), *zip(names, probe.marks, strict=True)][: turn + 1]:
                if field := _missing(marks, rendered):
                    lost = f"leaves this out of the prompt, so messages[{turn}]"
                    hint = "shows it, or remove the sample"
                    if long:
                        lost, hint = "cuts long texts in the prompt, so samples", "shows them whole"
                    raise UserError(
                        f"{where}{field}: the chat template {template.name} {lost} would be trained without "
                        f"what the model read; choose a data.template that {hint}"
                    )
    template.shown.setdefault(shared, set()).update(kinds)


def _kinds(messages: Sequence[Message]) -> Iterator[tuple[Hashable, ...]]:
    """Yields the kind of each message. Templates show or hide all messages of one kind."""
    users = [index for index, message in enumerate(messages) if message["role"] == "user"]
    last_user = users[-1] if users else -1
    seen, before = set(), None
    for index, message in enumerate(messages):
        content, calls = message["content"], message.get("tool_calls")
        form = (
            message["role"],
            not any(map(str.strip, texts_of(content))),
            bool(images_of(content)),
            bool(message.get("reasoning_content")),
            tuple([type(call["function"]["arguments"]) for call in calls[:2]]) if calls else (),
            _size(message),
        )
        yield before, form, index < last_user, form in seen
        seen.add(form)
        before = form


def _tool_form(tool: Mapping[str, object]) -> tuple[str | int, ...]:
    inner = tool.get("function")
    function = inner if isinstance(inner, dict) else tool
    return *tool, *function, _size({"content": str(function.get("description"))})


def find_call_form(
    template: ChatTemplate, messages: Sequence[Message], tools: Tools | None, variables: Variables
) -> None:
    """Sets the first form of calls that the template shows. Without one, ``check_context`` refuses them."""
    probe = Probe(messages, tools)
    asked = [marks for message, marks in zip(messages, probe.marks, strict=True) if "tool_calls" in message]
    for form in (CallForm(a, n) for n in (False, True) for a in (False, True)):
        template.call_form = form
        try:
            text = template.render(probe.messages, probe.tools, False, variables)
        except UserError:
            continue
        is_python = re.search(r"\{'zq\d+qz': 'zq\d+qz'\}", text)  # an object that was printed as text
        if not is_python and not any(_missing(marks, _marks(text)) for marks in asked):
            return
    template.call_form = None


def check_images(template: ChatTemplate, variables: Variables) -> None:
    """Raises UserError unless the template shows the image of a user's message once, beside its text."""
    message = {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "zq0qz"}]}
    reason = ""
    try:
        text = template.render([message], None, True, variables)
    except UserError as error:
        text, reason = "", f" ({error})"
    if text.count(IMAGE_TOKEN) != 1 or not _marks(text):
        raise UserError(
            f"messages: the chat template {template.name} does not show images{reason}; choose a "
            "data.template of a model with vision, or chatml"
        )


def find_separator(template: ChatTemplate, variables: Variables) -> str:
    """Returns what the template puts between two text parts, or a line feed if it reads only text."""
    texts = "zq0qz", "zq1qz"
    parts = [{"type": "text", "text": text} for text in texts]
    try:
        text = template.plain(template.render([{"role": "user", "content": parts}], None, True, variables))
    except UserError:
        return "\n"
    between = text.partition(texts[0])[2].partition(texts[1])
    return between[0] if between[1] and "text" not in between[0] else "\n"


def find_end(
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Tools | None,
    variables: Variables,
    following: str,
    tokens: Collection[str],
    stops: Collection[str],
) -> End:
    """Returns where the template ends an answer.

    This is the first of ``stops`` between the answer and the next message. If there is none, it is the last
    control token that follows the answer both with and without a next message. This excludes a token that
    ends a whole text. If there is no such token, it is the mark of the next role, as in GLM-4.5.

    Args:
        messages: the last one is the answer.
        following: role of the next message.
        tokens: the control tokens.
        stops: tokens at which an engine stops, as the files of the tokenizer say.
    """
    *before, answer = messages
    if not (answer["content"].strip() or answer.get("tool_calls")):
        answer = {**answer, "content": "."}
    probe = Probe([*before, answer], tools)
    calls = answer.get("tool_calls") or [{}]
    follow = [{"role": following, "content": "."} for _ in (calls if following == "tool" else "1")]
    for message, call in zip(follow, calls, strict=False):
        message |= {"tool_call_id": call["id"]} if following == "tool" and "id" in call else {}
    planted = [probe.message(message) for message in follow]
    render = partial(template.render, tools=probe.tools, add_generation_prompt=False, variables=variables)
    try:
        final = render(probe.messages)
    except UserError:  # the template depends on the texts of messages
        return End("")
    last = max((mark for _, mark in probe.marks[-1]), key=final.rfind)
    following_mark = planted[0][1][0][1]
    final = final.rpartition(last)[2]
    try:
        text, found, _ = render([*probe.messages, *(m for m, _ in planted)]).partition(following_mark)
        followed = text.rpartition(last)[2] if found else final
    except UserError:  # no message may follow
        followed = final
    finder = re.compile("|".join(map(re.escape, sorted({*tokens, *stops}, key=len, reverse=True))) or r"(?!)")
    alone, inside = (finder.findall(text) for text in (final, followed))
    shared = 0
    while shared < min(len(alone), len(inside)) and alone[shared] == inside[shared]:
        shared += 1
    candidates = [t for t in inside if t in stops] + inside[:shared][::-1] + alone[:1] + inside[:1]
    for token in candidates:
        if token in alone:
            return End(token, times=alone.count(token))
        added = followed[len(final) : followed.find(token, len(final)) + len(token)]
        if followed.startswith(final) and added.strip() == token:
            return End(token, added)
    return End("")
