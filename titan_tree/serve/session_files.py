"""SessionFiles: sessions as files, so that a server that was killed loses no turn.

``calls.jsonl`` gets a line for each turn before the client gets it, and a line for each session that ended.
``rows.jsonl`` then gets the rows of that session: token ids that ``titan-tree train`` and others read.
Both hold token ids, images and answers, but no header, key or body of a request.
"""

from __future__ import annotations

import json
import os
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from titan_tree.data.images import png_url, record_images
from titan_tree.errors import UserError
from titan_tree.serve.request import Answer
from titan_tree.serve.session import Call, Session
from titan_tree.tree.context import Completion, Context

CALLS, ROWS = "calls.jsonl", "rows.jsonl"
Record = dict[str, Any]


class SessionFiles:
    """Writes sessions into a folder, and reads those that did not end.

    Args:
        folder: it may hold the files of an earlier server.
        make: makes an empty session.

    Attributes:
        sessions: the sessions that did not end, by name, each with its answers by digest of the request.

    Raises:
        UserError: a file in the folder is not that of a server, or lacks a call that another one continues.
    """

    def __init__(self, folder: Path, make: Callable[[], Session]) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._calls, self._rows = folder / CALLS, folder / ROWS
        self._calls.touch()
        self._rows.touch()
        self.sessions: dict[str, tuple[Session, dict[str, Answer]]] = {}
        ids = {row["id"]: row["rollout_id"] for row in _records(self._rows, {"id", "rollout_id"})}
        self._numbers = Counter(ids.values())  # of rows, by the session's name, which may come again
        last: list[Any] = []
        calls: dict[str, dict[int | None, Call]] = defaultdict(dict)  # of open sessions, by number
        for line, record in enumerate(_records(self._calls, {"session"}), 1):
            name = record["session"]
            session, answers = self.sessions.setdefault(name, (make(), {}))
            if "turn" not in record:
                del self.sessions[name]
                calls.pop(name, None)
                last = [session, name, record["reward"], record["first_row"]]
                continue
            if (parent := calls[name].get(record["parent"])) is None and record["parent"] is not None:
                raise UserError(
                    f"{self._calls}:{line}: expected a call after call {record['parent']} of session {name}, "
                    "which is missing; remove the lines of this session, or choose another folder"
                )
            answer = answers[record["digest"]] = Answer(**record["answer"])
            calls[name][record["number"]] = _restored(session, record, parent, answer)
        if last:  # the server may have been killed before it wrote all rows of this session
            self._write([], [row for row in rows(*last) if row["id"] not in ids])

    def add(self, name: str, call: Call, digest: str) -> None:
        """Writes a turn."""
        assert call.turn is not None
        assert call.answer is not None
        start = 0 if call.parent is None else len(call.parent.tokens)
        rest, turn, kept = call.prompt.part(start, len(call.prompt)), call.turn, call.turn.sampling_mask
        record = {
            "session": name,
            "number": call.number,
            "parent": None if call.parent is None else call.parent.number,
            "fork": call.fork,
            "roles": call.roles,
            "keys": [key.hex() for key in call.keys],
            "read": list(rest),
            "images": _images(rest),
            "turn": turn.tokens,
            "logprobs": turn.logprobs,
            "experts": None if turn.experts is None else turn.experts.tolist(),
            "sampling_mask": None if kept is None else [list(map(int, ids)) for ids in kept],
            "digest": digest,
            "answer": vars(call.answer),
        }
        self._write([record], [])

    def end(self, name: str, session: Session, reward: float | None) -> None:
        """Writes the rows of a session."""
        first = self._numbers[name]
        end = {"session": name, "reward": reward, "first_row": first}
        self._write([end], rows(session, name, reward, first))

    def _write(self, calls: list[Record], rows: list[Record]) -> None:
        """Appends lines to both files. If that fails, such as on a full disk, none of them stays."""
        files = [(path, records) for path, records in ((self._calls, calls), (self._rows, rows)) if records]
        sizes = [path.stat().st_size for path, _ in files]
        try:
            for path, records in files:
                with open(path, "a") as file:
                    file.write("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records))
                    file.flush()
                    os.fsync(file.fileno())
        except OSError:
            for (path, _), size in zip(files, sizes, strict=True):
                os.truncate(path, size)
            raise
        self._numbers.update(row["rollout_id"] for row in rows)


def rows(session: Session, name: str, reward: float | None = None, first: int = 0) -> list[Record]:
    """Returns the paths of a session as records of token ids.

    Args:
        name: the rollout's. What precedes its last "." names the group; without ".", all of it.
        first: number of the first row, with which its id ends.
    """
    group = name.rpartition(".")[0] or name
    records = []
    for index, path in enumerate(session.paths(), first):
        record: Record = {
            "id": f"{name}/{index}",
            "group_id": group,
            "rollout_id": name,
            "reward": reward,
            "finish_reason": "length" if path.is_cut_off else "stop",
            "tokens": list(path.tokens),
            "loss_mask": path.mask,
            "rollout_logprobs": [x if m else None for x, m in zip(path.logprobs, path.mask, strict=True)],
        }
        if path.experts is not None:
            record["routed_experts"] = path.experts.tolist()
        if any(len(ids) for ids in path.kept):
            record["sampling_mask"] = [list(map(int, ids)) if len(ids) else None for ids in path.kept]
        if path.tokens.images:
            record["images"] = _images(path.tokens)
        records.append(record)
    return records


def _images(tokens: Context) -> list[Record]:
    return [{"start": start, "image": png_url(image)} for start, image in tokens.images]


def _restored(session: Session, record: Record, parent: Call | None, answer: Answer) -> Call:
    read = Context(record["read"], tuple(record_images(record["images"], "", {}, [])))
    experts = None if record["experts"] is None else np.array(record["experts"], np.int16)
    call = Call(
        number=record["number"],
        prompt=read if parent is None else parent.tokens.extended(read),
        parent=parent,
        fork=record["fork"],
        roles=record["roles"],
        keys=list(map(bytes.fromhex, record["keys"])),
        turn=Completion(record["turn"], record["logprobs"], experts, record["sampling_mask"]),
        answer=answer,
    )
    session.calls.append(call)
    session.index(call)
    return call


def _records(file: Path, fields: set[str]) -> list[Record]:
    """Returns the records of a file, which have these fields, and removes a last line that is not whole."""
    content = file.read_bytes()
    size = content.rfind(b"\n") + 1
    if size < len(content):  # the server was killed while it wrote
        os.truncate(file, size)
    try:
        records = [json.loads(line) for line in content[:size].splitlines()]
        if all(fields <= record.keys() for record in records):
            return records
    except (ValueError, AttributeError):
        pass
    raise UserError(f"{file}: expected a file of titan-tree serve; choose another folder")
