"""Reinforcement learning on several ranks samples and trains exactly as one process does."""

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.multiprocessing import ProcessExitedException

from tests.support.cases import exhaustive, slow_except
from tests.support.processes import as_rank, run_ranks
from tests.support.rl_runs import Letters, rows, tiny, with_short_turns
from tests.support.rollout_server import RolloutServer, rollout_server
from titan_tree import build_model
from titan_tree.rl.cached_sampler import CachedSampler
from titan_tree.rl.environment import ENVIRONMENTS
from titan_tree.rl.run import run
from titan_tree.rl.server.vllm import VLLM
from titan_tree.rl.settings import RLRunConfig
from titan_tree.rl.trainer import RLTrainer
from titan_tree.run.checkpoint.checkpoints import Checkpoints
from titan_tree.run.checkpoint.storage import CheckpointWriter
from titan_tree.run.optimizer_step import OptimizerStep
from titan_tree.signals import Interrupted

# Columns of metrics.csv that depend on the number of ranks.
OF_RANKS = {
    *("forwards", "chain_peak_tokens", "gateway_gib", "extra_forward_tokens", "dummy_forwards"),
    *("executed_tokens", "scored_edges", "err", "idle_share", "planned_idle_share"),
}
LETTERS = ("rl.environment=letters", "training.steps=2", "optimizer.eps=1e-3", "rl.max_turn_tokens=6")
SCORED = ("loss.kl.coefficient=0.1", "loss.correction.level=token")
FEW = ("data.global_batch_groups=3", "rl.rollouts=2", "rl.branches=1", "training.steps=1")
CASES: dict[str, tuple[str, ...]] = {
    "odd tasks": (*FEW, "checkpoint.interval=0"),
    "scored partitions": (*FEW, *SCORED, "data.max_tokens=24"),
    "one task": ("data.global_batch_groups=1",),
    "scored": SCORED,
    "LoRA": ("lora.rank=2", "loss.kl.coefficient=0.1"),
    "experts": ("model.name=qwen3_moe",),
    "each edge once": ("loss.reduction=distinct_token_mean",),
    "not balanced": ("data.layout=flat", "parallel.balance=false"),
    "two tasks": (),
    "replicas": (),
    "shared tokens": SCORED,
}
# What the run on two ranks has besides.
OF_TWO = {"replicas": ("parallel.replicate=2",), "shared tokens": ("parallel.sequence_parallel=2",)}
EXHAUSTIVE = tuple(CASES)[2:]


def config(folder: Path, name: str, *more: str) -> RLRunConfig:
    ENVIRONMENTS.register("letters", Letters, replace=True)
    return tiny(folder, *LETTERS, *CASES[name], *more)


def train(config: RLRunConfig) -> RLTrainer:
    trainer = RLTrainer(config)
    trainer = trainer if config.rl.server.url else with_short_turns(trainer)
    trainer.train()
    trainer.close()
    return trainer


def train_ranks(rank: int, ports: list[int], num_ranks: int, folder: Path, name: str, *more: str) -> None:
    with as_rank(rank, num_ranks, ports[0]):
        train(config(folder, name, *more))


def assert_same_run(many: RLRunConfig, one: RLTrainer, tolerance: float = 1e-5) -> None:
    """Asserts that several ranks sampled the same rollouts, and trained alike, as one process did.

    The terms of a loss are about 1 and cancel, so losses are equal within 1e-6, and not within 1e-6 of their
    sum. ``tolerance`` is that of weights and other metrics.
    """
    for ours, theirs in zip(rows(Path(many.folder)), rows(Path(one.config.folder)), strict=True):
        for column in ("reward", "cut_off", "rollouts", "sampled_tokens"):
            assert ours[column] == theirs[column], column
        for column in theirs.keys() - OF_RANKS:
            within = {"rel": tolerance, "abs": tolerance / 100} if column != "loss" else {"abs": 1e-6}
            expected = pytest.approx(float(theirs[column]), **within)
            assert float(ours[column]) == expected, (ours["step"], column)
    if not one.config.checkpoint.interval:
        return
    resumed = train(many)  # no step is left
    assert not resumed.optimizer_step.good_steps
    weights = one.model.state_dict()
    for name, ours in resumed.model.state_dict().items():
        torch.testing.assert_close(ours, weights[name], rtol=tolerance, atol=tolerance / 10, msg=name)


@pytest.mark.parametrize("name", slow_except(["odd tasks"], exhaustive(EXHAUSTIVE, CASES)))
def test_two_ranks_equal_one(tmp_path: Path, name: str) -> None:
    run_ranks(train_ranks, 2, 2, tmp_path / "two", name, *OF_TWO.get(name, ()))
    assert_same_run(config(tmp_path / "two", name), train(config(tmp_path / "one", name)))


