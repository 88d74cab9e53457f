"""Cuts a conversation into training samples by rendering it, without rules about chat templates.

The sample of assistant turn i is what the model read and wrote at that turn:

    prompt      = render(messages[:i], add_generation_prompt=True)
    completion  = the rest of render(messages[:i + 1])

Only the completion has loss. An answer that the model did not end is rendered twice with more text, and ends
where the two renderings diverge. Some templates change the history: Qwen3's drops the reasoning of earlier
turns. The samples of one conversation then diverge, exactly as the model's inputs did.

Each prompt of a conversation repeats most of the one before. ``PrefixEncoder`` reuses the ids of this part.
"""

from __future__ import annotations

import json
import logging
import re
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from titan_tree.components.tree_tokenizer.encoders import CONTEXT_CHARACTERS, Spans, TextEncoder
from titan_tree.components.tree_tokenizer.endings import ending
from titan_tree.components.tree_tokenizer.messages import IMAGE_TOKEN, Message
from titan_tree.components.tree_tokenizer.probes import check_context, check_images, find_end
from titan_tree.components.tree_tokenizer.templates import ChatTemplate, End
from titan_tree.errors import UserError, count, shorten
from titan_tree.tree.images import Image
from titan_tree.tree.paths import TokenPath

Turns = Literal["each", "last", "whole"]
logger = logging.getLogger(__name__)
_THINK = re.compile("</?think>")


class RenderedSample(NamedTuple):
    """The text of a sample, and which parts of it the model wrote."""

    text: str
    completions: list[tuple[int, int]]  # ranges [start, end) of characters, in order


