"""Weights reach another process over NCCL. It joins the group as SGLang's workers do."""

import time
from pathlib import Path

import pytest
import torch

from tests.rl.test_broadcast import small
from tests.rl.test_weight_push import other_weights, pushing
from tests.support.rollout_server import server_process
from titan_tree import UserError
from titan_tree.models.pretrained import snapshot_tensors
from titan_tree.rl.server import broadcast

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each process"),
]


def test_broadcast_tensors_arrive_bit_for_bit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("qwen3_moe").cuda()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")  # of the server: this process has its context already
    with server_process() as (url, _):
        monkeypatch.setattr(broadcast, "BUCKET_BYTES", 20_000)
        sampler = pushing(url, "sglang", dtype=torch.bfloat16, weights="broadcast", timeout_s=120)
        for step in range(3):
            other_weights(model, step)
            started = time.perf_counter()
            sampler.update(model, step)
            print(f"step {step}: {time.perf_counter() - started:.3f} s")
            sampler.clients[0].post("/received", {"file": str(tmp_path / "received.pt")})
            received, expected = torch.load(tmp_path / "received.pt"), snapshot_tensors(model)
            assert received.keys() == expected.keys()
            for name, tensor in expected.items():
                assert torch.equal(received[name], tensor.to(torch.bfloat16).cpu()), name
        sampler.close()


def test_a_server_that_refuses_a_broadcast_does_not_hang_it(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("qwen3").cuda()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    with server_process("refuse_update") as (url, _):
        sampler = pushing(url, "sglang", dtype=torch.bfloat16, weights="broadcast", timeout_s=120)
        started = time.perf_counter()
        with pytest.raises(UserError, match="out of memory"):
            sampler.update(model, 1)
        assert time.perf_counter() - started < 60
