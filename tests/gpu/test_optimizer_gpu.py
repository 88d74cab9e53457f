"""8-bit AdamW on a GPU: whole steps. tests/components/test_adamw_8bit.py tests its kernel."""

import math

import pytest
import torch

from tests.support.optimizers import draw_gradients, model_and_optimizers, plain_state
from tests.support.oracle import relative_error
from titan_tree.distributed.optimizers import build_optimizers, clip_and_step
from titan_tree.distributed.settings import OptimizerConfig

pytest.importorskip("torchao", reason="needs torchao: pip install -e '.[torchao]'")
pytestmark = pytest.mark.gpu


def test_steps_equal_those_on_a_cpu():
    on_cpu, cpu_optimizers = model_and_optimizers("adamw8bit", lr=1e-3)
    start = {name: p.detach().clone() for name, p in on_cpu.named_parameters()}
    on_gpu = model_and_optimizers("adamw8bit")[0].cuda()
    gpu_optimizers = build_optimizers(OptimizerConfig(name="adamw8bit", lr=1e-3), on_gpu)
    for step in range(5):
        draw_gradients(on_cpu, step)
        for ours, theirs in zip(on_gpu.parameters(), on_cpu.parameters(), strict=True):
            ours.grad = theirs.grad.cuda()
        loss = torch.tensor(math.nan if step == 3 else 1.0)  # nan: the step changes nothing
        norm = clip_and_step(gpu_optimizers, loss.cuda(), 1.0)
        assert norm.item() == pytest.approx(clip_and_step(cpu_optimizers, loss, 1.0).item(), rel=1e-5)
    for (name, ours), theirs in zip(on_gpu.named_parameters(), on_cpu.parameters(), strict=True):
        # A moment halfway between two 8-bit numbers may be rounded either way.
        assert relative_error(ours.cpu() - start[name], theirs - start[name]) < 5e-3, name
    assert all(value.isfinite().all() for value in plain_state(gpu_optimizers))


@pytest.mark.parametrize("name", ["adamw", "adamw8bit"])
def test_the_host_never_waits_for_the_device(name):
    model = model_and_optimizers(name)[0].cuda()
    optimizers = build_optimizers(OptimizerConfig(name=name, lr=1e-3), model)
    loss = torch.ones((), device="cuda")
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    clip_and_step(optimizers, loss, 1.0)  # creates states and compiles the kernel
    before = [p.detach().clone() for p in model.parameters()]
    torch.cuda.set_sync_debug_mode("error")
    clip_and_step(optimizers, loss, 1.0)
    torch.cuda.set_sync_debug_mode("default")
    assert not any(map(torch.equal, before, model.parameters()))
