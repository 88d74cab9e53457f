"""Snapshots of models that run as transformers implements them.

transformers itself reads and writes the files, because it may hold weights in another form. For example, it
stacks the experts of a layer.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.utils.logging import disable_progress_bar

from titan_tree.components.lora import is_factor
from titan_tree.errors import UserError, hide, printable
from titan_tree.models.hf.snapshot_files import CONFIG, read_json, warn_once, weight_files
from titan_tree.models.transformers.support import VISION, check_supported
from titan_tree.models.transformers.transformers_model import TransformersModel
from titan_tree.models.weights import CHECKPOINTED, WeightShards

LAYER = re.compile(r"layers\.(\d+)\.layer\.")


def from_config(
    folder: str | Path,
    dtype: torch.dtype = torch.float32,
    attention: str = "auto",
    recurrence: str = "auto",
    images: bool = False,
) -> TransformersModel:
    """Makes the model that a snapshot's config.json describes, without its weights, on the default device.

    It has its tower if it is to read images.

    Raises:
        UserError: the config is missing or damaged, or the model cannot run on trees.
    """
    config, auto_class = _read_config(folder, images=images), _auto_class(images)
    with _errors_in_one_line(Path(folder) / CONFIG):
        model = auto_class.from_config(config, dtype=dtype, trust_remote_code=False)
    made = TransformersModel(model, attention, recurrence)
    limit, positions = made.longest_path, config.get_text_config().max_position_embeddings
    if limit is not None and limit < positions:
        warn_once(
            f"{folder}: paths of up to {limit:,} tokens can run on trees, although the model has "
            f"{positions:,} positions: the RoPE of longer ones has other frequencies for all of their tokens"
        )
    return made


def fill(model: TransformersModel, folder: str | Path, shards: WeightShards) -> None:
    """Copies the weights of a snapshot into ``shards``, and its constants into ``model``.

    The host's memory holds the whole snapshot for a moment, on each rank. It is read in the dtype of the
    model, because transformers computes constants in that dtype.

    Args:
        model: a model on its device, with uninitialized weights; may be sharded.
        shards: the part of each parameter that this rank holds.
    Raises:
        UserError: a part of the snapshot is missing, unexpected or damaged.
    """
    has_tower = model.visual is not None
    source = TransformersModel(_read(folder, model.hf_config.dtype or torch.float32, images=has_tower))
    weights = source.state_dict()
    for name, shard in shards.items():
        if not is_factor(name):
            shard.values.copy_(weights[name][shard.box])
    constants = dict(source.named_buffers())
    for name, constant in list(model.named_buffers()):
        # Checkpointed layers have another name. Some constants are fp32 in a model of any dtype.
        value = constants[name.replace(CHECKPOINTED, "")]
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module)._buffers[leaf] = value.to(constant.device)


def unmodified(folder: str | Path, dtype: torch.dtype, images: bool = False) -> PreTrainedModel:
    """Returns the model of a snapshot as transformers implements it, on the CPU, for single sequences.

    Args:
        images: whether it reads images.
    Raises:
        UserError: see ``fill``.
    """
    disable_progress_bar()
    model = _read(folder, dtype, on_trees=not images, images=images).eval()
    model.set_experts_implementation("eager")  # the default one multiplies in bfloat16 only
    return model


def save(model: TransformersModel, folder: Path, weights: Mapping[str, Tensor], max_shard_bytes: int) -> None:
    """Saves a snapshot that transformers loads back bit for bit.

    Args:
        folder: must exist.
        weights: tensors by the model's names.
    """
    config = copy.deepcopy(model.hf_config)
    config.dtype = next(iter(weights.values())).dtype
    vars(config).pop("auto_map", None)  # names code of the source, for which these weights are not written
    with torch.device("meta"):
        shell = _auto_class(model.visual is not None).from_config(config, attn_implementation="eager")
    prefix = shell.base_model_prefix + (".language_model" if model.visual is not None else "")
    named = {hf_name(name, prefix): weight.contiguous() for name, weight in weights.items()}
    shell.save_pretrained(folder, state_dict=named, max_shard_size=max_shard_bytes)


def hf_name(name: str, prefix: str) -> str:
    """Returns transformers' name of a parameter of ``TransformersModel``. The text model has the prefix."""
    if name.startswith("visual."):
        return f"{prefix.partition('.')[0]}.{name}"
    if name.startswith("base."):
        return prefix + name.removeprefix("base")
    return LAYER.sub(rf"{prefix}.layers.\1.", name)


def _auto_class(images: bool) -> Any:
    return AutoModelForImageTextToText if images else AutoModelForCausalLM


def _read_config(folder: str | Path, on_trees: bool = True, images: bool = False) -> PreTrainedConfig:
    path = Path(folder) / CONFIG
    read_json(path)  # names a damaged file
    with _errors_in_one_line(path):
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    if on_trees:
        check_supported(config if images else config.get_text_config(), str(path))
        if images and config.model_type not in VISION:
            raise UserError(
                f'{path}: model.vision: expected "off" for the model_type {config.model_type}, got another '
                f"value; images need one of {', '.join(sorted(VISION))}"
            )
    return config


def _read(
    folder: str | Path, dtype: torch.dtype | str, on_trees: bool = True, images: bool = False
) -> PreTrainedModel:
    config = _read_config(folder, on_trees, images)
    weight_files(Path(folder))  # refuses pickles
    with _errors_in_one_line(folder):
        loaded: Any = _auto_class(images).from_pretrained(
            folder,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    model, info = loaded
    for kind in ("missing", "mismatched", "unexpected"):
        if names := sorted(map(str, info[f"{kind}_keys"])):
            more = f" and {len(names) - 3} more" if len(names) > 3 else ""
            raise UserError(
                f"{folder}: {kind} tensors: {', '.join(names[:3])}{more}; do weights and config.json belong "
                "together?"
            )
    for name, weight in model.named_parameters():
        if not torch.isfinite(weight).all():
            raise UserError(f"{folder}: {name}: expected finite weights; download the snapshot again")
    return model


@contextmanager
def _errors_in_one_line(path: str | Path) -> Iterator[None]:
    """Raises UserError for any error of transformers, which has no class of errors for bad files."""
    try:
        yield
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise UserError(f"{path}: transformers cannot load it: {printable(hide(reason)[:240])}") from None
