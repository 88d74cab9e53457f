"""How records form groups of trajectories. data/schema.py describes the fields of records.

Grouping parses no messages and tokenizes nothing, so a resumed run skips groups at low cost.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

from titan_tree.data.readers import Place, Record
from titan_tree.data.schema import (
    CONVERSATION_FIELDS,
    INHERITED_FIELDS,
    TOKEN_FIELDS,
    TRAJECTORY_KINDS,
    check_record,
    present_fields,
    record_name,
)
from titan_tree.errors import UserError, errors_at, shorten


@dataclass(frozen=True, slots=True)
class Group:
    """The records of one group, parsed but not tokenized."""

    id: str
    records: list[tuple[Place, Record]]


class Trajectory(NamedTuple):
    """One conversation or one list of token ids of a group: a record, or an entry of a task's trajectories.

    It becomes a training sample for each of its trained turns, or one for a list of token ids.
    """

    place: Place  # for error messages
    name: str  # the group's id; trajectories and records with a group_id append their own
    record: Record


def group_records(records: Iterable[tuple[Place, Record]], first_places: dict[str, Place]) -> Iterator[Group]:
    """Joins adjacent records of a file that have the same group_id.

    Args:
        records: the records of one file; a group does not continue in the next file.
        first_places: the places where the groups of earlier files began, by group_id. The function adds
            those of this file.

    Raises:
        UserError: the records of a group are not adjacent. Two trees would compute their shared tokens twice.
    """
    for (is_named, name), run in groupby(records, key=lambda placed: _group_key(*placed)):
        members = list(run)
        place, record = members[0]
        if not is_named:
            yield Group(_id(place, record, default=place), members)
            continue
        if name in first_places:
            raise UserError(
                f"{place}: group {name!r} appeared before, at {first_places[name]}; expected the records "
                "of a group next to each other in one file: sort them by group_id"
            )
        first_places[name] = place
        yield Group(name, members)


def group_trajectories(group: Group, ignored: Set[str] = frozenset("*")) -> Iterator[Trajectory]:
    """Yields the trajectories of a group in file order.

    Args:
        ignored: see ``check_record``, which checks the fields of tasks. By default, no field is refused.

    Raises:
        UserError: malformed trajectories.
    """
    for place, record in group.records:
        if record.get("trajectories") is not None:
            yield from _trajectories(group.id, place, record, ignored)
            continue
        is_named, _ = _group_key(place, record)
        line = place.rpartition(":")[2]
        yield Trajectory(place, f"{group.id}/{_id(place, record, line)}" if is_named else group.id, record)


def holds_conversations(group: Group) -> bool:
    """Returns whether some trajectory of the group has messages, which only a tokenizer can read."""
    return any(trajectory.record.get("messages") is not None for trajectory in group_trajectories(group))


def _group_key(place: Place, record: Record) -> tuple[bool, str]:
    """Returns (whether the record names its group, the name). Without a name, the place is the name."""
    with errors_at(place):
        name = record_name(record, "group_id")
    return (False, place) if name is None else (True, name)


def _id(place: Place, record: Record, default: str) -> str:
    with errors_at(place):
        name = record_name(record, "id")
    return default if name is None else name


def _trajectories(group_id: str, place: Place, record: Record, ignored: Set[str]) -> Iterator[Trajectory]:
    trajectories = record["trajectories"]
    if not isinstance(trajectories, list) or not trajectories:
        raise UserError(f"{place}: trajectories: expected a non-empty list, got {shorten(trajectories)}")
    for name in present_fields(record, (*TRAJECTORY_KINDS, *TOKEN_FIELDS)):
        raise UserError(
            f"{place}: {name}: not allowed together with trajectories; move it into one of the trajectories"
        )
    with errors_at(place):
        check_record(record, "a task", ignored)
    inherited = present_fields(record, INHERITED_FIELDS)
    for index, trajectory in enumerate(trajectories):
        trajectory_place = f"{place}: trajectories[{index}]"
        if not isinstance(trajectory, dict):
            raise UserError(f"{trajectory_place}: expected a JSON object, got {type(trajectory).__name__}")
        fields = present_fields(trajectory, trajectory)
        if "group_id" in fields:
            raise UserError(
                f"{trajectory_place}: group_id: not read here; a task is one group, so set it on the task"
            )
        others = () if "messages" in fields else CONVERSATION_FIELDS
        passed_on = {name: value for name, value in inherited.items() if name not in others}
        name = f"{group_id}/{_id(trajectory_place, trajectory, str(index))}"
        yield Trajectory(trajectory_place, name, passed_on | fields)
