"""titan-tree doctor on a GPU: the kernels that "auto" chooses pass its self-test."""

import pytest
import torch

from titan_tree.cli.doctor import machine, numerics

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", numerics.KERNEL_SIZES)
def test_the_self_test_accepts_the_kernels(family):
    device, dtype = numerics.training_device()
    assert (device.type, dtype) == ("cuda", torch.bfloat16)
    (finding,) = numerics._test(family, device, dtype)
    assert finding.ok, finding.value


def test_each_gpu_and_each_backend_has_a_finding():
    names = [finding.name for finding in machine.machine()]
    assert "GPU 0" in names
    assert all(finding.ok is not False for finding in numerics.backends())
