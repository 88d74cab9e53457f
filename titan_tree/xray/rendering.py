"""Groups of records -> paths, and the kind of message that each token belongs to.

Without a tokenizer, tokens are bytes. Each conversation is one path: the whole trajectory, up to its last
answer. A byte that UTF-8 does not use begins each message, another one ends it, and a third one stands for
each token of an image. No template runs, so this is fast. With a tokenizer, the chat template renders what
training would read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np

from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.components.tree_tokenizer.endings import ending
from titan_tree.components.tree_tokenizer.messages import normalize_messages
from titan_tree.data.data_files import Group, Trajectory, group_trajectories, holds_conversations
from titan_tree.data.images import Loaded, with_loaded_images
from titan_tree.data.readers import Record
from titan_tree.data.readers.row_reader import file_of
from titan_tree.data.sample_reader import SampleReader
from titan_tree.data.schema import present_fields
from titan_tree.errors import UserError, errors_at
from titan_tree.tree.images import Image
from titan_tree.tree.paths import TokenPath

KINDS = ("system", "tools", "user", "assistant", "thought", "tool", "other", "image")
SYSTEM, TOOLS, USER, ASSISTANT, THOUGHT, TOOL, OTHER, IMAGE = range(len(KINDS))
ROLES = {"system": SYSTEM, "user": USER, "assistant": ASSISTANT, "tool": TOOL}
BEGINS = [bytes([0xF8 + kind]) for kind in range(OTHER)]  # of messages; UTF-8 has no byte above 0xF7
ENDS = b"\xff"
IMAGE_BYTE = b"\xfe"  # of which an image has as many as tokens
MOST_BYTES = 1 << 28  # of the paths of one group; its tree takes about 12 times as much memory
NEEDLE = 32  # characters by which a message is found in a rendered text
SETTINGS = ("weight", "temperature")  # of a record, for its paths


class RenderedPath(NamedTuple):
    """A path, and what is known of it.

    Attributes:
        path: the tokens, and which of them are trained.
        kinds: [T] int8: the index in ``KINDS`` of each token; None if it is found later, see ``find_kinds``.
        trajectory: the trajectory that the path is a sample of.
    """

    path: TokenPath
    kinds: np.ndarray | None
    trajectory: Trajectory


class Renderer:
    """Renders groups of records.

    Args:
        reader: makes the paths of token ids, and those of conversations if it has a tokenizer.

    Attributes:
        tokenizer: the tokenizer of ``reader``. None: conversations are rendered as bytes.
    """

    def __init__(self, reader: SampleReader) -> None:
        self._reader = reader
        self.tokenizer = reader.tokenizer
        self.has_bytes = False  # whether paths are bytes
        self._has_ids = False  # whether they are token ids, without a tokenizer

    @property
    def header(self) -> int:
        """The number of tokens that begin every conversation: the byte before the first message."""
        return int(self.has_bytes)

    def paths(self, group: Group) -> list[RenderedPath]:
        """Returns the paths of a group. Trajectories without an answer have none.

        Raises:
            UserError: a malformed record; or token ids among conversations that are rendered as bytes.
        """
        is_bytes = self.tokenizer is None and holds_conversations(group)
        if self._has_ids if is_bytes else self.has_bytes:
            raise UserError(
                f"{group.records[0][0]}: bytes of conversations and token ids do not add up; "
                "give --tokenizer, or read them one after the other"
            )
        if not is_bytes:
            self._has_ids = self.tokenizer is None
            return [
                RenderedPath(path, None, trajectory)
                for trajectory, paths in self._reader.paths_by_trajectory(group)
                for path in paths
            ]
        self.has_bytes = True
        rendered: list[RenderedPath] = []
        size = 0
        loaded: Loaded = {}
        for trajectory in group_trajectories(group, self._reader.fields):
            with errors_at(trajectory.place):
                paths = byte_path(trajectory, loaded)
                size += sum(len(item.path) for item in paths)
                if size > MOST_BYTES:
                    raise UserError(
                        f"the conversations of this group have more than {MOST_BYTES:,} bytes together; "
                        "split it"
                    )
                rendered += paths
        return rendered

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of tokens of conversations, or the ids of others."""
        if self.tokenizer is not None:
            return self.tokenizer.decode(tokens)
        return decode_bytes(tokens) if self.has_bytes else " ".join(map(str, tokens))


