"""A model of transformers in place, in bf16 on a GPU: the kernels, FSDP2 and checkpointed layers together."""

import random

import pytest
import torch.distributed as dist

from tests.support.hf_families import hf_family
from tests.support.in_place import assert_bf16_is_as_exact

pytestmark = pytest.mark.gpu
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "max_position_embeddings": 2048}


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral"])  # a head of its own, a tied one, windows
def test_bf16_gradients_are_at_the_noise_floor(name: str) -> None:
    draw = random.Random(0)
    trunk = [draw.randrange(3, 64) for _ in range(300)]
    paths = [trunk[: 100 * i + 50] + [draw.randrange(3, 64) for _ in range(200)] for i in range(3)]
    dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    assert_bf16_is_as_exact(hf_family(name, **SIZES), paths, "cuda", max_tokens=256)
