"""WeightShard: the part of a parameter that one rank holds, as seen by code that draws or reads weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor, nn


class WeightShard(NamedTuple):
    """A box of a parameter: for each dim, a range of indices.

    Args:
        values: the elements of the box; may be empty. Writing to it changes the parameter.
        start: for each dim, the index in the parameter of the first element.
        shape: of the whole parameter.
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
