"""StepReport, the outcome of one optimizer step, and its values by name."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from titan_tree.errors import UserError
from titan_tree.registry import METRICS

if TYPE_CHECKING:  # a script that registers a logger imports this file, and should not wait for torch
    import torch

    from titan_tree.engine.step_io import StepResult


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The outcome of one optimizer step that changed the weights. Metrics are computed from it."""

    result: StepResult  # of all ranks together
    loss: float
    grad_norm: float  # before clipping
    lr: float  # learning rate of the step
    epoch: int  # number of epochs completed after the step
    seconds: float  # wall-clock time of the step
    world_size: int  # number of ranks
    device: torch.device  # device of this rank
    validation: Mapping[str, float] = field(default_factory=dict)  # loss and accuracy, if the step validated
    balance: Mapping[str, float] = field(default_factory=dict)  # see balance/balancing.py; empty on one rank
    rollouts: Mapping[str, float] = field(default_factory=dict)  # see rl/; empty unless the step samples them


def step_values(report: StepReport) -> dict[str, float]:
    """Returns all values of a step by name: the columns of metrics.csv, in their order.

    The loss function's and the router's metrics come last. Reading them waits for the device.

    Raises:
        UserError: two values have the same name.
    """
    values = {"loss": report.loss, "grad_norm": report.grad_norm, "lr": report.lr, "epoch": report.epoch}
    loss_metrics = report.result.loss_metrics | report.result.router_metrics
    for name in METRICS:
        _add(values, METRICS[name](report), f"metric {name!r}")
    _add(values, {name: value.item() for name, value in loss_metrics.items()}, "loss")
    _add(values, validation_values(report.validation), "validation")
    return values


def validation_values(validation: Mapping[str, float]) -> dict[str, float]:
    """Returns the values of a validation by the names that ``step_values`` gives them."""
    return {f"validation_{name}": value for name, value in validation.items()}


def _add(values: dict[str, float], new: dict[str, float], source: str) -> None:
    if taken := [name for name in new if name in values]:
        raise UserError(f"{source}: returns a value called {taken[0]!r}, a name in use; rename it")
    values.update(new)
