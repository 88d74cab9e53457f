"""Rows of SkyRL: on trees, and in plain PyTorch with each row alone."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.framework_rows import (
    ADVANTAGES,
    MASKS,
    OLD,
    PROMPTS,
    RESPONSES,
    SAMPLED,
    TEMPERATURE,
    check_scores,
    check_step,
    clipped,
)
from titan_tree.components.tree_loss import TreeLoss
from titan_tree.errors import UserError
from titan_tree.integrations import skyrl


def generator_output() -> dict[str, Any]:
    return {
        "prompt_token_ids": PROMPTS,
        "response_ids": RESPONSES,
        "rewards": [1.0] * 5,
        "loss_masks": [m.int().tolist() for m in MASKS],
        "stop_reasons": ["stop"] * 5,
        "rollout_metrics": {"x": 1},
        "rollout_logprobs": [s.tolist() for s in SAMPLED],
        "trajectory_ids": None,
        "rollout_expert_indices": None,
        "is_last_step": None,
        "is_hinted": [None] * 5,
        "advantages": ADVANTAGES,
        "action_log_probs": OLD,
    }


def test_skyrl_has_the_same_losses() -> None:
    def formula(logprobs: list[Tensor], by_row: bool) -> Tensor:
        """The sum of losses with the advantages of ``apply_loss_reduction_to_advantages_minibatch``."""
        total, number = torch.zeros(()), sum(m.sum() for m in MASKS)
        for x, old, a, m in zip(logprobs, OLD, ADVANTAGES, MASKS, strict=True):
            total = total + (clipped(x, old, a / (5 * m.sum() if by_row else number)) * m).sum()
        return total

    paths = skyrl.to_paths(generator_output(), TEMPERATURE)
    check_step(paths, TreeLoss("ppo", "token_mean"), lambda x: formula(x, False))
    check_step(paths, TreeLoss("ppo", "path_token_mean"), lambda x: formula(x, True))


def test_skyrl_gets_values_of_responses() -> None:
    output = generator_output()
    check_scores(skyrl.to_paths(output, TEMPERATURE), lambda values: skyrl.to_rows(output, values), list)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: skyrl.to_paths(generator_output() | {"is_hinted": [True] * 5}),
            "output: is_hinted: samples with",
        ),
        (
            lambda: skyrl.to_paths({**generator_output(), "rollout_logprobs": [[0.0]] * 5}),
            "row 0: rollout_logprobs: expected 7 entries, got 1",
        ),
    ],
)
def test_what_would_change_the_loss_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
