"""TreeDataset: files -> per optimizer step, this rank's micro-batches of token trees.

    read groups -> shuffle whole groups -> global batch -> merge into trees -> share out -> pack

Streaming, endless and resumable. The stream of groups is the same on every rank, and a position in it is
all the state there is: resuming reads the files up to there again, without tokenising.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from titan_tree.data.readers import Group, PathReader, SampleTokenizer, find_files, read_groups
from titan_tree.errors import UserError
from titan_tree.tree.paths import ExpertSizes, TokenPath
from titan_tree.tree.replay import Replay, has_records, split_keys
from titan_tree.tree.token_tree import TokenTree, common_prefix, lexicographic_order

logger = logging.getLogger(__name__)

MicroBatches = list[list[TokenTree]]


class TreeDataset:
    """Yields, per optimizer step, this rank's micro-batches: lists of trees of at most ``max_tokens`` in all.

    A step's global batch is the next ``global_batch_groups`` groups of an endless stream: epoch after
    epoch, each shuffled anew. Nothing is dropped at the end of an epoch: its last groups fill a global
    batch together with the first of the next, and a file of fewer groups simply comes round more often.
    A rank for which nothing is left gets an empty list.

    Args:
        files: a path, a glob pattern, or a list of those; "demo" is the embedded sample (data/demo.py).
        tokenizer: renders conversations; None will do for files of token ids.
        merge: "group" makes one tree of each group; group j of a global batch goes to rank j % world_size.
            "batch" finds shared prefixes across all groups of a global batch (common system prompts): every
            rank reads all of it, builds the same trees, and takes a share balanced by tokens.
        layout: "tree", or "flat": every path a tree of its own, the baseline that computes shared
            prefixes again and again.
        advantage: "given" by the data, or made of the rewards within each "group": see ``PathReader``.
        replay: of routed experts that samples record, see data/replay.py.
        global_batch_groups: groups per optimizer step, over all ranks.
        max_tokens: tokens of a micro-batch.
        allow_larger: a tree of more is a micro-batch of its own, which a TreePartitioner cuts; or an error.
        max_positions: the model's longest path; None: not checked.
        vocab_size: the model's; None: not checked.
        experts: the model's, which forced_experts ones must fit; None: not checked.
        shuffle_buffer: groups held to draw the next one from; 0 keeps the order of the files.
        seed: of the shuffle.
        sample_options: keyword arguments of ``tokenizer.samples``.

    Raises:
        UserError: bad input, naming file, line and field; a tree larger than ``max_tokens``, unless allowed.
    """

    def __init__(
        self,
        files: str | Path | Sequence[str | Path],
        tokenizer: SampleTokenizer | None = None,
        *,
        merge: Literal["group", "batch"] = "group",
        layout: Literal["tree", "flat"] = "tree",
        advantage: Literal["given", "group"] = "given",
        replay: Replay = "off",
        global_batch_groups: int = 8,
        max_tokens: int = 32_768,
        allow_larger: bool = False,
        max_positions: int | None = None,
        vocab_size: int | None = None,
        experts: ExpertSizes | None = None,
        shuffle_buffer: int = 256,
        seed: int = 0,
        rank: int = 0,
        world_size: int = 1,
        sample_options: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value, allowed in (
            ("merge", merge, ("group", "batch")),
            ("layout", layout, ("tree", "flat")),
            ("replay", replay, get_args(Replay)),
        ):
            if value not in allowed:
                raise UserError(f"data.{name}: expected one of {', '.join(allowed)}; got {value!r}")
        for name, number, least in (
            ("global_batch_groups", global_batch_groups, 1),
            ("max_tokens", max_tokens, 1),
            ("shuffle_buffer", shuffle_buffer, 0),
        ):
            if number < least:
                raise UserError(f"data.{name}: expected at least {least}, got {number}")
        assert 0 <= rank < world_size, (rank, world_size)
        self.files = find_files(files)
        experts = None if replay == "off" else experts
        self.reader = PathReader(
            tokenizer, sample_options or {}, vocab_size, max_positions, advantage, experts
        )
        self.merge, self.layout, self.replay = merge, layout, replay
        self.global_batch_groups = global_batch_groups
        self.max_tokens, self.allow_larger = max_tokens, allow_larger
        self.shuffle_buffer, self.seed = shuffle_buffer, seed
        self.rank, self.world_size = rank, world_size
        self._told = False  # of records that do not do what one may think
        self.epoch, self.group = 0, 0  # position: groups of this epoch already yielded

    def __iter__(self) -> Iterator[MicroBatches]:
        """Endless, from the current position on; ``state_dict`` speaks of the last item yielded."""
        stream = self._stream(self.epoch, self.group)
        while True:
            batch = list(islice(stream, self.global_batch_groups))
            micro_batches = pack(self._trees([group for *_, group in batch]), self.max_tokens)
            self.epoch, self.group, _ = batch[-1]
            yield micro_batches

    def state_dict(self) -> dict[str, int]:
        """The position after the last item yielded, and what the order of the groups depends on.

        The same on every rank, and valid for any number of ranks.
        """
        return {
            "epoch": self.epoch,
            "group": self.group,
            "seed": self.seed,
            "shuffle_buffer": self.shuffle_buffer,
        }

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Continue where ``state_dict`` was taken. Raises UserError where the order would be another."""
        for name in ("seed", "shuffle_buffer"):
            if state[name] != (now := getattr(self, name)):
                raise UserError(
                    f"data.{name}: the checkpoint was written with {state[name]}, now it is {now}; "
                    "set it back, or the data would come in another order"
                )
        self.epoch, self.group = state["epoch"], state["group"]

    def _stream(self, epoch: int, skip: int) -> Iterator[tuple[int, int, Group]]:
        """(epoch, groups of it up to and with this one, group), endless, ``skip`` groups into ``epoch``."""
        while True:
            count = 0
            order = random.Random(f"{self.seed}/{epoch}")
            for count, group in enumerate(
                shuffled(read_groups(self.files), self.shuffle_buffer, order), start=1
            ):
                if count > skip:
                    yield epoch, count, group
            if count < skip:
                raise UserError(
                    f"{', '.join(self.files)}: {count} groups, but the checkpoint was written after {skip} "
                    "of them; resume with the same data"
                )
            epoch, skip = epoch + 1, 0

    def _trees(self, batch: list[Group]) -> list[TokenTree]:
        """This rank's trees of a global batch."""
        if self.merge == "batch":
            paths = [path for group in batch for path in self.reader.paths(group)]
            self._tell_of_records(paths)
            self._check_paths(paths)
            if self.layout == "tree":
                trees = merged_trees(paths, self.max_tokens, self.replay)
            else:
                trees = flat_trees(paths, self.replay)
            return balanced(trees, self.world_size)[self.rank]
        trees = []
        for group in batch[self.rank :: self.world_size]:
            paths = self.reader.paths(group)
            self._tell_of_records(paths)
            if self.layout == "flat":
                self._check_paths(paths)
                trees += flat_trees(paths, self.replay)
            else:
                trees.append(TokenTree.from_paths(paths, self.replay))
                what = f"{group.lines[0][0]}: the tree of group {group.id}, {len(paths)} paths,"
                self._check_fits(what, len(trees[-1]))
        return trees

    def _tell_of_records(self, paths: Sequence[TokenPath]) -> None:
        """Once, of records that are not used, or missing where they were to be."""
        replays = self.replay != "off"
        odd = next((path for path in paths if has_records(path) != replays), None)
        if odd is None or self._told:
            return
        self._told = True
        if replays:
            logger.warning("path %s has no routed_experts to replay: there the model chooses", odd.id)
        else:
            logger.warning("path %s has routed_experts, which data.replay = 'off' leaves unused", odd.id)

    def _check_paths(self, paths: Sequence[TokenPath]) -> None:
        for path in paths:
            self._check_fits(f"path {path.id}", len(path))

    def _check_fits(self, what: str, tokens: int) -> None:
        if tokens > self.max_tokens and not self.allow_larger:
            raise UserError(
                f"{what} has {tokens:,} tokens, more than data.max_tokens = {self.max_tokens:,}; "
                "raise that, or cut it with partition.strategy = 'auto'"
            )


