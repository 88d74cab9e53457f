"""edge_statistics against softmax in fp64."""

import pytest
import torch

from titan_tree.components.edge_statistics import Likeliest, edge_statistics

NAMES = ("is_top1", "mean_logits", "log_sum_sq_probs")


@pytest.mark.parametrize("cap", [None, 3.0])
@pytest.mark.parametrize("scale", [2.0, 300.0])  # probabilities of every size, and nearly one-hot
@pytest.mark.parametrize(("E", "V", "columns"), [(1, 5, 128), (6, 300, 128), (5, 1000, 256)])
def test_statistics_equal_their_definitions(E, V, columns, scale, cap) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(E, 24, generator=generator)
    weight = torch.randn(V, 24, generator=generator) * scale / 24**0.5
    logits = hidden.double() @ weight.double().t()
    label = torch.randint(V, (E,), generator=generator)
    label[::2] = logits.argmax(1)[::2]
    if cap is not None:
        logits = cap * (logits / cap).tanh()
    caps = None if cap is None else torch.full((E,), cap)
    found = edge_statistics(NAMES, hidden, weight, label, E * columns, caps)
    assert found.keys() == set(NAMES)
    # tanh maps several large logits to the cap.
    if not (cap and scale > 100):
        assert torch.equal(found["is_top1"], logits.argmax(1) == label)
    want = logits.softmax(1).square().sum(1).log()
    spread = 1e-6 * logits.abs().max()  # fp32 logits have an error of this size
    torch.testing.assert_close(found["log_sum_sq_probs"].double(), want, rtol=0, atol=float(4 * spread))
    torch.testing.assert_close(found["mean_logits"].double(), logits.mean(1), rtol=0, atol=float(spread))


def test_statistics_of_a_support() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator) for n in (2, 300))
    logits = hidden @ weight.t()
    label = logits[:, ::2].argmax(1) * 2  # the largest logit among even ids, and edge 1 has all ids
    even = torch.arange(0, 300, 2)
    found = edge_statistics(NAMES, hidden, weight, label, 256, support=torch.stack([even * 0, even]))
    assert found["is_top1"].tolist() == [True, bool(logits[1].argmax() == label[1])]
    want = torch.stack([x.softmax(0).square().sum().log() for x in (logits[0, ::2], logits[1])])
    torch.testing.assert_close(found["log_sum_sq_probs"], want)
    torch.testing.assert_close(found["mean_logits"], logits.mean(1))


def test_only_the_chosen_statistics_are_computed_and_none_has_a_gradient() -> None:
    hidden, weight = torch.randn(3, 8, requires_grad=True), torch.randn(20, 8, requires_grad=True)
    found = edge_statistics(["mean_logits"], hidden, weight, torch.zeros(3, dtype=torch.int64))
    assert list(found) == ["mean_logits"]
    assert not found["mean_logits"].requires_grad


def test_statistics_of_no_edges_are_empty() -> None:
    found = edge_statistics(NAMES, torch.ones(0, 8), torch.ones(20, 8), torch.ones(0, dtype=torch.int64))
    assert all(value.shape == (0,) for value in found.values())


@pytest.mark.parametrize(("k", "cap"), [(7, None), (200, 3.0), (999, None)])
def test_the_likeliest_tokens_are_those_of_all_blocks(k: int, cap: float | None) -> None:
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 8, generator=generator).double() for n in (3, 300))
    logits = hidden @ weight.t()
    caps = None if cap is None else torch.full((3,), cap).double()
    logits = logits if cap is None else cap * (logits / cap).tanh()
    names = Likeliest(k, "ids"), Likeliest(k, "logprobs")
    found = edge_statistics(names, hidden, weight, torch.zeros(3, dtype=torch.int64), 3 * 128, caps)
    want, ids = logits.log_softmax(1).topk(min(k, 300))
    torch.testing.assert_close(found[names[1]], want)
    assert torch.equal(found[names[0]], ids)
