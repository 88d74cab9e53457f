"""Readers turn data files into records.

A record is a dict in titan_tree's own schema (data/schema.py): a task with trajectories, a conversation, or
token ids. To support another format, write a subclass of ``RowReader`` in a new file here and add one line to
``READERS`` below. docs/data.md describes the formats.

containers   a file -> rows: containers.py (JSON Lines, JSON documents, Parquet, Arrow)
             decompress.py reads gzip and Zstandard; strict_json.py refuses what JSON parsers would change
formats      a row -> a record: openai_chat.py, openai_responses.py, anthropic.py, llama_factory.py
             (ShareGPT and Alpaca), text_rows.py, token_rows.py, explicit_trees.py; sampled.py reads the
             token ids that responses of vLLM and SGLang record
             row_reader.py has their base class, chat.py shared parts; own_schema.py passes our own records on
harnesses    sessions of coding agents, and files of benchmarks and of frameworks of reinforcement learning
"""

from __future__ import annotations

import difflib
import glob
import os
import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

from titan_tree.config.registry import Registry
from titan_tree.data import demo
from titan_tree.data.readers.containers import OpenFile, Record, Source, open_binary
from titan_tree.data.readers.decompress import DAMAGE
from titan_tree.errors import UserError, shorten

AUTO = "auto"  # data.format that recognizes each file by its content
DEFAULT_FORMAT = "jsonl"  # the format of a file that no other reader recognizes
DEMO = "demo"  # the name of the bundled sample, accepted in place of a file

# A reader is imported, and asked whether it recognizes a file, only if one of the first rows has one of these
# keys. Readers without an entry are asked about every file.
SIGNATURES: dict[str, tuple[str, ...]] = {
    "openai_chat": ("messages", "request", "chosen", "completion"),
    "openai_responses": ("input", "request"),
    "anthropic": ("messages", "request"),
    "engine_calls": ("request",),
    "sharegpt": ("conversations",),
    "alpaca": ("instruction",),
    "text_rows": ("completion", "output"),
    "token_rows": (
        "tokens", "token_ids", "input_ids", "prompts", "prompt_ids", "prompt_token_ids", "input_tokens",
    ),
    "tree": ("nodes",),
    "verifiers": ("nodes", "traces"),
    "nemo_gym": ("responses_create_params",),
    "nemo_gym_capture": ("model_call_id", "continuation_fingerprint"),
    "agent_lightning": ("triplets",),
    "agentcore": ("episodes",),
    "skyrl_capture": ("path_id",),
    "harbor": ("trial_name",),
    "tau_bench": ("task_id",),
    "tau2_bench": ("info",),
    "swe_agent": ("trajectory",),
    "atif": ("steps",),
    "claude_code": ("parentUuid", "leafUuid"),
    "codex": ("payload",),
    "pi": ("parentId", "message"),
    "openhands": ("history",),
}  # fmt: skip


# Files of known programs that no reader reads, by the keys of one of their first rows.
FOREIGN = {
    frozenset({"sessionId", "projectHash"}): (
        "a session of Gemini CLI, which is not read; write its messages as a conversation, type user as user "
        "and type gemini as assistant, without those that a $rewindTo takes back"
    ),
}


class Reader(ABC):
    """Reads one data format. Entries of the registry ``READERS`` are subclasses of this class."""

    def recognizes(self, source: Source) -> bool:
        """Returns whether the content is of this format. It is used with ``data.format = "auto"``.

        It must be cheap: look at ``source.head`` or ``source.first_rows``. By default, one row suffices.
        """
        return any(map(self.recognizes_row, source.first_rows))

    def recognizes_row(self, row: Record) -> bool:
        """Returns whether a row is of this format. Long rows may lack their last members."""
        return False

    @abstractmethod
    def records(self, source: Source) -> Iterator[tuple[str, Record]]:
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
) -> Iterator[tuple[str, Record]]:
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
    name = format
    try:
        name = _recognized_format(source) if format == AUTO else format
        for place, record in _records(name, source):
            yield place, record
    except DAMAGE as error:
        damage = f"damaged {source.compression} file"
        where = f"{file}: {damage}" if place is None else f"{place}: {damage} after this record"
        raise UserError(f"{where} ({error}); copy the file again") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from None
    if place is None and not source.has_refused:
        raise UserError(f"{file}: expected at least one record in the format {name}, got none")


