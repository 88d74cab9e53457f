"""Rows of slime: Samples, or the columns ``train_data`` that its trainer gets.

Arrays of a row cover its response: the last R of its tokens. docs/frameworks.md lists the fields.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from titan_tree.errors import UserError
from titan_tree.integrations.samples import after_prompt, array, column, fields_of, required
from titan_tree.tree.paths import TokenPath

COLUMNS = {  # fields of a Sample by the column of train_data
    "tokens": "tokens",
    "response_lengths": "response_length",
    "loss_masks": "loss_mask",
    "rollout_ids": "rollout_id",
    "sample_indices": "index",
    "rollout_log_probs": "rollout_log_probs",
    "rollout_routed_experts": "rollout_routed_experts",
    "weight_versions": "weight_versions",
    "rollout_mask_sums": "rollout_mask_sums",
    # from here on, what the trainer adds
    "rewards": "rewards",
    "log_probs": "log_probs",
    "ref_log_probs": "ref_log_probs",
    "advantages": "advantages",
}
KNOWN = {*COLUMNS.values(), "remove_sample"}
LEFT_OUT = {
    *("group_index", "prompt", "response", "label", "reward", "status", "metadata", "session_id"),
    *("generate_function_path", "custom_rm_path", "apply_chat_template_kwargs", "non_generation_time"),
    *("spec_info", "prefix_cache_info"),
}
LEFT_OUT_COLUMNS = {
    *("raw_reward", "truncated", "round_number", "total_lengths", "source_names", "prompt"),
    *("returns", "values", "kl", "entropy", "partition"),
    *("dynamic_global_batch_size", "num_microbatches", "micro_batch_indices", "global_batch_sizes"),
}
_TOP_P = "log-probs under nucleus sampling are not supported; sample with rollout_top_p = 1"
_IMAGES = "expected text only"
_TEACHER = "losses with a teacher are not supported; remove it"
REFUSED = {
    "rollout_top_p_token_ids": _TOP_P,
    "rollout_top_p_token_offsets": _TOP_P,
    "multimodal_inputs": _IMAGES,
    "multimodal_train_inputs": _IMAGES,
    "teacher_log_probs": _TEACHER,
    "mopd_teacher_log_probs": _TEACHER,
    "train_metadata": "losses chosen per sample are not supported; remove it",
}
REFUSED_COLUMNS = REFUSED | {"metadata": REFUSED["train_metadata"]}


def to_paths(
    rows: Sequence[Any] | Mapping[str, Any], temperature: float = 1.0, skip_untrained: bool = False
) -> list[TokenPath]:
    """Returns one path per row.

    The reduction "rollout_token_mean" averages as slime does: over the tokens of a ``rollout_id``, then over
    rollouts. "token_mean" is slime's ``--calculate-per-token-loss``.

    Args:
        rows: Samples or their dicts, or train_data with one list per column. All samples of a rollout must be
            present, unless train_data has "rollout_mask_sums".
        temperature: ``--rollout-temperature``.
        skip_untrained: leave rollouts without trained tokens out of the average. slime counts them.
    Raises:
        UserError: a field is unknown, not supported or of the wrong length, or a rollout has no trained
            token.
    """
    samples = _samples(rows)
    paths: list[TokenPath] = []
    rollouts: dict[Any, list[TokenPath]] = {}
    for i, sample in enumerate(samples):
        where = f"sample {i}"
        paths.append(_path(sample, where, temperature))
        key = sample.get("rollout_id", sample.get("index"))
        rollouts.setdefault(where if key is None else key, []).append(paths[-1])
    for of_rollout in rollouts.values():
        TokenPath.join_rollout(of_rollout)
    for sample, path in zip(samples, paths, strict=True):
        if "rollout_mask_sums" in sample:  # of all samples of the rollout, also those of other ranks
            path.rollout_tokens = float(sample["rollout_mask_sums"])
    for name, of_rollout in rollouts.items():
        if not skip_untrained and not of_rollout[0].rollout_tokens:
            raise UserError(
                f"rollout {name}: no token is trained, but slime counts the rollout in its mean; pass "
                "skip_untrained=True to average over the other rollouts"
            )
    if any(path.policy_version is None for path in paths):
        for path in paths:
            path.policy_version = None
    return paths


def to_rows(rows: Sequence[Any] | Mapping[str, Any], values: Sequence[Tensor]) -> list[Tensor]:
    """Returns values of the responses, as slime's "log_probs" and "entropy": [R] for each row.

    Args:
        values: [T] for each row, such as ``PathScores.logprobs`` of ``score_paths``.
    """
    lengths = (_response_length(sample, f"sample {i}") for i, sample in enumerate(_samples(rows)))
    return [value[len(value) - length :] for value, length in zip(values, lengths, strict=True)]


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


def _samples(rows: Sequence[Any] | Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the known fields of each row, by the names of a Sample."""
    if not isinstance(rows, Mapping):
        return [fields_of(row, f"sample {i}", KNOWN, LEFT_OUT, REFUSED) for i, row in enumerate(rows)]
    fields = fields_of(rows, "train_data", COLUMNS, LEFT_OUT_COLUMNS, REFUSED_COLUMNS)
    number = len(required(fields, "tokens", "train_data"))
    columns = {COLUMNS[name]: column(fields, name, "train_data", number) for name in fields}
    return [
        {name: values[i] for name, values in columns.items() if values is not None and values[i] is not None}
        for i in range(number)
    ]


def _path(sample: Mapping[str, Any], where: str, temperature: float) -> TokenPath:
    tokens = array(required(sample, "tokens", where), None)
    response = _response_length(sample, where)
    num_prompt = len(tokens) - response
    given = column(sample, "loss_mask", where, response)
    mask = after_prompt([1.0] * response if given is None else given, num_prompt, 0.0)
    if sample.get("remove_sample"):
        mask[:] = 0.0
    logprobs: dict[str, Any] = {
        name: after_prompt(values, num_prompt, float("nan"))
        for name, field in (
            ("old_logprobs", "log_probs"),
            ("ref_logprobs", "ref_log_probs"),
            ("rollout_logprobs", "rollout_log_probs"),
        )
        if (values := column(sample, field, where, response)) is not None
    }
    advantage: Any = sample.get("rewards")  # GRPO: one for all tokens
    if (per_token := column(sample, "advantages", where, response)) is not None:
        advantage = after_prompt(per_token, num_prompt, 0.0)
    experts = sample.get("rollout_routed_experts")
    versions = {str(version) for version in sample.get("weight_versions", ())}
    version = int(versions.pop()) if len(versions) == 1 and next(iter(versions)).isdecimal() else None
    return TokenPath(
        tokens,
        loss_mask=mask,
        advantage=advantage,
        **logprobs,
        routed_experts=None if experts is None else array(experts, None),
        temperature=temperature,
        policy_version=version,
        id=str(sample.get("index", where)),
    )


def _response_length(sample: Mapping[str, Any], where: str) -> int:
    length, size = int(required(sample, "response_length", where)), len(required(sample, "tokens", where))
    if not 0 <= length <= size:
        raise UserError(f"{where}: response_length: expected at most {size} tokens, got {length}")
    return length
