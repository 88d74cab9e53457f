"""Trained weights reach servers on loopback: from a folder, over a process group, and as an adapter."""

import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.rl.test_sampling import tiny_model
from tests.support.rollout_server import RolloutServer, rollout_server, server_process
from titan_tree import UserError, build_model, save_pretrained, tree_logprobs
from titan_tree.components.lora import LoRA, is_factor
from titan_tree.models.decoder import Decoder
from titan_tree.models.lora import add_lora
from titan_tree.rl.broadcast import BroadcastTransfer
from titan_tree.rl.engines import VLLM, SGLang
from titan_tree.rl.server import Server
from titan_tree.rl.server_sampler import ServerSampler
from titan_tree.rl.vllm_transfer import VLLMTransfer
from titan_tree.rl.weight_push import AdapterPush, FolderTransfer, ModelPush, Served

ENGINES = {"vllm": VLLM, "sglang": SGLang}
LOADED = {"vllm": "/collective_rpc", "sglang": "/update_weights_from_disk"}


def folder_push(url: str, api: str, folder: Path, **options: Any) -> ModelPush:
    engine = ENGINES[api](Server(url, pause_s=0.01, **options))
    return ModelPush(engine, FolderTransfer(engine, folder, torch.float32, None), "run")


def other_weights(model: Decoder, seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_a_server_samples_from_the_weights_in_the_folder(api: str, tmp_path: Path) -> None:
    """The log-probs that it reports are those of the trained model, after each of three updates."""
    model, server = tiny_model(), RolloutServer(api, tiny_model())
    with rollout_server(server) as url:
        sampler = ServerSampler(url, "m", api=api, push=folder_push(url, api, tmp_path / "weights"))
        for step in range(3):
            other_weights(model, step)
            sampler.update(model, step)
            assert server.version == f"run-{step}"
            assert [each.name for each in (tmp_path / "weights").iterdir()] == [f"run-{step}"]
            for name, weight in server.model.state_dict().items():
                assert torch.equal(weight, model.state_dict()[name]), name
            (turn,) = sampler.sample([[1, 2, 3]], [12], 258, seed=step)
            with torch.no_grad():
                (expected,) = tree_logprobs(model, [[1, 2, 3, *turn.tokens]])
            torch.testing.assert_close(torch.tensor(turn.logprobs), expected[2:], atol=1e-4, rtol=0)
        sampler.close()
    assert not (tmp_path / "weights").exists()


def test_commands_come_in_the_order_that_the_servers_document(tmp_path: Path) -> None:
    folder = str((tmp_path / "w" / "run-7").resolve())
    expected = {
        "vllm": [
            ("/pause?mode=wait", {}),
            ("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": folder}}),
            ("/reset_prefix_cache", {}),
            ("/weight_info", None),
            ("/update_weight_version", {"new_version": "run-7"}),
            ("/resume", {}),
            ("/weight_info", None),
        ],
        "sglang": [
            ("/pause_generation", {"mode": "abort"}),
            ("/flush_cache", {}),
            ("/update_weights_from_disk", {"model_path": folder, "weight_version": "run-7"}),
            ("/continue_generation", {}),
            ("/get_weight_version", None),
        ],
    }
    for api, calls in expected.items():
        server = RolloutServer(api)
        with rollout_server(server) as url:
            assert folder_push(url, api, tmp_path / "w")(tiny_model(), 7) == Served("run-7")
        assert server.calls == calls


