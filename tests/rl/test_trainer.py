"""The RL loop: trees give what flat training gives, runs resume exactly, and the command works."""

import csv
import logging
import random
import re
import runpy
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import titan_tree.rl.__main__ as command
from titan_tree.config.rl_tables import RLRunConfig
from titan_tree.config.toml import dump_config, load_tables
from titan_tree.data.packing import flat_trees, pack
from titan_tree.errors import UserError
from titan_tree.registry import ENVIRONMENTS
from titan_tree.rl.desk import DeskEpisode
from titan_tree.rl.environment import Reply
from titan_tree.rl.rollouts import Rollout
from titan_tree.rl.run import run
from titan_tree.rl.trainer import RLTrainer, WarmStart
from titan_tree.tree.token_tree import TokenTree

DEMO = Path(__file__).parents[2] / "train_configs" / "rl_demo.toml"
MEASURED = ("step_s", "logical_tokens_per_s", "executed_tokens_per_s", "sampling_s")
TINY = (
    "model.overrides.hidden_size=32",
    "model.overrides.head_dim=16",
    "data.global_batch_groups=2",
    "rl.rollouts=3",
    "rl.branches=3",
    "warm_start.steps=0",
    "lr_scheduler.warmup_steps=0",
    "training.steps=4",
    "checkpoint.interval=2",
    "metrics.loggers=[csv]",
)


class LettersEpisode(DeskEpisode):
    """Two turns, whatever the model says. The reward is the share of small letters."""

    def reply(self, turns: Sequence[str]) -> Reply:
        text = "".join(turns)
        if len(turns) == 1:
            return super().reply(["?caps"])
        return Reply(None, sum(map(str.islower, text)) / max(len(text), 1))


class Letters:
    """An environment that rewards some of what a model with random weights says."""

    def episode(self, draw: random.Random) -> LettersEpisode:
        return LettersEpisode(draw)


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    ENVIRONMENTS.register("letters", Letters)
    logger = logging.getLogger("titan_tree")
    before = logger.handlers[:], logger.level, logger.propagate
    yield
    logger.handlers, logger.level, logger.propagate = before  # the command changes them
    if dist.is_initialized():
        dist.destroy_process_group()


def tiny(folder: Path, *overrides: str) -> RLRunConfig:
    return load_tables(RLRunConfig, DEMO, [f"folder={folder}", *TINY, *overrides])


def rows(folder: Path) -> list[dict[str, str]]:
    with (folder / "metrics.csv").open(newline="") as file:
        return [{k: v for k, v in row.items() if k not in MEASURED} for row in csv.DictReader(file)]


def with_short_turns(trainer: RLTrainer) -> RLTrainer:
    """Ends turns after at most five tokens, because a model with random weights would hardly end them."""
    sample = trainer.sampler.sample

    def shorter(contexts: Any, limits: Any, stop: int, seed: int) -> Any:
        turns, draw = sample(contexts, limits, stop, seed), random.Random(seed)
        for tokens, logprobs, _ in turns:
            end = draw.randint(1, 5)
            if len(tokens) > end:
                tokens[end:], logprobs[end:] = [stop], [-5.0]
        return turns

    trainer.sampler.sample = shorter  # type: ignore[method-assign]
    return trainer


@pytest.mark.parametrize(("loss", "advantage"), [("grpo", "turn"), ("ppo", "group"), ("gspo", "group")])
@pytest.mark.parametrize("max_tokens", [512, 60])
def test_trees_train_as_flat_paths(tmp_path: Path, loss: str, advantage: str, max_tokens: int) -> None:
    """The same rollouts, with branches, as trees, as partitioned trees, and path by path."""
    options = ["rl.environment=letters", f"loss.name={loss}", f"rl.advantage={advantage}"]
    trainer = with_short_turns(RLTrainer(tiny(tmp_path, *options, f"data.max_tokens={max_tokens}")))
    by_task = trainer.paths(1)
    assert [len(paths) for paths in by_task] == [6, 6]
    found = []
    for trees in (
        [TokenTree.from_paths(paths) for paths in by_task],
        flat_trees([path for paths in by_task for path in paths]),
    ):
        step = trainer.tree_step.prepare(pack(trees, max_tokens))
        result = trainer.tree_step.run(step)
        gradient = torch.cat([p.grad.flatten() for p in trainer.model.parameters()])
        trainer.optimizers.zero_grad()
        found.append((result.loss.item(), gradient, result.counts.executed_tokens))
    (loss_value, gradient, tokens), (flat_loss, flat_gradient, flat_tokens) = found
    assert tokens < 0.6 * flat_tokens
    assert loss_value == pytest.approx(flat_loss, abs=1e-6)
    assert flat_gradient.norm() > 1e-4
    assert (gradient - flat_gradient).norm() <= 1e-5 * flat_gradient.norm()
    trainer.close()


