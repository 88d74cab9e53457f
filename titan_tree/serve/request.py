"""What clients ask and get, in the form that chat templates read, whatever API they speak."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

Json = Any  # decoded JSON
Message = dict[str, Any]  # as ``normalize_messages`` returns it


@dataclass(frozen=True, kw_only=True)
class Request:
    """A request for one turn of the model.

    Attributes:
        messages: all messages before the turn.
        tools: JSON schemas in the spelling of Chat Completions, ``{"type": "function", "function": {...}}``.
        max_tokens: maximum number of tokens of the turn; None: the server's.
        ignored: fields of the request that do not take effect here, such as another temperature than that of
            the server, and tools that run at a provider.
    """

    messages: list[Message]
    tools: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    ignored: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A turn of the model.

    Attributes:
        id: letters and digits, which no other answer has.
        message: the turn: ``content``, and ``reasoning_content`` and ``tool_calls`` if it has some. Arguments
            are JSON text as the model wrote it. Calls have ids.
        finish: "stop", or "length" if a limit of tokens cut it off.
        prompt_tokens: number of tokens that the model read.
        completion_tokens: number of tokens that it wrote.
    """

    id: str
    message: Message
    finish: Literal["stop", "length"]
    prompt_tokens: int
    completion_tokens: int


class Dialect(Protocol):
    """An API that clients speak."""

    def request(self, body: Json) -> Request:
        """Reads the JSON body of a request.

        Raises:
            UserError: fields are malformed, or ask for what the server cannot do, such as several choices.
        """
        ...

    def answer(self, body: Json, answer: Answer) -> Json:
        """Returns the JSON body of a whole answer to the request with this body."""
        ...

    def events(self, body: Json, answer: Answer) -> Iterator[tuple[str | None, Json]]:
        """Yields the events of a streamed answer: name, or None, and JSON or text."""
        ...

    def error(self, status: int, message: str) -> Json:
        """Returns the JSON body of an answer with an error, in the form that SDKs of this API read."""
        ...
