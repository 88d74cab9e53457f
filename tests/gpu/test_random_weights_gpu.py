"""A GPU draws the same numbers as a CPU: weights of models bit for bit, fp64 numbers up to rounding."""

import pytest
import torch

from titan_tree.models.pretrained import build_model
from titan_tree.models.weights import ElementDraws, log

pytestmark = pytest.mark.gpu


def test_numbers_equal_those_of_a_cpu():
    for start in (0, 2**40 + 3):
        index = torch.arange(start, start + 3_000_000)
        cpu, gpu = ElementDraws(1, "w", index), ElementDraws(1, "w", index.cuda())
        torch.testing.assert_close(gpu.normal(0.02).cpu(), cpu.normal(0.02), rtol=1e-12, atol=1e-15)
        ours, theirs = (log(draws.uniform(0.01, 16.0)).cpu() for draws in (gpu, cpu))
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def test_models_equal_those_of_a_cpu():
    for name in ("qwen3_moe", "qwen3_5"):
        models = []
        for device in ("cpu", "cuda"):
            with torch.device("meta"):
                model = build_model(name, "debug")
            model.to_empty(device=device)
            model.init_weights(seed=2)
            models.append(model)
        for (label, ours), theirs in zip(models[1].named_parameters(), models[0].parameters(), strict=True):
            assert torch.equal(ours.cpu(), theirs), label
