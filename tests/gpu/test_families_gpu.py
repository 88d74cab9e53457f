"""Models on token trees on a GPU: exact in fp32, and in bf16 as close to fp32 as training path by path."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.gpu import DENSE, FOREST, HOPPER, HYBRID, dense_noise_floor
from tests.support.oracle import (
    KINDS,
    NoiseFloor,
    assert_same,
    flat,
    hf_model,
    hybrid_model,
    in_one_pass,
    per_path,
    random_groups,
    relative_error,
    tree_model,
)
from tests.support.partitions import RandomCuts, forest_of, in_partitions

pytestmark = pytest.mark.gpu
ON_GPU: dict[str, Any] = {"device": "cuda", "max_position_embeddings": 4096}
FAMILIES: dict[str, Callable[..., Any]] = {
    "dense": functools.partial(hf_model, **DENSE, **ON_GPU),
    "experts": functools.partial(hf_model, kind="Qwen3Moe", moe_intermediate_size=64, **DENSE, **ON_GPU),
    "hybrid": functools.partial(hybrid_model, **HYBRID, **ON_GPU),
}
# Gradients of the gates are small sums of large terms. On a GPU, the kernels compute an fp32 product as three
# in tf32, which puts these gradients up to 5e-5 from float64; those of transformers are up to 1.7e-5 away.
GATES = ("A_log", "dt_bias")


@pytest.mark.parametrize(
    ("family", "backend", "tied"),
    [("dense", "flex", True), *((family, "triton", tied) for family in FAMILIES for tied in (True, False))],
)
def test_fp32_equals_every_path_alone(family: str, backend: str, tied: bool) -> None:
    hf = FAMILIES[family](tied)
    model = tree_model(hf, backend)
    for seed in range(len(KINDS)):
        groups = random_groups(seed, **FOREST)
        got, want = in_one_pass(model, groups), per_path(hf, flat(groups))
        for name in [name for name in want[2] if name.endswith(GATES)]:
            assert relative_error(got[2].pop(name), want[2].pop(name)) < 1e-4, name
        assert_same(got, want)


@pytest.mark.parametrize("share", [0.01, 0.2])
def test_fp32_partitions_of_a_hybrid_equal_one_pass(share: float) -> None:
    model = tree_model(FAMILIES["hybrid"](True), "triton")
    for seed in range(len(KINDS)):
        groups = random_groups(seed, **FOREST)
        _, want_loss, want = in_one_pass(model, groups)
        loss, got = in_partitions(model, RandomCuts(share, seed).plan(forest_of(groups)))
        assert loss == pytest.approx(want_loss, rel=1e-5)
        for name, gradient in want.items():
            assert relative_error(got[name], gradient) < (1e-4 if name.endswith(GATES) else 2e-5), name


@pytest.mark.parametrize(
    ("family", "sizes", "tolerance"),
    [("dense", {}, 1e-5), ("hybrid", {"num_layers": 2}, 1e-4)],  # one layer of each kind
    ids=["dense", "hybrid"],
)
def test_compiled_blocks_equal_eager_ones(family: str, sizes: dict[str, int], tolerance: float) -> None:
    model = tree_model(FAMILIES[family](True, **sizes), "triton")
    compiled = copy.deepcopy(model)
    for block in compiled.layers:
        block.compile(fullgraph=True, dynamic=True)
    for seed in range(len(KINDS)):
        groups = random_groups(seed, **FOREST)
        assert_same(in_one_pass(compiled, groups), in_one_pass(model, groups), tolerance=tolerance)


def in_bf16(*families: str) -> list[Any]:
    """Returns the families with each backend that they run on in bf16."""
    hopper = [pytest.param(family, "hopper", marks=HOPPER.marks) for family in families]
    return [("dense", "flex"), *((family, "triton") for family in families), *hopper]


@pytest.mark.parametrize(("family", "backend"), in_bf16("dense", "hybrid"))
def test_gradients_are_deterministic(family: str, backend: str) -> None:
    model = tree_model(FAMILIES[family](True, dtype=torch.bfloat16), backend)
    model.attention.deterministic = backend == "hopper"
    groups = random_groups(2, **FOREST)
    first, second = in_one_pass(model, groups), in_one_pass(model, groups)
    assert first[1] == second[1]
    for name, gradient in first[2].items():
        assert torch.equal(gradient, second[2][name]), name


@functools.cache
def noise_floor(family: str) -> NoiseFloor:
    """Returns the errors of bf16 path by path. In bf16, transformers computes the recurrence in fp32.

    Every token has all experts. Otherwise rounding would decide which expert comes last.
    """
    if family == "dense":
        return dense_noise_floor()
    sizes = {"num_experts": 4, "num_experts_per_tok": 4} if family == "experts" else {}
    noisy = FAMILIES[family](True, dtype=torch.bfloat16, **sizes)
    number = 3 if family == "hybrid" else 4
    return NoiseFloor(noisy, [random_groups(seed, **FOREST) for seed in range(number * len(KINDS))])


@pytest.mark.parametrize(("family", "backend"), in_bf16(*FAMILIES))
def test_bf16_gradients_are_at_the_noise_floor(family: str, backend: str) -> None:
    """Errors against fp32 path by path are at most 1.2 times those of bf16 path by path."""
    floor = noise_floor(family)
    model = tree_model(floor.noisy, backend)
    ratios = floor.ratios(lambda groups: in_one_pass(model, groups)[2])
    worst = max(ratios, key=ratios.__getitem__)
    mean = sum(ratios.values()) / len(ratios)
    print(f"{family}, {backend}, error over the noise floor: mean {mean:.3f}, {worst} {ratios[worst]:.3f}")
    assert ratios[worst] <= 1.2, worst
