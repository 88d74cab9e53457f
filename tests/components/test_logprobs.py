"""edge_logprobs against log_softmax in fp64."""

import pytest
import torch
import torch.nn.functional as F

from titan_tree.components import logprobs as module
from titan_tree.components.logprobs import edge_logprobs

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.fixture(params=["cpu", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request, monkeypatch):
    """Returns the implementation: torch, the kernels in Triton's interpreter, or the kernels on a GPU."""
    if request.param != "interpreted":
        return request.param
    if torch.cuda.is_available():
        pytest.skip("on a GPU, Triton compiles instead of interpreting")
    monkeypatch.setattr(module, "_use_kernels", lambda x: True)
    return "cpu"


def case(E, V, d, dtype, device="cpu", seed=0):
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(E, d, generator=generator).to(device, dtype).requires_grad_()
    weight = (torch.randn(V, d, generator=generator) * 2 / d**0.5).to(device, dtype).requires_grad_()
    label = torch.randint(V, (E,), generator=generator).to(device)
    upstream = torch.randn(2, E, generator=generator).to(device)
    return hidden, weight, label, upstream


def oracle(hidden, weight, label):
    """Returns log-probabilities and entropy by their definitions."""
    log_p = (hidden @ weight.t()).log_softmax(-1)
    return log_p.gather(1, label[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def results(function, hidden, weight, label, upstream):
    """Returns values and gradients of ``function``, given the gradients of its outputs."""
    outputs = [x for x in function(hidden, weight, label) if x is not None]
    upstream = upstream[: len(outputs)].to(outputs[0].dtype)
    grads = torch.autograd.grad(outputs, [hidden, weight], list(upstream))
    return [x.detach() for x in (*outputs, *grads)]


# How the backward gets probabilities: (entropy, recompute).
MODES = {"kept": (False, False), "recomputed": (False, True), "with entropy": (True, False)}


def relative(a, b):
    return float((a.detach().double() - b.detach().double()).norm() / b.detach().double().norm())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-13), (torch.float32, 2e-6)])
@pytest.mark.parametrize(
    ("E", "V", "columns"), [(1, 5, 128), (4, 300, 128), (5, 1000, 256), (2, 256, 128), (2, 2500, 2304)]
)
def test_values_and_gradients_equal_those_of_log_softmax(E, V, columns, dtype, tolerance, device, mode):
    inputs = case(E, V, 24, dtype, device)
    entropy, recompute = MODES[mode]
    blocked = results(lambda h, w, y: edge_logprobs(h, w, y, entropy, recompute, E * columns), *inputs)
    exact_inputs = [x.detach().double().requires_grad_() for x in inputs[:2]]
    exact = results(lambda *x: oracle(*x)[: 1 + entropy], *exact_inputs, *inputs[2:])
    for got, want in zip(blocked, exact, strict=True):
        assert got.dtype == dtype
        assert relative(got, want) < tolerance


@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_a_support_restricts_the_softmax(mode, capped, device):
    """Edge 3 has the whole vocabulary, and the support of edge 0 is its label."""
    inputs, V = case(5, 700, 24, torch.float64, device), 700
    label, (entropy, recompute) = inputs[2], MODES[mode]
    cap = torch.full((5,), 3.0, dtype=torch.float64, device=device) if capped else None
    kept = [{y.item()} | set(range(7 * e, 7 * e + 60 * e)) for e, y in enumerate(label)]
    kept[3] = set()
    pairs = [(e, i) for e, ids in enumerate(kept) for i in sorted(ids)]
    support = torch.tensor(pairs, device=device).t()
    got = results(lambda h, w, y: edge_logprobs(h, w, y, entropy, recompute, 5 * 128, cap, support), *inputs)

    def restricted(hidden, weight, label):
        outputs = []
        for e in range(5):
            ids = torch.tensor(sorted(kept[e]) or list(range(V)), device=device)
            logits = hidden[e] @ weight[ids].t()
            log_p = (3 * (logits / 3).tanh() if capped else logits).log_softmax(0)
            outputs.append(torch.stack([log_p[ids == label[e]][0], -(log_p.exp() * log_p).sum()]))
        return torch.stack(outputs).t().unbind()[: 1 + entropy]

    for a, b in zip(got, results(restricted, *inputs), strict=True):
        assert relative(a, b) < 1e-12


