"""Sizes and conditions of tests of whole models on a GPU, and ranks on several."""

import functools
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.support.oracle import KINDS, NoiseFloor, hf_model, random_groups
from tests.support.processes import run_ranks

# Whether tests of ranks run on gloo, to debug them without GPUs.
ON_CPU = os.environ.get("TITAN_TREE_ON_CPU") == "1"
# The marks of tests of ranks. A worker of xdist runs all of them, except those with a further group.
ON_RANKS = [pytest.mark.slow if ON_CPU else pytest.mark.gpu, pytest.mark.xdist_group("ranks on GPUs")]
# Nodes of up to 90 tokens: trees span several blocks of the kernels, and branches start inside blocks.
FOREST = {"vocab_size": 300, "max_length": 90, "num_nodes": 10}
DENSE = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 256, "head_dim": 64}
HYBRID = {**DENSE, "linear_key_head_dim": 64, "linear_value_head_dim": 64}
HOPPER = pytest.param(
    "hopper",
    marks=pytest.mark.skipif(
        not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
        reason="needs a Hopper GPU",
    ),
)


@functools.cache
def dense_noise_floor() -> NoiseFloor:
    """Returns the noise floor of Qwen3, which the tests of one pass and of partitions share."""
    noisy = hf_model(True, torch.bfloat16, "cuda", max_position_embeddings=4096, **DENSE)
    return NoiseFloor(noisy, [random_groups(seed, **FOREST) for seed in range(4 * len(KINDS))])


def need_gpus(number: int) -> None:
    """Skips the test if this machine has fewer GPUs."""
    if not ON_CPU and torch.cuda.device_count() < number:
        pytest.skip(f"needs {number} GPUs")


def on_gpus(function: Callable[..., None], num_ranks: int, *args: Any, **options: Any) -> None:
    """Calls ``run_ranks`` with a GPU for each rank."""
    need_gpus(num_ranks)
    run_ranks(function, num_ranks, *args, start="spawn", **options)
