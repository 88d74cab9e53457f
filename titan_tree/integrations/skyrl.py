"""Rows of SkyRL: a GeneratorOutput, and the columns that its trainer adds.

Arrays of a row cover its response of R tokens. docs/frameworks.md lists the fields.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from titan_tree.integrations.samples import after_prompt, array, column, fields_of, required
from titan_tree.tree.paths import TokenPath

LOGPROBS = {
    "old_logprobs": "action_log_probs",
    "ref_logprobs": "base_action_log_probs",
    "rollout_logprobs": "rollout_logprobs",
}
KNOWN = {
    *("prompt_token_ids", "response_ids", "loss_masks", "advantages", "rollout_expert_indices"),
    *LOGPROBS.values(),
}
LEFT_OUT = {"rewards", "stop_reasons", "rollout_metrics", "trajectory_ids", "is_last_step"}
REFUSED = {
    "pixel_values": "expected text only",
    "image_grid_thw": "expected text only",
    "is_hinted": "samples with hints are not supported; remove them, or the field",
}


def to_paths(output: Mapping[str, Any], temperature: float = 1.0) -> list[TokenPath]:
    """Returns one path per row.

    The reduction "token_mean" averages as SkyRL's ``loss_reduction = "token_mean"``, and "path_token_mean" as
    "sequence_mean".

    Args:
        output: a GeneratorOutput. "advantages", "action_log_probs" and "base_action_log_probs" may be added,
            with a number (advantages only) or R numbers per row. Advantages must not contain SkyRL's loss
            reduction, which divides them by numbers of tokens.
        temperature: of the sampling.
    Raises:
        UserError: a field is unknown, not supported or of the wrong length.
    """
    fields, number = _fields(output)
    columns = {name: column(fields, name, "output", number) for name in fields}
    return [
        _path(row, {name: values[row] for name, values in columns.items() if values is not None}, temperature)
        for row in range(number)
    ]


def to_rows(output: Mapping[str, Any], values: Sequence[Tensor]) -> list[Tensor]:
    """Returns values of the responses, [R] for each row.

    Args:
        values: [T] for each row, such as ``PathScores.logprobs`` of ``score_paths``.
    """
    lengths = map(len, _fields(output)[0]["response_ids"])
    return [value[len(value) - length :] for value, length in zip(values, lengths, strict=True)]


def _fields(output: Mapping[str, Any]) -> tuple[dict[str, Any], int]:
    """Returns the known fields, and the number of rows."""
    fields = fields_of(output, "output", KNOWN, LEFT_OUT, REFUSED)
    for name in ("prompt_token_ids", "response_ids", "loss_masks"):
        required(fields, name, "output")
    return fields, len(fields["prompt_token_ids"])


def _path(row: int, values: Mapping[str, Any], temperature: float) -> TokenPath:
    where = f"row {row}"
    prompt, response = values["prompt_token_ids"], values["response_ids"]
    size, num_prompt = len(response), len(prompt)
    logprobs: dict[str, Any] = {
        name: after_prompt(values[field], num_prompt, float("nan"))
        for name, field in LOGPROBS.items()
        if column(values, field, where, size) is not None
    }
    mask = column(values, "loss_masks", where, size)
    advantage = values.get("advantages")
    if advantage is not None and np.ndim(array(advantage)):
        advantage = after_prompt(column(values, "advantages", where, size), num_prompt, 0.0)
    experts = values.get("rollout_expert_indices")
    return TokenPath(
        [*prompt, *response],
        loss_mask=after_prompt(mask, num_prompt, 0.0),
        advantage=advantage,
        routed_experts=None if experts is None else array(experts, None),
        temperature=temperature,
        id=where,
        **logprobs,
    )
