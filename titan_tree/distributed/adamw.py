"""AdamW with fp32 or 8-bit moments: one kernel, which reads fp32 or bf16 gradients."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from titan_tree.components.adamw_kernel import BLOCK, Moment, adamw_
from titan_tree.distributed import ao
from titan_tree.distributed.settings import OptimizerSpec

MIN_QUANTIZED = 4096  # numbers of a shard


class KernelAdamW(torch.optim.Optimizer):
    """Base class of optimizers that update weights by ``adamw_``. Weights may be DTensors.

    The optimizers are fused, see ``clip_and_step``: the host never waits for the device. Gradients of weights
    that are not sharded may have any dtype, so ``cast_weights`` does not cast them.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        for weight in self.param_groups[-1]["params"]:
            if not isinstance(weight, DTensor):  # FSDP2 sums gradients in the dtype of the weight
                weight.grad_dtype = None

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Updates all weights that have a gradient. Returns what ``closure``, which runs before, returns."""
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        self._update()
        return result

    def _update(self) -> None:
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            states = [self._state(weight) for weight in weights]
            scalars = self._count_step([state["step"] for state in states], group["betas"])
            options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            adamw_(
                _local(weights),
                _local([weight.grad for weight in weights]),
                self._moments(_local([state["exp_avg"] for state in states])),
                self._moments(_local([state["exp_avg_sq"] for state in states])),
                scalars,
                **options,
            )
            torch.autograd.graph.increment_version(weights)  # autograd does not see what a kernel writes

    def _count_step(self, steps: list[Tensor], betas: tuple[float, float]) -> Tensor:
        """Counts the step unless it is skipped. Returns the ``scalars`` of ``adamw_``, a row per weight."""
        one = torch.ones_like(steps[0])
        grad_scale = one if self.grad_scale is None else self.grad_scale
        found_inf = 1 - one if self.found_inf is None else self.found_inf
        increments = [1 - found_inf] * len(steps)  # one tensor for all would make the host wait
        torch._foreach_add_(steps, increments)
        t = torch.stack(steps).double()  # in fp32, 1 - 0.999 has a relative error of 1e-5
        corrections = 1 - betas[0] ** t, (1 - betas[1] ** t).sqrt()
        return torch.stack([*corrections, grad_scale.expand_as(t), found_inf.expand_as(t)], 1).float()

    def _state(self, weight: Tensor) -> dict[str, Tensor]:
        """Returns the state of a weight. Its first step creates it."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=weight.device)
            state["exp_avg"] = self._zeros(weight, signed=True)
            state["exp_avg_sq"] = self._zeros(weight, signed=False)
        return state

    def _zeros(self, weight: Tensor, signed: bool) -> Tensor:
        return torch.zeros_like(weight)

    def _moments(self, tensors: list[Any]) -> list[Moment]:
        return [Moment(x) for x in tensors]


class AdamW(KernelAdamW, torch.optim.AdamW):
    """torch's AdamW with the same options and states, which updates weights on a GPU by ``adamw_``.

    torch's fused kernel also writes clipped gradients back, and needs them in the dtype of the weights. It
    still updates weights on a CPU, and all weights if ``amsgrad`` or ``maximize`` is true.
    """

    def _update(self) -> None:
        weights = [weight for group in self.param_groups for weight in group["params"]]
        is_fused = all(
            group["fused"] and not (group["amsgrad"] or group["maximize"]) for group in self.param_groups
        )
        if is_fused and all(map(_has_kernel, weights)):
            super()._update()
            return
        for weight in weights:
            if weight.grad is not None:
                weight.grad = weight.grad.to(weight.dtype)
        inspect.unwrap(torch.optim.AdamW.step)(self)  # its wrappers would run hooks of steps once more


class AdamW8bit(KernelAdamW):
    """AdamW with moments in 8 bits (Dettmers et al., arXiv:2110.02861), for bf16 or fp32 weights.

    Each block of 256 moments shares one scale, so both moments take 2.03 bytes per parameter instead of 8. A
    block lies within the shard of one rank. A shard has moments in the dtype of the weights if it has fewer
    than 4,096 numbers, or if its size is not a multiple of 256.

    The state of a weight is what torchao's AdamW8bit stores, but "step" lies on the weight's device.

    Args:
        params: weights, or groups of weights with options of their own. Weights may be DTensors.
    Raises:
        UserError: torchao is missing, which defines the class of quantized moments.
    """

    def __init__(
        self,
        params: ParamsT,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        self._quantized = ao.state_8bit()
        # "fused": see ``clip_and_step``; torch.optim.Optimizer also loads steps onto the weights' device.
        options = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "fused": True}
        super().__init__(params, options)

    def _zeros(self, weight: Tensor, signed: bool) -> Tensor:
        (local,) = _local([weight])
        if not _is_quantized(local.numel()):
            return super()._zeros(weight, signed)
        zeros: Tensor = self._quantized.zeros(local.shape, signed, BLOCK, local.device, dtype=local.dtype)
        if not isinstance(weight, DTensor):
            return zeros
        return DTensor.from_local(
            zeros,
            weight.device_mesh,
            weight.placements,
            run_check=False,
            shape=weight.shape,  # shards may have different sizes
            stride=weight.stride(),
        )

    def _moments(self, tensors: list[Any]) -> list[Moment]:
        quantized = self._quantized
        return [Moment(x.codes, x.scale, x.qmap) if isinstance(x, quantized) else Moment(x) for x in tensors]


def _local(tensors: list[Tensor]) -> list[Tensor]:
    """Replaces each DTensor by its shard on this rank."""
    return [x.to_local() if isinstance(x, DTensor) else x for x in tensors]


def _has_kernel(weight: Tensor) -> bool:
    return weight.is_cuda and weight.dtype in (torch.float32, torch.bfloat16) and weight.is_contiguous()


def _is_quantized(numbers: int) -> bool:
    """Returns whether the moments of a shard with so many numbers take 8 bits each."""
    return numbers >= MIN_QUANTIZED and numbers % BLOCK == 0


def _import_class() -> type[AdamW8bit]:
    ao.state_8bit()  # raises if torchao is missing
    return AdamW8bit


def _state_bytes(numbers: int) -> float:
    return 2 * (numbers + 4 * numbers // BLOCK) if _is_quantized(numbers) else 8 * numbers


ADAMW = OptimizerSpec(import_class=lambda: AdamW, fused=True)
# torchao can split the moments along the first dimension only.
ADAMW_8BIT = OptimizerSpec(
    import_class=_import_class, state_bytes=_state_bytes, fused=True, reshards_any_dim=False
)
