"""Compares a run on several ranks with the same run on one."""

from collections.abc import Set
from typing import Any

import pytest
import torch

from tests.support.tiny_run import read_metrics, train
from titan_tree.distributed.settings import ParallelConfig
from titan_tree.run.config import Config
from titan_tree.run.trainer import Trainer

# A model with experts, and all losses of its routers.
EXPERTS: dict[str, Any] = {
    "model__name": "qwen3_moe",
    "router_loss__balance": 0.1,
    "router_loss__z": 0.01,
}
# Columns of metrics.csv that depend on the number of ranks.
SCHEDULE = {"forwards", "chain_peak_tokens", "gateway_gib", "extra_forward_tokens", "dummy_forwards"}


# Columns that also depend on it if trees are split over ranks: pieces repeat tokens.
REPEATED = {"executed_tokens", "scored_edges", "err"}


def assert_same_run(many: Config, one: Trainer, atol: float = 1e-6, but: Set[str] = frozenset()) -> None:
    """Asserts that several ranks logged the same numbers and saved the same weights as one process.

    Args:
        many: configuration of the finished run on several ranks. The checkpoint is loaded by one rank.
        one: the finished run of one process.
        atol: tolerance of the weights.
        but: columns that differ.
    """
    for ours, theirs in zip(read_metrics(many), read_metrics(one.config), strict=True):
        for column in theirs.keys() - SCHEDULE - but:
            # Terms of losses of policies are about 1 and cancel.
            within = {"rel": 1e-6, "abs": 1e-7} if column == "loss" else {"rel": 1e-5}
            expected = pytest.approx(float(theirs[column]), **within)
            assert float(ours[column]) == expected, (ours["step"], column)

    many.parallel = ParallelConfig()
    many.checkpoint.export_hf = False
    resumed = train(many)  # no step is left, so these are the weights of the checkpoint
    assert resumed.progress.step == many.training.steps
    assert not resumed.optimizer_step.good_steps
    for (parameter, ours), theirs in zip(
        resumed.model.state_dict().items(), one.model.state_dict().values(), strict=True
    ):
        ours, theirs = ours.to(ours.dtype), theirs.to(theirs.dtype)  # dequantizes
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=atol, msg=parameter)
