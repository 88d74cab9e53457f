"""Trained weights reach servers on loopback, from a folder and as an adapter."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.rl.test_sampling import tiny_model
from tests.support.rollout_server import RolloutServer, rollout_server
from titan_tree import UserError, tree_logprobs
from titan_tree.components.lora import LoRA, is_factor
from titan_tree.models.decoder import Decoder
from titan_tree.models.lora.adapters import add_lora
from titan_tree.rl.server.server_sampler import PushSettings, ServerSampler


def pushing(url: str, folder: Path, **settings: Any) -> ServerSampler:
    """Returns a sampler whose versions are called "run-STEP"."""
    push = PushSettings(run="run", folder=folder, dtype=torch.float32, source=None)
    return ServerSampler(url, "m", push=push, **settings)


def other_weights(model: Decoder, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


def test_a_server_samples_from_the_weights_in_the_folder(tmp_path: Path) -> None:
    """The log-probs that it reports are those of the trained model, after each of three updates."""
    model, server = tiny_model(), RolloutServer(tiny_model())
    with rollout_server(server) as url:
        sampler = pushing(url, tmp_path / "weights")
        for step in range(3):
            other_weights(model, step)
            sampler.update(model, step)
            assert server.version == f"run-{step}"
            assert [each.name for each in (tmp_path / "weights").iterdir()] == [f"run-{step}"]
            for name, weight in server.model.state_dict().items():
                assert torch.equal(weight, model.state_dict()[name]), name
            (turn,) = sampler.sample([[1, 2, 3]], [12], [258], [step])
            with torch.no_grad():
                (expected,) = tree_logprobs(model, [[1, 2, 3, *turn.tokens]])
            torch.testing.assert_close(torch.tensor(turn.logprobs), expected[2:], atol=1e-4, rtol=0)
        sampler.close()
    assert not (tmp_path / "weights").exists()


def test_commands_come_in_the_order_that_vllm_documents(tmp_path: Path) -> None:
    folder = str((tmp_path / "w" / "run-7").resolve())
    server = RolloutServer()
    with rollout_server(server) as url:
        pushing(url, tmp_path / "w").update(tiny_model(), 7)
    assert server.calls == [
        ("/pause?mode=wait", {}),
        ("/weight_info", None),
        ("/update_weight_version", {"new_version": "run-7"}),
        ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
        ("/reset_prefix_cache", {}),
        ("/resume", {}),
        ("/weight_info", None),
    ]


@pytest.mark.parametrize(
    ("path", "instead", "message"),
    [
        ("/pause?mode=wait", (404, "?"), r"/pause\?mode=wait: refused a request with status 404"),
        ("/collective_rpc", (400, "no such file"), "/collective_rpc: refused .* status 400: no such file"),
        ("/collective_rpc", (500, "crash"), "/collective_rpc: no answer after 5 attempts, .*crash"),
        ("/reset_prefix_cache", {"success": False, "message": "busy"}, "expected success, got busy"),
    ],
)
def test_a_failed_push_is_one_line(path: str, instead: Any, message: str, tmp_path: Path) -> None:
    server = RolloutServer()
    server.fail = lambda called, body: instead if called == path else None
    with rollout_server(server) as url:
        with pytest.raises(
            UserError, match=f"weights of step 3: the server did not take them over.*{message}"
        ):
            pushing(url, tmp_path / "w").update(tiny_model(), 3)
        assert "/resume" not in [called for called, _ in server.calls]  # it may hold weights of two versions


def test_dropped_connections_are_retried(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server, failed = RolloutServer(), set()

    def drop_once(path: str, body: Any) -> None:
        if path not in failed:
            failed.add(path)
            raise ConnectionError

    server.fail = drop_once
    model = tiny_model()
    with rollout_server(server) as url:
        pushing(url, tmp_path / "w").update(model, 1)
    assert torch.equal(server.model.embed_tokens.weight, model.embed_tokens.weight)
    assert caplog.text.count("attempt 1 of 5 failed") == len(failed) >= 5


def test_other_weights_than_those_that_were_sent_are_reported(tmp_path: Path) -> None:
    """The server ignores an update, or another program updates it between two turns."""
    server = RolloutServer(tiny_model())
    with rollout_server(server) as url:
        sampler = pushing(url, tmp_path / "w")
        sampler.update(tiny_model(), 1)
        sampler.sample([[1]], [3], [258], [0])
        server.version = "another"
        with pytest.raises(UserError, match="version: expected 'run-1', which this run sent, got 'another'"):
            sampler.sample([[1]], [3], [258], [0])
        server.fail = lambda path, body: {"weight_version": "old"} if path == "/weight_info" else None
        with pytest.raises(
            UserError, match="weight version: expected 'run-2', which this run sent, got 'old'"
        ):
            sampler.update(tiny_model(), 2)


def test_a_server_that_restarts_during_an_update_is_reported(tmp_path: Path) -> None:
    """It restarts with its first weights before the command that follows the load."""
    server = RolloutServer(tiny_model())

    def restart(path: str, body: Any) -> None:
        if "/collective_rpc" in [called for called, _ in server.calls[:-1]] and server.paused:
            server.model, server.version, server.paused = server.base, "default", False

    server.fail = restart
    message = "version: expected 'run-1', which this run sent, got 'default'"
    with rollout_server(server) as url, pytest.raises(UserError, match=message):
        pushing(url, tmp_path / "w").update(tiny_model(), 1)
    assert server.model is server.base


def test_servers_without_versions_are_used_with_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RolloutServer(tiny_model())
    server.reports_version = False
    with rollout_server(server) as url:
        sampler = pushing(url, tmp_path / "w")
        for step in range(2):
            sampler.update(tiny_model(), step)
            sampler.sample([[1]], [3], [258], [0])
    assert caplog.text.count("does not report the version of its weights") == 1


def test_a_server_whose_first_weights_have_no_version_gets_one(tmp_path: Path) -> None:
    server = RolloutServer(tiny_model())
    server.version = None
    with rollout_server(server) as url:
        pushing(url, tmp_path / "w").update(tiny_model(), 4)
    assert server.version == "run-4"


def test_a_server_that_gets_no_weights_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    sampler = ServerSampler("http://localhost:1", "m")
    for step in range(2):
        sampler.update(tiny_model(), step)
    assert caplog.text.count("nothing sends the trained weights to it") == 1


def test_an_adapter_is_loaded_under_the_name_of_its_version(tmp_path: Path) -> None:
    model, server = tiny_model(), RolloutServer(tiny_model())
    add_lora(model, LoRA(rank=4, alpha=8.0, targets=()))
    with rollout_server(server) as url:
        sampler = pushing(url, tmp_path / "w", weights="adapter")
        for step in range(2):
            for name, parameter in model.named_parameters():
                if is_factor(name):
                    torch.nn.init.normal_(parameter, std=0.3)
            sampler.update(model, step)
            assert list(server.adapters) == [f"run-{step}"]
            (turn,) = sampler.sample([[1, 2, 3]], [12], [258], [step])
            assert server.samples[-1]["model"] == f"run-{step}"
            with torch.no_grad():
                (expected,) = tree_logprobs(model, [[1, 2, 3, *turn.tokens]])
            torch.testing.assert_close(torch.tensor(turn.logprobs), expected[2:], atol=1e-4, rtol=0)
        server.fail = lambda path, body: (400, "no slot") if "/load" in path else None
        with pytest.raises(UserError, match=r"adapter of step 5: the server did not load it: .*no slot"):
            sampler.update(model, 5)
        server.fail = lambda path, body: None
        sampler.update(model, 6)
        sampler.close()
    assert server.adapters == {}
    assert not (tmp_path / "w").exists()
