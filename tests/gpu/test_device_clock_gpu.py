"""Marks on a GPU measure the GPU's time, not the host's."""

import time

import pytest
import torch

from titan_tree.engine.device_clock import DeviceClock

pytestmark = pytest.mark.gpu


def test_seconds_are_those_of_the_gpu_and_the_host_does_not_wait():
    clock = DeviceClock(torch.device("cuda"))
    torch.cuda._sleep(1)  # starts the device
    torch.cuda.synchronize()
    started = time.perf_counter()
    marks = [clock.mark()]
    for cycles in (200_000_000, 400_000_000):
        torch.cuda._sleep(cycles)
        marks.append(clock.mark())
    launched = time.perf_counter() - started
    torch.cuda.synchronize()
    waited = time.perf_counter() - started
    first, second = clock.seconds(marks[0], marks[1]), clock.seconds(marks[1], marks[2])
    assert second == pytest.approx(2 * first, rel=0.2)
    assert first + second == pytest.approx(waited, rel=0.05)
    assert launched < first / 10
