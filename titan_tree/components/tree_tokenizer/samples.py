"""Conversations -> TokenPaths, by rendering instead of rules.

The sample of assistant turn i is what the model read and wrote there:

    prompt      render(messages[:i], generation prompt)
    completion  the rest of render(messages[:i + 1])

The loss counts the completion alone. Where a template changes the history (Qwen3 drops the reasoning of
earlier turns), the samples of a conversation part, as the model's inputs did: nothing else needs to know.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import numpy as np

from titan_tree.components.tree_tokenizer.bpe import BytePairEncoder
from titan_tree.components.tree_tokenizer.messages import Message
from titan_tree.components.tree_tokenizer.templates import ChatTemplate
from titan_tree.errors import UserError
from titan_tree.tree.paths import TokenPath

Turns = Literal["each", "last", "whole"]
Range = tuple[int, int]  # characters [start, end) of a rendered text
Render = Callable[..., str]  # (number of messages, add_generation_prompt=False) -> text


def conversation_paths(
    encoder: BytePairEncoder,
    template: ChatTemplate,
    messages: Sequence[Message],
    tools: Sequence[dict[str, Any]] | None,
    turns: Turns,
    variables: dict[str, Any],
) -> list[TokenPath]:
    """The samples of a normalised conversation; see ``TreeTokenizer.samples``."""
    if turns not in get_args(Turns):
        raise UserError(f"turns: expected one of {', '.join(get_args(Turns))}, got {turns!r}")

    def render(count: int, add_generation_prompt: bool = False) -> str:
        return template.render(messages[:count], tools, add_generation_prompt, variables)

    def path(text: str, counted: list[Range]) -> TokenPath:
        tokens, mask = [], []
        for part, count in _parts(text, counted):
            ids = [ids for span, special in template.spans(part) for ids in encoder.encode(span, special)]
            tokens += ids
            mask.append(np.full(sum(map(len, ids)), count, np.float32))
        return TokenPath(np.concatenate(tokens), np.concatenate(mask))

    stops = tuple(encoder.special_tokens)
    written = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if turns == "whole":
        return [path(*_whole(render, len(messages), written, stops))] if written else []
    return [path(*_turn(render, index, stops)) for index in (written if turns == "each" else written[-1:])]


def _turn(render: Render, index: int, stops: tuple[str, ...]) -> tuple[str, list[Range]]:
    """Text up to and including the assistant message, and the range of it that the model wrote.

    The model stops after its end-of-turn token. White space behind that is the template's.
    """
    prompt, text = render(index, add_generation_prompt=True), render(index + 1)
    if not text.startswith(prompt):
        raise UserError(
            f"messages[{index}]: the chat template renders this turn differently from its own generation "
            f"prompt: {_difference(prompt, text)}; the model would be trained on what it never reads"
        )
    body = text.rstrip()
    end = len(body) if len(body) > len(prompt) and body.endswith(stops) else len(text)
    return text, [(len(prompt), end)]


def _whole(render: Render, count: int, written: list[int], stops: tuple[str, ...]) -> tuple[str, list[Range]]:
    """Text of all messages, and the ranges of it that the model wrote."""
    whole = render(count)
    counted: list[Range] = []
    for index in written:
        text, ranges = _turn(render, index, stops)
        if not whole.startswith(text):
            raise UserError(
                f"messages[{index}]: the chat template renders this turn differently once more messages "
                f"follow: {_difference(text, whole)}; use turns = 'each'"
            )
        counted += ranges
    return whole, counted


def _parts(text: str, counted: list[Range]) -> list[tuple[str, bool]]:
    """``text`` in order, cut at the ends of the ranges: (part, does the loss count it?)."""
    parts, position = [], 0
    for start, end in counted:
        parts += [(text[position:start], False), (text[start:end], True)]
        position = end
    return [*parts, (text[position:], False)]


def _difference(expected: str, got: str) -> str:
    """Where ``got`` first differs from ``expected``, in words."""
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), len(got))
    return f"{expected[at : at + 30]!r} became {got[at : at + 30]!r} after {expected[max(at - 30, 0) : at]!r}"
