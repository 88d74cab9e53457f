"""The small layers that every block is made of: RMSNorm, Linear and the SwiGLU MLP.

Weights may have more precision than the activations, as fp32 master weights do. The activations' dtype
decides the dtype of the computation and of the output.

N tokens, d hidden size.
"""

from __future__ import annotations

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


def at_least_fp32(x: Tensor) -> torch.dtype:
    """Returns the dtype of x, or fp32 if x has less precision."""
    return torch.promote_types(x.dtype, torch.float32)
