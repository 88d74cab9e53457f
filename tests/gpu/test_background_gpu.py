"""Asynchronous checkpoints on a GPU: kernels run beside the copies, and the optimizer waits for them."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.optimizers import model_and_optimizers
from titan_tree.distributed.optimizers import build_optimizers, clip_and_step
from titan_tree.distributed.settings import OptimizerConfig
from titan_tree.run.checkpoint import background
from titan_tree.run.checkpoint.background import BackgroundWriter

pytestmark = pytest.mark.gpu
SLEEP = 2_000_000_000  # clock cycles: about a second


def value_of(tensor: Any) -> torch.Tensor:
    return tensor.dequantize() if hasattr(tensor, "codes") else tensor


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_the_optimizer_waits_for_the_copies_and_other_kernels_do_not(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name == "adamw8bit":
        pytest.importorskip("torchao", reason="needs torchao: pip install -e '.[torchao]'")
    saved: list[Any] = []
    copy_all = BackgroundWriter._copy_all

    def copy_slowly(writer: BackgroundWriter, tensors: Any) -> Any:
        with torch.cuda.stream(writer._stream):
            torch.cuda._sleep(SLEEP)
        return copy_all(writer, tensors)

    monkeypatch.setattr(BackgroundWriter, "_copy_all", copy_slowly)
    monkeypatch.setattr(background.dcp, "save", lambda tensors, **_: saved.append(tensors))
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = model_and_optimizers(name)[0].cuda()
        optimizers = build_optimizers(OptimizerConfig(name=name, lr=1e-2), model)
        torch.randn(1, device="cuda").item()  # starts CUDA's random generator
        writer = BackgroundWriter(optimizers, torch.device("cuda"))
        for _ in range(2):  # the second checkpoint reuses the memory of the first one
            states = optimizers.state_dict()
            tensors = {
                "model": model.state_dict(),
                "optimizer": {label: value for label, value in states.items() if torch.is_tensor(value)},
            }
            expected = {
                group: {label: value_of(tensor).clone() for label, tensor in named.items()}
                for group, named in tensors.items()
            }
            written = writer.start(tensors, None)  # type: ignore[arg-type]
            for parameter in model.parameters():
                parameter.grad = torch.randn_like(parameter)
            torch.cuda.current_stream().synchronize()
            assert not writer._copied.done()
            clip_and_step(optimizers, torch.ones((), device="cuda"), 1.0)
            assert writer._copied.done()
            written.result()
            (copies,) = saved
            saved.clear()
            for group, named in expected.items():
                for label, value in named.items():
                    copy = copies[group][label]
                    assert copy.device.type == "cpu"
                    assert hasattr(copy, "codes") or copy.is_pinned() or not value.is_cuda
                    assert torch.equal(value_of(copy), value.cpu()), label
    finally:
        dist.destroy_process_group()