@pytest.mark.parametrize("supported", [False, True])
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_targets_equal_those_of_log_softmax(mode, capped, supported, device):
    """Edge 1 has no targets, and one of edge 0 is its label. Labels have gradients of their own."""
    hidden, weight, label, upstream = case(5, 700, 24, torch.float64, device)
    entropy, recompute = MODES[mode]
    cap = torch.full((5,), 3.0, dtype=torch.float64, device=device) if capped else None
    ids = [{int(label[0]), 0, 127, 128, 699}, set(), {5}, set(range(100, 400)), {255, 256}]
    targets = torch.tensor([(e, i) for e in range(5) for i in sorted(ids[e])], device=device).t()
    support = [(e, i) for e in (0, 3) for i in {int(label[e])} | ids[e] | set(range(90 * e, 90 * e + 50))]
    support = torch.tensor(support, device=device).t() if supported else None
    upstream = [*upstream.double(), torch.linspace(-1, 1, targets.shape[1], device=device).double()]

    def ours(h, w):
        return edge_logprobs(h, w, label, entropy, recompute, 5 * 128, cap, support, targets)

    def plain(h, w):
        logits = h @ w.t()
        logits = logits if cap is None else 3 * (logits / 3).tanh()
        if support is not None:
            kept = torch.zeros(5, 700, dtype=torch.bool, device=device)
            kept[tuple(support)] = True
            logits = logits.masked_fill(~(kept | ~kept.any(1, keepdim=True)), -1e30)
        log_p = logits.log_softmax(1)
        return log_p.gather(1, label[:, None])[:, 0], -(log_p.exp() * log_p).sum(1), log_p[tuple(targets)]

    for used in ((0, 1, 2), (2,)):  # the gradient of an unused output is None
        results = []
        for function in (ours, plain):
            outputs = [(function(hidden, weight)[i], upstream[i]) for i in used if i != 1 or entropy]
            values, gradients = zip(*outputs, strict=True)
            results.append([*values, *torch.autograd.grad(values, [hidden, weight], gradients)])
        for got, want in zip(*results, strict=True):
            assert relative(got, want) < 1e-12


def test_gradients_at_targets_have_no_error_of_bf16_sums():
    """Where the student equals the teacher, the two terms of the forward KL's gradient cancel."""
    hidden, weight, label, _ = case(8, 600, 32, torch.bfloat16)
    log_p = (hidden.double() @ weight.double().t()).log_softmax(1).detach()
    targets = torch.stack([torch.arange(8).repeat_interleave(600), torch.arange(600).repeat(8)])
    of_targets = edge_logprobs(hidden, weight, label, targets=targets, block_elements=8 * 128)[2]
    teacher = log_p.exp().flatten()
    (gradient,) = torch.autograd.grad(of_targets, hidden, -teacher.float())
    assert gradient.norm() < 1e-3 * (log_p.exp() @ weight.double()).norm()


