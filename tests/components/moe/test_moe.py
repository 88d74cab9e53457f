"""A mixture of experts against a loop over tokens, and the router losses against their definitions."""

import copy

import pytest
import torch
import torch.nn.functional as F
from transformers.models.qwen3_moe.modeling_qwen3_moe import load_balancing_loss_func

from tests.support.cases import for_each
from tests.support.moe import moe_by_token, small_moe
from titan_tree.components.moe import experts as module
from titan_tree.components.moe.experts import (
    grouped_linear,
    grouped_mm,
    linear_by_expert,
    sort_copies,
)
from titan_tree.components.moe.layer import MoE
from titan_tree.components.moe.routing import RouterLoss, Routing, router_metrics
from titan_tree.errors import UserError


@for_each("shared", [False, True])
@for_each("norm_topk_prob", [False, True])
@for_each(("num_tokens", "top_k"), [(1, 1), (2, 2), (23, 3), (9, 5)])
def test_equals_a_loop_over_tokens(num_tokens, top_k, norm_topk_prob, shared):
    """Values and all gradients are equal in float64. With one token, some experts are idle."""
    made = small_moe(norm_topk_prob, shared, top_k)
    x = torch.randn(num_tokens, 8, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn_like(x)
    inputs = [x, *made.parameters()]
    want = moe_by_token(made, x)
    got, *_ = made(x, torch.ones(num_tokens))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    theirs = torch.autograd.grad((want * upstream).sum(), inputs, materialize_grads=True, allow_unused=True)
    ours = torch.autograd.grad((got * upstream).sum(), inputs)  # zeros for idle experts, not None
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-11, atol=1e-12)


def test_copies_are_sorted_by_expert_and_then_by_token():
    expert = torch.rand(20, 7).argsort(1)[:, :3]
    index = sort_copies(expert)
    want = sorted(range(60), key=lambda copy: (expert.flatten()[copy], copy))
    assert index.flatten().argsort().tolist() == want
    assert sort_copies(expert[:0]).shape == (0, 3)


def test_forced_experts_whose_probabilities_underflow_have_weights_and_gradients():
    """The logits of two experts are 200 below the others, so their probabilities are 0 in float32."""
    exact = small_moe(norm_topk_prob=True, shared=False, top_k=2)
    with torch.no_grad():
        exact.gate.weight.mul_(0.1)
        exact.gate.weight[:, 0] = torch.tensor([0.0, -2.0, -4.0, -200.0, -200.5])
    made = copy.deepcopy(exact).float()
    x = torch.randn(6, 8, dtype=torch.float64)
    x[:, 0] = 1.0
    forced = torch.tensor([[3, 4]] * 3 + [[4, 3]] * 2 + [[-1, -1]], dtype=torch.int16)

    # The definition, with logarithms of probabilities.
    chosen = torch.where(forced >= 0, forced.long(), torch.tensor([0, 1]))
    log_p = (x @ exact.gate.weight.t()).log_softmax(-1).gather(1, chosen)
    weight = (log_p - log_p.logsumexp(-1, keepdim=True)).exp()
    gate_up, down = exact.experts.gate_up_proj[chosen], exact.experts.down_proj[chosen]
    gate, up = torch.einsum("nkmd,nd->nkm", gate_up, x).chunk(2, dim=-1)
    want = torch.einsum("nkdm,nkm,nk->nd", down, F.silu(gate) * up, weight)

    got = made(x.float(), torch.ones(6), forced)[0]
    torch.testing.assert_close(got, want.float(), rtol=1e-4, atol=1e-4)
    upstream = torch.randn_like(want)
    theirs = torch.autograd.grad((want * upstream).sum(), list(exact.parameters()))
    ours = torch.autograd.grad((got * upstream.float()).sum(), list(made.parameters()))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other.float(), rtol=1e-3, atol=1e-4)


