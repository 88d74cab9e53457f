"""DeviceClock: the seconds between two moments on a device, without making the host wait for the device."""

from __future__ import annotations

import time
from typing import Any

import torch

Mark = torch.cuda.Event | float  # a moment: on a GPU, or of the host's clock in seconds


class DeviceClock:
    """Marks moments on a device, and returns the seconds between them.

    A mark on a GPU is a CUDA event in the current stream. The GPU reaches it after all work launched before.
    On other devices, a mark is the time of the host.
    """

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"

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
