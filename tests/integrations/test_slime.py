"""Rows of slime: on trees, and in plain PyTorch with each row alone."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
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
from titan_tree.integrations import slime


@dataclass
class Status:
    value: str = "completed"


@dataclass
class Sample:
    """The fields of slime's Sample that a rollout fills in."""

    index: int
    rollout_id: int | None
    tokens: list[int]
    response_length: int
    loss_mask: list[int]
    rollout_log_probs: list[float]
    group_index: int = 0
    prompt: str = "p"
    response: str = "r"
    reward: float = 1.0
    status: Status = field(default_factory=Status)
    weight_versions: list[str] = field(default_factory=lambda: ["3"])
    metadata: dict = field(default_factory=dict)
    remove_sample: bool = False
    multimodal_inputs: dict | None = None
    teacher_log_probs: list[float] | None = None


ROLLOUTS = [5, 5, 6, 7, 7]


def samples() -> list[Sample]:
    rows = zip(ROLLOUTS, PROMPTS, RESPONSES, MASKS, SAMPLED, strict=True)
    return [
        Sample(i, rollout, prompt + response, len(response), mask.int().tolist(), sampled.tolist())
        for i, (rollout, prompt, response, mask, sampled) in enumerate(rows)
    ]


def train_data() -> dict[str, Any]:
    """Returns slime's columns, as its trainer has them after it computed advantages."""
    sums = {r: sum(m.sum() for m, other in zip(MASKS, ROLLOUTS, strict=True) if other == r) for r in ROLLOUTS}
    return {
        "tokens": [torch.tensor(p + r) for p, r in zip(PROMPTS, RESPONSES, strict=True)],
        "response_lengths": [len(r) for r in RESPONSES],
        "rewards": ADVANTAGES,
        "raw_reward": [1.0] * 5,
        "truncated": [0] * 5,
        "sample_indices": list(range(5)),
        "rollout_ids": ROLLOUTS,
        "loss_masks": [m.int() for m in MASKS],
        "rollout_mask_sums": [sums[r] for r in ROLLOUTS],
        "rollout_log_probs": SAMPLED,
        "log_probs": OLD,
        "advantages": [a * torch.ones(len(r)) for a, r in zip(ADVANTAGES, RESPONSES, strict=True)],
        "returns": [torch.zeros(len(r)) for r in RESPONSES],
    }


def test_slime_averages_over_rollouts() -> None:
    data = train_data()

    def formula(logprobs: list[Tensor]) -> Tensor:
        """sum_of_sample_mean over rollout_mask_sums, divided by the number of rollouts."""
        rows = zip(logprobs, OLD, ADVANTAGES, MASKS, data["rollout_mask_sums"], strict=True)
        return sum((clipped(x, old, a) * m).sum() / total for x, old, a, m, total in rows) / 3  # type: ignore[return-value]

    paths = slime.to_paths(data, TEMPERATURE)
    check_step(paths, TreeLoss("ppo", "rollout_token_mean"), formula)
    by_sample = [
        {**row, "log_probs": old, "rewards": a}
        for row, old, a in zip(map(vars, samples()), OLD, ADVANTAGES, strict=True)
    ]
    for got, want in zip(slime.to_paths(by_sample, TEMPERATURE), paths, strict=True):
        assert got.rollout_tokens == want.rollout_tokens
        for name in ("tokens", "loss_mask", "old_logprobs", "rollout_logprobs"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
        assert got.policy_version.tolist() == [3] * len(got)

    def per_token(logprobs: list[Tensor]) -> Tensor:
        rows = zip(logprobs, OLD, ADVANTAGES, MASKS, strict=True)
        total = sum((clipped(x, old, a) * m).sum() for x, old, a, m in rows)
        return total / sum(m.sum() for m in MASKS)

    check_step(paths, TreeLoss("ppo", "token_mean"), per_token)


def test_slime_gets_values_of_responses() -> None:
    for rows in (samples(), train_data()):
        check_scores(slime.to_paths(rows, TEMPERATURE), lambda v, rows=rows: slime.to_rows(rows, v), list)


def test_a_part_of_a_rollout_keeps_its_weight() -> None:
    """The samples of one rank, of a rollout that has others elsewhere."""
    part = {name: values[1:4] for name, values in train_data().items()}
    assert [path.rollout_tokens for path in slime.to_paths(part)] == [10.0, 3.0, 10.0]


def test_slime_reads_saved_rollouts(tmp_path: Path) -> None:
    rows = [vars(sample) | {"status": "completed"} for sample in samples()]
    torch.save({"rollout_id": 4, "samples": rows}, tmp_path / "4.pt")
    loaded = slime.read_samples(tmp_path / "4.pt")
    assert [path.tokens.tolist() for path in slime.to_paths(loaded)] == [
        path.tokens.tolist() for path in slime.to_paths(samples())
    ]
    (tmp_path / "4.pt").write_bytes(b"no pickle")
    with pytest.raises(UserError, match=r"4\.pt: expected rollout data that slime saved"):
        slime.read_samples(tmp_path / "4.pt")


def test_slime_counts_rollouts_without_trained_tokens() -> None:
    rows = samples()
    rows[2].remove_sample = True
    with pytest.raises(UserError, match="rollout 6: no token is trained, but slime counts the rollout"):
        slime.to_paths(rows)
    assert [path.loss_tokens for path in slime.to_paths(rows, skip_untrained=True)] == [5, 5, 0, 5, 5]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: slime.to_paths([vars(samples()[0]) | {"new": 1}]), "sample 0: new: unknown field"),
        (
            lambda: slime.to_paths([vars(samples()[0]) | {"rollout_top_p_token_ids": [1]}]),
            "sample 0: rollout_top_p_token_ids: log-probs under nucleus sampling are not supported",
        ),
        (
            lambda: slime.to_paths([vars(samples()[0]) | {"loss_mask": [1]}]),
            "sample 0: loss_mask: expected 7 entries, got 1",
        ),
        (
            lambda: slime.to_paths(train_data() | {"log_probs": OLD[:2]}),
            "train_data: log_probs: expected 5 entries, got 2",
        ),
    ],
)
def test_what_would_change_the_loss_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
