"""Factors of projections that snapshots hold packed, as Qwen3-Next's ``in_proj_qkvz``.

PEFT adapts the packed projection. Here its parts (``Decoder.packed``) have updates of their own. Together, n
updates of rank r are one update of rank n r. Its A has the rows of all A, one part after another. Its B has
the columns of part i in the rows of part i, and 0 elsewhere.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from titan_tree.components.lora import Factors
from titan_tree.models.decoder import Decoder
from titan_tree.models.lora.adapters import adaptable
from titan_tree.models.tree_model import TreeModel


class Packed(NamedTuple):
    """A packed projection: its name, its shape (out, in), and the rows [out_i] of each part, by name."""

    name: str
    shape: tuple[int, int]
    parts: dict[str, Tensor]


def packed_projections(model: TreeModel) -> Iterator[Packed]:
    """Yields the packed projections that the snapshots of ``model`` have."""
    if not isinstance(model, Decoder) or not model.publishes_packed:
        return
    names = adaptable(model)
    for ending, parts in model.packed.items():
        whole, *ends = (end.removesuffix(".weight") for end in (ending, *parts))
        for prefix in [name.removesuffix(ends[0]) for name in names if name.endswith(f".{ends[0]}")]:
            weights = [model.get_submodule(prefix + end).get_parameter("weight") for end in ends]
            size_out = sum(weight.shape[0] for weight in weights)
            rows = model.unpack(prefix + ending, torch.arange(size_out))
            shape = size_out, weights[0].shape[1]
            yield Packed(prefix + whole, shape, dict(zip([prefix + end for end in ends], rows, strict=True)))


def pack(model: TreeModel, factors: Mapping[str, Factors]) -> dict[str, Factors]:
    """Returns ``factors`` with those of packed projections in place of those of their parts."""
    factors = dict(factors)
    for packed in packed_projections(model):
        found = [(rows, *factors.pop(name)) for name, rows in packed.parts.items() if name in factors]
        if found:
            stacked = torch.cat([a for _, a, _ in found])
            columns = stacked.new_zeros(packed.shape[0], len(stacked))
            start = 0
            for rows, a, b in found:
                columns[rows, start : start + len(a)] = b
                start += len(a)
            factors[packed.name] = stacked, columns
    return factors


def unpack(model: TreeModel, factors: Mapping[str, Factors], rank: int) -> dict[str, Factors]:
    """Returns ``factors`` with those of parts in place of those of packed projections.

    Args:
        rank: r. Factors that ``pack`` has made of updates of this rank become what they were. Others have
            mixed the parts, so each part gets the whole A and its rows of B.
    """
    factors = dict(factors)
    for packed in packed_projections(model):
        if packed.name not in factors:
            continue
        a, b = factors.pop(packed.name)
        blocks = [slice(i * rank, (i + 1) * rank) for i in range(len(packed.parts))]
        parts = {
            name: (a[at], b[rows][:, at])
            for at, (name, rows) in zip(blocks, packed.parts.items(), strict=True)
        }
        if len(a) != rank * len(parts) or not torch.equal(pack(model, parts)[packed.name][1], b):
            parts = {name: (a, b[rows]) for name, rows in packed.parts.items()}
        factors |= parts
    return factors
