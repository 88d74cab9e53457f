"""Snapshots of any model: of titan_tree's own, and of those that run as transformers implements them."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import torch
from torch import Tensor, nn

from titan_tree.config.checks import require
from titan_tree.errors import UserError, unknown_name, warnings_hidden
from titan_tree.models import hf
from titan_tree.models.decoder import Decoder
from titan_tree.models.decoder_config import ConfigJson, UnsupportedConfigError
from titan_tree.models.hf.save import MAX_SHARD_BYTES, all_or_nothing, copied_files, copy_files
from titan_tree.models.hf.snapshot_files import CONFIG, read_json, warn_once
from titan_tree.models.lora.adapters import merge
from titan_tree.models.settings import MODELS
from titan_tree.models.tree_model import TreeModel
from titan_tree.models.weights import WeightShards, whole_weights

Implementation = Literal["auto", "native", "transformers"]
Vision = Literal["off", "frozen", "train"]


def load_pretrained(
    folder: str | Path,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
    attention: str = "auto",
    recurrence: str = "auto",
    implementation: Implementation = "auto",
    vision: Vision = "off",
) -> TreeModel:
    """Loads the model of a local snapshot.

    Args:
        folder: the snapshot.
        dtype: dtype of the loaded weights.
        device: device of the loaded weights.
        attention: backend of ``TreeAttention``.
        recurrence: backend of ``TreeGDN``, ``TreeKDA`` and ``TreeSSD``.
        implementation: "native": titan_tree's own model. "transformers": the layers of the library
            transformers. "auto": native if there is such a model, and it computes what config.json says.
        vision: what to do with the tower: "off" does not load it, "frozen" loads it for images, and "train"
            also makes its weights require gradients.
    Raises:
        UserError: a part of the snapshot is missing, unexpected, damaged or of another shape, titan_tree does
            not support the model, or this machine has no such device.
    """
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch raises both
        reason = str(error).splitlines()[0]
        raise UserError(
            f"device: expected one of this machine, such as cpu, got {device}: {reason}"
        ) from None
    with torch.device("meta"):
        model = model_from_config(folder, dtype, attention, recurrence, implementation, vision)
    load_weights(model, folder, device, whole_weights)
    return model


def model_from_config(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    attention: str = "auto",
    recurrence: str = "auto",
    implementation: Implementation = "auto",
    vision: Vision = "off",
) -> TreeModel:
    """Makes the model that a snapshot's config.json describes, without its weights, on the default device.

    See ``load_pretrained`` for arguments and errors.
    """
    path, unsupported = Path(folder) / CONFIG, None
    config = read_json(path)
    if config.get("auto_map"):
        warn_once(f"{path}: auto_map: the snapshot's own code is not run; model_type says what to compute")
    if implementation == "native" or (implementation == "auto" and _is_native(config)):
        try:
            native = hf.model_from_config(folder, attention, recurrence)
            if vision != "off":
                add_tower(native, config, path, trained=vision == "train")
            return native.to(dtype)
        except UnsupportedConfigError as error:
            if implementation == "native":
                raise UserError(f'{error}; set model.implementation = "auto"') from None
            unsupported = error
    try:
        model = import_transformers().from_config(folder, dtype, attention, recurrence, vision != "off")
    except UserError as error:
        if unsupported is None:
            raise
        reason = str(error).removeprefix(f"{path}: ")[:220]
        raise UserError(f"{unsupported}; with the layers of transformers: {reason}") from None
    if unsupported is not None:
        warn_once(f"{unsupported}; therefore, it runs with the layers of transformers")
    if model.visual is not None:
        model.visual.requires_grad_(vision == "train")
    return model


def load_weights(
    model: TreeModel,
    folder: str | Path,
    device: torch.device | str,
    shards: Callable[[nn.Module], WeightShards],
) -> None:
    """Moves a model from "meta" to ``device``, with the weights of a snapshot.

    The host's memory holds one tensor beyond a ``Decoder``. For a model of transformers, it holds the whole
    snapshot for a moment, on each rank.

    Args:
        model: made by ``model_from_config``; may be sharded.
        shards: returns the part of each parameter that this rank holds.
    """
    if not isinstance(model, Decoder):
        model.to_empty(device=device)
        import_transformers().fill(model, folder, shards(model))
        return
    parts = hf.read_weights(folder, model, shards(model))  # refuses wrong sizes before they take memory
    model.to_empty(device=device)
    hf.fill_shards(shards(model), parts)
    hf.load_router_biases(model, folder)


def save_pretrained(
    model: TreeModel,
    folder: str | Path,
    state_dict: Mapping[str, Tensor] | None = None,
    source: str | Path | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Saves ``model`` as a snapshot that transformers loads back bit for bit.

    Files are written to a temporary folder beside ``folder``, which is renamed when all are written. A failed
    save therefore leaves no files.

    The published formats have no place for router biases (``RouterBias``). They go to a file of their own,
    which only titan_tree reads; a warning says so. Updates of LoRA are added to their weights.

    Args:
        folder: must be empty or not exist.
        state_dict: the weights, by the model's names; needed if the model's own are sharded.
        source: the snapshot that the model was loaded from. The export copies its tokenizer and processor
            files, with the code that these need, and drops ``auto_map`` of config.json. That of a ``Decoder``
            also keeps its weights that were not loaded (vision, prediction of several tokens), and the fields
            of config.json that do not change the model, such as special token ids.
        max_shard_bytes: maximum size of a weight file, unless a single tensor is larger.
    Raises:
        UserError: ``folder`` is taken, ``source`` is no snapshot or of another family, or writing failed.
    """
    weights = model.state_dict() if state_dict is None else state_dict
    if model.lora is not None:
        weights = merge(model, weights)
    if isinstance(model, Decoder):
        hf.save_pretrained(model, folder, weights, source, max_shard_bytes)
        return
    files = [] if source is None else copied_files(Path(source))
    with all_or_nothing(Path(folder)) as temporary:
        import_transformers().save(model, temporary, weights, max_shard_bytes)
        if source is not None:
            copy_files(Path(source), files, temporary)


