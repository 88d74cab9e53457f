"""Mixture of experts on a GPU: grouped products in bf16, replayed experts and compiled graphs."""

import pytest
import torch

from tests.support.oracle import (
    relative_error,
)
from titan_tree.components.moe import experts
from titan_tree.components.moe.layer import MoE

pytestmark = pytest.mark.gpu


def mixture(num_tokens):
    """Returns a layer in bf16, its input and the gradient of its output."""
    generator = torch.Generator("cuda").manual_seed(num_tokens)
    moe = MoE(256, 128, 32, 4, norm_topk_prob=True).cuda()
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.normal_(0, 0.05, generator=generator)
    x, dy = (torch.randn(num_tokens, 256, device="cuda", generator=generator).bfloat16() for _ in range(2))
    return moe.bfloat16(), x.requires_grad_(), dy


def results(moe, x, dy, forced_experts=None):
    """Returns the output, then the gradients of x, the router and the experts."""
    y, *_ = moe(x, torch.ones(len(x), device="cuda"), forced_experts)
    return [y.detach(), *torch.autograd.grad(y, [x, *moe.parameters()], dy)]


@pytest.mark.parametrize("num_tokens", [1, 3, 1000])  # with 1 or 3, most experts have no token
def test_grouped_products_equal_one_product_per_expert(num_tokens, monkeypatch):
    arguments = mixture(num_tokens)
    got = results(*arguments)
    with monkeypatch.context() as patch:
        patch.setattr(experts, "grouped_linear", experts.linear_by_expert)
        patch.setattr(experts, "grouped_outer", experts.outer_by_expert)
        want = results(*arguments)
    for mine, other in zip(got, want, strict=True):
        assert relative_error(mine, other) < 5e-3
    assert all(map(torch.equal, got, results(*arguments)))


def test_never_waits_for_the_gpu():
    arguments = mixture(500)
    results(*arguments)
    torch.cuda.set_sync_debug_mode("error")
    results(*arguments)


def test_replayed_experts_give_the_same_bits_without_waiting_for_the_gpu():
    """This also holds without the bias that made the choice, and if some rows were not recorded."""
    moe, x, dy = mixture(500)
    moe.e_score_correction_bias = torch.linspace(0, 0.1, 32, device="cuda")
    want, (*_, chosen) = results(moe, x, dy), moe(x, torch.ones(500, device="cuda"))
    gaps = chosen.clone()
    gaps[::3] = -1
    torch.cuda.set_sync_debug_mode("error")
    with_gaps = results(moe, x, dy, gaps)
    moe.e_score_correction_bias = None
    got = results(moe, x, dy, chosen)
    unbiased = results(moe, x, dy)
    torch.cuda.set_sync_debug_mode("default")
    assert all(map(torch.equal, got, want))
    assert all(map(torch.equal, with_gaps, want))
    assert not torch.equal(unbiased[0], want[0])


def test_one_compiled_graph_serves_all_sizes():
    torch._dynamo.reset()
    moe, *_ = mixture(2)
    counted = torch._dynamo.testing.CompileCounterWithBackend("inductor")
    compiled = torch.compile(moe, backend=counted, fullgraph=True, dynamic=True)
    for num_tokens in (700, 50, 3):
        _, x, dy = mixture(num_tokens)
        for mine, other in zip(results(compiled, x, dy), results(moe, x, dy), strict=True):
            assert relative_error(mine, other) < 1e-2
    assert counted.frame_count == 1
