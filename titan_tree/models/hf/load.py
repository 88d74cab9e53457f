"""Loads Hugging Face snapshots."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from titan_tree.config.checks import finite
from titan_tree.errors import UserError, shorten
from titan_tree.models.decoder import Decoder
from titan_tree.models.hf.names import (
    Correspondence,
    Shape,
    TensorRows,
    correspondences,
    hf_name,
    model_name,
    not_loaded,
)
from titan_tree.models.hf.snapshot_files import CONFIG, ROUTER_BIASES, open_weights, read_json, weight_files
from titan_tree.models.settings import MODELS
from titan_tree.models.weights import WeightShard, WeightShards

logger = logging.getLogger(__name__)

DTYPES = ("BF16", "F16", "F32", "F64")  # as safetensors names them
EMBEDDING, COPY = "embed_tokens.weight", "lm_head.weight"  # of a tied model

Region = tuple[slice, ...]


class WeightPart(NamedTuple):
    """Some values of a parameter, as one tensor of a snapshot holds them."""

    parameter: str
    region: Region  # in this rank's shard of the parameter
    values: Tensor  # on the CPU, in the stored dtype
    tensor: str  # the model's name of the snapshot's tensor


def model_from_config(folder: str | Path, attention: str = "auto", recurrence: str = "auto") -> Decoder:
    """Makes the model that a snapshot's config.json describes, without its weights, on the default device.

    Raises:
        UserError: the config is missing or damaged, or titan_tree has no such model.
        UnsupportedConfigError: the model does not compute what the config asks for.
    """
    path = Path(folder) / CONFIG
    config = read_json(path)
    names: dict[str, list[str]] = {}  # families by model_type
    for name in MODELS:
        for known in MODELS[name].hf_architectures:
            names.setdefault(known, []).append(name)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in names:
        raise UserError(f"{path}: model_type: expected one of {', '.join(names)}, got {model_type!s:.60}")
    if len(names[model_type]) > 1:
        raise UserError(
            f"{path}: model_type: expected one model family that reads {model_type!r}, got "
            f"{' and '.join(names[model_type])}; remove it from hf_architectures of the others, or register "
            "yours under the name of the one that it replaces, with replace=True"
        )
    model_class = MODELS[names[model_type][0]]
    expected = [model_class.hf_architectures[model_type]]
    if (architectures := config.get("architectures") or expected) != expected:
        raise UserError(f"{path}: architectures: expected {expected}, got {architectures!s:.60}")
    with MODELS.calling(names[model_type][0], "config, attention, recurrence"):
        return model_class(model_class.Config.from_hf(config, str(path)), attention, recurrence)


def read_weights(folder: str | Path, model: Decoder, shards: WeightShards) -> Iterator[WeightPart]:
    """Iterates over the weights in ``shards``. Of each file, it reads only the rows that they hold.

    This call checks names, shapes and dtypes of all files. Values are checked when they are read, which takes
    one more pass over them in memory.

    Args:
        folder: the snapshot.
        model: says which tensors are expected; it may be on the meta device or sharded.
        shards: the part of each parameter to read; only their sizes are used.
    Raises:
        UserError: a part of the snapshot is missing, unexpected, damaged or of another shape.
    """
    folder = Path(folder)
    files = weight_files(folder)
    skipped = not_loaded(model)
    stored = _stored_shapes(folder, files, skipped)
    # The published Qwen3-0.6B, for example, is tied and has its embedding twice.
    copied = stored.pop(COPY, None) if model.lm_head is None else None
    needed = correspondences(model, stored)
    _check(folder, stored, needed)
    if copied is not None:
        _check_copied_embedding(folder, files, copied, shards[EMBEDDING], skipped)
    rows_by_tensor = {tensor: rows for match in needed for tensor, rows in match.rows_by_tensor().items()}
    return _finite_parts(files, rows_by_tensor, shards, skipped)


def fill_shards(shards: WeightShards, parts: Iterable[WeightPart]) -> None:
    """Copies the result of ``read_weights`` into ``shards``."""
    for part in parts:
        target = shards[part.parameter].values[part.region]
        target.copy_(part.values.to(target.device))  # cast on the device, after the transfer


def load_router_biases(model: Decoder, folder: str | Path) -> None:
    """Gives ``model`` the router biases that ``save_pretrained`` wrote beside the weights, if it wrote any.

    Call it when the weights are on their device: biases are created there, in fp32 for any dtype of the
    weights.

    Raises:
        UserError: the biases do not fit the model.
    """
    path = Path(folder) / ROUTER_BIASES
    if not os.path.lexists(path):
        return
    stored = read_json(path)
    if model.experts is None:
        raise UserError(f"{path}: expected no such file, because the model has no experts; remove it")
    model.experts.add_router_biases()
    biases = model.experts.router_biases()
    _check_names(path, set(biases), set(stored))
    for name, bias in biases.items():
        values = stored[name]
        numbers = isinstance(values, list) and all(finite(value) is None for value in values)
        if not numbers or len(values) != len(bias):
            raise UserError(
                f"{path}: {name}: expected a list of {len(bias)} finite numbers, got {shorten(values)}"
            )
        bias.copy_(torch.tensor(values))


def _stored_shapes(folder: Path, files: list[Path], not_loaded: tuple[str, ...]) -> dict[str, Shape]:
    """Returns the shapes of all tensors to load, by the model's names, and checks their dtypes."""
    shapes: dict[str, Shape] = {}
    skipped = []
    for file in files:
        with open_weights(file) as shard:
            for stored in shard.keys():  # noqa: SIM118
                if stored.startswith(not_loaded):
                    skipped.append(stored)
                    continue
                tensor, name = shard.get_slice(stored), model_name(stored)
                if name in shapes:
                    raise UserError(f"{file}: {stored}: a second tensor for {name}; remove one")
                shapes[name] = tuple(tensor.get_shape())
                if (dtype := tensor.get_dtype()) not in DTYPES:
                    raise UserError(
                        f"{file}: {stored}: expected unquantized weights ({', '.join(DTYPES)}), got {dtype}"
                    )
    if skipped:
        kinds = sorted({name.removeprefix("model.").partition(".")[0] for name in skipped})
        logger.info(
            "%s: not loaded: %d tensors of %s; an export with this snapshot as its source includes them",
            folder,
            len(skipped),
            " and ".join(kinds),
        )
    return shapes


