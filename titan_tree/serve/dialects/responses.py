"""OpenAI Responses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from titan_tree.components.tree_tokenizer.tool_calls import parse_object, printed
from titan_tree.data.readers.chat import without
from titan_tree.data.readers.openai_responses import OpenAIResponsesReader
from titan_tree.data.readers.row_reader import expect
from titan_tree.serve.dialects.bodies import openai_error, pieces, read
from titan_tree.serve.request import Answer, Json, Request

FIELDS = ("instructions", "input", "previous_response_id", "conversation")
# The schema of a custom tool, whose calls have free text in place of arguments.
FREE_TEXT = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}
STREAMED = {  # type of an item: its field that is streamed, and the name of its events
    "reasoning": ("content", "reasoning_text"),
    "message": ("content", "output_text"),
    "function_call": ("arguments", "function_call_arguments"),
    "custom_tool_call": ("input", "custom_tool_call_input"),
}


class Responses:
    """Answers with the content of reasoning. Custom tools are functions with the argument ``input``."""

    error = staticmethod(openai_error)

    def request(self, body: Json) -> Request:
        body = expect(body, dict, "body", "a JSON object")
        lists = {name: body[name] for name in ("input", "tools") if isinstance(body.get(name), list)}
        functions = {name: [_as_function(item) for item in items] for name, items in lists.items()}
        request = read(body | functions, OpenAIResponsesReader(), FIELDS)
        tools = (tool for tool in body.get("tools") or () if tool.get("type") == "custom")
        formats = (f"format of tool {tool['name']}" for tool in tools if tool.get("format"))
        return replace(request, ignored=(*request.ignored, *formats))

    def answer(self, body: Json, answer: Answer) -> Json:
        is_cut = answer.finish == "length"
        return {
            "id": f"resp_{answer.id}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "incomplete" if is_cut else "completed",
            "incomplete_details": {"reason": "max_output_tokens"} if is_cut else None,
            "error": None,
            "model": body.get("model"),
            "output": _items(body, answer),
            "parallel_tool_calls": True,
            "tool_choice": "auto",
            "tools": body.get("tools") or [],
            "usage": {
                "input_tokens": answer.prompt_tokens,
                "input_tokens_details": {"cached_tokens": 0},
                "output_tokens": answer.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": answer.prompt_tokens + answer.completion_tokens,
            },
        }

    def events(self, body: Json, answer: Answer) -> Iterator[tuple[str | None, Json]]:
        for number, event in enumerate(_events(self.answer(body, answer))):
            yield event["type"], {**event, "sequence_number": number}


def _as_function(item: Json) -> Json:
    """Returns a custom tool, or a call of one, as a function that the model can call; others as they are."""
    kind = item.get("type") if isinstance(item, dict) else None
    if kind == "custom_tool_call":
        return {**item, "type": "function_call", "arguments": printed({"input": item.get("input")})}
    if kind == "custom":
        return {**without(item, ("format",)), "type": "function", "parameters": FREE_TEXT}
    return item


def _items(body: Json, answer: Answer) -> list[Json]:
    message, status = answer.message, "incomplete" if answer.finish == "length" else "completed"
    items: list[Json] = []
    if text := message.get("reasoning_content"):
        content = [{"type": "reasoning_text", "text": text}]
        items.append({"type": "reasoning", "id": f"rs_{answer.id}", "summary": [], "content": content})
    text = message.get("content") or ""
    if text or not (items or message.get("tool_calls")):  # clients send back the items, so there is one
        content = [{"type": "output_text", "text": text, "annotations": []}]
        items.append({"type": "message", "id": f"msg_{answer.id}", "role": "assistant", "content": content})
    custom = [tool["name"] for tool in body.get("tools") or () if tool.get("type") == "custom"]
    for number, call in enumerate(message.get("tool_calls") or ()):
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        item = {"id": f"fc_{answer.id}_{number}", "call_id": call["id"], "name": name}
        fields = (parse_object(arguments) or {}) if name in custom else {}
        if fields.keys() == {"input"} and isinstance(fields["input"], str):
            items.append({"type": "custom_tool_call", **item, "input": fields["input"]})
        else:  # also where the model called a custom tool otherwise, so that the client sees the mistake
            items.append({"type": "function_call", **item, "arguments": arguments})
    *before, last = items
    return [*({**item, "status": "completed"} for item in before), {**last, "status": status}]


def _events(response: Json) -> Iterator[Json]:
    begun = {**response, "status": "in_progress", "incomplete_details": None, "output": [], "usage": None}
    yield {"type": "response.created", "response": begun}
    yield {"type": "response.in_progress", "response": begun}
    for index, item in enumerate(response["output"]):
        field, name = STREAMED[item["type"]]
        begun = {**item, field: item[field][:0], "status": "in_progress"}
        yield {"type": "response.output_item.added", "output_index": index, "item": begun}
        yield from _field_events(item[field], field, name, {"item_id": item["id"], "output_index": index})
        yield {"type": "response.output_item.done", "output_index": index, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _field_events(value: Json, field: str, name: str, place: Json) -> Iterator[Json]:
    """Yields the events of an item's text, or of its content, which is one part."""
    if field == "content":
        [part] = value
        place = {**place, "content_index": 0}
        yield {"type": "response.content_part.added", **place, "part": {**part, "text": ""}}
        field, value = "text", part["text"]
    logprobs: Json = {"logprobs": []} if name == "output_text" else {}
    for piece in pieces(value):
        yield {"type": f"response.{name}.delta", **place, **logprobs, "delta": piece}
    yield {"type": f"response.{name}.done", **place, **logprobs, field: value}
    if field == "text":
        yield {"type": "response.content_part.done", **place, "part": part}
