"""Tenant: a model that one client trains, with its optimizer, its files and its samplers."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from tinker import types
from torch import Tensor, nn

from titan_tree.distributed.optimizers import clip_and_step
from titan_tree.errors import UserError, shorten
from titan_tree.models.lora.peft import save_adapter
from titan_tree.models.tree_model import TreeModel
from titan_tree.rl.generate_sampler import default_sampler
from titan_tree.rl.sampler import Sampler
from titan_tree.rl.truncation import Truncation

WEIGHTS, OPTIMIZER = "weights.safetensors", "optimizer.safetensors"
GREEDY = 1e-5  # below this temperature, logits divided by it overflow; vLLM has the same limit


@dataclass(eq=False)
class Tenant:
    """A model that one client trains.

    Attributes:
        adapter: what LoRA adapts; None: all weights are trained.
        has_lost: whether gradients since the last step are gone, because a pass has failed on its way.
    """

    model: TreeModel
    adapter: types.LoraConfig | None
    has_lost: bool = False
    samplers: dict[tuple[Truncation, float], Sampler] = field(default_factory=dict)

    @cached_property
    def optimizer(self) -> torch.optim.AdamW:
        """The optimizer of the weights. Its learning rate and other numbers come with each step."""
        fused = self.model.embedding_weight.is_cuda
        return torch.optim.AdamW(self.weights.values(), fused=fused, lr=0.0)

    def sampler(self, truncation: Truncation, temperature: float) -> Sampler:
        """Returns a sampler of the weights, always the same one, since it keeps CUDA graphs.

        At temperature 0, it draws the likeliest id, whose probability among the kept ids is 1.
        """
        key = (Truncation(top_k=1), 1.0) if temperature < GREEDY else (truncation, temperature)
        if key not in self.samplers:
            self.samplers[key] = default_sampler(self.model, *key)
        return self.samplers[key]

    @cached_property
    def weights(self) -> dict[str, nn.Parameter]:
        """The weights that are trained, by name."""
        return {name: w for name, w in self.model.named_parameters() if w.requires_grad}

    def step(self, params: types.AdamParams) -> float:
        """Steps the optimizer with the gradients since its last step. Returns their norm before clipping.

        Raises:
            UserError: there are no gradients, or they are not finite. They are then gone, and the weights
                stay as they are.
        """
        if self.has_lost:
            self.forget_gradients()
            raise UserError(
                "optim_step: a pass before it failed, and its gradients are gone; repeat all passes"
            )
        if all(weight.grad is None for weight in self.weights.values()):
            raise UserError("optim_step: expected gradients of forward_backward, got none; call it first")
        for group in self.optimizer.param_groups:
            group.update(
                lr=params.learning_rate,
                betas=(params.beta1, params.beta2),
                eps=params.eps,
                weight_decay=params.weight_decay,
            )
        limit = params.grad_clip_norm if params.grad_clip_norm > 0 else float("inf")
        zero = torch.zeros((), device=self.model.embedding_weight.device)
        norm = float(clip_and_step([self.optimizer], zero, limit))
        self.forget_gradients()
        if not math.isfinite(norm):
            raise UserError(
                f"optim_step: expected finite gradients, got norm {norm}; the weights stay as they are; "
                "check advantages and log-probs"
            )
        return norm

    def forget_gradients(self) -> None:
        """Starts anew after a step, or after other weights were loaded."""
        self.optimizer.zero_grad()
        self.has_lost = False

    def save(self, folder: Path, source: str | None) -> None:
        """Writes the trained weights and the states of the optimizer.

        An adapter is also written as PEFT does, for engines that sample.

        Args:
            source: see ``save_adapter``.
        """
        save_file({name: w.detach().contiguous() for name, w in self.weights.items()}, folder / WEIGHTS)
        states = {
            f"{name}.{key}": value
            for name, weight in self.weights.items()
            for key, value in self.optimizer.state.get(weight, {}).items()
        }
        save_file(states, folder / OPTIMIZER)
        if self.adapter is not None:
            save_adapter(self.model, folder / "adapter", source=source)

    def load(self, folder: Path, with_optimizer: bool) -> None:
        """Reads what ``save`` wrote. Raises UserError, before it changes anything, if it is damaged."""
        device = self.model.embedding_weight.device
        states = _read(folder / OPTIMIZER, device) if with_optimizer else {}
        self.load_weights(folder)
        self.optimizer.state.clear()
        for key, state in states.items():
            name, _, kind = key.rpartition(".")
            self.optimizer.state[self.weights[name]][kind] = state
        self.forget_gradients()

    def load_weights(self, folder: Path) -> None:
        """Reads the weights alone. Raises UserError if they are others."""
        stored, own = _read(folder / WEIGHTS, torch.device("cpu")), dict(self.model.named_parameters())
        if not self.weights.keys() <= stored.keys() <= own.keys():
            raise UserError(
                f"{folder}: expected the weights {shorten(sorted(own))}, got {shorten(sorted(stored))}"
            )
        with torch.no_grad():
            for name, weight in stored.items():
                own[name].copy_(weight)


def _read(file: Path, device: torch.device) -> dict[str, Tensor]:
    """Returns the tensors of a file that ``save`` wrote. Raises UserError if it is damaged."""
    try:
        return load_file(file, str(device))
    except (OSError, SafetensorError) as error:
        raise UserError(f"{file}: expected what this server saved, but it is damaged: {error}") from None
