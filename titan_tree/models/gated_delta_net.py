"""GatedDeltaNet: linear attention with a state that passes from token to token along each path.

N tokens, d hidden size, H key heads, G value heads, K and V dims of a key and a value head, W width of the
convolution, S exported states.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_tree.components.recurrence import TreeRecurrence, tree_causal_conv1d
from titan_tree.config.checks import positive_int, setting
from titan_tree.errors import UserError
from titan_tree.models.block import HeadExchange, Mixer
from titan_tree.models.decoder_config import DecoderConfig
from titan_tree.models.layers import Linear, RMSNorm, Rope, at_least_fp32
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.partition import PAD


@dataclass(frozen=True, kw_only=True)
class GatedDeltaNetConfig(DecoderConfig):
    """Sizes of a decoder with Gated DeltaNet layers, by Hugging Face's names."""

    hf_optional = (*DecoderConfig.hf_optional, "linear_conv_kernel_dim")

    linear_num_key_heads: int = setting(16, positive_int)
    linear_num_value_heads: int = setting(32, positive_int)
    linear_key_head_dim: int = setting(128, positive_int)
    linear_value_head_dim: int = setting(128, positive_int)
    linear_conv_kernel_dim: int = setting(4, positive_int)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise UserError(
                f"linear_num_key_heads: expected a divisor of linear_num_value_heads "
                f"({self.linear_num_value_heads}), got {self.linear_num_key_heads}"
            )

    @property
    def key_dim(self) -> int:
        """Size of one token's keys in all heads, H K, which is also that of its queries."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        """Size of one token's values in all heads, G V."""
        return self.linear_num_value_heads * self.linear_value_head_dim


class Conv(nn.Module):
    """The weight [C, 1, W] of a depthwise convolution over C channels."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))


class GatedDeltaNet(Mixer):
    """Gated DeltaNet (arXiv:2412.06464) after a short causal convolution.

    It exports states [S, G, K, V] and the convolution's last inputs [S, W - 1, 2 H K + G V].

    Args:
        config: sizes of the model.
        gdn: the kernels, shared by all layers.
    """

    cache_streams = ("states", "states")
    copied_heads = ("linear_num_key_heads",)

    def __init__(self, config: GatedDeltaNetConfig, gdn: TreeRecurrence) -> None:
        super().__init__()
        d, heads = config.hidden_size, config.linear_num_value_heads
        self.config, self.gdn = config, gdn
        self.num_heads = {
            "linear_num_value_heads": config.linear_num_value_heads,
            "linear_num_key_heads": config.linear_num_key_heads,
        }
        self.in_proj_qkv = Linear(d, 2 * config.key_dim + config.value_dim)
        self.in_proj_z = Linear(d, config.value_dim)
        self.in_proj_b = Linear(d, heads)
        self.in_proj_a = Linear(d, heads)
        self.conv1d = Conv(2 * config.key_dim + config.value_dim, config.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = RMSNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.out_proj = Linear(config.value_dim, d)

    def forward(
        self, x: Tensor, rope: Rope, layout: TreeLayout, gateway: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        c, wide = self.config, at_least_fp32(x)
        states, tails = gateway or (None, None)
        qkv, z = self.in_proj_qkv(x), self.in_proj_z(x).unflatten(-1, (-1, c.linear_value_head_dim))
        b, a = self.in_proj_b(x), self.in_proj_a(x)
        num_key_heads = c.linear_num_key_heads
        conv, A_log, dt_bias = self.conv1d.weight[:, 0], self.A_log.to(wide), self.dt_bias.to(wide)
        if self.exchange is not None:
            sent = [*self._by_head(qkv, num_key_heads), torch.stack([b, a], -1)]
            *by_head, gates = self.exchange.to_heads(sent, layout.key_index.shape[0])
            qkv, (b, a) = torch.cat([part.flatten(1) for part in by_head], -1), gates.unbind(-1)
            num_key_heads = self.exchange.num_local_heads(num_key_heads)
            heads_here = self.exchange.local_heads(c.linear_num_value_heads)
            conv, A_log, dt_bias = self._local_conv(self.exchange), A_log[heads_here], dt_bias[heads_here]
        qkv, new_tails = tree_causal_conv1d(qkv, conv, layout, tails, layout.conv_index)
        q, k, v = self._by_head(qkv, num_key_heads)
        g = -A_log.exp() * F.softplus(a.to(wide) + dt_bias)
        out, new_states = self.gdn(q, k, v, g, torch.sigmoid(b), layout, states)
        if self.exchange is not None:
            out = self.exchange.to_tokens(out, x.shape[0])
        gated = (self.norm(out) * F.silu(z.to(wide))).to(x.dtype)
        out = self.out_proj(gated.flatten(-2))
        if new_states is None or new_tails is None:
            return out, ()
        return out, (new_states, new_tails)

    def _local_conv(self, exchange: HeadExchange) -> Tensor:
        """Returns the rows of the convolution's weight that belong to this rank's heads."""
        weight = self.conv1d.weight[:, 0].T
        by_head = self._by_head(weight, self.config.linear_num_key_heads)  # [W, heads, K or V] each
        return torch.cat([part[:, exchange.local_heads(part.shape[1])].flatten(1) for part in by_head], 1).T

    def _by_head(self, channels: Tensor, num_key_heads: int) -> list[Tensor]:
        """Splits the channels of queries, keys and values, [..., 2 H K + G V], into [..., heads, K or V]."""
        K, V = self.config.linear_key_head_dim, self.config.linear_value_head_dim
        sizes = [num_key_heads * K, num_key_heads * K, channels.shape[-1] - 2 * num_key_heads * K]
        parts = zip(channels.split(sizes, dim=-1), (K, K, V), strict=True)
        return [part.unflatten(-1, (-1, size)) for part, size in parts]

    def empty_rows(self, x: Tensor) -> tuple[Tensor, ...]:
        c = self.config
        H, G = c.linear_num_key_heads, c.linear_num_value_heads
        if self.exchange is not None:
            H, G = map(self.exchange.num_local_heads, (H, G))
        K, V = c.linear_key_head_dim, c.linear_value_head_dim
        state, tail = (G, K, V), (c.linear_conv_kernel_dim - 1, 2 * H * K + G * V)
        return x.new_zeros(PAD, *state, dtype=at_least_fp32(x)), x.new_zeros(PAD, *tail)

    def flops(self, num_tokens: int, num_visible_pairs: int) -> int:
        """Returns 18 K V per token and value head.

        A key and a query read the state, and one update writes it. Each runs once in the forward pass and
        twice in the backward pass.
        """
        return 18 * num_tokens * self.config.value_dim * self.config.linear_key_head_dim
