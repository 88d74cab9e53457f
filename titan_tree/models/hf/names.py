"""How the tensors of a snapshot correspond to the parameters of a model.

There are three kinds of correspondence:

    direct   one tensor is one parameter, or the experts of Qwen3-VL with rows and columns exchanged
    packed   one tensor holds several parameters (``Decoder.packed``), as Qwen3-Next publishes projections
    fused    several tensors, one per expert and projection, make up one parameter

A fused parameter [E, rows, columns] holds these tensors row after row: for each expert its gate projection
and then its up-projection, or its down-projection alone.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from titan_tree.components.lora import FACTOR, is_factor
from titan_tree.models.decoder import Decoder

# Prefix of a text model's weights: in a snapshot of its own, and in one with vision.
PREFIX, TEXT_PREFIX = "model.", "model.language_model."
MTP, TOWER = ("mtp.",), ("model.visual.", "visual.")
FUSED = {".experts.gate_up_proj": ("gate_proj", "up_proj"), ".experts.down_proj": ("down_proj",)}

Shape = tuple[int, ...]


class TensorRows(NamedTuple):
    """A box of a parameter that a snapshot's tensor holds in consecutive rows.

    Args:
        parameter: name of the parameter.
        start: indices of the box's first element in the parameter, one per dim.
        shape: shape of the rows in the tensor. If the parameter has one more dim, its first, the box has size
            1 there.
        row: number of the first row in the tensor.
        is_transposed: whether the tensor has the last two dims in the other order.
    """

    parameter: str
    start: tuple[int, ...]
    shape: Shape
    row: int = 0
    is_transposed: bool = False


@dataclass(frozen=True, eq=False)
class Correspondence:
    """Tensors of a snapshot that together hold one or several parameters. Names are the model's.

    Args:
        tensors: names and expected shapes of the tensors.
        parameters: names of the parameters.
        rows_by_tensor: returns which rows of each tensor hold which boxes of parameters. Call it once the
            snapshot's shapes have been checked: it takes memory in proportion to the number of boxes.
    """

    tensors: Mapping[str, Shape]
    parameters: Collection[str]
    rows_by_tensor: Callable[[], Mapping[str, list[TensorRows]]]

    @staticmethod
    def direct(name: str, shape: Shape, is_transposed: bool = False) -> Correspondence:
        whole = TensorRows(name, (0,) * len(shape), shape, is_transposed=is_transposed)
        stored = transposed(shape) if is_transposed else shape
        return Correspondence({name: stored}, [name], lambda: {name: [whole]})

    @staticmethod
    def packed(name: str, parameters: Mapping[str, Shape], model: Decoder) -> Correspondence:
        shapes = list(parameters.values())
        shape = sum(shape[0] for shape in shapes), *shapes[0][1:]

        def rows_by_tensor() -> Mapping[str, list[TensorRows]]:
            # sources[i][r] is the row of the packed tensor that holds row r of parameter i.
            sources = model.unpack(name, torch.arange(shape[0], device="cpu"))
            return {
                name: [
                    TensorRows(parameter, (first, *(0,) * len(shape[1:])), (size, *shape[1:]), row)
                    for parameter, source in zip(parameters, sources, strict=True)
                    for first, size, row in _runs(source.tolist())
                ]
            }

        return Correspondence({name: shape}, list(parameters), rows_by_tensor)

    @staticmethod
    def fused(name: str, shape: Shape) -> Correspondence:
        singles = single_experts(name, shape)

        def rows_by_tensor() -> Mapping[str, list[TensorRows]]:
            projections = len(singles) // shape[0]
            return {
                tensor: [TensorRows(name, (i // projections, i % projections * size[0], 0), size)]
                for i, (tensor, size) in enumerate(singles.items())
            }

        return Correspondence(singles, [name], rows_by_tensor)


def _runs(rows: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yields (first index, size, first number) of each run of consecutive numbers."""
    first = 0
    for i in range(1, len(rows) + 1):
        if i == len(rows) or rows[i] != rows[i - 1] + 1:
            yield first, i - first, rows[first]
            first = i


