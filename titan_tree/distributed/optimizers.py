"""Optimizers: how each one is described, built and stepped.

To add an optimizer, define an ``OptimizerSpec`` in a file of its own and add one line to the registry
OPTIMIZERS (settings.py).
"""

from __future__ import annotations

import inspect
import logging
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from titan_tree.config.plugins import calling
from titan_tree.distributed import titan
from titan_tree.distributed.collectives import all_reduce_sum
from titan_tree.distributed.settings import OPTIMIZERS, LRSchedulerConfig, OptimizerConfig
from titan_tree.errors import UserError, shorten

logger = logging.getLogger(__name__)

# Arguments of an optimizer's class that ``optimizer.options`` cannot set.
RESERVED = (
    *("params", "lr", "betas", "eps", "weight_decay", "fused", "foreach"),
    *("maximize", "capturable", "differentiable"),
)


def optimizer_class(config: OptimizerConfig) -> Callable[..., torch.optim.Optimizer]:
    """Imports the class of the optimizer.

    Raises:
        UserError: its package is missing, or it does not take one of ``config.options``.
    """
    with OPTIMIZERS.calling(config.name):
        constructor = OPTIMIZERS[config.name].import_class()
        parameters = inspect.signature(constructor).parameters
    known = {
        name: parameter
        for name, parameter in parameters.items()
        if name not in RESERVED and parameter.kind is not inspect.Parameter.VAR_KEYWORD
    }
    for option, value in config.options.items():
        if option not in known:
            raise UserError(
                f"optimizer.options.{option}: {config.name!r} has no such option; expected "
                f"{', '.join(known) or 'none'}; remove it"
            )
        default = known[option].default
        expected = {int: float, tuple: list}.get(type(default), type(default))  # TOML has no tuples
        if default is not inspect.Parameter.empty and default is not None:
            kinds = {bool: "true or false", float: "a number", str: "a string", list: "a list"}
            kind = kinds.get(expected, expected.__name__)
            is_number = expected is float and isinstance(value, int) and not isinstance(value, bool)
            if not (isinstance(value, expected) or is_number):
                raise UserError(f"optimizer.options.{option}: expected {kind}, got {shorten(value)}")
    return constructor


class Optimizers(titan.OptimizersContainer):
    """torchtitan's container of optimizers, for any ``OptimizerSpec``.

    Iterating over it yields torch optimizers, one per part of the model; here, the model is the only part.
    torchtitan writes ``fused`` into each parameter group, from the container's ``implementation``.

    Args:
        groups: parameter groups of torch, by their names in logs. Checkpoints hold states by ``param_names``.
    """

    def __init__(
        self, config: OptimizerConfig, groups: Mapping[str, dict[str, Any]], model: nn.Module
    ) -> None:
        self.constructor, self._name, self._groups = optimizer_class(config), config.name, groups
        container = titan.OptimizersContainer.Config(
            implementation="fused" if OPTIMIZERS[config.name].fused else "for-loop",
            optimizer_factory_kwargs_by_name={config.name: config.options},
        )
        with OPTIMIZERS.calling(config.name, "groups"):
            super().__init__(container, model_parts=[model])
        self._first = [_plain_values(group) for optimizer in self for group in optimizer.param_groups]

    def _build_param_groups(  # torchtitan chooses groups by regular expressions
        self, model: nn.Module, _: object, implementation: dict[str, bool]
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, list[str]]]:
        """Returns the groups, with which ``constructor`` is called, and their names in logs."""
        groups = [implementation | group for group in self._groups.values()]
        return {self._name: groups}, {self._name: list(self._groups)}

    def _resolve_optimizer_factory(self, name: str) -> Callable[..., torch.optim.Optimizer]:
        return self.constructor

    def check_states(self) -> None:
        """Raises UserError if steps have changed values that a checkpoint does not hold."""
        states = [state for optimizer in self for state in optimizer.state.values()]
        lost = [name for state in states for name in _plain_values(state)]
        groups = [_plain_values(group) for optimizer in self for group in optimizer.param_groups]
        for first, now in zip(self._first, groups, strict=True):
            lost += [name for name, value in now.items() if name not in first or first[name] != value]
        if lost:
            raise UserError(
                f"optimizer {self._name!r}: expected steps that change only tensors in state[parameter], "
                f"which checkpoints hold, but they change {', '.join(dict.fromkeys(lost))}; store tensors "
                "there, or set checkpoint.interval = 0"
            )

    def state_dict(self) -> dict[str, Any]:
        """Returns the states by name. States that do not exist yet are created as before a first step."""
        fresh = [optimizer for optimizer in self if not optimizer.state]
        states = super().state_dict()
        for state in (state for optimizer in fresh for state in optimizer.state.values()):
            if isinstance(step := state.get("step"), Tensor):
                step.zero_()  # torchtitan creates states by a step without gradients
        return states


