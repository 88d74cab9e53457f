"""Checks conversations, and converts the two common spellings of messages into one form.

``normalize_messages`` returns the form that Hugging Face's chat templates read:

    {"role": "system" | "user" | "assistant" | "tool", "content": str | [parts], "reasoning_content"?: str,
     "tool_calls"?: [{"type": "function", "function": {"name": str, "arguments": object | str}}], ...}

Content is a list of parts only if it has images: {"type": "text", "text"} and {"type": "image", "image"}.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from titan_tree.components.tree_tokenizer.endings import ending
from titan_tree.components.tree_tokenizer.tool_calls import parse_object, printed
from titan_tree.errors import UserError, require_unicode, shorten

Message = dict[str, Any]
ROLES = ("system", "user", "assistant", "tool")
IMAGE_TOKEN = "<|image_pad|>"  # by which the chat templates of Qwen show an image
REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking")  # at most one text among them
ANSWER_FIELDS = ("finish_reason", "prefill")  # only on assistant messages
LEGACY_FIELDS = {  # of OpenAI's messages; templates do not read them, so they would be dropped silently
    "function_call": "not read; give tool_calls, a list of calls",
    "refusal": "not read; give the text of the refusal as content",
}
# What normalize_messages reads or refuses.
NORMALIZED_FIELDS = frozenset(
    {"role", "content", "tool_calls", *REASONING_FIELDS, *ANSWER_FIELDS, *LEGACY_FIELDS}
)


def normalize_messages(messages: object, where: str, separator: str = "\n") -> list[Message]:
    """Checks a conversation and returns it in the form above. The input stays unchanged.

    - ``content`` is a string, or a list of ``{"type": "text", "text": str}`` and
      ``{"type": "image", "image": anything}``. Adjacent texts are joined. Only assistants have no images. For
      assistants and tools, null or a missing field becomes "".
    - ``reasoning_content`` may also be called ``reasoning`` or ``thinking``. Null and "" beside another one
      count as missing. Two different texts are an error.
    - ``finish_reason`` is one of the marks in endings.py. ``prefill`` is the beginning of ``content`` that
      the request gave.
    - ``tool_calls`` are ``{"name", "arguments"}`` or ``{"type", "function": {"name", "arguments"}}`` as in
      OpenAI's API. Arguments that are the JSON text of an object become the object, if printing it gives the
      same characters. Other text stays as the model wrote it: other white space or forms of numbers, broken
      JSON, repeated keys, and the end of a message that was cut off. Null and "" become {}, as clients read
      them, unless the message was cut off.
    - ``function_call`` and ``refusal`` are refused. The reader of Chat Completions converts them.
    - Other fields (name, tool_call_id, ...) are kept, because a template may read them.

    Args:
        messages: the conversation, as parsed from JSON.
        where: what error messages call it.
        separator: what stands between the text parts of a message.

    Raises:
        UserError: a malformed message; the error names ``where``, the message's index and the field.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise UserError(f"{where}: expected a non-empty list of messages, got {shorten(messages)}")
    return [
        _normalize_message(message, f"{where}[{index}]", separator) for index, message in enumerate(messages)
    ]


def text_before_calls_as_reasoning(messages: Sequence[Message]) -> list[Message]:
    """Returns normalized messages in which the text before an assistant's tool calls is its reasoning.

    Agents without a reasoning channel think aloud there. Messages that already have reasoning, or a prefill,
    do not change.
    """
    return [
        {**message, "reasoning_content": message["content"], "content": ""}
        if message.get("tool_calls")
        and message["content"]
        and not message.get("reasoning_content")
        and not message.get("prefill")
        else message
        for message in messages
    ]


def _normalize_message(message: object, where: str, separator: str) -> Message:
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
    result["content"] = _content(message.get("content"), role, f"{where}.content", separator)
    for field in ANSWER_FIELDS:
        if role != "assistant" and message.get(field) is not None:
            raise UserError(f"{where}.{field}: expected only on assistant messages, got it on role {role!r}")
    is_cut = ending(message.get("finish_reason"), f"{where}.finish_reason") in ("cut off", "filtered")
    _check_identifier(message.get("tool_call_id"), f"{where}.tool_call_id")
    reasoning = _reasoning(message, role, where)
    if reasoning is not None:
        result["reasoning_content"] = reasoning
    if calls := _tool_calls(message, role, f"{where}.tool_calls", is_cut):
        result["tool_calls"] = calls
    prefill = "" if message.get("prefill") is None else message["prefill"]
    begins = isinstance(prefill, str) and (not prefill or result["content"].startswith(prefill))
    if not begins or (prefill and reasoning):
        expected = "the beginning of content, and no reasoning"
        raise UserError(f"{where}.prefill: expected {expected}, got {shorten(prefill)}")
    return result


