"""PrimeRL: rows of prime-rl as paths. See ``titan_tree.integrations.frameworks``."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_tree.errors import UserError
from titan_tree.integrations.fields import IMAGES, Fields, Row, items_of
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.sampling_masks import SamplingMask

_FIELDS = Fields(  # the names of a TrainingSample, and then those of a MicroBatch that differ
    "token_ids=tokens position_ids mask=loss_mask advantages=advantage rl_weights ref_logprobs "
    "logprobs=rollout_logprobs routed_experts sampling_mask temperatures=temperature "
    "input_ids=tokens loss_mask inference_logprobs=rollout_logprobs",
    "env_name env_names sequence_lengths seq_lens lora_num_tokens rewards trace_id branch_index trace_ids "
    "branch_indices",
    {
        "payload": "expected routed_experts and sampling_mask in the row; decode the payload into them",
        "mm_refs mm_kwargs mm_token_type_ids": IMAGES,
        "ce_weights ref_kl_weights sdpo_weights": "only the component rl of the loss is supported; train the "
        "others in a step of their own",
    },
)


class PrimeRL:
    """Rows of prime-rl: TrainingSamples, or MicroBatches in which samples are packed one after another."""

    @staticmethod
    def to_paths(rows: Sequence[object]) -> list[TokenPath]:
        """Returns one path per TrainingSample, or per sample that is packed in a MicroBatch.

        The reduction "token_mean" averages as prime-rl does. Tokens whose ``rl_weights`` are 0 do not count.
        Other weights multiply the advantage.

        Args:
            rows: TrainingSamples, MicroBatches, or dicts with their fields.

        Raises:
            UserError: a field is unknown, not supported or of the wrong length.
        """
        paths = [path for row in _rows(rows) for path in _paths(row)]
        if any(path.advantage is not None for path in paths):
            for path in paths:
                if path.advantage is None and not path.loss_tokens:
                    path.advantage = np.zeros(len(path), np.float32)
        return paths

    @staticmethod
    def to_rows(rows: Sequence[object], values: Sequence[Tensor]) -> list[Tensor]:
        """Returns values for every token of each row, as prime-rl's "trainer_logprobs".

        A sample's first token gets 0.

        Args:
            rows: the rows of ``to_paths``.
            values: [T] for each path of ``to_paths``, such as ``PathScores.logprobs`` of ``score_paths``.
        """
        samples = iter([F.pad(value[1:], (1, 0)) for value in values])
        return [torch.cat([next(samples) for _ in _starts(row)]) for row in _rows(rows)]


def _rows(rows: Sequence[object]) -> list[Row]:
    return [_FIELDS.row(row, f"row {number}") for number, row in enumerate(rows)]


def _starts(row: Row) -> np.ndarray:
    """Returns where samples start in a row."""
    size = row.size("tokens")
    if "position_ids" not in row:
        return np.zeros(1, np.int64)
    places = row.numbers("position_ids", size)
    (starts,) = (places == 0).nonzero()
    lengths = np.diff([*starts, size])
    if not len(starts) or not np.array_equal(places, np.concatenate([np.arange(n) for n in lengths])):
        raise row.error("position_ids", "expected 0, 1, 2, ... for each sample, got something else")
    return starts


def _paths(row: Row) -> Iterator[TokenPath]:
    tokens, size = row.integers("tokens"), row.size("tokens")
    names = ("rollout_logprobs", "ref_logprobs", "advantage", "rl_weights", "temperature")
    values = {name: row.numbers(name, size) for name in names if name in row}
    temperatures = values.pop("temperature", None)
    values["loss_mask"] = row.flags("loss_mask", size)
    if "advantage" in values:  # may be missing for tokens that are not trained
        no_value = np.isnan(values["advantage"]) & ~values["loss_mask"]
        values["advantage"] = np.where(no_value, np.float32(0), values["advantage"])
    if (weights := values.pop("rl_weights", None)) is not None:
        if not (weights.min() >= 0 and weights.max() < np.inf):
            raise row.error("rl_weights", "expected finite numbers >= 0, got something else")
        values["loss_mask"] &= weights > 0
        if "advantage" in values:
            values["advantage"] = values["advantage"] * weights
    if "rollout_logprobs" in values:  # prime-rl's ratios are relative to the sampling engine
        values["old_logprobs"] = values["rollout_logprobs"]
    if "routed_experts" in row:
        values["routed_experts"] = _experts(row)
    mask = _mask(row, size) if "sampling_mask" in row else None
    is_packed = row.names["tokens"] == "input_ids"
    for index, (start, end) in enumerate(pairwise([*_starts(row), size])):
        part, name = slice(start, end), f"{row.where}.{index}" if is_packed else row.where
        temperature = 1.0
        if temperatures is not None:
            given = row.array("temperature").astype(np.float64)  # as exact as the row
            trained = set(given[part][values["loss_mask"][part]].tolist())
            if len(trained) > 1:
                raise UserError(
                    f"{name}: temperatures: expected one for all trained tokens, got {len(trained)}"
                )
            temperature = trained.pop() if trained else 1.0
        fields: dict[str, Any] = {field: array[part] for field, array in values.items()}
        if mask is not None:
            fields["sampling_mask"] = mask.of_tokens(np.arange(start, end))
        yield TokenPath(tokens[part], temperature=temperature, id=name, **fields)


def _experts(row: Row) -> np.ndarray:
    """Returns [T, L, k] from prime-rl's RoutedExperts, which has bytes, shape and dtype.

    prime-rl pads with zeros. A token chooses k different experts, so k > 1 zeros mean that none are recorded.
    """
    fields = dict(items_of(row["routed_experts"], f"{row.where}: routed_experts"))
    try:
        experts = np.frombuffer(fields["data"], np.dtype(fields["dtype"])).reshape(fields["shape"])
        if experts.ndim != 3 or experts.dtype.kind not in "iu":
            raise ValueError(f"{experts.dtype} of shape {list(experts.shape)}")
    except (KeyError, TypeError, ValueError) as error:
        raise row.error("routed_experts", f"expected integers [T, L, k], got {error}") from None
    is_padding = (experts == 0).all((1, 2)) & (experts.shape[2] > 1)
    return np.where(is_padding[:, None, None], -1, experts.astype(np.int64))


def _mask(row: Row, size: int) -> SamplingMask:
    """Returns the mask in prime-rl's SamplingMask, whose ids and counts are bytes of int32."""
    fields = dict(items_of(row["sampling_mask"], f"{row.where}: sampling_mask"))
    try:
        mask = SamplingMask(*(np.frombuffer(fields[name], np.int32) for name in ("counts", "ids")))
        if len(mask.sizes) != size or mask.sizes.min() < 0 or mask.sizes.sum() != len(mask.ids):
            raise ValueError(
                f"{len(mask.sizes)} counts with a sum of {mask.sizes.sum()}, and {len(mask.ids)} ids"
            )
    except (KeyError, TypeError, ValueError) as error:
        raise row.error(
            "sampling_mask", f"expected the count of ids of {size} tokens, and all ids, got {error}"
        ) from None
    return mask
