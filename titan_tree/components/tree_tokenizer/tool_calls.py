"""Arguments of tool calls as the model wrote them, and results of tools in the order of their calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

from titan_tree.components.tree_tokenizer.endings import ending
from titan_tree.errors import UserError, shorten

Message = dict[str, Any]
EARLY_RESULT = (
    "a tool's result before any answer of the assistant, and it is kept as context; if the conversation lost "
    "its beginning, add it"
)
PARTS = (
    "content in several text parts; they are joined by what the chat template puts there, or by a line feed, "
    'as vLLM does; SGLang joins by a blank: set data.sample.part_separator = " "'
)
NO_OBJECT = (
    "arguments that look like JSON, but are no JSON object, and are kept as the text that the model wrote; "
    "if it should not learn that, give the message weight 0"
)


def ordered_results(messages: Sequence[Message], template_reads_ids: bool, where: str) -> list[Message]:
    """Returns normalized messages in which the results of a message's calls are in the order of the calls.

    A template that does not read ``tool_call_id`` shows only by this order which call a result belongs to.
    With other templates, and where calls or results have no ids, the order stays. It also stays where no
    message with calls precedes: they may be in the text of an answer, or in a history that was left out.

    Raises:
        UserError: the id of a result is not that of one of the assistant's last calls, two results have one
            id, or, with such a template, a call without a result precedes one with a result.
    """
    ordered: list[Message] = []
    calls: list[object] = []  # ids of the assistant's last calls
    answered: list[object] = []  # those that have a result
    for role, run in groupby(enumerate(messages), key=lambda item: item[1]["role"]):
        members = list(run)
        if role == "assistant":
            calls = [call.get("id") for _, message in members for call in message.get("tool_calls", ())]
            answered = []
        if (
            role != "tool"
            or not calls
            or None in calls
            or any(m.get("tool_call_id") is None for _, m in members)
        ):
            ordered += [message for _, message in members]
            continue
        for index, message in members:
            identifier = message["tool_call_id"]
            if identifier not in calls or identifier in answered:
                expected = ", ".join(shorten(c) for c in calls if c not in answered) or "no result"
                raise UserError(
                    f"{where}[{index}].tool_call_id: expected the id of a call in the assistant's message "
                    f"before it, and one result per call ({expected}), got {shorten(identifier)}"
                )
            answered.append(identifier)
        if template_reads_ids:
            ordered += [message for _, message in members]
            continue
        results = {message["tool_call_id"]: message for _, message in members}
        if missing := [call for call in calls[: len(answered)] if call not in answered]:
            raise UserError(
                f"{where}[{members[0][0]}]: expected the results of all calls, because the chat template "
                f"does not show their ids; {shorten(missing[0])} has none"
            )
        ordered += [results[call] for call in calls if call in results]
    return ordered


def readable_arguments(
    messages: Sequence[Message], render: Callable[[Sequence[Message]], str], where: str
) -> list[Message]:
    """Returns normalized messages whose arguments the chat template prints as the model wrote them.

    ``normalize_messages`` leaves the JSON text of an object as text, if printing the object would give other
    characters. Where the template does not print text as it is, the objects take its place.

    Args:
        render: renders messages with the chat template.

    Raises:
        UserError: the template needs the object, and would print one of its numbers in another way.
    """
    texts = [
        call["function"]["arguments"]
        for message in messages
        for call in message.get("tool_calls", ())
        if _is_object(call["function"]["arguments"])
    ]
    if not texts:
        return list(messages)
    try:
        rendered = render(messages)
    except UserError:  # such as a template that lists the arguments by name
        rendered = ""
    if all(text in rendered for text in texts):
        return list(messages)
    return [_with_objects(message, f"{where}[{index}]") for index, message in enumerate(messages)]


def has_parts(message: object) -> bool:
    """Returns whether the content of a message has texts side by side."""
    content = message.get("content") if isinstance(message, dict) else None
    parts = content if isinstance(content, list) else []
    return any(map(all, pairwise(isinstance(part, dict) and "text" in part for part in parts)))


def doubtful(messages: Sequence[Message]) -> Iterator[tuple[str, str]]:
    """Yields probable mistakes of checked messages, as (place in the messages, what it is).

    Arguments in free text are those of a custom tool, and an answer that was cut off may end within a call.
    """
    has_answer = False
    for index, message in enumerate(messages):
        if has_parts(message):
            yield f"[{index}].content", PARTS
        if message["role"] == "tool" and not has_answer:
            yield f"[{index}]", EARLY_RESULT
        has_answer |= message["role"] == "assistant"
        if ending(message.get("finish_reason"), "finish_reason") != "finished":
            continue
        for number, call in enumerate(message.get("tool_calls") or ()):
            text = call.get("function", call)["arguments"]
            if isinstance(text, str) and text.lstrip()[:1] in ("{", "[") and not _is_object(text):
                yield f"[{index}].tool_calls[{number}]", NO_OBJECT


def _with_objects(message: Message, where: str) -> Message:
    if "tool_calls" not in message:
        return message
    calls = []
    for index, call in enumerate(message["tool_calls"]):
        function = call["function"]
        if _is_object(function["arguments"]):
            place = f"{where}.tool_calls[{index}].function.arguments"
            function = {**function, "arguments": _parse(function["arguments"], place)}
        calls.append({**call, "function": function})
    return {**message, "tool_calls": calls}


def _is_object(arguments: object) -> bool:
    """Returns whether arguments are the text of an object, which ``normalize_messages`` could have parsed."""
    return isinstance(arguments, str) and parse_object(arguments) is not None


def _parse(text: str, where: str) -> object:
    def same(kind: type) -> Callable[[str], object]:
        def number(literal: str) -> object:
            if repr(value := kind(literal)) != literal:
                raise UserError(
                    f"{where}: the chat template would print the number {literal[:40]} as {value!r:.40}; "
                    "use a template that prints arguments given as text"
                )
            return value

        return number

    return json.loads(text, parse_int=same(int), parse_float=same(float))


def parse_object(text: str) -> dict[str, object] | None:
    """Returns the object whose JSON text this is, or None for other text that a model wrote.

    Other text is broken JSON, a value of another kind, and what JSON cannot express again: repeated keys,
    NaN, numbers above 1.8e308, integers of more than 4,300 digits and lone surrogates.
    """
    try:
        parsed = json.loads(text, object_pairs_hook=_unique_keys)
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return None
    return parsed if isinstance(parsed, dict) else None


def printed(arguments: dict[str, object]) -> str:
    """Returns the JSON text that chat templates print with the filter ``tojson``."""
    return json.dumps(arguments, ensure_ascii=False)


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(result := dict(pairs)) < len(pairs):
        raise ValueError("a repeated key")
    return result
