"""Weights that are broadcast to servers: over a process group with SGLang, and with vLLM's own class."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.rl.test_weight_push import other_weights, pushing
from tests.support.cases import exhaustive
from tests.support.rollout_server import RolloutServer, rollout_server, server_process
from titan_tree import UserError, build_model, save_pretrained
from titan_tree.models.decoder import Decoder
from titan_tree.rl.server import broadcast
from titan_tree.rl.server.broadcast import sglang_workers
from titan_tree.rl.server.client import ServerClient
from titan_tree.rl.settings import ServerConfig

FAILURES = [
    ("refuse_join", "/init_weights_update_group: refused a request with status 400: cannot join"),
    ("refuse_update", "/update_weights_from_distributed: refused a request .*out of memory"),
    ("die", "the process group failed with|no answer after 1 attempts"),
]


def small(name: str) -> Decoder:
    torch.manual_seed(1)
    model = build_model(name, "debug", vocab_size=64, hidden_size=32, head_dim=16)
    model.requires_grad_()
    return model


@pytest.mark.slow
@pytest.mark.parametrize("name", exhaustive(["qwen3_moe"], ["qwen3_moe", "qwen3_next"]))
def test_broadcast_tensors_are_those_of_a_snapshot(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process joins with gloo. It gets exactly the tensors that save_pretrained writes."""
    model = small(name)
    with server_process() as (url, _):
        monkeypatch.setattr(broadcast, "BUCKET_BYTES", 20_000)
        sampler = pushing(url, "sglang", dtype=torch.bfloat16, weights="broadcast", timeout_s=60)
        for step in range(2):
            other_weights(model, step)
            sampler.update(model, step)
            calls = sampler.clients[0].post("/received", {"file": str(tmp_path / "received.pt")})["calls"]
            received = torch.load(tmp_path / "received.pt")
            folder = tmp_path / f"snapshot-{step}"
            weights = {n: w.to(torch.bfloat16) for n, w in model.state_dict().items()}
            save_pretrained(model, folder, weights)
            expected = load_file(folder / "model.safetensors")
            assert received.keys() == expected.keys()
            for tensor in expected:
                assert torch.equal(received[tensor], expected[tensor]), tensor
        updates = [body for path, body in calls if path == "/update_weights_from_distributed"]
        versions = [body.get("weight_version") for body in updates]
        assert len(updates) >= 4
        assert [version for version in versions if version] == ["run-0", "run-1"]
        assert versions[-1] == "run-1"  # only the last request of an update names the version
        sampler.close()
        path, _ = sampler.clients[0].post("/received", {"file": str(tmp_path / "received.pt")})["calls"][-2]
        assert path == "/destroy_weights_update_group"


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "message"), exhaustive(FAILURES[:1], FAILURES))
def test_a_failed_broadcast_is_one_line(mode: str, message: str) -> None:
    with server_process(mode) as (url, _):
        sampler = pushing(url, "sglang", weights="broadcast", timeout_s=60)
        with pytest.raises(UserError, match=f"weights of step 1: the server did not take .*({message})"):
            sampler.update(small("qwen3"), 1)


def workers(url: str) -> int:
    return sglang_workers(ServerClient(url, ServerConfig(api="sglang")))


@pytest.mark.parametrize(
    ("info", "message"),
    [
        ({"tp_size": 1, "dp_size": 2}, "dp_size: expected 1, got 2"),
        ({"tp_size": 1, "pp_size": 2}, "pp_size: expected 1, got 2"),
        ({}, "tp_size: expected the number of workers, got None"),
    ],
)
def test_layouts_that_cannot_join_are_refused(info: dict[str, int], message: str) -> None:
    server = RolloutServer("sglang")
    server.fail = lambda path, body: info if path == "/server_info" else None
    with rollout_server(server) as url, pytest.raises(UserError, match=message):
        workers(url)


