"""Readers: JSON Lines files, plain or gzip -> groups of records -> training samples.

A line is one sample, or one task with several:

    {"messages": [...], "tools"?, "group_id"?, "id"?, "weight"?, "advantage"?}              a conversation
    {"tokens" or "input_ids": [...], "loss_mask"?, "old_logprobs"?, "ref_logprobs"?,
     "routed_experts"?, "group_id"?, "id"?, "weight"?, "advantage"?}                        token ids
    {"trajectories": [samples of either kind], "tools"?, "group_id"?, "id"?, ...}           a task

``tools``, ``weight`` and ``advantage`` of a task hold for all its trajectories that do not say otherwise;
``reward``, of each sample, is read where advantages are made of rewards (``PathReader``); other fields (task,
source, ...) are the user's own. Lines of one group_id stand next to each other and form one group; a line
without one is a group of its own. ``id`` only names things in messages.

Reading and tokenising are two steps, so that a resumed run replays the file cheaply: ``read_groups`` only
parses JSON, ``PathReader`` makes the samples.

``routed_experts`` (``TokenPath``), which engines return with what they sample, are a list [tokens][layers
with experts][experts of a token]; or, as that is long, a string: such an array of integers as ``numpy.save``
writes it, in base64. Tokens at the end may be missing, as the last one, which no engine reads.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import glob
import gzip
import io
import json
import math
import statistics
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

import numpy as np

from titan_tree.data import demo
from titan_tree.errors import UserError
from titan_tree.tree.paths import PER_TOKEN, ExpertSizes, ModelLimits, TokenPath

Record = dict[str, Any]
Sample = tuple[str, str, Record]  # ("file:line", name, record)
OpenFile = Callable[[str], BinaryIO]
DEMO = "demo"  # the name of the embedded sample, where a file is expected
SAMPLE_KINDS = ("messages", "tokens", "input_ids")
TOKEN_FIELDS = ("loss_mask", "old_logprobs", "ref_logprobs", "routed_experts")
TASK_FIELDS = ("tools", "weight", "advantage")  # a task's trajectories inherit them


class SampleTokenizer(Protocol):
    """What the reader needs of a tokenizer: one path per training sample of a conversation."""

    def samples(self, messages: Any, *args: Any, **kwargs: Any) -> list[TokenPath]: ...


@dataclass(frozen=True, slots=True)
class Group:
    """The records of one group as they stand in a file: parsed, not yet tokenised."""

    id: str
    lines: list[tuple[str, Record]]  # ("file:line", record)


def find_files(files: str | Path | Sequence[str | Path]) -> list[str]:
    """The files meant by a path, a glob pattern or a list of those, in the order given (globs sorted).

    Raises UserError where there are none.
    """
    names = [str(f) for f in ([files] if isinstance(files, str | Path) else files)]
    if not names:
        raise UserError("data files: expected a path, a glob pattern or a list of those, got none")
    found = []
    for name in names:
        matches = [name] if name == DEMO or Path(name).is_file() else sorted(glob.glob(name, recursive=True))
        if not matches:
            raise UserError(f"{name}: no such file")
        found += matches
    return found


def open_binary(file: str) -> BinaryIO:
    return open(file, "rb")


def read_records(file: str, open_file: OpenFile = open_binary) -> Iterator[tuple[str, Record]]:
    """("file:line", record) for every line of ``file``; blank lines are not records.

    Raises UserError naming file and line: unreadable file, truncated gzip, broken JSON, no record at all.
    """
    if file == DEMO:
        yield from ((f"{DEMO}:{n}", record) for n, record in enumerate(demo.records(), start=1))
        return
    empty, number = True, 0
    try:
        with open_file(file) as raw:
            lines = gzip.GzipFile(fileobj=raw) if _is_gzip(file) else raw
            for number, line in enumerate(lines, start=1):
                if line.strip():
                    empty = False
                    yield f"{file}:{number}", _parse(line, f"{file}:{number}")
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UserError(f"{file}:{number + 1}: damaged gzip file ({error}); copy it again") from None
    except OSError as error:
        raise UserError(f"{file}: cannot be read: {error.strerror or error}") from None
    if empty:
        raise UserError(f"{file}: expected JSON Lines, got an empty file")


def _is_gzip(file: str) -> bool:
    with open(file, "rb") as raw:
        return raw.read(2) == b"\x1f\x8b"


def _parse(line: bytes, where: str) -> Record:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: broken JSON at character {error.pos + 1}: {error.msg}; expected one object per line"
        ) from None
    except UnicodeDecodeError as error:
        raise UserError(f"{where}: expected UTF-8 text: {error.reason} at byte {error.start + 1}") from None
    except (RecursionError, ValueError) as error:  # brackets or digits by the thousand
        raise UserError(f"{where}: broken JSON: {error}") from None
    if not isinstance(record, dict):
        raise UserError(f"{where}: expected one JSON object per line, got {type(record).__name__}")
    return record


def read_groups(files: Iterable[str], open_file: OpenFile = open_binary) -> Iterator[Group]:
    """The groups of ``files`` in order, without tokenising.

    Raises UserError where the lines of a group id are not contiguous: two trees in silence would compute
    the shared tokens twice.
    """
    seen: dict[str, str] = {}
    for file in files:
        for (shared, name), run in groupby(read_records(file, open_file), key=lambda line: _group_key(*line)):
            lines = list(run)
            where, record = lines[0]
            if shared and name in seen:
                raise UserError(
                    f"{where}: group {name!r} appeared before, at {seen[name]}; sort the file by group_id: "
                    "the lines of a group must stand next to each other"
                )
            if shared:
                seen[name] = where
            yield Group(name if shared else str(record.get("id", where)), lines)


def _group_key(where: str, record: Record) -> tuple[bool, str]:
    """(does the line name a group?, the name); without one a line is a group named after its place."""
    if (name := record.get("group_id")) is None:
        return False, where
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise UserError(f"{where}: group_id: expected a string or an integer, got {name!r}")
    return True, str(name)


@dataclass(frozen=True)
class PathReader:
    """Makes training samples of the records of a group.

    Args:
        tokenizer: renders conversations; not needed for token ids.
        sample_options: keyword arguments of ``tokenizer.samples``.
        vocab_size: the model's; larger token ids are an error. None: not checked.
        max_positions: the model's longest path in tokens. None: not checked.
        experts: the model's, where routed experts are to be forced_experts; others are an error. None: not checked.
        advantage: "given" by the data, or "group": made of ``reward`` by ``group_advantages``. A line, or a
            trajectory of a task, counts once, however many paths its turns make: all get its advantage.
    """

    tokenizer: SampleTokenizer | None = None
    sample_options: Mapping[str, Any] = field(default_factory=dict)
    vocab_size: int | None = None
    max_positions: int | None = None
    advantage: Literal["given", "group"] = "given"
    experts: ExpertSizes | None = None

    def __post_init__(self) -> None:
        if self.advantage not in ("given", "group"):
            raise UserError(f"data.advantage: expected one of given, group; got {self.advantage!r}")

    def paths(self, group: Group) -> list[TokenPath]:
        """All samples of the group, in file order.

        Raises UserError naming file, line, field and what was expected.
        """
        paths = []
        samples = list(_samples(group))
        for where, name, sample in samples if self.advantage == "given" else _with_advantages(samples):
            with _errors_at(where):
                kinds = [kind for kind in SAMPLE_KINDS if kind in sample]
                if len(kinds) != 1:
                    raise UserError(
                        "expected one of the fields trajectories, messages, tokens, input_ids; got "
                        + (" and ".join(kinds) or ", ".join(sample) or "an empty object")
                    )
                if kinds == ["messages"]:
                    found = self._render(name, sample)
                else:
                    found = [_token_path(name, kinds[0], sample)]
                for path in found:
                    path.check_limits(ModelLimits(self.max_positions, self.vocab_size, self.experts))
            paths += found
        return paths

    def _render(self, name: str, sample: Record) -> list[TokenPath]:
        if self.tokenizer is None:
            raise UserError("messages: conversations need a tokenizer, and none is set; set data.tokenizer")
        _refuse(
            sample, TOKEN_FIELDS, "not read beside messages, whose samples the chat template makes; remove it"
        )
        paths = self.tokenizer.samples(sample["messages"], sample.get("tools"), **self.sample_options)
        if not paths:
            raise UserError("messages: expected at least one assistant turn to train on, got none")
        given = _given(sample, ("weight", "advantage"))
        if isinstance(given.get("advantage"), list):
            raise UserError("advantage: expected one number for a conversation, got a list")
        return [
            dataclasses.replace(path, id=f"{name}/{turn}", **given)
            for turn, path in enumerate(paths, start=1)
        ]


def holds_conversations(file: str) -> bool:
    """Does the first record of ``file`` hold messages (and not token ids)?"""
    first = next(read_groups([file]))
    return any("messages" in sample for _, _, sample in _samples(first))


def group_advantages(rewards: Sequence[float]) -> list[float]:
    """(r - mean) / (std + 1e-6) for each reward of a group, std with n - 1 (GRPO, arXiv:2402.03300).

    Zeros where all rewards are equal: such a group says nothing about what is better.
    """
    mean = statistics.mean(rewards)
    std = statistics.stdev(rewards) if len(rewards) > 1 else 0.0
    return [(reward - mean) / (std + 1e-6) for reward in rewards]


def _with_advantages(samples: list[Sample]) -> list[Sample]:
    """The samples of one group, each with the advantage that its reward makes."""
    for where, _, sample in samples:
        reward = sample.get("reward")
        if not isinstance(reward, int | float) or not math.isfinite(reward):
            raise UserError(
                f"{where}: reward: expected a finite number, which data.advantage = 'group' needs of every "
                f"sample, got {reward!r:.40}; give it one, or leave the sample out"
            )
        if sample.get("advantage") is not None:
            raise UserError(
                f"{where}: advantage: expected none, as data.advantage = 'group' makes it of the rewards; "
                "remove the field, or set data.advantage = 'given'"
            )
    advantages = group_advantages([float(sample["reward"]) for *_, sample in samples])
    return [(at, name, s | {"advantage": a}) for (at, name, s), a in zip(samples, advantages, strict=True)]


def _samples(group: Group) -> Iterator[Sample]:
    """The samples of a group, one by one."""
    for where, record in group.lines:
        if "trajectories" not in record:
            shared, _ = _group_key(where, record)
            line = where.rpartition(":")[2]
            yield where, f"{group.id}/{record.get('id', line)}" if shared else group.id, record
            continue
        trajectories = record["trajectories"]
        if not isinstance(trajectories, list) or not trajectories:
            raise UserError(f"{where}: trajectories: expected a non-empty list, got {trajectories!r:.40}")
        with _errors_at(where):
            _refuse(
                record,
                (*SAMPLE_KINDS, *TOKEN_FIELDS),
                "not read beside trajectories; move it into one of them",
            )
        for index, trajectory in enumerate(trajectories):
            here = f"{where}: trajectories[{index}]"
            if not isinstance(trajectory, dict):
                raise UserError(f"{here}: expected a JSON object, got {type(trajectory).__name__}")
            name = f"{group.id}/{trajectory.get('id', index)}"
            yield here, name, _given(record, TASK_FIELDS) | _given(trajectory, trajectory)


def _token_path(name: str, field: str, sample: Record) -> TokenPath:
    foreign = ("labels", "attention_mask")
    _refuse(sample, foreign, "not read; give unpadded tokens and a loss_mask (0: not trained on)")
    given = _given(sample, ("loss_mask", "weight", *PER_TOKEN, "routed_experts"))
    if isinstance(encoded := given.get("routed_experts"), str):
        given["routed_experts"] = _decode_array("routed_experts", encoded)
    path = TokenPath(sample[field], id=name, **given)
    known = ("loss_mask", *PER_TOKEN)
    for other in sample.keys() - {field, *known}:  # a misspelt mask would train on the prompt
        value = sample[other]
        if isinstance(value, list) and len(value) == len(path) and isinstance(value[0], int | float):
            raise UserError(f"{other}: numbers for every token, but not read; known are {', '.join(known)}")
    return path


def _decode_array(field: str, encoded: str) -> np.ndarray:
    """What ``numpy.save`` wrote, in base64."""
    try:
        return np.lib.format.read_array(
            io.BytesIO(base64.b64decode(encoded, validate=True)), allow_pickle=False
        )
    except (binascii.Error, ValueError, EOFError) as error:
        raise UserError(f"{field}: expected base64 of a .npy file of integers: {error}") from None


def _refuse(record: Record, names: Iterable[str], why: str) -> None:
    """UserError for a field that would be dropped in silence."""
    for name in names:
        if record.get(name) is not None:
            raise UserError(f"{name}: {why}")


def _given(record: Record, names: Iterable[str]) -> Record:
    """Those of the fields that the record gives; null means not given."""
    return {name: record[name] for name in names if record.get(name) is not None}


@contextmanager
def _errors_at(where: str) -> Iterator[None]:
    try:
        yield
    except UserError as error:
        message = str(error).removeprefix(f"path {where}: ")  # a path without an id is named after its place
        raise UserError(f"{where}: {message}") from None
