"""Sessions of coding agents as they are stored on disk: the parts that their readers share.

A session is a tree of events. An edited or retried message and turns that were taken back are forks, a
sub-agent has a root of its own, and so has the context after a compaction. The session becomes one record,
whose trajectories are the conversations from each root to each leaf. An answer that several conversations
contain is trained in the first of them, and is context in the others.

None of these layouts is documented by its agent. They are known from public notes and from code that reads
such files, and they change between versions. What carries no message is counted in ``Source.skipped``. Each
reader lists the kinds of events that cannot change a prompt, and the report names all others.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from titan_tree.data.readers import Reader, Record, Source
from titan_tree.data.readers.chat import Message
from titan_tree.data.readers.containers import json_objects
from titan_tree.data.readers.row_reader import warn_once
from titan_tree.errors import UserError

IMAGES = (
    "images became the text [image] or [document]; the model saw them, but they are not read from sessions"
)
MEDIA = {"image": "image", "input_image": "image", "image_url": "image", "document": "document"}
MAY_MATTER = (
    "{}: this kind of event is left out, and it is not known whether it changed what later answers read; "
    "check them with titan-tree inspect --show, or remove the file"
)
ORPHANED = (
    "some events name a parent that the file lacks, so what the model read before "
    "them is missing; check them with titan-tree inspect --show, or remove the file"
)
FORKED = "this session continues a copy of {}; if both files are in the data, the copied answers count twice"


@dataclass(eq=False)
class Event:
    """What an event adds to a conversation.

    Attributes:
        parent: the event before it; None at a root.
        messages: the messages that it adds.
        prompt_tokens: tokens of the prompt of its answer, as the API counted them; None if not known.
    """

    parent: Event | None
    messages: list[Message] = field(default_factory=list)
    prompt_tokens: int | None = None

    @property
    def has_assistant(self) -> bool:
        return any(message["role"] == "assistant" for message in self.messages)

    @property
    def is_answer(self) -> bool:
        """Whether it has something to train. Empty answers and those that a compaction keeps do not."""
        return any(m["role"] == "assistant" and m.get("weight") != 0 and _has_text(m) for m in self.messages)


class SessionReader(Reader):
    """Reads the JSON Lines of one session. Subclasses recognize rows and make the tree of their events."""

    @abstractmethod
    def events(self, rows: Iterator[tuple[str, Record]], source: Source) -> list[Event]:
        """Returns the events of the session. A parent precedes its children.

        A broken row goes to ``source.skip_broken``, and a row without a message is counted in
        ``source.skipped``.
        """

    def records(self, source: Source) -> Iterator[tuple[str, Record]]:
        with source.open() as file:
            events = self.events(json_objects(file, source.path, source.skip_broken), source)
        yield source.path, session_record(source, Path(source.path).stem, events)


def session_record(source: Source, name: str, events: Sequence[Event]) -> Record:
    """Returns the record of a session. Messages that no answer follows are counted in ``source.skipped``.

    Raises:
        UserError: the session has no answer of a model.
    """
    trajectories = [
        {"id": str(number), "rollout_id": name, "prompt_tokens": prompt_tokens, "messages": messages}
        for number, (prompt_tokens, messages) in enumerate(_conversations(source, events), start=1)
    ]
    if not trajectories:
        raise UserError(f"{source.path}: expected an answer of a model in the session; remove the file")
    return {"id": name, "trajectories": trajectories}


def _conversations(source: Source, events: Sequence[Event]) -> Iterator[tuple[int | None, list[Message]]]:
    """Yields the conversation that ends with each answer that no other answer follows, in file order.

    Each comes with the prompt tokens of its first answer, if they are known.
    """
    followed, used = set[Event](), set[Event]()  # answers that another one follows; events of conversations
    for event in events:
        if event.is_answer:
            before = event.parent
            while before is not None and before not in used:
                used.add(before)
                if before.is_answer:
                    followed.add(before)
                before = before.parent
    trained = set[Event]()
    for leaf in events:
        if not leaf.is_answer or leaf in followed:
            continue
        used.add(leaf)
        path: list[Event] = []
        event_above: Event | None = leaf
        while event_above is not None:
            path.append(event_above)
            event_above = event_above.parent
        path.reverse()
        first = next(event for event in path if event.has_assistant)
        messages = [
            {**message, "weight": 0} if event in trained and message["role"] == "assistant" else message
            for event in path
            for message in event.messages
        ]
        trained.update(event for event in path if event.is_answer)
        yield first.prompt_tokens, _finished(messages)
    if unused := sum(1 for event in events if event.messages and event not in used):
        source.skipped["message without an answer"] += unused


def _finished(messages: list[Message]) -> list[Message]:
    """Returns the messages with a mark on each answer that another answer follows, and weight 0 if empty."""
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        extra: Message = {}
        if messages[index + 1 : index + 2] and messages[index + 1]["role"] == "assistant":
            extra = {} if message.get("finish_reason") else {"finish_reason": "stop"}
        if not _has_text(message):
            extra["weight"] = 0
        if extra:
            messages[index] = {**message, **extra}
    return messages


def _has_text(message: Message) -> bool:
    return any(message.get(name) for name in ("content", "reasoning_content", "tool_calls"))


def leave_out(source: Source, kind: object, neutral: Collection[str], what: str = "") -> None:
    """Counts an event without a message, and warns of a kind that is not known to be neutral.

    Args:
        kind: the name that the file gives to the event.
        neutral: the kinds that cannot change a prompt.
        what: a word before the kind in the report, such as "item ".
    """
    name = f"{what}{as_text(kind)[:40]}"
    source.skipped[name] += 1
    if kind not in neutral:
        warn_once(source.path, MAY_MATTER.format(name))


def orphaned(source: Source) -> None:
    """Counts an event whose parent the file lacks, and warns of it."""
    source.skipped["missing parent"] += 1
    warn_once(source.path, ORPHANED)


def context(messages: Sequence[Message]) -> list[Message]:
    """Returns messages of which nothing is trained, such as those that a compaction keeps."""
    return [{**m, "weight": 0} if m["role"] == "assistant" else m for m in messages]


def without_media(content: object, source: Source) -> object:
    """Returns a message's content with a text in place of each image and document, also inside results."""
    if not isinstance(content, list):
        return content
    blocks: list[object] = []
    for block in content:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(block, dict) and isinstance(kind, str) and kind in MEDIA:
            warn_once(source.path, IMAGES)
            source.skipped[MEDIA[kind]] += 1
            block = {"type": "text", "text": f"[{MEDIA[kind]}]"}
        elif isinstance(block, dict) and isinstance(block.get("content"), list):
            block = {**block, "content": without_media(block["content"], source)}
        blocks.append(block)
    return blocks


def as_text(value: object) -> str:
    """Returns a text as it is, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def count_tokens(usage: object, *names: str) -> int | None:
    """Returns the sum of these counts of an API's usage, or None if it has none of them."""
    counts = (
        [usage[name] for name in names if type(usage.get(name)) is int] if isinstance(usage, dict) else []
    )
    return sum(counts) if counts else None
