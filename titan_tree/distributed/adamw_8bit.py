"""AdamW8bit: AdamW whose moments take 8 bits per number."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import ParamsT

from titan_tree.components.adamw_kernel import BLOCK, Moment, adamw_
from titan_tree.distributed import ao
from titan_tree.distributed.optimizers import OptimizerSpec

MIN_QUANTIZED = 4096  # numbers of a shard


class AdamW8bit(torch.optim.Optimizer):
    """AdamW with moments in 8 bits (Dettmers et al., arXiv:2110.02861), for bf16 or fp32 weights.

    Each block of 256 moments shares one scale, so both moments take 2.03 bytes per parameter instead of 8. A
    block lies within the shard of one rank. A shard has moments in the dtype of the weights if it has fewer
    than 4,096 numbers, or if its size is not a multiple of 256.

    The optimizer is fused, see ``clip_and_step``: the host never waits for the device. The state of a weight
    is what torchao's AdamW8bit stores, but "step" lies on the weight's device.

    Args:
        params: weights, or groups of weights with options of their own. Weights may be DTensors.
    Raises:
        UserError: torchao is missing, which defines the class of quantized moments.
    """

    grad_scale: Tensor | None = None
    found_inf: Tensor | None = None

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

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Updates all weights that have a gradient."""
        assert closure is None, "AdamW8bit does not support closures"
        for group in self.param_groups:
            weights = [weight for weight in group["params"] if weight.grad is not None]
            if not weights:
                continue
            states = [self._state(weight) for weight in weights]
            scalars = self._count_step([state["step"] for state in states], group["betas"])
            options = {name: group[name] for name in ("lr", "betas", "eps", "weight_decay")}
            for weight, state, row in zip(weights, states, scalars.unbind(), strict=True):
                first, second = self._moment(state["exp_avg"]), self._moment(state["exp_avg_sq"])
                adamw_(_local(weight), _local(weight.grad), first, second, row, **options)
            torch.autograd.graph.increment_version(weights)  # autograd does not see what a kernel writes

    def _count_step(self, steps: list[Tensor], betas: tuple[float, float]) -> Tensor:
        """Counts the step unless it is skipped. Returns the ``scalars`` of ``adamw_``, a row per weight."""
        one = torch.ones_like(steps[0])
        grad_scale = one if self.grad_scale is None else self.grad_scale
        found_inf = 1 - one if self.found_inf is None else self.found_inf
        torch._foreach_add_(
            steps, [1 - found_inf] * len(steps)
        )  # one tensor for all would make the host wait
        t = torch.stack(steps).double()  # in fp32, 1 - 0.999 has a relative error of 1e-5
        corrections = 1 - betas[0] ** t, (1 - betas[1] ** t).sqrt()
        return torch.stack([*corrections, grad_scale.expand_as(t), found_inf.expand_as(t)], 1).float()

    def _state(self, weight: Tensor) -> dict[str, Tensor]:
        """Returns the state of a weight. Its first step creates it."""
        state = self.state[weight]
        if not state:
            state["step"] = torch.zeros((), dtype=torch.float32, device=_local(weight).device)
            state["exp_avg"] = self._zeros(weight, signed=True)
            state["exp_avg_sq"] = self._zeros(weight, signed=False)
        return state

    def _zeros(self, weight: Tensor, signed: bool) -> Tensor:
        local = _local(weight)
        if _is_quantized(local.numel()):
            zeros = self._quantized.zeros(local.shape, signed, BLOCK, local.device, dtype=local.dtype)
        else:
            zeros = torch.zeros_like(local)
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

    def _moment(self, moment: Tensor) -> Moment:
        local: Any = _local(moment)
        if isinstance(local, self._quantized):
            return Moment(local.codes, local.scale, local.qmap)
        return Moment(local)


def _is_quantized(numbers: int) -> bool:
    """Returns whether the moments of a shard with so many numbers take 8 bits each."""
    return numbers >= MIN_QUANTIZED and numbers % BLOCK == 0


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _import_class() -> type[AdamW8bit]:
    ao.state_8bit()  # raises if torchao is missing
    return AdamW8bit


def _state_bytes(numbers: int) -> float:
    return 2 * (numbers + 4 * numbers // BLOCK) if _is_quantized(numbers) else 8 * numbers


# torchao can split the moments along the first dimension only.
ADAMW_8BIT = OptimizerSpec(
    import_class=_import_class, state_bytes=_state_bytes, fused=True, reshards_any_dim=False
)
