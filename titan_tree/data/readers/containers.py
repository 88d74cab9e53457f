"""Source: a data file and its rows, whatever their container, which the content shows.

A container is JSON Lines, a JSON array of objects, one JSON object over several lines, a Parquet file, a
folder of Arrow files that ``datasets.Dataset.save_to_disk`` wrote, or a folder of numbered events. A list of
messages in place of an object, as an array or a line, is one row: {"messages": [...]}. So is a list of
episodes of agentcore-rl-toolkit: {"episodes": [...]}.
"""

from __future__ import annotations

import codecs
import json
import os
import re
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from io import BufferedIOBase
from itertools import count, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, cast

from titan_tree.config.files import regular
from titan_tree.data.readers.decompress import DAMAGE, compression, decompressed
from titan_tree.data.readers.strict_json import content_hint, parse_json
from titan_tree.errors import UserError, shorten

if TYPE_CHECKING:
    from pyarrow import DataType, RecordBatch

Record = dict[str, Any]
OpenFile = Callable[[str], BinaryIO]

HEAD_BYTES = 256 * 1024  # what readers see of a file when they recognize it
FIRST_ROWS = 8  # rows that a reader sees when it recognizes a file
BATCH_ROWS = 64  # rows of Parquet and Arrow files that are converted to Python objects at once
MAX_LINE_BYTES = 1 << 28  # a longer line would be a damaged file, or one that is meant to fill the memory
JSON_TYPE = "extension<arrow.json>"
ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream; pyarrow also stops without it
EVENT_FILE = re.compile(r"(?:event-)?(\d{1,9})(?:-[^/]*)?\.json", re.ASCII)
MAX_DEPTH = 200  # brackets that may be open where the beginning of a document ends
STRINGS_AND_BRACKETS = re.compile(r'"(?:[^"\\]|\\.)*"?|[\[\]{},]', re.DOTALL)


def open_binary(file: str) -> BinaryIO:
    """Opens a regular file for reading. This is the default of every ``open_file`` argument."""
    return open(file, "rb", opener=regular)


@dataclass(eq=False)
class Source:
    """A data file, or a folder that holds a data set.

    Args:
        path: the file or folder. The places of records begin with it.
        open_file: opens a file for reading; a progress bar wraps files here.
        skipped: counts what readers of sessions leave out, such as events without a message, by its kind.
        refuse: gets the error of each broken row. By default, the first one is raised.
        skips_broken: whether broken events of sessions are counted in ``skipped``. By default, they raise.
    """

    path: str
    open_file: OpenFile = open_binary
    skipped: Counter[str] = field(default_factory=Counter)
    skips_broken: bool = False
    refuse: Callable[[UserError], None] | None = None
    has_refused: bool = field(default=False, init=False)  # whether a row was broken

    def rows(self) -> Iterator[tuple[str, Record]]:
        """Yields the rows, each with its place: "path:line", "path:[3]" or "path:row 3".

        Raises:
            UserError: a malformed file, or a row that is not an object.
        """
        if self.is_folder and (files := event_files(self.path)):
            yield self.path, {"history": list(map(self._event, files))}
        elif self._is_arrow:
            yield from arrow_rows(self)
        elif not _is_document(self.head):
            with self.open() as file:
                yield from json_objects(file, self.path, self.refuse_row)
        elif isinstance(document := _as_row(self.document()), dict):
            yield self.path, document
        else:
            assert isinstance(document, list)  # the head begins with "[" or "{"
            for index, row in enumerate(map(_as_row, document)):
                place = f"{self.path}:[{index}]"
                if not isinstance(row, dict):
                    raise UserError(f"{place}: expected a JSON object, got {type(row).__name__}")
                yield place, row

    @cached_property
    def first_rows(self) -> list[Record]:
        """The first rows, for recognition. A row that is longer than ``head`` lacks members.

        Content that is not JSON has no rows.
        """
        if self.is_folder and (files := event_files(self.path)):
            return [{"history": list(map(self._event, files[:FIRST_ROWS]))}]
        if self._is_arrow:
            return [row for _, row in islice(arrow_rows(self, batch_rows=FIRST_ROWS), FIRST_ROWS)]
        text = self.head.decode(errors="replace").lstrip()
        if _is_document(self.head):
            document = _as_row(parse_beginning(text))
            values = list(map(_as_row, document)) if isinstance(document, list) else [document]
        else:
            values = [
                _as_row(parse_beginning(line)) for line in text.split("\n")[:FIRST_ROWS] if line.strip()
            ]
        return [row for row in values[:FIRST_ROWS] if isinstance(row, dict)]

    def document(self) -> object:
        """Returns the JSON value that the file holds. The file is read as a whole.

        Raises:
            UserError: the file is not one JSON value, see ``parse_json``.
        """
        with self.open() as file:
            return parse_json(file.read(), self.path)

    @property
    def is_folder(self) -> bool:
        return Path(self.path).is_dir()

    @cached_property
    def _is_arrow(self) -> bool:
        if self.path.lower().endswith(".parquet") and not self.head.startswith((b"PAR", b"{", b"[")):
            hint = content_hint(text := self.head[:512].decode(errors="replace")) or "; download it again"
            raise UserError(
                f"{self.path}: expected a Parquet file, which begins with PAR1; this one begins with "
                f"{shorten(text)}{hint}"
            )
        return self.is_folder or self.head.startswith(b"PAR1")

    def _event(self, file: str) -> object:
        with self.open_file(file) as opened:
            return parse_json(opened.read(), file)

    @cached_property
    def compression(self) -> str | None:
        """How the file is compressed: "gzip", "zstd", or None."""
        if self.is_folder:
            return None
        with open_binary(self.path) as raw:
            return compression(raw.read(4))

    @cached_property
    def head(self) -> bytes:
        """The first ``HEAD_BYTES`` of the decompressed content, without a byte-order mark.

        They are fewer if the file is damaged, and none of a folder.
        """
        head = b""
        if self.is_folder:
            return head
        with decompressed(open_binary(self.path), self.compression) as stream, suppress(*DAMAGE):
            while len(head) < HEAD_BYTES and (chunk := cast(BufferedIOBase, stream).read1(HEAD_BYTES)):
                head += chunk
        return head.removeprefix(codecs.BOM_UTF8)

    def open(self) -> BinaryIO:
        """Opens the decompressed content. Only the stream of an uncompressed file can seek."""
        return decompressed(self.open_file(self.path), self.compression)

    def refuse_row(self, error: UserError) -> None:
        """Passes the error of a broken row to ``refuse``, or else raises it."""
        if self.refuse is None:
            raise error
        self.has_refused = True
        self.refuse(error)

    def skip_broken(self, error: UserError) -> None:
        """Counts a broken event if ``skips_broken``, and else raises the error."""
        if not self.skips_broken:
            raise error
        self.skipped["broken line"] += 1


