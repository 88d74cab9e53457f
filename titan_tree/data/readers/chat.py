"""Parts of chat messages that several formats share."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import unquote

from titan_tree.components.tree_tokenizer.endings import ending
from titan_tree.components.tree_tokenizer.messages import images_of
from titan_tree.data.readers import Record
from titan_tree.data.readers.row_reader import expect
from titan_tree.errors import UserError, shorten

Message = Record

# Members of an API's requests and responses that neither change what the model read nor how it is trained.
REQUEST_FIELDS = (
    "model", "max_tokens", "max_completion_tokens", "max_output_tokens", "max_tool_calls", "n", "seed",
    "stop", "stop_sequences", "stream", "stream_options", "top_p", "top_k", "frequency_penalty",
    "presence_penalty", "top_logprobs", "tool_choice", "parallel_tool_calls", "response_format", "user",
    "metadata", "store", "service_tier", "include", "truncation", "background", "prompt_cache_key",
    "safety_identifier", "anthropic_version", "betas", "min_p", "repetition_penalty", "min_tokens",
    "stop_token_ids", "ignore_eos", "skip_special_tokens", "spaces_between_special_tokens",
    "include_stop_str_in_output", "return_token_ids", "return_tokens_as_token_ids", "return_routed_experts",
    "prompt_logprobs", "cache_salt", "priority",
)  # fmt: skip
EARLIER_TURNS = (
    "the assistant turns in prompts are context, and only the answers are trained; to train turns whose own "
    "calls are not in the file, give conversations with messages"
)
PART_ORDER = {"reasoning": 0, "text": 1, "call": 2}  # of an assistant's message
TEXT_PARTS = ("text", "input_text", "output_text")
IMAGE_PARTS = ("image", "image_url", "input_image", "computer_screenshot")
IMAGE_SOURCES = ("image_url", "source", "url", "path")  # of OpenAI, Anthropic and transformers


def assistant_messages(parts: Iterable[tuple[str, object]]) -> list[Message]:
    """Returns the assistant messages that consist of these parts.

    A message holds reasoning, then text, then tool calls. A part that is out of this order starts another
    message.

    Args:
        parts: ("reasoning" or "text", str), ("call", a tool call), or ("end", mark), which ends a message;
            the mark is its ``finish_reason``, or None if the answer goes on.
    """
    messages: list[Message] = []
    last = "end"
    for kind, value in parts:
        if kind == "end":
            if messages and value is not None:
                messages[-1]["finish_reason"] = value
        else:
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
    for message in messages[:-1]:
        message.setdefault("finish_reason", "continued")
    return messages


def marked(answer: list[Message], mark: object, where: str) -> list[Message]:
    """Returns the messages of an answer with the mark that says how it ended, see endings.py.

    Raises:
        UserError: an unknown mark, or one that contradicts that of a message.
    """
    how = ending(mark, where)
    if mark is None or not answer:
        return answer
    *others, last = answer
    own = last.get("finish_reason")
    before = how if own is None else ending(own, "finish_reason")
    if before != how and (before, how) != ("cut off", "filtered"):  # a filter cuts off
        raise UserError(f"{where}: expected {shorten(own)}, as in the message, got {shorten(mark)}")
    if how == "filtered":
        others = [{**message, "finish_reason": mark} for message in others]
    return [*others, {**last, "finish_reason": mark}]


def mark_of(choice: Message, where: str) -> object:
    """Returns the mark of a choice in a response of Chat Completions.

    Raises:
        UserError: the server reports an error in the choice.
    """
    if choice.get("error"):
        raise UserError(f"{where}.error: expected an answer without an error; remove the row")
    mark, stop = choice.get("finish_reason"), choice.get("stop_reason")
    if isinstance(stop, str) and mark in (None, "stop"):  # vLLM: the stop string
        return stop if mark is None else "stop_sequence"
    return mark


def call(name: object, arguments: object, identifier: object) -> Message:
    """Returns a tool call in OpenAI's spelling. The tokenizer checks name and arguments."""
    function = {"name": name, "arguments": arguments}
    return {"type": "function", **({} if identifier is None else {"id": identifier}), "function": function}


def answered(prompt: list[Message], answer: list[Message], continues: bool = False) -> Message:
    """Returns the fields of a conversation of which only the answer is trained: messages, and perhaps turns.

    Earlier turns of the assistant, which the prompt repeats, are the answers of other calls.

    Args:
        continues: whether the answer continues the prompt's last message, an assistant's (a prefill).
    """
    if continues:
        prompt, answer = _continued(prompt, answer)
    if all(message.get("role") != "assistant" for message in prompt):
        return {"messages": prompt + answer}
    if len(answer) == 1:
        return {"messages": prompt + answer, "turns": "last"}
    context = [m | {"weight": 0} if m.get("role") == "assistant" else m for m in prompt]
    return {"messages": context + answer}


def _continued(prompt: list[Message], answer: list[Message]) -> tuple[list[Message], list[Message]]:
    """Returns the prompt without its last message, and the answer that begins with it."""
    *prompt, begun = prompt
    first, *others = answer or [{"role": "assistant", "content": ""}]
    more = [name for name in begun if begun[name] and name not in ("role", "content", "weight")]
    if begun.get("role") != "assistant" or more or first.get("reasoning_content"):
        raise UserError(
            "request: expected only text of the assistant in the last message, which the answer continues, "
            "and an answer without reasoning; remove the row"
        )
    text = text_of(begun.get("content"), "request.messages")
    content = text + text_of(first.get("content"), "response")
    return prompt, [{**first, "content": content, "prefill": text}, *others]