def _is_native(config: ConfigJson) -> bool:
    """Returns whether titan_tree has a model of this type. Its own code also refuses a config without one."""
    model_type = config.get("model_type")
    return not isinstance(model_type, str) or any(
        model_type in MODELS[name].hf_architectures for name in MODELS
    )


def has_tower(folder: str | Path) -> bool:
    """Returns whether a snapshot is of one of titan_tree's own models, and has a tower."""
    config = read_json(Path(folder) / CONFIG)
    return _is_native(config) and "vision_config" in config


def import_transformers() -> ModuleType:
    """Imports the snapshots of titan_tree.models.transformers, and with them the library, an optional extra.

    Raises:
        UserError: the library is not installed.
    """
    try:
        with warnings_hidden():  # transformers imports torchao, if installed, which warns about its kernels
            from titan_tree.models.transformers import snapshot
    except ModuleNotFoundError as error:
        if error.name != "transformers":
            raise
        raise UserError(
            "model.implementation: needs the library transformers, which is not installed: "
            f"{sys.executable} -m pip install -e '.[transformers]'"
        ) from None
    return snapshot


def add_tower(model: Decoder, config: ConfigJson | None, where: str | Path, *, trained: bool) -> None:
    """Gives ``model`` a tower, see ``vision.add_tower``. Without ``config``, that of the flavor "debug"."""
    import_transformers()
    from titan_tree.models import vision

    vision.add_tower(model, config or vision.debug_config(model), where, trained=trained)


def build_model(
    name: str,
    flavor: str,
    attention: str = "auto",
    recurrence: str = "auto",
    vision: Vision = "off",
    **overrides: Any,
) -> Decoder:
    """Builds a model with fresh weights on the default device, which may be "meta".

    Args:
        name: a family, a key of ``titan_tree.models.settings.MODELS``.
        flavor: a published size of that family, or "debug".
        attention: backend of ``TreeAttention``.
        recurrence: backend of ``TreeGDN``.
        vision: see ``load_pretrained``. Only the flavor "debug" has a tower.
        overrides: fields of the model's config that differ from the flavor's.
    Raises:
        UserError: an unknown name, flavor, backend or field, or a value that the config refuses.
    """
    model_class = MODELS[name]
    if flavor not in model_class.flavors:
        raise unknown_name(f"flavor of {name}", flavor, model_class.flavors)
    if vision != "off":
        expected = f"'off' for the flavor {flavor}, whose tower is unknown; set model.hf_path to a snapshot"
        require(flavor == "debug", "model.vision", expected, vision)
    config = model_class.flavors[flavor]
    fields = [field.name for field in dataclasses.fields(config)]
    for field in overrides:
        if field not in fields:
            raise unknown_name(f"field of {name}'s config", field, fields)
    with MODELS.calling(name, "config, attention, recurrence"):
        model = model_class(dataclasses.replace(config, **overrides), attention, recurrence)
        if vision != "off":
            add_tower(model, None, f"{name} {flavor}", trained=vision == "train")
        model.init_weights()
    return model