def json_objects(
    file: BinaryIO, name: str, refuse: Callable[[UserError], None]
) -> Iterator[tuple[str, Record]]:
    """Yields the JSON object on each line that is not blank, with "name:line".

    Args:
        refuse: gets the error of each broken line, and may raise it.

    Raises:
        UserError: a broken line that is binary; what ``refuse`` raises.
    """
    for number in count(1):
        line = file.readline(MAX_LINE_BYTES + 1)
        if not line:
            return
        place = f"{name}:{number}"
        if len(line) > MAX_LINE_BYTES:
            raise UserError(f"{place}: expected at most {MAX_LINE_BYTES:,} bytes per line; split the record")
        if line.strip() in (b"", codecs.BOM_UTF8):
            continue
        try:
            record = _as_row(parse_json(line.rstrip(b"\r\n"), place))
            if not isinstance(record, dict):
                raise UserError(f"{place}: expected one JSON object per line, got {type(record).__name__}")
        except UserError as error:
            if b"\0" in line[:512]:  # binary data have no lines
                raise
            refuse(error)
            continue
        yield place, record


def parse_beginning(text: str) -> object:
    """Returns the value of which ``text`` is the beginning, without the members that are cut off.

    For example, '[{"a": 1, "b": [2' becomes [{"a": 1, "b": []}]. Returns None if this fails.
    """
    closers: list[str] = []
    cut, tail = 0, ""  # where to cut the text, and the brackets that close it there
    for match in STRINGS_AND_BRACKETS.finditer(text):
        token = match[0]
        if token in "[{":
            closers.append("]" if token == "[" else "}")
        elif token in "]}":
            if not closers:
                return None
            closers.pop()
        elif token != ",":
            continue
        cut, tail = match.start() if token == "," else match.end(), "".join(reversed(closers))
        if not closers or len(closers) > MAX_DEPTH:
            break
    try:
        return json.loads(text[:cut] + tail)
    except (ValueError, RecursionError):
        return None


def arrow_rows(source: Source, batch_rows: int = BATCH_ROWS) -> Iterator[tuple[str, Record]]:
    """Yields the rows of a Parquet file or an Arrow folder, each with its place, "path:row 0" and so on.

    Arrow stores the union of the fields of all rows, and fills those that a row lacks with null. Nulls inside
    of structs are therefore removed; nulls in lists of numbers, and in values of the type JSON, stay.

    Raises:
        UserError: pyarrow is missing, the folder holds no data set, or a file is damaged or compressed.
    """
    try:
        import pyarrow
    except ImportError:
        raise UserError(
            "reading Parquet and Arrow files needs the package pyarrow; run pip install 'titan_tree[data]'"
        ) from None
    if not source.is_folder and source.compression:
        raise UserError(f"{source.path}: a Parquet file must not be compressed as a whole; decompress it")
    batches = _folder_batches(source) if source.is_folder else _parquet_batches(source, batch_rows)
    number = 0
    try:
        for batch in batches:
            names = batch.schema.names
            if twice := next((name for name in names if names.count(name) > 1), None):
                raise UserError(f"{source.path}: {twice}: the column appears twice; rename one")
            with_json = {field.name: field.type for field in batch.schema if JSON_TYPE in str(field.type)}
            for start in range(0, batch.num_rows, batch_rows):
                for row in batch.slice(start, batch_rows).to_pylist():
                    place = f"{source.path}:row {number}"
                    cells = {name: _without_nulls(row[name]) for name in row}
                    for name, kind in with_json.items():
                        cells[name] = _parsed_json(cells[name], kind, f"{place}: {name}")
                    yield place, cells
                    number += 1
    except UserError:
        raise
    except (pyarrow.lib.ArrowException, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"{source.path}: damaged file after row {number} ({reason}); copy it again") from None
    except ValueError as error:  # a struct has a field twice
        raise UserError(f"{source.path}:row {number}: cannot be converted: {error}; rename one") from None


