"""Qwen3 on token trees on a GPU: exact in fp32, and in bf16 as close to fp32 as training path by path."""

import copy

import pytest
import torch

from tests.support.gpu import DENSE, FOREST, HOPPER, dense_noise_floor
from tests.support.oracle import (
    KINDS,
    assert_same,
    flat,
    hf_model,
    in_one_pass,
    per_path,
    random_groups,
    tree_model,
)

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("backend", "tied"), [("triton", True), ("triton", False), ("flex", True)])
def test_fp32_equals_every_path_alone(backend, tied):
    hf = hf_model(tied, device="cuda", max_position_embeddings=4096, **DENSE)
    model = tree_model(hf, backend)
    for seed in range(len(KINDS)):
        groups = random_groups(seed, **FOREST)
        assert_same(in_one_pass(model, groups), per_path(hf, flat(groups)), tolerance=1e-5)


def test_compiled_blocks_equal_eager_ones():
    model = tree_model(hf_model(True, device="cuda", max_position_embeddings=4096, **DENSE), "triton")
    compiled = copy.deepcopy(model)
    for block in compiled.layers:
        block.compile(fullgraph=True, dynamic=True)
    for seed in range(len(KINDS)):
        groups = random_groups(seed, **FOREST)
        assert_same(in_one_pass(compiled, groups), in_one_pass(model, groups), tolerance=1e-5)


@pytest.mark.parametrize("backend", ["triton", "flex", HOPPER])
def test_gradients_are_deterministic(backend):
    hf = hf_model(True, torch.bfloat16, "cuda", max_position_embeddings=4096, **DENSE)
    model, groups = tree_model(hf, backend), random_groups(2, **FOREST)
    model.attention.deterministic = backend == "hopper"
    first, second = in_one_pass(model, groups), in_one_pass(model, groups)
    assert first[1] == second[1]
    for name, gradient in first[2].items():
        assert torch.equal(gradient, second[2][name]), name


@pytest.mark.parametrize("backend", ["triton", "flex", HOPPER])
def test_bf16_gradients_are_at_the_noise_floor(backend):
    """Compared with fp32 path by path, errors are at most 1.2 times those of bf16 path by path."""
    floor = dense_noise_floor()
    model = tree_model(floor.noisy, backend)
    ratios = floor.ratios(lambda groups: in_one_pass(model, groups)[2])
    worst = max(ratios, key=ratios.__getitem__)
    mean = sum(ratios.values()) / len(ratios)
    print(f"{backend}: error over the noise floor: mean {mean:.3f}, worst {ratios[worst]:.3f} ({worst})")
    assert ratios[worst] <= 1.2, worst
