"""Sliding windows, soft caps, sinks and values of another size than keys, against their definition."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from tests.support.cases import slow_except
from tests.support.layouts import exact_attention, make_layout, random_nodes, random_qkv, window_mask
from titan_tree.components.tree_attention import Scoring, TreeAttention, hopper
from titan_tree.components.tree_attention.block_lists import KEYS, QUERIES, prepare
from titan_tree.errors import UserError

SCALE = 0.5
SINKS = torch.tensor([0.3, 2.0])
OPTIONS = {
    "window": Scoring(window=3),
    "window of one": Scoring(window=1),
    "soft cap": Scoring(softcap=0.7),
    "sinks": Scoring(sinks=SINKS),
    "all": Scoring(window=5, softcap=2.0, sinks=SINKS),
}
FOREST = random_nodes(3, 12, 1, 6)  # 44 tokens
BUSHY = random_nodes(1, 60, 1, 12)  # 399 tokens
LONG = [(-1, 150), (0, 70), (0, 100)]


def num_tokens(nodes):
    return sum(length for _, length in nodes)


def between(nodes):
    """Returns columns of queries. All other keys are context, which lies between them."""
    return np.flatnonzero(np.random.default_rng(0).random(num_tokens(nodes)) < 0.4)


def tensors(n, m, dims, scoring, dtype, heads=(2, 1)):
    """Returns q, k, v, and sinks if ``scoring`` has some, which require gradients; and a gradient do."""
    q, k, *_ = random_qkv(n, m, heads, dims[0], dtype=dtype)
    do, v = (torch.randn(size, h, dims[1], dtype=dtype) for size, h in zip((n, m), heads, strict=True))
    sinks = [] if scoring.sinks is None else [scoring.sinks.to(dtype)]
    return [x.detach().requires_grad_() for x in (q, k, v, *sinks)], do


def with_sinks(scoring, sinks):
    return scoring._replace(sinks=sinks[0] if sinks else None)


def assert_close(got, want, do, tolerance):
    """Asserts small errors, as norms relative to the norm of do."""
    for name, a, b in zip(("o", "dq", "dk", "dv", "dsinks"), got, want, strict=False):
        assert a.shape == b.shape
        error = ((a - b).norm() / do.norm()).item()
        assert error < tolerance, f"{name}: {error:.1e}"


def assert_exact(backend, nodes, queries, dims, scoring, dtype, tolerance):
    """Asserts small errors of output and all gradients."""
    layout = make_layout(nodes, queries)
    mask = window_mask(nodes, queries, scoring.window or num_tokens(nodes))
    inputs, do = tensors(*mask.shape, dims, scoring, dtype)
    q, k, v, *sinks = inputs
    attention = TreeAttention(backend)
    layout = attention.prepare(layout, [scoring.window])
    out = attention(q, k, v, layout, scale=SCALE, scoring=with_sinks(scoring, sinks))
    exact = exact_attention(q, k, v, mask, SCALE, with_sinks(scoring, sinks))
    results = [(x, *torch.autograd.grad(x, inputs, do.to(x.dtype))) for x in (out, exact)]
    assert len(results[0]) == len(inputs) + 1
    assert_close(*results, do, tolerance)


@pytest.mark.parametrize("kind", slow_except(["between"], ["all queries", "between"]))
@pytest.mark.parametrize("scoring", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize(
    ("backend", "dims", "dtype", "tolerance"),
    [("reference", (8, 6), torch.float64, 1e-12), ("triton", (24, 8), torch.float32, 2e-6)],
)
def test_options_equal_definition(backend, dims, dtype, tolerance, scoring, kind):
    queries = None if kind == "all queries" else between(FOREST)
    assert_exact(backend, FOREST, queries, dims, scoring, dtype, tolerance)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("nodes", "window", "kind"),
    [
        pytest.param(LONG, 30, "all queries", id="shorter than nodes", marks=pytest.mark.exhaustive),
        pytest.param(BUSHY, 40, "between", id="longer than nodes"),
    ],
)
def test_windows_across_blocks_equal_definition(nodes, window, kind):
    queries = None if kind == "all queries" else between(nodes)
    scoring = Scoring(window, softcap=3.0, sinks=SINKS)
    assert_exact("triton", nodes, queries, (16, 16), scoring, torch.float32, 2e-6)


def test_blocks_outside_of_windows_are_never_read():
    """NaN in such blocks would reach results, even through a mask: 0 * NaN is NaN."""
    nodes, first = [(-1, 300), (0, 40), (0, 40)], 256
    queries = np.arange(300, 380)
    layout, mask = make_layout(nodes, queries), window_mask(nodes, queries, 30)
    assert not mask[:, :first].any()
    (q, k, v), do = tensors(*mask.shape, (16, 16), Scoring(), torch.float32, (1, 1))
    with torch.no_grad():
        k[:first] = v[:first] = torch.nan
    attention = TreeAttention("triton")
    out = attention(q, k, v, layout, scale=SCALE, scoring=Scoring(window=30))
    dq, dk, dv = torch.autograd.grad(out, (q, k, v), do)
    inputs = [q, *(x.detach().nan_to_num().requires_grad_() for x in (k, v))]
    exact = exact_attention(*inputs, mask, SCALE)
    want = torch.autograd.grad(exact, inputs, do.double())
    assert_close((out, dq, dk, dv), (exact, *want), do, 2e-6)
    assert not dk[:first].any()
    assert not attention(q, k, v, layout, scoring=Scoring(window=200)).isfinite().all()


@pytest.mark.parametrize("kind", ["all", "between"])
@pytest.mark.parametrize("seed", range(3))
def test_window_lists_cover_exactly_what_is_visible(seed, kind):
    nodes = [random_nodes(0, 300, 1, 5), random_nodes(1, 60, 1, 40), [(-1, 900), (0, 300)]][seed]
    queries = None if kind == "all" else between(nodes)
    for window in (1, 2, 50, 140, 5000):
        mask, lists = window_mask(nodes, queries, window), prepare(make_layout(nodes, queries), window)
        by_key = lists.query_blocks, lists.n_visible_queries, lists.n_partial_queries, KEYS, QUERIES, mask.T
        by_query = lists.key_blocks, lists.n_visible, lists.n_partial, QUERIES, KEYS, mask
        for blocks, n_visible, n_partial, rows, size, seen in (by_query, by_key):
            listed = torch.zeros_like(seen)
            for i, (stop, full) in enumerate(zip(n_visible.tolist(), n_partial.tolist(), strict=True)):
                for j, block in enumerate(blocks[i, :stop].tolist()):
                    tile = np.s_[i * rows : (i + 1) * rows, block * size : (block + 1) * size]
                    assert not listed[tile].any()
                    listed[tile] = True
                    assert j < full or seen[tile].all()
            assert not (seen & ~listed).any()
        assert sorted(lists.query_order.tolist()) == list(range(len(lists.key_blocks)))
        assert sorted(lists.key_order.tolist()) == list(range(len(lists.query_blocks)))
    chain = prepare(make_layout([(-1, 1280)]), 128)
    assert chain.n_visible.tolist() == [1] + 9 * [2]
    assert chain.n_visible_queries.tolist() == 9 * [2] + [1]


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_a_gateway_cache_works_with_all_options(backend):
    """Keys in shuffled rows of a cache give the results of keys in one tensor, and so do their gradients."""
    columns = np.arange(10, 44, 2)
    layout, mask = make_layout(FOREST, columns), window_mask(FOREST, columns, 7)
    n, m = mask.shape
    own = np.isin(np.arange(m), columns)
    source = np.where(own, m - n + np.cumsum(own) - 1, 0)
    source[~own] = np.random.default_rng(0).permutation(m - n)
    layout = replace(layout, key_source=torch.from_numpy(source))
    scoring = Scoring(window=7, softcap=2.0, sinks=SINKS)
    (q, k, v, sinks), do = tensors(n, m, (16, 16), scoring, torch.float32)
    cache = torch.empty(m - n, 2, 1, 16)
    cache[source[~own]] = torch.stack([k, v], 1).detach()[~own]
    inputs = [q, k.detach()[own].requires_grad_(), v.detach()[own].requires_grad_(), sinks, cache]
    cache.requires_grad_()
    attention, scoring = TreeAttention(backend), scoring._replace(sinks=sinks)
    out = attention(*inputs[:3], layout, cache, scale=SCALE, scoring=scoring)
    exact = exact_attention(q, k, v, mask, SCALE, scoring)
    dq, dk, dv, dsinks = torch.autograd.grad(exact, (q, k, v, sinks), do.double())
    dcache = torch.zeros_like(cache)
    dcache[source[~own]] = torch.stack([dk, dv], 1)[~own]
    want = exact, dq, dk[own], dv[own], dsinks, dcache
    for a, b in zip((out, *torch.autograd.grad(out, inputs, do)), want, strict=True):
        assert (a - b).norm() < 2e-6 * b.norm()


def test_wrong_options_are_refused():
    layout, (q, k, v, _) = make_layout([(-1, 5)]), random_qkv(5, 5, (2, 1), 16)
    attention = TreeAttention("triton")
    for scoring, reason in (
        (Scoring(window=0), "window: expected at least 1 token, got 0"),
        (Scoring(softcap=0.0), "softcap: expected a number above 0, got 0.0"),
        (Scoring(sinks=torch.zeros(1)), r"sinks: expected one for each of 2 heads, got \[1\]"),
    ):
        with pytest.raises(UserError, match=reason):
            attention(q, k, v, layout, scoring=scoring)
    prepared = attention.prepare(layout, [None, 4])
    with pytest.raises(UserError, match=r"window 3: the layout was prepared for \[None, 4\]; call prepare"):
        attention(q, k, v, prepared, scoring=Scoring(window=3))
    other = TreeAttention("reference").prepare(layout, [3])
    with pytest.raises(UserError, match="prepared for another backend"):
        attention(q, k, v, other, scoring=Scoring(window=3))


def test_hopper_refuses_options(monkeypatch):
    monkeypatch.setattr(hopper, "is_hopper", lambda device: True)
    q, *_ = random_qkv(5, 5, (2, 1), 64, dtype=torch.bfloat16)
    refused = Scoring(window=2, sinks=torch.zeros(2))
    assert hopper.refusal(q, q, refused, False) == "has no window and sinks"
    narrow = hopper.refusal(q, q[..., :32], Scoring(), False)
    assert narrow == "expected values as wide as queries, 64, got 32"
    assert hopper.refusal(q, q, Scoring(), False) is None
