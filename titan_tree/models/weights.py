"""WeightShard: the part of a parameter that one rank holds. Random initial weights, drawn shard by shard.

A random number depends only on a seed, the parameter's name and the element's index. Every rank can therefore
draw its shards alone, and the weights are the same for any number of ranks and any mesh. A hash maps the
index of an element to 64 random bits: SplitMix64, the generator of Steele, Lea and Flood, "Fast splittable
pseudorandom number generators" (OOPSLA 2014), which passes BigCrush.

The place of an element in memory must not change its value, but on a CPU it changes the rounding of torch.log
and torch.cos. ``log`` and ``_cos_pi`` therefore consist of operations that IEEE 754 rounds exactly, in fp64:
sums, products, quotients and square roots. On a GPU, the last bits of these fp64 numbers were found to differ
from a CPU's. The fp32 weights of two models were equal bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from hashlib import blake2b
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor, nn

CHECKPOINTED = "_checkpoint_wrapped_module."  # torch adds it to the names of checkpointed layers
CHUNK = 1 << 20  # elements that are drawn at once; each takes about 60 bytes

# The constants of SplitMix64 as signed numbers. Products of int64 tensors wrap, as those of uint64 do.
GAMMA, MIX_1, MIX_2 = (
    constant - (1 << 64) for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
)
# Taylor series of atanh(x) / x and cos(pi x / 2) in x^2, highest power first. Their errors are below 1e-10 in
# the ranges where they are used.
ATANH = [1 / n for n in range(13, 0, -2)]
COS = [(-1) ** n * (math.pi / 2) ** (2 * n) / math.factorial(2 * n) for n in range(8, -1, -1)]


class WeightShard(NamedTuple):
    """A box of a parameter: for each dim, a range of indices.

    Args:
        values: the elements of the box; may be empty. Writing to it changes the parameter.
        start: indices of the first element in the parameter, one per dim.
        shape: shape of the whole parameter.
    """

    values: Tensor
    start: tuple[int, ...]
    shape: tuple[int, ...]

    @classmethod
    def whole(cls, parameter: Tensor) -> WeightShard:
        return cls(parameter.detach(), (0,) * parameter.ndim, tuple(parameter.shape))

    @property
    def box(self) -> tuple[slice, ...]:
        """The elements of the box, as an index of the parameter."""
        ranges = zip(self.start, self.values.shape, strict=True)
        return tuple(slice(start, start + length) for start, length in ranges)


WeightShards = Mapping[str, WeightShard]  # by the names of ``state_dict``


def whole_weights(model: nn.Module) -> WeightShards:
    """Returns a shard for each parameter of a model that is not sharded: all of it."""
    return {name: WeightShard.whole(parameter) for name, parameter in model.named_parameters()}


class ElementDraws:
    """Draws a number for each of some elements of one parameter.

    Args:
        index: int64, any shape: the place of each element in the flattened parameter.
    """

    def __init__(self, seed: int, name: str, index: Tensor) -> None:
        digest = blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
        bits = index * GAMMA + int.from_bytes(digest, "little", signed=True)
        for shift, factor in ((30, MIX_1), (27, MIX_2), (31, 1)):
            bits = (bits ^ ((bits >> shift) & ((1 << 64 - shift) - 1))).mul_(factor)
        # High and low halves of the bits.
        self._unit = (bits >> 32).double().mul_(2.0**-32).add_(0.5 + 2.0**-33)
        self._angle = (bits & 0xFFFFFFFF).double().mul_(2.0**-31).sub_(1.0)

    def constant(self, value: float) -> Tensor:
        return torch.full_like(self._unit, value)

    def uniform(self, low: float, high: float) -> Tensor:
        """Draws from the uniform distribution over (low, high), fp64, in steps of 2^-32 of the range."""
        return self._unit * (high - low) + low

    def normal(self, std: float) -> Tensor:
        """Draws from N(0, std^2), fp64, at most 6.8 std (Box and Muller, 1958)."""
        radius = log(self._unit).mul_(-2.0).sqrt_()
        return radius.mul_(_cos_pi(self._angle)).mul_(std)


def draw_weights(
    shard: WeightShard, name: str, seed: int, initial_values: Callable[[str, ElementDraws], Tensor]
) -> None:
    """Sets the elements of a shard of the parameter ``name``, ``CHUNK`` at a time.

    Args:
        initial_values: returns the values of some elements, of the shape of their indices.
    """
    if shard.values.is_meta or not shard.values.numel():
        return
    *_, row_size = shard.values.shape
    rows = shard.values.view(-1, row_size)
    starts, columns = _indices(shard)
    num_rows = max(1, CHUNK // row_size)
    for chunk, start in zip(rows.split(num_rows), starts.split(num_rows), strict=True):
        chunk.copy_(initial_values(name, ElementDraws(seed, name, start[:, None] + columns)))


def _indices(shard: WeightShard) -> tuple[Tensor, Tensor]:
    """Returns the places in the flattened parameter of a shard's rows, and of the elements within a row."""
    *leading, columns = (
        torch.arange(start, start + size, device=shard.values.device) * prod(shard.shape[dim + 1 :])
        for dim, (start, size) in enumerate(zip(shard.start, shard.values.shape, strict=True))
    )
    rows = torch.zeros(1, dtype=torch.int64, device=shard.values.device)
    for indices in leading:
        rows = (rows[:, None] + indices).flatten()
    return rows, columns


def log(x: Tensor) -> Tensor:
    """Returns the natural logarithm of positive fp64 numbers, with an absolute error below 1e-11."""
    mantissa, exponent = torch.frexp(x)  # in [0.5, 1)
    s = (mantissa - math.sqrt(0.5)) / (mantissa + math.sqrt(0.5))  # |s| < 0.172
    return _polynomial(ATANH, s * s).mul_(s).mul_(2.0).add_((exponent.double() - 0.5).mul_(math.log(2)))


def _cos_pi(x: Tensor) -> Tensor:
    """Returns cos(pi x) for fp64 numbers in [-1, 1], with an error below 1e-10."""
    half = _polynomial(COS, x * x)
    return half.mul_(half).mul_(2.0).sub_(1.0)


def _polynomial(coefficients: list[float], x: Tensor) -> Tensor:
    """Evaluates a polynomial, highest power first."""
    first, *others = coefficients
    value = torch.full_like(x, first)
    for coefficient in others:
        value.mul_(x).add_(coefficient)
    return value
