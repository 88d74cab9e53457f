"""Readers turn data files into records.

A record is a dict in titan_tree's own schema (data/schema.py): a task with trajectories, a conversation, or
token ids. To support another format, write a subclass of ``RowReader`` in a new file here and add one line to
``READERS`` below. docs/data.md describes the formats.

containers   a file -> rows: containers.py (JSON Lines, JSON documents, Parquet, Arrow)
             decompress.py reads gzip and Zstandard; strict_json.py refuses what JSON parsers would change
formats      a row -> a record: openai_chat.py, anthropic.py, token_rows.py, ...
             row_reader.py has their base class, trace_reader.py that of rollouts with token ids, chat.py
             shared parts; own_schema.py passes our own records on
sessions     the events of a coding agent -> a record: sessions.py, claude_code.py, codex.py, pi.py, ...
"""

from __future__ import annotations

import codecs
import difflib
import glob
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from io import BufferedIOBase
from pathlib import Path
from typing import Any, BinaryIO, cast

from titan_tree.config.files import regular
from titan_tree.config.registry import Registry
from titan_tree.data import demo
from titan_tree.data.readers.decompress import DAMAGE, compression, decompressed
from titan_tree.errors import UserError

Record = dict[str, Any]
Place = str  # where a record comes from, for error messages: "file:line", "file:[3]" or "file:row 3"
OpenFile = Callable[[str], BinaryIO]

AUTO = "auto"  # data.format that recognizes each file by its content
DEFAULT_FORMAT = "jsonl"  # the format of a file that no other reader recognizes
DEMO = "demo"  # the name of the bundled sample, accepted in place of a file
HEAD_BYTES = 256 * 1024  # what readers see of a file when they recognize it


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

    @property
    def is_folder(self) -> bool:
        return Path(self.path).is_dir()

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


class Reader(ABC):
    """Reads one data format. Entries of the registry ``READERS`` are subclasses of this class."""

    @abstractmethod
    def recognizes(self, source: Source) -> bool:
        """Returns whether the content is of this format. It is used with ``data.format = "auto"``.

        It must be cheap: look at ``source.head``, or at ``containers.first_rows(source)``.
        """

    @abstractmethod
    def records(self, source: Source) -> Iterator[tuple[Place, Record]]:
        """Yields the records in titan_tree's schema, each with its place.

        Raises:
            UserError: malformed content. The message starts with the place and says what was expected.
        """


def find_files(files: Sequence[str]) -> list[str]:
    """Returns the files that paths and glob patterns name, in the given order, each glob sorted.

    A path may also name a folder that holds a data set.

    Raises:
        UserError: no names, or a name without a file, such as a link that leads nowhere.
    """
    if not files:
        raise UserError("data.files: expected at least one path or glob pattern, got none")
    paths: list[str] = []
    for name in map(os.path.expanduser, files):
        is_path = name == DEMO or os.path.lexists(name)
        if not is_path and "**" in name:
            _refuse_loops(name)
        paths += [name] if is_path else sorted(glob.glob(name, recursive=True)) or [name]
    for path in paths:
        if path != DEMO:
            _require_existing(path)
    return paths


def _refuse_loops(pattern: str) -> None:
    """Raises UserError for a link to a folder around it, which ``**`` would follow again and again."""
    before, slash, _ = re.split(r"[*?\[]", pattern, maxsplit=1)[0].rpartition("/")
    start = before or slash or "."  # the folder before the first wildcard
    for folder, names, _ in os.walk(start, followlinks=True):
        for link in (os.path.join(folder, name) for name in names):
            inside = f"{os.path.realpath(folder)}/".startswith(os.path.join(os.path.realpath(link), ""))
            if os.path.islink(link) and inside:
                raise UserError(
                    f"{link}: a link to a folder around it, which {pattern} would follow again and again"
                )


def _require_existing(path: str) -> None:
    try:
        os.stat(path)
    except FileNotFoundError:
        reason = "the link leads to no file" if os.path.islink(path) else f"no such file{_hint(path)}"
        raise UserError(f"{path}: {reason}") from None
    except (OSError, ValueError) as error:  # such as a name that is too long
        raise UserError(f"{path}: cannot be read: {getattr(error, 'strerror', error)}") from None


