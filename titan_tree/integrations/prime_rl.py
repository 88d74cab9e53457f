"""Rows of prime-rl: TrainingSamples, or MicroBatches in which samples are packed one after another.

Entry t of every array belongs to token t. docs/frameworks.md lists the fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_tree.errors import UserError
from titan_tree.integrations.samples import array, column, fields_of, required
from titan_tree.tree.paths import TokenPath

PACKED = {"input_ids": "token_ids", "loss_mask": "mask", "inference_logprobs": "logprobs"}  # of a MicroBatch
PER_TOKEN = ("mask", "logprobs", "temperatures", "ref_logprobs", "advantages", "rl_weights")
KNOWN = {"token_ids", "position_ids", "routed_experts", *PER_TOKEN, *PACKED}
LEFT_OUT = {"env_name", "env_names", "sequence_lengths", "seq_lens", "lora_num_tokens", "rewards"}
_IMAGES = "expected text only"
_COMPONENT = "only the component rl of the loss is supported; train the others in a step of their own"
REFUSED = {
    "mm_refs": _IMAGES,
    "mm_kwargs": _IMAGES,
    "mm_token_type_ids": _IMAGES,
    "ce_weights": _COMPONENT,
    "ref_kl_weights": _COMPONENT,
    "sdpo_weights": _COMPONENT,
}


def to_paths(rows: Sequence[Any]) -> list[TokenPath]:
    """Returns one path per TrainingSample, or per sample that is packed in a MicroBatch.

    The reduction "token_mean" averages as prime-rl does. Tokens whose ``rl_weights`` are 0 do not count.
    Other weights multiply the advantage.

    Args:
        rows: TrainingSamples, MicroBatches, or dicts with their fields.
    Raises:
        UserError: a field is unknown, not supported or of the wrong length.
    """
    return [
        path
        for i, row in enumerate(rows)
        for path in _paths(_fields(row, f"row {i}"), f"row {i}", "input_ids" in _names(row))
    ]


def to_rows(rows: Sequence[Any], values: Sequence[Tensor]) -> list[Tensor]:
    """Returns values for every token of each row, as prime-rl's "trainer_logprobs".

    A sample's first token gets 0.

    Args:
        values: [T] for each path of ``to_paths``, such as ``PathScores.logprobs`` of ``score_paths``.
    """
    left, result = list(values), []
    for i, row in enumerate(rows):
        number = len(_starts(_fields(row, f"row {i}"), f"row {i}"))
        samples, left = left[:number], left[number:]
        result.append(torch.cat([part for value in samples for part in (value.new_zeros(1), value[1:])]))
    return result


def _names(row: Any) -> Sequence[str]:
    return list(row) if isinstance(row, Mapping) else dir(row)


def _fields(row: Any, where: str) -> dict[str, Any]:
    """Returns the known fields by the names of a TrainingSample."""
    fields = fields_of(row, where, KNOWN, LEFT_OUT, REFUSED)
    return {PACKED.get(name, name): value for name, value in fields.items()}


def _starts(fields: Mapping[str, Any], where: str) -> np.ndarray:
    """Returns where samples start in a row."""
    number = len(required(fields, "token_ids", where))
    if (positions := column(fields, "position_ids", where, number)) is None:
        return np.zeros(1, np.int64)
    places = array(positions, np.int64)
    (starts,) = (places == 0).nonzero()
    lengths = np.diff([*starts, number])
    if not len(starts) or not np.array_equal(places, np.concatenate([np.arange(n) for n in lengths])):
        raise UserError(f"{where}: position_ids: expected 0, 1, 2, ... for each sample, got something else")
    return starts


def _paths(fields: Mapping[str, Any], where: str, is_packed: bool) -> list[TokenPath]:
    tokens = array(required(fields, "token_ids", where), np.int64)
    number = len(tokens)
    values = {name: column(fields, name, where, number) for name in PER_TOKEN}
    mask = array(required(fields, "mask", where)) != 0
    advantages = None if values["advantages"] is None else array(values["advantages"])
    if values["rl_weights"] is not None:
        weights = array(values["rl_weights"])
        if weights.min() < 0:
            raise UserError(f"{where}: rl_weights: expected numbers >= 0, got {weights.min()}")
        mask &= weights > 0
        advantages = None if advantages is None else advantages * weights
    experts = _experts(fields.get("routed_experts"))
    bounds = [*_starts(fields, where), number]
    paths = []
    for j, (start, end) in enumerate(pairwise(bounds)):
        part, name = slice(start, end), f"{where}.{j}" if is_packed else where
        logprobs = None if values["logprobs"] is None else array(values["logprobs"])[part]
        reference = None if values["ref_logprobs"] is None else array(values["ref_logprobs"])[part]
        paths.append(
            TokenPath(
                tokens[part],
                loss_mask=mask[part],
                advantage=None if advantages is None else advantages[part],
                old_logprobs=logprobs,  # prime-rl's ratios are relative to the sampling engine
                rollout_logprobs=logprobs,
                ref_logprobs=reference,
                routed_experts=None if experts is None else experts[part],
                temperature=_temperature(values["temperatures"], part, mask[part], name),
                id=name,
            )
        )
    return paths


def _temperature(values: Any, part: slice, mask: np.ndarray, where: str) -> float:
    trained = set() if values is None else set(array(values, np.float64)[part][mask].tolist())
    if len(trained) > 1:
        raise UserError(f"{where}: temperatures: expected one for all trained tokens, got {len(trained)}")
    return trained.pop() if trained else 1.0


def _experts(value: Any) -> np.ndarray | None:
    """Returns [T, L, k] from prime-rl's RoutedExperts, which has bytes, shape and dtype."""
    if value is None:
        return None
    fields = (
        value if isinstance(value, Mapping) else {n: getattr(value, n) for n in ("data", "shape", "dtype")}
    )
    return np.frombuffer(fields["data"], np.dtype(fields["dtype"])).reshape(fields["shape"])
