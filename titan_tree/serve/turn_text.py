"""Reads a turn of the model, which is text, as a message with thoughts and calls of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from titan_tree.serve.request import Message

THOUGHT = re.compile(r"\s*(?:<think>)?(?P<thought>.*?)</think>(?P<rest>.*)", re.DOTALL)
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
ARGUMENTS = re.compile(r'"(?:arguments|parameters)"\s*:\s*')
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*?)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)

Call = tuple[str, str]  # name, and arguments as JSON text


def read_turn(
    text: str, tools: Sequence[Mapping[str, Any]] | None, printed: Callable[[Message], str | None]
) -> Message:
    """Returns the message that a turn is for clients.

    Calls are read as Qwen3 (JSON), Qwen3.5 (XML) and SmolLM2 (a list) write them, if there are tools and all
    of the turn's calls are whole; otherwise they stay text. White space around thoughts and text is left out,
    if the chat template prints the message in the same way without it.

    Args:
        printed: returns what the template prints for a message in place of the turn, or None if it refuses
            it. If no reading of the turn is printed as it was written, the first one is returned: later
            prompts then differ from the turn.
    """
    readings = list(_readings(text, tools))
    return next((message for message in readings if printed(message) == text), readings[0])


def _readings(text: str, tools: Sequence[Mapping[str, Any]] | None) -> Iterator[Message]:
    """Yields the ways to read a turn. All of them have its calls; the last ones have thoughts as text.

    Templates put line feeds around thoughts, after them, and before calls.
    """
    match = THOUGHT.fullmatch(text)
    thought, rest = (match["thought"], match["rest"]) if match else ("", text)
    calls = _calls(rest, tools) if tools else None
    content = rest.partition("<tool_call>")[0] if calls else rest
    inner = thought.removeprefix("\n").removesuffix("\n")
    ways: list[tuple[Message, str]] = [({}, text[: len(text) - len(rest)] + content)]
    if match is not None:
        different = dict.fromkeys((thought.strip("\n"), inner, thought))
        ways = [*(({"reasoning_content": each}, content) for each in different), *ways]
    for thoughts, shown in ways:
        late, early = shown.removeprefix("\n\n"), shown.removesuffix("\n")
        both = late.removesuffix("\n")
        for each in dict.fromkeys((shown.strip(), shown.strip("\n"), both, late, early, shown)):
            message: Message = {"role": "assistant", "content": each, **thoughts}
            if calls:
                functions = [{"name": name, "arguments": arguments} for name, arguments in calls]
                message["tool_calls"] = [{"type": "function", "function": each} for each in functions]
            yield message


def _calls(text: str, tools: Sequence[Mapping[str, Any]]) -> list[Call] | None:
    """Returns the calls at the end of a turn, or None if there are none, or one of them is not whole."""
    _, mark, end = text.partition("<tool_call>")
    if not mark or CALL.sub("", mark + end).strip():
        return None
    calls: list[Call] = []
    for block in CALL.findall(mark + end):
        found = _xml_calls(block, tools) if "<function=" in block else _json_calls(block)
        if not found:
            return None
        calls += found
    return calls


def _json_calls(block: str) -> list[Call]:
    try:
        value = json.loads(block)
        json.dumps(value, ensure_ascii=False).encode()  # no text holds a lone surrogate, such as \ud800
    except (ValueError, RecursionError):
        return []
    calls: list[Call] = []
    values = value if isinstance(value, list) else [value]
    for each in values:
        if not isinstance(each, dict) or not isinstance(each.get("name"), str):
            return []
        arguments = each.get("arguments", each.get("parameters", {}))
        if not isinstance(arguments, dict):
            return []
        calls.append((each["name"], json.dumps(arguments, ensure_ascii=False)))
    match = ARGUMENTS.search(block)
    if len(values) == 1 and match:  # the characters that the model wrote
        try:
            _, size = json.JSONDecoder().raw_decode(block[match.end() :])
        except ValueError:
            return calls
        written = block[match.end() : match.end() + size]
        if json.loads(written) == json.loads(calls[0][1]):
            return [(calls[0][0], written)]
    return calls


def _xml_calls(block: str, tools: Sequence[Mapping[str, Any]]) -> list[Call]:
    match = FUNCTION.fullmatch(block)
    if match is None or PARAMETER.sub("", match[2]).strip():
        return []
    name = match[1].strip()
    known: Mapping[str, Any] = next(
        (tool["function"] for tool in tools if tool["function"].get("name") == name), {}
    )
    types = _object(_object(known.get("parameters")).get("properties"))
    arguments: dict[str, Any] = {}
    for parameter, value in PARAMETER.findall(match[2]):
        is_text = _object(types.get(parameter)).get("type", "string") == "string"
        arguments[parameter] = value
        with suppress(ValueError, RecursionError):
            parsed = value if is_text else json.loads(value)
            json.dumps(parsed, ensure_ascii=False).encode()
            arguments[parameter] = parsed
    return [(name, json.dumps(arguments, ensure_ascii=False))]


def _object(value: Any) -> Mapping[str, Any]:
    """Returns an object of a schema, which nobody has checked; other values are empty ones."""
    return value if isinstance(value, dict) else {}
