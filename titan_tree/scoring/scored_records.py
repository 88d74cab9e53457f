"""Records of token ids that hold all fields of a path: ``titan-tree score`` writes them for training."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

import numpy as np

from titan_tree.data.data_files import Group, Trajectory
from titan_tree.data.sample_reader import SampleReader
from titan_tree.data.schema import record_name
from titan_tree.data.token_store import STORED
from titan_tree.errors import UserError
from titan_tree.tree.path_fields import TokenTargets
from titan_tree.tree.paths import LOGPROBS, TokenPath

PlacedPath = tuple[TokenPath, dict[str, object]]  # a path, and the fields that only its record has


def placed_paths(reader: SampleReader, group: Group) -> list[PlacedPath]:
    """Returns the paths of a group, each with "reward", "rollout_id" and "images" of its record, if any.

    The paths of a trajectory with several paths get a rollout_id, because records of their own would be
    rollouts of their own.

    Raises:
        UserError: see ``SampleReader.paths``; or a token store that does not say which paths are a rollout,
            or which files its images were.
    """
    place, first = group.records[0]
    if STORED in first:
        paths = reader.paths(group)
        if any(path.rollout_share not in (0, 1) for path in paths):
            raise UserError(
                f"{place}: a token store does not say which samples are one rollout, and these have several; "
                "score the sources of the store"
            )
        if any(path.images for path in paths):
            raise UserError(
                f"{place}: images: a token store does not name their files; score the sources of the store"
            )
        return [(path, {}) for path in paths]
    trajectories = reader.paths_by_trajectory(group)
    return [
        (path, {name: value for name, value in fields.items() if value is not None})
        for number, (trajectory, paths) in enumerate(trajectories)
        for path in paths
        for fields in (_fields(trajectory, path, f"sample {number}" if len(paths) > 1 else None),)
    ]


def _fields(trajectory: Trajectory, path: TokenPath, default_rollout: str | None) -> dict[str, object]:
    images = [{"start": start, "image": image.source, "hash": image.key} for start, image in path.images]
    return {
        "rollout_id": record_name(trajectory.record, "rollout_id") or default_rollout,
        "reward": trajectory.record.get("reward"),
        "images": images or None,
    }


def named_groups(groups: Iterable[Group]) -> Iterator[tuple[Group, str]]:
    """Yields each group with a name of its own: equal ids of groups would merge in one file."""
    used: set[str] = set()
    for group in groups:
        name, number = group.id, 1
        while name in used:
            number += 1
            name = f"{group.id}#{number}"
        used.add(name)
        yield group, name


def path_record(
    group: Group,
    name: str,
    path: TokenPath,
    fields: Mapping[str, object],
    scores: Mapping[str, np.ndarray],
    targets: TokenTargets | None = None,
) -> str:
    """Returns one line of JSON.

    Args:
        group: the group of the path.
        name: the name of the group, see ``named_groups``.
        path: its id is kept, without the id of the group.
        fields: further fields.
        scores: arrays of numbers [T] by field; NaN becomes null. "routed_experts" is [T, L, k].
        targets: the field teacher_topk. None: that of the path.
    """
    record: dict[str, object] = {"group_id": name, "id": path.id.removeprefix(f"{group.id}/"), **fields}
    if path.id == group.id:  # a record that is a group of its own
        record = {"id": name, **fields}
    record["tokens"] = path.tokens.tolist()
    record["loss_mask"] = _numbers(path.loss_mask)
    if path.weight != 1:
        record["weight"] = path.weight
    if path.temperature != 1:
        record["temperature"] = path.temperature
    if path.policy_version is not None:
        record["policy_version"] = path.policy_version.tolist()
    if path.preference is not None and path.pair is not None:
        record["preference"] = path.preference
        if path.pair != group.id:
            record["pair"] = path.pair.removeprefix(f"{group.id}/")
    if path.sampling_mask is not None:
        record["sampling_mask"] = [ids.tolist() for ids in path.sampling_mask.by_token()]
    if path.teacher is not None:
        record["teacher"] = path.teacher
    if (targets := targets or path.teacher_topk) is not None:
        entries = zip(map(str, targets.ids.tolist()), _numbers(targets.logprobs), strict=True)
        record["teacher_topk"] = [dict(islice(entries, size)) or None for size in targets.sizes.tolist()]
    fields_of_path = {field: getattr(path, field) for field in ("advantage", *LOGPROBS, "routed_experts")}
    values = {field: array for field, array in fields_of_path.items() if array is not None} | dict(scores)
    if "advantage" in values:
        values["advantage"] = np.nan_to_num(values["advantage"])  # the first token's may be anything
    for field, array in values.items():
        record[field] = _base64(array) if field == "routed_experts" else _numbers(array)
    return json.dumps(record, allow_nan=False)


def _numbers(array: np.ndarray) -> list[float | int | None]:
    """Returns float32 values as the shortest numbers that are read back as the same float32."""
    texts = array.astype(np.float32).astype("U32").tolist()
    values = [float(text) if np.isfinite(number) else None for text, number in zip(texts, array, strict=True)]
    return [int(value) if value is not None and value.is_integer() else value for value in values]


def _base64(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array)
    return base64.b64encode(file.getvalue()).decode()