def _records(name: str, source: Source) -> Iterator[tuple[str, Record]]:
    """Yields the records of the reader called ``name``, which may be the user's."""
    guard = partial(READERS.calling, name, passed=(*DAMAGE, OSError))
    with guard():
        items = iter(READERS[name]().records(source))
    if isinstance(guard(), nullcontext):
        yield from items
        return
    while True:  # a guard around ``yield`` would also be one around the caller
        with guard():
            item: Any = next(items, None)
        if item is None:
            return
        is_record = isinstance(item, tuple) and tuple(map(type, item)) == (str, dict)
        if not is_record:
            raise UserError(
                f"{source.path}: data.format: {name!r}: expected (place, record), a string and a dict, from "
                f"records(), got {shorten(item)}"
            )
        yield item


def recognized_formats(source: Source) -> Iterator[str]:
    """Yields the names of the readers that recognize the content, without the default format."""
    keys = {key for row in source.first_rows for key in row}
    for name in READERS:
        if name == DEFAULT_FORMAT or (name in SIGNATURES and keys.isdisjoint(SIGNATURES[name])):
            continue
        with READERS.calling(name, "source", (*DAMAGE, OSError)):
            is_recognized = READERS[name]().recognizes(source)
        if is_recognized:
            yield name


def _recognized_format(source: Source) -> str:
    """Returns the name of the reader that recognizes the content.

    If no reader does, it is the default format, whose error messages say what is wrong with a file.
    """
    for keys, advice in FOREIGN.items():
        if any(keys <= row.keys() for row in source.first_rows):
            raise UserError(f"{source.path}: {advice}")
    names = list(recognized_formats(source))
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
        "engine_calls": "titan_tree.data.readers.sampled:EngineCallReader",
        "sharegpt": "titan_tree.data.readers.llama_factory:ShareGptReader",
        "alpaca": "titan_tree.data.readers.llama_factory:AlpacaReader",
        "text_rows": "titan_tree.data.readers.text_rows:TextRowReader",
        "token_rows": "titan_tree.data.readers.token_rows:TokenRowReader",
        "tree": "titan_tree.data.readers.explicit_trees:ExplicitTreeReader",
        "verifiers": "titan_tree.data.readers.harnesses.verifiers:VerifiersReader",
        "nemo_gym": "titan_tree.data.readers.harnesses.rollouts:NemoGymReader",
        "nemo_gym_capture": "titan_tree.data.readers.harnesses.captures:NemoGymCaptureReader",
        "agent_lightning": "titan_tree.data.readers.harnesses.rollouts:AgentLightningReader",
        "agentcore": "titan_tree.data.readers.harnesses.captures:AgentCoreReader",
        "skyrl_capture": "titan_tree.data.readers.harnesses.captures:SkyRLCaptureReader",
        "harbor": "titan_tree.data.readers.harnesses.captures:HarborReader",
        "tau_bench": "titan_tree.data.readers.harnesses.benchmarks:TauBenchReader",
        "tau2_bench": "titan_tree.data.readers.harnesses.benchmarks:Tau2BenchReader",
        "swe_agent": "titan_tree.data.readers.harnesses.benchmarks:SweAgentReader",
        "atif": "titan_tree.data.readers.harnesses.atif:AtifReader",
        "claude_code": "titan_tree.data.readers.harnesses.claude_code:ClaudeCodeReader",
        "codex": "titan_tree.data.readers.harnesses.codex:CodexReader",
        "pi": "titan_tree.data.readers.harnesses.pi:PiReader",
        "openhands": "titan_tree.data.readers.harnesses.openhands:OpenHandsReader",
        "token_store": "titan_tree.data.token_store:TokenStoreReader",
    },
    interface=("recognizes", "records"),
    key="data.format",
)
