"""GenerateSampler on a GPU: padding, caches and experts there, in fp32 and bf16."""

from typing import Any

import pytest

from tests.rl.test_generate_sampler import assert_bf16_is_as_exact_as_training, check, small

pytestmark = pytest.mark.gpu
SIZES: dict[str, Any] = {"head_dim": 16}


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_5", "qwen3_next", "gpt_oss", "gemma2"])
def test_logprobs_are_those_of_the_trained_model(name: str) -> None:
    check(small(name, **SIZES).cuda())


@pytest.mark.parametrize("name", ["qwen3_moe", "qwen3_next", "gpt_oss"])
def test_bf16_is_as_exact_as_training(name: str) -> None:
    assert_bf16_is_as_exact_as_training(name, "cuda", **SIZES)
