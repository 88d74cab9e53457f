"""The RL loop: trees give what flat training gives, runs resume exactly, and the command works."""

import copy
import dataclasses
import logging
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from benchmarks.__main__ import main as benchmark
from benchmarks.rl import CheckedRLTrainer
from tests.support.cases import exhaustive, slow_except
from tests.support.hf_families import hf_family
from tests.support.rl_runs import DEMO, TINY, rows, tiny, with_short_turns
from titan_tree import register_loss, tree_logprobs
from titan_tree.cli import main
from titan_tree.cli.bench.record import read_csv
from titan_tree.config.toml import dump_config, load_tables
from titan_tree.data.packing import flat_trees, pack
from titan_tree.errors import UserError
from titan_tree.rl.environment import ENVIRONMENTS, Desk, DeskEpisode
from titan_tree.rl.rollouts import Rollout
from titan_tree.rl.run import WarmStart, run, warm_start_config
from titan_tree.rl.settings import RLRunConfig
from titan_tree.rl.trainer import RLTrainer
from titan_tree.tree.batch import PathPairs
from titan_tree.tree.context import Completion
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


@pytest.mark.parametrize("loss", ["ppo", "gspo"])
@pytest.mark.parametrize("max_tokens", exhaustive([512], [512, 60]))
def test_trees_train_as_flat_paths(tmp_path: Path, loss: str, max_tokens: int) -> None:
    """The same rollouts, with branches, as trees, as partitioned trees, and path by path."""
    options = ["rl.environment=letters", f"loss.name={loss}", "rl.advantage=spo"]
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


def test_the_layout_of_the_configuration_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both tasks have the same rollouts, but only data.merge lets rows of different tasks share tokens."""

    def paths_twice(step: int) -> list[list[TokenPath]]:
        (paths,) = RLTrainer.paths(trainer, step)
        return [paths, copy.deepcopy(paths)]

    found = {}
    for layout, keys in {
        **{layout: [f"data.layout={layout}"] for layout in ("tree", "leaf", "flat")},
        "merged": ["data.merge=batch", "data.max_tokens=4096"],
    }.items():
        options = ["rl.environment=letters", "training.steps=1", *keys]
        options += ["data.global_batch_groups=1"]  # the other task is a copy
        options += ["loss.reduction=distinct_token_mean"]  # a weight depends on the other paths of the tree
        trainer = with_short_turns(RLTrainer(tiny(tmp_path / layout, *options)))
        monkeypatch.setattr(trainer, "paths", paths_twice)
        trainer.train()
        trainer.close()
        (found[layout],) = rows(tmp_path / layout)
    tree, leaf, flat, merged = ({key: float(value) for key, value in row.items()} for row in found.values())
    assert merged["loss"] == pytest.approx(tree["loss"], abs=1e-6)
    assert merged["grad_norm"] == pytest.approx(tree["grad_norm"], rel=1e-5)
    assert (2 * merged["executed_tokens"], merged["reward"]) == (tree["executed_tokens"], tree["reward"])
    assert tree["loss"] == pytest.approx(flat["loss"], abs=1e-6)
    assert leaf["loss"] == pytest.approx(flat["loss"], abs=1e-6)
    assert leaf["executed_tokens"] == tree["leaf_tokens"]
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


def with_mistral(config: RLRunConfig, folder: Path) -> RLRunConfig:
    """Returns a configuration of a model that titan_tree runs through transformers."""
    if not folder.exists():
        hf_family("mistral", vocab_size=282, max_position_embeddings=512).save_pretrained(folder)
    model = dataclasses.replace(config.model, flavor=None, hf_path=str(folder), overrides={})
    return dataclasses.replace(config, model=model)


@pytest.mark.parametrize(
    "model", slow_except(["qwen3_moe", "mistral"], ["qwen3_moe", "mistral", "qwen3_5 with LoRA"])
)
def test_any_model_trains_on_its_own_rollouts(
    tmp_path: Path, model: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Two steps, and the same two steps with a resume after the first one."""
    name, _, lora = model.partition(" ")
    options = ["rl.environment=letters", "checkpoint.interval=1", "rl.max_turn_tokens=6"]
    options += [f"model.name={name}"] if name != "mistral" else []
    options += ["lora.rank=2"] if lora else []
    weights = {}
    for run_name, all_steps in {"whole": [2], "resumed": [1, 2]}.items():
        for steps in all_steps:
            config = tiny(tmp_path / run_name, *options, f"training.steps={steps}")
            config = with_mistral(config, tmp_path / "hf") if name == "mistral" else config
            with caplog.at_level(logging.INFO):
                trainer = with_short_turns(RLTrainer(config))
            assert caplog.messages.count("rollouts: sampled by GenerateSampler") == 1
            caplog.clear()
            trainer.train()
            weights[run_name] = [p.detach().clone() for p in trainer.model.parameters()]
            trainer.close()
    assert all(map(torch.equal, weights["whole"], weights["resumed"]))
    assert rows(tmp_path / "whole") == rows(tmp_path / "resumed")
    norms = [float(row["grad_norm"]) for row in rows(tmp_path / "whole")]
    assert len(norms) == 2
    assert all(norm > 0 for norm in norms)


