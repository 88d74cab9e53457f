"""Agents that converse by the libraries of OpenAI and Anthropic, each turn by another API if they like."""

import json
from collections.abc import Callable
from typing import Any

import anthropic
import openai

from titan_tree.serve.request import Message

APIS = ("chat", "responses", "messages")


def client_of(url: str) -> openai.OpenAI:
    """Returns a client of one session of the server with this URL."""
    return openai.OpenAI(base_url=f"{url}/s/task/v1", api_key="any", max_retries=0)


class Clients:
    """The clients of both libraries.

    A message is in the spelling of Chat Completions. Those of the assistant also have "sent": the API that
    gave them, and what it gave, which the clients send back to the same API.
    """

    def __init__(self) -> None:
        options: Any = {"api_key": "any", "max_retries": 0}
        self._openai, self._anthropic = openai.OpenAI(**options), anthropic.Anthropic(**options)

    def close(self) -> None:
        self._openai.close()
        self._anthropic.close()

    def ask(
        self,
        url: str,
        api: str,
        messages: list[Message],
        tools: list[Message] | None = None,
        stream: bool = False,
        max_tokens: int | None = None,
        retries: int = 0,
        timeout: float = 60.0,
    ) -> Message:
        """Returns the answer of a session, with the id of the response as "id"."""
        headers = {"x-stainless-retry-count": str(retries)} if retries else {}
        if api == "messages":
            client: Any = self._anthropic.with_options(base_url=url, timeout=timeout)
        else:
            client = self._openai.with_options(base_url=f"{url}/v1", timeout=timeout)
        return ASK[api](client, messages, tools, stream, max_tokens, headers)


def _chat(client: Any, messages: Any, tools: Any, stream: bool, limit: Any, headers: Any) -> Message:
    options = {"tools": tools} if tools else {}
    if limit:
        options["max_completion_tokens"] = limit
    body = [{name: value for name, value in m.items() if name not in ("sent", "id")} for m in messages]
    asked = client.chat.completions.create(
        model="policy", messages=body, stream=stream, extra_headers=headers, **options
    )
    if not stream:
        message = asked.choices[0].message.model_dump(exclude_none=True)
        identifier = asked.id
    else:
        message = {"content": "", "reasoning_content": "", "tool_calls": []}
        for chunk in asked:
            identifier = chunk.id
            delta = chunk.choices[0].delta.model_dump(exclude_none=True)
            for name in ("content", "reasoning_content"):
                message[name] += delta.get(name, "")
            for call in delta.get("tool_calls", ()):
                if call["index"] == len(message["tool_calls"]):
                    message["tool_calls"].append({"type": "function", "id": call["id"], "function": {
                        "name": call["function"]["name"], "arguments": ""}})  # fmt: skip
                message["tool_calls"][call["index"]]["function"]["arguments"] += call["function"]["arguments"]
    return _message(
        message.get("content", ""), message.get("reasoning_content", ""), message.get("tool_calls"),
        identifier.removeprefix("chatcmpl-"), None,
    )  # fmt: skip


