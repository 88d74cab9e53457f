"""DataFiles: the files of a configuration, with their groups, weights, sizes and checksums.

    files -> records (readers/) -> groups of records -> trajectories

data/schema.py describes the fields of records. Grouping parses no messages and tokenizes nothing, so a
resumed run skips groups at low cost.
"""

from __future__ import annotations

import marshal
import os
import random
import time
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, groupby, islice, repeat
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from titan_tree.data.readers import DEMO, OpenFile, Record, find_files, open_binary, read_records
from titan_tree.data.readers.row_reader import file_of, warn_once
from titan_tree.data.schema import (
    ALL_IGNORED,
    CONVERSATION_FIELDS,
    INHERITED_FIELDS,
    TOKEN_FIELDS,
    TRAJECTORY_KINDS,
    UnknownFields,
    check_record,
    is_text,
    present_fields,
    record_name,
)
from titan_tree.data.token_store import STORED, TokenStore, is_store
from titan_tree.errors import UserError, errors_at, shorten

if TYPE_CHECKING:
    from titan_tree.data.settings import DataConfig


FileState = tuple[int, int, int]  # size in bytes, time of the last change in nanoseconds, inode
REPEATED_ID = (
    "the id {!r} appeared before, perhaps with others; each such record is a task of its own: give them one "
    "group_id, or remove what was written twice"
)
MARSHAL = 2  # a version that depends only on values, not on which objects are shared


@dataclass(frozen=True, slots=True)
class Group:
    """The records of one group, parsed but not tokenized."""

    id: str
    records: list[tuple[str, Record]]

    def checksum(self, start: int = 0) -> int:
        """Returns the CRC-32 of the records, continued from ``start``. Equal files give equal checksums."""
        records = [
            record | {STORED: record[STORED].checksum} if STORED in record else record
            for _, record in self.records
        ]
        try:
            content = marshal.dumps(records, MARSHAL)
        except ValueError:  # a type that JSON does not have
            content = repr(records).encode(errors="backslashreplace")
        return zlib.crc32(content, start)


class Trajectory(NamedTuple):
    """One conversation or one list of token ids of a group: a record, or an entry of a task's trajectories.

    It becomes a training sample for each of its trained turns, or one for a list of token ids.
    """

    place: str  # for error messages
    name: str  # the group's id; trajectories and records with a group_id append their own
    record: Record


class DataSizes(NamedTuple):
    """Sizes of data files."""

    file_groups: tuple[int, ...]  # groups of each file
    samples: int

    @property
    def groups(self) -> int:
        return sum(self.file_groups)


class DataFiles:
    """Reads the groups of the configured files.

    The files must stay as they are while this object, or a pickled copy of it, exists.

    Attributes:
        paths: the files that ``config.files`` names, globs expanded.
        weights: how often an epoch contains each group of a file, one number per file.
        skipped: what sessions of coding agents hold beside their messages, counted by kind while ``groups``
            reads them.

    Raises:
        UserError: a file does not exist or is named twice.
    """

    def __init__(self, config: DataConfig) -> None:
        self.config = config
        by_name = [find_files([name]) for name in config.files]
        weights = config.weights or [1.0] * len(by_name)
        self.paths = [file for files in by_name for file in files]
        self.weights = [weight for files, weight in zip(by_name, weights, strict=True) for _ in files]
        _refuse_repeated(self.paths)
        self._states = {file: _states(file) for file in self.paths}
        # Set here because a thread may read ``checksums`` while another one pickles this object.
        self._checksums: list[list[int]] | None = None
        self.skipped: Counter[str] = Counter()

    def groups(self, open_file: OpenFile = open_binary, epoch: int | None = None) -> Iterator[Group]:
        """Yields all groups in file order, without tokenizing them.

        Args:
            open_file: opens each file for reading; a progress bar wraps files here.
            epoch: yields each group as often as its file's weight says in this epoch. None yields every group
                once.

        Raises:
            UserError: unreadable or malformed files, or a group whose records are not adjacent.
        """
        first_places: dict[str, str] = {}
        for number, file in enumerate(self.paths):
            records = read_records(file, self.config.format, open_file, self.skipped)
            copies = repeat(1) if epoch is None else self._copies(number, epoch)
            for group, times in zip(group_records(records, first_places), copies):  # noqa: B905  # endless
                yield from repeat(group, times)
            self.check_untouched([file])

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

    def check_untouched(self, files: Sequence[str] | None = None) -> None:
        """Raises UserError if one of ``files``, by default of all, is not as it was at the beginning."""
        for file in self.paths if files is None else files:
            for path, before in self._states[file].items():
                if (now := _state(path)) != before:
                    raise UserError(
                        f"{path}: it has changed since this command began to read it (was "
                        f"{_describe(before)}, is {_describe(now)}); restore it, and write new data under "
                        "another name"
                    )

    def num_bytes(self) -> int:
        return sum(Path(file).stat().st_size for file in self.paths if file != DEMO)

    def sizes(self) -> DataSizes:
        """Returns how many groups and samples all files have. Reads them once, without tokenizing."""
        first_places: dict[str, str] = {}
        file_groups, samples = [], 0
        for file in self.paths:
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
                self._checksums = [[0, 0] if file == DEMO else _checksum(Path(file)) for file in self.paths]
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
        for file, (size, crc), (size_before, crc_before) in zip(self.paths, now, before, strict=True):
            if size != size_before:
                raise UserError(
                    f"{file}: {size:,} bytes, but {size_before:,} when the checkpoint was written; {advice}"
                )
            if crc != crc_before:
                raise UserError(
                    f"{file}: its content changed since the checkpoint was written (checksum {crc:08x}, was "
                    f"{crc_before:08x}); {advice}"
                )