@pytest.mark.parametrize(
    ("api", "path", "instead", "message"),
    [
        ("sglang", LOADED["sglang"], (400, "no such file"), "from_disk: refused .* status 400: no such file"),
        ("sglang", LOADED["sglang"], {"success": False, "message": "shape"}, "expected success, got .*shape"),
        ("sglang", "/pause_generation", (404, "?"), "/pause_generation: refused a request with status 404"),
        ("sglang", "/flush_cache", (400, "busy"), "/flush_cache: no answer after 5 attempts, .*busy"),
        ("vllm", LOADED["vllm"], (500, "crash"), "/collective_rpc: no answer after 5 attempts, .*crash"),
        ("vllm", "/reset_prefix_cache", {"success": False}, "/reset_prefix_cache: expected success"),
    ],
)
def test_a_failed_push_is_one_line(api: str, path: str, instead: Any, message: str, tmp_path: Path) -> None:
    server = RolloutServer(api)
    server.fail = lambda called, body: instead if called == path else None
    with rollout_server(server) as url:
        with pytest.raises(
            UserError, match=f"weights of step 3: the server did not take them over.*{message}"
        ):
            folder_push(url, api, tmp_path / "w")(tiny_model(), 3)
        resumed = {"vllm": "/resume", "sglang": "/continue_generation"}[api]
        assert resumed not in [called for called, _ in server.calls]  # it may hold weights of two versions


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_dropped_connections_are_retried(api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    server, failed = RolloutServer(api), set()

    def drop_once(path: str, body: Any) -> None:
        if path not in failed:
            failed.add(path)
            raise ConnectionError

    server.fail = drop_once
    model = tiny_model()
    with rollout_server(server) as url:
        folder_push(url, api, tmp_path / "w")(model, 1)
    assert torch.equal(server.model.embed_tokens.weight, model.embed_tokens.weight)
    assert caplog.text.count("attempt 1 of 5 failed") == len(failed) >= 5


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_other_weights_than_those_that_were_sent_are_reported(api: str, tmp_path: Path) -> None:
    """The server ignores an update, or another program updates it between two turns."""
    server = RolloutServer(api, tiny_model())
    with rollout_server(server) as url:
        push = folder_push(url, api, tmp_path / "w")
        sampler = ServerSampler(url, "m", api=api, push=push)
        sampler.update(tiny_model(), 1)
        sampler.sample([[1]], [3], 258, seed=0)
        server.version = "another"
        with pytest.raises(UserError, match="version: expected 'run-1', which this run sent, got 'another'"):
            sampler.sample([[1]], [3], 258, seed=0)
        named = {"vllm": "/weight_info", "sglang": "/get_weight_version"}[api]
        server.fail = lambda path, body: {"weight_version": "old"} if path == named else None
        with pytest.raises(
            UserError, match="weight version: expected 'run-2', which this run sent, got 'old'"
        ):
            push(tiny_model(), 2)


def test_an_answer_of_other_weights_is_reported(tmp_path: Path) -> None:
    """The server has changed back to the sent weights before the trainer asks it for their version."""
    server = RolloutServer("sglang", tiny_model())
    with rollout_server(server) as url:
        sampler = ServerSampler(url, api="sglang", push=folder_push(url, "sglang", tmp_path / "w"))
        sampler.update(tiny_model(), 1)
        server.version = "another"
        server.fail = lambda path, body: (
            {"weight_version": "run-1"} if path == "/get_weight_version" else None
        )
        with pytest.raises(UserError, match=r"weight_version: expected 'run-1', .*, got 'another'"):
            sampler.sample([[1]], [3], 258, seed=0)


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_servers_without_versions_are_used_with_a_warning(
    api: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = RolloutServer(api, tiny_model())
    server.reports_version = False
    with rollout_server(server) as url:
        sampler = ServerSampler(url, "m", api=api, push=folder_push(url, api, tmp_path / "w"))
        for step in range(2):
            sampler.update(tiny_model(), step)
            sampler.sample([[1]], [3], 258, seed=0)
    assert caplog.text.count("does not report the version of its weights") == 1


def test_a_server_that_gets_no_weights_is_warned_about(caplog: pytest.LogCaptureFixture) -> None:
    sampler = ServerSampler("http://localhost:1", "m")
    for step in range(2):
        sampler.update(tiny_model(), step)
    assert caplog.text.count("nothing sends the trained weights to it") == 1


@pytest.mark.parametrize("api", ["vllm", "sglang"])
def test_an_adapter_is_loaded_under_the_name_of_its_version(api: str, tmp_path: Path) -> None:
    model, server = tiny_model(), RolloutServer(api, tiny_model())
    add_lora(model, LoRA(rank=4, alpha=8.0, targets=()))
    with rollout_server(server) as url:
        push = AdapterPush(ENGINES[api](Server(url, pause_s=0.01)), tmp_path / "w", None, "run")
        sampler = ServerSampler(url, "m", api=api, push=push)
        for step in range(2):
            for name, parameter in model.named_parameters():
                if is_factor(name):
                    torch.nn.init.normal_(parameter, std=0.3)
            sampler.update(model, step)
            assert list(server.adapters) == [f"run-{step}"]
            (turn,) = sampler.sample([[1, 2, 3]], [12], 258, seed=step)
            asked = server.samples[-1]
            assert (asked["model"] if api == "vllm" else asked["lora_path"]) == f"run-{step}"
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


def small(name: str) -> Decoder:
    torch.manual_seed(1)
    model = build_model(name, "debug", vocab_size=64, hidden_size=32, head_dim=16)
    model.requires_grad_()
    return model


@pytest.mark.distributed
@pytest.mark.parametrize("name", ["qwen3", "qwen3_moe", "qwen3_next"])
def test_broadcast_tensors_are_those_of_a_snapshot(name: str, tmp_path: Path) -> None:
    """Another process joins with gloo. It gets exactly the tensors that save_pretrained writes."""
    model = small(name)
    with server_process() as (url, _):
        engine = SGLang(Server(url, timeout_s=60))
        transfer = BroadcastTransfer(engine, torch.bfloat16, None, bucket_bytes=20_000)
        push = ModelPush(engine, transfer, "run")
        for step in range(2):
            other_weights(model, step)
            push(model, step)
            calls = engine.server.post("/received", {"file": str(tmp_path / "received.pt")})["calls"]
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
        push.close()
        assert not transfer._group


@pytest.mark.distributed
@pytest.mark.parametrize(
    ("mode", "message"),
    [
        ("refuse_join", "/init_weights_update_group: refused a request with status 400: cannot join"),
        ("refuse_update", "/update_weights_from_distributed: refused a request .*out of memory"),
        ("die", "the process group failed with|no answer after 1 attempts"),
    ],
)
def test_a_failed_broadcast_is_one_line(mode: str, message: str) -> None:
    with server_process(mode) as (url, _):
        engine = SGLang(Server(url, timeout_s=60))
        push = ModelPush(engine, BroadcastTransfer(engine, torch.float32, None), "run")
        with pytest.raises(UserError, match=f"weights of step 1: the server did not take .*({message})"):
            push(small("qwen3"), 1)


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
        SGLang(Server(url)).world_size()


def test_attention_parallelism_counts_each_worker_once() -> None:
    server = RolloutServer("sglang")
    server.fail = lambda path, body: {"tp_size": 4, "dp_size": 2, "enable_dp_attention": True}
    with rollout_server(server) as url:
        assert SGLang(Server(url)).world_size() == 4


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
        engine = VLLM(Server(url))
        push = ModelPush(engine, VLLMTransfer(engine, torch.bfloat16, None), "run")
        for step in range(2):
            other_weights(model, step)
            push(model, step)
            folder = tmp_path / f"snapshot-{step}"
            save_pretrained(model, folder, {n: w.to(torch.bfloat16) for n, w in model.state_dict().items()})
            expected = load_file(folder / "model.safetensors")
            assert vllm["tensors"].keys() == expected.keys()
            assert all(torch.equal(vllm["tensors"][name], expected[name]) for name in expected)
        push.close()
    assert (vllm["info"]["rank"], vllm["info"]["world_size"], vllm["shutdown"]) == (0, 2, True)
    once = ["/start_weight_update", "/update_weights", "/finish_weight_update"]
    ours = ["/reset_prefix_cache", "/weight_info", "/update_weight_version", "/resume", "/weight_info"]
    joined = ["/get_world_size", "/init_weight_transfer_engine"]
    assert [path for path, _ in server.calls] == [
        *("/pause?mode=wait", *joined, *once, *ours),
        *("/pause?mode=wait", *once, *ours),
    ]


def test_a_failure_of_vllms_class_is_one_line(vllm: dict[str, Any]) -> None:
    server = RolloutServer("vllm")
    server.fail = lambda path, body: (400, "no engine") if path == "/update_weights" else None
    with rollout_server(server) as url:
        engine = VLLM(Server(url))
        push = ModelPush(engine, VLLMTransfer(engine, torch.float32, None), "run")
        with pytest.raises(UserError, match="/update_weights: refused a request with status 400: no engine"):
            push(small("qwen3"), 1)


def test_broadcasts_to_vllm_need_its_package() -> None:
    with pytest.raises(UserError, match=r"needs vllm 0\.28 or later, but No module named 'vllm'"):
        VLLMTransfer(VLLM(Server("http://localhost:1")), torch.float32, None)
