"""LoRA adapters as the library PEFT stores them: adapter_config.json and adapter_model.safetensors.

PEFT wraps the modules that it adapts, so its names differ from those of parameters here. A parameter of
routed experts gets a wrapper too. The wrapper of ``gate_up_proj`` is inside that of ``down_proj``, if both
have one, and is then called ``base_layer``. Factors of E experts lie in matrices: A [E rank, in], one expert
after another, and B [out, rank E], with the expert as the index that changes fastest.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from titan_tree.components.lora import FACTOR, LoRA, is_factor, matrix_shape
from titan_tree.config.checks import positive_int, positive_number
from titan_tree.errors import UserError, shorten
from titan_tree.models.hf.names import model_name
from titan_tree.models.hf.save import all_or_nothing, snapshot_prefix, write_tensors
from titan_tree.models.hf.snapshot_files import open_weights, read_json, write_json
from titan_tree.models.lora.adapters import adaptable, add_lora, is_expert, owner
from titan_tree.models.tree_model import TreeModel
from titan_tree.models.weights import WeightShards, whole_weights

ADAPTER_CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"
WRAPPER = "base_model.model."  # how the names of all tensors begin
TENSOR = re.compile(rf"{re.escape(WRAPPER)}(.+?)(\.base_layer)?\.lora_([AB])\.weight")
# Fields of adapter_config.json that do not change what an adapter computes, and those that are read below.
KNOWN_FIELDS = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying", "exclude_modules"),
        *("inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha"),
        *(
            "megatron_core",
            "peft_type",
            "peft_version",
            "qalora_group_size",
            "r",
            "revision",
            "runtime_config",
        ),
        *("target_modules", "target_parameters", "task_type", "use_rslora"),
    }
)
# Other methods to initialize A and B also change the weights of the base model.
KEEP_BASE = (True, False, "gaussian", "eva", "orthogonal")


def load_adapter(model: TreeModel, folder: str | Path) -> None:
    """Adds an adapter of PEFT to ``model``, in place. The weights of the model are then frozen.

    Args:
        model: without LoRA, not sharded.
        folder: a folder with adapter_config.json and adapter_model.safetensors.
    Raises:
        UserError: the adapter is incomplete, does not fit the model, or is more than plain LoRA.
    """
    lora, weights = read_adapter(model, folder)
    add_lora(model, lora)
    fill_lora(whole_weights(model), weights)


def read_adapter(model: TreeModel, folder: str | Path) -> tuple[LoRA, dict[str, Tensor]]:
    """Reads an adapter of PEFT for ``model``, which may be on the meta device. Raises as ``load_adapter``.

    Returns:
        The settings, whose targets are whole names, and the factors on the CPU, by the model's names.
    """
    folder = Path(folder)
    path = folder / ADAPTER_CONFIG
    config = read_json(path)
    _check_config(config, path)
    with open_weights(folder / ADAPTER) as file:
        stored: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    names = {_hf_module(name): name for name in adaptable(model)}
    has_down = any(str(name).endswith("down_proj") for name in config.get("target_parameters") or ())
    weights: dict[str, Tensor] = {}
    chosen: set[str] = set()
    for key, tensor in stored.items():
        match = TENSOR.fullmatch(key)
        module = model_name(match[1]) if match else key
        if module.endswith(".experts"):
            module += ".down_proj" if match and has_down and not match[2] else ".gate_up_proj"
        if match is None or module not in names:
            raise UserError(
                f"{folder / ADAPTER}: {shorten(key)}: expected a factor of a linear of {model.family}"
            )
        name = names[module]
        chosen.add(name)
        weights[_factor(name, match[3])] = tensor
    lora = LoRA(
        rank=config["r"],
        alpha=float(config["lora_alpha"]),
        targets=tuple(name for name in adaptable(model) if name in chosen),
        rslora=bool(config.get("use_rslora")),
    )
    if not chosen:
        raise UserError(f"{folder / ADAPTER}: expected factors of linears, found no tensors")
    return lora, _from_peft(model, lora, weights, folder / ADAPTER)


def fill_lora(shards: WeightShards, weights: Mapping[str, Tensor]) -> None:
    """Copies factors from ``weights``, whole and by name, into ``shards``."""
    for name, shard in shards.items():
        if is_factor(name):
            shard.values.copy_(weights[name][shard.box])


def save_adapter(
    model: TreeModel,
    folder: str | Path,
    state_dict: Mapping[str, Tensor] | None = None,
    source: str | Path | None = None,
) -> None:
    """Saves the adapter of ``model`` as PEFT does. PEFT and inference engines can load it.

    Args:
        model: a model with LoRA.
        folder: must be empty or not exist.
        state_dict: the factors, by the model's names; needed if the model's own are sharded.
        source: the snapshot that the base was loaded from. The adapter names it.
    Raises:
        UserError: ``folder`` is taken, or writing failed.
    """
    lora = model.lora
    assert lora is not None, "the model has no LoRA"
    weights = model.state_dict() if state_dict is None else state_dict
    names = dict.fromkeys(match[1] for name in weights if (match := FACTOR.fullmatch(name)))
    prefix = snapshot_prefix(source)
    tensors = {}
    for name in names:
        module, _, weight = (prefix + _hf_module(name)).rpartition(".")
        if weight == "gate_up_proj" and name.replace("gate_up_proj", "down_proj") in names:
            module += ".base_layer"
        for letter in "AB":
            factor = weights[f"{name}_lora_{letter}"].detach().cpu()
            tensors[f"{WRAPPER}{module}.lora_{letter}.weight"] = _to_peft(factor, letter).contiguous()
    with all_or_nothing(Path(folder)) as temporary:
        write_tensors(tensors, temporary / ADAPTER)
        write_json(temporary / ADAPTER_CONFIG, _config(lora, source))


def _config(lora: LoRA, source: str | Path | None) -> dict[str, Any]:
    experts = [target for target in lora.targets if is_expert(f".{target}")]
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if source is None else str(source),
        "r": lora.rank,
        "lora_alpha": int(lora.alpha) if lora.alpha.is_integer() else lora.alpha,
        "target_modules": [_hf_module(target) for target in lora.targets if target not in experts],
        "target_parameters": [_hf_module(target) for target in experts] or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": lora.rslora,
        "use_dora": False,
        "fan_in_fan_out": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "modules_to_save": None,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _check_config(config: Mapping[str, object], path: Path) -> None:
    """Raises UserError unless the config describes an adapter that is LoRA and nothing else."""

    def require(field: str, expected: str, accepted: bool) -> None:
        if not accepted:
            raise UserError(f"{path}: {field}: expected {expected}, got {shorten(config.get(field))}")

    rank, alpha = config.get("r"), config.get("lora_alpha")
    require("peft_type", "'LORA'", config.get("peft_type") == "LORA")
    require("r", "an integer > 0", positive_int(rank) is None)
    require("lora_alpha", "a number > 0", positive_number(alpha) is None)
    require("bias", "'none'", config.get("bias", "none") == "none")
    init = config.get("init_lora_weights", True)
    require("init_lora_weights", "an initialization that keeps the base model", init in KEEP_BASE)
    for field, value in config.items():
        # Dropout would give the paths of a token different masks.
        require(
            field, "an adapter that is plain LoRA, without this feature", field in KNOWN_FIELDS or not value
        )


def _from_peft(model: TreeModel, lora: LoRA, stored: Mapping[str, Tensor], path: Path) -> dict[str, Tensor]:
    """Returns the factors in the shapes of parameters. Raises UserError if one is missing or does not fit."""
    weights = {}
    for name in lora.targets:
        module, attribute = owner(model, name)
        *experts, size_out, size_in = matrix_shape(module, attribute)
        for letter, shape in (("A", (lora.rank, size_in)), ("B", (size_out, lora.rank))):
            rows, columns = shape
            if experts:
                rows, columns = (
                    (rows * experts[0], columns) if letter == "A" else (rows, columns * experts[0])
                )
            factor = stored.get(_factor(name, letter))
            got = "none" if factor is None else str(tuple(factor.shape))
            if factor is None or tuple(factor.shape) != (rows, columns):
                raise UserError(
                    f"{path}: lora_{letter} of {_hf_module(name)}: expected a tensor of shape "
                    f"{(rows, columns)}, got {got}; does the adapter belong to this model?"
                )
            if experts:
                factor = factor.view(*experts, *shape) if letter == "A" else _expert_b(factor, *experts)
            weights[_factor(name, letter)] = factor
    return weights


def _expert_b(stored: Tensor, num_experts: int) -> Tensor:
    """Returns B [E, out, rank] from PEFT's [out, rank E]."""
    return stored.unflatten(1, (-1, num_experts)).permute(2, 0, 1)


def _to_peft(factor: Tensor, letter: str) -> Tensor:
    if factor.ndim == 2:
        return factor
    return factor.flatten(0, 1) if letter == "A" else factor.permute(1, 2, 0).flatten(1)


def _factor(name: str, letter: str) -> str:
    """Returns the parameter's name of a factor, for a name in ``adaptable``."""
    return f"{name}_lora_{letter}" if is_expert(name) else f"{name}.weight_lora_{letter}"


def _hf_module(name: str) -> str:
    """Returns transformers' name, without prefix, for a name in ``adaptable``."""
    return re.sub(r"^layers\.(\d+)\.layer\.", r"layers.\1.", name)