def correspondences(model: Decoder, stored: Mapping[str, Shape]) -> list[Correspondence]:
    """Returns how a snapshot with tensors of the shapes ``stored`` should hold the parameters of ``model``.

    Each parameter occurs in exactly one correspondence, also if the snapshot lacks its tensors. The
    correspondence then names the tensors that are expected.
    """
    weights = model.state_dict().items()
    shapes = {name: tuple(parameter.shape) for name, parameter in weights if not is_factor(name)}
    found: list[Correspondence] = []
    for name in stored:
        for ending, parts in model.packed.items():
            names = [name.removesuffix(ending) + part for part in parts]
            if name.endswith(ending) and all(part in shapes for part in names):
                found.append(Correspondence.packed(name, {part: shapes.pop(part) for part in names}, model))
    for name, shape in shapes.items():
        if single_experts(name, shape):
            is_transposed = stored.get(name) == transposed(shape) != shape
            fused = Correspondence.direct(name, shape, is_transposed)
            found.append(fused if name in stored else Correspondence.fused(name, shape))
        else:
            found.append(Correspondence.direct(name, shape))
    return found


def transposed(shape: Shape) -> Shape:
    """Returns ``shape`` with the last two dims exchanged."""
    return *shape[:-2], shape[-1], shape[-2]


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


def transpose_experts(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns ``weights`` with views of the fused parameters as Qwen3-VL publishes them.

    Where transposing keeps the shape, transformers reads a tensor as it is.
    """
    return {
        name: weight.mT
        if single_experts(name, shape := tuple(weight.shape)) and shape[1] != shape[2]
        else weight
        for name, weight in weights.items()
    }


def pack(weights: Mapping[str, Tensor], model: Decoder) -> dict[str, Tensor]:
    """Returns ``weights`` with the tensors of ``model.packed`` in place of the parameters that they hold."""
    packed = dict(weights)
    for ending, parts in model.packed.items():
        for prefix in [name.removesuffix(parts[0]) for name in weights if name.endswith(parts[0])]:
            tensors = [packed.pop(prefix + part) for part in parts]
            rows = sum(map(len, tensors))
            whole = tensors[0].new_empty(rows, *tensors[0].shape[1:])
            sources = model.unpack(prefix + ending, torch.arange(rows))
            for source, tensor in zip(sources, tensors, strict=True):
                whole[source] = tensor
            packed[prefix + ending] = whole
    return packed


def stored_together(names: Iterable[str], model: Decoder) -> list[list[str]]:
    """Groups names of weights: a weight and its factors of LoRA, and the parts of a packed tensor."""
    packed = model.packed.items() if model.publishes_packed else ()
    wholes = {part: whole for whole, parts in packed for part in parts}
    groups: dict[str, list[str]] = {}
    for name in names:
        factor = FACTOR.fullmatch(name)
        weight = factor[1] if factor else name
        part = next(filter(weight.endswith, wholes), "")
        groups.setdefault(weight.removesuffix(part) + wholes.get(part, ""), []).append(name)
    return list(groups.values())


def model_name(stored: str) -> str:
    """Returns the name that a model uses for the tensor that its snapshots call ``stored``."""
    return stored.removeprefix(TEXT_PREFIX).removeprefix(PREFIX)


def hf_name(name: str, prefix: str = PREFIX) -> str:
    """Returns the name that snapshots use for the tensor that a model calls ``name``."""
    if name.startswith("visual."):
        return PREFIX + name
    return name if name.startswith("lm_head.") else prefix + name


def not_loaded(model: Decoder) -> tuple[str, ...]:
    """Returns how the names of tensors begin with which ``model`` does not compute.

    They are the head that predicts several tokens, and a tower that the model lacks.
    """
    return MTP if model.visual is not None else (*TOWER, *MTP)
