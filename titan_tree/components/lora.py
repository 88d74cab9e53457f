"""LoRA (arXiv:2106.09685): trains a low-rank update of a frozen weight.

The update of a weight [out, in] is scaling B A, with A [rank, in] and B [out, rank]. Both factors are
parameters of the module that owns the weight: those of ``weight`` are ``weight_lora_A`` and
``weight_lora_B``. The factors of E routed experts have one more dim, their first, of size E.

A linear treats tokens one by one. The gradients of A and B are therefore sums over distinct tokens, as those
of any weight.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Factors = tuple[Tensor, Tensor]  # A, and B times the scaling
FACTOR = re.compile(r"(.+)_lora_([AB])")  # the name of a factor


@dataclass(frozen=True, kw_only=True)
class LoRA:
    """Which weights have updates, and of what rank.

    Args:
        rank: > 0, of the updates.
        alpha: > 0; an update is multiplied by alpha / rank.
        targets: names of linears, or ends of their names, such as "q_proj" or "self_attn.q_proj". Routed
            experts are "experts.gate_up_proj" and "experts.down_proj". (): all linears of the layers, without
            routers and routed experts.
        rslora: multiply by alpha / sqrt(rank) instead (arXiv:2312.03732).
    """

    rank: int
    alpha: float = 16.0
    targets: tuple[str, ...] = ()
    rslora: bool = False

    @property
    def scaling(self) -> float:
        """The factor of an update."""
        return self.alpha / (math.sqrt(self.rank) if self.rslora else self.rank)


def add_factors(module: nn.Module, weight: str, lora: LoRA) -> None:
    """Adds uninitialized fp32 factors for a weight of ``module``, on its device. A linear then applies them.

    Args:
        module: an ``nn.Linear``, or routed experts, which apply the factors themselves.
        weight: attribute name of the weight.
    """
    base = module.get_parameter(weight)
    *experts, size_out, size_in = matrix_shape(module, weight)
    for factor, shape in (("A", (lora.rank, size_in)), ("B", (size_out, lora.rank))):
        values = torch.empty(*experts, *shape, device=base.device)
        module.register_parameter(f"{weight}_lora_{factor}", nn.Parameter(values))
    module.__dict__["lora_scaling"] = lora.scaling
    if isinstance(module, nn.Linear):
        module.register_forward_hook(_add_update)


def is_transposed(module: nn.Module) -> bool:
    """Returns whether experts store their weights as [E, in, out], as some models of transformers do."""
    return getattr(module, "is_transposed", False)


def matrix_shape(module: nn.Module, weight: str) -> tuple[int, ...]:
    """Returns the shape of a weight as (out, in) or (E, out, in), however it is stored."""
    stored = module.get_parameter(weight)
    return tuple((stored.mT if is_transposed(module) else stored).shape)


def factors(
    module: nn.Module, weight: str, dtype: torch.dtype, local: Mapping[str, Tensor] | None = None
) -> Factors | None:
    """Returns A, and B times the scaling, in ``dtype``; None if the weight has no update or updates are off.

    Args:
        module: the module that owns the weight.
        weight: attribute name of the weight.
        local: the parameters of ``module`` by name, if its own are DTensors.
    """
    scaling: float = getattr(module, "lora_scaling", 0.0)
    if not scaling or f"{weight}_lora_A" not in module._parameters:
        return None
    names = (f"{weight}_lora_A", f"{weight}_lora_B")
    a, b = (getattr(module, name) if local is None else local[name] for name in names)
    return a.to(dtype), b.to(dtype) * scaling


def _add_update(linear: nn.Module, inputs: tuple[Tensor, ...], out: Tensor) -> Tensor:
    """Adds the update to the output of a linear. A forward hook also works for linears of other libraries."""
    pair = factors(linear, "weight", out.dtype)
    if pair is None:
        return out
    a, b = pair
    return out + F.linear(F.linear(inputs[0], a), b)


def is_factor(parameter: str) -> bool:
    return FACTOR.fullmatch(parameter) is not None


def merged(weight: Tensor, a: Tensor, b: Tensor, scaling: float, is_transposed: bool) -> Tensor:
    """Returns a weight plus its update, in the weight's dtype. The sum is computed in fp32 or wider."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    update = scaling * (b.to(wide) @ a.to(wide))
    return (weight.to(wide) + (update.mT if is_transposed else update)).to(weight.dtype)
