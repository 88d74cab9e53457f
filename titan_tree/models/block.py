"""What the layers of our models are made of.

Activations are [N, d], one row per distinct token of a packed forest, with no batch dimension and no padding;
rotary angles follow a token's depth in its path; a layer mixes a token with its ancestors only.

N tokens, d hidden size, D head dim, R of its dims rotated.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_tree.components.moe import MoE, Routing
from titan_tree.models.decoder_config import DecoderConfig
from titan_tree.tree.layout import TreeLayout


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (RoFormer, arXiv:2104.09864) of N tokens, in the half-split layout of NeoX and Qwen.

    Of a head's dims the first R are rotated. Not a tuple: FSDP2's mixed precision would cast the tensors of a
    tuple to bf16.
    """

    cos: Tensor  # [N, 1, R / 2] fp32
    sin: Tensor  # [N, 1, R / 2] fp32

    @staticmethod
    def at(positions: Tensor, rotary_dim: int, theta: float) -> Rope:
        """The angles ``position * theta ** (-2i / R)`` for positions [N]."""
        exponent = torch.arange(0, rotary_dim, 2, device=positions.device).float() / rotary_dim
        angle = positions[:, None, None].float() * (1.0 / theta**exponent)
        return Rope(angle.cos(), angle.sin())

    def rotate(self, x: Tensor) -> Tensor:
        """x [N, heads, D] rotated, computed in fp32 at least, in x's dtype."""
        size = self.cos.shape[-1]
        low, high = x[..., : 2 * size].to(at_least_fp32(x)).split(size, dim=-1)
        rotated = torch.cat([low * self.cos - high * self.sin, high * self.cos + low * self.sin], dim=-1)
        if 2 * size == x.shape[-1]:
            return rotated.to(x.dtype)
        return torch.cat([rotated.to(x.dtype), x[..., 2 * size :]], dim=-1)


class RMSNorm(nn.Module):
    """x / rms(x) over the last dimension in fp32 at least, cast back to x's dtype, then times the weight.

    Of this and of ``Linear`` the weights may be wider than x, as master weights are; x's dtype counts.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(at_least_fp32(x))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * (wide * scale).to(x.dtype)


class Linear(nn.Linear):
    """x @ weight.T in x's dtype."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__(size_in, size_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class MLP(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202)."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Mixer(nn.Module, ABC):
    """What mixes a token with its ancestors: attention, or a recurrence."""

    # What it leaves for later forwards, tensor by tensor: the stack of the bank (data/partition.py,
    # GatewayRows) that has its rows.
    cache_streams: ClassVar[tuple[str, ...]]
    # Names of its linears that must not run in float8.
    high_precision: ClassVar[tuple[str, ...]] = ()

    @abstractmethod
    def forward(
        self, x: Tensor, rope: Rope, layout: TreeLayout, gateway: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """[N, d], and of a partition its exports, a tensor for each of ``cache_streams``.

        gateway: of a partition what earlier forwards exported, likewise; () where nothing is cut.
        """

    @abstractmethod
    def empty_rows(self, x: Tensor) -> tuple[Tensor, ...]:
        """PAD empty rows for each of ``cache_streams``; activations like x, whose device is that of all."""

    @abstractmethod
    def flops(self, num_tokens: int, num_pairs: int) -> int:
        """Operations, forward and backward, besides those of matrices; ``num_pairs`` of a token and one that
        it sees."""


class Block(nn.Module):
    """Pre-norm decoder layer: the unit of FSDP, activation checkpointing and compilation.

    Args:
        name: of the mixer, which the published models call by what it is.
    """

    def __init__(
        self, config: DecoderConfig, norm: type[RMSNorm], name: str, mixer: Mixer, mlp: MLP | MoE
    ) -> None:
        super().__init__()
        self.input_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.mixer_name = name
        self.add_module(name, mixer)
        self.post_attention_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    @property
    def mixer(self) -> Mixer:
        return cast(Mixer, getattr(self, self.mixer_name))

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        layout: TreeLayout,
        gateway: tuple[Tensor, ...] = (),
        forced_experts: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...], tuple[Routing, Tensor] | None]:
        """x [N, d] of the next layer, exports (see ``Mixer.forward``), and the sums and experts of a MoE.

        forced_experts: see ``MoE.forward``.
        """
        mixed, exports = self.mixer(self.input_layernorm(x), rope, layout, gateway)
        x = x + mixed
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MLP):
            return x + self.mlp(normed), exports, None
        assert layout.num_paths is not None
        out, routing, experts = self.mlp(normed, layout.num_paths, forced_experts)
        return x + out, exports, (routing, experts)


def at_least_fp32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
