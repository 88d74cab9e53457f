"""How the tensors of a snapshot correspond to the parameters of a model.

There are three kinds of correspondence:

    direct   one tensor is one parameter
    packed   one tensor holds several parameters (``Decoder.packed``), as Qwen3-Next publishes projections
    fused    several tensors, one per expert and projection, make up one parameter

A fused parameter [E, rows, columns] holds these tensors row after row: for each expert its gate projection
and then its up-projection, or its down-projection alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_tree.models.decoder import Decoder

# Prefix of a text model's weights: in a snapshot of its own, and in one with vision.
PREFIX, TEXT_PREFIX = "model.", "model.language_model."
# Weights that no model here computes with: vision, and the head that predicts several tokens.
NOT_LOADED = ("model.visual.", "visual.", "mtp.")
FUSED = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}

Shape = tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Correspondence:
    """Tensors of a snapshot that together hold one or several parameters. Names are the model's."""

    tensors: Mapping[str, Shape]  # names and expected shapes of the tensors
    parameters: Sequence[str]
    convert: Callable[[list[Tensor]], list[Tensor]]  # from the tensors to the parameters, both in order

    @staticmethod
    def direct(name: str, shape: Shape) -> Correspondence:
        return Correspondence({name: shape}, [name], lambda tensors: tensors)

    @staticmethod
    def packed(name: str, parameters: Mapping[str, Shape], model: Decoder) -> Correspondence:
        shapes = list(parameters.values())
        shape = sum(shape[0] for shape in shapes), *shapes[0][1:]
        return Correspondence({name: shape}, list(parameters), lambda tensors: model.unpack(name, tensors[0]))

    @staticmethod
    def fused(name: str, shape: Shape) -> Correspondence:
        return Correspondence(
            single_experts(name, shape), [name], lambda tensors: [torch.cat(tensors).view(shape)]
        )


def correspondences(model: Decoder, stored: Collection[str]) -> list[Correspondence]:
    """Returns how a snapshot with the tensors ``stored`` should hold the parameters of ``model``.

    Each parameter occurs in exactly one correspondence, also if the snapshot lacks its tensors. The
    correspondence then names the tensors that are expected.
    """
    shapes = {name: tuple(parameter.shape) for name, parameter in model.state_dict().items()}
    found: list[Correspondence] = []
    for name in stored:
        for ending, parts in model.packed.items():
            names = [name.removesuffix(ending) + part for part in parts]
            if name.endswith(ending) and all(part in shapes for part in names):
                found.append(Correspondence.packed(name, {part: shapes.pop(part) for part in names}, model))
    for name, shape in shapes.items():
        is_fused = name not in stored and single_experts(name, shape)
        make = Correspondence.fused if is_fused else Correspondence.direct
        found.append(make(name, shape))
    return found


def single_experts(name: str, shape: Shape) -> dict[str, Shape]:
    """Returns names and shapes of the tensors in the fused parameter ``name``; {} for any other parameter."""
    for ending, projections in FUSED.items():
        if name.endswith(ending):
            num_experts, rows, columns = shape
            prefix = name.removesuffix(ending) + ".experts"
            size = rows // len(projections), columns
            return {f"{prefix}.{e}.{p}.weight": size for e in range(num_experts) for p in projections}
    return {}


def split_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns ``weights`` with each fused parameter replaced by views of its tensors."""
    split: dict[str, Tensor] = {}
    for name, weight in weights.items():
        if singles := single_experts(name, tuple(weight.shape)):
            rows = next(iter(singles.values()))[0]
            split |= zip(singles, weight.flatten(0, 1).split(rows), strict=True)
        else:
            split[name] = weight
    return split


def model_name(stored: str) -> str:
    """Returns the name that a model uses for the tensor that snapshots call ``stored``."""
    return stored.removeprefix(TEXT_PREFIX).removeprefix(PREFIX)


def hf_name(name: str, prefix: str = PREFIX) -> str:
    """Returns the name that snapshots use for the tensor that a model calls ``name``."""
    return name if name.startswith("lm_head.") else prefix + name