def byte_path(trajectory: Trajectory, loaded: Loaded) -> list[RenderedPath]:
    """Returns the path of a conversation in bytes; none if it has no answer.

    Args:
        loaded: images that other trajectories have read; it grows.

    Raises:
        UserError: the record is no valid conversation.
    """
    record = trajectory.record
    if record.get("messages") is None:
        raise UserError("expected messages, as in the other trajectories of the group; give a tokenizer")
    folder = os.path.dirname(file_of(trajectory.place))
    messages = normalize_messages(with_loaded_images(record["messages"], folder, loaded), "messages")
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        return []
    only_last = record.get("turns") == "last"
    parts: list[tuple[bytes, int, bool]] = []  # text, kind, whether it is trained
    images: list[tuple[int, Image]] = []  # with the numbers of their parts
    if record.get("tools"):
        text = json.dumps(record["tools"], ensure_ascii=False)
        parts.append((BEGINS[TOOLS] + text.encode() + ENDS, TOOLS, False))
    continues = False  # whether the answer before continues in this message
    for message in messages[: answers[-1] + 1]:
        kind = ROLES[message["role"]]
        begin = b"" if continues else BEGINS[kind]
        continues = False
        if kind != ASSISTANT:
            parts.append((begin, kind, False))
            for part in _parts(message):
                if (image := part.get("image")) is None:
                    parts.append((part["text"].encode(), kind, False))
                else:
                    images.append((len(parts), image))
                    parts.append((IMAGE_BYTE * len(image), kind, False))
            parts.append((ENDS, kind, False))
            continue
        how = ending(message.get("finish_reason"), "finish_reason")
        is_trained = message.get("weight", 1) != 0 and not (
            only_last and message is not messages[answers[-1]]
        )
        is_trained = is_trained and (how != "filtered" or message.get("weight") is not None)
        thought = message.get("reasoning_content") or ""
        calls = "".join(f"\n{_call(call)}" for call in message.get("tool_calls", ()))
        prefill = (message.get("prefill") or "").encode()
        parts += [
            (begin + prefill, ASSISTANT, False),
            (thought.encode(), THOUGHT, is_trained),
            (message["content"].encode()[len(prefill) :] + calls.encode(), ASSISTANT, is_trained),
        ]
        continues = how == "continued"
        if not continues:
            parts.append((ENDS, ASSISTANT, is_trained and how == "finished"))
    lengths = [len(text) for text, _, _ in parts]
    tokens = np.frombuffer(b"".join(text for text, _, _ in parts), np.uint8).astype(np.int32)
    trained = np.repeat(np.array([part[2] for part in parts], np.float32), lengths)
    kinds = np.repeat(np.array([part[1] for part in parts], np.int8), lengths)
    starts = np.cumsum([0, *lengths]).tolist()
    placed = [(starts[number], image) for number, image in images]
    path = TokenPath(tokens, trained, id=trajectory.name, images=placed, **present_fields(record, SETTINGS))
    return [RenderedPath(path, kinds, trajectory)]


def _parts(message: Record) -> list[Record]:
    """Returns the texts and images of a message."""
    content = message["content"]
    return [{"text": content}] if isinstance(content, str) else content


def _call(call: Record) -> str:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return f"{function['name']} {text}"


def decode_bytes(tokens: Iterable[int]) -> str:
    """Returns the text of a path in bytes. The beginning of each message shows its kind."""
    content = bytes(np.asarray(tokens, np.uint8))
    for kind, begin in enumerate(BEGINS):
        content = content.replace(begin, f"[{KINDS[kind]}] ".encode())
    return content.replace(ENDS, b"\n").decode(errors="ignore")


class KindFinder:
    """Finds the messages of conversations in their rendered tokens.

    The text of each message is searched for behind the one before it. Tokens between two messages count with
    the first one. All trained tokens are of an answer.

    Args:
        tokenizer: what the tokens are decoded with. None: the tokens are ids of unknown texts.
    """

    def __init__(self, tokenizer: TreeTokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}  # by token

    def kinds(self, rendered: RenderedPath) -> np.ndarray:
        """Returns [T] int8: the index in ``KINDS`` of the message that each token belongs to."""
        if rendered.kinds is not None:
            return rendered.kinds
        path, record = rendered.path, rendered.trajectory.record
        kinds = np.full(len(path), OTHER, np.int8)
        if self._tokenizer is not None and record.get("messages") is not None:
            self._fill(kinds, path.tokens, _needles(record))
        kinds[(path.loss_mask > 0) & (kinds != THOUGHT)] = ASSISTANT
        return kinds

    def _fill(self, kinds: np.ndarray, tokens: np.ndarray, needles: Sequence[tuple[str, int]]) -> None:
        assert self._tokenizer is not None
        for token in np.unique(tokens).tolist():
            if token not in self._texts:
                self._texts[token] = self._tokenizer.decode([token])
        texts = [self._texts[token] for token in tokens.tolist()]
        ends = np.cumsum([len(text) for text in texts])
        text, at, before = "".join(texts), 0, None
        for needle, kind in needles:
            found = text.find(needle, at)
            if found < 0:
                continue
            first = int(np.searchsorted(ends, found, side="right"))
            if before is None:
                kinds[:first] = kind
            kinds[first:] = kind
            at, before = found + len(needle), kind


def _tool_name(tool: object) -> object:
    """Returns the name in a tool's schema, or None for a schema of another form."""
    while isinstance(tool, dict) and "name" not in tool:
        tool = tool.get("function")
    return tool["name"] if isinstance(tool, dict) else None


def _needles(record: Record) -> list[tuple[str, int]]:
    """Returns how the messages of a conversation begin, each with its kind."""
    needles = []
    messages = normalize_messages(record["messages"], "messages")
    for index, message in enumerate(messages):
        kind = ROLES[message["role"]]
        for text, part in (
            (message.get("reasoning_content"), THOUGHT),
            *(("<|vision_start|>" if "image" in part else part["text"], kind) for part in _parts(message)),
            *((call["function"]["name"], kind) for call in message.get("tool_calls", ())),
        ):
            if text and text.strip():
                needles.append((text.strip()[:NEEDLE], part))
        if index == 0:
            needles += [(f'"{name}"', TOOLS) for name in map(_tool_name, record.get("tools") or ()) if name]
    return needles