def test_the_layout_of_the_configuration_is_used(tmp_path: Path) -> None:
    found = {}
    for layout in ("tree", "flat"):
        options = ["rl.environment=letters", f"data.layout={layout}", "training.steps=1"]
        trainer = with_short_turns(RLTrainer(tiny(tmp_path / layout, *options)))
        trainer.train()
        trainer.close()
        (found[layout],) = rows(tmp_path / layout)
    tree, flat = ({name: float(value) for name, value in found[layout].items()} for layout in found)
    assert tree["loss"] == pytest.approx(flat["loss"], abs=1e-6)
    assert tree["grad_norm"] == pytest.approx(flat["grad_norm"], rel=1e-5)
    assert (tree["reward"], flat["por"], flat["executed_tokens"]) == (
        flat["reward"],
        0,
        flat["logical_tokens"],
    )
    assert tree["executed_tokens"] < 0.6 * flat["executed_tokens"]


def test_a_resumed_run_equals_an_uninterrupted_one(tmp_path: Path) -> None:
    """Weights and metrics are equal bit for bit."""
    weights = {}
    for name, all_steps in {"whole": [4], "resumed": [2, 4]}.items():
        for steps in all_steps:
            options = ["rl.environment=letters", f"training.steps={steps}", "rl.max_turn_tokens=6"]
            trainer = with_short_turns(RLTrainer(tiny(tmp_path / name, *options)))
            trainer.train()
            weights[name] = [p.detach().clone() for p in trainer.model.parameters()]
            trainer.close()
    assert all(map(torch.equal, weights["whole"], weights["resumed"]))
    assert rows(tmp_path / "whole") == rows(tmp_path / "resumed")
    values = [(float(row["reward"]), float(row["grad_norm"])) for row in rows(tmp_path / "whole")]
    assert len(set(values)) == 4  # each step has tasks and rollouts of its own
    assert all(norm > 0 for _, norm in values)


def test_metrics_describe_the_rollouts(tmp_path: Path) -> None:
    class Recorded(RLTrainer):
        def _play(self, rollouts: list[Rollout], seed: str) -> None:
            super()._play(rollouts, seed)
            played.append(list(rollouts))

    played: list[list[Rollout]] = []
    trainer = with_short_turns(Recorded(tiny(tmp_path, "rl.environment=letters", "training.steps=1")))
    trainer.train()
    trainer.close()
    roots, forks = played
    (row,) = rows(tmp_path)
    assert (len(roots), len(forks), float(row["rollouts"])) == (6, 6, 12)
    assert float(row["reward"]) == pytest.approx(sum(r.reward for r in roots) / 6)
    inherited = sum(sum(fork.mask[: fork.starts[1]]) for fork in forks)
    assert float(row["sampled_tokens"]) == sum(sum(r.mask) for r in roots + forks) - inherited
    assert float(row["cut_off"]) == 0.0


def test_command_runs_the_warm_start_and_then_rl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--config", str(DEMO), f"folder={tmp_path}", *TINY, "training.steps=3"]
    arguments += ["warm_start.steps=6", "warm_start.interval=2", "warm_start.reward=0", "warm_start.tasks=2"]
    arguments += ["warm_start.measured_tasks=3", "metrics.loggers=[csv,console]"]
    assert command.main(arguments) == 0
    assert [row["step"] for row in rows(tmp_path / "warm_start")] == ["1", "2"]  # the reward was high enough
    assert rows(tmp_path / "warm_start")[1]["validation_reward"] == "0.0"
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3"]
    assert re.search(r"step 3/3  loss .*reward 0\.000", capsys.readouterr().out)
    first = rows(tmp_path)
    assert command.main(arguments) == 0  # nothing is left to do
    assert "nothing left to train" in capsys.readouterr().out
    assert rows(tmp_path) == first
    assert command.main([*arguments, "warm_start.lr=0.5"]) == 2
    assert (
        "warm_start: its warm start had other settings: warm_start.lr: 0.003 -> 0.5"
        in capsys.readouterr().err
    )
    config = load_tables(RLRunConfig, tmp_path / "config.toml")
    assert config.model.hf_path == str(tmp_path / "warm_start" / "hf")
    (tmp_path / "again.toml").write_text(dump_config(config))
    assert load_tables(RLRunConfig, tmp_path / "again.toml") == config


