"""Anthropic's Messages API."""

from __future__ import annotations

from collections.abc import Iterator

from titan_tree.components.tree_tokenizer.tool_calls import parse_object, printed
from titan_tree.data.readers.anthropic import AnthropicReader
from titan_tree.errors import UserError
from titan_tree.serve.dialects.bodies import error_of, pieces, read
from titan_tree.serve.request import Answer, Json, Request

STREAMED = {  # type of a block: its text, and its field in deltas of this type
    "thinking": ("thinking", "thinking", "thinking_delta"),
    "text": ("text", "text", "text_delta"),
    "tool_use": ("input", "partial_json", "input_json_delta"),
}


class Messages:
    """Answers with ``thinking`` blocks. Calls whose arguments are no JSON object become text."""

    def request(self, body: Json) -> Request:
        request = read(body, AnthropicReader(), ("system", "messages"))
        if request.messages[-1]["role"] == "assistant":
            raise UserError("messages: the last one is of the assistant, which this server does not continue")
        return request

    def answer(self, body: Json, answer: Answer) -> Json:
        content = _blocks(answer)
        has_calls = any(block["type"] == "tool_use" for block in content)
        reason = "max_tokens" if answer.finish == "length" else "tool_use" if has_calls else "end_turn"
        return {
            "id": f"msg_{answer.id}",
            "type": "message",
            "role": "assistant",
            "model": body.get("model"),
            "content": content,
            "stop_reason": reason,
            "stop_sequence": None,
            "usage": {"input_tokens": answer.prompt_tokens, "output_tokens": answer.completion_tokens},
        }

    def events(self, body: Json, answer: Answer) -> Iterator[tuple[str | None, Json]]:
        for event in _events(self.answer(body, answer)):
            yield event["type"], event

    def error(self, status: int, message: str) -> Json:
        return {"type": "error", "error": error_of(status, message)}


def _blocks(answer: Answer) -> list[Json]:
    """Returns the content of an answer. Arguments that the API cannot hold stand in its text."""
    calls, text = [], answer.message.get("content") or ""
    for call in answer.message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if (parsed := parse_object(arguments or "{}")) is not None:
            calls.append({"type": "tool_use", "id": call["id"], "name": name, "input": parsed})
        else:
            call_text = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
            text += f"\n{call_text}" if text else call_text
    reasoning = answer.message.get("reasoning_content")
    return [
        *([{"type": "thinking", "thinking": reasoning, "signature": answer.id}] if reasoning else ()),
        *([{"type": "text", "text": text}] if text else ()),
        *calls,
    ]


def _events(message: Json) -> Iterator[Json]:
    usage = {**message["usage"], "output_tokens": 0}
    begun = {**message, "content": [], "stop_reason": None, "usage": usage}
    yield {"type": "message_start", "message": begun}
    for index, block in enumerate(message["content"]):
        field, name, delta = STREAMED[block["type"]]
        value = block[field]
        empty = {**block, field: type(value)()} | ({"signature": ""} if "signature" in block else {})
        yield {"type": "content_block_start", "index": index, "content_block": empty}
        for piece in pieces(value if isinstance(value, str) else printed(value)):
            yield {"type": "content_block_delta", "index": index, "delta": {"type": delta, name: piece}}
        if "signature" in block:
            signature = {"type": "signature_delta", "signature": block["signature"]}
            yield {"type": "content_block_delta", "index": index, "delta": signature}
        yield {"type": "content_block_stop", "index": index}
    ended = {"stop_reason": message["stop_reason"], "stop_sequence": None}
    yield {"type": "message_delta", "delta": ended, "usage": message["usage"]}
    yield {"type": "message_stop"}
