"""The attention function that layers of transformers call, and their cache object.

N tokens of a batch, M keys, H query heads, K key-value heads, D head dim.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from titan_tree.components.tree_attention import Scoring, TreeAttention
from titan_tree.tree.layout import TreeLayout

# The attention function's name in transformers' registry, by the implementation that it calls without a tree.
NAMES = {"sdpa": "titan_tree", "eager": "titan_tree_eager"}
NAME = NAMES["sdpa"]
KEYWORD = "tree"  # of the argument that layers pass on to it


@dataclass
class TreeInputs:
    """What a layer needs of the tree.

    Args:
        attention, recurrence: the kernels. Only recurrent layers need the latter.
        layout: the tokens' layout, as ``TreeModel.prepare`` returns it.
    """

    attention: TreeAttention
    layout: TreeLayout
    recurrence: nn.Module | None = None

    @classmethod
    def prepare(
        cls, attention: TreeAttention, layout: TreeLayout, windows: Sequence[int | None] = (None,)
    ) -> TreeInputs:
        """Returns the inputs for the layout of a batch that is not a partition.

        Args:
            windows: the sliding windows of the model's layers; None: a layer without one.
        """
        return cls(attention, attention.prepare(layout, windows))

    def arguments(self) -> dict[str, object]:
        """Returns the arguments that a model of transformers needs beside the tokens [1, N] of a batch."""
        return arguments(self.layout.positions, self)


def arguments(positions: Tensor, tree: object) -> dict[str, object]:
    """Returns the arguments of a model of transformers, beside its tokens [1, N].

    Args:
        positions: [N], or [3, N] with images.
        tree: what each layer gets as the argument ``KEYWORD``.
    """
    return {
        "position_ids": positions[..., None, :].long(),
        # transformers passes a mask of four dimensions on as it is. Without one, it would make one.
        "attention_mask": torch.ones(1, 1, 1, 1, dtype=torch.bool, device=positions.device),
        "use_cache": False,
        KEYWORD: tree,
    }


class Call(NamedTuple):
    """The sizes of a call of the attention function."""

    num_heads: int
    head_dims: tuple[int, int]  # of queries and keys, and of values
    scoring: Scoring


@dataclass
class Probe:
    """Records a layer's first call of the attention function, which then ends the layer.

    It also takes the place of transformers' cache, and records the shapes of a token's rows.
    """

    call: Call | None = None
    shapes: list[tuple[int, int]] = field(default_factory=list)  # (heads, size)

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        self.shapes = [(x.shape[1], x.shape[3]) for x in (keys, values)]
        return keys, values

    def get_seq_length(self, *_: object) -> int:
        return 0


class ProbedError(Exception):
    """Ends a probed layer."""


def tree_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    tree: TreeInputs | Probe | None = None,
    without_tree: str = "sdpa",
    **others: object,
) -> tuple[Tensor, Tensor | None]:
    """Computes attention as transformers calls it.

    Args:
        query: [1, H, N, D].
        key: [1, K, M, D], in the order of the layout's keys; value likewise, with a head dim of its own.
        sliding_window, softcap, s_aux: see ``Scoring``; s_aux are the sinks.
        tree: None: the call does not come from a TransformersModel.
        without_tree: one of ``NAMES``: the implementation of transformers that computes such a call.
    Returns:
        ([1, N, H, Dv], None).
    """
    if tree is None:
        options = {"sliding_window": sliding_window, "softcap": softcap, "s_aux": s_aux, **others}
        if without_tree == "eager":  # a function of the model's own file
            plain = sys.modules[type(module).__module__].eager_attention_forward
        else:
            plain = ALL_ATTENTION_FUNCTIONS[without_tree]
        return plain(module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **options)
    scoring = Scoring(sliding_window, softcap, s_aux)
    if isinstance(tree, Probe):
        tree.call = Call(query.shape[1], (query.shape[-1], value.shape[-1]), scoring)
        raise ProbedError
    if torch.is_autocast_enabled(query.device.type):  # as torch's own attention does
        dtype = torch.get_autocast_dtype(query.device.type)
        query, key, value = (x.to(dtype) for x in (query, key, value))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return tree.attention(q, k, v, tree.layout, scale=scaling, scoring=scoring)[None], None


class PartitionCache:
    """Stands in for transformers' cache in one layer of a partition.

    A layer with attention gives ``update`` what its attention needs of each token: keys and values, or the
    latents that they are computed from (multi-head latent attention, arXiv:2405.04434). A recurrent layer
    reads ``rows`` and sets ``exports`` itself.

    Args:
        rows: what earlier partitions exported. Attention has two tensors [R, heads, size].
        layout: the partition's layout.
    Attributes:
        exports: the same of this partition's tokens, for later partitions.
    """

    def __init__(self, rows: Sequence[Tensor], layout: TreeLayout) -> None:
        self.rows, self.layout = rows, layout
        self.exports: tuple[Tensor, ...] = ()

    def update(self, keys: Tensor, values: Tensor, *_: object, **__: object) -> tuple[Tensor, Tensor]:
        """Returns keys and values of all M keys of the partition, from those of its own N tokens.

        Args:
            keys: [1, heads, N, size]; values likewise.
        """
        assert self.layout.exports is not None
        assert self.layout.key_source is not None
        # Under autocast, keys may have another dtype than the rows of earlier partitions.
        own_rows = [x[0].transpose(0, 1).to(self.rows[0].dtype) for x in (keys, values)]
        self.exports = tuple(x.index_select(0, self.layout.exports) for x in own_rows)
        joined = (
            torch.cat(pair).index_select(0, self.layout.key_source)
            for pair in zip(self.rows, own_rows, strict=True)
        )
        all_keys, all_values = (x.transpose(0, 1)[None] for x in joined)
        return all_keys, all_values

    def get_seq_length(self, *_: object) -> int:
        """Returns 0: positions are given explicitly."""
        return 0


for without_tree, name in NAMES.items():
    AttentionInterface.register(name, partial(tree_attention, without_tree=without_tree))
    AttentionMaskInterface.register(name, ALL_MASK_ATTENTION_FUNCTIONS[without_tree])
