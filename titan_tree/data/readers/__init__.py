"""Readers turn data files into records, one file of this folder per data format.

A record is a dict in titan_tree's own schema (data/schema.py): a task with trajectories, a conversation, or
token ids. A JSON Lines file holds one record per line. To support another format, write a subclass of
``Reader`` in a new file here and add one line to ``READERS`` in titan_tree/registry.py.
"""

from __future__ import annotations

import glob
import gzip
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, BinaryIO, cast

from titan_tree.data import demo
from titan_tree.errors import UserError
from titan_tree.registry import READERS

Record = dict[str, Any]
Place = str  # where a record comes from, for error messages: "file:line"
OpenFile = Callable[[str], BinaryIO]

AUTO = "auto"  # data.format that recognizes each file by its content
DEMO = "demo"  # the name of the embedded sample, accepted in place of a file


class Reader(ABC):
    """Reads one data format. Entries of the registry ``READERS`` are subclasses of this class."""

    @abstractmethod
    def recognizes(self, file: BinaryIO) -> bool:
        """Returns whether the content is of this format. It is used with ``data.format = "auto"``.

        Args:
            file: the decompressed content, from its first byte on.
        """

    @abstractmethod
    def records(self, file: BinaryIO, name: str) -> Iterator[tuple[Place, Record]]:
        """Yields the file's records in titan_tree's schema, each with its place in the file.

        Args:
            file: the decompressed content, from its first byte on.
            name: the file's name; places begin with it.

        Raises:
            UserError: malformed content. The message starts with the place and says what was expected.
        """


def find_files(files: Sequence[str]) -> list[str]:
    """Returns the files that paths and glob patterns name, in the given order, each glob sorted.

    Raises:
        UserError: no names, or a name without a file.
    """
    if not files:
        raise UserError("data.files: expected at least one path or glob pattern, got none")
    found = []
    for name in files:
        matches = [name] if name == DEMO or Path(name).is_file() else sorted(glob.glob(name, recursive=True))
        if not matches:
            raise UserError(f"{name}: no such file")
        found += matches
    return found


def open_binary(file: str) -> BinaryIO:
    """Opens a file for reading. This is the default of every ``open_file`` argument."""
    return open(file, "rb")


def read_records(
    file: str, format: str = AUTO, open_file: OpenFile = open_binary
) -> Iterator[tuple[Place, Record]]:
    """Yields the records of a data file, plain or gzip, each with its place.

    Args:
        file: a path, or "demo" for the embedded sample.
        format: the name of a reader, or "auto".
        open_file: opens the file for reading; a progress bar wraps the file here.

    Raises:
        UserError: an unknown format, an unreadable or damaged file, malformed content, or no record at all.
    """
    if file == DEMO:
        yield from ((f"{DEMO}:{number}", record) for number, record in enumerate(demo.records(), start=1))
        return
    place = None
    try:
        name = _recognized_format(file) if format == AUTO else format
        reader: Reader = READERS[name]()
        with open_file(file) as raw:
            for place, record in reader.records(_decompressed(raw, file), file):
                yield place, record
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        where = (
            f"{file}: damaged gzip file" if place is None else f"{place}: damaged gzip file after this record"
        )
        raise UserError(f"{where} ({error}); copy the file again") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from None
    if place is None:
        raise UserError(f"{file}: expected at least one record in the format {name}, got an empty file")


def _recognized_format(file: str) -> str:
    """Returns the name of the first reader that recognizes the file.

    The newest entry is asked first, because it may be a special case of an older one. JSON Lines is asked
    last and accepts every file, so that its error messages say what is wrong.
    """
    for name in reversed(list(READERS)):
        with open_binary(file) as raw:
            if READERS[name]().recognizes(_decompressed(raw, file)):
                return name
    raise UserError(f"{file}: no reader recognizes this file; set data.format to one of {', '.join(READERS)}")


def _decompressed(raw: BinaryIO, file: str) -> BinaryIO:
    with open_binary(file) as content:
        is_gzip = content.read(2) == b"\x1f\x8b"
    return cast(BinaryIO, gzip.GzipFile(fileobj=raw)) if is_gzip else raw
