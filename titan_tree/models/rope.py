"""Rope: the rotary position embedding, with positions counted along each token's path.

N tokens, D head dim, R rotated dims of a head.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_tree.models.layers import at_least_fp32


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (RoFormer, arXiv:2104.09864) of N tokens, in the half-split layout of NeoX and Qwen.

    It rotates the first R dims of a head and passes the others through. cos and sin stay in fp32 under FSDP2,
    because ``parallelize`` sets ``cast_forward_inputs=False``.
    """

    cos: Tensor  # [N, 1, R / 2] fp32
    sin: Tensor  # [N, 1, R / 2] fp32

    @staticmethod
    def at(
        positions: Tensor, rotary_dim: int, theta: float, scale: Callable[[Tensor], Tensor] | None = None
    ) -> Rope:
        """Returns the embedding for the angles ``position * theta ** (-2i / R)``.

        Args:
            positions: [N] integers, the depth of each token in its path.
            rotary_dim: R, even.
            theta: base of the frequencies.
            scale: changes the frequencies [R / 2].
        """
        exponent = torch.arange(0, rotary_dim, 2, device=positions.device).float() / rotary_dim
        frequencies = 1.0 / theta**exponent
        if scale is not None:
            frequencies = scale(frequencies)
        angle = positions[:, None, None].float() * frequencies
        return Rope(angle.cos(), angle.sin())

    def rotate(self, x: Tensor) -> Tensor:
        """Returns x [N, heads, D] rotated, in x's dtype. The rotation is computed in fp32 or wider."""
        size = self.cos.shape[-1]
        low, high = x[..., : 2 * size].to(at_least_fp32(x)).split(size, dim=-1)
        rotated = torch.cat([low * self.cos - high * self.sin, high * self.cos + low * self.sin], dim=-1)
        if 2 * size == x.shape[-1]:
            return rotated.to(x.dtype)
        return torch.cat([rotated.to(x.dtype), x[..., 2 * size :]], dim=-1)
