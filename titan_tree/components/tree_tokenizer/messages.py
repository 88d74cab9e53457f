"""Checks conversations, and converts the two common spellings of messages into one form.

``normalize_messages`` returns the form that Hugging Face's chat templates read:

    {"role": "system" | "user" | "assistant" | "tool", "content": str, "reasoning_content"?: str,
     "tool_calls"?: [{"type": "function", "function": {"name": str, "arguments": object | str}}], ...}
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from titan_tree.errors import UserError, require_unicode, shorten

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
MEDIA = ("image", "audio", "video")  # in the types of content parts
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # the first one that is present counts
LEGACY_FIELDS = {  # of OpenAI's messages; templates do not read them, so they would be dropped silently
    "function_call": "not read; give tool_calls, a list of calls",
    "refusal": "not read; give the text of the refusal as content",
}
# What normalize_messages reads or refuses.
NORMALIZED_FIELDS = frozenset({"role", "content", "tool_calls", *REASONING_FIELDS, *LEGACY_FIELDS})


def normalize_messages(messages: object, where: str) -> list[Message]:
    """Checks a conversation and returns it in the form above. The input stays unchanged.

    - ``content`` is a string, or a list of ``{"type": "text", "text": str}`` that is joined. For assistants
      and tools, null or a missing field becomes "".
    - ``reasoning_content`` may also be called ``reasoning`` or ``thinking``; null counts as missing.
    - ``tool_calls`` are ``{"name", "arguments"}`` or ``{"type", "function": {"name", "arguments"}}`` as in
      OpenAI's API. Arguments that are the JSON text of an object become the object. Other text that a model
      wrote stays a string: broken JSON, repeated keys, and what JSON cannot express again, such as NaN,
      integers of more than 4,300 digits or lone surrogates.
    - ``function_call`` and ``refusal`` are refused. The reader of Chat Completions converts them.
    - Other fields (name, tool_call_id, ...) are kept, because a template may read them.

    Args:
        messages: the conversation, as parsed from JSON.
        where: what error messages call it.

    Raises:
        UserError: a malformed message; the error names ``where``, the message's index and the field.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError(f"{where}: expected a non-empty list of messages, got {shorten(messages)}")
    return [_normalize_message(message, f"{where}[{index}]") for index, message in enumerate(messages)]


def text_before_calls_as_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Returns normalized messages in which the text before an assistant's tool calls is its reasoning.

    Agents without a reasoning channel think aloud there. Messages that already have reasoning do not change.
    """
    return [
        {**message, "reasoning_content": message["content"], "content": ""}
        if message.get("tool_calls") and message["content"] and not message.get("reasoning_content")
        else message
        for message in messages
    ]


def _normalize_message(message: object, where: str) -> Message:
    if not isinstance(message, dict):
        raise UserError(f"{where}: expected an object with role and content, got {shorten(message)}")
    role = message.get("role")
    if not isinstance(role, str) or role not in ROLES:
        raise UserError(f"{where}.role: expected one of {', '.join(ROLES)}, got {shorten(role)}")
    for field, advice in LEGACY_FIELDS.items():
        if message.get(field) is not None:
            raise UserError(f"{where}.{field}: {advice}")
    result = {
        field: value for field, value in message.items() if field not in ("reasoning_content", "tool_calls")
    }
    result["content"] = _content(message.get("content"), role, f"{where}.content")
    reasoning = _reasoning(message, role, where)
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    if calls := _tool_calls(message, role, f"{where}.tool_calls"):
        result["tool_calls"] = calls
    return result


def _content(content: object, role: str, where: str) -> str:
    if isinstance(content, str):
        return require_unicode(content, where)
    if content is None and role in ("assistant", "tool"):
        return ""
    if not isinstance(content, list):
        raise UserError(f"{where}: expected a string or a list of text parts, got {shorten(content)}")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and any(medium in kind for medium in MEDIA):
            raise UserError(
                f"{where}[{index}]: expected text, got a part of type {shorten(kind)}; titan_tree trains on "
                "text only, so remove the sample or replace the part with text"
            )
        if not (isinstance(part, dict) and kind == "text" and isinstance(part.get("text"), str)):
            raise UserError(
                f'{where}[{index}]: expected {{"type": "text", "text": str}}, got {shorten(part)}'
            )
    return require_unicode("".join(part["text"] for part in content), where)


def _reasoning(message: Message, role: str, where: str) -> str | None:
    field = next((field for field in REASONING_FIELDS if message.get(field) is not None), None)
    if field is None:
        return None
    if role != "assistant":
        raise UserError(f"{where}.{field}: expected only on assistant messages, got it on role {role!r}")
    reasoning = message[field]
    if not isinstance(reasoning, str):
        raise UserError(f"{where}.{field}: expected a string, got {shorten(reasoning)}")
    return require_unicode(reasoning, f"{where}.{field}")


def _tool_calls(message: Message, role: str, where: str) -> list[Message]:
    calls = message.get("tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise UserError(f"{where}: expected a list, got {shorten(calls)}")
    if calls and role != "assistant":
        raise UserError(f"{where}: expected only on assistant messages, got it on role {role!r}")
    return [_tool_call(call, f"{where}[{index}]") for index, call in enumerate(calls)]


def _tool_call(call: object, where: str) -> Message:
    if not isinstance(call, dict):
        raise UserError(f"{where}: expected an object with name and arguments, got {shorten(call)}")
    if "function" in call:
        function, where = call["function"], f"{where}.function"
        others = call
    else:
        function = call
        others = {field: value for field, value in call.items() if field not in ("name", "arguments")}
    if not isinstance(function, dict):
        raise UserError(f"{where}: expected an object with name and arguments, got {shorten(function)}")
    name = function.get("name")
    if not isinstance(name, str):
        raise UserError(f"{where}.name: expected a string, got {shorten(name)}")
    require_unicode(name, f"{where}.name")
    arguments = _arguments(function.get("arguments"), f"{where}.arguments")
    return {"type": "function", **others, "function": {"name": name, "arguments": arguments}}


def _arguments(arguments: object, where: str) -> dict[str, object] | str:
    if isinstance(arguments, dict):
        return arguments
    if not isinstance(arguments, str):
        raise UserError(f"{where}: expected an object or its JSON text, got {shorten(arguments)}")
    try:
        parsed = json.loads(arguments, object_pairs_hook=_unique_keys)
        json.dumps(parsed, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return require_unicode(arguments, where)
    return parsed if isinstance(parsed, dict) else arguments


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    if len(result := dict(pairs)) < len(pairs):
        raise ValueError("a repeated key")
    return result
