"""Cuts a conversation into training samples by rendering it, without rules about chat templates.

The sample of assistant turn i is what the model read and wrote at that turn:

    prompt      = render(messages[:i], add_generation_prompt=True)
    completion  = the rest of render(messages[:i + 1])

Only the completion has loss. Some templates change the history: Qwen3's drops the reasoning of earlier
turns. The samples of one conversation then diverge, exactly as the model's inputs did.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import numpy as np

from titan_tree.components.tree_tokenizer.encoders import TextEncoder
from titan_tree.components.tree_tokenizer.messages import Message
from titan_tree.components.tree_tokenizer.prefix_encoder import PrefixEncoder
from titan_tree.components.tree_tokenizer.sandbox import JsonTexts
from titan_tree.components.tree_tokenizer.templates import ChatTemplate
from titan_tree.errors import UserError
from titan_tree.tree.paths import TokenPath

Turns = Literal["each", "last", "whole"]


class RenderedSample(NamedTuple):
    """The text of a sample, and which parts of it the model wrote."""

    text: str
    completions: list[tuple[int, int]]  # ranges [start, end) of characters, in order


@dataclass
class ConversationSampler:
    """Makes the training samples of one normalized conversation; see ``TreeTokenizer.samples``."""

    encoder: TextEncoder
    template: ChatTemplate
    messages: Sequence[Message]
    tools: Sequence[dict[str, object]] | None
    variables: dict[str, object]  # template variables

    def __post_init__(self) -> None:
        self._prompts = PrefixEncoder(self.encoder, self.template)
        self._json_texts = JsonTexts()

    def paths(self, turns: Turns) -> list[TokenPath]:
        """Returns the samples, or an empty list if the conversation has no assistant message."""
        if turns not in get_args(Turns):
            raise UserError(f"turns: expected one of {', '.join(get_args(Turns))}, got {turns!r}")
        indices = self.assistant_turns()
        if not indices:
            return []
        if turns == "whole":
            return [self.encode(self.render_whole(indices))]
        indices = indices if turns == "each" else indices[-1:]
        return [self.encode(self.render_turn(index)) for index in indices]

    def assistant_turns(self) -> list[int]:
        """Returns the indices of the assistant's messages."""
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    def render_turn(self, index: int) -> RenderedSample:
        """Renders the conversation up to and including an assistant message.

        The completion ends with the end-of-turn token, where the model stopped. The template adds white space
        after it. The model did not write it, so it has loss mask 0. It stays in the sample because the
        prompts of later turns contain it: the tree then shares all tokens of the sample with them.
        """
        prompt = self._render(index, add_generation_prompt=True)
        text = self._render(index + 1)
        if not text.startswith(prompt):
            raise UserError(
                f"messages[{index}]: expected the chat template to render this turn as a continuation of its "
                f"own generation prompt: {_first_difference(prompt, text)}; change the template's variables, "
                "such as enable_thinking, or the template"
            )
        stripped = text.rstrip()
        stopped = len(stripped) > len(prompt) and stripped.endswith(tuple(self.encoder.special_tokens))
        return RenderedSample(text, [(len(prompt), len(stripped) if stopped else len(text))])

    def render_whole(self, indices: list[int]) -> RenderedSample:
        """Renders all messages once, with the completions of all assistant messages."""
        whole = self._render(len(self.messages))
        completions = []
        for index in indices:
            turn = self.render_turn(index)
            if not whole.startswith(turn.text):
                raise UserError(
                    f"messages[{index}]: the chat template renders this turn differently once more messages "
                    f"follow: {_first_difference(turn.text, whole)}; use turns = 'each'"
                )
            completions += turn.completions
        return RenderedSample(whole, completions)

    def _render(self, num_messages: int, add_generation_prompt: bool = False) -> str:
        """Renders the first messages, with text spans marked."""
        messages = self.messages[:num_messages]
        return self.template.render(
            messages, self.tools, add_generation_prompt, self.variables, self._json_texts
        )

    def encode(self, sample: RenderedSample) -> TokenPath:
        """Encodes each prompt and each completion separately, so both begin at a token boundary.

        The loss mask is 1 on completions and 0 elsewhere.
        """
        (before, _), *others = _parts(sample)
        tokens = [self._prompts.encode(before)]
        mask = [np.zeros(len(tokens[0]), np.float32)]
        for part, has_loss in others:
            pieces = self._encode_part(before, part)
            tokens += pieces
            mask.append(np.full(sum(map(len, pieces)), has_loss, np.float32))
            before = part
        return TokenPath(np.concatenate(tokens), np.concatenate(mask))

    def _encode_part(self, before: str, part: str) -> list[np.ndarray]:
        (first, special), *others = self.template.spans(part)
        pieces = self.encoder.encode_after(self.template.last_span(before), first, special)
        return pieces + [ids for span, special in others for ids in self.encoder.encode(span, special)]


def _parts(sample: RenderedSample) -> list[tuple[str, bool]]:
    """Returns the sample's text in order, cut into (part, whether the model wrote it)."""
    parts, position = [], 0
    for start, end in sample.completions:
        parts += [(sample.text[position:start], False), (sample.text[start:end], True)]
        position = end
    return [*parts, (sample.text[position:], False)]


def _first_difference(expected: str, got: str) -> str:
    """Describes where ``got`` first differs from ``expected``."""
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), len(got))
    return f"{expected[at : at + 30]!r} became {got[at : at + 30]!r} after {expected[max(at - 30, 0) : at]!r}"
