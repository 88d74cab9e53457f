"""Sampling on a GPU: CUDA graphs, rows that share keys, several batches."""

import random

import pytest
import torch

from titan_tree import build_model, tree_logprobs
from titan_tree.rl import cached_sampler
from titan_tree.rl.cached_sampler import CachedSampler

pytestmark = pytest.mark.gpu
STOP = 7


@pytest.mark.parametrize(
    ("share", "dtype", "tolerance"),
    [
        (cached_sampler.CACHE_SHARE, torch.float32, 1e-4),  # all rows at once
        (cached_sampler.CACHE_SHARE, torch.bfloat16, 0.05),
        (0.0, torch.float32, 1e-4),  # one by one
        (cached_sampler.CACHE_SHARE, torch.float64, 1e-5),  # without Triton
    ],
)
def test_logprobs_of_the_sampler_are_those_of_the_trainer(
    share: float, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cached_sampler, "CACHE_SHARE", share)
    monkeypatch.setattr(cached_sampler, "COLUMNS", 32)
    model = build_model("qwen3", "debug", vocab_size=64, attention="reference").cuda().to(dtype)
    draw = random.Random(0)
    contexts = [[draw.randrange(64) for _ in range(draw.choice([1, 20, 90]))] for _ in range(12)]
    contexts += [contexts[0]] * 20 + [contexts[1]] * 3  # more rows than a tile has
    limits = [draw.randrange(1, 100) for _ in contexts]
    turns = CachedSampler(model).sample(contexts, limits, [STOP], range(3, 3 + len(contexts)))
    assert turns == CachedSampler(model).sample(contexts, limits, [STOP], range(3, 3 + len(contexts)))
    with torch.no_grad():
        scores = tree_logprobs(model, [a + turn.tokens for a, turn in zip(contexts, turns, strict=True)])
    for score, turn, limit in zip(scores, turns, limits, strict=True):
        assert len(turn.tokens) == limit or turn.tokens[-1] == STOP
        assert STOP not in turn.tokens[:-1]
        torch.testing.assert_close(
            score[-len(turn.tokens) :].float().cpu(), torch.tensor(turn.logprobs), atol=tolerance, rtol=0
        )
