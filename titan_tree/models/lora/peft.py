"""LoRA adapters as the library PEFT stores them: adapter_config.json and adapter_model.safetensors.

PEFT wraps the modules that it adapts, so its names differ from those of parameters here. A parameter of
routed experts gets a wrapper too. The wrapper of ``gate_up_proj`` is inside that of ``down_proj``, if both
have one, and is then called ``base_layer``. Factors of E experts lie in matrices: A [E rank, in], one expert
after another, and B [out, rank E], with the expert as the index that changes fastest.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_tree.components.lora import Factors, LoRA, is_factor, matrix_shape
from titan_tree.config.checks import positive_int, positive_number
from titan_tree.errors import UserError, shorten
from titan_tree.models.hf.names import TEXT_PREFIX, model_name
from titan_tree.models.hf.save import all_or_nothing, snapshot_prefix, write_tensors
from titan_tree.models.hf.snapshot_files import (
    ADAPTER_CONFIG,
    open_weights,
    read_json,
    warn_once,
    write_json,
)
from titan_tree.models.lora.adapters import adaptable, add_lora, is_expert, owner
from titan_tree.models.lora.packed import pack, packed_projections, unpack
from titan_tree.models.tree_model import TreeModel
from titan_tree.models.weights import WeightShards, whole_weights

ADAPTER = "adapter_model.safetensors"
WRAPPER = "base_model.model."  # how the names of all tensors begin
TENSOR = re.compile(rf"{re.escape(WRAPPER)}(.+?)(\.base_layer)?\.lora_([AB])\.weight")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# Linears that PEFT takes for projections of routed experts, if they are among its modules.
TAKEN_FOR_EXPERTS = ("gate_proj", "up_proj", "down_proj")
# A key of rank_pattern or alpha_pattern: the end of a name. PEFT allows all regular expressions.
PATTERN = re.compile(r"(?:\.\*\\\.)?(\w+(?:\\?\.\w+)*)")
# Fields of adapter_config.json that do not change what an adapter computes, and those that are read below.
KNOWN_FIELDS = frozenset(
    {
        *("alpha_pattern", "auto_mapping", "base_model_name_or_path", "bias", "ensure_weight_tying"),
        *("exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform"),
        *("lora_alpha", "lora_dropout", "megatron_core", "peft_type", "peft_version"),
        *("qalora_group_size", "r", "rank_pattern", "revision", "runtime_config"),
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

    Updates of a smaller rank than others get zeros up to the largest rank. They stay 0 in training.

    Returns:
        The settings, whose targets are whole names, and the factors on the CPU, by the model's names.
    """
    config = read_json(Path(folder) / ADAPTER_CONFIG)
    _check_config(config, Path(folder) / ADAPTER_CONFIG)
    path = Path(folder) / ADAPTER
    with open_weights(path) as file:
        stored: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    if not stored:
        raise UserError(f"{path}: expected factors of linears, found no tensors")
    targets = _targets(model)
    by_module: dict[str, dict[str, Tensor]] = {}
    has_down = any(str(name).endswith("down_proj") for name in config.get("target_parameters") or ())
    for key, tensor in stored.items():
        match = TENSOR.fullmatch(key)
        module = model_name(match[1]) if match else key
        if module.endswith(".experts"):
            module += ".down_proj" if match and has_down and not match[2] else ".gate_up_proj"
        if match is None or module not in targets:
            single = "; experts need PEFT's target_parameters, with all experts of a layer in one tensor"
            hint = single if re.search(r"\.experts\.\d+\.", key) else ""
            raise UserError(f"{path}: {shorten(key)}: expected a factor of a linear of {model.family}{hint}")
        if match[3] in by_module.setdefault(module, {}):
            raise UserError(f"{path}: {shorten(key)}: expected every factor once; another name holds it, too")
        by_module[module][match[3]] = _checked(tensor, f"{path}: {shorten(key)}")
    _check_targets(config, targets, by_module, path)
    ranks = {module: _of_module("rank_pattern", "r", module, config) for module in by_module}
    scaling = _scaling(config, ranks, Path(folder) / ADAPTER_CONFIG)
    factors = {}
    for module, found in by_module.items():
        name, shape = targets[module]
        factors[name] = _from_peft(module, shape, int(ranks[module]), found, path)
    factors = unpack(model, factors, config["r"])
    rank, rslora = max(a.shape[-2] for a, _ in factors.values()), bool(config.get("use_rslora"))
    alpha = float(config["lora_alpha"]) if rank == config["r"] else scaling * (rank**0.5 if rslora else rank)
    adapted = tuple(name for name in adaptable(model) if name in factors)
    weights = {}
    for name, (a, b) in factors.items():
        missing = rank - a.shape[-2]
        weights[_factor(name, "A")] = F.pad(a, (0, 0, 0, missing))
        weights[_factor(name, "B")] = F.pad(b, (0, missing))
    return LoRA(rank=rank, alpha=alpha, targets=adapted, rslora=rslora), weights


