"""Rows of prime-rl: on trees, and in plain PyTorch with each row alone."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tests.support.framework_rows import (
    ADVANTAGES,
    MASKS,
    PROMPTS,
    RESPONSES,
    SAMPLED,
    TEMPERATURE,
    check_scores,
    check_step,
    clipped,
    per_sample,
)
from titan_tree.components.tree_loss import TreeLoss, register_loss
from titan_tree.errors import UserError
from titan_tree.integrations import prime_rl
from titan_tree.tree.batch import PathPairs


def training_samples(**changes: Any) -> list[SimpleNamespace]:
    columns = {
        "mask": [[bool(x) for x in row] for row in per_sample(MASKS, 0.0)],
        "logprobs": per_sample(SAMPLED, 0.0),
        "advantages": per_sample(
            [a * torch.ones(len(r)) for a, r in zip(ADVANTAGES, RESPONSES, strict=True)], 0.0
        ),
        "temperatures": per_sample([TEMPERATURE * torch.ones(len(r)) for r in RESPONSES], 1.0),
        "rl_weights": [None] * 5,
    }
    rows = [
        {"token_ids": p + r, "env_name": "e", "mm_refs": None, **{n: c[i] for n, c in columns.items()}}
        for i, (p, r) in enumerate(zip(PROMPTS, RESPONSES, strict=True))
    ]
    return [SimpleNamespace(**{**row, **changes}) for row in rows]


PADDING = 3  # tokens at the end of a micro-batch


def micro_batch(rows: Sequence[SimpleNamespace]) -> dict[str, Any]:
    def joined(name: str) -> list[Any]:
        return [x for row in rows for x in getattr(row, name)] + [name == "token_ids"] * PADDING

    return {
        "input_ids": list(map(int, joined("token_ids"))),
        "loss_mask": joined("mask"),
        "advantages": joined("advantages"),
        "inference_logprobs": joined("logprobs"),
        "position_ids": [i for row in rows for i in range(len(row.token_ids))] + list(range(PADDING)),
        "sequence_lengths": [len(row.token_ids) for row in rows],
        "temperatures": joined("temperatures"),
        "env_names": ["e"] * len(joined("token_ids")),
    }


def dppo(logprobs: Tensor, sampled: Tensor, advantage: Any, high: float, low: float, tau: float) -> Tensor:
    """prime-rl's default loss of each token: DPPO's mask on probabilities, and a squared log-ratio."""
    difference = logprobs.detach().exp() - sampled.exp()
    is_masked = torch.where(torch.as_tensor(advantage) > 0, difference > high, difference < -low)
    log_ratio = logprobs - sampled
    return tau * log_ratio**2 - ~is_masked * advantage * log_ratio.exp()


def tree_dppo(logprobs: Tensor, pairs: PathPairs, high: float = 0.02, low: float = 0.02) -> Tensor:
    assert pairs.rollout_logprobs is not None
    return dppo(logprobs, pairs.rollout_logprobs, pairs.advantage, high, low, 0.1)


def test_prime_rl_has_the_same_loss() -> None:
    def formula(logprobs: list[Tensor], weights: Sequence[float] = (1, 1, 1, 1, 1)) -> Tensor:
        """The sum over trained tokens, divided by their number."""
        rows = zip(logprobs, SAMPLED, ADVANTAGES, MASKS, weights, strict=True)
        total = sum((w * dppo(x, s, a, 0.02, 0.02, 0.1) * m).sum() for x, s, a, m, w in rows)
        return total / sum(m.sum() * (w > 0) for m, w in zip(MASKS, weights, strict=True))

    rows = training_samples()
    register_loss("dppo")(tree_dppo)
    loss = TreeLoss("dppo", "token_mean")
    check_step(prime_rl.to_paths(rows), loss, formula)
    check_step(prime_rl.to_paths([micro_batch(rows[:3]), micro_batch(rows[3:])]), loss, formula)
    rows[1].rl_weights = [0.0] * len(rows[1].token_ids)
    check_step(prime_rl.to_paths(rows), loss, lambda x: formula(x, (1, 0, 1, 1, 1)))


def test_weights_of_prime_rl_multiply_the_advantage() -> None:
    rows = training_samples()
    rows[0].rl_weights = [0.5] * len(rows[0].token_ids)

    def formula(logprobs: list[Tensor]) -> Tensor:
        columns = zip(logprobs, SAMPLED, ADVANTAGES, MASKS, (0.5, 1, 1, 1, 1), strict=True)
        total = sum((w * clipped(x, s, a) * m).sum() for x, s, a, m, w in columns)
        return total / sum(m.sum() for m in MASKS)

    check_step(prime_rl.to_paths(rows), TreeLoss("ppo", "token_mean"), formula)


def test_prime_rl_gets_a_value_for_every_token() -> None:
    def every_token(values: list[Tensor]) -> list[Tensor]:
        return [torch.tensor(row) for row in per_sample(values, float("nan"))]

    rows = training_samples(temperatures=None)
    for row in rows:
        row.temperatures = [TEMPERATURE] * len(row.token_ids)
    check_scores(prime_rl.to_paths(rows), lambda values: prime_rl.to_rows(rows, values), every_token)
    packed = [micro_batch(rows[:3]), micro_batch(rows[3:])]
    check_scores(
        prime_rl.to_paths(packed),
        lambda values: prime_rl.to_rows(packed, values),
        lambda values: [
            torch.cat([*part, torch.full((PADDING,), torch.nan)])
            for part in (every_token(values)[:3], every_token(values)[3:])
        ],
    )


def test_prime_rl_records_experts() -> None:
    rows = training_samples()
    for row in rows:
        experts = np.arange(len(row.token_ids) * 6, dtype=np.uint8).reshape(-1, 2, 3)
        row.routed_experts = SimpleNamespace(data=experts.tobytes(), shape=list(experts.shape), dtype="uint8")
    for path, row in zip(prime_rl.to_paths(rows), rows, strict=True):
        assert path.routed_experts.flatten().tolist() == list(range(6 * len(row.token_ids)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: prime_rl.to_paths(training_samples(ce_weights=[1.0])),
            "row 0: ce_weights: only the component",
        ),
        (
            lambda: prime_rl.to_paths([micro_batch(training_samples()) | {"position_ids": [0, 2] * 20}]),
            "row 0: position_ids: expected",
        ),
    ],
)
def test_what_would_change_the_loss_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
