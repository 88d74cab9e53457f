"""Random weights depend only on seed, name and index, and have the distributions that the models ask for."""

import math
from hashlib import blake2b

import pytest
import torch

from tests.support.cases import for_each
from titan_tree.models import weights
from titan_tree.models.pretrained import build_model
from titan_tree.models.weights import ElementDraws, WeightShard, draw_weights

MASK = 2**64 - 1


def splitmix64(key: int, index: int) -> int:
    """Returns output number ``index`` of the published generator that starts from ``key``."""
    z = (key + index * 0x9E3779B97F4A7C15) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def draws(num: int, seed: int = 0, name: str = "a", start: int = 0) -> ElementDraws:
    return ElementDraws(seed, name, torch.arange(start, start + num))


def test_the_oracle_is_splitmix64():
    """The published numbers are those of https://prng.di.unimi.it/splitmix64.c for the seed 1234567."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [splitmix64(1234567, i) for i in range(1, 5)] == published


@pytest.mark.parametrize("start", [0, 5, 2**40])
def test_numbers_equal_scalar_arithmetic(start):
    key = int.from_bytes(blake2b(b"7 layers.0.w", digest_size=8).digest(), "little")
    got = draws(500, 7, "layers.0.w", start)
    for i, (uniform, normal) in enumerate(
        zip(got.uniform(-2, 6).tolist(), got.normal(0.5).tolist(), strict=True)
    ):
        bits = splitmix64(key, start + i)
        # The halves are read as signed and unsigned.
        unit = ((((bits >> 32) + 2**31) % 2**32) + 0.5) / 2**32
        angle = (bits & 0xFFFFFFFF) / 2**31 - 1
        assert uniform == pytest.approx(8 * unit - 2, abs=1e-12)
        expected = 0.5 * math.sqrt(-2 * math.log(unit)) * math.cos(math.pi * angle)
        assert normal == pytest.approx(expected, abs=1e-9)


def test_the_extreme_bits_give_finite_numbers():
    extreme = draws(4)
    extreme._unit = torch.tensor([2.0**-33, 1 - 2.0**-33, 0.5, 0.5], dtype=torch.float64)
    extreme._angle = torch.tensor([0.0, -1.0, -1.0, 1 - 2.0**-31], dtype=torch.float64)
    radius = [math.sqrt(66 * math.log(2)), 2.0**-16, math.sqrt(2 * math.log(2)), math.sqrt(2 * math.log(2))]
    expected = [r * math.cos(math.pi * a) for r, a in zip(radius, extreme._angle.tolist(), strict=True)]
    assert extreme.normal(1.0).tolist() == pytest.approx(expected, abs=1e-6)


def ks_distance(sample: torch.Tensor, cdf) -> float:
    """Returns the Kolmogorov-Smirnov distance of a sample from a distribution, times sqrt(n)."""
    n = len(sample)
    exact = cdf(sample.sort().values)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    distance = torch.maximum((exact - steps[:-1]).max(), (steps[1:] - exact).max())
    return float(distance) * math.sqrt(n)


@pytest.mark.parametrize("seed", range(3))
def test_the_distributions_are_those_asked_for(seed):
    n = 200_000
    normal, uniform = draws(n, seed).normal(0.02), draws(n, seed).uniform(0.01, 16.0)
    assert abs(normal.mean()) < 4 * 0.02 / math.sqrt(n)
    assert abs(normal.std() / 0.02 - 1) < 4 / math.sqrt(2 * n)
    # The limit is exceeded by one sample in 100,000.
    assert ks_distance(normal, lambda x: 0.5 * torch.erfc(-x / 0.02 / math.sqrt(2))) < 2.5
    assert ks_distance(uniform, lambda x: (x - 0.01) / 15.99) < 2.5


def test_rows_names_and_seeds_are_independent():
    rows = torch.cat(
        [
            draws(64 * 4096).normal(1.0).view(64, 4096),
            draws(8 * 4096, seed=1).normal(1.0).view(8, 4096),
            draws(8 * 4096, name="b").normal(1.0).view(8, 4096),
        ]
    )
    for other in (rows, rows.square() - 1):  # the squares of dependent numbers may correlate
        correlation = torch.corrcoef(other).fill_diagonal_(0)
        assert correlation.abs().max() < 5.5 / math.sqrt(4096)
        shifted = torch.stack([(other[:, :-lag] * other[:, lag:]).mean() for lag in range(1, 65)])
        assert shifted.abs().max() < 5 * float(other.var()) / math.sqrt(other.numel())


@for_each("chunk", [1, 7, 10**6])
@for_each("shape", [(11,), (7, 5), (5, 6, 4), (6, 1, 4)])
def test_a_box_is_drawn_as_the_whole_parameter(monkeypatch, shape, chunk):
    monkeypatch.setattr(weights, "CHUNK", chunk)

    def normal(name, numbers):
        return numbers.normal(1.0)

    whole = torch.empty(shape)
    draw_weights(WeightShard.whole(whole), "w", 3, normal)
    assert torch.equal(whole.flatten(), draws(whole.numel(), 3, "w").normal(1.0).float())
    for low, high in ((0, 2), (1, 4), (3, 5)):
        box = tuple(slice(min(low, size - 1), min(high, size)) for size in shape)
        part = torch.empty_like(whole[box])
        draw_weights(WeightShard(part, tuple(s.start for s in box), shape), "w", 3, normal)
        assert torch.equal(part, whole[box])


def test_nothing_is_drawn_for_an_empty_shard():
    drawn = []
    draw_weights(
        WeightShard(torch.empty(0, 4), (3, 0), (3, 4)), "w", 0, lambda name, numbers: drawn.append(name)
    )
    assert drawn == []


def test_the_seed_of_a_model_comes_from_torch_by_default():
    weights = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        weights.append(build_model("qwen3", "debug").embed_tokens.weight)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    names = dict(build_model("qwen3", "debug").named_parameters())
    first, second = (names[f"layers.{i}.mlp.up_proj.weight"] for i in (0, 1))
    assert not torch.equal(first, second)
