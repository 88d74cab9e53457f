"""The samples of a conversation, made the plain way: each turn is rendered and encoded from its beginning."""

import json
import re
from collections.abc import Iterable
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.messages import normalize_messages
from titan_tree.errors import UserError

LOST = ("which the model wrote", "what the model read")  # in errors about text that a template leaves out
Samples = list[tuple[list[int], list[float]]]  # tokens and loss mask


class Turn(NamedTuple):
    text: str
    start: int  # of the completion
    end: int


class RefusedError(Exception):
    """The conversation has no samples; TreeTokenizer's error must contain this text."""


def plain_environment() -> ImmutableSandboxedEnvironment:
    """Returns Jinja's own sandbox, set up as by transformers, with the filter ``text``."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.filters["text"] = lambda text: "\ufdd0" + text + "\ufdd1"
    environment.globals["raise_exception"] = raise_exception
    return environment


def to_json(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def raise_exception(message):
    raise TemplateError(message)


class PlainTokenizer:
    """Makes the samples that ``tokenizer`` must make.

    Args:
        tokenizer: its ``encode`` is tested against the library ``tokenizers``.
        template: text of its chat template.
        control: the control tokens. Default: the tokenizer's own.
    """

    def __init__(self, tokenizer: TreeTokenizer, template: str, control: Iterable[str] | None = None) -> None:
        self.tokenizer = tokenizer
        self.template = plain_environment().from_string(template)
        self.control = tokenizer.control_tokens if control is None else control
        self.has_text_spans = re.search(r"\|\s*text\b", template) is not None

    def samples(self, messages: list, tools: list | None, turns: str = "each", **variables: Any) -> Samples:
        messages = normalize_messages(messages, "messages")
        indices = [i for i, message in enumerate(messages) if message["role"] == "assistant"]

        def turn(index: int) -> Turn:
            prompt, text = render(index, True), render(index + 1, False)
            if not text.startswith(prompt):
                raise RefusedError(f"messages[{index}]: expected the chat template to render this turn as")
            body = text.rstrip()
            stopped = len(body) > len(prompt) and body.endswith(tuple(self.tokenizer.special_tokens))
            return Turn(text, len(prompt), len(body) if stopped else len(text))

        def render(count: int, add_generation_prompt: bool) -> str:
            return self.template.render(
                messages=messages[:count],
                tools=tools or None,
                documents=None,
                add_generation_prompt=add_generation_prompt,
                **variables,
            )

        if turns != "whole":
            return [self.encode(t.text, [t]) for t in map(turn, indices if turns == "each" else indices[-1:])]
        whole = render(len(messages), False)
        completions = []
        for index in indices:
            completions.append(turn(index))
            if not whole.startswith(completions[-1].text):
                raise RefusedError(
                    f"messages[{index}]: the chat template renders this turn differently once more"
                )
        return [self.encode(whole, completions)]

    def encode(self, text: str, turns: list[Turn]) -> tuple[list[int], list[float]]:
        """Encodes the text before, in and after each completion separately."""
        tokens: list[int] = []
        mask: list[float] = []
        bounds = [0, *(bound for turn in turns for bound in (turn.start, turn.end)), len(text)]
        for number, (start, end) in enumerate(pairwise(bounds)):
            part = text[start:end]
            ids = self.encode_spans(part) if self.has_text_spans else self.tokenizer.encode(part)
            tokens += ids
            mask += [float(number % 2)] * len(ids)
        if not tokens:
            raise RefusedError("expected a non-empty list of token ids")
        return tokens, mask

    def encode_spans(self, marked: str) -> list[int]:
        """Encodes all text as one, in which control tokens that touch a text span are plain text."""
        added = sorted(self.tokenizer.special_tokens, key=len, reverse=True)
        parts = re.split("[\ufdd0\ufdd1]", marked)
        text = "".join(parts)
        # Characters of one part have one number. Even parts are the template's.
        place = [number for number, part in enumerate(parts) for _ in part]
        ids: list[int] = []
        start = at = 0  # of the text that is not encoded yet
        while at < len(text):
            token = next((token for token in added if text.startswith(token, at)), text[at])
            places = set(place[at : at + len(token)])
            if token in self.control and len(places) == 1 and min(places) % 2 == 0:
                ids += self.tokenizer.encode(text[start:at], special=False)
                ids.append(self.tokenizer.special_tokens[token])
                start = at + len(token)
            at += len(token)
        return ids + self.tokenizer.encode(text[start:], special=False)


def assert_same_samples(
    tokenizer: TreeTokenizer, plain: PlainTokenizer, messages: list, tools: list | None, **options: Any
) -> int | None:
    """Asserts that both make the same samples or both refuse. Returns their number, or None if refused."""
    try:
        expected = plain.samples(messages, tools, **options)
    except Exception as raised:
        refusal = raised
    else:
        try:
            paths = tokenizer.samples(messages, tools, **options)
        except UserError as lost:
            if not any(words in str(lost) for words in LOST):
                raise
            return None  # the oracle does not look for text that a template leaves out
        assert [(path.tokens.tolist(), path.loss_mask.tolist()) for path in paths] == expected
        assert all((path.tokens.dtype, path.loss_mask.dtype) == ("int32", "float32") for path in paths)
        return len(paths)
    with pytest.raises(UserError) as error:
        tokenizer.samples(messages, tools, **options)
    told = str(error.value)
    assert " ".join(str(refusal).split()) in told or any(words in told for words in LOST)
    assert "\n" not in told
    return None
