"""The record schema: which fields a record has, and how records form groups of samples.

A record is one sample, or one task with several samples. Fields marked ? are optional:

    {"messages": [...], "tools"?, "group_id"?, "id"?, "weight"?, "advantage"?}              a conversation
    {"tokens" or "input_ids": [...], "loss_mask"?, "old_logprobs"?, "ref_logprobs"?,
     "routed_experts"?, "group_id"?, "id"?, "weight"?, "advantage"?}                        token ids
    {"trajectories": [samples of either kind], "tools"?, "group_id"?, "id"?, ...}           a task

- ``group_id``: adjacent records with the same value form one group. A record without it is its own group.
- ``id``: a name for error messages and reports.
- ``tools``, ``weight``, ``advantage`` of a task: defaults for trajectories that do not set their own.
- ``reward`` of each sample: read only if data.advantage = "group" (data/advantages.py).
- ``routed_experts``: the experts that the sampling engine chose, see ``TokenPath``. A nested list [tokens]
  [MoE layers][experts per token], or a string: the same integers as ``numpy.save`` writes them, in base64.
  Trailing tokens may be missing, such as the last one, which no engine reads.
- Other fields (task, source, ...) are the user's own and are ignored.

Grouping parses no messages and tokenizes nothing, so a resumed run skips groups at low cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from titan_tree.data.readers import Place, Record
from titan_tree.errors import UserError

SAMPLE_KINDS = ("messages", "tokens", "input_ids")  # a sample has exactly one of these fields
TOKEN_FIELDS = ("loss_mask", "old_logprobs", "ref_logprobs", "routed_experts")  # only beside token ids
INHERITED_FIELDS = ("tools", "weight", "advantage")  # a task passes them on to its trajectories


@dataclass(frozen=True, slots=True)
class Group:
    """The records of one group, parsed but not tokenized."""

    id: str
    records: list[tuple[Place, Record]]


class Sample(NamedTuple):
    """One conversation or one list of token ids, from a group."""

    place: Place  # for error messages
    name: str  # the group's id; trajectories and records with a group_id append their own
    record: Record


def group_records(files: Iterable[Iterable[tuple[Place, Record]]]) -> Iterator[Group]:
    """Joins adjacent records that have the same group_id. A group does not continue in the next file.

    Args:
        files: the records of each file.

    Raises:
        UserError: the records of a group are not adjacent. Two trees would compute their shared tokens twice.
    """
    first_places: dict[str, Place] = {}
    for records in files:
        for (is_named, name), run in groupby(records, key=lambda placed: _group_key(*placed)):
            members = list(run)
            place, record = members[0]
            if not is_named:
                yield Group(str(record.get("id", place)), members)
                continue
            if name in first_places:
                raise UserError(
                    f"{place}: group {name!r} appeared before, at {first_places[name]}; expected the records "
                    "of a group next to each other in one file: sort them by group_id"
                )
            first_places[name] = place
            yield Group(name, members)


def group_samples(group: Group) -> Iterator[Sample]:
    """Yields the samples of a group in file order; the trajectories of a task are samples.

    Raises:
        UserError: malformed trajectories.
    """
    for place, record in group.records:
        if "trajectories" in record:
            yield from _trajectories(group.id, place, record)
            continue
        is_named, _ = _group_key(place, record)
        line = place.rpartition(":")[2]
        yield Sample(place, f"{group.id}/{record.get('id', line)}" if is_named else group.id, record)


def holds_conversations(group: Group) -> bool:
    """Returns whether some sample of the group has messages, which only a tokenizer can read."""
    return any("messages" in sample.record for sample in group_samples(group))


def present_fields(record: Record, names: Iterable[str]) -> Record:
    """Returns the named fields that the record has; null counts as missing."""
    return {name: record[name] for name in names if record.get(name) is not None}


def refuse_fields(record: Record, names: Iterable[str], reason: str) -> None:
    """Raises UserError if the record has one of the named fields, which would be dropped silently."""
    for name in present_fields(record, names):
        raise UserError(f"{name}: {reason}")


def _group_key(place: Place, record: Record) -> tuple[bool, str]:
    """Returns (whether the record names its group, the name). Without a name, the place is the name."""
    name = record.get("group_id")
    if name is None:
        return False, place
    if isinstance(name, bool) or not isinstance(name, str | int):
        raise UserError(f"{place}: group_id: expected a string or an integer, got {name!r}")
    return True, str(name)


def _trajectories(group_id: str, place: Place, record: Record) -> Iterator[Sample]:
    trajectories = record["trajectories"]
    if not isinstance(trajectories, list) or not trajectories:
        raise UserError(f"{place}: trajectories: expected a non-empty list, got {trajectories!r:.40}")
    for name in present_fields(record, (*SAMPLE_KINDS, *TOKEN_FIELDS)):
        raise UserError(
            f"{place}: {name}: not allowed together with trajectories; move it into one of the trajectories"
        )
    inherited = present_fields(record, INHERITED_FIELDS)
    for index, trajectory in enumerate(trajectories):
        here = f"{place}: trajectories[{index}]"
        if not isinstance(trajectory, dict):
            raise UserError(f"{here}: expected a JSON object, got {type(trajectory).__name__}")
        own = present_fields(trajectory, trajectory)
        yield Sample(here, f"{group_id}/{trajectory.get('id', index)}", inherited | own)