@pytest.mark.exhaustive
@pytest.mark.parametrize("more", [(), ("parallel.replicate=2", "parallel.sequence_parallel=2")])
def test_four_ranks_equal_one(tmp_path: Path, more: tuple[str, ...]) -> None:
    """One rank has no task."""
    run_ranks(train_ranks, 4, 4, tmp_path / "four", "odd tasks", *more)
    assert_same_run(config(tmp_path / "four", "odd tasks"), train(config(tmp_path / "one", "odd tasks")))


# Where a run is killed: at the start of a method, after so many steps, on these ranks.
KILLED: dict[str, tuple[type, str, int, tuple[int, ...]]] = {
    "amid sampling": (CachedSampler, "sample", 3, (1,)),
    "after the rollouts": (OptimizerStep, "run", 3, (0, 1)),
    "before a checkpoint": (Checkpoints, "save", 4, (0,)),
    "amid the tensors of a checkpoint": (CheckpointWriter, "write_data", 4, (1,)),
    "amid the end of a checkpoint": (CheckpointWriter, "finish", 4, (0,)),
    "after a checkpoint": (RLTrainer, "paths", 2, (0, 1)),
}
FOUR = ("training.steps=4", "checkpoint.interval=2")
ASYNCHRONOUS = (*FOUR, "rl.async_steps=1", "rl.server.model=m")


def train_killed(rank: int, ports: list[int], folder: Path, place: str, *more: str) -> None:
    owner, name, steps, killed = KILLED.get(place, (VLLM, "load", 2, (0,)))
    with as_rank(rank, 2, ports[0]):
        trainer = RLTrainer(config(folder, "two tasks", *more))
        method = getattr(owner, name)

        def dying(*args: Any, **kwargs: Any) -> Any:
            if rank in killed and trainer.progress.step == steps:
                os.kill(os.getpid(), signal.SIGKILL)
            return method(*args, **kwargs)

        setattr(owner, name, dying)
        trainer = trainer if trainer.config.rl.server.url else with_short_turns(trainer)
        trainer.train()