def _check_targets(
    config: Mapping[str, Any], known: Collection[str], found: Collection[str], path: Path
) -> None:
    """Raises UserError unless the factors are those of the modules that adapter_config.json names.

    Not checked are regular expressions, and adapters of parameters, for which PEFT has rules of its own.
    """
    targets, excluded = config.get("target_modules"), config.get("exclude_modules") or []
    if not (isinstance(targets, list) and isinstance(excluded, list)) or config.get("target_parameters"):
        return
    layers = config.get("layers_to_transform")
    numbers = None if layers is None else set(map(str, layers if isinstance(layers, list) else [layers]))

    def is_named(module: str) -> bool:
        def matches(name: str) -> bool:  # the end of the module's name, or its name with a prefix
            return f".{module}".endswith(f".{name}") or f".{name}".endswith(f".{module}")

        number = re.search(r"layers\.(\d+)\.", module)
        is_in_layer = numbers is None or (number is not None and number[1] in numbers)
        return is_in_layer and any(map(matches, targets)) and not any(map(matches, excluded))

    for module in sorted(known):
        if not is_expert(f".{module}") and is_named(module) != (module in found):
            says, got = ("names", "no factors") if is_named(module) else ("does not name", "factors")
            raise UserError(
                f"{path}: {module}: {ADAPTER_CONFIG} {says} it, got {got} of it; save the adapter again"
            )


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
    adapted = [name for name in adaptable(model) if _factor(name, "A") in weights]
    assert 2 * len(adapted) == sum(map(is_factor, weights)), "factors without a linear"
    factors = pack(
        model, {name: (weights[_factor(name, "A")], weights[_factor(name, "B")]) for name in adapted}
    )
    # Exports of models with a tower nest the text model.
    prefix = snapshot_prefix(source) if model.visual is None else TEXT_PREFIX
    tensors = {}
    for name, pair in factors.items():
        module, _, weight = (prefix + _hf_module(name)).rpartition(".")
        if not is_expert(name):
            module += f".{weight}"
        elif weight == "gate_up_proj" and name.replace("gate_up_proj", "down_proj") in factors:
            module += ".base_layer"
        for letter, factor in zip("AB", pair, strict=True):
            tensors[f"{WRAPPER}{module}.lora_{letter}.weight"] = _to_peft(factor.detach().cpu(), letter)
    # Only packed projections differ in rank.
    ranks = {_hf_module(name): len(a) for name, (a, _) in factors.items() if a.shape[-2] != lora.rank}
    with all_or_nothing(Path(folder)) as temporary:
        write_tensors(tensors, temporary / ADAPTER)
        write_json(temporary / ADAPTER_CONFIG, _config(model, lora, ranks, source))


def _config(
    model: TreeModel, lora: LoRA, ranks: Mapping[str, int], source: str | Path | None
) -> dict[str, Any]:
    """Returns the content of adapter_config.json.

    Args:
        ranks: the ranks of the modules whose rank is not that of ``lora``.
    """
    modules, parameters = _peft_targets(model, lora.targets)
    alphas = {module: lora.scaling * (rank**0.5 if lora.rslora else rank) for module, rank in ranks.items()}
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": None if source is None else str(source),
        "r": lora.rank,
        "lora_alpha": _number(lora.alpha),
        "target_modules": modules,
        "target_parameters": parameters or None,
        "lora_dropout": 0.0,
        "bias": "none",
        "use_rslora": lora.rslora,
        "use_dora": False,
        "fan_in_fan_out": False,
        "rank_pattern": dict(ranks),
        "alpha_pattern": {module: _number(alpha) for module, alpha in alphas.items()},
        "modules_to_save": None,
        "inference_mode": True,
        "init_lora_weights": True,
    }


def _peft_targets(model: TreeModel, targets: Sequence[str]) -> tuple[list[str], list[str]]:
    """Returns the modules and the parameters that PEFT must adapt.

    In many models with routed experts, PEFT takes the module names in ``TAKEN_FOR_EXPERTS`` for those of
    experts. It takes names of parameters as they are. So the weights of such linears are parameters.
    """
    whole = {
        part.rpartition(".")[2]: packed.name.rpartition(".")[2]
        for packed in packed_projections(model)
        for part in packed.parts
    }
    has_experts = any(map(is_expert, adaptable(model)))
    modules, parameters = [], []
    for target in map(_hf_module, targets):
        path, dot, last = target.rpartition(".")
        if is_expert(f".{target}"):
            parameters.append(target)
        elif has_experts and last in TAKEN_FOR_EXPERTS:
            parameters.append(f"{target}.weight")
        else:
            modules.append(path + dot + whole.get(last, last))
    return list(dict.fromkeys(modules)), parameters