def event_files(folder: str) -> list[str]:
    """Returns the numbered events in a folder, or in its folder ``events``, in order.

    Their names are 0.json, 1.json, ... or event-00000-ID.json, event-00001-ID.json, ...
    """
    for path in (Path(folder), Path(folder) / "events"):
        found = [(EVENT_FILE.fullmatch(file.name), str(file)) for file in path.glob("*.json")]
        if files := {int(match[1]): file for match, file in found if match}:
            return [files[number] for number in sorted(files)]
    return []


def _is_document(head: bytes) -> bool:
    """Returns whether the head begins one JSON value over several lines, rather than JSON Lines."""
    text = head.lstrip()
    first_line, newline, rest = text.partition(b"\n")
    if text.startswith(b"["):
        is_line = first_line.rstrip().endswith(b"}]") and rest.strip()
        return text[1:].lstrip()[:1] in (b"{", b"[", b"]") and not is_line
    # No line of JSON Lines begins as the second one does, or ends as the first one does.
    goes_on = first_line.rstrip()[-1:] in b"{[,:" or rest.lstrip()[:1] in b",:}]"
    return text.startswith(b"{") and bool(newline and rest.strip()) and goes_on


def _as_row(value: object) -> object:
    """Returns a list of messages or of episodes as a row that holds them, and any other value as it is."""
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return value
    if all("role" in item for item in value):
        return {"messages": value}
    return {"episodes": value} if {"rollout_id", "records"} <= value[0].keys() else value


def _parquet_batches(source: Source, batch_rows: int) -> Iterator[RecordBatch]:
    import pyarrow.parquet

    with source.open() as file:
        yield from pyarrow.parquet.ParquetFile(file).iter_batches(batch_size=batch_rows)


def _folder_batches(source: Source) -> Iterator[RecordBatch]:
    """Yields the record batches of the files that the folder's state.json lists, in its order."""
    import pyarrow.ipc

    folder = Path(source.path)
    for name in _arrow_files(folder):
        with source.open_file(str(folder / name)) as file:
            yield from pyarrow.ipc.open_stream(file)
            file.seek(-len(ARROW_END), os.SEEK_CUR)
            if file.read(len(ARROW_END)) != ARROW_END:
                raise UserError(f"{folder / name}: damaged file: its end is missing; copy it again")


def _arrow_files(folder: Path) -> list[str]:
    if (splits := folder / "dataset_dict.json").is_file():
        found = ", ".join(sorted(path.name for path in folder.iterdir() if path.is_dir()))
        raise UserError(f"{splits}: the data set has several splits ({found}); set data.files to one of them")
    state = folder / "state.json"
    if not state.is_file():
        raise UserError(
            f"{folder}: expected a file, or a folder that datasets.save_to_disk wrote; "
            "name the files of a folder with a pattern such as folder/*.jsonl"
        )
    try:
        with open_binary(str(state)) as file:
            content: Any = parse_json(file.read(), str(state))
        names = [entry["filename"] for entry in content["_data_files"]]
        wrong = next((n for n in names if os.path.basename(n) != n or "\0" in n or names.count(n) > 1), None)
        indices = content.get("_indices_data_files")
    except (KeyError, TypeError, AttributeError):
        raise UserError(
            f'{state}: expected {{"_data_files": [{{"filename": str}}]}}; save the data set again'
        ) from None
    if wrong is not None:
        raise UserError(f"{state}: expected names of files in this folder, each once, got {shorten(wrong)}")
    if indices:
        raise UserError(
            f"{state}: _indices_data_files: an index selects the rows; save the data set "
            "again with datasets.Dataset.flatten_indices"
        )
    return names


def _parsed_json(value: object, kind: DataType, place: str) -> object:
    """Returns a cell with the texts parsed that have the type JSON, at any depth of its lists and structs."""
    if isinstance(value, str) and str(kind) == JSON_TYPE:
        return parse_json(value.encode(errors="surrogatepass"), place)
    if isinstance(value, list):
        return [_parsed_json(item, kind.value_type, f"{place}[{i}]") for i, item in enumerate(value)]
    if isinstance(value, dict):
        return {n: _parsed_json(item, kind.field(n).type, f"{place}.{n}") for n, item in value.items()}
    return value


def _without_nulls(value: object) -> object:
    if isinstance(value, dict):
        return {name: _without_nulls(item) for name, item in value.items() if item is not None}
    if isinstance(value, list) and any(isinstance(item, dict | list) for item in value):
        return [_without_nulls(item) for item in value]
    return value
