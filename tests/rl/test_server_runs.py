"""Runs that sample from a server on loopback: from TOML alone, one step ahead, resumed and interrupted."""

import copy
import math
import os
import re
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from tests.support import rollout_server as support
from tests.support.cases import exhaustive, slow_except
from tests.support.rl_runs import DEMO, TINY, rows, tiny
from tests.support.rollout_server import RolloutServer, random_turn, rollout_server
from titan_tree import TokenPath, UserError, build_model, tree_logprobs
from titan_tree.cli import main
from titan_tree.components.lora import LoRA
from titan_tree.models.decoder import Decoder
from titan_tree.models.lora.adapters import add_lora
from titan_tree.rl.sampler import RemoteSampler, SharedSampler
from titan_tree.rl.server.client import StoppedError
from titan_tree.rl.server.server_sampler import build_server_sampler
from titan_tree.rl.trainer import RLTrainer
from titan_tree.scoring.score_trees import score_paths
from titan_tree.tree.context import Completion

SLOW = pytest.mark.slow
LETTERS = ("rl.environment=letters", "rl.branches=2")


def other_model(name: str = "qwen3") -> Decoder:
    """Returns weights that the trained model never has."""
    torch.manual_seed(5)
    return build_model(name, "debug", vocab_size=282, hidden_size=32, head_dim=16)


def options(url: str, **more: Any) -> list[str]:
    keys = {"url": url, "model": "policy"} | more
    return [*LETTERS, *(f"rl.server.{key}={value}" for key, value in keys.items())]


class Recorded(RLTrainer):
    """Records, for each step, the weights before it and the paths that it trains on."""

    def __init__(self, *arguments: Any) -> None:
        self.weights: dict[int, dict[str, torch.Tensor]] = {}
        self.trained: dict[int, list[list[TokenPath]]] = {}
        super().__init__(*arguments)

    def paths(self, step: int) -> list[list[TokenPath]]:
        self.weights[step - 1] = copy.deepcopy(self.model.state_dict())
        self.trained[step] = super().paths(step)
        return self.trained[step]

    def prompts(self) -> dict[int, list[list[int]]]:
        """Returns the prompts of the tasks of each step."""
        return {
            step: [paths[0].tokens[: int(paths[0].loss_mask.argmax())].tolist() for paths in by_task]
            for step, by_task in self.trained.items()
        }


def ran(config: Any, kind: type[RLTrainer] = Recorded) -> Any:
    trainer = kind(config)
    try:
        trainer.train()
    finally:
        trainer.close()
    return trainer


def test_the_command_samples_from_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ROLLOUT_KEY", "secret")
    server = RolloutServer(other_model())
    with rollout_server(server) as url:
        own = options(url, api_key_env="ROLLOUT_KEY", concurrency=4)
        arguments = ["rl", str(DEMO), f"folder={tmp_path}", *TINY, *own, "training.steps=3"]
        assert main(arguments) == 0, capsys.readouterr().err
    assert "KL divergence" not in capsys.readouterr().out
    found = rows(tmp_path)
    assert [row["step"] for row in found] == ["1", "2", "3"]
    assert all(float(row["policy_lag"]) == 0 for row in found)
    assert len({row["reward"] for row in found}) > 1
    assert all(float(row["grad_norm"]) > 0 for row in found)
    assert server.version.endswith("-2")  # the weights after step 2 sampled step 3
    assert not (tmp_path / "rollout_weights").exists()
    assert "secret" not in (tmp_path / "config.toml").read_text()


