"""Loads Hugging Face snapshots."""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from titan_tree.config.checks import finite
from titan_tree.errors import UserError, shorten
from titan_tree.models.decoder import Decoder
from titan_tree.models.hf.files import CONFIG, ROUTER_BIASES, open_weights, read_json, weight_files
from titan_tree.models.hf.names import NOT_LOADED, Correspondence, Shape, correspondences, hf_name, model_name
from titan_tree.registry import MODELS

logger = logging.getLogger(__name__)

DTYPES = ("BF16", "F16", "F32", "F64")  # as safetensors names them


def load_pretrained(
    folder: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    attention: str = "auto",
    gdn: str = "auto",
) -> Decoder:
    """Loads the model of a local snapshot. Host memory holds one tensor beyond the model.

    Args:
        folder: the snapshot.
        dtype: of the loaded weights.
        device: of the loaded weights.
        attention: backend of ``TreeAttention``.
        gdn: backend of ``TreeGDN``.
    Raises:
        UserError: a part of the snapshot is missing, unexpected, damaged or of another shape, or titan_tree
            does not support the model.
    """
    with torch.device("meta"):
        model = model_from_config(folder, attention, gdn).to(dtype)
    weights = read_weights(folder, model)
    model.to_empty(device=device)
    parameters = model.state_dict()
    for name, tensor in weights:
        parameters[name].copy_(tensor)
    load_router_biases(model, folder)
    return model


def model_from_config(folder: str | Path, attention: str = "auto", gdn: str = "auto") -> Decoder:
    """Makes the model that a snapshot's config.json describes, without its weights, on the default device.

    Raises:
        UserError: the config is missing, damaged, or describes a model that titan_tree does not support.
    """
    path = Path(folder) / CONFIG
    config = read_json(path)
    families = [MODELS[name] for name in MODELS]
    known = {model_type: family for family in families for model_type in family.hf_architectures}
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in known:
        raise UserError(f"{path}: model_type: expected one of {', '.join(known)}, got {model_type!s:.60}")
    model_class = known[model_type]
    expected = [model_class.hf_architectures[model_type]]
    if (architectures := config.get("architectures") or expected) != expected:
        raise UserError(f"{path}: architectures: expected {expected}, got {architectures!s:.60}")
    return model_class(model_class.Config.from_hf(config, str(path)), attention, gdn)


def read_weights(folder: str | Path, model: Decoder) -> Iterator[tuple[str, Tensor]]:
    """Iterates over (name, tensor) of every parameter of ``model``, by the model's names.

    Tensors come one at a time, on the CPU, in the stored dtype. This call checks names, shapes and dtypes of
    all files. A tensor's values are checked when it is read, which takes one more pass over it in memory.

    Args:
        folder: the snapshot.
        model: says which tensors are expected; it may be on the meta device or sharded.
    Raises:
        UserError: see ``load_pretrained``.
    """
    folder = Path(folder)
    files = weight_files(folder)
    stored = _stored_shapes(folder, files)
    if model.lm_head is None:
        _drop_copied_embedding(folder, files, stored)
    needed = correspondences(model, stored)
    _check(folder, stored, needed)
    return _converted(_finite_tensors(files, stored), needed)


def _converted(
    tensors: Iterable[tuple[str, Tensor]], needed: list[Correspondence]
) -> Iterator[tuple[str, Tensor]]:
    """Yields parameters as soon as all tensors that hold them have come."""
    holder = {name: correspondence for correspondence in needed for name in correspondence.tensors}
    incomplete: dict[Correspondence, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        correspondence = holder[name]
        parts = incomplete.setdefault(correspondence, {})
        parts[name] = tensor
        if len(parts) == len(correspondence.tensors):
            del incomplete[correspondence]
            ordered = [parts[part] for part in correspondence.tensors]
            yield from zip(correspondence.parameters, correspondence.convert(ordered), strict=True)


def load_router_biases(model: Decoder, folder: str | Path) -> None:
    """Gives ``model`` the router biases that ``save_pretrained`` wrote beside the weights, if it wrote any.

    Call it when the weights are on their device: biases are created there, in fp32 for any dtype of the
    weights.

    Raises:
        UserError: the biases do not fit the model.
    """
    path = Path(folder) / ROUTER_BIASES
    if not path.is_file():
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


def _stored_shapes(folder: Path, files: list[Path]) -> dict[str, Shape]:
    """Returns the shapes of all tensors to load, by the model's names, and checks their dtypes."""
    shapes: dict[str, Shape] = {}
    skipped = []
    for file in files:
        with open_weights(file) as shard:
            for stored in shard.keys():  # noqa: SIM118
                if stored.startswith(NOT_LOADED):
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


def _drop_copied_embedding(folder: Path, files: list[Path], stored: dict[str, Shape]) -> None:
    """Removes the output projection of a tied model from ``stored``.

    The published Qwen3-0.6B, for example, has its embedding twice. Raises UserError if the two differ.
    """
    embedding, copy = "embed_tokens.weight", "lm_head.weight"
    if copy not in stored:
        return
    del stored[copy]
    both = dict(_tensors(files, {embedding, copy}))
    if embedding in both and not torch.equal(both[embedding], both[copy]):
        raise UserError(
            f"{folder}: {copy} differs from {hf_name(embedding)}, but config.json says "
            "tie_word_embeddings: true; set it to false"
        )


def _tensors(files: list[Path], names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Iterates over the tensors with these names, by the model's names, with one file open at a time."""
    for file in files:
        with open_weights(file) as shard:
            for stored in shard.keys():  # noqa: SIM118
                if not stored.startswith(NOT_LOADED) and (name := model_name(stored)) in names:
                    yield name, shard.get_tensor(stored)


def _finite_tensors(files: list[Path], names: Collection[str]) -> Iterator[tuple[str, Tensor]]:
    """Iterates like ``_tensors``. Raises UserError for values that are not finite numbers in fp32."""
    limit = torch.finfo(torch.float32).max
    for name, tensor in _tensors(files, names):
        # Of a tensor with a NaN, both are NaN. Python's floats do not round the limit to the tensor's dtype.
        low, high = (bound.item() for bound in torch.aminmax(tensor))
        if not (-limit <= low and high <= limit):
            raise UserError(
                f"{files[0].parent}: {hf_name(name)}: expected finite weights, got values from {low} "
                f"to {high}; download the snapshot again"
            )
        yield name, tensor


def _check(folder: Path, stored: dict[str, Shape], needed: list[Correspondence]) -> None:
    """Raises UserError if the tensors of a snapshot are not those that the model needs."""
    expected = {name: shape for correspondence in needed for name, shape in correspondence.tensors.items()}
    parameters = {name for correspondence in needed for name in correspondence.parameters}
    for name in stored:
        if name in parameters and name not in expected:
            raise UserError(f"{folder}: {hf_name(name)}: two tensors hold it; remove one")
    _check_names(folder, set(map(hf_name, expected)), set(map(hf_name, stored)))
    for name, shape in stored.items():
        if shape != expected[name]:
            raise UserError(
                f"{folder}: {hf_name(name)}: expected shape {expected[name]} by config.json, got {shape}"
            )


def _check_names(where: Path, expected: set[str], found: set[str]) -> None:
    for kind, names in (("missing", expected - found), ("unexpected", found - expected)):
        if names:
            some = ", ".join(sorted(names)[:3])
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"{where}: {kind} tensors: {some}{more}; do weights and config.json belong together?"
            )
