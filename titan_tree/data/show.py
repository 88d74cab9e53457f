"""Shows tokens as texts: a sample as it is trained, with its special tokens; and images by their sizes."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np
from rich.text import Text

from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.errors import printable
from titan_tree.tree.images import Image
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

OPEN, CLOSE = "⟦", "⟧"  # around trained tokens, so that they are visible without color
LEFT_OUT = "⟨"  # before the number of tokens that are not shown
LONGEST_CHARACTER = 8  # tokens that may share bytes of characters
SHORTEST_END = 8  # tokens that a shortened sample shows at least at each end of a span


class Span(NamedTuple):
    """Consecutive tokens that look alike."""

    text: str
    is_trained: bool
    is_special: bool = False
    is_left_out: bool = False

    @property
    def style(self) -> str:
        if self.is_left_out:
            return "yellow"
        return ("bold" if self.is_trained else "dim") + (" magenta" if self.is_special else "")


def render_sample(
    path: TokenPath, tokenizer: TreeTokenizer | None = None, max_tokens: int | None = None
) -> Text:
    """Renders a sample: a header, a key to the marks, and the text with its trained tokens in ⟦ and ⟧.

    Masked tokens are dim, trained tokens bold, special tokens magenta. The result's ``plain`` is the same
    text without styles, for logs. Control characters are escaped, except for line breaks and tabs. So is a
    special token's name, ⟦, ⟧ or ⟨ in plain text: a backslash precedes it.

    Args:
        path: the sample.
        tokenizer: decodes the tokens. Without it, token ids are shown.
        max_tokens: shortens longer samples to about this many tokens. What remains are both ends of each
            span of trained or masked tokens.

    Raises:
        UserError: a token id that the tokenizer does not have.
    """
    trained = path.loss_mask > 0
    trained[0] = False  # nothing predicts the first token
    key = f"{OPEN}trained tokens{CLOSE}"
    separator = "" if tokenizer else " "
    names = sorted(tokenizer.special_tokens, key=len, reverse=True) if tokenizer else []
    escaped = re.compile("|".join(map(re.escape, [*names, OPEN, CLOSE, LEFT_OUT])))
    body, inside = Text(), False
    for span in _spans(path, trained, _shown(trained, max_tokens), tokenizer):
        if span.is_trained != inside:
            inside = span.is_trained
            body.append(separator + (OPEN if inside else CLOSE), style="bold green")
        text = span.text
        if not (span.is_special or span.is_left_out) and escaped.search(text):
            text = escaped.sub(r"\\\g<0>", text)
            key = f"{OPEN}trained tokens{CLOSE}, \\<plain text that looks like a special token or a mark>"
        body.append(separator + "\n".join(map(_printable_line, text.split("\n"))), style=span.style)
    if inside:
        body.append(separator + CLOSE, style="bold green")
    return Text.assemble(f"{_header(path, trained)}\n", (f"{key}\n\n", "dim"), body)


def _header(path: TokenPath, trained: np.ndarray) -> str:
    """Returns one line with the id, the sizes, and the fields that scale the loss."""
    count = int(trained.sum())
    parts = [f"{len(path):,} tokens", f"{count:,} trained", f"weight {path.weight:g}"]
    if count and (mask := _range(path.loss_mask[trained])) != "1":
        parts.insert(2, f"loss mask {mask}")
    if path.advantage is not None:
        parts.append(f"advantage {_range(path.advantage[trained] if count else path.advantage)}")
    if path.temperature != 1:
        parts.append(f"temperature {path.temperature:g}")
    if path.policy_version is not None:
        parts.append(
            f"policy version {_range(path.policy_version[trained] if count else path.policy_version)}"
        )
    return f"{printable(path.id or 'sample')}: {', '.join(parts)}"


def _range(values: np.ndarray) -> str:
    low, high = values.min(), values.max()
    return f"{low:g}" if low == high else f"{low:g} to {high:g}"


def _printable_line(line: str) -> str:
    return "\t".join(map(printable, line.split("\t")))


def _shown(trained: np.ndarray, max_tokens: int | None) -> np.ndarray:
    """Returns which tokens to show, [T] bool: the ends of spans, so that every edge of the mask is visible.

    If there are so many spans that this exceeds ``max_tokens``, the middle of the sample is left out as well.
    """
    if max_tokens is None or len(trained) <= max_tokens:
        return np.ones(len(trained), bool)
    starts = np.flatnonzero(np.diff(trained, prepend=not trained[0]))
    end_size = max(max_tokens // (2 * len(starts)), SHORTEST_END)
    is_shown = np.zeros(len(trained), bool)
    for start, end in zip(starts, [*starts[1:], len(trained)], strict=True):
        is_shown[start : min(start + end_size, end)] = True
        is_shown[max(end - end_size, start) : end] = True
    shown = np.flatnonzero(is_shown)
    is_shown[shown[max_tokens // 2 : len(shown) - max_tokens // 2]] = False
    return is_shown


def _spans(
    path: TokenPath, trained: np.ndarray, is_shown: np.ndarray, tokenizer: TreeTokenizer | None
) -> Iterator[Span]:
    """Yields the sample in order. A character that spans several tokens is trained if one of them is."""
    tokens, images = path.tokens, dict(path.images)
    special = set(tokenizer.special_tokens.values()) if tokenizer else set()

    def look(character: tuple[int, int]) -> tuple[bool, bool, bool, int | None]:
        start, end = character
        if not is_shown[start]:
            return False, False, True, None
        image = start if start in images else None
        return bool(trained[start:end].any()), int(tokens[start]) in special, False, image

    for (is_trained, is_special, is_left_out, image), run in groupby(_characters(path, tokenizer), look):
        characters = list(run)
        start, end = characters[0][0], characters[-1][1]
        if is_left_out:
            size, count = end - start, int(trained[start:end].sum())
            some = f", {count:,} of them trained" if 0 < count < size else ""
            yield Span(f"{LEFT_OUT}... {size:,} tokens left out{some} ...⟩", count == size, is_left_out=True)
        elif image is not None:
            yield Span(label(images[image]), is_trained, is_special=True)
        elif tokenizer:
            yield Span(tokenizer.decode(tokens[start:end]), is_trained, is_special)
        else:
            yield Span(" ".join(map(str, tokens[start:end])), is_trained)


def _characters(path: TokenPath, tokenizer: TreeTokenizer | None) -> Iterator[tuple[int, int]]:
    """Yields the ranges [start, end) of tokens that give whole characters or images together."""
    tokens, images, start = path.tokens, dict(path.images), 0
    while start < len(tokens):
        ends = range(start + 1, min(start + LONGEST_CHARACTER, len(tokens)) + 1)
        if start in images:
            end = start + len(images[start])
        elif tokenizer:  # U+FFFD: bytes that are not a character, perhaps because the next token completes it
            end = next((end for end in ends if "\ufffd" not in tokenizer.decode(tokens[start:end])), ends[0])
        else:
            end = ends[0]
        yield start, end
        start = end


def label(image: Image) -> str:
    """Returns what stands for an image in texts, with its width and height in pixels."""
    height, width, _ = image.pixels.shape
    return f"⟨image {width} x {height}⟩"


def text_with_images(
    tree: TokenTree, decode: Callable[[list[int]], str]
) -> Callable[[slice | np.ndarray], str]:
    """Returns a function: indices of a tree's tokens -> their text, with a label for each run of an image."""
    image_of_row = np.append(np.repeat(np.arange(len(tree.images)), [len(i) for i in tree.images]), -1)
    image_of = None if tree.image_row is None else image_of_row[tree.image_row]

    def text(index: slice | np.ndarray) -> str:
        tokens = tree.tokens[index].tolist()
        if image_of is None:
            return decode(tokens)
        pairs = zip(image_of[index].tolist(), tokens, strict=True)
        return "".join(
            decode([token for _, token in run]) if number < 0 else label(tree.images[number])
            for number, run in groupby(pairs, lambda pair: pair[0])
        )

    return text
