"""All trees of some sources -> the payload: one JSON object, which the page and --json show.

    {"version", "name", "tokenizer": its name or "bytes", "sentences": [texts], "notes": [texts],
     "totals": {"groups", "samples", "calls", "n_calls", "n_flat", "n_leaf", "n_tree", "points",
                "path_images": images on all paths, "images": distinct ones of each tree},
     "images": see pictures.py, "kinds": [names], "repeats": [tokens per kind],
     "reasons": [[reason, branch points, tokens], ...], "skipped": {what: count},
     "estimators": {name: what it computes}, "trees": [...]}

A tree is {"id", "n_calls", "n_flat", "n_leaf", "n_tree"}, columns with one entry per segment (segments.py):
"parent", "tokens", "paths", "calls", "trained", "kind", "text", "reason", perhaps "logprob" and "image" (its
number, or -1), and its samples: {"segment", "turns", "rollout", "reward", "advantage", "weight"}. "turns"
are the first and the last segment of each answer, and "advantage" has one number for each. If every sample
has a reward, the tree has "advantages": by estimator, with its default options, one number for each answer of
all samples in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any

import numpy as np

from titan_tree.data.data_files import Group
from titan_tree.data.packing import UngroupedLines
from titan_tree.data.readers import OpenFile, Record, open_binary
from titan_tree.data.show import text_with_images
from titan_tree.data.turns import runs
from titan_tree.errors import UserError, count
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree
from titan_tree.xray.credit import answer_advantages, estimators
from titan_tree.xray.pictures import Pictures
from titan_tree.xray.rendering import IMAGE, KINDS, KindFinder, RenderedPath, Renderer
from titan_tree.xray.runs import Curves
from titan_tree.xray.secrets import CONTEXT, Secrets
from titan_tree.xray.segments import Segments, find_reasons, find_segments, logprobs, texts
from titan_tree.xray.sentences import encodings, ratio, sentences
from titan_tree.xray.sources import ENDINGS, PACKED, Sources

VERSION = 1
PAGE_TEXT = 4_000_000  # characters of all texts together
LEAST_TEXT = 24  # characters that each segment may show nevertheless
BYTES_PER_TOKEN = 4  # of English and code, for estimates
MOST_PROMPT = 1 << 40  # tokens of a prompt; a larger number is none
SHOWN_SAMPLES = 8  # of a run
EXCERPT = 2_000  # tokens of each of their excerpts, at most
MOST_EXCERPTS = 40
SUMS = ("n_calls", "n_flat", "n_leaf", "n_tree")


@dataclass
class Reason:
    """Why paths diverge.

    Attributes:
        number: its place in the order in which reasons were found.
        points: the number of branch points that it explains.
        tokens: the tokens of segments for which it is the last reason above them.
    """

    number: int
    points: int = 0
    tokens: int = 0


class Xray:
    """Reads sources, and gathers what their payload holds.

    Args:
        sources: the groups.
        renderer: makes paths of them.
        name: the title of the page.
        has_text: whether segments show how their texts begin, and images small pictures.
        max_tokens: sizes of partitions to draw.
        ranks: numbers of ranks to distribute the trees over.
        curves: the curves of the run whose data the sources are; None: they are no run's.
        has_secrets: whether texts keep what looks like keys and passwords.
    """

    def __init__(
        self,
        sources: Sources,
        renderer: Renderer,
        name: str,
        has_text: bool = True,
        max_tokens: Sequence[int] = (),
        ranks: Sequence[int] = (),
        curves: Curves | None = None,
        has_secrets: bool = False,
    ) -> None:
        self._sources, self._renderer, self._name = sources, renderer, name
        self._has_text, self._max_tokens, self._ranks = has_text, max_tokens, ranks
        self._curves = curves
        self._secrets = Secrets(not has_secrets)
        self._pictures = Pictures(has_text)
        self._shown: list[dict[str, Any]] = []  # samples of a run
        self._kinds = KindFinder(renderer.tokenizer)
        self._ungrouped = UngroupedLines()
        self._trees: list[dict[str, Any]] = []
        self._repeats = np.zeros(len(KINDS), np.int64)
        self._reasons: dict[str, Reason] = {}
        self._totals: Counter[str] = Counter(
            dict.fromkeys(("groups", "samples", "calls", *SUMS, "points", "path_images", "images"), 0)
        )
        self._sizes: list[np.ndarray] = []  # of the trees, for ranks
        self._hidden: list[float] = []  # tokens of prompts that sessions leave out, estimated
        self._sessions: Counter[str] = Counter()  # groups and calls of those sessions

    def payload(self, open_file: OpenFile = open_binary) -> dict[str, Any]:
        """Reads all groups, and returns the payload.

        Args:
            open_file: opens a file for reading; a progress bar wraps files here.

        Raises:
            UserError: there is no group with an answer of a model.
        """
        with self._sources.collected_warnings():
            for group in self._sources.groups(open_file):
                self._add(group)
        if not self._trees and not self._curves:
            nothing = (
                f"{self._name}: no file that a reader knows; expected a format of docs/data.md in files that "
                f"end with {', '.join(ENDINGS)}, also with {' or '.join(PACKED)}"
            )
            raise UserError(f"nothing to show: {next(iter(self._sources.problems), nothing)}")
        self._assign_ranks()
        self._shorten_texts()
        is_scored = any("loss" in tree for tree in self._trees)
        self._trees.sort(
            key=lambda tree: -tree.get("loss", -1.0) if is_scored else tree["n_tree"] - tree["n_calls"]
        )
        by_points = sorted(self._reasons.items(), key=lambda item: -item[1].points)
        numbers = {reason.number: number for number, (_, reason) in enumerate(by_points)} | {-1: -1}
        for tree in self._trees:
            tree["reason"] = [numbers[number] for number in tree["reason"]]
        reasons = [(name, reason.points, reason.tokens) for name, reason in by_points]
        unit = "byte" if self._renderer.has_bytes else "token"
        repeats = self._repeats.tolist()
        payload = {
            "version": VERSION,
            "name": self._name,
            "tokenizer": "bytes" if self._renderer.has_bytes else "tokens",
            "sentences": [
                *sentences(self._totals, repeats, reasons, unit, bool(self._hidden)),
                *encodings(self._totals),
            ],
            "notes": self._notes(),
            "totals": dict(self._totals),
            "images": self._pictures.images,
            "kinds": list(KINDS),
            "repeats": repeats,
            "reasons": reasons,
            "skipped": dict(self._skipped),
            "estimators": estimators(),
            "trees": self._trees,
            **({} if self._curves is None else {"run": {"curves": self._curves, "samples": self._shown}}),
        }
        payload = self._secrets.payload(payload)
        if hidden := self._secrets.hidden:
            what = f"Hidden in texts: {count(hidden, 'part')} that may be a key or a password."
            payload["notes"].insert(0, f"{what} Others may be left; --show-secrets shows all.")
        return payload

    def _add(self, group: Group) -> None:
        """Adds the tree of a group."""
        try:
            rendered = self._renderer.paths(group)
            if not rendered:
                self._sources.skipped["group without an answer"] += 1
                return
            tree = TokenTree.from_paths([item.path for item in rendered])
        except UserError as error:
            self._sources.problems.append(str(error))
            return
        self._ungrouped.add(group, tree)
        segments = find_segments(tree, self._tree_kinds(tree, rendered))
        decode = self._renderer.decode
        of_segment, points, total = find_reasons(tree, segments, decode, self._renderer.header)
        for name, number in points.items():
            self._reasons.setdefault(name, Reason(len(self._reasons))).points += number
        nearest: list[str | None] = []  # the last reason on the way to each segment
        for number, parent in enumerate(segments.parent.tolist()):
            nearest.append(of_segment.get(number, nearest[parent] if parent >= 0 else None))
            if (last := nearest[number]) is not None:
                self._reasons[last].tokens += int(segments.tokens[number])
        stats = tree.stats
        sizes = {
            "n_calls": segments.n_calls,
            "n_flat": stats.n_flat,
            "n_leaf": stats.n_leaf,
            "n_tree": stats.n_tree,
        }
        counts = {"groups": 1, "samples": len(rendered), "calls": segments.num_calls, "points": total}
        images = {"path_images": sum(len(path.images) for path in tree.paths), "images": len(tree.images)}
        self._totals.update(sizes | counts | images)
        self._repeats += segments.repeated()
        scored = logprobs(tree, segments)
        samples = list(_samples(segments, rendered, self._has_text))
        if self._curves is not None and self._has_text:
            self._show(tree, rendered[0].path)
        self._trees.append(
            {
                "id": group.id if self._has_text else f"tree {len(self._trees) + 1}",
                **sizes,
                "parent": segments.parent.tolist(),
                "tokens": segments.tokens.tolist(),
                "paths": segments.paths.tolist(),
                "calls": segments.calls.tolist(),
                "trained": segments.trained.astype(int).tolist(),
                "kind": segments.kind.tolist(),
                "text": texts(tree, segments, decode, self._secrets) if self._has_text else None,
                "reason": [
                    self._reasons[of_segment[i]].number if i in of_segment else -1
                    for i in range(len(segments.first))
                ],
                **({} if scored is None else {"logprob": scored[0], "loss": scored[1]}),
                **({} if tree.image_row is None else {"image": self._images(tree, segments)}),
                "samples": samples,
                "advantages": answer_advantages(segments, samples),
                "partitions": {str(size): _partitions(tree, segments, size) for size in self._max_tokens},
            }
        )
        if hidden := list(self._estimates_hidden(rendered)):
            self._hidden += hidden
            self._sessions.update({"groups": 1, "calls": segments.num_calls})
        if self._ranks:
            from titan_tree.tree.costs import tree_sizes  # imports torch

            self._sizes.append(tree_sizes([tree])[0])

    def _tree_kinds(self, tree: TokenTree, rendered: Sequence[RenderedPath]) -> np.ndarray:
        """Returns [N] the kind of each token of a tree: that on the first path through it."""
        kinds = np.zeros(len(tree), np.int8)
        chosen = dict(zip(reversed(tree.path_node.tolist()), reversed(range(len(rendered))), strict=True))
        for leaf in reversed(tree.leaves.tolist()):
            kinds[tree.indices_of(chosen[leaf])] = self._kinds.kinds(rendered[chosen[leaf]])
        if tree.image_row is not None:
            kinds[tree.image_row >= 0] = IMAGE
        return kinds

    def _images(self, tree: TokenTree, segments: Segments) -> list[int]:
        """Returns the number of the image of each segment among ``Pictures.images``; -1: text."""
        assert tree.image_row is not None
        numbers = [self._pictures.number(image) for image in tree.images]
        of_row = np.append(np.repeat(numbers, list(map(len, tree.images))), -1)
        return of_row[tree.image_row[segments.first]].tolist()

    def _estimates_hidden(self, rendered: Sequence[RenderedPath]) -> Iterator[float]:
        """Yields an estimate of the tokens that the file leaves out of each first prompt."""
        first = {trajectory.place: (path, trajectory) for path, _, trajectory in reversed(rendered)}
        for path, trajectory in first.values():
            counted = trajectory.record.get("prompt_tokens")
            answers = runs(path.loss_mask)
            is_size = type(counted) is int and counted < MOST_PROMPT
            if is_size and answers and _trains_first(trajectory.record):
                yield max(counted - answers[0][0] / self._per_token, 0.0)

    @property
    def _skipped(self) -> Counter[str]:
        """What was left out. Its kinds may be texts of the files."""
        skipped = self._sources.skipped
        return skipped if self._has_text or not skipped else Counter(part=skipped.total())

    @property
    def _per_token(self) -> int:
        """What is counted per token of a model."""
        return BYTES_PER_TOKEN if self._renderer.has_bytes else 1

    def _show(self, tree: TokenTree, path: TokenPath) -> None:
        """Adds the first sample of a group to the samples of a run: its text, cut where the mask changes."""
        if len(self._shown) >= SHOWN_SAMPLES:
            return
        text_at, index = text_with_images(tree, self._renderer.decode), tree.indices_of(0)
        is_trained = path.loss_mask > 0
        cuts = [0, *(np.flatnonzero(np.diff(is_trained)) + 1).tolist(), len(path)]
        excerpts = []
        for start, end in islice(pairwise(cuts), MOST_EXCERPTS):
            before = text_at(index[max(start - CONTEXT, 0) : start])
            text = text_at(index[start : min(end, start + EXCERPT)])
            excerpts.append((self._secrets.text(text, before), int(is_trained[start])))
        self._shown.append({"title": path.id, "excerpts": excerpts})

    def _notes(self) -> list[str]:
        """Returns what limits the numbers, and what the page holds of images."""
        notes = self._pictures.notes()
        if advice := self._ungrouped.advice():
            notes.append(f"{advice[0].upper()}{advice[1:]}.")
        if self._renderer.has_bytes:
            notes.append("Tokens are bytes here; --tokenizer FOLDER counts those of your model.")
        if self._hidden:
            size = float(np.median(self._hidden))
            every = self._totals["n_calls"] / self._per_token + size * self._sessions["calls"]
            once = self._totals["n_tree"] / self._per_token + size * self._sessions["groups"]
            notes.append(
                "Session files leave out system prompts, tool schemas, or both, and so do the numbers above. "
                f"By the API's usage, that is about {size:,.0f} tokens per call. With it, trees would "
                f"compute about {ratio(every, once)} less than every call. Both are estimates."
            )
        if skipped := self._skipped:
            counts = ", ".join(f"{number:,} x {kind}" for kind, number in skipped.most_common())
            notes.append(f"Left out: {counts}.")
        for warning, number in self._sources.warnings.most_common():
            notes.append(f"In {count(number, 'file')}: {warning}.")
        if problems := self._sources.problems:
            example = f", such as {problems[0]}" if self._has_text else ""  # an error may quote a text
            notes.append(f"{count(len(problems), 'part')} could not be read{example}.")
        return notes

    def _shorten_texts(self) -> None:
        """Cuts the texts of segments, so that all together fit the page."""
        shown = [text for tree in self._trees for text in tree["text"] or ()]
        if sum(map(len, shown)) > PAGE_TEXT:
            limit = max(PAGE_TEXT // len(shown), LEAST_TEXT)
            for tree in self._trees:
                tree["text"] = [text[:limit] for text in tree["text"]]

    def _assign_ranks(self) -> None:
        """Sets the rank of each tree, for each number of ranks."""
        if not self._ranks:
            return
        from titan_tree.run.balance.assignment import assign_freely  # these import torch
        from titan_tree.tree.costs import QWEN3_1_7B

        sizes = np.stack(self._sizes)
        for number in self._ranks:
            assigned = assign_freely(sizes, QWEN3_1_7B.tree_costs(), number, int(sizes[:, 0].max()))
            for rank, micro_batches in enumerate(assigned):
                for tree in (tree for trees in micro_batches for tree in trees):
                    self._trees[tree].setdefault("rank", {})[str(number)] = rank


def _trains_first(record: Record) -> bool:
    """Returns whether the first answer of a conversation is trained; it is the one of "prompt_tokens"."""
    answers = [message for message in record.get("messages") or () if message.get("role") == "assistant"]
    return bool(answers) and answers[0].get("weight") != 0


def _samples(
    segments: Segments, rendered: Sequence[RenderedPath], has_text: bool
) -> Iterator[dict[str, Any]]:
    """Yields what is known of each path. Paths of one rollout have the same number."""
    rollouts: dict[object, int] = {}
    for number, (path, _, trajectory) in enumerate(rendered):
        record = trajectory.record
        name, reward = record.get("rollout_id"), record.get("reward")
        owner = trajectory.place if name is None else ("rollout_id", str(name))
        advantage = None
        if path.advantage is not None:
            advantage = [
                round(float(path.advantage[start:end].mean()), 6) for start, end in runs(path.loss_mask)
            ]
        yield {
            "id": path.id if has_text else f"sample {number + 1}",
            "segment": int(segments.last[number]),
            "turns": segments.turns[number],
            "rollout": rollouts.setdefault(owner, len(rollouts)),
            "reward": reward if type(reward) in (int, float) else None,
            "advantage": advantage,
            "weight": float(path.weight),
        }


def _partitions(tree: TokenTree, segments: Segments, max_tokens: int) -> list[list[int]]:
    """Returns [segment, first token, end token, partition] per run; tokens count from the segment on."""
    from titan_tree.components.tree_partitioner.partitioner import TreePartitioner  # imports torch

    plan = TreePartitioner("redundancy_free", max_tokens).plan(tree)
    owner = np.zeros(len(tree), np.int64)
    for number, partition in enumerate(plan.partitions):
        owner[partition.own_tokens] = number
    starts = np.diff(owner, prepend=-1) != 0
    starts[segments.first] = True
    first = np.flatnonzero(starts)
    segment = np.searchsorted(segments.first, first, side="right") - 1
    end = np.append(first[1:], len(tree))
    offset = segments.first[segment]
    return np.stack([segment, first - offset, end - offset, owner[first]], axis=1).tolist()