def _content(content: object, role: str, where: str, separator: str) -> str | list[Message]:
    if isinstance(content, str):
        return require_unicode(content, where)
    if content is None and role in ("assistant", "tool"):
        return ""
    if not isinstance(content, list):
        raise UserError(f"{where}: expected a string or a list of text parts, got {shorten(content)}")
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image" and role == "assistant":
            raise UserError(f"{where}[{index}]: expected no image of an assistant; remove the sample")
        is_image = kind == "image" and part.get("image") is not None
        if not is_image and not (kind == "text" and isinstance(part.get("text"), str)):
            expected = '{"type": "text", "text": str} or {"type": "image", "image": path}'
            raise UserError(f"{where}[{index}]: expected {expected}, got {shorten(part)}")
    parts: list[Message] = []
    for kind, run in groupby(content, key=lambda part: part["type"]):
        if kind == "image":
            parts += ({"type": "image", "image": part["image"]} for part in run)
        else:
            text = require_unicode(separator.join(part["text"] for part in run), where)
            parts.append({"type": "text", "text": text})
    return parts if images_of(parts) else "".join(texts_of(parts))


def texts_of(content: str | list[Message]) -> list[str]:
    """Returns the texts of normalized content, in order."""
    return [content] if isinstance(content, str) else [part["text"] for part in content if "text" in part]


def images_of(content: str | list[Message]) -> list[Message]:
    """Returns the parts of normalized content that are images, in order."""
    return [] if isinstance(content, str) else [part for part in content if part["type"] == "image"]


def without_images(message: Message) -> Message:
    """Returns a normalized message as templates read it: of an image, it says only where it is."""
    if isinstance(message["content"], str):
        return message
    parts = [{"type": "image"} if part["type"] == "image" else part for part in message["content"]]
    return {**message, "content": parts}


def _reasoning(message: Message, role: str, where: str) -> str | None:
    reasoning: str | None = None
    for field in REASONING_FIELDS:
        if (text := message.get(field)) is None:
            continue
        if role != "assistant":
            raise UserError(f"{where}.{field}: expected only on assistant messages, got it on role {role!r}")
        if not isinstance(text, str):
            raise UserError(f"{where}.{field}: expected a string, got {shorten(text)}")
        if reasoning and text not in ("", reasoning):
            raise UserError(f"{where}.{field}: expected one text of reasoning, got two; remove one field")
        reasoning = reasoning or require_unicode(text, f"{where}.{field}")
    return reasoning


def _tool_calls(message: Message, role: str, where: str, is_cut: bool) -> list[Message]:
    calls = message.get("tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list):
        raise UserError(f"{where}: expected a list, got {shorten(calls)}")
    if calls and role != "assistant":
        raise UserError(f"{where}: expected only on assistant messages, got it on role {role!r}")
    last = len(calls) - 1 if is_cut else None
    return [_tool_call(call, f"{where}[{index}]", index == last) for index, call in enumerate(calls)]


def _tool_call(call: object, where: str, is_cut: bool) -> Message:
    if not isinstance(call, dict):
        raise UserError(f"{where}: expected an object with name and arguments, got {shorten(call)}")
    _check_identifier(call.get("id"), f"{where}.id")
    others = {field: value for field, value in call.items() if field not in ("name", "arguments")}
    if "function" in call:
        function, where = call["function"], f"{where}.function"
    else:
        function = call
    if not isinstance(function, dict):
        raise UserError(f"{where}: expected an object with name and arguments, got {shorten(function)}")
    for field in ("name", "arguments"):
        if call.get(field) is not None and call[field] != function.get(field):
            raise UserError(f"{where}.{field}: expected it once, got another one beside function; remove one")
    name = function.get("name")
    if not isinstance(name, str):
        raise UserError(f"{where}.name: expected a string, got {shorten(name)}")
    require_unicode(name, f"{where}.name")
    arguments = function.get("arguments")
    if arguments == "" or (arguments is None and "arguments" in function):
        arguments = "" if is_cut else {}
    arguments = _arguments(arguments, f"{where}.arguments", is_cut)
    return {"type": "function", **others, "function": {"name": name, "arguments": arguments}}


def _check_identifier(identifier: object, where: str) -> None:
    if not isinstance(identifier, str | int | None):
        raise UserError(f"{where}: expected a string or an integer, got {shorten(identifier)}")


def _arguments(arguments: object, where: str, is_cut: bool) -> dict[str, object] | str:
    if isinstance(arguments, dict):
        refuse_not_finite(arguments, where)
        return arguments
    if not isinstance(arguments, str):
        raise UserError(f"{where}: expected an object or its JSON text, got {shorten(arguments)}")
    require_unicode(arguments, where)
    parsed = None if is_cut else parse_object(arguments)
    return parsed if parsed is not None and printed(parsed) in (arguments, "{}") else arguments


def refuse_not_finite(value: object, where: str) -> None:
    """Raises UserError for NaN and infinite numbers, which JSON cannot express, in dicts and lists."""
    waiting: list[Any] = [[value]]
    seen: set[int] = set()  # of containers
    while waiting:
        container = waiting.pop()
        for item in container.values() if isinstance(container, dict) else container:
            if isinstance(item, str):  # as nearly all are
                continue
            if isinstance(item, (dict, list)):
                if id(item) not in seen:
                    seen.add(id(item))
                    waiting.append(item)
            elif isinstance(item, float) and not math.isfinite(item):
                raise UserError(f"{where}: expected finite numbers, got {item}")
