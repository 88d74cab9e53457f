"""SampleReader: data files -> groups -> training samples (TokenPaths)."""

from __future__ import annotations

import base64
import binascii
import dataclasses
import io
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from titan_tree.data.advantages import with_group_advantages
from titan_tree.data.groups import (
    SAMPLE_KINDS,
    TOKEN_FIELDS,
    Group,
    Sample,
    group_records,
    group_samples,
    present_fields,
    refuse_fields,
)
from titan_tree.data.readers import DEMO, OpenFile, Place, Record, find_files, open_binary, read_records
from titan_tree.errors import UserError
from titan_tree.tree.paths import PER_TOKEN, ModelLimits, TokenPath

if TYPE_CHECKING:
    from titan_tree.config import DataConfig

NO_LIMITS = ModelLimits()


class SampleTokenizer(Protocol):
    """What SampleReader needs from a tokenizer. ``TreeTokenizer`` is one."""

    def samples(self, messages: Any, *args: Any, **kwargs: Any) -> list[TokenPath]:
        """Returns one path per training sample of a conversation."""


class DataSizes(NamedTuple):
    """Sizes of data files."""

    groups: int
    samples: int


class SampleReader:
    """Reads the groups of the configured files, and turns a group into training samples.

    Args:
        config: ``files`` and ``format`` choose the records; ``sample``, ``advantage`` and ``replay`` choose
            how records become training samples.
        tokenizer: renders and tokenizes conversations. Files of token ids do not need one.
        limits: limits of the model. Longer paths and larger token ids are errors. If ``config.replay`` uses
            recorded experts, they must fit the model's layers and experts.

    Attributes:
        files: the paths that ``config.files`` names, globs expanded.

    Raises:
        UserError: a file does not exist.
    """

    def __init__(
        self, config: DataConfig, tokenizer: SampleTokenizer | None = None, limits: ModelLimits = NO_LIMITS
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self.limits = limits if config.replay != "off" else limits._replace(experts=None)
        self.files = find_files(config.files)

    def groups(self, open_file: OpenFile = open_binary) -> Iterator[Group]:
        """Yields all groups in file order, without tokenizing them.

        Args:
            open_file: opens each file for reading; a progress bar wraps files here.

        Raises:
            UserError: unreadable or malformed files, or a group whose records are not adjacent.
        """
        format = self.config.format
        return group_records(read_records(file, format, open_file) for file in self.files)

    def num_bytes(self) -> int:
        """Returns the size of all files on disk."""
        return sum(Path(file).stat().st_size for file in self.files if file != DEMO)

    def sizes(self) -> DataSizes:
        """Returns how many groups and samples all files have. Reads them once, without tokenizing."""
        each_turn = self.config.sample.get("turns", "each") == "each"
        groups = samples = 0
        for group in self.groups():
            groups += 1
            for sample in group_samples(group):
                messages = sample.record.get("messages") if each_turn else None
                if isinstance(messages, list):
                    samples += sum(isinstance(m, dict) and m.get("role") == "assistant" for m in messages)
                else:
                    samples += 1
        return DataSizes(groups, samples)

    def paths(self, group: Group) -> list[TokenPath]:
        """Returns the training samples of a group in file order.

        Raises:
            UserError: a malformed sample; the message names file, line and field, and what was expected.
        """
        samples = list(group_samples(group))
        if self.config.advantage == "group":
            samples = with_group_advantages(samples)
        return [path for sample in samples for path in self._sample_paths(sample)]

    def _sample_paths(self, sample: Sample) -> list[TokenPath]:
        place, name, record = sample
        with _errors_at(place):
            kinds = [kind for kind in SAMPLE_KINDS if kind in record]
            if len(kinds) != 1:
                found = " and ".join(kinds) or ", ".join(record) or "an empty object"
                expected = "expected one of the fields trajectories, messages, tokens, input_ids"
                raise UserError(f"{expected}; got {found}")
            if kinds == ["messages"]:
                paths = self._conversation_paths(name, record)
            else:
                paths = [_token_path(name, kinds[0], record)]
            for path in paths:
                path.check_limits(self.limits)
        return paths

    def _conversation_paths(self, name: str, record: Record) -> list[TokenPath]:
        if self.tokenizer is None:
            raise UserError("messages: conversations need a tokenizer, and none is set; set data.tokenizer")
        reason = "not allowed together with messages, because the chat template makes the tokens; remove it"
        refuse_fields(record, TOKEN_FIELDS, reason)
        paths = self.tokenizer.samples(record["messages"], record.get("tools"), **self.config.sample)
        if not paths:
            raise UserError("messages: expected at least one assistant turn to train on, got none")
        fields = present_fields(record, ("weight", "advantage"))
        if isinstance(fields.get("advantage"), list):
            raise UserError("advantage: expected one number for a conversation, got a list")
        return [
            dataclasses.replace(path, id=f"{name}/{turn}", **fields)
            for turn, path in enumerate(paths, start=1)
        ]


def _token_path(name: str, kind: str, record: Record) -> TokenPath:
    """Returns the path of a sample whose field ``kind`` holds token ids."""
    refuse_fields(
        record,
        ("labels", "attention_mask"),
        "not read; give unpadded tokens and a loss_mask (0: not trained on)",
    )
    per_token = ("loss_mask", *PER_TOKEN)
    fields = present_fields(record, (*per_token, "weight", "routed_experts"))
    if isinstance(encoded := fields.get("routed_experts"), str):
        fields["routed_experts"] = _decode_array("routed_experts", encoded)
    path = TokenPath(record[kind], id=name, **fields)
    for other in record.keys() - {kind, *per_token}:  # a misspelt loss_mask would train on the prompt
        value = record[other]
        if isinstance(value, list) and len(value) == len(path) and isinstance(value[0], int | float):
            raise UserError(
                f"{other}: a list with one number per token, but no field of this name is read; "
                f"expected one of {', '.join(per_token)}"
            )
    return path


def _decode_array(field: str, encoded: str) -> np.ndarray:
    """Returns the array that ``numpy.save`` wrote and base64 encoded."""
    try:
        content = io.BytesIO(base64.b64decode(encoded, validate=True))
        return np.lib.format.read_array(content, allow_pickle=False)
    except (binascii.Error, ValueError, EOFError) as error:
        raise UserError(f"{field}: expected base64 of a .npy file of integers: {error}") from None


@contextmanager
def _errors_at(place: Place) -> Iterator[None]:
    """Puts the place in front of the messages of UserErrors."""
    try:
        yield
    except UserError as error:
        message = str(error).removeprefix(f"path {place}: ")  # a path without an id has its place as id
        raise UserError(f"{place}: {message}") from None