@pytest.mark.parametrize(
    ("loss", "field"),
    [("ppo", "old_logprobs"), pytest.param("decoupled_ppo", "rollout_logprobs", marks=SLOW)],
)
def test_logprobs_that_are_not_those_of_the_model_are_noticed(
    loss: str,
    field: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The server says that all its tokens were certain. Without KL, the loss trains on in silence."""
    monkeypatch.setattr(support, "random_turn", lambda *turn: certain(*random_turn(*turn)))
    with rollout_server(RolloutServer(other_model())) as url:
        ran(tiny(tmp_path, *options(url), f"loss.name={loss}", "training.steps=2"), RLTrainer)
    (warning,) = [record.getMessage() for record in caplog.records if "KL divergence" in record.getMessage()]
    found = re.fullmatch(rf"step 1: {field}: expected log-probs .* KL divergence of (\S+) nats .*", warning)
    assert found is not None, warning
    uniform = math.log(282)  # the model is almost uniform over this vocabulary
    assert float(found[1]) == pytest.approx(math.expm1(-uniform) + uniform, rel=0.01)


def certain(tokens: list[int], logprobs: list[float], experts: Any) -> tuple[list[int], list[float], Any]:
    return tokens, [0.0] * len(logprobs), experts


TUNED = ("lora.rank=4", "optimizer.lr=0.05")
# How weights reach the server, and other options.
UPDATES: dict[str, tuple[str, tuple[str, ...]]] = {
    "folder": ("folder", ()),
    "merged": ("folder", TUNED),
    "adapter": ("adapter", TUNED),
}
OLD_LOGPROBS = [("folder", 1), ("adapter", 1), ("folder", 0), ("merged", 1)]


@pytest.mark.parametrize(("update", "async_steps"), slow_except(OLD_LOGPROBS[:1], OLD_LOGPROBS))
def test_old_logprobs_are_those_of_the_weights_that_sampled(
    update: str, async_steps: int, tmp_path: Path
) -> None:
    weights, more = UPDATES[update]
    base = tiny(tmp_path, *LETTERS)
    model = build_model(base.model.name, "debug", **base.model.overrides)
    model.init_weights(base.training.seed)
    with rollout_server(RolloutServer(model)) as url:
        own = [*options(url, weights=weights), f"rl.async_steps={async_steps}", *more]
        trainer = ran(tiny(tmp_path, *own))
    check_logprobs(trainer, [0, *[async_steps] * 3])


def check_logprobs(trainer: Recorded, ages: list[int]) -> None:
    """Checks that the log-probs of each step are those of weights that are so many steps old."""
    folder = Path(trainer.config.folder)
    assert [float(row["policy_lag"]) for row in rows(folder)][-len(ages) :] == ages
    for (step, by_task), age in zip(trainer.trained.items(), ages, strict=True):
        older = step - 1 - age
        errors = {}
        for version in {older, step - 1, step - 2} & trainer.weights.keys():
            trainer.model.load_state_dict(trainer.weights[version])
            errors[version] = max(error(trainer.model, path) for paths in by_task for path in paths)
        assert errors.pop(older) <= 1e-4
        assert all(each > 1e-3 for each in errors.values())  # no other weights would do


def error(model: Decoder, path: TokenPath) -> float:
    """Returns the largest difference between the model's log-probs and those that were sampled."""
    (scores,) = score_paths(model, [path])
    old, is_sampled = torch.from_numpy(path.old_logprobs), torch.from_numpy(path.loss_mask > 0)
    return (scores.logprobs - old)[is_sampled].abs().max().item()


def test_the_next_step_samples_while_one_trains(tmp_path: Path) -> None:
    """The rollouts of step 2 wait until step 1 has trained. Without overlap, they would wait forever."""
    trained = threading.Event()

    class Overlapping(Recorded):
        def train_step(self, inputs: Any) -> None:
            super().train_step(inputs)
            trained.set()

        def rollouts(self, step: int) -> Any:
            assert step != 2 or trained.wait(30)
            return super().rollouts(step)

    with rollout_server(RolloutServer(other_model())) as url:
        config = tiny(tmp_path, *options(url), "rl.async_steps=1", "training.steps=2")
        trainer = ran(config, Overlapping)
    assert len(trainer.trained) == 2


@pytest.mark.slow
@pytest.mark.parametrize("async_steps", [1, 3])
def test_a_resumed_run_loses_and_repeats_no_task(async_steps: int, tmp_path: Path) -> None:
    prompts: dict[str, dict[int, Any]] = {"whole": {}, "resumed": {}}
    with rollout_server(RolloutServer(other_model())) as url:
        for name, all_steps in {"whole": [4], "resumed": [2, 4]}.items():
            for steps in all_steps:
                own = [*options(url), f"rl.async_steps={async_steps}", f"training.steps={steps}"]
                prompts[name] |= ran(tiny(tmp_path / name, *own)).prompts()
                dist.is_initialized() and dist.destroy_process_group()
    assert prompts["whole"] == prompts["resumed"]
    tasks = [tuple(prompt) for step in prompts["whole"].values() for prompt in step]
    assert (len(tasks), sorted(prompts["whole"])) == (8, [1, 2, 3, 4])
    assert len(set(tasks)) > 4  # the tasks of steps differ
    ages = {name: [float(row["policy_lag"]) for row in rows(tmp_path / name)] for name in prompts}
    newest = {"whole": [0, 1, 1, 1], "resumed": [0, 1, 0, 1]}  # a resume starts from the newest weights
    assert ages == newest or async_steps > 1
    assert all(
        age <= async_steps and (age > 0) == (bound > 0)
        for name in ages
        for age, bound in zip(ages[name], newest[name], strict=True)
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("error", "async_steps"), [(UserError("boom"), 1), (ZeroDivisionError("bug"), 0)], ids=["user", "bug"]
)
def test_errors_of_the_sampling_thread_end_the_run(
    error: Exception, async_steps: int, tmp_path: Path
) -> None:
    class Failing(Recorded):
        def rollouts(self, step: int) -> Any:
            if step == 3:
                raise error
            return super().rollouts(step)

    with rollout_server(RolloutServer(other_model())) as url:
        own = [*options(url), f"rl.async_steps={async_steps}", "checkpoint.interval=1"]
        message = (
            "boom; the run ended after step 2; the same command .*step-2" if "boom" in str(error) else "bug"
        )
        with pytest.raises(type(error), match=message):
            ran(tiny(tmp_path, *own), Failing)
        assert not [t for t in threading.enumerate() if t.name in ("rollouts", "sampler_0")]
        trainer = ran(tiny(tmp_path, *own))  # the same command continues
    assert sorted(trainer.trained) == [3, 4]


def test_a_failed_update_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    server = RolloutServer(other_model())

    def refuse(path: str, body: Any) -> Any:
        is_second = path == "/collective_rpc" and body["kwargs"]["weights_path"].endswith("-2")
        return (400, "disk is full") if is_second else None

    server.fail = refuse
    message = r"weights of step 2: .*disk is full.*the run ended after step 2"
    with rollout_server(server) as url, pytest.raises(UserError, match=message):
        ran(tiny(tmp_path, *options(url)))


@pytest.mark.slow
@pytest.mark.usefixtures("default_signals")
@pytest.mark.parametrize("async_steps", exhaustive((0,), [0, 1]))
def test_a_signal_ends_the_wait_for_rollouts(async_steps: int, tmp_path: Path) -> None:
    """The server stops answering after its second update. The run ends after a checkpoint."""
    server, hangs, released = RolloutServer(other_model()), threading.Event(), threading.Event()

    def hang(path: str, body: Any) -> None:
        if path == "/v1/completions" and server.version.endswith("-1"):
            hangs.set()
            released.wait(60)

    server.fail = hang
    with rollout_server(server) as url:
        own = [*options(url), f"rl.async_steps={async_steps}", "rl.environment=desk"]
        arguments = [sys.executable, "-m", "titan_tree", "rl", str(DEMO), f"folder={tmp_path}"]
        environment = os.environ | {"PYTHONPATH": str(DEMO.parents[1]), "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(
            [*arguments, *TINY, *own],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
        )
        try:
            assert hangs.wait(90)
            time.sleep(2.0)  # with one asynchronous step, step 2 trains meanwhile
            process.send_signal(signal.SIGINT)
            printed, _ = process.communicate(timeout=30)
        finally:
            process.kill()
            released.set()
    done = 1 + async_steps
    assert process.returncode == 130
    assert f"the run ended after step {done}; the same command continues from" in printed
    assert "Traceback" not in printed
    assert (tmp_path / "checkpoints" / f"step-{done}").exists()


def test_recorded_experts_are_replayed(tmp_path: Path) -> None:
    """The experts are those that the server's model used, -1 for the last token, and training forces them."""
    with rollout_server(RolloutServer(other_model("qwen3_moe"))) as url:
        own = [*options(url), "model.name=qwen3_moe", "data.replay=first", "training.steps=2"]
        trainer = ran(tiny(tmp_path, *own))
    for step, by_task in trainer.trained.items():
        trainer.model.load_state_dict(trainer.weights[step - 1])
        for path in [path for paths in by_task for path in paths]:
            with torch.no_grad():
                _, (used,) = tree_logprobs(trainer.model, [path.tokens.tolist()], return_routed_experts=True)
            assert (path.routed_experts[:-1] == used[:-1].numpy()).all()
            assert (path.routed_experts[-1] == -1).all()
    assert all(float(row["replay_disagreement"]) == 0 for row in rows(tmp_path))
    assert all(float(row["replayed_rows"]) > 0 for row in rows(tmp_path))


class Silent:
    """A sampler with weights of its own that records no experts."""

    def sample(self, contexts: Any, max_tokens: Any, stops: Any, seeds: Any) -> list[Completion]:
        return [Completion(stops[:1], [-1.0]) for _ in contexts]

    def update(self, model: Any, step: int) -> None: ...

    def close(self) -> None: ...


def test_replay_needs_a_sampler_that_records_experts(tmp_path: Path) -> None:
    trainer = RLTrainer(tiny(tmp_path, *LETTERS, "model.name=qwen3_moe", "data.replay=first"), Silent())
    with pytest.raises(UserError, match="expected a sampler that records experts, but Silent recorded none"):
        trainer.train()
    trainer.close()


@pytest.mark.slow
def test_the_server_of_a_run_may_change(tmp_path: Path) -> None:
    for steps in (1, 2):
        with rollout_server(RolloutServer(other_model())) as url:
            trainer = ran(tiny(tmp_path, *options(url), f"training.steps={steps}", "checkpoint.interval=1"))
    assert sorted(trainer.trained) == [2]


def test_each_start_of_a_run_names_its_versions_anew(tmp_path: Path) -> None:
    """A killed run has left its adapter on the server."""
    server = RolloutServer(other_model())
    config = tiny(tmp_path, "lora.rank=2", *options("http://h:1", weights="adapter"))
    with rollout_server(server) as url:
        config.rl.server.url = url
        model = other_model()
        add_lora(model, LoRA(rank=2, alpha=4.0, targets=()))
        model.load_state_dict({name: torch.zeros_like(x) for name, x in model.state_dict().items()})
        for _ in range(2):
            build_server_sampler(config, model, "run").update(model, 3)
    assert len(server.adapters) == 2
    assert all(re.fullmatch("run-[0-9a-f]{4}-3", name) for name in server.adapters)


def test_a_server_and_a_sampler_exclude_each_other(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"rl\.server\.url: expected none together with a sampler"):
        RLTrainer(tiny(tmp_path, *options("http://h:1")), Silent())


def test_stopped_rollouts_are_no_rollouts(tmp_path: Path) -> None:
    with rollout_server(RolloutServer(other_model())) as url:
        trainer = RLTrainer(tiny(tmp_path, *options(url)))
        trainer.sampler.close()
        with pytest.raises(StoppedError):
            trainer.rollouts(1)
        trainer.close()


class Late(Recorded):
    """Samples the branches of step n with the weights of step n - 1 trained, whenever its rollouts began."""

    def _play(self, groups: Any, names: Any) -> None:
        if names and names[0].endswith("/branches"):
            step = int(names[0].split("/")[1])
            while self.sampler.version < step - 2:  # type: ignore[attr-defined]
                time.sleep(0.01)
        super()._play(groups, names)


@pytest.mark.parametrize("async_steps", slow_except([3], [2, 3]))
def test_no_token_is_older_than_the_async_steps(async_steps: int, tmp_path: Path) -> None:
    """A rollout may span versions. Each token has the log-prob of the weights that its version names."""
    base = tiny(tmp_path, *LETTERS)
    model = build_model(base.model.name, "debug", **base.model.overrides)
    model.init_weights(base.training.seed)
    with rollout_server(RolloutServer(model)) as url:
        own = [*options(url), f"rl.async_steps={async_steps}", "training.steps=6", "optimizer.lr=0.02"]
        trainer = ran(tiny(tmp_path, *own), Late)
    spans = 0
    for step, row in zip(trainer.trained, rows(tmp_path), strict=True):
        ages, weights = [], []
        for path in [path for paths in trainer.trained[step] for path in paths]:
            counted = path.loss_mask > 0
            versions = path.policy_version[counted]
            ages.append(step - 1 - versions)
            weights.append(path.weight * path.loss_mask[counted])
            spans += len(set(versions)) > 1
            for version in set(versions.tolist()):
                trainer.model.load_state_dict(trainer.weights[version])
                (scores,) = score_paths(trainer.model, [path])
                wrong = (scores.logprobs - torch.from_numpy(path.old_logprobs)).abs()
                assert wrong[torch.from_numpy(path.policy_version == version)].max() <= 1e-4
        age = np.concatenate(ages)
        assert 0 <= age.min() <= age.max() <= async_steps
        assert age.max() == (min(step - 1, async_steps))
        assert float(row["policy_lag"]) == pytest.approx(
            np.average(age, weights=np.concatenate(weights)), rel=1e-5
        )
    assert spans > 4


def test_an_update_waits_for_rounds_and_holds_back_others() -> None:
    together, running, release, log = threading.Barrier(2), threading.Semaphore(0), threading.Event(), []

    class Remote:
        def sample(self, contexts: Any, *_: Any) -> list[Completion]:
            if contexts == ["together"]:
                together.wait(10)  # two rounds run at once
            if contexts == ["slow"]:
                running.release()
                assert release.wait(10)
            log.append(contexts[0])
            return [Completion([1], [-1.0])]

        def update(self, _: Any, step: int) -> None:
            log.append(step)

        def close(self) -> None: ...

    def wait(is_done: Any) -> None:
        waits.set()
        while not is_done():
            time.sleep(0.01)

    waits, model = threading.Event(), other_model()
    sampler = SharedSampler(Remote(), wait)
    assert isinstance(sampler, RemoteSampler)

    def version(name: str) -> Any:
        (turn,) = sampler.sample([name], [1], [2], [3])  # type: ignore[list-item]
        return turn.policy_version

    with ThreadPoolExecutor() as pool:
        sampler.update(model, 4)
        assert [each.result() for each in [pool.submit(version, "together") for _ in range(2)]] == [4, 4]
        slow = pool.submit(version, "slow")
        assert running.acquire(timeout=10)
        waits.clear()
        update = pool.submit(sampler.update, model, 5)
        assert waits.wait(10)
        held = pool.submit(version, "held back")
        time.sleep(0.1)
        assert not any(each.done() for each in (update, held, slow))
        release.set()
        assert [slow.result(10), held.result(10)] == [4, 5]
    assert log == [4, "together", "together", "slow", 5, "held back"]