def _plain_values(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of a state or a group that are no tensors, without those that a schedule changes."""
    scheduled = ("lr", "initial_lr", "params")
    return {name: v for name, v in values.items() if not isinstance(v, Tensor) and name not in scheduled}


def build_optimizers(config: OptimizerConfig, model: nn.Module) -> Optimizers:
    """Returns the optimizer of all parameters of ``model`` that are not frozen, in up to three groups.

    Vectors, which are the weights of norms and DeltaNet's decays, get no weight decay. Experts form a group
    of their own, because one fused kernel can only update tensors with the same sharding.
    """
    options = {"lr": config.lr, "betas": tuple(config.betas), "eps": config.eps}
    groups: dict[str, dict[str, Any]] = {
        name: {"params": [], "param_names": [], "weight_decay": decay, **options}
        for name, decay in (
            ("vectors", 0.0),
            ("experts", config.weight_decay),
            ("others", config.weight_decay),
        )
    }
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            kind = "vectors" if parameter.ndim == 1 else "experts" if ".experts." in name else "others"
            groups[kind]["params"].append(parameter)
            groups[kind]["param_names"].append(titan.canonical_fqn(name))
    return Optimizers(config, {name: group for name, group in groups.items() if group["params"]}, model)


def build_lr_schedulers(
    config: LRSchedulerConfig, optimizers: Optimizers, steps: int, done: int = 0
) -> titan.LRSchedulersContainer:
    """Returns a scheduler over the steps of the whole run for each optimizer, and sets the learning rates.

    If the warm-up is longer than the run, all steps warm up.

    Args:
        steps: number of steps of the whole run.
        done: number of steps that are done.
    """
    if config.warmup_steps > steps:
        text = "lr_scheduler.warmup_steps: %d is more than the %d steps of the run; all of them warm up"
        logger.warning(text, config.warmup_steps, steps)
    # The schedule moves on when a step is skipped, even the first one.
    warnings.filterwarnings("ignore", "Detected call of .lr_scheduler.step")
    schedulers = titan.LRSchedulersContainer.Config(
        warmup_steps=min(config.warmup_steps, steps),
        decay_type=config.decay_type,
        min_lr_factor=config.min_lr_factor,
    ).build(optimizers=optimizers, training_steps=steps)
    with warnings.catch_warnings():
        # torchtitan's scheduler triggers this warning whenever it is loaded.
        warnings.filterwarnings("ignore", message="To get the last learning rate")
        schedulers.load_state_dict({"last_epoch": done})
    rates = [rate for scheduler in schedulers for rate in scheduler.get_last_lr()]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group, lr in zip(groups, rates, strict=True):
        group["lr"] = lr
    return schedulers


def clip_and_step(optimizers: Iterable[torch.optim.Optimizer], loss: Tensor, max_norm: float) -> Tensor:
    """Clips the gradients to a global 2-norm of ``max_norm``, then steps. Collective for a sharded model.

    If the loss or the norm is not finite, weights and states stay unchanged. A fused optimizer scales the
    gradients and skips the step inside its kernel, without an extra pass over the gradients and without
    waiting for the device. For other optimizers the gradients are scaled first, and the host waits for the
    norm.

    An optimizer is fused if all of its parameter groups have a true option ``fused``, as in PyTorch. Its
    kernel divides gradients by the attribute ``grad_scale``, and skips the step if the attribute
    ``found_inf`` is 1.

    Args:
        optimizers: optimizers of all weights. A framework's wrapper must have the attribute ``optimizer``.
        loss: the step's loss, 0-dim, the same on all ranks.
        max_norm: maximum norm, > 0; inf never clips.
    Returns:
        The norm before clipping, 0-dim, the same on all ranks.
    """
    optimizers = list(optimizers)
    wrapped: list[Any] = [getattr(optimizer, "optimizer", optimizer) for optimizer in optimizers]
    parameters = [p for optimizer in wrapped for group in optimizer.param_groups for p in group["params"]]
    gradients = [p.grad for p in parameters if p.grad is not None]
    local = [g.to_local() if isinstance(g, DTensor) else g for g in gradients]
    norm = _total_norm(local)
    if isinstance(gradients[0], DTensor):  # then all are, and each number is on one rank of every replica
        norm = (all_reduce_sum(norm.square()) / _num_replicas(gradients[0])).sqrt()
    divisor, finite = (norm / max_norm).clamp_min(1.0), (loss + norm).isfinite()
    if all(group.get("fused") for optimizer in wrapped for group in optimizer.param_groups):
        for optimizer in wrapped:
            optimizer.grad_scale = divisor
            optimizer.found_inf = 1.0 - finite.float()
        _step(optimizers)
        for optimizer in wrapped:
            del optimizer.grad_scale, optimizer.found_inf
    elif finite:
        torch._foreach_div_(local, divisor)
        _step(optimizers)
    return norm


def _step(optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Steps optimizers. Errors name an optimizer of the user."""
    for optimizer in optimizers:
        kind = type(getattr(optimizer, "optimizer", optimizer))
        is_known = kind.__module__.partition(".")[0] in ("titan_tree", "torch", "torchao")
        with nullcontext() if is_known else calling(f"optimizer {kind.__name__}"):
            optimizer.step()


def _total_norm(tensors: list[Tensor]) -> Tensor:
    """Returns the 2-norm of all numbers, computed in fp32 or higher also if some tensors are bf16."""
    norms: list[Tensor] = []
    for dtype in dict.fromkeys(tensor.dtype for tensor in tensors):  # one kernel reads tensors of one dtype
        alike = [tensor for tensor in tensors if tensor.dtype == dtype]
        norms += torch._foreach_norm(alike, 2, torch.promote_types(dtype, torch.float32))
    return torch.linalg.vector_norm(torch.stack(norms))


def _num_replicas(tensor: DTensor) -> int:
    """Returns how many ranks hold each number of a sharded tensor."""
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())
