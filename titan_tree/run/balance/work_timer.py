"""WorkTimer: how long the forward passes of a rank take without the waits for other ranks.

Before a block runs, FSDP2 gathers its weights. The device then waits for the slowest rank. The timer measures
and subtracts these waits. The backward pass is not measured: its work is nearly proportional to that of the
forward pass.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from titan_tree.engine.device_clock import DeviceClock, Mark


class WorkTimer:
    """Measures forward passes between ``start`` and ``stop``.

    Args:
        model: sharded by FSDP2. Its ``layers`` are the units of sharding.
        device: the model's device.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._clock = DeviceClock(device)
        self._is_on = self._is_in_pass = False
        # For each pass: its start, the start and the end of each wait, and its end.
        self._passes: list[list[Mark]] = []
        # FSDP2's hooks of the model come first, so the model's own weights are there when the pass starts.
        model.register_forward_pre_hook(lambda *_: self._begin())
        model.register_forward_hook(lambda *_: self._end())
        for block in model.get_submodule("layers").children():
            assert isinstance(block, FSDPModule)
            self._measure_waits(block)

    def _measure_waits(self, block: FSDPModule) -> None:
        # Hooks of the block itself would be compiled into its graph.
        weights: Any = block._get_fsdp_state()._fsdp_param_group
        wait = weights.wait_for_unshard

        def timed_wait() -> None:
            self._mark()
            wait()
            self._mark()

        weights.wait_for_unshard = timed_wait

    def start(self) -> None:
        """Measures all forward passes from now on. Forgets those before."""
        self._passes, self._is_on = [], True

    def stop(self) -> None:
        self._is_on = False

    def seconds(self) -> list[float]:
        """Returns the work of each measured pass. The device must have finished them."""
        return [self._seconds(marks) for marks in self._passes]

    def _begin(self) -> None:
        if self._is_on:
            self._is_in_pass = True
            self._passes.append([])
            self._mark()

    def _end(self) -> None:
        self._mark()
        self._is_in_pass = False

    def _mark(self) -> None:
        if self._is_in_pass:  # FSDP2 gathers weights in the backward pass, too
            self._passes[-1].append(self._clock.mark())

    def _seconds(self, marks: list[Mark]) -> float:
        begin, *waits, end = marks
        waited = sum(map(self._clock.seconds, waits[::2], waits[1::2]))
        return self._clock.seconds(begin, end) - waited