def _hint(path: str) -> str:
    """Returns what may have been meant by the path of a file that does not exist."""
    folder, name = os.path.split(path)
    if "://" in path:
        return "; download it, and name that file"
    if path == "-":
        return "; write what is piped to a file, and name that"
    if "," in name:
        return "; separate several files by spaces, or in a configuration as a list: [a.jsonl, b.jsonl]"
    with suppress(OSError):
        if close := difflib.get_close_matches(name, os.listdir(folder or "."), n=1):
            return f"; did you mean {os.path.join(folder, close[0])}?"
    return "" if os.path.isabs(path) else f" in {os.getcwd()}"


def read_records(
    file: str,
    format: str = AUTO,
    open_file: OpenFile = open_binary,
    skipped: Counter[str] | None = None,
    skips_broken: bool = False,
    refuse: Callable[[UserError], None] | None = None,
) -> Iterator[tuple[Place, Record]]:
    """Yields the records of a data file, each with its place. The file may be compressed.

    Args:
        file: a path, or "demo" for the bundled sample.
        format: the name of a reader, or "auto".
        open_file: opens the file for reading; a progress bar wraps the file here.
        skipped, skips_broken, refuse: see ``Source``.

    Raises:
        UserError: an unknown format, an unreadable or damaged file, malformed content, or no record at all.
    """
    if file == DEMO:
        yield from ((f"{DEMO}:{number}", record) for number, record in enumerate(demo.records(), start=1))
        return
    if format == AUTO and file.lower().endswith((".csv", ".tsv")):
        raise UserError(
            f"{file}: expected JSON Lines, JSON or Parquet, got a table as text; convert it, for example "
            "with pandas: read_csv(FILE).to_json('rows.jsonl', orient='records', lines=True)"
        )
    if format == AUTO and file.endswith(".toml"):
        raise UserError(f"{file}: expected data, got a configuration; give its data.files")
    source = Source(file, open_file, Counter() if skipped is None else skipped, skips_broken, refuse)
    place = None
    try:
        name = _recognized_format(source) if format == AUTO else format
        reader = READERS[name]()
        for place, record in reader.records(source):
            yield place, record
    except DAMAGE as error:
        damage = f"damaged {source.compression} file"
        where = f"{file}: {damage}" if place is None else f"{place}: {damage} after this record"
        raise UserError(f"{where} ({error}); copy the file again") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from None
    if place is None and not source.has_refused:
        raise UserError(f"{file}: expected at least one record in the format {name}, got none")


def _recognized_format(source: Source) -> str:
    """Returns the name of the reader that recognizes the content.

    If no reader does, it is the default format, whose error messages say what is wrong with a file.
    """
    names = [name for name in READERS if name != DEFAULT_FORMAT and READERS[name]().recognizes(source)]
    if len(names) > 1:
        raise UserError(
            f"{source.path}: several readers recognize this file: {', '.join(names)}; "
            "set data.format to one of them"
        )
    return names[0] if names else DEFAULT_FORMAT


READERS: Registry[type[Reader]] = Registry(
    "data format",
    {
        "jsonl": "titan_tree.data.readers.own_schema:OwnSchemaReader",
        "openai_chat": "titan_tree.data.readers.openai_chat:OpenAIChatReader",
        "openai_responses": "titan_tree.data.readers.openai_responses:OpenAIResponsesReader",
        "anthropic": "titan_tree.data.readers.anthropic:AnthropicReader",
        "sharegpt": "titan_tree.data.readers.llama_factory:ShareGptReader",
        "alpaca": "titan_tree.data.readers.llama_factory:AlpacaReader",
        "text_rows": "titan_tree.data.readers.text_rows:TextRowReader",
        "token_rows": "titan_tree.data.readers.token_rows:TokenRowReader",
        "tree": "titan_tree.data.readers.explicit_trees:ExplicitTreeReader",
        "verifiers": "titan_tree.data.readers.verifiers:VerifiersReader",
        "nemo_gym": "titan_tree.data.readers.nemo_gym:NemoGymReader",
        "agent_lightning": "titan_tree.data.readers.agent_lightning:AgentLightningReader",
        "tau_bench": "titan_tree.data.readers.benchmarks:TauBenchReader",
        "tau2_bench": "titan_tree.data.readers.benchmarks:Tau2BenchReader",
        "swe_agent": "titan_tree.data.readers.benchmarks:SweAgentReader",
        "claude_code": "titan_tree.data.readers.claude_code:ClaudeCodeReader",
        "codex": "titan_tree.data.readers.codex:CodexReader",
        "pi": "titan_tree.data.readers.pi:PiReader",
        "openhands": "titan_tree.data.readers.openhands:OpenHandsReader",
        "token_store": "titan_tree.data.token_store:TokenStoreReader",
    },
    interface=("recognizes", "records"),
)
