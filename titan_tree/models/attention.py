"""Attention: grouped-query attention over the ancestors of each token, with options for the model families.

N tokens, d hidden size, H query heads, K key-value heads, D head dim, X exported tokens. With sequence
parallelism, a rank projects n of the N tokens and computes attention for some of the heads.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from titan_tree.components.tree_attention import TreeAttention
from titan_tree.models.block import Mixer
from titan_tree.models.decoder_config import DecoderConfig
from titan_tree.models.layers import Linear, RMSNorm, Rope
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.partition import PAD


class Attention(Mixer):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions.

    It exports keys and values, [X, 2, K, D].

    Args:
        config: sizes of the model.
        attention: the kernels, shared by all layers.
        qk_norm: class of a norm on each head's queries and keys; None: no such norm.
        output_gate: multiply each head's output by a sigmoid gate. ``q_proj`` then holds, for each head, the
            rows of its query and then the rows of its gate.
    """

    cache_streams = ("keys",)
    copied_heads = ("num_key_value_heads",)

    def __init__(
        self,
        config: DecoderConfig,
        attention: TreeAttention,
        *,
        qk_norm: type[RMSNorm] | None = None,
        output_gate: bool = False,
    ) -> None:
        super().__init__()
        d, D = config.hidden_size, config.head_dim
        self.config, self.attention, self.output_gate = config, attention, output_gate
        self.num_heads = {name: getattr(config, name) for name in ("num_attention_heads", *self.copied_heads)}
        self.q_proj = Linear(d, config.num_attention_heads * D * (1 + output_gate))
        self.k_proj = Linear(d, config.num_key_value_heads * D)
        self.v_proj = Linear(d, config.num_key_value_heads * D)
        self.o_proj = Linear(config.num_attention_heads * D, d)
        norms = [nn.Identity() if qk_norm is None else qk_norm(D, config.rms_norm_eps) for _ in range(2)]
        self.q_norm, self.k_norm = norms

    def forward(
        self, x: Tensor, rope: Rope, layout: TreeLayout, gateway: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        D = self.config.head_dim
        q, gate = self.q_proj(x), None
        if self.output_gate:
            q, gate = q.unflatten(-1, (-1, 2 * D)).chunk(2, dim=-1)
        else:
            q = q.unflatten(-1, (-1, D))
        k, v = (proj(x).unflatten(-1, (-1, D)) for proj in (self.k_proj, self.v_proj))
        q, k = rope.rotate(self.q_norm(q)), rope.rotate(self.k_norm(k))
        if self.exchange is not None:
            q, k, v = self.exchange.to_heads([q, k, v], layout.key_index.shape[0])
        exports: tuple[Tensor, ...] = ()
        if layout.exports is not None:
            exports = (torch.stack([part.index_select(0, layout.exports) for part in (k, v)], dim=1),)
        (context,) = gateway or (None,)
        out = self.attention(q, k, v, layout, context)
        if self.exchange is not None:
            out = self.exchange.to_tokens(out, x.shape[0])
        if gate is not None:
            out = out * torch.sigmoid(gate)
        return self.o_proj(out.flatten(-2)), exports

    def empty_rows(self, x: Tensor) -> tuple[Tensor, ...]:
        num_heads = self.config.num_key_value_heads
        if self.exchange is not None:
            num_heads = self.exchange.num_local_heads(num_heads)
        return (x.new_zeros(PAD, 2, num_heads, self.config.head_dim),)

    def flops(self, num_tokens: int, num_visible_pairs: int) -> int:
        """Returns 12 H D per pair: scores and values, once forward and twice backward."""
        return 12 * self.config.num_attention_heads * self.config.head_dim * num_visible_pairs