def _check_copied_embedding(
    folder: Path, files: list[Path], copied: Shape, shard: WeightShard, not_loaded: tuple[str, ...]
) -> None:
    """Raises UserError if the output projection of a tied model differs from its embedding in ``shard``."""
    piece = TensorRows(EMBEDDING, (0, 0), shard.shape)
    if copied == shard.shape:
        rows_by_tensor = {EMBEDDING: [piece], COPY: [piece]}
        both = [part.values for part in _parts(files, rows_by_tensor, {EMBEDDING: shard}, not_loaded)]
        if not both or torch.equal(*both):
            return
    raise UserError(
        f"{folder}: {COPY} differs from {hf_name(EMBEDDING)}, but config.json says "
        "tie_word_embeddings: true; set it to false"
    )


def _finite_parts(
    files: list[Path],
    rows_by_tensor: Mapping[str, list[TensorRows]],
    shards: WeightShards,
    not_loaded: tuple[str, ...],
) -> Iterator[WeightPart]:
    """Iterates like ``_parts``. Raises UserError for values that are not finite numbers in fp32."""
    limit = torch.finfo(torch.float32).max
    for part in _parts(files, rows_by_tensor, shards, not_loaded):
        # Of a tensor with a NaN, both are NaN. Python's floats do not round the limit to the tensor's dtype.
        low, high = (bound.item() for bound in torch.aminmax(part.values))
        if not (-limit <= low and high <= limit):
            raise UserError(
                f"{files[0].parent}: {hf_name(part.tensor)}: expected finite weights, got values from "
                f"{low} to {high}; download the snapshot again"
            )
        yield part


def _parts(
    files: list[Path],
    rows_by_tensor: Mapping[str, list[TensorRows]],
    shards: WeightShards,
    not_loaded: tuple[str, ...],
) -> Iterator[WeightPart]:
    """Iterates over what ``shards`` hold of ``rows_by_tensor``, by tensor, with one file open at a time."""
    for file in files:
        with open_weights(file) as opened:
            for stored in opened.keys():  # noqa: SIM118
                if stored.startswith(not_loaded):
                    continue
                for piece in rows_by_tensor.get(name := model_name(stored), ()):
                    shard = shards[piece.parameter]
                    if overlap := _overlap(piece, shard):
                        rows, region = overlap
                        values = opened.get_slice(stored)[rows]
                        values = values.mT if piece.is_transposed else values
                        values = values.view(shard.values[region].shape)
                        yield WeightPart(piece.parameter, region, values, name)


def _overlap(piece: TensorRows, shard: WeightShard) -> tuple[Region, Region] | None:
    """Returns where the snapshot's tensor and the shard hold the elements of both; None: there are none."""
    sizes = (1,) * (len(piece.start) - len(piece.shape)) + piece.shape
    region, source = [], []
    for first, size, start, length in zip(piece.start, sizes, shard.start, shard.values.shape, strict=True):
        low, high = max(first, start), min(first + size, start + length)
        if low >= high:
            return None
        region.append(slice(low - start, high - start))
        source.append(slice(low - first, high - first))
    rows, *others = source[-len(piece.shape) :]
    others = others[::-1] if piece.is_transposed else others
    return (slice(piece.row + rows.start, piece.row + rows.stop), *others), tuple(region)


def _check(folder: Path, stored: dict[str, Shape], needed: list[Correspondence]) -> None:
    """Raises UserError if the tensors of a snapshot are not those that the model needs."""
    expected = {name: shape for correspondence in needed for name, shape in correspondence.tensors.items()}
    parameters = {name for correspondence in needed for name in correspondence.parameters}
    for name in stored:
        if name in parameters and name not in expected:
            raise UserError(f"{folder}: {hf_name(name)}: two tensors hold it; remove one")
    _check_names(folder, *({hf_name(name) for name in names} for names in (expected, stored)))
    for name, shape in stored.items():
        if shape != expected[name]:
            raise UserError(
                f"{folder}: {hf_name(name)}: expected shape {expected[name]} by config.json, got "
                f"{shape}; these files belong to different models"
            )


def _check_names(where: Path, expected: set[str], found: set[str]) -> None:
    for kind, names in (("missing", expected - found), ("unexpected", found - expected)):
        if names:
            some = ", ".join(sorted(names)[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"{where}: {kind} tensors: {some}{more}; do weights and config.json belong together?"
            )