@pytest.mark.parametrize("model", ["qwen3", "qwen3_moe", "qwen3_5"])
def test_rollouts_have_the_logprobs_of_the_trained_model(tmp_path: Path, model: str) -> None:
    """Rollouts have several turns and unequal lengths, and branches among them."""
    trainer = with_short_turns(RLTrainer(tiny(tmp_path, "rl.environment=letters", f"model.name={model}")))
    paths = [path for task in trainer.paths(1) for path in task]
    with torch.no_grad():
        scores = tree_logprobs(trainer.model, [path.tokens.tolist() for path in paths])
    for path, score in zip(paths, scores, strict=True):
        # Not the ends of turns, which ``with_short_turns`` has added.
        sampled = torch.from_numpy((path.loss_mask[1:] > 0) & (path.tokens[1:] != trainer.chat.ends[0]))
        reported = torch.from_numpy(path.old_logprobs[1:])[sampled]
        torch.testing.assert_close(reported, score[sampled], atol=1e-4, rtol=0)
    assert len(paths) == 12
    assert len({len(path.tokens) for path in paths}) > 3
    trainer.close()


def test_metrics_describe_the_rollouts(tmp_path: Path) -> None:
    class Recorded(RLTrainer):
        def _play(self, groups: list[list[Rollout]], names: list[str]) -> None:
            super()._play(groups, names)
            played.append([rollout for group in groups for rollout in group])

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