def assert_resumes(whole: Path, killed: Path, place: str, *more: str) -> None:
    """Kills a run, resumes it, and asserts that it did the same as ``whole``, bit for bit."""
    with pytest.raises(ProcessExitedException, match="SIGKILL"):
        run_ranks(train_killed, 2, killed, place, *more, fresh=True)
    left = [path.suffix for path in (killed / "checkpoints").glob("step-4*")]
    assert left in ([[".partial"]] if place == "amid the end of a checkpoint" else [[], [".partial"]])
    run_ranks(train_ranks, 2, 2, killed, "two tasks", *more)
    assert {path.name for path in (killed / "checkpoints").glob("step-*")} == {"step-2", "step-4"}
    expected, resumed = (
        [{k: v for k, v in row.items() if "idle" not in k} for row in rows(folder)]
        for folder in (whole, killed)
    )
    assert resumed == expected
    expected, resumed = (
        train(config(folder, "two tasks", *more)).model.state_dict() for folder in (whole, killed)
    )
    for name, ours in resumed.items():
        assert torch.equal(ours, expected[name]), name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that was not killed."""
    folder = tmp_path_factory.mktemp("whole")
    run_ranks(train_ranks, 2, 2, folder, "two tasks", *FOUR)
    return folder


@pytest.mark.exhaustive
@pytest.mark.parametrize("place", KILLED)
def test_ranks_that_were_killed_resume_exactly(whole: Path, tmp_path: Path, place: str) -> None:
    assert_resumes(whole, tmp_path, place, *FOUR)


@pytest.mark.exhaustive
def test_ranks_that_were_killed_amid_an_update_of_servers_resume_exactly(tmp_path: Path) -> None:
    """The servers are left paused. The run one step ahead equals one that was stopped at the checkpoint."""
    base = config(tmp_path, "two tasks")
    model = build_model(base.model.name, "debug", **base.model.overrides)
    model.init_weights(base.training.seed)
    server = RolloutServer(model)
    with rollout_server(server) as url:
        more = (*ASYNCHRONOUS, f"rl.server.url={url}")
        run_ranks(train_ranks, 2, 2, tmp_path / "whole", "two tasks", *more, "training.steps=2")
        run_ranks(train_ranks, 2, 2, tmp_path / "whole", "two tasks", *more)
        assert_resumes(tmp_path / "whole", tmp_path / "killed", "amid an update", *more)
    assert not server.paused


@pytest.mark.exhaustive
def test_an_error_or_a_signal_of_one_rank_ends_both(tmp_path: Path) -> None:
    run_ranks(end_early, 2, tmp_path, ZeroDivisionError, "by zero")
    run_ranks(end_early, 2, tmp_path, Interrupted, "143")


def end_early(rank: int, ports: list[int], folder: Path, ending: type[BaseException], message: str) -> None:
    """Rank 1 ends the run while rank 0 samples for step 2."""
    with as_rank(rank, 2, ports[0]):
        trainer = with_short_turns(RLTrainer(config(folder / message, "two tasks")))
        sample = trainer.sample

        def end(tasks: Sequence[str], number: int) -> Any:
            if rank == 1 and trainer.progress.step == 1:
                _ = os.kill(os.getpid(), signal.SIGTERM) if ending is Interrupted else 1 // 0
            return sample(tasks, number)

        trainer.sample = end  # type: ignore[method-assign]
        with pytest.raises(ending, match=message):
            trainer.train()
        assert trainer.progress.step == 1
        trainer.close()


@pytest.mark.exhaustive
def test_a_warm_start_on_two_ranks_equals_that_on_one(tmp_path: Path) -> None:
    run_ranks(warm_start, 2, 2, tmp_path / "two")
    warm_start(0, [0], 1, tmp_path / "one")
    for folder in ("warm_start", "."):
        two, one = rows(tmp_path / "two" / folder), rows(tmp_path / "one" / folder)
        assert len(two) == len(one) == 2
        for ours, theirs in zip(two, one, strict=True):
            for column in theirs.keys() - OF_RANKS:
                expected = pytest.approx(float(theirs[column] or 0), rel=1e-5, abs=1e-7)
                assert float(ours[column] or 0) == expected, column


def warm_start(rank: int, ports: list[int], num_ranks: int, folder: Path) -> None:
    own = ["warm_start.steps=2", "warm_start.interval=2", "warm_start.reward=0", "warm_start.tasks=3"]
    own += ["warm_start.measured_tasks=3", "optimizer.eps=1e-3", "training.steps=2"]
    with as_rank(rank, num_ranks, ports[0]) if num_ranks > 1 else nullcontext():
        run(tiny(folder, *own))


# What both runs have, and what only the run on two ranks has.
SERVED: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "one step ahead": (("rl.async_steps=1",), ()),
    "in step": ((), ()),
    "adapter": (("rl.server.weights=adapter", "lora.rank=2", "rl.async_steps=1"), ()),
    "experts": (("model.name=qwen3_moe", "data.replay=first"), ("parallel.expert_parallel=2",)),
}


@pytest.mark.parametrize("name", slow_except([], exhaustive(tuple(SERVED)[1:], SERVED)))
def test_two_ranks_with_two_servers_equal_one_rank_with_one(tmp_path: Path, name: str) -> None:
    more = ("rl.server.model=m", *SERVED[name][0])
    base = config(tmp_path, "two tasks", *more)
    models = [build_model(base.model.name, "debug", **base.model.overrides) for _ in range(3)]
    for model in models:
        model.init_weights(base.training.seed)
    servers = [RolloutServer(model) for model in models]
    with ExitStack() as stack:
        first, second, third = (stack.enter_context(rollout_server(server)) for server in servers)
        urls = f"rl.server.url=[{first}, {second}]"
        run_ranks(train_ranks, 2, 2, tmp_path / "two", "two tasks", urls, *more, *SERVED[name][1])
        one = train(config(tmp_path / "one", "two tasks", f"rl.server.url={third}", *more))
        assert_same_run(config(tmp_path / "two", "two tasks", urls, *more), one)
    assert servers[0].version == servers[1].version
    assert all(server.samples for server in servers)
    assert sum(len(server.samples) for server in servers[:2]) == len(servers[2].samples)


@pytest.mark.slow
def test_ranks_update_their_servers_between_the_rounds_of_all_ranks(tmp_path: Path) -> None:
    """With several steps ahead, the ranks sample at any time. Which version samples depends on it."""
    more = ("rl.server.model=m", "rl.async_steps=2")
    base = config(tmp_path, "two tasks", *more)
    model = build_model(base.model.name, "debug", **base.model.overrides)
    model.init_weights(base.training.seed)
    with rollout_server(RolloutServer(model)) as url:
        run_ranks(train_ranks, 2, 2, tmp_path, "two tasks", f"rl.server.url={url}", *more)
    lags = [float(row["policy_lag"]) for row in rows(tmp_path)]
    assert lags[0] == 0
    assert all(0 < lag <= 2 for lag in lags[1:])
