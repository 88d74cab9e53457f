"""TraceReader: the base class of readers of rollouts with token ids, and what they share.

A compaction or a sub-agent branches from the conversation before it. Each branch (verifiers) or model call
(the others) becomes a path of one rollout; the tree holds what they share once.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import Any

from titan_tree.data.readers import Place, Record, Source
from titan_tree.data.readers.row_reader import RowReader, expect

NO_TOKENS = "no token ids; record the rollouts with a client that returns them"


class TraceReader(RowReader):
    """Reads a format in which each row is a rollout. Rollouts of one task may be anywhere in the file.

    The file is held in memory, because rollouts are written in the order in which they end.
    """

    def records(self, source: Source) -> Iterator[tuple[Place, Record]]:
        groups: dict[object, list[tuple[Place, Record]]] = {}
        for place, record in super().records(source):
            if record["trajectories"]:  # a rollout that is not trained has none
                name = record.get("group_id")
                groups.setdefault(place if name is None else ("group", str(name)), []).append((place, record))
        for members in groups.values():
            yield from members

    def convert(self, row: Record) -> Record:
        trajectories = self.trajectories(row)
        for trajectory in trajectories:
            trajectory.setdefault("rollout_id", self.rollout_id(row))
        return self.task(row) | {"trajectories": trajectories}

    @abstractmethod
    def rollout_id(self, row: Record) -> object:
        """Returns the name of the rollout in its group."""

    @abstractmethod
    def trajectories(self, row: Record) -> list[Record]:
        """Returns the paths of a rollout in titan_tree's schema; none if it is not trained."""

    @abstractmethod
    def task(self, row: Record) -> Record:
        """Returns the other fields of the record, and those of the row that are not known."""


def objects_in(value: object, where: str) -> list[Record]:
    """Returns the value. Raises UserError if it is no list of objects."""
    items = expect(value, list, where, "a list")
    return [expect(item, dict, f"{where}[{index}]", "an object") for index, item in enumerate(items)]


def model_call(prompt: list[Any], ids: list[Any], logprobs: list[Any] | None, reward: object) -> Record:
    """Returns a model call as a path: its prompt is context, and the ids that it generated are trained."""
    record = {"tokens": prompt + ids, "loss_mask": [0] * len(prompt) + [1] * len(ids), "reward": reward}
    if logprobs is not None:
        record["rollout_logprobs"] = [None] * len(prompt) + logprobs
    return record
