"""Batches of AReaL: a dict of tensors [B, T], padded at the right.

AReaL's trainer moves arrays one entry to the left before it trains: entry t then belongs to token t + 1.
docs/frameworks.md lists the fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_tree.errors import UserError
from titan_tree.integrations.samples import array, fields_of, required
from titan_tree.tree.paths import TokenPath

PER_TOKEN = ("loss_mask", "logprobs", "prox_logp", "ref_logp", "advantages", "versions", "routed_experts")
LEFT_OUT = {
    *("rewards", "values", "returns", "kl_rewards", "tot_rewards", "begin_of_trajectory", "task_ids"),
    *("position_ids", "seqlens"),
}
_IMAGES = "expected text only"
_PACKED = "expected the padded batch, before AReaL packs it"
REFUSED = {
    "multi_modal_input": _IMAGES,
    "pixel_values": _IMAGES,
    "image_grid_thw": _IMAGES,
    "teacher_logp": "losses with a teacher are not supported; remove it",
    "cu_seqlens": _PACKED,
    "max_seqlen": _PACKED,
}


def to_paths(batch: Mapping[str, Any], temperature: float = 1.0) -> list[TokenPath]:
    """Returns one path per row.

    The reduction "token_mean" averages as AReaL does with its default ``loss_weight_fn``, which counts the
    trained tokens of a micro-batch.

    Args:
        batch: as rollouts return it, or as ``compute_advantages`` does: then it has "advantages", and
            "loss_mask" and "logprobs" are moved to the left. "prox_logp" and "ref_logp" always are.
        temperature: of the sampling, and of AReaL's log-probs.
    Raises:
        UserError: a field is unknown, not supported or of the wrong shape, or padding is not at the right.
    """
    fields = fields_of(batch, "batch", {"input_ids", "attention_mask", *PER_TOKEN}, LEFT_OUT, REFUSED)
    tokens, lengths = array(fields["input_ids"], np.int64), _lengths(batch)
    required(fields, "loss_mask", "batch")
    columns = {name: array(fields[name], None) for name in PER_TOKEN if name in fields}
    for name, values in columns.items():
        if values.shape[:2] != tokens.shape:
            raise UserError(f"batch: {name}: expected shape {list(tokens.shape)}, got {list(values.shape)}")
    is_moved = "advantages" in columns
    moved = {"prox_logp", "ref_logp"} | ({"loss_mask", "logprobs", "advantages"} if is_moved else set())
    return [
        _path(row, tokens[row, :length], {n: x[row, :length] for n, x in columns.items()}, moved, temperature)
        for row, length in enumerate(lengths.tolist())
    ]


def to_rows(batch: Mapping[str, Any], values: Sequence[Tensor]) -> Tensor:
    """Returns values [B, T] as AReaL's ``compute_logp`` does: entry t belongs to token t + 1; others are 0.

    Args:
        values: [T] for each row, such as ``PathScores.logprobs`` of ``score_paths``.
    """
    rows = torch.zeros(array(batch["input_ids"], None).shape, device=values[0].device)
    for row, value, length in zip(rows, values, _lengths(batch).tolist(), strict=True):
        row[: length - 1] = value[1:]
    return rows


def _lengths(batch: Mapping[str, Any]) -> np.ndarray:
    mask = array(required(batch, "attention_mask", "batch"), None) != 0
    shape = array(required(batch, "input_ids", "batch"), None).shape
    lengths = mask.sum(-1)
    if mask.shape != shape or not np.array_equal(mask, np.arange(mask.shape[-1]) < lengths[:, None]):
        raise UserError(
            f"batch: attention_mask: expected shape {list(shape)} with padding at the right of each row only"
        )
    return lengths


def _path(
    row: int, tokens: np.ndarray, values: Mapping[str, np.ndarray], moved: set[str], temperature: float
) -> TokenPath:
    """Makes the path of one row from its arrays [T]."""
    aligned = {n: np.concatenate([x[:1] * 0, x[:-1]]) if n in moved else x for n, x in values.items()}
    mask = aligned["loss_mask"].astype(np.float32)
    sampled = aligned.get("logprobs")
    versions = aligned.get("versions")
    return TokenPath(
        tokens,
        loss_mask=mask,
        advantage=aligned.get("advantages"),
        old_logprobs=aligned.get("prox_logp", sampled),  # without it, AReaL takes those of the rollout
        rollout_logprobs=sampled,
        ref_logprobs=aligned.get("ref_logp"),
        routed_experts=aligned.get("routed_experts"),
        temperature=temperature,
        policy_version=None if versions is None else np.where(mask > 0, versions, -1),
        id=f"row {row}",
    )