@dataclass
class ConversationSamples:
    """The training samples of one normalized conversation; see ``TreeTokenizer.samples``."""

    encoder: TextEncoder
    template: ChatTemplate
    messages: Sequence[Message]
    tools: Sequence[dict[str, object]] | None
    variables: dict[str, object]  # template variables
    stops: frozenset[str] = frozenset()  # tokens at which an engine stops
    images: Sequence[Sequence[Any]] = ()  # of each message

    def __post_init__(self) -> None:
        self._prompts = PrefixEncoder(self.encoder, self.template)

    def paths(self, turns: Turns) -> list[TokenPath]:
        """Returns the samples, or an empty list if the conversation has no assistant message."""
        if turns not in get_args(Turns):
            raise UserError(f"turns: expected one of {', '.join(get_args(Turns))}, got {turns!r}")
        indices = self.assistant_turns()
        if not indices:
            return []
        if turns == "last":
            indices = indices[-1:]
        self._refuse_neighbours(indices)
        if any(self.images):
            check_images(self.template, self.variables)
        check_context(self.template, self.messages, self.tools, indices, self.variables)
        if turns == "whole":
            return [self.encode(self.render_whole(indices), len(self.messages))]
        turns_and_ends = zip(self.render_turns(indices), indices, strict=True)
        return [self.encode(turn, index + 1) for turn, index in turns_and_ends]

    def assistant_turns(self) -> list[int]:
        return [index for index, message in enumerate(self.messages) if message["role"] == "assistant"]

    def render_turns(self, indices: Sequence[int]) -> Iterator[RenderedSample]:
        """Renders the conversation up to and including each of the given assistant messages.

        The completion ends with the token at which an engine stops, see ``find_end``. The model did not write
        what the template adds after it, such as white space, so that has loss mask 0. It stays in the sample
        because the prompts of later turns contain it, so the tree shares all tokens of the sample with them.

        If the model did not end its answer, the sample ends with the text of the answer. If the message is
        not trained, or the model wrote nothing, there is no completion.
        """
        prefixes = [prefix for index in indices for prefix in ((index, True), (index + 1, False))]
        texts = self.template.prefixes(self.messages, self.tools, prefixes, self.variables)
        for index, prompt, text in zip(indices, texts, texts, strict=True):
            if prefill := self.messages[index].get("prefill"):
                prompt = self._begun(index, {"role": "assistant", "content": prefill}, prompt)
            if not text.startswith(prompt):
                raise UserError(
                    f"messages[{index}]: expected the chat template to render this turn as a continuation of "
                    f"its own generation prompt: {_first_difference(prompt, text)}; change the template's "
                    "variables, such as enable_thinking, or the template"
                )
            sample = self._turn(index, prompt, text)
            for start, end in sample.completions:
                self._refuse_loss(index, self.template.plain(sample.text[start:end]))
            yield sample

    def _turn(self, index: int, prompt: str, text: str) -> RenderedSample:
        """Returns the sample of a turn from the rendered text before and after it."""
        message = self.messages[index]
        if not self._is_trained(index):
            return RenderedSample(text, [])
        how = ending(message.get("finish_reason"), f"messages[{index}].finish_reason")
        is_empty = not any(message.get(field) for field in ("content", "reasoning_content", "tool_calls"))
        end = self._end(index)
        at = -1
        if end.token and not end.added:
            before, *ends = text[len(prompt) :].rsplit(end.token, end.times)
            at = len(prompt) + len(before) if ends else -1
        if how in ("cut off", "filtered") or (how == "continued" and at < 0):
            text = text if is_empty else self._begun(index, message, prompt)
            is_empty = is_empty or len(text) == len(prompt)
            return RenderedSample(text, [] if is_empty else [(len(prompt), len(text))])
        if is_empty:
            last = ", the last" if index == len(self.messages) - 1 else ""  # the response of a call
            raise UserError(
                f"messages[{index}]{last}: expected text, reasoning or tool calls in a trained answer, got "
                "none; remove the message or its call, or give it weight 0 or a finish_reason such as length"
            )
        text += end.added
        stop = len(text) if at < 0 else at if how == "continued" else at + len(end.token)
        return RenderedSample(text, [(len(prompt), stop)])

    def _end(self, index: int) -> End:
        """Returns where the template ends the answer ``index``. Logs once that it has no end."""
        answer, following = self.messages[index], self.messages[index + 1 : index + 2]
        default = "tool" if answer.get("tool_calls") else "user"
        role = following[0]["role"] if following and following[0]["role"] in ("user", "tool") else default
        kind = bool(answer.get("tool_calls")), role, repr(self.variables)
        if kind not in self.template.ends:
            self.template.ends[kind] = self._find_end(index, role)
        return self.template.ends[kind]

    def _find_end(self, index: int, following: str) -> End:
        messages = self.messages[: index + 1]
        for tokens in (self.encoder.control_tokens, self.encoder.special_tokens):
            end = find_end(self.template, messages, self.tools, self.variables, following, tokens, self.stops)
            if end.token:
                return end
        logger.warning(
            "chat template %s: answers have no end: no control token follows them, so a model that is "
            "trained on them does not learn to stop; choose another data.template",
            self.template.name,
            extra={"warning": ("no end", self.template.name)},
        )
        return End("")

    def _refuse_loss(self, index: int, completion: str) -> None:
        """Raises UserError unless the completion shows the reasoning, content and calls of its message.

        White space around them may change. A template may move <think> and </think>. It must neither repeat
        the text, nor add another thought to content that begins with one.
        """
        message, at = self.messages[index], 0
        content = message["content"][len(message.get("prefill") or "") :]
        parts = [("reasoning_content", message.get("reasoning_content") or "")]
        parts += [("content", part) for part in _THINK.split(content)]
        for field, part in parts:
            text = part.strip()
            found = completion.find(text, at)
            if found < 0:
                raise self._loss(index, field, text)
            at = found + len(text)
        calls = message.get("tool_calls", ())
        if text and not calls and completion.count(text) > 1:
            written, printed = "".join(part for _, part in parts), _THINK.sub("", completion)
            for token in self.encoder.special_tokens:
                printed = printed.replace(token, "")
            if printed.count(text) > written.count(text):
                raise self._loss(index, field, text)
        if content.lstrip().startswith("<think>") and completion.count("<think>") > content.count("<think>"):
            raise self._loss(index, "content", content)
        for call in calls:
            for text in _strings(call["function"]):
                if not any(form in completion[at:] for form in _forms(text)):
                    raise self._loss(index, "tool_calls", text)

    def _loss(self, index: int, field: str, text: str) -> UserError:
        return UserError(
            f"messages[{index}].{field}: the chat template {self.template.name} leaves out or changes "
            f"{shorten(text)}, which the model wrote; change data.template, move a thought in the content to "
            "reasoning_content, or give the message weight 0"
        )

    def _is_trained(self, index: int) -> bool:
        """Returns whether an answer is trained: a filtered one only if it has a weight other than 0."""
        message = self.messages[index]
        how = ending(message.get("finish_reason"), f"messages[{index}].finish_reason")
        return message.get("weight", 1) != 0 and (how != "filtered" or message.get("weight") is not None)

    def _begun(self, index: int, message: Message, prompt: str) -> str:
        """Returns the rendered text up to the last character of an assistant message that is not ended.

        Text is added to the message in two ways. What follows it in the two renderings cannot agree.
        """
        before = self.messages[:index]
        longer = [[*before, _extended(message, more, index)] for more in "ab"]
        one, other = (self.template.render(m, self.tools, False, self.variables) for m in longer)
        end = next((i for i in range(len(prompt), len(one)) if one[i] != other[i : i + 1]), len(one))
        text = one[:end]
        shows_end = one.startswith(f"{text}a") and other.startswith(f"{text}b")
        calls = message.get("tool_calls")
        shows_text = not calls or text.endswith(calls[-1]["function"]["arguments"])
        if not (shows_end and shows_text and one.startswith(prompt)):
            raise UserError(
                f"messages[{index}]: the chat template does not show where the answer was cut off; give the "
                "message weight 0, or remove it"
            )
        return text

    def _refuse_neighbours(self, indices: Sequence[int]) -> None:
        """Raises UserError for two assistant messages in a row that may be one answer, if one is trained."""
        trained = {index for index in indices if self._is_trained(index)}
        turns = set(self.assistant_turns())
        for index in sorted(turns):
            pair = {index, index + 1}
            if pair <= turns and pair & trained and self.messages[index].get("finish_reason") is None:
                raise UserError(
                    f"messages[{index + 1}]: expected another role after the assistant's message "
                    f"{index}; join the two, or give message {index} a finish_reason: stop (the model ended "
                    "it), length (it was cut off) or continued (both are one answer)"
                )

    def render_whole(self, indices: Sequence[int]) -> RenderedSample:
        """Renders all messages once, with the completions of all assistant messages."""
        whole = self.template.render(self.messages, self.tools, False, self.variables)
        completions = []
        for index, turn in zip(indices, self.render_turns(indices), strict=True):
            if index == len(self.messages) - 1 and turn.text.startswith(whole):
                whole = turn.text  # the end that the template writes only in front of a next message
            if not whole.startswith(turn.text):
                raise UserError(
                    f"messages[{index}]: the chat template renders this turn differently once more messages "
                    f"follow: {_first_difference(turn.text, whole)}; use turns = 'each'"
                )
            completions += turn.completions
        return RenderedSample(whole, completions)

    def encode(self, sample: RenderedSample, stop: int) -> TokenPath:
        """Encodes each prompt and each completion separately, so both begin at a token boundary.

        The loss mask is 1 on completions and 0 elsewhere. The images are those of the messages before the
        index ``stop``.
        """
        (before, _), *others = _parts(sample)
        tokens = [self._prompts.encode(before)]
        mask = [np.zeros(len(tokens[0]), np.float32)]
        for part, has_loss in others:
            part = self.template.reopened(before, part)
            pieces = self._encode_part(before, part)
            tokens += pieces
            mask.append(np.full(sum(map(len, pieces)), has_loss, np.float32))
            before = part
        return self._expanded(np.concatenate(tokens), np.concatenate(mask), stop)

    def _expanded(self, tokens: np.ndarray, mask: np.ndarray, stop: int) -> TokenPath:
        """Returns the path in which each image has as many placeholders as tokens."""
        images = [image for images in self.images[:stop] for image in images]
        if not images:
            return TokenPath(tokens, mask)
        if wrong := [image for image in images if not isinstance(image, Image)]:
            raise UserError(f"messages: expected titan_tree.tree.images.Image, got {shorten(wrong[0])}")
        at = np.flatnonzero(tokens == self.encoder.special_tokens.get(IMAGE_TOKEN, -1))
        if len(at) != len(images):
            raise UserError(
                f"messages: expected {IMAGE_TOKEN} once for each of {count(len(images), 'image')}, got it "
                f"{len(at)} times in the tokens of a prompt and its answer; remove it from the texts of "
                "messages, and choose a tokenizer that has this token and a data.template that shows images"
            )
        sizes = np.array([len(image) for image in images])
        repeats = np.ones(len(tokens), int)
        repeats[at] = sizes
        starts = (np.cumsum(repeats)[at] - sizes).tolist()
        placed = list(zip(starts, images, strict=True))
        return TokenPath(np.repeat(tokens, repeats), np.repeat(mask, repeats), images=placed)

    def _encode_part(self, before: str, part: str) -> list[np.ndarray]:
        def end() -> Spans:
            return Spans(self.template.spans(before[-2 * CONTEXT_CHARACTERS :]))

        return self.encoder.encode_after(end, Spans(self.template.spans(part)))


