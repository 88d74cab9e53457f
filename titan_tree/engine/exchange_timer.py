"""ExchangeTimer: how long FSDP2 keeps a rank's kernels waiting in a step."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_tree.engine.device_clock import DeviceClock, Mark

# The methods in which FSDP2 gathers weights and sums gradients. None of them calls another one.
EXCHANGES = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")


class ExchangeTimer:
    """Measures how long FSDP2 keeps a rank's kernels waiting between ``start`` and ``stop``.

    FSDP2 gathers weights and sums gradients beside the kernels. The timer counts only the time in which the
    stream of the kernels waits for that, or copies weights and gradients. It includes waits for slower ranks.

    Args:
        model: sharded by FSDP2. A plain model exchanges nothing.
        device: the model's device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._clock = DeviceClock(device)
        self._is_on = False
        self._marks: list[Mark] = []  # the start and the end of each exchange
        for module in model.modules():
            weights: Any = (
                module._get_fsdp_state()._fsdp_param_group if isinstance(module, FSDPModule) else None
            )
            for name in EXCHANGES if weights else ():
                setattr(weights, name, self._timed(getattr(weights, name)))

    def _timed(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(exchange)
        def timed(*args: Any, **options: Any) -> Any:
            self._mark()
            result = exchange(*args, **options)
            self._mark()
            return result

        return timed

    def _mark(self) -> None:
        if self._is_on:
            self._marks.append(self._clock.mark())

    def start(self) -> None:
        """Measures all exchanges from now on. Forgets those before."""
        self._marks, self._is_on = [], True

    def stop(self) -> None:
        self._is_on = False

    def seconds(self) -> float:
        """Returns the seconds of all measured exchanges. The device must have finished them."""
        return sum(map(self._clock.seconds, self._marks[::2], self._marks[1::2]))
