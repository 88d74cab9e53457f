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
from titan_tree.components.tree_gdn import TreeGDN
from titan_tree.errors import UserError
from titan_tree.models.block import LayerOutput
from titan_tree.models.layers import at_least_fp32
from titan_tree.models.transformers.attention_function import (
    KEYWORD,
    Call,
    PartitionCache,
    Probe,
    ProbedError,
    ProbedKeys,
    TreeInputs,
)
from titan_tree.models.transformers.recurrent import on_trees, recurrent_mixer, row_shapes
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.partition import PAD

CACHE = "past_key_values"  # the argument of transformers' layers


class TransformersBlock(nn.Module):
    """A layer of transformers.

    Args:
        layer: the layer. If it is recurrent, it can then run on trees only.
        attention, gdn: the kernels, shared by all layers.
    """

    def __init__(self, layer: nn.Module, attention: TreeAttention, gdn: TreeGDN) -> None:
        super().__init__()
        self.layer, self.attention, self.gdn = layer, attention, gdn
        if (mixer := recurrent_mixer(layer)) is not None:
            on_trees(mixer)

    def forward(
        self,
        hidden: Tensor,
        positional: Sequence[object],
        named: Mapping[str, object],
        layout: TreeLayout,
        rows: Sequence[Tensor],
    ) -> LayerOutput:
        """Runs the layer.

        Args:
            hidden: [1, N, d].
            positional, named: the other arguments that transformers gives the layer.
            layout: the tokens' layout, with the plan of TreeAttention.
            rows: what the layer exported in earlier partitions; () outside of partitions.
        Returns:
            Hidden states [1, N, d], and in a partition two exported tensors.
        """
        cache = PartitionCache(rows, layout) if rows else None
        tree = {KEYWORD: TreeInputs(self.attention, layout, self.gdn), CACHE: cache}
        hidden = self.layer(hidden, *positional, **{**named, **tree})
        return LayerOutput(hidden, () if cache is None else cache.exports)


@dataclass
class LayerPass:
    """One pass over all layers: what their blocks read and export.

    Args:
        layout: the batch's layout.
        rows: two tensors for each layer; () outside of partitions.
    """

    layout: TreeLayout
    rows: Sequence[Tensor]
    exports: list[Tensor] = field(default_factory=list)

    def run(
        self,
        index: int,
        block: nn.Module,
        hidden: Tensor,
        positional: Sequence[object],
        named: Mapping[str, object],
    ) -> Tensor:
        """Runs the block of the layer ``index`` and returns its hidden states."""
        out = block(hidden, positional, named, self.layout, tuple(self.rows[2 * index : 2 * index + 2]))
        self.exports += out.exports
        return out.hidden


class LayerSizes(NamedTuple):
    """Sizes of a layer, found by ``Survey``."""

    call: Call | None  # of the attention function; None: the layer is recurrent
    rows: Sequence[tuple[int, ...]]  # the two shapes of what a partition exports after a token

    @property
    def stream(self) -> str:
        """The stream of the gateway cache that stores the rows."""
        return "keys" if self.call else "states"

    def empty_rows(self, x: Tensor) -> list[Tensor]:
        """Returns PAD zero rows of either shape. States are fp32 or wider, the others have the dtype of x."""
        first = x.dtype if self.call else at_least_fp32(x)
        return [
            x.new_zeros(PAD, *row, dtype=dtype)
            for row, dtype in zip(self.rows, (first, x.dtype), strict=True)
        ]


@dataclass
class Survey:
    """A pass that runs layers only up to their attention, and records sizes. It also runs on "meta".

    Raises:
        UserError: a layer does not call the attention function, or has no cache for keys.
    """

    sizes: list[LayerSizes] = field(default_factory=list)

    def run(
        self,
        index: int,
        block: nn.Module,
        hidden: Tensor,
        positional: Sequence[object],
        named: Mapping[str, object],
    ) -> Tensor:
        """Records the sizes of the layer ``index`` and returns ``hidden``."""
        layer = block.get_submodule("layer")
        if (mixer := recurrent_mixer(layer)) is not None:
            self.sizes.append(LayerSizes(None, row_shapes(mixer)))
            return hidden
        probe, keys = Probe(), ProbedKeys()
        with suppress(ProbedError):
            layer(hidden, *positional, **{**named, KEYWORD: probe, CACHE: keys})
        self.add(index, probe, keys)
        return hidden

    def add(self, index: int, probe: Probe, keys: ProbedKeys) -> None:
        """Records the sizes of the layer ``index``, which has attention."""
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

    def __call__(self, hidden: Tensor, *positional: object, **named: Any) -> Tensor:
        current = named.pop(KEYWORD)
        return current.run(self._index, self._blocks[self._index], hidden, positional, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying asks for some of them before there is a layer
            raise AttributeError(name)
        return getattr(self._layer, name)
