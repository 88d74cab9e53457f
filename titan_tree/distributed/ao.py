"""The parts of torchao that titan_tree uses: float8 linears, 4-bit weights and 8-bit optimizer states.

No other file imports torchao. It is an optional extra (``pip install -e '.[torchao]'``) and imported only if
a configuration asks for it. Its version is pinned, because its float8 linear is not a public class.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from importlib import import_module
from types import ModuleType
from typing import Any, Literal

import torch
from torch import nn

from titan_tree.errors import UserError
from titan_tree.models.block import Mixer
from titan_tree.models.layers import Linear
from titan_tree.models.lora.adapters import quantizable

Float8 = Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"]
Quantize = Literal["none", "nf4"]

# NF4: 4-bit codes with a scale per block of weights. Scales have 8 bits, with a scale per block of scales.
NF4_BLOCK, NF4_SCALES = 64, 256

logger = logging.getLogger(__name__)


def float8_linears(model: nn.Module, recipe: Float8, device_type: str) -> None:
    """Makes the linears of ``model.layers`` multiply in float8 (arXiv:2209.05433), in place.

    This converts the projections of mixers, of MLPs and of shared experts whose two sizes are multiples of
    16. Routers, routed experts, embedding, head and the ``high_precision`` linears of a mixer stay unchanged.

    The weights keep their names, dtype and values: operands are scaled and cast where they are used, in
    forward and backward. Autograd saves the unscaled operands. The number of tokens is padded to a multiple
    of 16 for the gradients of weights, so batches may have any size.

    Args:
        model: a model on any device, also on "meta".
        recipe: one of torchao's. "tensorwise" scales each tensor with one number. "rowwise" scales each row,
            which is a token of the activations. "rowwise_with_gw_hp" is "rowwise", but computes the
            gradients of weights in the precision of the model.
        device_type: "cpu" emulates float8: operands are rounded as on a GPU and multiplied in fp32.
    Raises:
        UserError: torchao is missing, the GPU does not support float8, or no linear can be converted.
    """
    key = "training.float8"
    float8 = _import("float8", key)
    if device_type == "cuda" and (capability := torch.cuda.get_device_capability()) < (8, 9):
        raise UserError(
            f"{key}: expected a GPU of compute capability 8.9 or later, such as an H100, got "
            f'{".".join(map(str, capability))}; set it to "none"'
        )
    config = dataclasses.replace(
        float8.Float8LinearConfig.from_recipe_name(recipe),
        pad_inner_dim=True,
        emulate=device_type == "cpu",
    )
    layers = model.get_submodule("layers")
    high_precision = {
        id(mixer.get_submodule(name))
        for mixer in layers.modules()
        if isinstance(mixer, Mixer)
        for name in mixer.high_precision
    }
    converted: list[str] = []

    def is_converted(module: nn.Module, name: str) -> bool:
        if not isinstance(module, Linear) or id(module) in high_precision:
            return False
        if module.in_features % 16 or module.out_features % 16:
            return False
        converted.append(name)
        return True

    count = sum(isinstance(module, Linear) for module in layers.modules())
    float8.convert_to_float8_training(layers, module_filter_fn=is_converted, config=config)
    if not converted:
        raise UserError(
            f"{key}: expected linears whose two sizes are multiples of 16, but none of the {count} in this "
            'model\'s layers is one; set it to "none"'
        )
    emulated = ", emulated" if config.emulate else ""
    logger.info("float8 (%s%s): %d of %d linears of the layers", recipe, emulated, len(converted), count)


def nf4_linears(model: nn.Module) -> dict[str, nn.Linear]:
    """Returns the linears that ``store_as_nf4`` quantizes, by name: those whose size is a multiple of 16,384.

    Raises:
        UserError: torchao is missing, or there are none.
    """
    _import("quantization", "lora.quantize")
    if linears := quantizable(model, NF4_BLOCK * NF4_SCALES):
        return linears
    raise UserError(
        f"lora.quantize: expected linears in the layers with a multiple of {NF4_BLOCK * NF4_SCALES:,} "
        'weights, but there are none; set it to "none"'
    )


def store_as_nf4(model: nn.Module, device: torch.device | str) -> None:
    """Quantizes frozen linears to NF4 (QLoRA, arXiv:2305.14314), in place, and moves the model.

    A weight takes 0.52 bytes per number. It keeps its name, shape and dtype, and is dequantized wherever it
    is used. Autograd saves it quantized.

    Args:
        model: a model with LoRA and loaded weights. Each rank has whole weights of ``nf4_linears``.
        device: the model's new device. Weights are quantized there one by one, so the model may be on a CPU.
    Raises:
        UserError: torchao is missing, or there is no such linear.
    """
    quantization, linears = _import("quantization", "lora.quantize"), nf4_linears(model)
    for linear in linears.values():
        weight = linear.weight.detach().to(device)
        quantized = quantization.to_nf4(weight, NF4_BLOCK, NF4_SCALES)
        linear.weight = nn.Parameter(quantized, requires_grad=False)
    model.to(device)
    count = sum(isinstance(module, nn.Linear) for module in model.get_submodule("layers").modules())
    logger.info("nf4: %d of %d linears of the layers", len(linears), count)


def state_8bit() -> type[Any]:
    """Returns torchao's class of quantized optimizer states, ``OptimState8bit``.

    It has the attributes ``codes`` (uint8, in the shape of the state), ``scale`` (fp32, one per block) and
    ``qmap`` (the fp32 values of the 256 codes). Checkpoints can save and reshard it.

    Raises:
        UserError: torchao is missing.
    """
    return _import("optim.subclass_8bit", "optimizer.name").OptimState8bit


def _import(name: str, key: str) -> ModuleType:
    """Returns a module of torchao; ``key`` is the configuration key that needs it."""
    logging.disable(logging.WARNING)  # torchao warns about compiled kernels, none of which are used here
    try:
        return import_module(f"torchao.{name}")
    except ModuleNotFoundError as error:
        if error.name != "torchao":
            raise
        raise UserError(
            f"{key}: needs torchao, which is not installed: {sys.executable} -m pip install -e '.[torchao]'"
        ) from None
    finally:
        logging.disable(logging.NOTSET)
