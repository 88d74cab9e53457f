"""Rows of SkyRL and slime, whose values have one entry per token of the response."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from titan_tree.components.tree_tokenizer.endings import ending
from titan_tree.errors import errors_at, shorten
from titan_tree.integrations.fields import Row
from titan_tree.tree.paths import TokenPath

# Values for which SkyRL and slime have one entry per token of the response, and their fill for the prompt.
_PER_RESPONSE = {
    "loss_mask": 0.0,
    "advantage": 0.0,
    "old_logprobs": np.nan,
    "ref_logprobs": np.nan,
    "rollout_logprobs": np.nan,
}


def response_length(row: Row) -> int:
    """Returns the number of tokens of a response, which are the last tokens of its row."""
    length, size = row.array("response_length"), row.size("tokens")
    if length.ndim or length.dtype.kind not in "iu" or not 0 <= length <= size:
        got = shorten(row["response_length"])
        raise row.error("response_length", f"expected an integer of at most {size} tokens, got {got}")
    return int(length)


def response_path(row: Row, temperature: float) -> TokenPath:
    """Returns the path of a row whose arrays have one entry per token of the response.

    The mark, if any, says how the response ended, see endings.py. A filtered response is not trained.
    """
    tokens, size = row.integers("tokens"), response_length(row)
    values: dict[str, Any] = {}
    for name, fill in _PER_RESPONSE.items():
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


def of_responses(values: Sequence[Tensor], rows: Sequence[Row]) -> list[Tensor]:
    """Returns the values of the responses from values of whole rows."""
    lengths = map(response_length, rows)
    return [value[len(value) - length :] for value, length in zip(values, lengths, strict=True)]
