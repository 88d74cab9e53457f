"""The samples of a conversation, made the plain way: each turn is rendered and encoded from its beginning."""

import json
import re
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from jinja2 import TemplateError
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.messages import normalize_messages
from titan_tree.errors import UserError

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
    """

    def __init__(self, tokenizer: TreeTokenizer, template: str) -> None:
        self.tokenizer = tokenizer
        self.template = plain_environment().from_string(template)
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
            parts = re.split("[\ufdd0\ufdd1]", text[start:end]) if self.has_text_spans else [text[start:end]]
            for place, part in enumerate(parts):
                ids = self.tokenizer.encode(part, special=place % 2 == 0)
                tokens += ids
                mask += [float(number % 2)] * len(ids)
        if not tokens:
            raise RefusedError("expected a non-empty list of token ids")
        return tokens, mask


def assert_same_samples(
    tokenizer: TreeTokenizer, plain: PlainTokenizer, messages: list, tools: list | None, **options: Any
) -> int | None:
    """Asserts that both make the same samples or both refuse. Returns their number, or None if refused."""
    try:
        expected = plain.samples(messages, tools, **options)
    except Exception as raised:
        refusal = raised
    else:
        paths = tokenizer.samples(messages, tools, **options)
        assert [(path.tokens.tolist(), path.loss_mask.tolist()) for path in paths] == expected
        assert all((path.tokens.dtype, path.loss_mask.dtype) == ("int32", "float32") for path in paths)
        return len(paths)
    with pytest.raises(UserError) as error:
        tokenizer.samples(messages, tools, **options)
    assert " ".join(str(refusal).split()) in str(error.value)
    assert "\n" not in str(error.value)
    return None
