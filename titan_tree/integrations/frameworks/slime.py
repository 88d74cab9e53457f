"""Slime: rows of slime as paths. See ``titan_tree.integrations.frameworks``."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from titan_tree.errors import UserError, errors_at, shorten
from titan_tree.integrations.fields import IMAGES, TEACHER, Fields, Row
from titan_tree.integrations.frameworks.responses import of_responses, response_length, response_path
from titan_tree.tree.path_fields import FLOAT32_MAX, number
from titan_tree.tree.paths import TokenPath

_PER_SAMPLE_LOSS = "losses chosen per sample are not supported; remove it"
_BOTH = (
    "tokens advantages=advantage rewards=reward log_probs=old_logprobs ref_log_probs=ref_logprobs "
    "rollout_log_probs=rollout_logprobs rollout_routed_experts=routed_experts weight_versions "
    "rollout_mask_sums=rollout_tokens rollout_top_p_token_ids=kept_ids "
    "rollout_top_p_token_offsets=kept_offsets "
)
_SAMPLE = Fields(
    _BOTH + "response_length loss_mask status=mark remove_sample rollout_id index",
    "group_index prompt response label reward metadata session_id generate_function_path "
    "custom_rm_path apply_chat_template_kwargs non_generation_time spec_info prefix_cache_info",
    {
        "multimodal_inputs multimodal_train_inputs": IMAGES,
        "teacher_log_probs mopd_teacher_log_probs": TEACHER,
        "train_metadata": _PER_SAMPLE_LOSS,
    },
)
_TRAIN_DATA = Fields(
    _BOTH + "response_lengths=response_length loss_masks=loss_mask rollout_ids=rollout_id "
    "sample_indices=index",
    "raw_reward truncated round_number total_lengths source_names prompt returns values kl entropy partition "
    "dynamic_global_batch_size num_microbatches micro_batch_indices global_batch_sizes",
    _SAMPLE.refused | {"metadata": _PER_SAMPLE_LOSS},
)


class Slime:
    """Rows of slime: Samples, or the columns ``train_data`` that its trainer gets."""

    @staticmethod
    def to_paths(
        rows: Sequence[object] | Mapping[str, object], temperature: float = 1.0, skip_untrained: bool = False
    ) -> list[TokenPath]:
        """Returns one path per row.

        The reduction "rollout_token_mean" averages as slime does: over the tokens of a ``rollout_id``, then
        over rollouts. "token_mean" is slime's ``--calculate-per-token-loss``.

        Args:
            rows: Samples or their dicts, or train_data with one list per column. All samples of a rollout
                must be present, unless train_data has "rollout_mask_sums".
            temperature: ``--rollout-temperature``.
            skip_untrained: leave rollouts without trained tokens out of the average. slime counts them.

        Raises:
            UserError: a field is unknown, not supported or of the wrong length, or a rollout has no trained
                token.
        """
        samples = _rows(rows)
        paths = [_path(sample, temperature) for sample in samples]
        rollouts: dict[object, list[TokenPath]] = {}
        for sample, path in zip(samples, paths, strict=True):
            rollouts.setdefault(_rollout(sample), []).append(path)
        for members in rollouts.values():
            TokenPath.join_rollout(members)
        for sample, path in zip(samples, paths, strict=True):
            if "rollout_tokens" in sample:  # of all samples of the rollout, also those of other ranks
                own = path.loss_tokens
                with errors_at(sample.where):
                    path.rollout_tokens = number(
                        sample.names["rollout_tokens"],
                        sample["rollout_tokens"],
                        f"at least the sample's own {own:g} trained tokens",
                        lambda x, own=own: x >= own * (1 - 1e-6),  # type: ignore[misc]
                        FLOAT32_MAX,
                    )
        for name, members in rollouts.items():
            if not skip_untrained and not members[0].rollout_tokens:
                raise UserError(
                    f"rollout {name}: no token is trained, but slime counts the rollout in its mean; pass "
                    "skip_untrained=True to average over the other rollouts"
                )
        if any(path.policy_version is None for path in paths):
            for path in paths:
                path.policy_version = None
        return paths

    @staticmethod
    def to_rows(rows: Sequence[object] | Mapping[str, object], values: Sequence[Tensor]) -> list[Tensor]:
        """Returns values of the responses, as slime's "log_probs" and "entropy": [R] for each row.

        Args:
            rows: the rows of ``to_paths``.
            values: [T] for each row, such as ``PathScores.logprobs`` of ``score_paths``.
        """
        return of_responses(values, _rows(rows))

    @staticmethod
    def read_samples(file: str | Path) -> list[dict[str, Any]]:
        """Returns the samples of a file that slime wrote with ``--save-debug-rollout-data``.

        Raises:
            UserError: the file is missing or damaged, or contains other types than numbers, text and tensors.
        """
        try:
            return torch.load(file, map_location="cpu", weights_only=True)["samples"]
        except (OSError, RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{file}: expected rollout data that slime saved ({reason})") from None


def _rows(rows: Sequence[object] | Mapping[str, object]) -> list[Row]:
    if not isinstance(rows, Mapping):
        return [_SAMPLE.row(row, f"sample {number}") for number, row in enumerate(rows)]
    train_data = _TRAIN_DATA.row(rows, "train_data")
    return train_data.split(train_data.size("tokens"), "sample")


def _rollout(sample: Row) -> int | str:
    """Returns the name of a sample's rollout."""
    name = next((name for name in ("rollout_id", "index") if name in sample), None)
    if name is None:
        return sample.where
    value = sample[name].item() if isinstance(sample[name], Tensor | np.generic) else sample[name]
    if not isinstance(value, int | str):
        raise sample.error(name, f"expected an integer or text, got {shorten(value)}")
    return value


def _path(sample: Row, temperature: float) -> TokenPath:
    size = response_length(sample)
    if "loss_mask" not in sample or sample.get("remove_sample"):
        sample["loss_mask"] = np.full(size, 0.0 if sample.get("remove_sample") else 1.0)
    if "reward" in sample:
        sample.setdefault("advantage", sample["reward"])
    has_versions = "weight_versions" in sample and sample.size("weight_versions")
    versions = {str(version) for version in sample["weight_versions"]} if has_versions else set()
    if len(versions) == 1 and (version := versions.pop()).isdecimal():
        sample["policy_version"] = int(version)
    path = response_path(sample, temperature)
    path.id = str(sample.get("index", sample.where))
    return path
