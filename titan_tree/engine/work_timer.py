"""WorkTimer: how long the forward passes of a rank take without the waits for other ranks.

FSDP2 gathers the weights of a block before the block runs. The device then waits for the slowest rank. Hooks
around that moment measure the wait, and the timer subtracts it. The backward pass is not measured: its waits
are inside autograd. Its work is nearly proportional to that of the forward pass.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import nn

Mark = torch.cuda.Event | float  # a moment: on the device, or of the host's clock in seconds


class WorkTimer:
    """Measures forward passes between ``start`` and ``stop``.

    Args:
        model: sharded by FSDP2, whose hooks must be in place. Its ``layers`` are the units of sharding.
        device: where the model is. Moments on a GPU are CUDA events, so that nothing waits for the device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._is_on = False
        # For each pass: its start, the start and the end of each wait, and its end.
        self._passes: list[list[Mark]] = []
        # FSDP2's hooks come first in the model, so its own weights are there when the pass starts.
        model.register_forward_pre_hook(lambda *_: self._begin())
        model.register_forward_hook(lambda *_: self._mark())
        for block in model.get_submodule("layers").children():
            block.register_forward_pre_hook(lambda *_: self._mark(), prepend=True)
            block.register_forward_pre_hook(lambda *_: self._mark())

    def start(self) -> None:
        """Measures all forward passes from now on. Forgets those before."""
        self._passes, self._is_on = [], True

    def stop(self) -> list[float]:
        """Returns the seconds of work of each pass since ``start``. On a GPU all of them must have ended."""
        self._is_on = False
        return [self._seconds(marks) for marks in self._passes]

    def _begin(self) -> None:
        if self._is_on:
            self._passes.append([])
            self._mark()

    def _mark(self) -> None:
        if not self._is_on:
            return
        mark: Any = time.perf_counter()
        if self._is_cuda:
            mark = torch.cuda.Event(enable_timing=True)
            mark.record()
        self._passes[-1].append(mark)

    def _seconds(self, marks: list[Mark]) -> float:
        begin, *waits, end = marks
        waited = sum(map(self._between, waits[::2], waits[1::2]))
        return self._between(begin, end) - waited

    def _between(self, begin: Any, end: Any) -> float:
        return begin.elapsed_time(end) / 1e3 if self._is_cuda else end - begin
