"""What the bodies of all APIs have in common."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from titan_tree.components.tree_tokenizer.messages import ANSWER_FIELDS, images_of, normalize_messages
from titan_tree.data.readers.chat import without
from titan_tree.data.readers.row_reader import RowReader, expect
from titan_tree.errors import UserError, errors_at, shorten
from titan_tree.serve.request import Json, Message, Request

PIECE = 64  # characters of an event of a stream
# Values that the server supports in these fields, beside null. An object counts as its type.
SERVED: dict[str, tuple[Json, ...]] = {
    "n": (1,), "tool_choice": ("auto", "none"), "response_format": ("text",), "output_format": (),
    "modalities": (["text"],), "audio": (), "functions": (), "function_call": (), "prompt": (),
    "background": (False,), "continue_final_message": (False,),
}  # fmt: skip
# Values with which a field without effect asks for nothing.
NEUTRAL: dict[str, tuple[Json, ...]] = {
    "temperature": (1,), "top_p": (1,), "presence_penalty": (0,), "frequency_penalty": (0,),
    "logprobs": (False,), "top_logprobs": (0,), "parallel_tool_calls": (True,), "truncation": ("disabled",),
    "tool_choice": ("auto", {"type": "auto"}),
}  # fmt: skip
# Fields that do not concern sampling, or that clients always send.
HARMLESS = (
    "model", "stream", "stream_options", "tools", "user", "metadata", "store", "service_tier", "include",
    "prompt_cache_key", "prompt_cache_retention", "safety_identifier", "client_metadata", "betas",
    "anthropic_version", "cache_control", "context_management", "thinking", "reasoning", "reasoning_effort",
    "verbosity", "output_config", "text", "add_generation_prompt",
)  # fmt: skip
MAX_TOKENS = ("max_completion_tokens", "max_tokens", "max_output_tokens")  # the first one counts
ERRORS = {  # types of errors, by status; Anthropic's names, of which OpenAI's are a part
    400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error",
}  # fmt: skip


def read(body: Json, reader: RowReader, fields: Sequence[str]) -> Request:
    """Returns the request that a body asks for.

    ``reader``, that of files of this API, converts the ``fields`` that hold messages: those of requests and
    of files become equal. Tools without a schema run at a provider; they are ignored. Raises UserError if
    the body is malformed, or asks for what the server cannot do.
    """
    body = expect(body, dict, "body", "a JSON object")
    for name in ("text", "output_config", "stream_options"):
        options = expect(body.get(name) or {}, dict, name, "an object")
        _check_served(f"{name}.format", options.get("format"), ("text",))
    for name, values in SERVED.items():
        _check_served(name, body.get(name), values)
    known = {*fields, *HARMLESS, *MAX_TOKENS, *SERVED} - {"tool_choice"}
    ignored = [
        f"{name:.60} = {shorten(value)}"
        for name, value in body.items()
        if name not in known and value not in (None, [], {}, *NEUTRAL.get(name, ()))
    ]
    row = {name: body[name] for name in fields if body.get(name) is not None}
    for index, tool in enumerate(expect(body.get("tools") or [], list, "tools", "a list of tools")):
        tool = expect(tool, dict, f"tools[{index}]", "an object")
        if tool.get("type") == "function" or "input_schema" in tool:
            row.setdefault("tools", []).append(tool)
        else:
            ignored.append(f"tool {tool.get('name') or tool.get('type')!s:.60}")
    reader.path = "request"  # for its warnings
    with errors_at(reader.path):
        record = reader.convert(row)
        # How an earlier answer ended changes nothing in what the model reads.
        messages = [without(message, ANSWER_FIELDS) for message in record.get("messages") or ()]
        messages = normalize_messages(messages, "messages")
    for index, message in enumerate(messages):
        _check_images(message, f"messages[{index}].content")
    for index, tool in enumerate(record.get("tools") or ()):
        function = expect(tool.get("function"), dict, f"tools[{index}].function", "an object with a name")
        expect(function.get("name"), str, f"tools[{index}]: name", "a string")
    limit = next((name for name in MAX_TOKENS if body.get(name) is not None), None)
    if limit is not None and expect(body[limit], int, limit, "a number of tokens") < 1:
        raise UserError(f"{limit}: expected at least 1, got {body[limit]}")
    tokens = None if limit is None else body[limit]
    return Request(messages=messages, tools=record.get("tools"), max_tokens=tokens, ignored=tuple(ignored))


def pieces(text: str) -> Iterator[str]:
    """Yields a text in the pieces in which it is streamed."""
    return (text[start : start + PIECE] for start in range(0, len(text), PIECE))


def error_of(status: int, message: str) -> dict[str, str]:
    """Returns type and message of an error."""
    return {"type": ERRORS.get(status, "api_error" if status >= 500 else ERRORS[400]), "message": message}


def openai_error(status: int, message: str) -> Json:
    """Returns the body of an answer with an error, as OpenAI's APIs have it."""
    return {"error": {**error_of(status, message), "param": None, "code": None}}


def _check_served(name: str, value: Json, values: tuple[Json, ...]) -> None:
    kind = value.get("type") if isinstance(value, dict) else value
    if value is not None and kind not in values:
        expected = " or ".join(map(shorten, values)) or "no such field"
        raise UserError(f"{name}: this server supports {expected}, got {shorten(value)}; leave it out")


def _check_images(message: Message, where: str) -> None:
    """Raises UserError for an image that is not in the body, such as a file of the server's machine."""
    for part in images_of(message["content"]):
        if not str(image := part["image"]).startswith("data:image/"):
            raise UserError(f"{where}: expected an image as data:image/...;base64,..., got {shorten(image)}")
