"""SkyRL: rows of SkyRL as paths. See ``titan_tree.integrations.frameworks``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor

from titan_tree.integrations.fields import IMAGES, Fields, Row, items_of
from titan_tree.integrations.frameworks.responses import of_responses, response_path
from titan_tree.tree.paths import TokenPath

_FIELDS = Fields(
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
        rows = _rows(output)
        paths = [response_path(row, temperature) for row in rows]
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
        return of_responses(values, _rows(output))


def _rows(output: Mapping[str, object]) -> list[Row]:
    fields = _FIELDS.row(output, "output")
    for name in ("prompt", "response", "loss_mask"):
        fields.required(name)
    rows = fields.split(fields.size("prompt"), "row")
    for row in rows:
        row.required("loss_mask")
        row["response_length"] = row.size("response")
        row.size("prompt")
        row["tokens"] = [*row.integers("prompt").tolist(), *row.integers("response").tolist()]
    return rows
