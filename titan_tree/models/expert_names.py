"""Experts in snapshots: fused as models have them, or one tensor per expert and projection.

A fused parameter [E, rows, columns] holds, row after row, the tensors that ``single_experts`` names: of each
expert its gate and then its up-projection, or its down-projection.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

PROJECTIONS = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}


def single_experts(name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Names and shapes of the tensors in the fused parameter ``name``; {} where it is none."""
    for ending, projections in PROJECTIONS.items():
        if name.endswith(ending):
            num_experts, rows, columns = shape
            prefix = name.removesuffix(ending) + ".experts"
            size = rows // len(projections), columns
            return {f"{prefix}.{e}.{p}.weight": size for e in range(num_experts) for p in projections}
    return {}


def split_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``weights`` with views of its fused parameters' single tensors instead of these."""
    split: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if singles := single_experts(name, tuple(weight.shape)):
            rows = next(iter(singles.values()))[0]
            split |= zip(singles, weight.flatten(0, 1).split(rows), strict=True)
        else:
            split[name] = weight
    return split