def joined(row: Message, fields: Message) -> Message:
    """Returns the fields of both. Raises UserError if they disagree, because one value would be dropped."""
    for name, value in fields.items():
        if row.get(name) is not None and value is not None and row[name] != value:
            raise UserError(f"{name}: expected it once, got it in the row and in its parts; remove one")
    return row | {name: value for name, value in fields.items() if value is not None or name not in row}


def with_answers(row: Message, records: list[Message]) -> Message:
    """Returns a row with its answer, or as a task with the trajectories of several answers."""
    if len(records) == 1:
        return joined(row, records[0])
    shared = {name: row[name] for name in ("temperature", "reward") if name in row}
    return joined(without(row, shared), {"trajectories": [shared | record for record in records]})


def text_of(content: object, where: str) -> str:
    """Returns the text of a message's content: a string, null, or a list of text parts.

    Raises:
        UserError: a part that is not text.
    """
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = expect(content, list, where, "a string or a list of parts")
    return "".join(_part_text(part, f"{where}[{index}]") for index, part in enumerate(parts))


def content_of(content: object, where: str) -> str | list[Message]:
    """Returns the content of a message: text, or several text parts, which the tokenizer joins, and images.

    Raises:
        UserError: a part that is neither text nor an image.
    """
    if not isinstance(content, list):
        return text_of(content, where)
    return joined_parts([part_of(part, f"{where}[{index}]") for index, part in enumerate(content)])


def with_image_column(row: Message, names: Iterable[str]) -> Message:
    """Returns the row with the images of its column ``images`` in parts ``{"type": "image"}``, in order.

    Args:
        names: the columns with messages, in the order in which they show images.

    Raises:
        UserError: there are more images than such parts.
    """
    if not isinstance(images := row.get("images"), list):
        return row
    rest = list(images)
    columns = {
        name: [with_parts(message, lambda part, _: _filled(part, rest)) for message in row[name]]
        for name in names
        if isinstance(row.get(name), list)
    }
    if not columns:
        return row
    if rest:
        raise UserError(
            f'images: expected a part {{"type": "image"}} of a message for each of {len(images)}, got '
            f"{len(images) - len(rest)}; add it where the model saw the image"
        )
    return without(row, ("images",)) | columns


def with_parts(message: Any, change: Callable[[Any, int], object]) -> Any:
    """Returns a message with ``change(part, its index)`` for each part of its content, if that is a list."""
    if not isinstance(message, dict) or not isinstance(parts := message.get("content"), list):
        return message
    return message | {"content": [change(part, index) for index, part in enumerate(parts)]}


def _filled(part: object, images: list[object]) -> object:
    """Returns a part with the first one of the images, which is removed, if it is an image without source."""
    return {"type": "image", "image": images.pop(0)} if images and part == {"type": "image"} else part


def joined_parts(parts: list[Message]) -> str | list[Message]:
    """Returns the text of at most one text part, and other parts as they are."""
    return parts if len(parts) > 1 or images_of(parts) else "".join(part["text"] for part in parts)


def result_of(content: object, where: str) -> str | list[Message]:
    """Returns the content of a tool's result: its text, or a list of parts if it has images."""
    parts = content_of(content, where)
    return parts if images_of(parts) else text_of(content, where)


def sources_of(contents: Iterable[object]) -> Record:
    """Returns the field ``images`` of a record of token ids, in which the starts are then found."""
    parts = [part for content in contents if isinstance(content, list) for part in images_of(content)]
    images = [without(part, ("type",)) for part in parts]
    return {"images": images} if images else {}


def part_of(part: object, where: str) -> Message:
    """Returns a part of a message's content in titan_tree's schema.

    Raises:
        UserError: a part that is neither text nor an image.
    """
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or kind not in IMAGE_PARTS:
        return {"type": "text", "text": _part_text(part, where)}
    if kind == "image" and part.get("image") is not None:  # titan_tree's own
        return part
    source = next((part[name] for name in IMAGE_SOURCES if part.get(name) is not None), None)
    if isinstance(source, dict) and source.get("type") == "base64":
        source = f"data:{source.get('media_type')};base64,{source.get('data')}"
    elif isinstance(source, dict):
        source = source.get("url")
    if not isinstance(source, str):
        raise UserError(
            f"{where}: expected an image as a file beside the data or as a data: URL, got {shorten(part)}; "
            "an id of a file does not hold it"
        )
    is_file = source.startswith("file:///")
    return {"type": "image", "image": unquote(source.removeprefix("file://")) if is_file else source}


def _part_text(part: object, where: str) -> str:
    if isinstance(part, str):
        return part
    part = expect(part, dict, where, "a part with text")
    kind = part.get("type")
    if kind == "refusal":
        return expect(part.get("refusal"), str, f"{where}.refusal", "a string")
    if kind not in TEXT_PARTS:
        raise not_text(where, kind)
    return expect(part.get("text"), str, f"{where}.text", "a string")


def not_text(where: str, kind: object) -> UserError:
    """Returns the error for a content part of a kind that is not read here."""
    return UserError(
        f"{where}: got a part of type {shorten(kind)}; expected text, or an image that a user, a system or a "
        "tool shows (docs/images.md); remove the part or the row"
    )


def without_temperature_0(record: Message) -> Message:
    """Returns the record without its temperature if that is 0: greedy decoding defines no log-probs."""
    temperature = record.get("temperature")
    is_greedy = type(temperature) in (int, float) and temperature == 0
    return without(record, ("temperature",)) if is_greedy else record


def without(row: Message, names: Iterable[str]) -> Message:
    dropped = set(names)
    return {name: value for name, value in row.items() if name not in dropped}
