"""Rows of AReaL, prime-rl, SkyRL and slime -> TokenPaths, and values of paths back into their layouts.

Each framework is a table of its fields and a class with two functions, ``to_paths`` and ``to_rows``.
docs/frameworks.md lists the fields. No framework is imported.

    AReaL     a padded batch [B, T]; its trainer moves arrays one entry to the left
    PrimeRL   rows with one entry per token, perhaps several samples packed one after another
    SkyRL     columns, with one entry per token of the response
    Slime     samples or columns, with one entry per token of the response
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_tree.components.tree_tokenizer.endings import ending
from titan_tree.errors import UserError, errors_at, shorten
from titan_tree.integrations.fields import Fields, Row, items_of
from titan_tree.tree.path_fields import FLOAT32_MAX, number
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.sampling_masks import SamplingMask

NAN = float("nan")
Values = dict[str, Any]  # fields of a row, by name
# Values for which SkyRL and slime have one entry per token of the response, and their fill for the prompt.
PER_RESPONSE = {
    "loss_mask": 0.0,
    "advantage": 0.0,
    "old_logprobs": NAN,
    "ref_logprobs": NAN,
    "rollout_logprobs": NAN,
}

IMAGES = "expected text only"
TEACHER = "losses with a teacher are not supported; remove it"
PER_SAMPLE_LOSS = "losses chosen per sample are not supported; remove it"

AREAL = Fields(
    "input_ids=tokens attention_mask loss_mask advantages=advantage prox_logp=old_logprobs "
    "ref_logp=ref_logprobs logprobs=rollout_logprobs routed_experts versions=policy_version",
    "rewards values returns kl_rewards tot_rewards begin_of_trajectory task_ids position_ids seqlens",
    {
        "multi_modal_input pixel_values image_grid_thw": IMAGES,
        "cu_seqlens max_seqlen": "expected the padded batch, before AReaL packs it",
        "teacher_logp": TEACHER,
    },
)
PRIME_RL = Fields(  # the names of a TrainingSample, and then those of a MicroBatch that differ
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
SKYRL = Fields(
    "prompt_token_ids=prompt response_ids=response loss_masks=loss_mask stop_reasons=mark "
    "advantages=advantage "
    "action_log_probs=old_logprobs base_action_log_probs=ref_logprobs rollout_logprobs "
    "rollout_expert_indices=routed_experts rollout_sample_support=support trajectory_ids=rollout_id",
    "rewards reward_components rollout_metrics env_metrics is_last_step trajectory_generation_times "
    "trajectory_time_splits rollout_sample_support_logprobs",
    {
        "pixel_values image_grid_thw": IMAGES,
        "is_hinted": "samples with hints are not supported; remove them, or the field",
    },
)
_SLIME = (
    "tokens advantages=advantage rewards=reward log_probs=old_logprobs ref_log_probs=ref_logprobs "
    "rollout_log_probs=rollout_logprobs rollout_routed_experts=routed_experts weight_versions "
    "rollout_mask_sums=rollout_tokens rollout_top_p_token_ids=kept_ids "
    "rollout_top_p_token_offsets=kept_offsets "
)
SLIME_SAMPLE = Fields(
    _SLIME + "response_length loss_mask status=mark remove_sample rollout_id index",
    "group_index prompt response label reward metadata session_id generate_function_path "
    "custom_rm_path apply_chat_template_kwargs non_generation_time spec_info prefix_cache_info",
    {
        "multimodal_inputs multimodal_train_inputs": IMAGES,
        "teacher_log_probs mopd_teacher_log_probs": TEACHER,
        "train_metadata": PER_SAMPLE_LOSS,
    },
)
SLIME_TRAIN_DATA = Fields(
    _SLIME + "response_lengths=response_length loss_masks=loss_mask rollout_ids=rollout_id "
    "sample_indices=index",
    "raw_reward truncated round_number total_lengths source_names prompt returns values kl entropy partition "
    "dynamic_global_batch_size num_microbatches micro_batch_indices global_batch_sizes",
    SLIME_SAMPLE.refused | {"metadata": PER_SAMPLE_LOSS},
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
        fields = AREAL.row(batch, "batch")
        lengths = _areal_lengths(fields)
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
            values: Values = {n: a[row, :length] for n, a in arrays.items()}
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
        fields = AREAL.row(batch, "batch")
        rows = torch.zeros(fields.array("tokens").shape, device=values[0].device)
        for row, value, length in zip(rows, values, _areal_lengths(fields).tolist(), strict=True):
            row[: length - 1] = value[1:]
        return rows


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
        paths = [path for row in _prime_rl_rows(rows) for path in _prime_rl_paths(row)]
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
        return [torch.cat([next(samples) for _ in _prime_rl_starts(row)]) for row in _prime_rl_rows(rows)]


class SkyRL:
    """Rows of SkyRL: a GeneratorOutput, and the columns that its trainer adds."""

    @staticmethod
    def to_paths(output: Mapping[str, object], temperature: float = 1.0) -> list[TokenPath]:
        """Returns one path per row. Rows with the same ``trajectory_ids``, the steps of step-wise training
        (``train/generators/utils.py``, 0d25e27), are one rollout.

        The reduction "token_mean" averages as SkyRL's ``loss_reduction = "token_mean"``, and
        "path_token_mean" as "sequence_mean".

        Args:
            output: a GeneratorOutput. "advantages", "action_log_probs" and "base_action_log_probs" may be
                added, with a number (advantages only) or R numbers per row. Advantages must not contain
                SkyRL's loss reduction, which divides them by numbers of tokens.
            temperature: the temperature of the sampling.

        Raises:
            UserError: a field is unknown, not supported or of the wrong length.
        """
        rows = _skyrl_rows(output)
        paths = [_response_path(row, temperature) for row in rows]
        rollouts: dict[object, list[TokenPath]] = {}
        for row, path in zip(rows, paths, strict=True):
            name = row.get("rollout_id")  # a TrajectoryID
            if name is not None and not isinstance(name, int | str):
                name = str(dict(items_of(name, f"{row.where}: trajectory_ids")))
            rollouts.setdefault((row.where,) if name is None else name, []).append(path)
        for members in rollouts.values():
            TokenPath.join_rollout(members)
        return paths

    @staticmethod
    def to_rows(output: Mapping[str, object], values: Sequence[Tensor]) -> list[Tensor]:
        """Returns values of the responses, [R] for each row.

        Args:
            output: the output of ``to_paths``.
            values: [T] for each row, such as ``PathScores.logprobs`` of ``score_paths``.
        """
        return _of_responses(values, _skyrl_rows(output))


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
        samples = _slime_rows(rows)
        paths = [_slime_path(sample, temperature) for sample in samples]
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
        return _of_responses(values, _slime_rows(rows))

    @staticmethod
    def read_samples(file: str | Path) -> list[Values]:
        """Returns the samples of a file that slime wrote with ``--save-debug-rollout-data``.

        Raises:
            UserError: the file is missing or damaged, or contains other types than numbers, text and tensors.
        """
        try:
            return torch.load(file, map_location="cpu", weights_only=True)["samples"]
        except (OSError, RuntimeError, KeyError, TypeError, EOFError, pickle.UnpicklingError) as error:
            reason = " ".join(str(error).split())[:200]
            raise UserError(f"{file}: expected rollout data that slime saved ({reason})") from None


def _areal_lengths(batch: Row) -> np.ndarray:
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


def _prime_rl_rows(rows: Sequence[object]) -> list[Row]:
    return [PRIME_RL.row(row, f"row {number}") for number, row in enumerate(rows)]


def _prime_rl_starts(row: Row) -> np.ndarray:
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


def _prime_rl_paths(row: Row) -> Iterator[TokenPath]:
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
        values["routed_experts"] = _prime_rl_experts(row)
    mask = _prime_rl_mask(row, size) if "sampling_mask" in row else None
    is_packed = row.names["tokens"] == "input_ids"
    for index, (start, end) in enumerate(pairwise([*_prime_rl_starts(row), size])):
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
        fields: Values = {field: array[part] for field, array in values.items()}
        if mask is not None:
            fields["sampling_mask"] = mask.of_tokens(np.arange(start, end))
        yield TokenPath(tokens[part], temperature=temperature, id=name, **fields)


def _prime_rl_experts(row: Row) -> np.ndarray:
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


def _prime_rl_mask(row: Row, size: int) -> SamplingMask:
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


def _skyrl_rows(output: Mapping[str, object]) -> list[Row]:
    fields = SKYRL.row(output, "output")
    for name in ("prompt", "response", "loss_mask"):
        fields.required(name)
    rows = fields.split(fields.size("prompt"), "row")
    for row in rows:
        row.required("loss_mask")
        row["response_length"] = row.size("response")
        row.size("prompt")
        row["tokens"] = [*row.integers("prompt").tolist(), *row.integers("response").tolist()]
    return rows


def _slime_rows(rows: Sequence[object] | Mapping[str, object]) -> list[Row]:
    if not isinstance(rows, Mapping):
        return [SLIME_SAMPLE.row(row, f"sample {number}") for number, row in enumerate(rows)]
    train_data = SLIME_TRAIN_DATA.row(rows, "train_data")
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


def _slime_path(sample: Row, temperature: float) -> TokenPath:
    size = _response_length(sample)
    if "loss_mask" not in sample or sample.get("remove_sample"):
        sample["loss_mask"] = np.full(size, 0.0 if sample.get("remove_sample") else 1.0)
    if "reward" in sample:
        sample.setdefault("advantage", sample["reward"])
    has_versions = "weight_versions" in sample and sample.size("weight_versions")
    versions = {str(version) for version in sample["weight_versions"]} if has_versions else set()
    if len(versions) == 1 and (version := versions.pop()).isdecimal():
        sample["policy_version"] = int(version)
    path = _response_path(sample, temperature)
    path.id = str(sample.get("index", sample.where))
    return path


def _response_length(row: Row) -> int:
    """Returns the number of tokens of a response, which are the last tokens of its row."""
    length, size = row.array("response_length"), row.size("tokens")
    if length.ndim or length.dtype.kind not in "iu" or not 0 <= length <= size:
        got = shorten(row["response_length"])
        raise row.error("response_length", f"expected an integer of at most {size} tokens, got {got}")
    return int(length)


def _response_path(row: Row, temperature: float) -> TokenPath:
    """Returns the path of a row whose arrays have one entry per token of the response.

    The mark, if any, says how the response ended, see endings.py. A filtered response is not trained.
    """
    tokens, size = row.integers("tokens"), _response_length(row)
    values: Values = {}
    for name, fill in PER_RESPONSE.items():
        if name not in row:
            continue
        if name == "advantage" and not row.array(name).ndim:
            values[name] = row.numbers(name)  # one number for all tokens
        else:
            prompt = np.full(len(tokens) - size, fill, np.float32)
            values[name] = np.concatenate([prompt, row.numbers(name, size)])
    if "routed_experts" in row:
        values["routed_experts"] = row.integers("routed_experts")
    if (kept := _kept_ids(row, size)) is not None:
        values["sampling_mask"] = [None] * (len(tokens) - size) + kept
    values["policy_version"] = row.get("policy_version")
    path = TokenPath(tokens, temperature=temperature, id=row.where, **values)
    if "mark" in row:
        mark = getattr(row["mark"], "value", row["mark"])  # of an enum
        with errors_at(row.where):
            if ending(mark, row.names["mark"]) == "filtered":
                path.loss_mask = np.zeros_like(path.loss_mask)
    return path


def _kept_ids(row: Row, size: int) -> list[list[int]] | None:
    """Returns the ids that sampling kept for each token of the response, or None if the row has none."""
    if "support" in row:  # SkyRL pads [size, top_k] with -1
        support = row.integers("support")
        if support.ndim != 2 or len(support) != size:
            raise row.error("support", f"expected shape [{size}, top_k], got {list(support.shape)}")
        return [ids[ids >= 0].tolist() for ids in support]
    if "kept_ids" not in row and "kept_offsets" not in row:
        return None
    ids, offsets = row.integers("kept_ids"), row.integers("kept_offsets")  # of slime
    sizes = np.diff(offsets)
    if len(sizes) != size or offsets[0] or offsets[-1] != len(ids) or sizes.min(initial=0) < 0:
        raise row.error(
            "kept_offsets",
            f"expected {size + 1} ascending offsets from 0 to {len(ids)}, got {offsets.tolist()}",
        )
    return [part.tolist() for part in np.split(ids, offsets[1:-1])]


def _of_responses(values: Sequence[Tensor], rows: Sequence[Row]) -> list[Tensor]:
    """Returns the values of the responses from values of whole rows."""
    lengths = map(_response_length, rows)
    return [value[len(value) - length :] for value, length in zip(values, lengths, strict=True)]