def _parts(sample: RenderedSample) -> list[tuple[str, bool]]:
    """Returns the sample's text in order, cut into (part, whether the model wrote it)."""
    parts, position = [], 0
    for start, end in sample.completions:
        parts += [(sample.text[position:start], False), (sample.text[start:end], True)]
        position = end
    return [*parts, (sample.text[position:], False)]


def _extended(message: Message, more: str, index: int) -> Message:
    """Returns the message with more text where the model stopped."""
    if calls := message.get("tool_calls"):
        *others, last = calls
        function = last["function"]
        if not isinstance(function["arguments"], str):
            raise UserError(
                f"messages[{index}].tool_calls[{len(others)}]: expected arguments as text in an answer that "
                "was cut off, because an object does not show where; give the message weight 0, or remove it"
            )
        function = {**function, "arguments": function["arguments"] + more}
        return {**message, "tool_calls": [*others, {**last, "function": function}]}
    field = "content" if message["content"] else "reasoning_content"
    return {**message, field: message[field] + more}


def _strings(function: Message) -> Iterator[str]:
    """Yields the keys, strings and numbers in the arguments of a call, and the name of its function."""
    waiting = [function["name"], function["arguments"]]
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            waiting += [*item, *item.values()]
        elif isinstance(item, list):
            waiting += item
        elif isinstance(item, str):
            yield item.strip()
        elif isinstance(item, int | float) and not isinstance(item, bool):
            yield repr(item)


