"""Sizes and conditions of the tests that run whole models on a GPU."""

import functools

import pytest
import torch

from tests.support.oracle import KINDS, NoiseFloor, hf_model, random_groups

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