@pytest.mark.parametrize("entropy", [False, True])
def test_capped_logits_equal_those_of_log_softmax(entropy, device):
    """Each edge has a cap of its own, as temperatures need."""
    inputs = case(5, 300, 24, torch.float32, device)
    cap = torch.tensor([0.5, 1.0, 2.0, 30.0, 1e6], device=device)
    got = results(lambda h, w, y: edge_logprobs(h, w, y, entropy, False, 5 * 128, cap), *inputs)

    def capped(hidden, weight, label):
        logits = cap.double()[:, None] * (hidden @ weight.t() / cap.double()[:, None]).tanh()
        log_p = logits.log_softmax(-1)
        return [log_p.gather(1, label[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)][: 1 + entropy]

    exact = [x.detach().double().requires_grad_() for x in inputs[:2]]
    for ours, want in zip(got, results(capped, *exact, *inputs[2:]), strict=True):
        assert relative(ours, want) < 2e-6


def test_no_block_exceeds_the_budget(monkeypatch):
    seen = []
    matmul = module._matmul
    monkeypatch.setattr(module, "_matmul", lambda a, b: seen.append(len(a) * b.shape[1]) or matmul(a, b))
    hidden, weight, label, _ = case(7, 1000, 8, torch.float32)
    edge_logprobs(hidden, weight, label, block_elements=7 * 300)[0].sum().backward()  # recomputes logits
    assert seen == [7 * 256] * 3 + [7 * 232] + [7 * 256] * 3 + [7 * 232]


@pytest.mark.slow
def test_gradcheck_over_two_blocks():
    hidden, weight, label, _ = case(3, 140, 4, torch.float64)
    for entropy, recompute in MODES.values():
        assert torch.autograd.gradcheck(
            lambda h, w, mode=(entropy, recompute): edge_logprobs(h, w, label, *mode, 1)[: 1 + mode[0]],
            (hidden, weight),
        )


def test_probabilities_are_kept_only_for_a_backward_that_reads_them(monkeypatch):
    kept = []
    softmax = module._softmax
    monkeypatch.setattr(module, "_softmax", lambda *args: kept.append(args[3]) or softmax(*args))
    hidden, weight, label, _ = case(3, 7, 4, torch.float32)
    with torch.no_grad():
        edge_logprobs(hidden, weight, label, recompute=False)
    edge_logprobs(hidden.detach(), weight.detach(), label, recompute=False)
    edge_logprobs(hidden, weight, label, recompute=True)
    edge_logprobs(hidden, weight, label, entropy=True, recompute=False)
    assert kept == [None] * 4


def test_second_derivatives_are_refused():
    hidden, weight, label, _ = case(3, 7, 4, torch.float64)
    loss = edge_logprobs(hidden, weight, label)[0].square().sum()
    (grad,) = torch.autograd.grad(loss, hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_edges_give_zero_gradients(dtype, device):
    hidden, weight, label, _ = case(0, 300, 8, dtype, device)
    logprobs, entropy, _ = edge_logprobs(hidden, weight, label, entropy=True, block_elements=1)
    assert logprobs.shape == entropy.shape == (0,)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.shape == (0, 8)
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_only_inputs_that_require_gradients_get_them(device):
    hidden, weight, label, _ = case(5, 30, 8, torch.float32, device)
    edge_logprobs(hidden.detach(), weight, label)[0].sum().backward()
    want = torch.autograd.grad(oracle(hidden, weight, label)[0].sum(), [weight, hidden])
    assert relative(weight.grad, want[0]) < 1e-6
    edge_logprobs(hidden, weight.detach(), label)[0].sum().backward()
    assert relative(hidden.grad, want[1]) < 1e-6
    assert not edge_logprobs(hidden.detach(), weight.detach(), label)[0].requires_grad


def test_a_tied_embedding_gets_both_gradients():
    _, weight, label, _ = case(6, 30, 8, torch.float64)
    tokens = torch.tensor([3, 3, 0, 29, 7, 7])
    edge_logprobs(F.embedding(tokens, weight), weight, label)[0].sum().backward()
    (want,) = torch.autograd.grad(oracle(F.embedding(tokens, weight), weight, label)[0].sum(), weight)
    assert relative(weight.grad, want) < 1e-13


def test_large_logits_do_not_overflow(device):
    hidden = torch.tensor([[300.0], [-300.0]], device=device, requires_grad=True)
    weight = torch.linspace(-1, 1, 300, device=device)[:, None].requires_grad_()
    label = torch.tensor([299, 299], device=device)
    logprobs, entropy, _ = edge_logprobs(hidden, weight, label, True, block_elements=1)
    want, want_entropy = oracle(hidden.double(), weight.double(), label)
    torch.testing.assert_close(logprobs.double(), want, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(entropy.double(), want_entropy, rtol=1e-4, atol=1e-4)
    (logprobs.sum() + entropy.sum()).backward()
    assert hidden.grad.isfinite().all()


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("distribution", ["spread", "flat", "sure of the label", "sure of another"])
@pytest.mark.parametrize("device", DEVICES)
def test_bf16_is_no_worse_than_the_plain_bf16_path(device, distribution, mode):
    """Errors are against exact arithmetic on the same bf16 numbers. The plain path has bf16 logits."""
    hidden, weight, label, upstream = case(200, 3000, 64, torch.bfloat16, device)
    with torch.no_grad():
        if distribution == "flat":
            weight *= 0.1
        elif distribution != "spread":
            weight *= 0.5
            chosen = weight[label if distribution == "sure of the label" else label.roll(1)].float()
            hidden += 18 * chosen / chosen.square().sum(1, keepdim=True)

    def plain(hidden, weight, label):
        log_p = (hidden @ weight.t()).float().log_softmax(-1)
        return log_p.gather(1, label[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)

    entropy, recompute = MODES[mode]
    exact_inputs = [x.detach().double().requires_grad_() for x in (hidden, weight)]
    exact = results(lambda *x: oracle(*x)[: 1 + entropy], *exact_inputs, label, upstream)
    ours = results(
        lambda h, w, y: edge_logprobs(h, w, y, entropy, recompute, 200 * 512), hidden, weight, label, upstream
    )
    theirs = results(lambda *x: plain(*x)[: 1 + entropy], hidden, weight, label, upstream)
    assert ours[0].dtype == torch.float32
    for mine, other, want in zip(ours, theirs, exact, strict=True):
        assert relative(mine, want) <= relative(other, want) * 1.01