def _forms(text: str) -> Iterator[str]:
    """Yields a text as templates print it: as it is, in JSON, and in JSON text in JSON."""
    yield text
    for ensure_ascii in (False, True):
        escaped = json.dumps(text, ensure_ascii=ensure_ascii)[1:-1]
        yield escaped
        yield json.dumps(escaped, ensure_ascii=ensure_ascii)[1:-1]


def _first_difference(expected: str, got: str) -> str:
    at = next((i for i, (a, b) in enumerate(zip(expected, got, strict=False)) if a != b), len(got))
    return f"{expected[at : at + 30]!r} became {got[at : at + 30]!r} after {expected[max(at - 30, 0) : at]!r}"


class _Cut(NamedTuple):
    """A point in a text before an added token. The text before it does not change how the rest is encoded.

    Let n be the length of the longest added token. Whether an added token starts at character s depends on at
    most n characters from s on, and the marks between them: "<a>" may become "<ab>" or "<a>b". If another
    text agrees with this one in the first ``needed`` characters, it therefore has the same cut.
    """

    offset: int  # characters before the cut
    needed: int  # characters in which another text must agree to have this cut
    num_ids: int  # ids of the text before the cut


class PrefixEncoder:
    """Encodes rendered texts one after another, and reuses the ids of what a text shares with the one before.

    Ids are equal to those of encoding each text alone, for every vocabulary and every template. Only added
    tokens separate reusable parts. Elsewhere, the ids of a word can depend on the words behind it.
    """

    def __init__(self, encoder: TextEncoder, template: ChatTemplate) -> None:
        self._encoder = encoder
        self._template = template
        self._longest = max(map(len, encoder.special_tokens), default=0)
        self._text = ""
        self._ids = np.empty(0, np.int32)
        self._cuts = [_Cut(0, 0, 0)]

    def encode(self, text: str) -> np.ndarray:
        """Returns the ids of a text with marked text spans, [n] int32. Do not change them."""
        old = self._text
        is_longer = text.startswith(old)  # as nearly all are

        def differs(cut: _Cut) -> bool:
            return cut.needed > len(old) or not (is_longer or text.startswith(old[: cut.needed]))

        cuts = self._cuts[: bisect_left(self._cuts, True, key=differs)]
        offset, needed, num_ids = cuts[-1]
        pieces = [self._ids[:num_ids]]
        spans = Spans(self._template.spans(text[offset:]))
        for start, is_cut, ids in self._encoder.encode_pieces(spans):
            if is_cut:
                last = start + self._longest - 1  # the last character that matters
                needed = max(needed, offset + last + spans.marks_before(last) + 1)
                cuts.append(_Cut(offset + start + spans.marks_before(start), needed, num_ids))
            pieces.append(ids)
            num_ids += len(ids)
        self._text, self._ids, self._cuts = text, np.concatenate(pieces), cuts
        return self._ids
