"""Parts of chat messages that several formats share."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from titan_tree.data.readers.row_reader import expect
from titan_tree.errors import UserError, shorten

Message = dict[str, Any]

# Members of an API's requests and responses that neither change what the model read nor how it is trained.
REQUEST_FIELDS = (
    *("model", "max_tokens", "max_completion_tokens", "max_output_tokens", "max_tool_calls", "n", "seed"),
    *("stop", "stop_sequences", "stream", "stream_options", "top_p", "top_k", "frequency_penalty"),
    *("presence_penalty", "top_logprobs", "tool_choice", "parallel_tool_calls"),
    *("response_format", "user", "metadata", "store", "service_tier", "include", "truncation", "background"),
    *("prompt_cache_key", "safety_identifier", "anthropic_version", "betas"),
)
EARLIER_TURNS = (
    "the assistant turns in prompts are context, and only the answers are trained; to train every turn, give "
    "conversations with messages"
)
PART_ORDER = {"reasoning": 0, "text": 1, "call": 2}  # of an assistant's message
TEXT_PARTS = ("text", "input_text", "output_text")


def assistant_messages(parts: Iterable[tuple[str, object]]) -> list[Message]:
    """Returns the assistant messages that consist of these parts.

    A message holds reasoning, then text, then tool calls. A part that is out of this order starts another
    message.

    Args:
        parts: ("reasoning" or "text", str), ("call", a tool call), or ("end", None), which ends a message.
    """
    messages: list[Message] = []
    last = "end"
    for kind, value in parts:
        if kind != "end":
            if last == "end" or PART_ORDER[kind] < PART_ORDER[last]:
                messages.append({"role": "assistant", "content": ""})
            message = messages[-1]
            if kind == "call":
                message.setdefault("tool_calls", []).append(value)
            elif kind == "text":
                message["content"] += value
            else:
                before = message.get("reasoning_content")
                message["reasoning_content"] = value if before is None else f"{before}\n{value}"
        last = kind
    return messages


def call(name: object, arguments: object, identifier: object) -> Message:
    """Returns a tool call in OpenAI's spelling. The tokenizer checks name and arguments."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", **({} if identifier is None else {"id": identifier}), "function": function}


def answered(prompt: list[Message], answer: list[Message]) -> Message:
    """Returns the fields of a conversation of which only the answer is trained: messages, and perhaps turns.

    Earlier turns of the assistant, which the prompt repeats, are the answers of other calls.
    """
    if all(message.get("role") != "assistant" for message in prompt):
        return {"messages": prompt + answer}
    if len(answer) == 1:
        return {"messages": prompt + answer, "turns": "last"}
    context = [m | {"weight": 0} if m.get("role") == "assistant" else m for m in prompt]
    return {"messages": context + answer}


def text_of(content: object, where: str) -> str:
    """Returns the text of a message's content: a string, null, or a list of text parts.

    Raises:
        UserError: an image or another part that is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = expect(content, list, where, "a string or a list of text parts")
    return "".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(parts))


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    part = expect(part, dict, where, "a text part")
    kind = part.get("type")
    if kind == "refusal":
        return expect(part.get("refusal"), str, f"{where}.refusal", "a string")
    if kind not in TEXT_PARTS:
        raise not_text(where, kind)
    return expect(part.get("text"), str, f"{where}.text", "a string")


def not_text(where: str, kind: object) -> UserError:
    """Returns the error for a content part of another kind than text."""
    return UserError(
        f"{where}: expected text, got a part of type {shorten(kind)}; titan_tree trains on text, not on "
        "images, audio or files: remove the sample"
    )


def without(row: Message, names: Iterable[str]) -> Message:
    dropped = set(names)
    return {name: value for name, value in row.items() if name not in dropped}
