"""The parts of torchao that titan_tree uses: float8 linears and 8-bit optimizer states.

No other file imports torchao. It is an optional extra (``pip install -e '.[torchao]'``) and imported only if
a configuration asks for it. Its version is pinned, because its float8 linear is not a public class.
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

from titan_tree.distributed.optimizers import OptimizerSpec
from titan_tree.errors import UserError
from titan_tree.models.block import Mixer
from titan_tree.models.layers import Linear

Float8 = Literal["none", "tensorwise", "rowwise", "rowwise_with_gw_hp"]

logger = logging.getLogger(__name__)


def float8_linears(model: nn.Module, recipe: Float8, device_type: str) -> None:
    """Makes the linears of ``model.layers`` multiply in float8 (arXiv:2209.05433), in place.

    This converts the projections of mixers, of MLPs and of shared experts whose two sizes are multiples of
    16. Routers, routed experts, embedding, head and the ``high_precision`` linears of a mixer stay unchanged.

    The weights keep their names, dtype and values: operands are scaled and cast where they are used, in
    forward and backward. Autograd saves the unscaled operands. The number of tokens is padded to a multiple
    of 16 for the gradients of weights, so batches may have any size.

    Args:
        model: on any device, also on "meta".
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
    kept = {
        id(getattr(mixer, name))
        for mixer in layers.modules()
        if isinstance(mixer, Mixer)
        for name in mixer.high_precision
    }
    converted: list[str] = []

    def is_converted(module: nn.Module, name: str) -> bool:
        if not isinstance(module, Linear) or id(module) in kept:
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


def _adamw_8bit() -> type[torch.optim.Optimizer]:
    """Returns AdamW with 8-bit moments (Dettmers et al., arXiv:2110.02861).

    Each block of 256 moments shares one scale, so the states take 2.03 bytes per parameter instead of 8. The
    update runs in fp32, parameter by parameter, compiled. A block lies within the shard of one rank. A shard
    keeps moments in the dtype of the weights if it has fewer than 4,096 elements, or if its size is not a
    multiple of 256.
    """
    return _import("optim", "optimizer.name").AdamW8bit


# torchao can split the states along the first dimension only.
ADAMW_8BIT = OptimizerSpec(load=_adamw_8bit, reshards_any_dim=False)


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
