"""DataFiles: the files of a configuration, with their groups, weights, sizes and checksums."""

from __future__ import annotations

import os
import random
import zlib
from collections.abc import Iterator, Sequence
from itertools import count, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from titan_tree.data.groups import Group, group_records, group_trajectories
from titan_tree.data.readers import DEMO, OpenFile, Place, find_files, open_binary, read_records
from titan_tree.data.token_store import STORED, TokenStore, is_store
from titan_tree.errors import UserError

if TYPE_CHECKING:
    from titan_tree.config import DataConfig


class DataSizes(NamedTuple):
    """Sizes of data files."""

    file_groups: tuple[int, ...]  # groups of each file
    samples: int

    @property
    def groups(self) -> int:
        return sum(self.file_groups)


class DataFiles:
    """Reads the groups of the configured files.

    Attributes:
        files: the paths that ``config.files`` names, globs expanded.
        weights: how often an epoch contains each group of a file, one number per file.

    Raises:
        UserError: a file does not exist or is named twice.
    """

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        by_name = [find_files([name]) for name in config.files]
        weights = config.weights or [1.0] * len(by_name)
        self.files = [file for files in by_name for file in files]
        self.weights = [weight for files, weight in zip(by_name, weights, strict=True) for _ in files]
        _refuse_repeated(self.files)
        # Set here because a thread may read ``checksums`` while another one pickles this object.
        self._checksums: list[list[int]] | None = None

    def groups(self, open_file: OpenFile = open_binary, epoch: int | None = None) -> Iterator[Group]:
        """Yields all groups in file order, without tokenizing them.

        Args:
            open_file: opens each file for reading; a progress bar wraps files here.
            epoch: yields each group as often as its file's weight says in this epoch. None yields every group
                once.

        Raises:
            UserError: unreadable or malformed files, or a group whose records are not adjacent.
        """
        first_places: dict[str, Place] = {}
        for number, file in enumerate(self.files):
            records = read_records(file, self.config.format, open_file)
            copies = repeat(1) if epoch is None else self._copies(number, epoch)
            for group, times in zip(group_records(records, first_places), copies):  # noqa: B905  # endless
                yield from repeat(group, times)

    def _copies(self, number: int, epoch: int) -> Iterator[int]:
        """Yields how often an epoch contains each group of file ``number``."""
        whole, fraction = divmod(self.weights[number], 1)
        draw = random.Random(f"{self.config.seed}/{epoch}/{number}")
        while True:
            yield int(whole) + (fraction > 0 and draw.random() < fraction)

    def num_groups(self, epoch: int, sizes: DataSizes) -> int:
        """Returns the number of groups that ``groups`` yields in an epoch."""
        counts = zip(count(), sizes.file_groups)  # endless
        return sum(sum(islice(self._copies(number, epoch), groups)) for number, groups in counts)

    def num_bytes(self) -> int:
        return sum(Path(file).stat().st_size for file in self.files if file != DEMO)

    def sizes(self) -> DataSizes:
        """Returns how many groups and samples all files have. Reads them once, without tokenizing."""
        first_places: dict[str, Place] = {}
        file_groups, samples = [], 0
        for file in self.files:
            records = read_records(file, self.config.format)
            group_sizes = list(map(self._num_samples, group_records(records, first_places)))
            file_groups.append(len(group_sizes))
            samples += sum(group_sizes)
        return DataSizes(tuple(file_groups), samples)

    def _num_samples(self, group: Group) -> int:
        total = 0
        for _, _, record in group_trajectories(group):
            turns = record.get("turns") or self.config.sample.get("turns", "each")
            messages = record.get("messages") if turns == "each" else None
            if STORED in record:
                total += record[STORED].num_paths
            elif isinstance(messages, list):
                total += sum(map(_is_trained, messages))
            else:
                total += 1
        return total

    @property
    def checksums(self) -> list[list[int]]:
        """[bytes, CRC-32] of each file. The first use reads all files, but of a token store only its end."""
        if self._checksums is None:
            try:
                self._checksums = [[0, 0] if file == DEMO else _checksum(Path(file)) for file in self.files]
            except OSError as error:
                raise UserError(f"{error.filename}: cannot be read: {error.strerror}") from None
        return self._checksums

    def check_unchanged(self, before: list[list[int]]) -> None:
        """Raises UserError if the files differ from those whose ``checksums`` a checkpoint holds."""
        now = self.checksums
        advice = "resume with the same data, start in a new folder, or set checkpoint.allow_changes = true"
        if len(now) != len(before):
            raise UserError(
                f"data.files: {len(now)} files, but the checkpoint was written with {len(before)}; {advice}"
            )
        for file, (size, crc), (size_before, crc_before) in zip(self.files, now, before, strict=True):
            if size != size_before:
                raise UserError(
                    f"{file}: {size:,} bytes, but {size_before:,} when the checkpoint was written; {advice}"
                )
            if crc != crc_before:
                raise UserError(
                    f"{file}: its content changed since the checkpoint was written (checksum {crc:08x}, was "
                    f"{crc_before:08x}); {advice}"
                )


def _refuse_repeated(files: Sequence[str]) -> None:
    """Raises UserError if two names lead to the same file, whose samples would count twice."""
    names: dict[str, str] = {}
    for file in files:
        real = file if file == DEMO else os.path.realpath(file)
        if real in names:
            raise UserError(
                f"{file}: data.files names this file twice, also as {names[real]}; remove one of them"
            )
        names[real] = file


def _checksum(path: Path) -> list[int]:
    """Returns [bytes, CRC-32] of a file, or of all files of a folder."""
    if path.is_dir():
        files = sorted(file for file in path.rglob("*") if file.is_file())
    elif is_store(path):
        return [path.stat().st_size, TokenStore(path).checksum]
    else:
        files = [path]
    size = crc = 0
    for file in files:
        with file.open("rb") as opened:
            while chunk := opened.read(1 << 20):
                size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return [size, crc]


def _is_trained(message: object) -> bool:
    return isinstance(message, dict) and message.get("role") == "assistant" and message.get("weight") != 0
