"""AReaL: batches of AReaL as paths. See ``titan_tree.integrations.frameworks``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_tree.integrations.fields import IMAGES, TEACHER, Fields, Row
from titan_tree.tree.paths import TokenPath

_FIELDS = Fields(
    "input_ids=tokens attention_mask loss_mask advantages=advantage prox_logp=old_logprobs "
    "ref_logp=ref_logprobs logprobs=rollout_logprobs routed_experts versions=policy_version",
    "rewards values returns kl_rewards tot_rewards begin_of_trajectory task_ids position_ids seqlens",
    {
        "multi_modal_input pixel_values image_grid_thw": IMAGES,
        "cu_seqlens max_seqlen": "expected the padded batch, before AReaL packs it",
        "teacher_logp": TEACHER,
    },
)


class AReaL:
    """Batches of AReaL: a dict of tensors [B, T], padded at the right.

    AReaL's trainer moves arrays one entry to the left before it trains: entry t then belongs to token t + 1.
    """

    @staticmethod
    def to_paths(batch: Mapping[str, object], temperature: float = 1.0) -> list[TokenPath]:
        """Returns one path per row.

        The reduction "token_mean" averages as AReaL does with its default ``loss_weight_fn``, which counts
        the trained tokens of a micro-batch.

        Args:
            batch: the batch that rollouts return, or the one that ``compute_advantages`` returns, in which
                "advantages" are added, and "loss_mask" and "logprobs" are moved to the left. "prox_logp" and
                "ref_logp" always are.
            temperature: the temperature of the sampling, and of AReaL's log-probs.

        Raises:
            UserError: a field is unknown, not supported or of the wrong shape, or padding is not on the
                right.
        """
        fields = _FIELDS.row(batch, "batch")
        lengths = _lengths(fields)
        fields.required("loss_mask")
        tokens = fields.integers("tokens")
        arrays = {
            name: fields.integers(name)
            if name in ("routed_experts", "policy_version")
            else fields.numbers(name)
            for name in fields
            if name not in ("tokens", "attention_mask")
        }
        for name, array in arrays.items():
            shape = array.shape[:2] if name == "routed_experts" else array.shape
            if shape != tokens.shape:
                raise fields.error(name, f"expected shape {list(tokens.shape)}, got {list(array.shape)}")
        moved = {"old_logprobs", "ref_logprobs"}
        if "advantage" in arrays:
            moved |= {"loss_mask", "rollout_logprobs", "advantage"}
        for name in moved & arrays.keys():
            arrays[name] = np.concatenate([arrays[name][:, :1] * 0, arrays[name][:, :-1]], axis=1)
        if "rollout_logprobs" in arrays:
            arrays.setdefault("old_logprobs", arrays["rollout_logprobs"])  # as AReaL without prox_logp
        is_padding = np.arange(tokens.shape[1]) >= lengths[:, None]
        if arrays["loss_mask"][is_padding].any():
            raise fields.error("loss_mask", "expected 0 on padding, where attention_mask is 0")
        paths = []
        for row, length in enumerate(lengths.tolist()):
            values: dict[str, Any] = {n: a[row, :length] for n, a in arrays.items()}
            if "policy_version" in values:
                values["policy_version"] = np.where(values["loss_mask"] > 0, values["policy_version"], -1)
            paths.append(TokenPath(tokens[row, :length], temperature=temperature, id=f"row {row}", **values))
        return paths

    @staticmethod
    def to_rows(batch: Mapping[str, object], values: Sequence[Tensor]) -> Tensor:
        """Returns values [B, T] as AReaL's ``compute_logp``: entry t belongs to token t + 1; others are 0.

        Args:
            batch: the batch of ``to_paths``.
            values: [T] for each row, such as ``PathScores.logprobs`` of ``score_paths``.
        """
        fields = _FIELDS.row(batch, "batch")
        rows = torch.zeros(fields.array("tokens").shape, device=values[0].device)
        for row, value, length in zip(rows, values, _lengths(fields).tolist(), strict=True):
            row[: length - 1] = value[1:]
        return rows


def _lengths(batch: Row) -> np.ndarray:
    shape = batch.array("tokens").shape
    if len(shape) != 2:
        raise batch.error("tokens", f"expected shape [B, T], got {list(shape)}")
    mask = batch.flags("attention_mask")
    lengths = mask.sum(-1)
    if mask.shape != shape or not np.array_equal(mask, np.arange(shape[1]) < lengths[:, None]):
        raise batch.error(
            "attention_mask", f"expected shape {list(shape)} with padding at the right of each row only"
        )
    return lengths
