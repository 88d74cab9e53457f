"""Reinforcement learning on several ranks samples and trains exactly as one process does."""

from pathlib import Path

import pytest
import torch

from tests.support.cases import exhaustive, slow_except
from tests.support.processes import as_rank, run_ranks
from tests.support.rl_runs import Letters, rows, tiny, with_short_turns
from titan_tree.config.rl import RLRunConfig
from titan_tree.registry import ENVIRONMENTS
from titan_tree.rl.trainer import RLTrainer

# Columns of metrics.csv that depend on the number of ranks.
OF_RANKS = {
    *("forwards", "chain_peak_tokens", "gateway_gib", "extra_forward_tokens", "dummy_forwards"),
    *("executed_tokens", "scored_edges", "err", "idle_share", "planned_idle_share"),
}
LETTERS = ("rl.environment=letters", "training.steps=2", "optimizer.eps=1e-3", "rl.max_turn_tokens=6")
SCORED = ("loss.kl.coefficient=0.1", "loss.correction.level=token")
CASES: dict[str, tuple[str, ...]] = {
    "odd tasks": (*("data.global_batch_groups=3", "rl.rollouts=2", "rl.branches=1"), "training.steps=1"),
    "scored partitions": (*SCORED, "data.max_tokens=24"),
    "one task": ("data.global_batch_groups=1",),
    "scored": SCORED,
    "LoRA": ("lora.rank=2", "loss.kl.coefficient=0.1"),
    "experts": ("model.name=qwen3_moe",),
    "each edge once": ("loss.reduction=distinct_token_mean",),
    "not balanced": ("data.layout=flat", "parallel.balance=false"),
    "replicas": (),
}
OF_TWO = {"replicas": ("parallel.replicate=2",)}  # what the run on two ranks has besides
EXHAUSTIVE = tuple(CASES)[2:]


def config(folder: Path, name: str, *more: str) -> RLRunConfig:
    ENVIRONMENTS.register("letters", Letters, replace=True)
    return tiny(folder, *LETTERS, *CASES[name], *more)


def train(config: RLRunConfig) -> RLTrainer:
    trainer = with_short_turns(RLTrainer(config))
    trainer.train()
    trainer.close()
    return trainer


def train_ranks(rank: int, ports: list[int], num_ranks: int, folder: Path, name: str, *more: str) -> None:
    with as_rank(rank, num_ranks, ports[0]):
        train(config(folder, name, *more))


def assert_same_run(many: Path, name: str, one: RLTrainer) -> None:
    for ours, theirs in zip(rows(many), rows(Path(one.config.folder)), strict=True):
        for column in ("reward", "cut_off", "rollouts", "sampled_tokens"):
            assert ours[column] == theirs[column], column
        for column in theirs.keys() - OF_RANKS:
            expected = pytest.approx(float(theirs[column]), rel=1e-5, abs=1e-7)
            assert float(ours[column]) == expected, (ours["step"], column)
    resumed = train(config(many, name))  # no step is left
    assert not resumed.steps_trained
    weights = one.model.state_dict()
    for name, ours in resumed.model.state_dict().items():
        torch.testing.assert_close(ours, weights[name], rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", slow_except(["odd tasks"], exhaustive(EXHAUSTIVE, CASES)))
def test_two_ranks_equal_one(tmp_path: Path, name: str) -> None:
    run_ranks(train_ranks, 2, 2, tmp_path / "two", name, *OF_TWO.get(name, ()))
    assert_same_run(tmp_path / "two", name, train(config(tmp_path / "one", name)))
