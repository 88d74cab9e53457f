"""TransformersBlock: one layer of a model of transformers, as a function of its inputs.

FSDP2, activation checkpointing and torch.compile apply to a block. They need everything that a layer reads
and writes to be among its arguments and results. In transformers, keys of a partition would pass through a
cache object instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn

from titan_tree.components.tree_attention import TreeAttention
from titan_tree.errors import UserError
from titan_tree.models.transformers.attention import (
    KEYWORD,
    Call,
    PartitionKeys,
    Probe,
    ProbedError,
    ProbedKeys,
    TreeInputs,
)
from titan_tree.tree.layout import TreeLayout

CACHE = "past_key_values"  # the argument of transformers' layers


class BlockOutput(NamedTuple):
    """The result of a block: a tuple, because FSDP2 attaches its backward hooks to tensors in tuples."""

    hidden: Tensor  # [1, N, d]
    exports: tuple[Tensor, ...]  # in a partition, two tensors [X, heads, size]; otherwise ()


class TransformersBlock(nn.Module):
    """A layer of transformers.

    Args:
        layer: the layer.
        attention: the kernels, shared by all layers.
    """

    def __init__(self, layer: nn.Module, attention: TreeAttention) -> None:
        super().__init__()
        self.layer, self.attention = layer, attention

    def forward(
        self,
        hidden: Tensor,
        positional: Sequence[Any],
        named: Mapping[str, Any],
        layout: TreeLayout,
        rows: Sequence[Tensor],
    ) -> BlockOutput:
        """Runs the layer.

        Args:
            hidden: [1, N, d].
            positional, named: the other arguments that transformers gives the layer.
            layout: of the tokens, with the plan of TreeAttention.
            rows: in a partition, what the layer exported in earlier ones; otherwise ().
        """
        keys = PartitionKeys(rows, layout) if rows else None
        tree = {KEYWORD: TreeInputs(self.attention, layout), CACHE: keys}
        hidden = self.layer(hidden, *positional, **{**named, **tree})
        return BlockOutput(hidden, () if keys is None else keys.exports)


@dataclass
class Pass:
    """One pass over all layers: what their blocks read and export.

    Args:
        layout: of the batch.
        rows: in a partition, two tensors for each layer; otherwise ().
    """

    layout: TreeLayout
    rows: Sequence[Tensor]
    exports: list[Tensor] = field(default_factory=list)

    def run(self, index: int, block: nn.Module, hidden: Tensor, positional: Any, named: Any) -> Tensor:
        """Runs the block of the layer ``index`` and returns its hidden states."""
        out = block(hidden, positional, named, self.layout, tuple(self.rows[2 * index : 2 * index + 2]))
        self.exports += out.exports
        return out.hidden


class LayerSizes(NamedTuple):
    """Sizes of a layer's attention, found by ``Survey``."""

    call: Call
    rows: list[tuple[int, int]]  # (heads, size) of what a partition exports of a token, twice


@dataclass
class Survey:
    """A pass that runs every layer only up to its attention, and records sizes. It also runs on "meta".

    Raises:
        UserError: a layer does not call the attention function, or has no cache for keys.
    """

    sizes: list[LayerSizes] = field(default_factory=list)

    def run(self, index: int, block: nn.Module, hidden: Tensor, positional: Any, named: Any) -> Tensor:
        """Records the sizes of the layer ``index`` and returns ``hidden``."""
        probe, keys = Probe(), ProbedKeys()
        with suppress(ProbedError):
            block.get_submodule("layer")(hidden, *positional, **{**named, KEYWORD: probe, CACHE: keys})
        self.add(index, probe, keys)
        return hidden

    def add(self, index: int, probe: Probe, keys: ProbedKeys) -> None:
        """Records the sizes of the layer ``index``."""
        if probe.call is None or len(keys.shapes) != 2:
            raise UserError(
                f"model: layer {index} does not get its keys and values as attention of transformers does, "
                "so it cannot run on trees"
            )
        self.sizes.append(LayerSizes(probe.call, keys.shapes))


class LayerCalls:
    """Takes the place of a transformers model's list of layers, and runs their blocks.

    Args:
        blocks: one per layer. Checkpointing may replace its entries later.
    """

    def __init__(self, blocks: nn.ModuleList) -> None:
        self._calls = [_LayerCall(blocks, i, block.get_submodule("layer")) for i, block in enumerate(blocks)]

    def __iter__(self) -> Iterator[_LayerCall]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def __getitem__(self, index: Any) -> Any:
        return self._calls[index]


class _LayerCall:
    """Called like a layer of transformers. Has the attributes of the layer."""

    def __init__(self, blocks: nn.ModuleList, index: int, layer: nn.Module) -> None:
        self._blocks, self._index, self._layer = blocks, index, layer

    def __call__(self, hidden: Tensor, *positional: Any, **named: Any) -> Tensor:
        current = named.pop(KEYWORD)
        return current.run(self._index, self._blocks[self._index], hidden, positional, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying asks for some of them before there is a layer
            raise AttributeError(name)
        return getattr(self._layer, name)