def _responses(client: Any, messages: Any, tools: Any, stream: bool, limit: Any, headers: Any) -> Message:
    options: Any = {"tools": [{"type": "function", **tool["function"]} for tool in tools]} if tools else {}
    if limit:
        options["max_output_tokens"] = limit
    items: list[Any] = []
    for message in messages:
        if message["role"] == "system":
            options["instructions"] = message["content"]
        elif message["role"] == "tool":
            items.append({"type": "function_call_output", "call_id": message["tool_call_id"], "output": message["content"]})  # fmt: skip # noqa: E501
        elif message["role"] == "user":
            items.append({"role": "user", "content": message["content"]})
        elif "sent" in message and message["sent"][0] == "responses":
            items += message["sent"][1]
        else:
            if text := message.get("reasoning_content"):
                content = [{"type": "reasoning_text", "text": text}]
                items.append({"type": "reasoning", "id": "rs", "summary": [], "content": content})
            if message["content"] or not message.get("tool_calls"):
                items.append({"role": "assistant", "content": message["content"]})
            for call in message.get("tool_calls", ()):
                items.append({"type": "function_call", "call_id": call["id"], **call["function"]})
    asked = client.responses.create(
        model="policy", input=items, stream=stream, extra_headers=headers, **options
    )
    if not stream:
        response, deltas = asked, None
    else:
        deltas = {"output_text": "", "reasoning_text": "", "function_call_arguments": ""}
        for event in asked:
            name = event.type.removeprefix("response.").removesuffix(".delta")
            if event.type.endswith(".delta"):
                deltas[name] += event.delta
            response = getattr(event, "response", None)
    content, reasoning, calls = "", "", []
    for item in response.output:
        if item.type == "message":
            content += "".join(part.text for part in item.content)
        elif item.type == "reasoning":
            reasoning += "".join(part.text for part in item.content)
        else:
            function = {"name": item.name, "arguments": item.arguments}
            calls.append({"type": "function", "id": item.call_id, "function": function})
    arguments = "".join(call["function"]["arguments"] for call in calls)
    assert deltas is None or list(deltas.values()) == [content, reasoning, arguments]
    sent = [item.model_dump(exclude_none=True) for item in response.output]
    return _message(content, reasoning, calls, response.id.removeprefix("resp_"), ("responses", sent))


def _messages(client: Any, messages: Any, tools: Any, stream: bool, limit: Any, headers: Any) -> Message:
    options: Any = {"max_tokens": limit or 4096, "extra_headers": headers}
    if tools:
        options["tools"] = [
            {**{k: v for k, v in tool["function"].items() if k != "parameters"},
             "input_schema": tool["function"]["parameters"]}
            for tool in tools
        ]  # fmt: skip
    body: list[Any] = []
    for message in messages:
        if message["role"] == "system":
            options["system"] = message["content"]
        elif message["role"] == "tool":
            block = {"type": "tool_result", "tool_use_id": message["tool_call_id"], "content": message["content"]}  # fmt: skip # noqa: E501
            if body[-1]["role"] == "user" and body[-1]["content"][0]["type"] == "tool_result":
                body[-1]["content"].append(block)
            else:
                body.append({"role": "user", "content": [block]})
        elif message["role"] == "user":
            body.append({"role": "user", "content": message["content"]})
        elif "sent" in message and message["sent"][0] == "messages":
            body.append({"role": "assistant", "content": message["sent"][1]})
        else:
            blocks: list[Any] = []
            if text := message.get("reasoning_content"):
                blocks.append({"type": "thinking", "thinking": text, "signature": "s"})
            if message["content"]:
                blocks.append({"type": "text", "text": message["content"]})
            for call in message.get("tool_calls", ()):
                arguments = json.loads(call["function"]["arguments"])
                name = call["function"]["name"]
                blocks.append({"type": "tool_use", "id": call["id"], "name": name, "input": arguments})
            body.append({"role": "assistant", "content": blocks})
    options |= {"model": "policy", "messages": body}
    if stream:
        with client.messages.stream(**options) as events:
            answer = events.get_final_message()
    else:
        answer = client.messages.create(**options)
    content, reasoning, calls = "", "", []
    for block in answer.content:
        if block.type == "text":
            content += block.text
        elif block.type == "thinking":
            reasoning += block.thinking
        else:
            function = {"name": block.name, "arguments": json.dumps(block.input, ensure_ascii=False)}
            calls.append({"type": "function", "id": block.id, "function": function})
    sent = [block.model_dump(exclude_none=True) for block in answer.content]
    return _message(content, reasoning, calls, answer.id.removeprefix("msg_"), ("messages", sent))


def _message(content: str, reasoning: str, calls: Any, identifier: str, sent: Any) -> Message:
    message = {"role": "assistant", "content": content, "id": identifier}
    if reasoning:
        message["reasoning_content"] = reasoning
    if calls:
        message["tool_calls"] = calls
    if sent:
        message["sent"] = sent
    return message


ASK: dict[str, Callable[..., Message]] = {"chat": _chat, "responses": _responses, "messages": _messages}