def test_routing_counts_tokens_and_paths():
    made = small_moe(top_k=2)
    x = torch.randn(11, 8, dtype=torch.float64)
    num_paths = torch.tensor([3.0, 1, 0, 2, 1, 1, 4, 0, 1, 1, 2])
    routing = made(x, num_paths)[1]
    logits = x @ made.gate.weight.t()
    # Repeat every token once per path through it.
    flat = logits.repeat_interleave(num_paths.long(), dim=0)
    chosen = F.one_hot(flat.topk(2).indices, 5).sum((0, 1)).double()
    tokens = F.one_hot(logits[num_paths > 0].topk(2).indices, 5).sum((0, 1)).double()
    want = Routing(tokens, chosen, flat.softmax(-1).sum(0), flat.logsumexp(-1).square().sum())
    torch.testing.assert_close(routing, want)


def test_gradients_of_the_routed_sums():
    """Gradients are checked numerically for every sum that a router loss reads."""
    made = small_moe()
    x = torch.randn(4, 8, dtype=torch.float64)
    weight = made.gate.weight.detach().clone().requires_grad_()

    def sums(weight, x):
        out, routing, _ = torch.func.functional_call(made, {"gate.weight": weight}, (x, torch.ones(4)))
        return out, routing.probability, routing.squared_lse

    assert torch.autograd.gradcheck(sums, (weight, x.requires_grad_()))


def test_the_operator_passes_opcheck():
    x, weight = torch.randn(7, 4, requires_grad=True), torch.randn(3, 5, 4, requires_grad=True)
    ends = torch.tensor([2, 2, 7], dtype=torch.int32)
    torch.library.opcheck(linear_by_expert, (x, weight, ends))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_grouped_kernel_equals_expert_by_expert(dtype):
    """The GPU's product, run on a CPU, gives the same rows and zero gradients for an idle expert."""
    x, weight = torch.randn(20, 32, dtype=dtype), torch.randn(4, 48, 32, dtype=dtype)
    ends, upstream = torch.tensor([5, 5, 13, 20], dtype=torch.int32), torch.randn(20, 48, dtype=dtype)
    results = []
    for function in (grouped_mm, linear_by_expert):
        inputs = [t.detach().clone().requires_grad_() for t in (x, weight)]
        out = function(*inputs, ends)
        results.append([out, *torch.autograd.grad(out, inputs, upstream)])
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for got, want in zip(*results, strict=True):
        assert (got - want).norm() <= tolerance * want.norm()
    assert not results[0][2][1].any()


def test_the_grouped_kernel_runs_for_bf16_on_a_gpu_only(monkeypatch):
    calls = []
    monkeypatch.setattr(module, "grouped_mm", lambda *_: calls.append("grouped"))
    monkeypatch.setattr(module, "linear_by_expert", lambda *_: calls.append("by expert"))

    class OnGPU:
        is_cuda = True

        def __init__(self, dtype):
            self.dtype = dtype

    for x in (OnGPU(torch.bfloat16), OnGPU(torch.float32), torch.empty(1), torch.empty(1).bfloat16()):
        grouped_linear(x, None, None)
    assert calls == ["grouped", "by expert", "by expert", "by expert"]
    with pytest.raises(UserError, match=r"multiples of 8 in bfloat16 .* got a matrix with sides 8 and 12"):
        grouped_mm(torch.empty(3, 8), torch.empty(2, 12, 8), None)


def test_bf16_errors_are_at_the_level_of_its_rounding():
    exact = small_moe(dtype=torch.float64)
    x = torch.randn(50, 8, dtype=torch.float64)
    low = copy.deepcopy(exact).bfloat16()
    rounded = copy.deepcopy(low).double()  # the same weights, so the same experts
    x = x.bfloat16()
    got, want = low(x, torch.ones(50))[0], rounded(x.double(), torch.ones(50))[0]
    assert got.dtype == torch.bfloat16
    assert (got.double() - want).norm() < 1e-2 * want.norm()


def test_every_run_gives_the_same_bits():
    made = small_moe(dtype=torch.float32)
    x = torch.randn(40, 8, requires_grad=True)
    runs = []
    for _ in range(2):
        out, routing, _ = made(x, torch.ones(40))
        loss = out.square().sum() + routing.probability.square().sum() + routing.squared_lse
        runs.append([out, *routing, *torch.autograd.grad(loss, [x, *made.parameters()])])
    assert all(torch.equal(first, second) for first, second in zip(*runs, strict=True))