def _number(value: float) -> float:
    """Returns a whole number as an int, as which PEFT declares alpha."""
    return int(value) if float(value).is_integer() else value


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
    require("use_rslora", "true or false", config.get("use_rslora") in (None, True, False))
    init = config.get("init_lora_weights", True)
    require("init_lora_weights", "an initialization that keeps the base model", init in KEEP_BASE)
    for field, is_wrong in (("rank_pattern", positive_int), ("alpha_pattern", positive_number)):
        require(
            field, "a table from names of modules to numbers > 0", _is_pattern(config.get(field), is_wrong)
        )
    parameters = config.get("target_parameters")
    require("target_parameters", "a list of names", parameters is None or isinstance(parameters, list))
    # It acts in PEFT's training alone, and would give the paths of a token different masks.
    if dropout := config.get("lora_dropout"):
        right = isinstance(dropout, (int, float)) and 0 < dropout < 1
        require("lora_dropout", "a number from 0 to 1", right)
        warn_once(f"{path}: lora_dropout: {dropout} is taken for 0, also in further training")
    for field, value in config.items():
        require(
            field, "an adapter that is plain LoRA, without this feature", field in KNOWN_FIELDS or not value
        )


def _is_pattern(table: object, is_wrong: Callable[[object], str | None]) -> bool:
    """Returns whether a value of adapter_config.json is a table of ranks or alphas, or empty."""
    if not table:
        return True
    return isinstance(table, dict) and all(
        PATTERN.fullmatch(key) is not None and is_wrong(value) is None for key, value in table.items()
    )


def _targets(model: TreeModel) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Returns what an adapter of ``model`` can contain, by transformers' names.

    Each has its name here, and its shape (out, in) or (E, out, in).
    """
    shapes = {name: matrix_shape(*owner(model, name)) for name in adaptable(model)}
    shapes |= {packed.name: packed.shape for packed in packed_projections(model)}
    return {_hf_module(name): (name, shape) for name, shape in shapes.items()}


def _checked(tensor: Tensor, where: str) -> Tensor:
    """Returns a factor in fp32. Raises UserError if it has another kind of numbers, or one is not finite."""
    if tensor.dtype not in DTYPES:
        dtype = str(tensor.dtype).removeprefix("torch.")
        raise UserError(f"{where}: expected numbers of the type float32, bfloat16 or float16, got {dtype}")
    if not (tensor := tensor.float()).isfinite().all():
        raise UserError(f"{where}: expected finite numbers, got NaN or infinity; save the adapter again")
    return tensor


def _of_module(pattern: str, field: str, module: str, config: Mapping[str, Any]) -> float:
    """Returns the rank or alpha of a module: that of the first pattern that matches, or the config's."""
    for key, value in (config.get(pattern) or {}).items():
        match = PATTERN.fullmatch(key)
        assert match is not None
        if f".{module}".endswith("." + model_name(match[1].replace("\\", ""))):
            return value
    return config[field]


def _scaling(config: Mapping[str, Any], ranks: Mapping[str, float], path: Path) -> float:
    """Returns the factor of all updates. Raises UserError if they have several."""
    scalings = {}
    for module, rank in ranks.items():
        alpha = _of_module("alpha_pattern", "lora_alpha", module, config)
        scalings[module] = LoRA(rank=int(rank), alpha=alpha, rslora=bool(config.get("use_rslora"))).scaling
    low, high = (pick(scalings, key=scalings.__getitem__) for pick in (min, max))
    if not math.isclose(scalings[low], scalings[high], rel_tol=1e-9):
        raise UserError(
            f"{path}: rank_pattern, alpha_pattern: expected one factor alpha / rank for all updates, got "
            f"{scalings[low]:g} for {low} and {scalings[high]:g} for {high}"
        )
    return scalings[low]


def _from_peft(
    module: str, shape: tuple[int, ...], rank: int, found: Mapping[str, Tensor], path: Path
) -> Factors:
    """Returns A and B in the shapes of parameters. Raises UserError if one is missing or does not fit."""
    *experts, size_out, size_in = shape
    num = experts[0] if experts else 1
    for letter, expected in (("A", (rank * num, size_in)), ("B", (size_out, rank * num))):
        got = "none" if letter not in found else str(tuple(found[letter].shape))
        if got != str(expected):
            raise UserError(
                f"{path}: lora_{letter} of {module}: expected a tensor of shape {expected}, got {got}; does "
                "the adapter belong to this model?"
            )
    a, b = found["A"], found["B"]
    return (a.view(num, rank, size_in), _expert_b(b, num)) if experts else (a, b)


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
