"""Chat messages: the two common spellings of a conversation, brought into one.

    {"role": "system" | "user" | "assistant" | "tool", "content": str, "reasoning_content"?: str,
     "tool_calls"?: [{"type": "function", "function": {"name": str, "arguments": object | str}}], ...}

is the form that chat templates read (Hugging Face's), and what ``normalize_messages`` returns.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from titan_tree.errors import UserError

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # the first one present is taken


def normalize_messages(messages: object, where: str) -> list[Message]:
    """Checks a conversation and returns it in the one form above; the input stays as it is.

    - ``content``: a string, or a list of ``{"type": "text", "text": str}``, which are joined. null or absent
      becomes "" for the assistant and for tools.
    - ``reasoning_content``: also read under the names ``reasoning`` and ``thinking``; null means absent.
    - ``tool_calls``: ``{"name", "arguments"}`` or OpenAI's ``{"type", "function": {"name", "arguments"}}``.
      Arguments that are the JSON text of an object become the object; other text (a model's broken JSON)
      stays the raw string.

    Fields not named here (name, tool_call_id, ...) are kept: a template may read them.

    Raises:
        UserError: naming ``where``, the message's index and the field.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError(f"{where}: expected a non-empty list of messages, got {_show(messages)}")
    return [_message(message, f"{where}[{index}]") for index, message in enumerate(messages)]


def text_before_calls_as_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Normalised messages in which the text an assistant writes before its tool calls is its reasoning.

    Agents without a reasoning channel think aloud there. Messages that have reasoning stay as they are.
    """
    return [
        {**m, "reasoning_content": m["content"], "content": ""}
        if m.get("tool_calls") and m["content"] and not m.get("reasoning_content")
        else m
        for m in messages
    ]


def _message(message: object, where: str) -> Message:
    if not isinstance(message, dict):
        raise UserError(f"{where}: expected an object with role and content, got {_show(message)}")
    role = message.get("role")
    if role not in ROLES:
        raise UserError(f"{where}.role: expected one of {', '.join(ROLES)}, got {_show(role)}")
    result = {**message, "content": _content(message.get("content"), role, f"{where}.content")}

    given = [(f, message[f]) for f in REASONING_FIELDS if message.get(f) is not None]
    result.pop("reasoning_content", None)
    if given:
        field, reasoning = given[0]
        if role != "assistant":
            raise UserError(f"{where}.{field}: expected on assistant messages alone, got role {role!r}")
        if not isinstance(reasoning, str):
            raise UserError(f"{where}.{field}: expected a string, got {_show(reasoning)}")
        result["reasoning_content"] = reasoning

    if calls := result.pop("tool_calls", None):
        if role != "assistant":
            raise UserError(f"{where}.tool_calls: expected on assistant messages alone, got role {role!r}")
        if not isinstance(calls, list):
            raise UserError(f"{where}.tool_calls: expected a list, got {_show(calls)}")
        result["tool_calls"] = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return result


def _content(content: object, role: str, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None and role in ("assistant", "tool"):
        return ""
    if not isinstance(content, list):
        raise UserError(f"{where}: expected a string or a list of text parts, got {_show(content)}")
    for index, part in enumerate(content):
        if not (isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)):
            raise UserError(f'{where}[{index}]: expected {{"type": "text", "text": str}}, got {_show(part)}')
    return "".join(part["text"] for part in content)


def _call(call: object, where: str) -> Message:
    if not isinstance(call, dict):
        raise UserError(f"{where}: expected an object with name and arguments, got {_show(call)}")
    nested = "function" in call
    function = call["function"] if nested else call
    if nested:
        where = f"{where}.function"
    if not isinstance(function, dict):
        raise UserError(f"{where}: expected an object with name and arguments, got {_show(function)}")
    name, arguments = function.get("name"), function.get("arguments")
    if not isinstance(name, str):
        raise UserError(f"{where}.name: expected a string, got {_show(name)}")
    if isinstance(arguments, str):
        try:
            parsed = json.loads(arguments)
        except json.JSONDecodeError:
            parsed = None
        arguments = parsed if isinstance(parsed, dict) else arguments
    elif not isinstance(arguments, dict):
        raise UserError(f"{where}.arguments: expected an object or its JSON text, got {_show(arguments)}")
    others = {key: value for key, value in call.items() if nested or key not in ("name", "arguments")}
    return {"type": "function", **others, "function": {"name": name, "arguments": arguments}}


def _show(value: object) -> str:
    """A short, one-line picture of a wrong value."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