def shuffled(groups: Iterable[Group], buffer_size: int, order: random.Random) -> Iterator[Group]:
    """All groups, each drawn from the next ``buffer_size`` ones (0 or 1: in the order given)."""
    buffer: list[Group] = []
    for group in groups:
        if len(buffer) < max(buffer_size, 1):
            buffer.append(group)
        else:
            slot = order.randrange(len(buffer))
            yield buffer[slot]
            buffer[slot] = group
    order.shuffle(buffer)
    yield from buffer


def flat_trees(paths: Sequence[TokenPath], replay: Replay = "off") -> list[TokenTree]:
    """Every path a tree of its own."""
    return [TokenTree.from_paths([path], replay) for path in paths]


def merged_trees(paths: Sequence[TokenPath], max_tokens: int, replay: Replay = "off") -> list[TokenTree]:
    """Trees of at most ``max_tokens`` tokens that share what neighbours in lexicographic order share.

    In that order a path adds to the trie what it does not share with the path before it, so the sorted
    list is cut, greedily, into runs whose tries fit.
    """
    runs: list[list[int]] = []
    splits = replay == "split" and any(map(has_records, paths))
    keys = split_keys(paths) if splits else [path.tokens for path in paths]
    size, before = 0, np.empty(0, np.int32)
    for p in lexicographic_order(keys):
        new = len(keys[p]) - common_prefix(before, keys[p])
        if runs and size + new <= max_tokens:
            runs[-1].append(p)
            size += new
        else:
            runs.append([p])
            size = len(keys[p])
        before = keys[p]
    # In the order given, which says whose records are the first.
    return [TokenTree.from_paths([paths[p] for p in sorted(run)], replay) for run in runs]


def balanced(trees: Sequence[TokenTree], shares: int) -> list[list[TokenTree]]:
    """``shares`` lists of nearly equal tokens: largest tree first, each to the lightest list so far."""
    parts: list[list[TokenTree]] = [[] for _ in range(shares)]
    load = [0] * shares
    for tree in sorted(trees, key=len, reverse=True):
        lightest = load.index(min(load))
        parts[lightest].append(tree)
        load[lightest] += len(tree)
    return parts


def pack(trees: Sequence[TokenTree], max_tokens: int) -> MicroBatches:
    """Micro-batches of at most ``max_tokens`` tokens: first-fit decreasing. A larger tree is alone."""
    micro_batches: MicroBatches = []
    room: list[int] = []
    for tree in sorted(trees, key=len, reverse=True):
        fitting = next((i for i, free in enumerate(room) if free >= len(tree)), None)
        if fitting is None:
            fitting = len(room)
            micro_batches.append([])
            room.append(max_tokens)
        micro_batches[fitting].append(tree)
        room[fitting] -= len(tree)
    return micro_batches