def test_the_script_of_the_measurements_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    overrides = [*TINY, "warm_start.steps=2", "warm_start.interval=2", "warm_start.reward=0"]
    file = tmp_path / "rl.csv"
    arguments = ["--seed", "1", "--csv", str(file), "--folder", str(tmp_path / "run"), "--config", str(DEMO)]
    overrides = [each for each in overrides if not each.startswith("metrics.")]
    monkeypatch.setattr(sys, "argv", ["rl.py", *arguments, *overrides, "training.steps=2"])
    runpy.run_path(str(DEMO.parents[1] / "scripts" / "benchmark" / "rl.py"), run_name="__main__")
    printed = capsys.readouterr().out
    assert re.search(r"tree: loss .*\nflat: loss .*\ngradients differ by .* of their norm", printed)
    assert "step 1: sampler and tree_logprobs differ by at most" in printed
    with file.open(newline="") as lines:
        assert [row["phase"] for row in csv.DictReader(lines)] == ["warm_start", "rl", "rl"]


def test_a_warm_start_that_misses_its_reward_ends_with_an_error(tmp_path: Path) -> None:
    options = ["warm_start.steps=2", "warm_start.reward=0.9", "warm_start.tasks=1"]
    for _ in range(2):  # also when nothing is left to train
        with pytest.raises(
            UserError, match=r"expected a mean reward of at least 0.9, got 0\.\d+ after 2 steps"
        ):
            run(tiny(tmp_path, *options, "warm_start.measured_tasks=2"))
        dist.destroy_process_group()
    assert not (tmp_path / "warm_start" / "hf").exists()


def test_a_warm_start_that_was_interrupted_after_its_reward_trains_no_further(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ["warm_start.steps=6", "warm_start.interval=2", "warm_start.tasks=1", "training.steps=1"]
    config = tiny(tmp_path, *options, "warm_start.measured_tasks=2", "warm_start.reward=0")
    with monkeypatch.context() as patch:
        patch.setattr(WarmStart, "finish", lambda self: 1 / 0)  # before the export
        with pytest.raises(ZeroDivisionError):
            run(config)
    dist.destroy_process_group()
    assert not (tmp_path / "warm_start" / "hf").exists()
    run(config)
    assert [row["step"] for row in rows(tmp_path / "warm_start")] == ["1", "2"]
    assert (tmp_path / "warm_start" / "hf").exists()


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("data.files=demo", "data.files: expected no files, because the environment makes the tasks"),
        ("data.merge=batch", "data.merge: expected no value, because an environment has no files"),
        ("validation.files=demo", "validation.files: expected no value"),
        ("training.epochs=1", "training.steps: expected no value together with training.epochs"),
        ("rl.environment=dsek", "rl.environment: expected one of desk"),
        ("rl.rollout=3", "unknown key 'rl.rollout'; did you mean 'rl.rollouts'"),
        ("partition.strategy=none", "partition.strategy: expected another one than 'none'"),
        ("warm_start.steps=-1", "warm_start.steps: expected at least 0"),
    ],
)
def test_wrong_configurations_are_refused(tmp_path: Path, override: str, message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        tiny(tmp_path, override)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.overrides.vocab_size=512"], "vocab_size: expected at most the tokenizer's 282 ids, got 512"),
        (["data.tokenizer=null"], "data.tokenizer: expected a tokenizer, got none"),
        (["warm_start.steps=2", "rl.environment=letters"], "'letters' has no method demonstrations"),
        (["rl.max_rollout_tokens=20"], "expected more than the 28 tokens of a prompt, got 20"),
        (["model.name=qwen3_moe"], "expected a dense decoder of titan_tree"),
    ],
)
def test_settings_that_do_not_fit_together_are_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(tiny(tmp_path, *overrides))