def test_attention_parallelism_counts_each_worker_once() -> None:
    server = RolloutServer("sglang")
    server.fail = lambda path, body: {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}
    with rollout_server(server) as url:
        assert workers(url) == 4


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A package with vLLM's documented classes, whose sender drives the client as the documentation says."""
    seen: dict[str, Any] = {}

    class Sender:
        def __init__(self, client: Any, source: Any) -> None:
            self.client, self.source = client, source

        def send_weights(self) -> None:
            self.client.start_weight_update()
            metadata = self.source.metadata()
            self.client.update_weights({"names": [meta.name for meta in metadata]})
            seen["tensors"] = dict(self.source)
            declared = [(m.name, m.dtype, m.shape) for m in metadata]
            assert [(n, t.dtype, tuple(t.shape)) for n, t in self.source] == declared
            self.client.finish_weight_update()

        def shutdown(self) -> None:
            seen["shutdown"] = True

    def trainer_init(*, init_info: Any, client: Any, source: Any) -> Sender:
        seen["info"] = init_info
        client.init_weight_transfer_engine({"rank_offset": 1})
        return Sender(client, source)

    package = types.ModuleType("vllm.distributed.weight_transfer")
    package.ParamMeta = lambda name, dtype, shape: types.SimpleNamespace(name=name, dtype=dtype, shape=shape)
    package.WeightSource = type("WeightSource", (), {})
    package.WeightTransferTrainerFactory = types.SimpleNamespace(trainer_init=trainer_init)
    nccl = types.ModuleType("vllm.distributed.weight_transfer.nccl_engine")
    nccl.NCCLTrainerInitInfo = lambda **fields: fields
    for module in ("vllm", "vllm.distributed"):
        monkeypatch.setitem(sys.modules, module, types.ModuleType(module))
    monkeypatch.setitem(sys.modules, package.__name__, package)
    monkeypatch.setitem(sys.modules, nccl.__name__, nccl)
    return seen


def test_vllm_sends_with_its_own_class(vllm: dict[str, Any], tmp_path: Path) -> None:
    model, server = small("qwen3_moe"), RolloutServer("vllm")
    with rollout_server(server) as url:
        sampler = pushing(url, "vllm", dtype=torch.bfloat16, weights="broadcast")
        for step in range(2):
            other_weights(model, step)
            sampler.update(model, step)
            folder = tmp_path / f"snapshot-{step}"
            save_pretrained(model, folder, {n: w.to(torch.bfloat16) for n, w in model.state_dict().items()})
            expected = load_file(folder / "model.safetensors")
            assert vllm["tensors"].keys() == expected.keys()
            assert all(torch.equal(vllm["tensors"][name], expected[name]) for name in expected)
        sampler.close()
    assert (vllm["info"]["rank"], vllm["info"]["world_size"], vllm["shutdown"]) == (0, 2, True)
    once = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    paused = ["/pause?mode=wait", "/weight_info", "/update_weight_version"]
    resumed = ["/reset_prefix_cache", "/resume", "/weight_info"]
    joined = ["/get_world_size", "/init_weight_transfer_engine"]
    assert [path for path, _ in server.calls] == [
        *(*paused, *joined, *once, *resumed),
        *(*paused, *once, *resumed),
    ]


def test_a_failure_of_vllms_class_is_one_line(vllm: dict[str, Any]) -> None:
    server = RolloutServer("vllm")
    server.fail = lambda path, body: (400, "no engine") if path == "/update_weights" else None
    with rollout_server(server) as url:
        sampler = pushing(url, "vllm", weights="broadcast")
        with pytest.raises(UserError, match="/update_weights: refused a request with status 400: no engine"):
            sampler.update(small("qwen3"), 1)


def test_broadcasts_to_vllm_need_its_package() -> None:
    with pytest.raises(UserError, match=r"needs vllm 0\.28 or later, but No module named 'vllm'"):
        pushing("http://localhost:1", "vllm", weights="broadcast")
