"""Token trees -> segments: runs of tokens with the same paths, kind of message, mask and image."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from titan_tree.data.divergence import ENDS, OTHER_TEXT, OTHER_TOKENS, RETOKENIZED, branch_points
from titan_tree.data.show import text_with_images
from titan_tree.data.turns import runs
from titan_tree.tree.images import first_rows
from titan_tree.tree.paths import LOGPROBS
from titan_tree.tree.token_tree import TokenTree
from titan_tree.xray.rendering import KINDS
from titan_tree.xray.secrets import CONTEXT, Secrets

Decode = Callable[[Iterable[int]], str]
TEXT = 300  # characters of a segment that are kept, at most
ANEW = f"{OTHER_TEXT} from the first message on"
DIFFERS = {  # why paths diverge, by the kind of message that differs
    "system": f"{OTHER_TEXT} in a system prompt",
    "tools": f"{OTHER_TEXT} in tool schemas",
    "user": f"{OTHER_TEXT} of the user",
    "assistant": f"{OTHER_TEXT} in an answer",
    "thought": f"{OTHER_TEXT} in a thought",
    "tool": f"{OTHER_TEXT} in a tool's result",
    "other": OTHER_TEXT,
    "image": OTHER_TEXT,
}


@dataclass(frozen=True, eq=False, kw_only=True)
class Segments:
    """The S segments of a token tree, in depth-first order. A parent precedes its children.

    Attributes:
        first: [S] the index of the first token of each segment.
        parent: [S] the segment before it on its paths; -1 at a root.
        tokens: [S] number of tokens.
        kind: [S] index in ``KINDS``.
        trained: [S] whether some path counts the tokens in the loss.
        paths: [S] samples through the segment.
        calls: [S] model calls through the segment: answers at or below it, each once per path that trains it.
        last: [P] the last segment of each path.
        turns: for each path, the first and the last segment of each of its answers.
    """

    first: np.ndarray
    parent: np.ndarray
    tokens: np.ndarray
    kind: np.ndarray
    trained: np.ndarray
    paths: np.ndarray
    calls: np.ndarray
    last: np.ndarray
    turns: list[list[list[int]]]

    @property
    def num_calls(self) -> int:
        """The number of model calls."""
        return sum(map(len, self.turns))

    @property
    def n_calls(self) -> int:
        """Tokens if each model call, an answer with its context, is a sample of its own."""
        return int((self.tokens * self.calls).sum())

    def repeated(self) -> np.ndarray:
        """Returns [kinds]: the tokens that are computed again if each model call is a sample of its own."""
        again = self.tokens * np.maximum(np.where(self.calls > 0, self.calls, self.paths) - 1, 0)
        return np.bincount(self.kind, again, minlength=len(KINDS)).astype(np.int64)


def find_segments(tree: TokenTree, kinds: np.ndarray) -> Segments:
    """Returns the segments of a tree.

    Args:
        tree: a tree with whole paths.
        kinds: [N] int8: the index in ``KINDS`` of each token of the tree.
    """
    size = len(tree)
    trained = np.zeros(size, bool)
    starts = np.zeros(size + 1, bool)
    starts[tree.node_offsets[:-1]] = True
    ends = np.zeros(size + 1, np.int64)  # answers whose last token is the one before
    spans = []  # of each path: first and last tokens of its answers
    for number, path in enumerate(tree.paths):
        index = tree.indices_of(number)
        trained[index[1:][path.loss_mask[1:] > 0]] = True
        pairs = np.array(runs(path.loss_mask), np.int64).reshape(-1, 2)
        span = index[pairs - [0, 1]].reshape(-1, 2)
        starts[span[:, 0]] = starts[span[:, 1] + 1] = True
        np.add.at(ends, span[:, 1] + 1, 1)
        spans.append(span)
    if tree.image_row is not None:
        starts[:size] |= np.isin(tree.image_row, list(first_rows(tree.images).values()))
    starts[1:size] |= (kinds[1:] != kinds[:-1]) | (trained[1:] != trained[:-1])
    first = np.flatnonzero(starts[:size])
    node = np.searchsorted(tree.node_offsets, first, side="right") - 1
    segment_of = np.cumsum(starts[:size]) - 1
    before = tree.predecessor[first]
    below = np.cumsum(ends)
    return Segments(
        first=first,
        parent=np.where(before < 0, -1, segment_of[before]),
        tokens=np.diff(first, append=size),
        kind=kinds[first],
        trained=trained[first],
        paths=tree.node_paths[node],
        calls=below[tree.subtree_end[first]] - below[first],
        last=segment_of[tree.path_index[tree.path_offsets[1:] - 1]],
        turns=[segment_of[span].tolist() for span in spans],
    )


def find_reasons(
    tree: TokenTree, segments: Segments, decode: Decode, header: int
) -> tuple[dict[int, str], dict[str, int], int]:
    """Returns why segments diverge from heavier siblings, and the branch points of each reason and of any.

    A point where siblings diverge for several reasons counts for each of them.

    Args:
        header: tokens that begin every conversation. Paths that share no more do not share a message.
    """
    of_segment: dict[int, str] = {}
    points: dict[str, int] = {}
    total = 0
    segment_of_first = {int(token): number for number, token in enumerate(segments.first)}
    for point in branch_points(tree, lambda ids: decode(ids)):
        reasons = set()
        for child in point.children:
            if not child.reason:
                continue
            segment = segment_of_first[int(tree.node_offsets[child.node])]
            reason = child.reason
            # Bytes differ in a part of a character, which has no text.
            if reason in (OTHER_TEXT, OTHER_TOKENS) or (header and reason == RETOKENIZED):
                reason = ANEW if point.depth <= header else DIFFERS[KINDS[segments.kind[segment]]]
            of_segment[segment] = reason
            reasons.add(reason)
        reasons.discard(ENDS)
        total += bool(reasons)
        for reason in reasons:
            points[reason] = points.get(reason, 0) + 1
    return of_segment, points, total


def texts(tree: TokenTree, segments: Segments, decode: Decode, secrets: Secrets) -> list[str]:
    """Returns how the text of each segment begins, without secrets."""
    shown, text_at = [], text_with_images(tree, decode)
    for number, (start, length) in enumerate(
        zip(segments.first.tolist(), segments.tokens.tolist(), strict=True)
    ):
        above, before = int(segments.parent[number]), ""
        while secrets.is_on and above >= 0 and len(before) < CONTEXT:
            end = int(segments.first[above] + segments.tokens[above])
            before = decode(tree.tokens[max(int(segments.first[above]), end - CONTEXT) : end]) + before
            above = int(segments.parent[above])
        text = text_at(slice(start, start + min(length, TEXT + CONTEXT)))
        shown.append(secrets.text(text, before)[:TEXT])
    return shown


def logprobs(tree: TokenTree, segments: Segments) -> tuple[list[float | None], float] | None:
    """Returns the mean log-prob of the trained tokens of each segment, and minus that of the tree.

    The result is None if no path has log-probs.
    """
    total, count = np.zeros(len(tree)), np.zeros(len(tree))
    for number, path in enumerate(tree.paths):
        values: Any = next((v for name in LOGPROBS if (v := getattr(path, name)) is not None), None)
        if values is not None:
            is_scored = (path.loss_mask > 0) & np.isfinite(values)
            index = tree.indices_of(number)[is_scored]
            total[index] += values[is_scored]  # a path has a token once
            count[index] += 1
    if not count.any():
        return None
    sums, counts = (np.add.reduceat(array, segments.first) for array in (total, count))
    means = [round(s / n, 4) if n else None for s, n in zip(sums.tolist(), counts.tolist(), strict=True)]
    return means, round(-float(total.sum() / count.sum()), 4)
