"""The small layers that every block is made of: RMSNorm, Linear, the SwiGLU MLP and rotary positions.

Weights may have more precision than the activations, as fp32 master weights do. The activations' dtype
decides the dtype of the computation and of the output. The layers therefore cast their weights. The cast does
nothing if ``cast_weights`` or FSDP2 has cast them already; a model that is called directly needs it.

N tokens, d hidden size, D head dim, R rotated dims of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """Divides by the root mean square over the last dimension (arXiv:1910.07467), then applies a weight.

    The division happens in fp32 or wider. Its result is cast back to the input's dtype before the weight
    applies.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(at_least_fp32(x))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * (wide * scale).to(x.dtype)


class ZeroCentredRMSNorm(RMSNorm):
    """RMSNorm that multiplies by 1 + weight, in fp32 or wider, before it casts to the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(at_least_fp32(x))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)


class Linear(nn.Linear):
    """x @ weight.T without a bias, computed in x's dtype."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__(size_in, size_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        # A quantized weight stays as it is. Its product saves no dequantized copy for the backward pass.
        return F.linear(x, self.weight if self.weight.dtype == x.dtype else self.weight.to(x.dtype))


class MLP(nn.Module):
    """SwiGLU feed-forward layer (arXiv:2002.05202), from [N, d] to [N, d]."""

    def __init__(self, hidden_size: int, intermediate_size: int) -> None:
        super().__init__()
        self.gate_proj = Linear(hidden_size, intermediate_size)
        self.up_proj = Linear(hidden_size, intermediate_size)
        self.down_proj = Linear(intermediate_size, hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (RoFormer, arXiv:2104.09864) of N tokens, in the half-split layout of NeoX and Qwen.

    Positions are counted along each token's path.

    It rotates the first R dims of a head and passes the others through. cos and sin stay in fp32 under FSDP2,
    because ``parallelize`` sets ``cast_forward_inputs=False``.
    """

    cos: Tensor  # [N, 1, R / 2] fp32
    sin: Tensor  # [N, 1, R / 2] fp32

    @staticmethod
    def at(
        positions: Tensor,
        rotary_dim: int,
        theta: float,
        scale: Callable[[Tensor], Tensor] | None = None,
        sections: Sequence[int] = (),
    ) -> Rope:
        """Returns the embedding for the angles ``position * theta ** (-2i / R)``.

        Args:
            positions: [N] integers, the depth of each token in its path. Or [3, N], its positions in time,
                height and width (interleaved mRoPE of Qwen3-VL).
            rotary_dim: R, even.
            theta: base of the frequencies.
            scale: changes the frequencies [R / 2].
            sections: how many of the R / 2 angles belong to time, height and width. Those of height have
                numbers 1, 4, 7, ..., those of width 2, 5, 8, ...; all others belong to time.
        """
        exponent = torch.arange(0, rotary_dim, 2, device=positions.device).float() / rotary_dim
        frequencies = 1.0 / theta**exponent
        if scale is not None:
            frequencies = scale(frequencies)
        if positions.ndim == 1:
            angle = positions[:, None, None].float() * frequencies
        else:
            axis = torch.zeros(rotary_dim // 2, dtype=torch.int64, device=positions.device)
            for i in (1, 2):
                axis[i : 3 * sections[i] : 3] = i
            angle = positions[axis].T.contiguous()[:, None].float() * frequencies
        return Rope(angle.cos(), angle.sin())

    def rotate(self, x: Tensor) -> Tensor:
        """Returns x [N, heads, D] rotated, in x's dtype. The rotation is computed in fp32 or wider."""
        size = self.cos.shape[-1]
        low, high = x[..., : 2 * size].to(at_least_fp32(x)).split(size, dim=-1)
        rotated = torch.cat([low * self.cos - high * self.sin, high * self.cos + low * self.sin], dim=-1)
        if 2 * size == x.shape[-1]:
            return rotated.to(x.dtype)
        return torch.cat([rotated.to(x.dtype), x[..., 2 * size :]], dim=-1)


def at_least_fp32(x: Tensor) -> torch.dtype:
    """Returns the dtype of x, or fp32 if x has less precision."""
    return torch.promote_types(x.dtype, torch.float32)
