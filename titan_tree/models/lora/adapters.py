"""LoRA for a whole model: chooses weights, freezes the base, draws factors, and switches updates off."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from titan_tree.components.lora import FACTOR, LoRA, add_factors, factors, is_factor, is_transposed, merged
from titan_tree.components.moe.experts import ExpertWeight, Gather, Spread, sort_copies, spread_values
from titan_tree.components.moe.layer import Experts
from titan_tree.errors import UserError, unknown_name
from titan_tree.models.tree_model import TreeModel
from titan_tree.models.weights import CHECKPOINTED, ElementDraws, WeightShards, draw_weights

ROUTERS = ("gate", "shared_expert_gate")  # linears that choose or weigh experts
EXPERTS = ("gate_up_proj", "down_proj")  # weights of routed experts
# Gates of Gated DeltaNet and KDA, which 4 bits would blur.
DECAYS = ("in_proj_a", "in_proj_b", "in_proj_ba", "a_proj", "b_proj", "f_proj", "f_a_proj", "f_b_proj")
NOT_IN_PEFT = {"transformers/nemotron_h": ("out_proj",)}  # linears that PEFT adapts in no model of a family


def add_lora(model: TreeModel, lora: LoRA, dtype: torch.dtype | None = None) -> None:
    """Freezes all weights of ``model`` and adds uninitialized factors, in place.

    Args:
        model: without LoRA, on any device, also "meta".
        dtype: dtype for the frozen weights; None: they keep theirs. Factors are fp32.
    Raises:
        UserError: a target names no weight, or the model has LoRA already.
    """
    if model.lora is not None:
        raise UserError("lora: expected a model without LoRA, but this one has it; load the base model again")
    chosen = choose(model, lora.targets)
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        if dtype is not None:
            parameter.data = parameter.data.to(dtype)
    for name in chosen:
        module, weight = owner(model, name)
        add_factors(module, weight, lora)
        if is_fused(module):
            add_updates(module)
    model.lora = replace(lora, targets=tuple(shortest(model, chosen)))


def adaptable(model: nn.Module) -> list[str]:
    """Returns the names that LoRA can target: of linears of the layers, and of weights of routed experts."""
    names = []
    excluded = (*ROUTERS, *NOT_IN_PEFT.get(getattr(model, "family", ""), ()))
    for path, module in model.named_modules():
        path = path.replace(CHECKPOINTED, "")
        if path.startswith("layers.") and isinstance(module, nn.Linear):
            names += [path] if path.rpartition(".")[2] not in excluded else []
        elif isinstance(module, Experts) or is_fused(module):
            names += [f"{path}.{weight}" for weight in EXPERTS]
    return names


def quantizable(model: nn.Module, multiple: int) -> dict[str, nn.Linear]:
    """Returns the linears that a frozen base may store in 4 bits, by name.

    Args:
        multiple: number of elements of which a weight must have a multiple.
    """
    linears = {name: model.get_submodule(name) for name in adaptable(model) if not is_expert(name)}
    return {
        name: linear
        for name, linear in linears.items()
        if isinstance(linear, nn.Linear)
        and linear.weight.numel() % multiple == 0
        and name.rpartition(".")[2] not in DECAYS
    }


def choose(model: nn.Module, targets: tuple[str, ...]) -> list[str]:
    """Returns the names in ``adaptable(model)`` that ``targets`` match.

    Raises:
        UserError: a target matches none.
    """
    names = adaptable(model)
    if not targets:
        return [name for name in names if not is_expert(name)]
    for target in targets:
        if not any(_matches(name, target) for name in names):
            raise unknown_name("target of LoRA (lora.targets)", target, shortest(model, names))
    return [name for name in names if any(_matches(name, target) for target in targets)]


def shortest(model: nn.Module, chosen: list[str]) -> list[str]:
    """Returns targets that match exactly ``chosen``: the last parts of names, or else the whole names."""
    short = sorted({".".join(name.split(".")[-2 if is_expert(name) else -1 :]) for name in chosen})
    return short if choose(model, tuple(short)) == chosen else chosen


def is_expert(name: str) -> bool:
    """Returns whether a name in ``adaptable`` is that of routed experts."""
    return name.split(".")[-2] == "experts"


def _matches(name: str, target: str) -> bool:
    """Returns whether ``target`` ends the name. Routed experts need the part "experts." in it."""
    return name == target or (name.endswith("." + target) and ("." in target or not is_expert(name)))


def owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Returns the module and the weight's attribute for a name in ``adaptable``."""
    if is_expert(name):
        path, _, weight = name.rpartition(".")
        return model.get_submodule(path), weight
    return model.get_submodule(name), "weight"


