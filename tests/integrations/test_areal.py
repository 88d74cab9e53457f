"""Rows of AReaL: on trees, and in plain PyTorch with each row alone."""

from collections.abc import Callable, Sequence
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
    per_sample,
)
from titan_tree.components.tree_loss import TreeLoss, register_loss
from titan_tree.errors import UserError
from titan_tree.integrations import areal
from titan_tree.tree.batch import PathPairs


def padded(rows: Sequence[Sequence[float]], dtype: torch.dtype = torch.float32) -> Tensor:
    width = max(map(len, rows)) + 1
    return torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], dtype=dtype)


def areal_batch(computed: bool) -> dict[str, Any]:
    """Returns a batch of rollouts with recomputed log-probs, before or after ``compute_advantages``."""
    batch = {
        "input_ids": padded([p + r for p, r in zip(PROMPTS, RESPONSES, strict=True)], torch.long),
        "attention_mask": padded([[1] * (len(p) + len(r)) for p, r in zip(PROMPTS, RESPONSES, strict=True)]),
        "loss_mask": padded(per_sample(MASKS, 0.0)),
        "logprobs": padded(per_sample(SAMPLED, 0.0)),
        "versions": padded(per_sample([torch.full_like(m, 3) for m in MASKS], -1), torch.long),
        "prox_logp": torch.roll(padded(per_sample(OLD, 0.0)), -1, dims=-1),
        "rewards": torch.ones(5),
    }
    if computed:
        for name in ("loss_mask", "logprobs"):
            batch[name] = torch.roll(batch[name], -1, dims=-1)
        batch["advantages"] = batch["loss_mask"] * torch.tensor(ADVANTAGES)[:, None]
    return batch


def decoupled(logprobs: Tensor, pairs: PathPairs) -> Tensor:
    assert pairs.old_logprobs is not None
    assert pairs.rollout_logprobs is not None
    weight = (pairs.old_logprobs - pairs.rollout_logprobs).exp()
    return clipped(logprobs, pairs.old_logprobs, pairs.advantage) * weight


def test_areal_has_the_same_losses() -> None:
    def formula(logprobs: list[Tensor], is_decoupled: bool) -> Tensor:
        """ppo_actor_loss_fn, with loss_weight_fn = the number of trained tokens."""
        total = torch.zeros(())
        for x, old, sampled, a, m in zip(logprobs, OLD, SAMPLED, ADVANTAGES, MASKS, strict=True):
            weight = (old - sampled).exp() if is_decoupled else 1.0
            total = total + (clipped(x, old, a) * weight * m).sum()
        return total / sum(m.count_nonzero() for m in MASKS)

    paths = areal.to_paths(areal_batch(computed=True), TEMPERATURE)
    check_step(paths, TreeLoss("ppo", "token_mean"), lambda x: formula(x, False))
    register_loss("decoupled")(decoupled)
    check_step(paths, TreeLoss("decoupled", "token_mean"), lambda x: formula(x, True))


def test_arrays_of_areal_are_aligned_before_and_after_it_moves_them() -> None:
    before, after = (areal.to_paths(areal_batch(computed)) for computed in (False, True))
    for got, want, mask in zip(before, after, MASKS, strict=True):
        assert got.loss_tokens == mask.sum()
        for name in ("tokens", "loss_mask", "old_logprobs", "policy_version"):
            np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
        np.testing.assert_array_equal(got.rollout_logprobs[1:], want.rollout_logprobs[1:])
        assert before[0].advantage is None


def test_areal_gets_values_moved_to_the_left() -> None:
    batch = areal_batch(computed=False)

    def moved(values: list[Tensor]) -> Tensor:
        rows = torch.roll(padded(per_sample(values, float("nan"))), -1, dims=-1)
        rows[:, -1] = 0.0
        return rows

    check_scores(areal.to_paths(batch, TEMPERATURE), lambda values: areal.to_rows(batch, values), moved)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: areal.to_paths(areal_batch(True) | {"attention_mask": padded([[0, 1]] * 5)}),
            "batch: attention_mask: expected",
        ),
        (
            lambda: areal.to_paths(areal_batch(True) | {"pixel_values": 1}),
            "batch: pixel_values: expected text only",
        ),
    ],
)
def test_what_would_change_the_loss_is_refused(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        make()