@pytest.mark.slow
def test_one_compiled_graph_serves_all_sizes():
    made = small_moe(dtype=torch.float32)
    compiled = copy.deepcopy(made)
    torch._dynamo.reset()
    counted = torch._dynamo.testing.CompileCounterWithBackend("aot_eager_decomp_partition")
    compiled.compile(backend=counted, fullgraph=True, dynamic=True)
    for num_tokens in (5, 40, 2, 17):
        x, num_paths = torch.randn(num_tokens, 8), torch.rand(num_tokens)
        results = []
        for each in (made, compiled):
            each.zero_grad()
            out, routing, _ = each(x, num_paths)
            (out.square().sum() + routing.probability.square().sum() + routing.squared_lse).backward()
            results.append([out, *routing, *(p.grad for p in each.parameters())])
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-5)
    assert counted.frame_count == 1


# Router losses.


def random_routing(num_tokens, num_paths, seed=0, num_layers=3, num_experts=6, top_k=2):
    """Returns the logits of each layer, and their routing."""
    generator = torch.Generator().manual_seed(seed)
    logits = [torch.randn(num_tokens, num_experts, generator=generator).double() for _ in range(num_layers)]
    layers = []
    for layer in logits:
        layer.requires_grad_()
        made = MoE(num_experts, 8, num_experts, top_k, True).double()  # its router returns x as logits
        with torch.no_grad():
            made.gate.weight.copy_(torch.eye(num_experts))
            for weight in made.experts.parameters():
                weight.zero_()
        layers.append(made(layer, num_paths)[1])
    return logits, Routing(*map(torch.stack, zip(*layers, strict=True)))


def test_the_balance_loss_equals_that_of_a_batch_of_the_paths():
    """The expected loss is transformers', on a batch in which every token occurs once per path."""
    num_paths = torch.tensor([4.0, 1, 3, 1, 2, 0, 1, 1])
    logits, routing = random_routing(8, num_paths)
    flat = tuple(layer.repeat_interleave(num_paths.long(), 0) for layer in logits)
    want = load_balancing_loss_func(flat, 6, 2).double()
    total = int(num_paths.sum())
    got = RouterLoss(balance=0.5)(routing, routing.chosen.sum(0), total, total)
    assert got.item() == pytest.approx(0.5 * want.item(), rel=1e-6)
    assert router_metrics(routing, total)["router_balance"].item() == pytest.approx(want.item(), rel=1e-6)
    ours, theirs = (torch.autograd.grad(loss, logits) for loss in (got, 0.5 * want))
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-5, atol=1e-8)
    # Counting every distinct token once gives a different number.
    _, once = random_routing(8, torch.ones(8))
    unweighted = RouterLoss(balance=0.5)(once, once.chosen.sum(0), 8, 8)
    assert abs(unweighted.item() - got.item()) > 1e-2 * got.item()


def test_the_z_loss_is_a_mean_over_paths_and_layers():
    num_paths = torch.tensor([2.0, 1, 0, 3])
    logits, routing = random_routing(4, num_paths)
    flat = torch.cat([layer.repeat_interleave(num_paths.long(), 0) for layer in logits])
    got = RouterLoss(z=0.25)(routing, routing.chosen.sum(0), 6, 6)
    want = flat.logsumexp(-1).square().mean()
    assert router_metrics(routing, 6)["router_z"].item() == pytest.approx(want.item(), rel=1e-12)
    assert got.item() == pytest.approx(0.25 * want.item(), rel=1e-12)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"balance": -1.0}, "router_loss.balance: expected a finite number >= 0, got -1.0"),
        ({"z": float("nan")}, "router_loss.z: expected a finite number >= 0, got nan"),
        ({"scope": "rank"}, "router_loss.scope: expected one of global_batch, micro_batch, got 'rank'"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(UserError, match=message):
        RouterLoss(**options)
