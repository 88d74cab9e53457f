"""Weights reach another process over NCCL. It joins the group as SGLang's workers do."""

import time
from pathlib import Path

import pytest
import torch

from tests.rl.test_broadcast import small
from tests.rl.test_weight_push import other_weights
from tests.support.rollout_server import server_process
from titan_tree import UserError
from titan_tree.models.pretrained import snapshot_tensors
from titan_tree.rl.server.broadcast import BroadcastTransfer
from titan_tree.rl.server.client import Server
from titan_tree.rl.server.engines import SGLang
from titan_tree.rl.server.weight_push import ModelPush

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each process"),
]


def test_broadcast_tensors_arrive_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("qwen3_moe").cuda()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # of the server: this process has its context already
    with server_process() as (url, _):
        engine = SGLang(Server(url, timeout_s=120))
        transfer = BroadcastTransfer(engine, torch.bfloat16, None, bucket_bytes=20_000)
        push = ModelPush(engine, transfer, "run")
        for step in range(3):
            other_weights(model, step)
            started = time.perf_counter()
            push(model, step)
            print(f"step {step}: {time.perf_counter() - started:.3f} s")
            engine.server.post("/received", {"file": str(tmp_path / "received.pt")})
            received, expected = torch.load(tmp_path / "received.pt"), snapshot_tensors(model)
            assert received.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(received[name], tensor.to(torch.bfloat16).cpu()), name
        push.close()


def test_a_server_that_refuses_a_broadcast_does_not_hang_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("qwen3").cuda()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with server_process("refuse_update") as (url, _):
        engine = SGLang(Server(url, timeout_s=120))
        push = ModelPush(engine, BroadcastTransfer(engine, torch.bfloat16, None), "run")
        started = time.perf_counter()
        with pytest.raises(UserError, match="out of memory"):
            push(model, 1)
        assert time.perf_counter() - started < 60
