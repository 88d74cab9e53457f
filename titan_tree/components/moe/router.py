"""The router's logits.

If x and the weight are bf16, a GPU computes them with tensor cores, and not with TF32, which would round its
inputs. Products of two bf16 numbers are exact in fp32. Tensor cores round their sums less precisely: with
d = 2048, an H100's relative error was 2e-6, and that of fp32 arithmetic 2e-7.

The gradient of the logits has 24 significant bits. The backward pass splits it into two bf16 numbers, which
keep 16 bits or more. Its results are rounded to bf16, which keeps 8.

N tokens, E experts, d hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from titan_tree.components.operators import as_operator


def router_logits(x: Tensor, weight: Tensor) -> Tensor:
    """Returns x times the transpose of weight, [N, E] in fp32 or wider.

    Args:
        x: [N, d].
        weight: [E, d], any dtype.
    """
    if x.dtype == weight.dtype == torch.bfloat16:
        return _Logits.apply(x, weight)
    wide = torch.promote_types(x.dtype, torch.float32)
    return F.linear(x.to(wide), weight.to(wide))


class _Logits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return bf16_product(x, weight.t(), torch.float32)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor | None]:
        x, weight = ctx.saved_tensors
        # The upper 16 bits of an fp32 number are a bf16 number. With ``grad.bfloat16()``, a compiled kernel
        # would continue with the unrounded number, and the difference would be 0.
        high = (grad.view(torch.int32) & -65536).view(torch.float32)
        parts = torch.cat([high, grad - high], 1).bfloat16()
        dx = bf16_product(parts, weight.repeat(2, 1), x.dtype)
        if not ctx.needs_input_grad[1]:
            return dx, None
        dweight = bf16_product(parts.t(), x, torch.float32)
        return dx, dweight.view(2, *weight.shape).sum(0).to(weight.dtype)


@as_operator
def bf16_product(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the product of two bf16 matrices, summed in fp32, in bf16 or fp32."""
    if a.is_cuda:
        return torch.mm(a, b, out_dtype=dtype)
    return (a.float() @ b.float()).to(dtype)


@torch.library.register_fake("titan_tree::bf16_product")
def _(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    return a.new_empty(a.shape[0], b.shape[1], dtype=dtype)