def init_lora(shards: WeightShards, seed: int) -> None:
    """Draws the factors among ``shards``: A as Linear of torch and PEFT do, uniformly; B is 0.

    Args:
        shards: the part of each parameter that this rank holds. Other parameters stay unchanged.
        seed: determines all numbers, for any number of ranks.
    """
    for name, shard in shards.items():
        if match := FACTOR.fullmatch(name):
            bound = 1 / math.sqrt(shard.shape[-1]) if match[2] == "A" else 0.0

            def values(_: str, draws: ElementDraws, bound: float = bound) -> Tensor:
                return draws.uniform(-bound, bound)

            draw_weights(shard, name, seed, values)


def merge(model: TreeModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the weights of the model without LoRA that computes the same.

    Args:
        weights: the weights of ``model`` by its names; not sharded. Sums are rounded to the weight's dtype.
    """
    assert model.lora is not None
    # Quantized weights are dequantized by ``to``, which returns others as they are.
    result = {name: weight.to(weight.dtype) for name, weight in weights.items() if not is_factor(name)}
    for name in result:
        if f"{name}_lora_A" in weights:
            a, b = weights[f"{name}_lora_A"], weights[f"{name}_lora_B"]
            transposed = is_transposed(model.get_submodule(name.rpartition(".")[0]))
            result[name] = merged(result[name], a, b, model.lora.scaling, transposed)
    return result


def frozen_names(module: nn.Module) -> set[str]:
    """Returns the names in ``module.state_dict()`` of weights that are not trained."""
    weights = module.state_dict(keep_vars=True)
    return {name for name, w in weights.items() if isinstance(w, nn.Parameter) and not w.requires_grad}


def leave_out_frozen(module: nn.Module) -> None:
    """Makes ``module.state_dict`` leave out the frozen weights, and ``load_state_dict`` not expect them."""
    frozen = frozen_names(module)
    # Names of checkpointed layers are longer here.
    missing = {name for name, parameter in module.named_parameters() if not parameter.requires_grad}

    def drop(_: nn.Module, state_dict: dict[str, object], prefix: str, __: object) -> None:
        for name in frozen:
            state_dict.pop(prefix + name, None)

    def excuse(_: nn.Module, keys: Any) -> None:
        keys.missing_keys[:] = [name for name in keys.missing_keys if name not in missing]

    module.register_state_dict_post_hook(drop)
    module.register_load_state_dict_post_hook(excuse)


@contextmanager
def adapters_off(model: TreeModel) -> Iterator[None]:
    """Makes ``model`` compute what its base computes, without LoRA's updates, while the context is open.

    Use it for the log-probs of a reference policy. It is meant for passes without gradients: a backward pass
    after the context has closed would recompute activations with the updates.

    Args:
        model: plain, or sharded by ``parallelize``. A model without LoRA stays as it is.
    """
    scaled = [module for module in model.modules() if "lora_scaling" in vars(module)]
    values = [vars(module)["lora_scaling"] for module in scaled]
    try:
        for module in scaled:
            vars(module)["lora_scaling"] = 0.0
        yield
    finally:
        for module, value in zip(scaled, values, strict=True):
            vars(module)["lora_scaling"] = value


def is_fused(module: nn.Module) -> bool:
    """Returns whether a module is a layer's routed experts, as transformers stores and describes them."""
    names = module._parameters.keys() >= {"gate_up_proj", "down_proj"}
    return names and getattr(module, "has_gate", False) and not getattr(module, "has_post_expert_norm", True)


def add_updates(experts: nn.Module) -> None:
    """Makes the experts add the updates of their weights, in place."""
    experts.forward = MethodType(_forward, experts)


def _forward(experts: Any, x: Tensor, expert: Tensor, weight: Tensor) -> Tensor:
    """Returns the weighted sum of each token's experts, called as transformers calls the module: [N, d].

    Args:
        x: [N, d].
        expert: [N, k] int64.
        weight: [N, k].
    """
    index = sort_copies(expert)
    sorted_experts = spread_values(expert, index)
    ends = torch.searchsorted(
        sorted_experts, torch.arange(experts.num_experts, device=x.device), right=True, out_int32=True
    )
    copies = Spread.apply(x, index)
    hidden = experts._apply_gate(_linear(experts, "gate_up_proj", copies, ends, sorted_experts))
    out = _linear(experts, "down_proj", hidden, ends, sorted_experts)
    weighted = out * spread_values(weight, index).unsqueeze(1)
    return Gather.apply(weighted.to(x.dtype), index)


def _linear(experts: Any, name: str, x: Tensor, ends: Tensor, sorted_experts: Tensor) -> Tensor:
    """Returns the product of copies [S, c], sorted by expert, with a weight and its update, plus the bias."""
    base = getattr(experts, name)
    base = base.transpose(1, 2) if experts.is_transposed else base
    out = ExpertWeight(base, *(factors(experts, name, x.dtype) or ())).linear(x, ends)
    return out + getattr(experts, f"{name}_bias")[sorted_experts] if experts.has_bias else out
