"""TreeDataset: a stream that yields, per optimizer step, this rank's micro-batches of token trees.

    groups -> shuffle -> global batch -> paths -> trees -> distribute over ranks -> pack into micro-batches

The stream of groups is the same on every rank, and the position in it is the dataset's only state. To
resume, a run reads the files again up to that position without tokenizing.
"""

from __future__ import annotations

import logging
import math
import random
import zlib
from collections.abc import Iterator, Mapping, Sequence
from itertools import count, islice
from typing import TYPE_CHECKING, Any

from titan_tree.data.data_files import DataSizes, Group
from titan_tree.data.packing import BASELINES, MicroBatches, balanced, merged_trees, pack, shuffled
from titan_tree.data.sample_reader import SampleReader
from titan_tree.errors import UserError, printable
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.routed_experts import has_experts
from titan_tree.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from titan_tree.data.settings import DataConfig

logger = logging.getLogger(__name__)

ONCE = {"warning": "replay"}  # StepLoader shows it once, though each worker names another path
ORDER_SETTINGS = ("seed", "shuffle_buffer", "weights")  # they decide the order of groups


class TreeDataset:
    """Yields this rank's micro-batches of each optimizer step: lists of at most ``max_tokens`` tokens.

    The global batch of a step is the next ``config.global_batch_groups`` groups of a stream of epochs, each
    shuffled anew. The last groups of an epoch fill a global batch together with the first groups of the next
    epoch, so none is dropped. Only the last global batch may be smaller, if ``epochs`` ends the stream. A
    rank that gets no trees yields an empty list.

    ``config.merge`` decides which paths share a tree:

    - "group": one tree per group.
    - "batch": trees share prefixes across the groups of a global batch, such as a common system prompt.

    Ranks do not communicate: group j of a global batch goes to rank j % world_size, or every rank builds all
    trees of a merged batch, which are balanced by tokens. ``BalancedSharing`` (run/balance/sharing.py) takes
    the groups of each step instead, and balances their trees by cost.

    Args:
        config: the table [data] of the configuration.
        reader: makes the groups and their paths.
        allow_larger: accept trees of more than ``config.max_tokens`` tokens, each as a micro-batch of its own
            that a TreePartitioner cuts. Otherwise such a tree is an error.
        epochs: number of epochs; None: endless.
        rank: this process.
        world_size: number of processes that split the data.
        is_compared: compute ``checksum``, because other processes read the same groups.
        weighs_edges: set the edge weights of paths (``TokenTree.weigh_edges``). They are those of the tree of
            the group, or of all paths of a merged batch, also in other layouts.

    Attributes:
        checksum: the checksum of the position and the groups of the last step that was yielded. It must be
            equal in all processes. 0 unless ``is_compared``.

    Raises:
        UserError: malformed data, naming file, line and field; or a tree that is too large.
    """

    def __init__(
        self,
        config: DataConfig,
        reader: SampleReader,
        *,
        allow_larger: bool = False,
        epochs: int | None = None,
        rank: int = 0,
        world_size: int = 1,
        is_compared: bool = False,
        weighs_edges: bool = False,
    ) -> None:
        assert 0 <= rank < world_size, (rank, world_size)
        self.config = config
        self.reader = reader
        self.allow_larger = allow_larger
        self.epochs = epochs
        self.rank, self.world_size = rank, world_size
        self.is_compared, self.checksum = is_compared, 0
        self.weighs_edges = weighs_edges
        self.epoch, self.group = 0, 0  # position: groups of this epoch already yielded
        self._warned_about_routed_experts = False

    def __iter__(self) -> Iterator[MicroBatches]:
        """Yields the steps from the current position on. ``state_dict`` moves with each item."""
        return self.steps()

    def steps(self, number: int | None = None, first: int = 0, stride: int = 1) -> Iterator[MicroBatches]:
        """Yields this rank's micro-batches of the steps of ``batches``."""
        for _, groups in self.batches(number, first, stride):
            yield pack(self._trees(groups), self.config.max_tokens)

    def batches(
        self, number: int | None = None, first: int = 0, stride: int = 1
    ) -> Iterator[tuple[int, list[Group]]]:
        """Yields (step, groups of its global batch) of the steps ``first``, ``first + stride``, ...

        It reads the groups of the steps in between without tokenizing them.

        Args:
            number: steps from the current position on, numbered from 0; None: all that are left.
        """
        stream = self._stream(self.epoch, self.group)
        for step in count() if number is None else range(number):
            if not (batch := list(islice(stream, self.config.global_batch_groups))):
                return
            self.epoch, self.group, _ = batch[-1]
            if step % stride == first:
                groups = [group for *_, group in batch]
                self.reader.files.check_untouched()
                if self.is_compared:
                    self.checksum = zlib.crc32(f"{self.epoch}/{self.group}".encode())
                    for group in groups:
                        self.checksum = group.checksum(self.checksum)
                yield step, groups

    def first_group(self) -> Group:
        return next(self._stream(self.epoch, self.group))[2]

    def steps_left(self, sizes: DataSizes) -> int | None:
        """Returns the steps from the position to the end of all ``epochs``; None if there is no end.

        Args:
            sizes: of the files.

        Raises:
            UserError: the weights leave an epoch without groups, or its groups end before the position.
        """
        last = self.epoch + 1 if self.epochs is None else self.epochs
        groups = [self.reader.files.num_groups(epoch, sizes) for epoch in range(self.epoch, last)]
        for epoch, size in enumerate(groups, start=self.epoch):
            self._check_epoch(epoch, size, self.group if epoch == self.epoch else 0)
        left = sum(groups) - self.group if groups else 0
        return None if self.epochs is None else math.ceil(left / self.config.global_batch_groups)

    def _check_epoch(self, epoch: int, groups: int, skip: int) -> None:
        """Raises UserError unless an epoch of this many groups has a first one, and one number ``skip``."""
        if not groups:
            raise UserError(
                f"data.weights: epoch {epoch + 1} contains no group of data.files; raise the weights"
            )
        if groups < skip:
            raise UserError(
                f"{', '.join(self.reader.files.paths)}: {groups} groups, but the checkpoint was "
                f"written after {skip} groups; resume with the data that it was written with"
            )

    def position(self) -> dict[str, int]:
        """Returns the position after the last item: the epoch's index, and groups of it already yielded."""
        return {"epoch": self.epoch, "group": self.group}

    def state_dict(self) -> dict[str, object]:
        """Returns the position, the settings that decide the order of groups, and checksums of what is read.

        It is the same on every rank and valid for any number of ranks.
        """
        order = {name: getattr(self.config, name) for name in ORDER_SETTINGS}
        return (
            self.position() | order | {"files": self.reader.files.checksums, "tokenizer": self._fingerprint()}
        )

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Moves to the position in ``state``. Raises UserError if the data or their order have changed."""
        for name in ORDER_SETTINGS:
            if state.get(name) != (value := getattr(self.config, name)):
                raise UserError(
                    f"data.{name}: the checkpoint was written with {state.get(name)}, but it is now {value}, "
                    f"which changes the order of the data; set data.{name} = {state.get(name)} to resume"
                )
        if "files" in state:  # versions before 2026-11-23 did not store it
            self.reader.files.check_unchanged(state["files"])
        if (before := state.get("tokenizer")) and before != self._fingerprint():
            raise UserError(
                "data.tokenizer: the vocabulary or the chat template has changed since the checkpoint was "
                "written; restore it, start in a new folder, or set checkpoint.allow_changes = true"
            )
        self.epoch, self.group = state["epoch"], state["group"]

    def _fingerprint(self) -> str | None:
        """Returns a hash of the tokenizer and its template; None if the data are token ids."""
        return self.reader.tokenizer.fingerprint() if self.reader.tokenizer else None

    def _stream(self, epoch: int, skip: int) -> Iterator[tuple[int, int, Group]]:
        """Yields (epoch, position after this group, group), after the first ``skip`` groups of ``epoch``."""
        while self.epochs is None or epoch < self.epochs:
            position = 0
            order = random.Random(f"{self.config.seed}/{epoch}")
            groups = shuffled(self.reader.files.groups(epoch=epoch), self.config.shuffle_buffer, order)
            for position, group in enumerate(groups, start=1):
                if position > skip:
                    yield epoch, position, group
            self._check_epoch(epoch, position, skip)
            epoch, skip = epoch + 1, 0

    def _trees(self, batch: Sequence[Group]) -> list[TokenTree]:
        if self.config.merge == "group":
            return self.own_trees(batch)
        paths = [path for group in batch for path in self._paths(group)]
        self._check_path_sizes(paths)
        return balanced(self.merged(paths), self.world_size)[self.rank]

    def own_trees(self, batch: Sequence[Group]) -> list[TokenTree]:
        """Returns the trees of the groups of a global batch that this rank reads."""
        return [tree for group in batch[self.rank :: self.world_size] for tree in self._group_trees(group)]

    def own_paths(self, batch: Sequence[Group]) -> list[list[TokenPath]]:
        """Returns the paths of each group of a global batch that this rank reads, for other ranks, too."""
        by_group = [self._paths(group) for group in batch[self.rank :: self.world_size]]
        for paths in by_group:
            self._check_path_sizes(paths)
            if self.config.replay == "off":
                _drop_experts(paths)
        return by_group

    def merged(self, paths: Sequence[TokenPath]) -> list[TokenTree]:
        """Returns the trees of all paths of a global batch, which share prefixes across groups."""
        self._weigh_edges(paths)
        if self.config.layout in BASELINES:
            return BASELINES[self.config.layout](paths, self.config.replay)
        return merged_trees(paths, self.config.max_tokens, self.config.replay)

    def _group_trees(self, group: Group) -> list[TokenTree]:
        """Returns the tree of a group, or those of its leaves or paths."""
        if self.config.layout in BASELINES:
            paths = self._paths(group)
            self._check_path_sizes(paths)
            self._weigh_edges(paths)
            return BASELINES[self.config.layout](paths, self.config.replay)
        tree = self.reader.tree(group)
        self._warn_about_routed_experts(tree.paths)
        if self.weighs_edges:
            tree.weigh_edges()
        place, _ = group.records[0]
        self._check_size(f"{place}: the tree of group {group.id}, {len(tree.paths)} paths,", len(tree))
        return [tree]

    def _weigh_edges(self, paths: Sequence[TokenPath]) -> None:
        """Sets the edge weights of paths that are then divided among trees."""
        if self.weighs_edges and paths:
            TokenTree.from_paths(paths, self.config.replay).weigh_edges()

    def _paths(self, group: Group) -> list[TokenPath]:
        paths = self.reader.paths(group)
        self._warn_about_routed_experts(paths)
        return paths

    def _warn_about_routed_experts(self, paths: Sequence[TokenPath]) -> None:
        """Warns once about routed experts that are unused, or that are missing although they are needed."""
        if self._warned_about_routed_experts:
            return
        is_used = self.config.replay != "off"
        odd = next((path for path in paths if has_experts(path) != is_used), None)
        if odd is None:
            return
        self._warned_about_routed_experts = True
        if is_used:
            logger.warning(
                "path %s has no routed_experts to replay; the model's router chooses its experts",
                printable(odd.id),
                extra=ONCE,
            )
        else:
            logger.warning(
                "path %s has routed_experts, which data.replay = 'off' leaves unused",
                printable(odd.id),
                extra=ONCE,
            )

    def _check_path_sizes(self, paths: Sequence[TokenPath]) -> None:
        for path in paths:
            self._check_size(f"path {path.id}", len(path))

    def _check_size(self, what: str, tokens: int) -> None:
        limit = self.config.max_tokens
        if tokens > limit and not self.allow_larger:
            raise UserError(
                f"{what} has {tokens:,} tokens, more than data.max_tokens = {limit:,}; raise the limit, or "
                "cut larger trees with partition.strategy = 'auto'"
            )


def _drop_experts(paths: Sequence[TokenPath]) -> None:
    """Removes recorded experts that nobody reads, so that they do not travel to other ranks."""
    for path in paths:
        path.routed_experts = None
