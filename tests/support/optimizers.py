"""A small model with an optimizer, for tests on a CPU and on a GPU."""

from collections.abc import Iterator

import torch
from torch import Tensor

from titan_tree.distributed.optimizers import Optimizers, build_optimizers
from titan_tree.distributed.settings import OptimizerConfig
from titan_tree.models.decoder import Decoder
from titan_tree.models.pretrained import build_model


def model_and_optimizers(name: str, lr: float = 1e-2) -> tuple[Decoder, Optimizers]:
    """Returns a model of one layer, always the same, and the optimizer called ``name``."""
    torch.manual_seed(0)
    model = build_model("qwen3", "debug", num_hidden_layers=1)
    return model, build_optimizers(OptimizerConfig(name=name, lr=lr), model)  # type: ignore[arg-type]


def draw_gradients(model: Decoder, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        parameter.grad = 0.02 * torch.randn(parameter.shape, generator=generator)


def plain_state(optimizers: Optimizers) -> Iterator[Tensor]:
    """Yields every tensor of every state, dequantized."""
    for optimizer in optimizers:
        for state in optimizer.state.values():
            for value in state.values():
                yield value.dequantize() if hasattr(value, "codes") else value.clone()
