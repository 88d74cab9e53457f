"""update_weights: one optimizer step, which is skipped if its loss or gradient is not finite."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import NamedTuple

import torch

from titan_tree.components.moe import RouterBias
from titan_tree.distributed.optimizers import clip_and_step
from titan_tree.engine.bad_steps import BadStepError
from titan_tree.engine.step_io import GlobalSizes, StepInput, StepResult
from titan_tree.engine.tree_step import TreeStep


class Update(NamedTuple):
    """The outcome of a step that changed the weights."""

    result: StepResult
    loss: float
    grad_norm: float  # before clipping


def update_weights(
    tree_step: TreeStep,
    optimizers: Collection[torch.optim.Optimizer],
    router_bias: RouterBias | None,
    max_grad_norm: float,
    step: StepInput,
    sizes: GlobalSizes | None = None,
) -> Update:
    """Runs forward and backward passes, then steps the optimizer and the router biases. Collective.

    Args:
        optimizers: see ``clip_and_step``.
        sizes: see ``TreeStep.run``.

    Raises:
        BadStepError: the loss or its gradient is not finite, or the loss counts no token. Weights, optimizer
            states and router biases are unchanged, and no gradients are left.
    """
    result = tree_step.run(step, sizes)
    norm = clip_and_step(optimizers, result.loss, max_grad_norm)
    for optimizer in optimizers:
        optimizer.zero_grad()
    values = {"loss": result.loss.item(), "grad_norm": norm.item()}  # waits for the device
    if wrong := [f"{name} is {value}" for name, value in values.items() if not math.isfinite(value)]:
        raise BadStepError(
            f"{' and '.join(wrong)}; {tree_step.find_cause(step, result.statistics)}; check their values, or "
            "lower optimizer.lr"
        )
    if router_bias:
        assert result.routing is not None
        assert tree_step.model.experts is not None
        router_bias.update(tree_step.model.experts.router_biases().values(), result.routing)
    return Update(result, *values.values())
