"""DeviceClock: the seconds of a device's work, and of its waits for FSDP2, without making the host wait."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

Mark = torch.cuda.Event | float  # a moment: on a GPU, or of the host's clock in seconds
# The methods in which FSDP2 gathers weights and sums gradients. None of them calls another one.
EXCHANGES = ("unshard", "wait_for_unshard", "post_backward", "finalize_backward")


class DeviceClock:
    """Marks moments on a device, and returns the seconds between them.

    A mark on a GPU is a CUDA event in the current stream. The GPU reaches it after all work launched before.
    On other devices, a mark is the time of the host.

    With a model, the clock also measures *exchanges* between ``start`` and ``stop``. FSDP2 gathers weights
    and sums gradients beside the kernels. The clock counts only the time in which the stream of the kernels
    waits for that, or copies weights and gradients. It includes waits for slower ranks.

    Args:
        device: the device whose moments are marked.
        model: sharded by FSDP2. None, or a plain model: there are no exchanges.
    """

    def __init__(self, device: torch.device, model: nn.Module | None = None) -> None:
        self._is_cuda = device.type == "cuda"
        self._is_on = False
        self._exchanges: list[Mark] = []  # the start and the end of each
        for module in model.modules() if model is not None else ():
            if isinstance(module, FSDPModule) and (weights := module._get_fsdp_state()._fsdp_param_group):
                for name in EXCHANGES:
                    setattr(weights, name, self._timed(getattr(weights, name)))

    def mark(self) -> Mark:
        """Returns a mark of the current moment. The host does not wait."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def seconds(self, begin: Any, end: Any) -> float:
        """Returns the seconds between two marks. The device must have reached both."""
        seconds: float = begin.elapsed_time(end) / 1e3 if self._is_cuda else end - begin
        return seconds

    def start(self) -> None:
        """Measures all exchanges from now on. Forgets those before."""
        self._exchanges, self._is_on = [], True

    def stop(self) -> None:
        self._is_on = False

    def exchange_seconds(self) -> float:
        """Returns the seconds of all measured exchanges. The device must have finished them."""
        return sum(map(self.seconds, self._exchanges[::2], self._exchanges[1::2]))

    def _timed(self, exchange: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(exchange)
        def timed(*args: Any, **options: Any) -> Any:
            self._mark_exchange()
            result = exchange(*args, **options)
            self._mark_exchange()
            return result

        return timed

    def _mark_exchange(self) -> None:
        if self._is_on:
            self._exchanges.append(self.mark())
