"""The vocabulary projection at full size on a GPU: exact, and bounded in memory."""

import pytest
import torch

from titan_tree.components.logprobs import edge_logprobs

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("d", "recompute"), [(1024, True), (2048, False)])
def test_full_vocabulary_at_32k_edges(d, recompute):
    """With V = 151,936, bf16 values equal float64; memory beyond gradients and kept tensors is limited."""
    num_edges, vocab = 32_768, 151_936
    hidden = torch.randn(num_edges, d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = (0.05 * torch.randn(vocab, d, device="cuda")).bfloat16().requires_grad_()
    label = torch.randint(vocab, (num_edges,), device="cuda")
    cotangent = torch.randn(num_edges, device="cuda")

    def run():
        # The entropy needs recomputed logits.
        logprobs, entropy, _ = edge_logprobs(hidden, weight, label, recompute, recompute)
        return logprobs, entropy, *torch.autograd.grad(logprobs, (hidden, weight), cotangent)

    run()  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprobs, entropy, grad_hidden, grad_weight = run()
    torch.cuda.synchronize()
    gradients = sum(x.numel() * x.element_size() for x in (grad_hidden, grad_weight))
    extra = torch.cuda.max_memory_allocated() - before - gradients
    print(f"d {d}, recompute {recompute}: extra {extra / 1e9:.2f} GB")
    assert extra < 1.5e9 + (0 if recompute else 2 * num_edges * vocab)

    rows = torch.randint(num_edges, (64,), device="cuda")
    logits = hidden[rows].double() @ weight.double().t()
    exact = logits.log_softmax(1)
    torch.testing.assert_close(
        logprobs[rows].double(), exact.gather(1, label[rows, None])[:, 0], rtol=1e-5, atol=1e-5
    )
    if entropy is not None:
        want = -(exact.exp() * exact).sum(1)
        torch.testing.assert_close(entropy[rows].double(), want, rtol=1e-5, atol=1e-5)
    p = exact.exp()
    p[torch.arange(64), label[rows]] -= 1
    grad = -cotangent[rows, None].double() * (p @ weight.double())
    error = (grad_hidden[rows].double() - grad).norm() / grad.norm()
    assert error < 4e-3  # probabilities, dlogits and the result are rounded to bf16 once each
