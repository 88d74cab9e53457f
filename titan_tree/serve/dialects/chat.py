"""OpenAI Chat Completions."""

from __future__ import annotations

import time
from collections.abc import Iterator

from titan_tree.data.readers.openai_chat import OpenAIChatReader
from titan_tree.serve.dialects.bodies import openai_error, pieces, read
from titan_tree.serve.request import Answer, Json, Request


class Chat:
    """Answers with ``reasoning_content``, as vLLM, SGLang and DeepSeek do."""

    error = staticmethod(openai_error)

    def request(self, body: Json) -> Request:
        return read(body, OpenAIChatReader(), ("messages",))

    def answer(self, body: Json, answer: Answer) -> Json:
        message = {
            "role": "assistant",
            "content": answer.message.get("content") or None,
            "refusal": None,
            **({"reasoning_content": text} if (text := answer.message.get("reasoning_content")) else {}),
            **({"tool_calls": calls} if (calls := _calls(answer)) else {}),
        }
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(answer)}
        return _head(body, answer, "chat.completion") | {"choices": [choice], "usage": _usage(answer)}

    def events(self, body: Json, answer: Answer) -> Iterator[tuple[str | None, Json]]:
        head = _head(body, answer, "chat.completion.chunk")
        for delta, finish in (*((delta, None) for delta in _deltas(answer)), ({}, _finish(answer))):
            choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
            yield None, head | {"choices": [choice]}
        if (body.get("stream_options") or {}).get("include_usage"):
            yield None, head | {"choices": [], "usage": _usage(answer)}
        yield None, "[DONE]"


def _deltas(answer: Answer) -> Iterator[Json]:
    yield {"role": "assistant", "content": ""}
    for name in ("reasoning_content", "content"):
        yield from ({name: piece} for piece in pieces(answer.message.get(name) or ""))
    for index, call in enumerate(_calls(answer)):
        yield {"tool_calls": [{**call, "index": index, "function": {**call["function"], "arguments": ""}}]}
        for piece in pieces(call["function"]["arguments"]):
            yield {"tool_calls": [{"index": index, "function": {"arguments": piece}}]}


def _calls(answer: Answer) -> list[Json]:
    calls = answer.message.get("tool_calls") or ()
    return [{"id": call["id"], "type": "function", "function": call["function"]} for call in calls]


def _finish(answer: Answer) -> str:
    return "tool_calls" if answer.finish == "stop" and answer.message.get("tool_calls") else answer.finish


def _head(body: Json, answer: Answer, kind: str) -> Json:
    model, created = body.get("model"), int(time.time())
    return {"id": f"chatcmpl-{answer.id}", "object": kind, "created": created, "model": model}


def _usage(answer: Answer) -> Json:
    return {
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": answer.completion_tokens,
        "total_tokens": answer.prompt_tokens + answer.completion_tokens,
    }
