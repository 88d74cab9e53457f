"""TransformersBlock: one layer of a model of transformers, as a function of its inputs.

FSDP2, activation checkpointing and torch.compile apply to a block. They need everything that a layer reads
and writes to be among its arguments and results. In transformers, keys of a partition would pass through a
cache object instead.

Recurrent layers (Gated DeltaNet of Qwen3.5 and Qwen3-Next) mix tokens in two functions of their own, which
know sequences only. ``on_trees`` therefore gives them another forward pass. It uses the layer's projections,
weights and norm, and computes the convolution and the gated delta rule along each path.

N tokens, H key heads, G value heads, K and V dims of a key and a value head, W width of the convolution.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_tree.components.recurrence import TreeGDN, tree_causal_conv1d
from titan_tree.components.tree_attention import TreeAttention
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
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.partition import PAD

CACHE = "past_key_values"  # the argument of transformers' layers


class TransformersBlock(nn.Module):
    """A layer of transformers. It runs the layer's code without the hooks and the checkpointing around it.

    Args:
        layer: the layer, before it is sharded. Without a tree, it runs as before.
        attention, gdn: the kernels, shared by all layers.
    """

    def __init__(self, layer: nn.Module, attention: TreeAttention, gdn: TreeGDN) -> None:
        super().__init__()
        self.layer, self.attention, self.gdn = layer, attention, gdn
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
            Hidden states [1, N, d], and in a partition two exported tensors.
        """
        cache = PartitionCache(rows, layout) if rows else None
        hidden = self.call(hidden, positional, named, TreeInputs(self.attention, layout, self.gdn), cache)
        return LayerOutput(hidden, () if cache is None else cache.exports)

    def call(
        self,
        hidden: Tensor,
        positional: Sequence[object],
        named: Mapping[str, object],
        tree: TreeInputs | Probe,
        cache: PartitionCache | ProbedKeys | None,
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
        rows: two tensors for each layer; () outside of partitions.
    """

    def __init__(self, layout: TreeLayout, rows: Sequence[Tensor]) -> None:
        self.layout, self.rows = layout, rows
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
        rows = tuple(self.rows[2 * index : 2 * index + 2])
        out = LayerOutput(*block(hidden, positional, named, self.layout, rows))
        if len(self.exports) == 2 * index:  # layers may be recomputed in the backward pass
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
        block: TransformersBlock,
        hidden: Tensor,
        positional: Sequence[object],
        named: Mapping[str, object],
    ) -> Tensor:
        """Records the sizes of the layer ``index`` and returns ``hidden``."""
        if (mixer := recurrent_mixer(block.layer)) is not None:
            self.sizes.append(LayerSizes(None, row_shapes(mixer)))
            return hidden
        probe, keys = Probe(), ProbedKeys()
        with suppress(ProbedError):
            block.call(hidden, positional, named, probe, keys)
        if probe.call is None or len(keys.shapes) != 2:
            raise UserError(
                f"model: layer {index} does not get its keys and values as attention of transformers does, "
                "so it cannot run on trees"
            )
        self.sizes.append(LayerSizes(probe.call, keys.shapes))
        return hidden


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

    def __getitem__(self, index: int) -> _LayerCall:
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


RECURRENT_CACHE = "cache_params"  # the argument of the mixer


def recurrent_mixer(layer: nn.Module) -> Any:
    """Returns the Gated DeltaNet of a layer of transformers, or None if the layer has attention."""
    return getattr(layer, "linear_attn", None)


def on_trees(mixer: Any) -> None:
    """Makes the Gated DeltaNet of a layer follow the paths of trees, in place. It keeps its parameters.

    Calls without a tree, such as those of ``generate``, run its own forward pass.
    """
    mixer.forward = MethodType(_run_recurrent, mixer)


def row_shapes(mixer: Any) -> list[tuple[int, ...]]:
    """Returns the shapes of what a partition exports after a token: a state, and the convolution's inputs."""
    channels, _, width = mixer.conv1d.weight.shape
    return [(mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim), (width - 1, channels)]


def _run_recurrent(
    mixer: Any,
    hidden_states: Tensor,
    cache_params: PartitionCache | None = None,
    *args: Any,
    tree: TreeInputs | None = None,
    **kwargs: Any,
) -> Tensor:
    """Runs the mixer on [1, N, d], called as transformers calls it. Returns [1, N, d]."""
    if tree is None:
        out: Tensor = type(mixer).forward(mixer, hidden_states, cache_params, *args, **kwargs)
        return out
    layout, wide = tree.layout, at_least_fp32(hidden_states)
    assert tree.gdn is not None
    qkv, z, b, a = _project(mixer, hidden_states)
    states, tails = (None, None) if cache_params is None else cache_params.rows
    weight = mixer.conv1d.weight[:, 0].to(qkv.dtype)  # they differ under autocast
    qkv, new_tails = tree_causal_conv1d(qkv, weight, layout, tails, layout.conv_index)
    sizes = mixer.key_dim, mixer.key_dim, mixer.value_dim
    dims = mixer.head_k_dim, mixer.head_k_dim, mixer.head_v_dim
    q, k, v = (x.unflatten(-1, (-1, dim)) for x, dim in zip(qkv.split(sizes, -1), dims, strict=True))
    g = -mixer.A_log.to(wide).exp() * F.softplus(a.to(wide) + mixer.dt_bias.to(wide))
    out, new_states = tree.gdn(q, k, v, g, b.sigmoid(), layout, states)
    if cache_params is not None:
        assert new_states is not None
        assert new_tails is not None
        cache_params.exports = new_states, new_tails
    gated = mixer.norm(out.flatten(0, 1), z.reshape(-1, mixer.head_v_dim))
    projected: Tensor = mixer.out_proj(gated.view(1, -1, mixer.value_dim))
    return projected


def _project(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns queries, keys and values [N, 2 H K + G V], output gates [N, G V or G, V], b and a [N, G]."""
    if not hasattr(mixer, "in_proj_qkvz"):
        qkv, z, b, a = (getattr(mixer, f"in_proj_{name}")(x)[0] for name in ("qkv", "z", "b", "a"))
        return qkv, z, b, a
    # Qwen3-Next packs its projections, one key head after another.
    parts = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(x), mixer.in_proj_ba(x))
    q, k, v, z, b, a = (part[0] for part in parts)
    return torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], -1), z, b, a
