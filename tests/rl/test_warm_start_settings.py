"""A finished warm start is used again unless something that it read has changed."""

import dataclasses
import logging
from pathlib import Path

import pytest

import titan_tree.rl.run
from tests.support.rl_runs import tiny
from titan_tree.config.toml import dump_config
from titan_tree.errors import UserError
from titan_tree.models.pretrained import load_pretrained
from titan_tree.rl.run import after_warm_start, run, warm_start_config
from titan_tree.rl.settings import RLRunConfig

SHORT = ("warm_start.steps=2", "warm_start.interval=2", "warm_start.tasks=1", "warm_start.measured_tasks=2")


def short(folder: Path, *overrides: str) -> RLRunConfig:
    return tiny(folder, *SHORT, "warm_start.reward=0", *overrides)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of a run whose warm start is finished, and whose RL has not begun."""
    folder = tmp_path_factory.mktemp("run")
    after_warm_start(short(folder))
    return folder


@pytest.fixture
def _no_second_warm_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(titan_tree.rl.run, "WarmStart", None)


TUNED = (
    *("rl.rollouts=5", "rl.branches=0", "rl.advantage=group", "rl.advantage_options={}", "rl.async_steps=1"),
    *("rl.server.url=http://h:1", "rl.server.model=policy", "loss.name=cispo", "loss.kl.coefficient=0.1"),
    *("lora.rank=2", "optimizer.lr=1e-3", "lr_scheduler.warmup_steps=1", "training.steps=7"),
    *("data.global_batch_groups=3", "checkpoint.interval=0", "rl.agent.concurrency=2"),
)


@pytest.mark.usefixtures("_no_second_warm_start")
def test_rl_may_be_tuned_after_the_warm_start(finished: Path, caplog: pytest.LogCaptureFixture) -> None:
    tuned = short(finished, *TUNED)
    with caplog.at_level(logging.INFO):
        config = after_warm_start(tuned)
    assert config.model.hf_path == str(finished / "warm_start" / "hf")
    assert dataclasses.replace(config, model=tuned.model, warm_start=tuned.warm_start) == tuned
    assert not caplog.messages


@pytest.mark.usefixtures("_no_second_warm_start")
def test_a_tuned_run_trains(finished: Path) -> None:
    run(short(finished, "rl.rollouts=2", "rl.branches=0", "rl.advantage=group", "training.steps=1"))
    assert (finished / "checkpoints" / "step-1").exists()


@pytest.mark.parametrize(
    ("override", "change"),
    [
        ("model.name=llama", "model.name: 'qwen3' -> 'llama'"),
        ("model.flavor=0.6B", "model.flavor: 'debug' -> '0.6B'"),
        ("model.overrides.hidden_size=64", "model.overrides.hidden_size: 32 -> 64"),
        ("model.overrides.num_hidden_layers=1", "model.overrides.num_hidden_layers: None -> 1"),
        ("training.seed=3", "training.seed: 0 -> 3"),
        ("data.seed=3", "data.seed: 0 -> 3"),
        ("data.tokenizer=other", "data.tokenizer: 'byte' -> 'other'"),
        ("rl.environment=search", "rl.environment: 'desk' -> 'search'"),
        ("rl.max_turn_tokens=21", "rl.max_turn_tokens: 20 -> 21"),
        ("rl.max_rollout_tokens=111", "rl.max_rollout_tokens: 110 -> 111"),
        ("router_loss.balance=0.1", "router_loss.balance: 0.0 -> 0.1"),
        ("warm_start.steps=3", "warm_start.steps: 2 -> 3"),
        ("warm_start.reward=0.1", "warm_start.reward: 0.0 -> 0.1"),
        ("warm_start.lr=0.5", "warm_start.lr: 0.003 -> 0.5"),
        ("warm_start.tasks=2", "data.global_batch_groups: 1 -> 2, warm_start.tasks: 1 -> 2"),
    ],
)
@pytest.mark.usefixtures("_no_second_warm_start")
def test_changes_of_what_the_warm_start_read_are_refused(finished: Path, override: str, change: str) -> None:
    with pytest.raises(UserError) as error:
        after_warm_start(short(finished, override))
    assert str(error.value) == (
        f"{finished}/warm_start: its warm start had other settings: {change}; restore them, or choose "
        "another folder"
    )


@pytest.mark.usefixtures("_no_second_warm_start")
def test_other_changes_are_logged(finished: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        after_warm_start(short(finished, "optimizer.weight_decay=0.5"))
    assert caplog.messages == ["changed since the warm start: optimizer.weight_decay: 0.0 -> 0.5"]


@pytest.mark.usefixtures("_no_second_warm_start")
def test_a_warm_start_of_an_older_version_wrote_more_keys(finished: Path) -> None:
    config = short(finished)
    file = finished / "warm_start" / "config.toml"
    older = dataclasses.replace(warm_start_config(config), rl=config.rl)
    text = file.read_text()
    file.write_text(dump_config(older))
    assert "branches = 3" in file.read_text()
    assert "branches = 0" in text
    after_warm_start(short(finished, "rl.rollouts=5"))
    file.write_text(text)


def test_a_warm_start_begins_with_the_weights_of_a_snapshot(finished: Path, tmp_path: Path) -> None:
    snapshot = str(finished / "warm_start" / "hf")
    from_snapshot = ("model.flavor=null", "model.overrides={}", "warm_start.lr=1e-9")
    config = after_warm_start(short(tmp_path, *from_snapshot, f"model.hf_path={snapshot}"))
    before, after = (load_pretrained(folder).state_dict() for folder in (snapshot, config.model.hf_path))
    for name, weight in before.items():
        assert weight.allclose(after[name], rtol=2**-7, atol=1e-6), name  # an ulp of bf16
    with pytest.raises(UserError, match=r"its warm start had other settings: model\.hf_path: "):
        after_warm_start(short(tmp_path, *from_snapshot, f"model.hf_path={config.model.hf_path}"))