def _states(file: str) -> dict[str, FileState | None]:
    """Returns what the file system says of a file, or of all files of a folder."""
    if file == DEMO:
        return {}
    if not os.path.isdir(file):
        return {file: _state(file)}
    paths = (os.path.join(folder, name) for folder, _, names in os.walk(file) for name in names)
    return {path: _state(path) for path in paths}


def _state(path: str) -> FileState | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_size, status.st_mtime_ns, status.st_ino


def _describe(state: FileState | None) -> str:
    if state is None:
        return "missing"
    size, changed_ns, inode = state
    changed = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(changed_ns / 1e9))
    return f"{size:,} bytes of {changed}, inode {inode}"


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


def group_records(records: Iterable[tuple[str, Record]], first_places: dict[str, str]) -> Iterator[Group]:
    """Joins adjacent records of a file that have the same group_id.

    Args:
        records: the records of one file; a group does not continue in the next file.
        first_places: the places where the groups of earlier files began, by group_id. The function adds
            those of this file.

    Raises:
        UserError: the records of a group are not adjacent. Two trees would compute their shared tokens twice.
    """
    ids: set[str] | None = set()  # of records without a group_id; None after the warning about one
    for (is_named, name), run in groupby(records, key=lambda placed: _group_key(*placed)):
        members = list(run)
        place, record = members[0]
        if not is_named:
            name = _id(place, record, default=place)
            if ids is not None and name in ids:
                warn_once(file_of(place), REPEATED_ID.format(name), place)
                ids = None
            elif ids is not None and name != place:
                ids.add(name)
            yield Group(name, members)
            continue
        if name in first_places:
            raise UserError(
                f"{place}: group {name!r} appeared before, at {first_places[name]}; expected the records "
                "of a group next to each other in one file: sort them by group_id"
            )
        first_places[name] = place
        yield Group(name, members)


def group_trajectories(group: Group, fields: UnknownFields = ALL_IGNORED) -> Iterator[Trajectory]:
    """Yields the trajectories of a group in file order.

    Args:
        fields: finds the unknown fields of tasks. By default, none is refused.

    Raises:
        UserError: malformed trajectories.
    """
    for place, record in group.records:
        if record.get("trajectories") is not None:
            yield from _trajectories(group.id, place, record, fields)
            continue
        is_named, _ = _group_key(place, record)
        line = place.rpartition(":")[2]
        yield _trajectory(place, f"{group.id}/{_id(place, record, line)}" if is_named else group.id, record)


def holds_conversations(group: Group) -> bool:
    """Returns whether some trajectory of the group has messages or text, which only a tokenizer can read."""
    for _, record in group.records:
        trajectories = record.get("trajectories")
        records_of_task = trajectories if isinstance(trajectories, list) else [record]
        own = [r for r in records_of_task if isinstance(r, dict)]
        if any(r.get("messages") is not None or is_text(r) for r in own):
            return True
    return False


def _group_key(place: str, record: Record) -> tuple[bool, str]:
    """Returns (whether the record names its group, the name). Without a name, the place is the name."""
    with errors_at(place):
        name = record_name(record, "group_id")
    return (False, place) if name is None else (True, name)


def _id(place: str, record: Record, default: str) -> str:
    with errors_at(place):
        name = record_name(record, "id")
    return default if name is None else name


def _trajectories(
    group_id: str, place: str, record: Record, fields_of_task: UnknownFields
) -> Iterator[Trajectory]:
    trajectories = record["trajectories"]
    if not isinstance(trajectories, list) or not trajectories:
        raise UserError(f"{place}: trajectories: expected a non-empty list, got {shorten(trajectories)}")
    for name in present_fields(record, (*TRAJECTORY_KINDS, *TOKEN_FIELDS)):
        raise UserError(
            f"{place}: {name}: not allowed together with trajectories; move it into one of the trajectories"
        )
    with errors_at(place):
        check_record(record, "a task", fields_of_task)
    inherited = present_fields(record, INHERITED_FIELDS)
    for index, trajectory in enumerate(trajectories):
        trajectory_place = f"{place}: trajectories[{index}]"
        if not isinstance(trajectory, dict):
            raise UserError(f"{trajectory_place}: expected a JSON object, got {type(trajectory).__name__}")
        fields = present_fields(trajectory, trajectory)
        if "group_id" in fields:
            raise UserError(
                f"{trajectory_place}: group_id: not read here; a task is one group, so set it on the task"
            )
        others = () if "messages" in fields else CONVERSATION_FIELDS
        passed_on = {name: value for name, value in inherited.items() if name not in others}
        name = f"{group_id}/{_id(trajectory_place, trajectory, str(index))}"
        yield _trajectory(trajectory_place, name, passed_on | fields)


def _trajectory(place: str, name: str, record: Record) -> Trajectory:
    """Returns a trajectory. Warns once per file of a reward that is no number."""
    reward = record.get("reward")
    if reward is not None and (isinstance(reward, bool) or not isinstance(reward, int | float)):
        warn_once(file_of(place), "reward: expected a number; data.advantage refuses any other", place)
    return Trajectory(place, name, record)
