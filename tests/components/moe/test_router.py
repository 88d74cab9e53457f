"""The router's logits as products of bf16 numbers, against float64."""

import pytest
import torch

from tests.support.oracle import relative_error
from titan_tree.components.moe.kernels import router_logits

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_logits_are_as_exact_as_those_of_fp32(dtype, device):
    x, weight = torch.randn(300, 64).to(device, torch.bfloat16), torch.randn(20, 64).to(device, dtype)
    got = router_logits(x, weight)
    assert got.dtype == torch.float32
    assert relative_error(got, x.double() @ weight.double().t()) < 1e-6


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_gradients_are_as_exact_as_their_rounding(compiled, device):
    """Rows of x and of the weight come in pairs, so 255 / 256 of each gradient cancel.

    If the gradient of the logits were rounded to bf16, the errors would be 68 %.
    """
    x, weight = (torch.randn(n, 64).repeat_interleave(2, 0).to(device, torch.bfloat16) for n in (150, 10))
    sign = torch.tensor([1, -1 - 2**-8], device=device)
    grad = torch.randn(150, 10, device=device).repeat_interleave(2, 0).repeat_interleave(2, 1)
    grad = grad * sign.repeat(150)[:, None] * sign.repeat(10)

    def weighted_sum(x, weight):
        return (router_logits(x, weight) * grad).sum()

    function = torch.compile(weighted_sum, fullgraph=True) if compiled else weighted_sum
    got = torch.autograd.grad(function(x.requires_grad_(), weight.requires_grad_()), [x, weight])
    want = grad.double() @ weight.double(), grad.double().t() @ x.double()
    for mine, exact in zip(got, want, strict=True):
        assert mine.dtype == torch.bfloat16
        assert relative_error(mine, exact) < 4e-3
