"""Routed experts of the library transformers with LoRA.

transformers multiplies the weights of all experts of a layer, which are one parameter, but has no place for
the factors of an update. ``add_updates`` therefore gives such a module another forward pass, which uses its
weights, biases and gate.

N tokens, k experts of a token, S = N k copies, E experts, d hidden size.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from titan_tree.components.lora import factors
from titan_tree.components.moe.experts import ExpertWeight, Gather, Spread, inverse_permutation


def is_fused(module: nn.Module) -> bool:
    """Returns whether a module is a layer's routed experts, as transformers stores and describes them."""
    names = module._parameters.keys() >= {"gate_up_proj", "down_proj"}
    return names and getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", True)


def add_updates(experts: nn.Module) -> None:
    """Makes the experts add the updates of their weights, in place."""
    experts.forward = MethodType(_forward, experts)


def _forward(experts: Any, x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
    """Returns the weighted sum of each token's experts, called as transformers calls the module: [N, d].

    Args:
        x: [N, d].
        expert: [N, k] int64.
        weight: [N, k].
    """
    order = expert.flatten().argsort(stable=True)
    inverse, sorted_experts = inverse_permutation(order), expert.flatten()[order]
    ends = torch.searchsorted(
        sorted_experts, torch.arange(experts.num_experts, device=x.device), right=True, out_int32=True
    )
    copies = Spread.apply(x, order, inverse, expert.shape[1])
    hidden = experts._apply_gate(_linear(experts, "gate_up_proj", copies, ends, sorted_experts))
    out = _linear(experts, "down_proj", hidden, ends, sorted_experts)
    weighted = out * Spread.apply(weight.reshape(-1, 1), order, inverse, 1)
    return Gather.apply(weighted.to(x.dtype), order, inverse, expert.shape[1])


def _linear(experts: Any, name: str, x: Tensor, ends: Tensor, sorted_experts: Tensor) -> Tensor:
    """Returns the product of copies [S, c], sorted by expert, with a weight and its update, plus the bias."""
    base = getattr(experts, name)
    base = base.transpose(1, 2) if experts.is_transposed else base
    out = ExpertWeight(base, *(factors(experts, name, x.dtype) or ())).linear(x, ends)
    return out + getattr(experts, f"{name}_bias")[sorted_experts] if experts.has_bias else out