@pytest.mark.slow
def test_command_runs_the_warm_start_and_then_rl(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["rl", str(DEMO), f"folder={tmp_path}", *TINY, "training.steps=3"]
    arguments += ["warm_start.steps=6", "warm_start.interval=2", "warm_start.reward=0", "warm_start.tasks=2"]
    arguments += ["warm_start.measured_tasks=3", "metrics.loggers=[csv,console]"]
    assert main(arguments) == 0
    assert [row["step"] for row in rows(tmp_path / "warm_start")] == ["1", "2"]  # the reward was high enough
    assert rows(tmp_path / "warm_start")[1]["validation_reward"] == "0.0"
    assert [row["step"] for row in rows(tmp_path)] == ["1", "2", "3"]
    out = capsys.readouterr().out
    assert "warm start: ends early, once 3 sampled rollouts have a mean reward of 0\n" in out
    assert re.search(r"step 3/3  loss .*reward 0\.000", out)
    first = rows(tmp_path)
    assert main(arguments) == 0  # nothing is left to do
    assert "nothing left to train" in capsys.readouterr().out
    assert rows(tmp_path) == first
    assert main([*arguments, "warm_start.lr=0.5"]) == 2
    assert (
        "warm_start: its warm start had other settings: warm_start.lr: 0.003 -> 0.5"
        in capsys.readouterr().err
    )
    config = load_tables(RLRunConfig, tmp_path / "config.toml")
    assert config.model.hf_path == str(tmp_path / "warm_start" / "hf")
    (tmp_path / "again.toml").write_text(dump_config(config))
    assert load_tables(RLRunConfig, tmp_path / "again.toml") == config


@pytest.mark.slow
def test_the_benchmark_compares_the_update_on_trees_with_the_one_on_rows(tmp_path: Path) -> None:
    trainer = with_short_turns(CheckedRLTrainer(tiny(tmp_path, "rl.environment=letters")))
    trainer.paths(1)
    training, scoring = trainer.update
    assert [row["step"] for row in (training, scoring)] == ["training", "scoring"]
    assert float(training["tree loss"]) == pytest.approx(float(training["rows loss"]), abs=1e-6)
    assert 0 < float(training["gradient difference"]) < 1e-5
    assert training["operations x"] > 1.1
    trainer.close()


@pytest.mark.slow
def test_the_benchmark_has_rows_of_all_phases(tmp_path: Path) -> None:
    arguments = [
        "--quick",
        "--config",
        str(DEMO),
        "--folder",
        str(tmp_path),
        "--csv",
        str(tmp_path / "a.csv"),
    ]
    warm_start = ["warm_start.steps=2", "warm_start.interval=2", "warm_start.reward=0"]
    assert benchmark(["rl", *arguments, *warm_start]) == 0
    rows = read_csv(tmp_path / "a.csv")
    phases = [row["phase"] for row in rows]
    assert phases == ["update", "update", "warm_start", "rl", "rl", "test"]
    assert float(str(rows[3]["sampler nats"])) < 1e-4


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
        ("data.workers=0", "data.workers: expected no value, because an environment has no files"),
        ("validation.files=demo", "validation.files: expected no value"),
        ("training.epochs=1", "training.steps: expected no value together with training.epochs"),
        ("rl.environment=dsek", "rl.environment: expected one of desk"),
        ("rl.rollout=3", "unknown key 'rl.rollout'; did you mean 'rl.rollouts'"),
        ("partition.strategy=none", "partition.strategy: expected another one than 'none'"),
        ("rl.advantage=turn", "rl.advantage: expected one of group, mean, loo"),
        (
            "data.advantage=mean",
            "data.advantage: expected no value, because an environment has no files; set rl.",
        ),
        ("rl.advantage=given", "rl.advantage: expected one of group, mean, loo"),
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
    ],
)
def test_settings_that_do_not_fit_together_are_refused(
    tmp_path: Path, overrides: list[str], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        run(tiny(tmp_path, *overrides))


@pytest.mark.parametrize(
    ("tokens", "limit", "message"),
    [(30, 40, "the model has 40 positions"), (1, 400, "expected ids below the model's vocabulary size 270")],
)
def test_rollouts_that_the_model_cannot_read_are_refused(
    tmp_path: Path, tokens: int, limit: int, message: str
) -> None:
    """Samplers with weights of their own may have other limits."""

    class Foreign:
        def sample(self, contexts: Any, limits: Any, stops: Any, seeds: Any) -> list[Completion]:
            turn = [*[275] * tokens, *stops] if tokens == 1 else [*[97] * tokens, *stops]
            return [Completion(turn, [-1.0] * len(turn)) for _ in contexts]

    options = (f"model.overrides.max_position_embeddings={limit}", "model.overrides.vocab_size=270")
    config = tiny(tmp_path, "rl.environment=letters", *options, "rl.max_rollout_tokens=300")
    with pytest.raises(UserError, match=message):
        RLTrainer(config, Foreign()).train()


def test_the_warm_start_shows_the_tools_of_a_task(tmp_path: Path) -> None:
    class Episode(DeskEpisode):
        tools = [{"type": "function", "function": {"name": "look_up", "parameters": {}}}]  # noqa: RUF012

    class WithTools(Desk):
        def episode(self, draw: random.Random) -> Episode:
            return Episode(draw)

    ENVIRONMENTS.register("with_tools", WithTools)
    trainer = WarmStart(warm_start_config(tiny(tmp_path, "rl.environment=with_tools", "warm_start.steps=2")))
    path = trainer.paths(1)[0][0]
    episode = trainer.environment.episode(random.Random(f"{trainer.config.data.seed}/warm start/1/0"))
    prompt = trainer.chat.start(episode, 1)[0].tokens
    assert path.tokens[: len(prompt)].tolist() == prompt


def test_a_bad_step_keeps_the_metrics_of_its_rollouts(tmp_path: Path) -> None:
    @register_loss("not_finite_at_first")
    def _(logprobs: torch.Tensor, pairs: PathPairs) -> torch.Tensor:
        return -pairs.advantage * logprobs * (1.0 if trainer.progress.step else torch.nan)

    config = tiny(tmp_path, "rl.environment=letters", "loss.name=not_finite_at_first", "training.steps=2")
    trainer = with_short_turns(RLTrainer(config))
    trainer.train()
    trainer.close()
    bad, good = rows(tmp_path)
    assert bad["bad_steps"] == "1"
    assert not bad["loss"]
    assert bad["rollouts"] == good["rollouts"] == "12"
    assert float(bad["reward"]) > 0
