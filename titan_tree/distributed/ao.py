"""The parts of torchao that titan_tree uses: 4-bit weights and 8-bit optimizer states.

No other file imports torchao. It is an optional extra (``pip install -e '.[torchao]'``) and imported only if
a configuration asks for it. Its version is pinned, because its class of 8-bit states is not public.
"""

from __future__ import annotations

import logging
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import nn

from titan_tree.errors import UserError, warnings_hidden
from titan_tree.models.lora.adapters import quantizable

# NF4: 4-bit codes with a scale per block of weights. Scales have 8 bits, with a scale per block of scales.
NF4_BLOCK, NF4_SCALES = 64, 256

logger = logging.getLogger(__name__)


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
    try:
        with warnings_hidden():  # torchao warns about compiled kernels, none of which are used here
            return import_module(f"torchao.{name}")
    except ModuleNotFoundError as error:
        if error.name != "torchao":
            raise
        raise UserError(
            f"{key}: needs torchao, which is not installed: {sys.executable} -m pip install -e '.[torchao]'"
        ) from None
