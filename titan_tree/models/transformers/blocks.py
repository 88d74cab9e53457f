"""TransformersBlock: one layer of a model of transformers, as a function of its inputs.

FSDP2, activation checkpointing and torch.compile apply to a block. They need everything that a layer reads
and writes to be among its arguments and results. In transformers, keys of a partition would pass through a
cache object instead.

N tokens, d hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutputWithPast

from titan_tree.components.tree_attention import TreeAttention
from titan_tree.errors import UserError
from titan_tree.models.block import LayerOutput
from titan_tree.models.transformers.attention_function import (
    KEYWORD,
    Call,
    PartitionCache,
    Probe,
    ProbedError,
    TreeInputs,
)
from titan_tree.models.transformers.mixers import cached_rows, on_trees, recurrent_mixer
from titan_tree.models.tree_model import CachedRows
from titan_tree.tree.layout import TreeLayout

# The argument of transformers' layers and models, and the field of outputs; transformers 5.24 renamed it.
CACHE = "cache" if "cache" in BaseModelOutputWithPast.__annotations__ else "past_key_values"
TOKENWISE = {"mlp", "moe"}  # the types of layers that mix no tokens


class TransformersBlock(nn.Module):
    """A layer of transformers. It runs the layer's code without the hooks and the checkpointing around it.

    Args:
        layer: the layer, before it is sharded. Without a tree, it runs as before.
        attention, recurrence: the kernels, shared by all layers. Only recurrent layers need the latter.
    """

    def __init__(self, layer: nn.Module, attention: TreeAttention, recurrence: nn.Module | None) -> None:
        super().__init__()
        self.layer, self.attention, self.recurrence = layer, attention, recurrence
        self._layer_forward = inspect.unwrap(type(layer).forward)
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
            Hidden states [1, N, d], and in a partition the exported tensors.
        """
        cache = PartitionCache(rows, layout) if rows else None
        tree = TreeInputs(self.attention, layout, self.recurrence)
        hidden = self.call(hidden, positional, named, tree, cache)
        return LayerOutput(hidden, () if cache is None else cache.exports)

    def call(
        self,
        hidden: Tensor,
        positional: Sequence[object],
        named: Mapping[str, object],
        tree: TreeInputs | Probe,
        cache: PartitionCache | Probe | None,
    ) -> Tensor:
        """Runs the layer with these objects in place of transformers' own cache and mask."""
        out: Tensor = self._layer_forward(
            self.layer, hidden, *positional, **{**named, KEYWORD: tree, CACHE: cache}
        )
        return out


class LayerPass:
    """One pass over all layers: what their blocks read and export.

    It is no dataclass, because FSDP2 copies dataclasses among the arguments of a layer.

    Args:
        layout: the batch's layout.
        rows: the tensors of all layers; () outside of partitions.
        first: the index of the first of these tensors, for each layer, and their number.
    """

    added: Sequence[Tensor] = ()  # [N, d] each: what images add to the outputs of the first layers

    def __init__(self, layout: TreeLayout, rows: Sequence[Tensor], first: Sequence[int]) -> None:
        self.layout, self.rows, self.first = layout, rows, first
        self.exports: list[Tensor] = []

    def run(
        self,
        index: int,
        block: Callable[..., LayerOutput],
        hidden: Tensor,
        positional: Sequence[object],
        named: Mapping[str, object],
    ) -> Tensor:
        """Runs the block of the layer ``index`` and returns its hidden states."""
        rows = tuple(self.rows[self.first[index] : self.first[index + 1]])
        out = LayerOutput(*block(hidden, positional, named, self.layout, rows))
        if len(self.exports) == self.first[index]:  # layers may be recomputed in the backward pass
            self.exports += out.exports
        return out.hidden + self.added[index] if index < len(self.added) else out.hidden


class LayerSizes(NamedTuple):
    """Sizes of a layer, found by ``Survey``."""

    call: Call | None  # of the attention function; None: the layer has no attention
    rows: Sequence[CachedRows]  # what a partition exports after a token


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
        block: TransformersBlock,
        hidden: Tensor,
        positional: Sequence[object],
        named: Mapping[str, object],
    ) -> Tensor:
        """Records the sizes of the layer ``index`` and returns ``hidden``."""
        if (mixer := recurrent_mixer(block.layer)) is not None:
            self.sizes.append(LayerSizes(None, cached_rows(mixer)))
            return hidden
        if getattr(block.layer, "block_type", None) in TOKENWISE:
            self.sizes.append(LayerSizes(None, ()))
            return hidden
        probe = Probe()
        with suppress(ProbedError):
            block.call(hidden, positional, named, probe, probe)
        if probe.call is None or len(probe.shapes) != 2:
            raise UserError(
                f"model: layer {index} does not get its keys and values as attention of transformers does, "
                "so it cannot run on trees"
            )
        self.sizes.append(LayerSizes(probe.call, [CachedRows("keys", shape) for shape in probe.shapes]))
        return hidden


class LayerCall:
    """Takes the place of a layer of a transformers model, has its attributes, and runs its block.

    Args:
        blocks: one per layer. Checkpointing may replace its entries later.
        index: the number of the layer.
    """

    def __init__(self, blocks: nn.ModuleList, index: int) -> None:
        self._blocks, self._index, self._layer = blocks, index, blocks[index].get_submodule("layer")

    def __call__(self, hidden: Tensor, *positional: object, **named: Any) -> Tensor:
        current = named.pop(KEYWORD)
        return current.run(self._index, self._blocks[self._index], hidden, positional, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):  # copying asks for some of them before there is a layer
            raise AttributeError(name)
        return getattr(self._layer, name)
