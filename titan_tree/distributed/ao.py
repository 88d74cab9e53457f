"""The parts of torchao that titan_tree is built on: float8 linears and 8-bit optimizer states.

No other file imports torchao. It is an extra (``pip install -e '.[torchao]'``), imported where a
configuration asks for it; pinned, for its float8 linear is no public class.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from importlib import import_module
from types import ModuleType
from typing import Literal

import torch
from torch import nn

from titan_tree.errors import UserError
from titan_tree.models.block import Mixer
from titan_tree.models.decoder import Decoder
from titan_tree.models.layers import Linear

Float8 = Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"]

logger = logging.getLogger(__name__)


def float8_linears(model: Decoder, recipe: Float8, device_type: str) -> None:
    """Let the linears of ``model.layers`` multiply in float8 (arXiv:2209.05433), in place.

    Those are projections of mixers and MLPs, of experts the shared one, with sides that are multiples of 16.
    Routers, gates, routed experts, embedding and head stay. Weights remain what they are, by the same names:
    operands are scaled and cast where they are used, in forward and backward, and autograd keeps the
    unscaled ones. Tokens are padded to multiples of 16 for the gradients of weights, so any number will do.

    Args:
        recipe: torchao's. "tensorwise" has one scale for a tensor; "rowwise" one for each row, of activations
            for each token; "rowwise_with_gw_hp" too, with gradients of weights in the model's precision.
        device_type: "cpu" emulates: operands are rounded as on a GPU, and multiplied in fp32.
    Raises:
        UserError: torchao or the GPU does not support it, or there are no such linears.
    """
    key = "training.float8"
    float8 = _import("float8", key)
    if device_type == "cuda" and (capability := torch.cuda.get_device_capability()) < (8, 9):
        raise UserError(
            f"{key}: expected a GPU of compute capability 8.9 or later, such as an H100, got "
            f'{".".join(map(str, capability))}: set it to "none"'
        )
    config = dataclasses.replace(
        float8.Float8LinearConfig.from_recipe_name(recipe),
        pad_inner_dim=True,
        emulate=device_type == "cpu",
    )
    layers = model.get_submodule("layers")
    mixers = {name: module for name, module in layers.named_modules() if isinstance(module, Mixer)}
    high_precision = {f"{name}.{linear}" for name, mixer in mixers.items() for linear in mixer.high_precision}
    converted: list[str] = []

    def chosen(module: nn.Module, name: str) -> bool:
        if not isinstance(module, Linear) or name in high_precision:
            return False
        if module.in_features % 16 or module.out_features % 16:
            return False
        converted.append(name)
        return True

    count = sum(isinstance(module, Linear) for module in layers.modules())
    float8.convert_to_float8_training(layers, module_filter_fn=chosen, config=config)
    if not converted:
        raise UserError(
            f"{key}: expected linears with sides that are multiples of 16, and none of the {count} in this "
            'model\'s layers is one: set it to "none"'
        )
    emulated = ", emulated" if config.emulate else ""
    logger.info("float8 (%s%s): %d of %d linears of the layers", recipe, emulated, len(converted), count)


def adamw_8bit() -> type[torch.optim.Optimizer]:
    """AdamW whose two moments are 8-bit numbers, each 256 of them under a scale (Dettmers et al.,
    arXiv:2110.02861): 2.03 bytes a parameter instead of 8.

    Computes in fp32, parameter by parameter, compiled. Blocks are those of a rank's shard, and shards of
    less than 4,096 numbers or no multiple of 256 keep their moments in the weights' dtype.
    """
    return _import("optim", "optimizer.name").AdamW8bit


def _import(name: str, key: str) -> ModuleType:
    """A module of torchao, for the configuration's ``key``."""
    logging.disable(logging.WARNING)  # of kernels built for other versions, none of which are used here
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
