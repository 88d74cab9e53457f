"""Bodies with wrong values anywhere: they are refused, or read and answered."""

import copy
import logging
import random
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.cases import for_each
from tests.support.scripted_recorder import PIXEL, call
from titan_tree.errors import UserError
from titan_tree.serve.dialects import DIALECTS
from titan_tree.serve.request import Answer

IMAGE = f"data:image/png;base64,{PIXEL}"
CALL = call("f", '{"a": 1}') | {"id": "c1"}
BODIES: dict[str, Any] = {
    "chat/completions": {
        "model": "policy",
        "messages": [
            {"role": "developer", "content": "x"},
            {"role": "user", "content": [{"type": "image_url", "image_url": {"url": IMAGE}}]},
            {"role": "assistant", "content": None, "reasoning_content": "r", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "c1", "content": "z"},
        ],
        "tools": [{"type": "function", "function": {"name": "f", "parameters": {}}}],
        "n": 1,
        "stream_options": {"include_usage": True},
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "max_tokens": 4,
    },
    "messages": {
        "system": [{"type": "text", "text": "x"}],
        "messages": [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": "a"},
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": PIXEL}},
                ],
            },
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "r", "signature": "s"},
                    {"type": "redacted_thinking", "data": "x"},
                    {"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "z"}]}
                ],
            },
        ],
        "tools": [{"name": "f", "input_schema": {}, "description": "d"}, {"type": "web_search"}],
        "tool_choice": {"type": "auto"},
        "output_config": {"effort": "low"},
    },
    "responses": {
        "instructions": "x",
        "input": [
            {"role": "user", "content": [{"type": "input_image", "image_url": IMAGE}]},
            {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "s"}]},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "q"}]},
            {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
            {"type": "custom_tool_call", "call_id": "c2", "name": "g", "input": "t"},
            {"type": "function_call_output", "call_id": "c1", "output": "z"},
            {"type": "custom_tool_call_output", "call_id": "c2", "output": "z"},
        ],
        "tools": [
            {"type": "function", "name": "f", "parameters": {}},
            {"type": "custom", "name": "g", "format": {"type": "text"}},
            {"type": "namespace", "name": "n"},
        ],
        "text": {"format": {"type": "text"}},
        "background": False,
    },
}
WRONG: list[Any] = [
    *(None, True, False, 0, -1, 1.5, "", "x", [], {}, [[]], [{}], [None], "tool", "custom", "assistant"),
    *({"type": "text"}, {"type": []}, {"type": "text", "text": "b"}, IMAGE, "\ud800", "function_call"),
]


def places(value: Any, place: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield place
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield from places(item, (*place, key))


def changed(value: Any, place: tuple[Any, ...], new: Any) -> Any:
    if not place:
        return new
    value = copy.deepcopy(value)
    inner = value
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = new
    return value


@for_each("name", BODIES)
def test_wrong_values_are_refused_or_answered(name: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    dialect, numbers = DIALECTS[name], random.Random(0)
    calls = [call("g", '{"input": "x"}') | {"id": "c3"}, call("f", "{") | {"id": "c4"}]
    message = {"content": "c", "reasoning_content": "r", "tool_calls": calls}
    answer = Answer(id="a", message=message, finish="stop", prompt_tokens=1, completion_tokens=1)
    refused = read = 0
    for place in places(BODIES[name]):
        for wrong in WRONG:
            body = changed(BODIES[name], place, wrong)
            if numbers.random() < 0.3:
                body = changed(body, numbers.choice(list(places(body))), numbers.choice(WRONG))
            try:
                dialect.request(body)
                read += 1
            except UserError:
                refused += 1
                continue
            dialect.answer(body, answer)
            list(dialect.events(body, answer))
    assert min(refused, read) > 100
