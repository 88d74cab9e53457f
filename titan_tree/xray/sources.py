"""Files and folders that hold rollouts or sessions -> groups of records. Broken parts are counted."""

from __future__ import annotations

import logging
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from titan_tree.data.data_files import Group, group_records
from titan_tree.data.readers import (
    AUTO,
    DEFAULT_FORMAT,
    OpenFile,
    Source,
    find_files,
    open_binary,
    read_records,
    recognized_formats,
    row_reader,
)
from titan_tree.data.readers.containers import event_files
from titan_tree.data.schema import TRAJECTORY_KINDS
from titan_tree.errors import UserError, printable

ENDINGS = (".jsonl", ".json", ".ndjson", ".traj", ".parquet")
PACKED = (".gz", ".zst")
OWN_FIELDS = ("trajectories", *TRAJECTORY_KINDS)  # that a record of titan_tree's schema may have
DATA_SET = ("state.json", "dataset_dict.json")  # of a folder that datasets.save_to_disk wrote


class Sources:
    """The groups of files, and of the files in folders that a reader knows.

    Args:
        paths: files, glob patterns, folders, or "demo". ``~`` is the user's folder.
        format: the name of a reader, or "auto".

    Attributes:
        skipped: what was left out, counted by kind.
        problems: an error per row, file, or rest of a file, that could not be read.
        warnings: what readers warn of, and in how many files.

    Raises:
        UserError: a path does not exist.
    """

    def __init__(self, paths: Sequence[str], format: str = AUTO) -> None:
        self.skipped: Counter[str] = Counter()
        self.problems: list[str] = []
        self.warnings: Counter[str] = Counter()
        self._format = format
        self._files: list[tuple[str, bool]] = []  # file, and whether it was found in a folder
        seen = set[str]()
        for path in find_files([os.path.expanduser(path) for path in paths]):
            is_searched = os.path.isdir(path) and not _is_source(path)
            for file in _search(path) if is_searched else [path]:
                if (real := os.path.realpath(file)) not in seen:
                    seen.add(real)
                    self._files.append((file, is_searched))

    @property
    def files(self) -> list[str]:
        return [file for file, _ in self._files]

    @contextmanager
    def collected_warnings(self) -> Iterator[None]:
        """Counts the warnings of readers within a ``with`` statement, instead of logging one per file."""
        logger, handler = logging.getLogger(row_reader.__name__), _Counting(self.warnings)
        logger.addHandler(handler)
        logger.propagate = False
        try:
            yield
        finally:
            logger.removeHandler(handler)
            logger.propagate = True

    def groups(self, open_file: OpenFile = open_binary) -> Iterator[Group]:
        """Yields the groups file after file. Errors are added to ``problems``; some end their file."""
        for file, is_searched in self._files:
            try:
                format = self._format
                if is_searched and format == AUTO and (format := _known_format(file)) == "":
                    self.skipped["file that no reader knows"] += 1
                    continue
                records = read_records(file, format, open_file, self.skipped, True, self._leave_out)
                yield from group_records(records, {})
            except (UserError, OSError) as error:
                self._leave_out(error)

    def _leave_out(self, error: UserError | OSError) -> None:
        self.problems.append(printable(str(error)))


class _Counting(logging.Handler):
    """Counts the warnings of ``row_reader.warn_once`` by their message."""

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def emit(self, record: logging.LogRecord) -> None:
        if isinstance(record.args, tuple):
            self._counts[str(record.args[-1])] += 1


def _is_source(folder: str) -> bool:
    """Returns whether a folder is one source: events of OpenHands, or a data set."""
    return any((Path(folder) / name).is_file() for name in DATA_SET) or bool(event_files(folder))


def _search(folder: str) -> Iterator[str]:
    """Yields the files below a folder that may hold data, sorted, and folders that are sources."""
    for here, folders, names in os.walk(folder):
        if here != folder and _is_source(here):
            folders.clear()
            yield here
            continue
        folders.sort()
        for name in sorted(names):
            plain = next((name.removesuffix(end) for end in PACKED if name.endswith(end)), name)
            if plain.endswith(ENDINGS):
                yield os.path.join(here, name)


def _known_format(file: str) -> str:
    """Returns the name of the reader that recognizes a file; "" if none does."""
    source = Source(file)
    is_own = any(field in row for row in source.first_rows[:1] for field in OWN_FIELDS)
    return next(recognized_formats(source), DEFAULT_FORMAT if is_own else "")
