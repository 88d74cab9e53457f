"""TreeAttention against its definition in float64, built from parent pointers alone."""

import types
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.cases import exhaustive, for_each, slow_except
from tests.support.layouts import (
    SMALL,
    ancestor_mask,
    assert_exact_in_gateway_cache,
    exact_attention,
    make_layout,
    random_nodes,
    random_qkv,
)
from titan_tree.components.backends import ATTENTION_BACKENDS
from titan_tree.components.tree_attention import Scoring, TreeAttention, context, operator, triton_kernels
from titan_tree.components.tree_attention.block_lists import (
    JOBS,
    KEY_GROUP,
    KEYS,
    QUERIES,
    SHORTEST_JOB,
    TILE,
    max_parts,
    prepare,
)
from titan_tree.errors import UserError
from titan_tree.tree.layout import TreeLayout


def context_queries(n: int, kind: str) -> np.ndarray:
    """Returns query columns among n keys. The other keys are the context.

    ``kind`` says where the context is: before the queries, between them, or nearly everywhere.
    """
    if kind == "front":
        return np.arange(n - n // 3, n)
    if kind == "last":
        return np.array([n - 1])
    if kind == "one past a block":
        return np.arange(n - 129, n)
    share = 0.4 if kind == "between" else 0.05
    return np.flatnonzero(np.random.default_rng(0).random(n) < share)


def assert_exact(
    nodes, queries=None, backend="triton", heads=(2, 1), dim=16, dim_v=None, tolerance=1e-6, **factory
):
    """Asserts small errors of output and gradients against float64, as norms relative to the norm of do."""
    layout, mask = make_layout(nodes, queries), ancestor_mask(nodes, queries)
    q, k, v, do = random_qkv(*mask.shape, heads, dim, **factory)
    v, do = v[..., :dim_v].detach().requires_grad_(), do[..., :dim_v]
    attention = TreeAttention(backend)
    out = attention(q, k, v, attention.prepare(layout))
    expected = exact_attention(q, k, v, mask)
    grads = torch.autograd.grad(out, (q, k, v), do)
    expected_grads = torch.autograd.grad(expected, (q, k, v), do.double())
    results = zip(["o", "dq", "dk", "dv"], (out, *grads), (expected, *expected_grads), strict=True)
    for name, got, want in results:
        assert got.shape == want.shape
        error = ((got - want).norm() / do.norm()).item()
        assert error < tolerance, f"{name}: {error:.1e}"


EVERYDAY = ("branch at a block edge", "1-token nodes")
COVERED = ("chain of 5", "chain of 300", "roots of 1")  # other trees have the same parts


@pytest.mark.parametrize("name", slow_except(EVERYDAY, exhaustive(COVERED, SMALL)))
def test_triton_equals_definition(name):
    assert_exact(SMALL[name], heads=(1, 1))


@for_each("name", SMALL)
def test_reference_equals_definition(name):
    assert_exact(SMALL[name], backend="reference", dtype=torch.float64, tolerance=1e-14)


def test_grouped_query_heads_equal_definition():
    assert_exact([(-1, 40), (0, 30), (0, 20)], heads=(6, 2))


HEAD_DIMS = [(32, 32), (64, 64), (128, 128), (80, 80), (192, 128)]


@pytest.mark.parametrize(
    ("dim", "dim_v"), slow_except([(64, 64)], exhaustive([(32, 32), (128, 128)], HEAD_DIMS))
)
def test_head_dims_equal_definition(dim, dim_v):
    """Tiles of head dims that are no power of two are padded. The heads next to them must not leak in."""
    assert_exact([(-1, 40), (0, 30), (0, 20)], dim=dim, dim_v=dim_v)


@pytest.mark.parametrize(
    "kind", slow_except(["between"], exhaustive(["nearly all"], ["front", "between", "nearly all"]))
)
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_keys_that_are_not_queries_equal_definition(kind, backend):
    nodes = random_nodes(3, 20, 5, 20, roots=0.0)
    n = sum(length for _, length in nodes)
    assert_exact(nodes, context_queries(n, kind), backend=backend)


@pytest.mark.parametrize(("backend", "dtype"), [("triton", torch.float32), ("reference", torch.float64)])
def test_context_in_a_gateway_cache_equals_definition(backend, dtype):
    nodes = random_nodes(0, 12, 5, 20, roots=0.0)  # keys of two blocks
    assert_exact_in_gateway_cache(
        backend, 1e-6 if dtype == torch.float32 else 1e-14, dtype=dtype, nodes=nodes
    )


def test_gathered_columns_are_not_saved():
    """The backward pass keeps own keys and values and the gateway cache, but no gathered columns."""
    layout = replace(make_layout([(-1, 100)], np.arange(90, 100)), key_source=torch.arange(100) + 5)
    q, k, v, _ = random_qkv(10, 10, (2, 1), 16)
    cache = torch.randn(95, 2, 1, 16, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        attention = TreeAttention("triton")
        attention(q, k, v, attention.prepare(layout), cache)
    large = [x for x in saved if x.is_floating_point() and len(x) > 10]
    assert all(x is cache for x in large)
    assert len(large) == 1


@for_each("kind", ["all", "front", "between", "last", "one past a block"])
@for_each("seed", range(4))
def test_block_lists_cover_exactly_what_is_visible(seed, kind):
    """No visible pair is outside of the lists, and no invisible pair is in a block marked full."""
    nodes = random_nodes(seed, [400, 60, 9, 30][seed], *[(1, 5), (1, 60), (100, 300), (1, 200)][seed])
    nodes.append((-1, -sum(length for _, length in nodes) % 32 or 32))  # the last token ends a key group
    n = sum(length for _, length in nodes)
    queries = None if kind == "all" else context_queries(n, kind)
    layout, mask = make_layout(nodes, queries), ancestor_mask(nodes, queries)
    lists = prepare(layout)
    n_keys = mask.shape[1]

    def assert_lists(lists, visible, full_from, size):
        """Asserts that block i reads runs of ``size`` keys, fully visible from run full_from[i] on."""
        listed = torch.zeros_like(mask)
        for i, (stop, full) in enumerate(zip(visible.tolist(), full_from.tolist(), strict=True)):
            runs = lists[i, :stop].tolist()
            assert len(set(runs)) == stop
            for j, run in enumerate(runs):
                tile = np.s_[i * QUERIES : (i + 1) * QUERIES, run * size : (run + 1) * size]
                listed[tile] = True
                assert j < full or mask[tile].all()
        assert not (mask & ~listed).any()

    assert_lists(lists.key_blocks, lists.n_visible, lists.n_partial, KEYS)
    assert_lists(lists.key_groups, lists.n_key_groups, lists.n_masked, KEY_GROUP)
    assert not (lists.n_key_groups % 4).any()
    assert (lists.n_diagonal > 0).all()
    for i, diagonal in enumerate(lists.n_diagonal.tolist()):  # the others need no test of k <= q
        others = lists.key_groups[i, diagonal : lists.n_key_groups[i]]
        others = others[others * KEY_GROUP < n_keys]
        assert (others * KEY_GROUP + KEY_GROUP - 1 <= layout.key_index[i * QUERIES]).all()
    assert sorted(lists.query_order.tolist()) == list(range(len(lists.n_key_groups)))

    ranged = torch.zeros_like(mask)
    ranges = torch.stack([lists.first, lists.first_full, lists.end_full, lists.last], 1).tolist()
    for i, (first, first_full, end_full, last) in enumerate(ranges):
        assert first <= first_full <= end_full <= max(last, first)
        keys = slice(i * KEYS, (i + 1) * KEYS)
        ranged[first:last, keys] = True
        assert mask[first_full:end_full, keys].all()
    assert not (mask & ~ranged).any()
    assert sorted(lists.range_order.tolist()) == list(range(len(ranges)))


@pytest.mark.parametrize(
    "nodes", [[(-1, 40_000)], random_nodes(1, 300, 1, 120), [(-1, 9000), *[(0, 9)] * 300]]
)
def test_jobs_cut_ranges_evenly(nodes):
    layout = make_layout(nodes)
    n, lists = len(layout.key_index), prepare(layout)
    tiles = [
        range(first // TILE, -(-last // TILE))
        for first, last in zip(lists.first.tolist(), lists.last.tolist(), strict=True)
    ]
    jobs = torch.stack([lists.job_block, lists.job_begin, lists.job_end, lists.job_part], 1).tolist()
    limit = max(sum(map(len, tiles)) / JOBS, SHORTEST_JOB)
    n_jobs = int(lists.job_stop[-1])
    assert jobs[:n_jobs] == sorted(jobs[:n_jobs])
    work = [jobs[i][2] - jobs[i][1] for i in lists.job_order.tolist()]
    assert work == sorted(work, reverse=True)
    assert sorted(lists.job_order.tolist()) == list(range(len(jobs)))
    assert work[0] <= limit + 1
    todo = {(block, tile) for block, its in enumerate(tiles) for tile in its}
    parts = {}
    for _, begin, end, _ in jobs[n_jobs:]:
        assert begin == end == -1  # past the last job
    for block, begin, end, part in jobs[:n_jobs]:
        for tile in range(begin, end):
            todo.remove((block, tile))  # KeyError: a tile of two jobs, or of none
        if part >= 0:
            parts.setdefault(block, []).append(part)
    assert not todo
    assert sum(map(len, parts.values())) <= max_parts(n, n)
    start = 0
    for block, stop in zip(lists.range_order.tolist(), lists.job_stop.tolist(), strict=True):
        assert sorted(parts.get(block, [])) == (list(range(start, stop)) if stop - start > 1 else [])
        start = stop


@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_siblings_do_not_leak(backend):
    """Keys and values on one branch change nothing on the other, bit for bit, and get no gradient from it."""
    nodes = [(-1, 60), (0, 50), (0, 40)]
    layout = make_layout(nodes)
    q, k, v, do = random_qkv(150, 150, (2, 1), 16)
    other_k, other_v = k.detach().clone(), v.detach().clone()
    other_k[60:110], other_v[60:110] = torch.randn(50, 1, 16), torch.randn(50, 1, 16)
    attention = TreeAttention(backend)
    out, other = attention(q, k, v, layout), attention(q, other_k, other_v, layout)
    assert torch.equal(out[110:], other[110:])
    assert not torch.equal(out[60:110], other[60:110])
    do[60:110] = 0
    _, dk, dv = torch.autograd.grad(out, (q, k, v), do)
    assert not dk[60:110].any()
    assert not dv[60:110].any()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "recompute"),
    [pytest.param("triton", True, marks=pytest.mark.exhaustive), ("reference", False)],
)
def test_all_trees_share_one_compiled_graph(backend, recompute):
    """With fullgraph, dynamic shapes and checkpointing, gradients are equal. One graph serves all trees.

    Two layers share the layout. One of them has a window, a soft cap, sinks and a scale.
    """
    attention = TreeAttention(backend)
    graphs = 0

    def count_graphs(graph, inputs):
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def block(q, k, v, sinks, layout):  # heads and head dim are constants, as in a model
        q, k, v = (x.view(len(x), -1, 16) for x in (q * 2, k, v))
        q = attention(q, k, v, layout, scale=0.5, scoring=Scoring(40, 2.0, sinks))
        return attention(q, k, v, layout).sin()

    def maybe_recomputed(*inputs):
        return checkpoint(block, *inputs, use_reentrant=False) if recompute else block(*inputs)

    compiled = torch.compile(maybe_recomputed, fullgraph=True, dynamic=True, backend=count_graphs)
    for nodes in ([(-1, 70), *[(0, 3)] * 22], [(-1, 128), (0, 3)], random_nodes(5, 16, 1, 20)):
        layout = attention.prepare(make_layout(nodes), [None, 40])
        n = len(layout.key_index)
        *inputs, do = random_qkv(n, n, (1, 1), 16)
        inputs = [x.detach().flatten(1).clone().requires_grad_() for x in inputs]
        inputs.append(torch.zeros(1, requires_grad=True))
        got = torch.autograd.grad(compiled(*inputs, layout), inputs, do)
        want = torch.autograd.grad(block(*inputs, layout), inputs, do)
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert graphs == 1


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["auto", "triton", "reference"])
def test_a_layout_that_is_not_prepared_compiles(backend):
    attention = TreeAttention(backend)
    compiled = torch.compile(attention, fullgraph=True, dynamic=True, backend="eager")
    nodes = [(-1, 40), (0, 33), (0, 18)]
    q, k, v, _ = random_qkv(91, 91, (1, 1), 16)
    error = compiled(q, k, v, make_layout(nodes)) - exact_attention(q, k, v, ancestor_mask(nodes))
    assert error.abs().max() < 1e-6


def test_large_scores_stay_exact():
    """Masked scores stay below visible ones, even if those are very low."""
    q, k, v, _ = random_qkv(91, 91, (2, 1), 16)
    q, k = 300 * q, 300 * k
    nodes = [(-1, 40), (0, 33), (0, 18)]
    error = TreeAttention("triton")(q, k, v, make_layout(nodes)) - exact_attention(
        q, k, v, ancestor_mask(nodes)
    )
    assert error.abs().max() < 1e-4


def test_any_address_and_stride_works():
    """TMA cannot read views with an odd offset, columns of a wider tensor, or an expanded cotangent."""
    nodes = [(-1, 70), *[(0, 3)] * 20]
    layout, n = make_layout(nodes), 130
    layout = TreeLayout(
        positions=layout.positions,
        subtree_end=torch.cat([torch.zeros(1).int(), layout.subtree_end])[1:],
        key_index=layout.key_index,
    )
    q = torch.randn(n * 2 * 16 + 1)[1:].view(n, 2, 16).requires_grad_()
    k, v = (x.requires_grad_() for x in torch.randn(n, 2, 16).split(1, dim=1))
    out = TreeAttention("triton")(q, k, v, layout)
    expected = exact_attention(q, k, v, ancestor_mask(nodes))
    got = torch.autograd.grad(out.sum(), (q, k, v))
    want = torch.autograd.grad(expected.sum(), (q, k, v))
    for a, b in zip((out, *got), (expected, *want), strict=True):
        assert (a - b).abs().max() < 1e-5


@pytest.mark.slow
def test_operator_keeps_its_contract():
    layout = TreeAttention("triton").prepare(make_layout(SMALL["chain of 5"]))
    q, k, v, _ = random_qkv(5, 5, (2, 1), 16)
    metadata = [layout.subtree_end, layout.key_index, *layout.prepared_attention[None]]
    options = metadata, "triton", 0.25, 2.0, False
    inputs = *(x.detach() for x in (q, k, v[..., :8])), None, torch.zeros(2), None, *options
    torch.library.opcheck(operator.tree_attention, inputs)
    outputs = operator.tree_attention(*inputs)
    torch.library.opcheck(operator.tree_attention_backward, (outputs[0], *outputs, *inputs))


def small_qkv(dim=16, dtype=torch.float32, m=5):
    return random_qkv(5, m, (2, 1), dim, dtype=dtype)[:3]


def test_inputs_that_do_not_fit_are_refused():
    layout = make_layout(SMALL["chain of 5"])
    attention = TreeAttention("triton")
    q, k, v = small_qkv()
    wrong = (small_qkv(m=6), (q, k.repeat(1, 3, 1), v.repeat(1, 3, 1)), (q, k[:, :0], v[:, :0]), (q[0], k, v))
    for inputs in wrong:
        with pytest.raises(UserError, match=r"expected q \[5, H, D\], k \[5, Hkv, D\] and v \[5, Hkv, Dv\]"):
            attention(*inputs, layout)
    with pytest.raises(UserError, match=r"expected q, k, v and context of one dtype"):
        attention(q.half(), k, v, layout)
    with pytest.raises(
        UserError, match=r"context: expected \[R, 2, Hkv, D\] .* a layout that has key_source"
    ):
        attention(q, k, v, layout, torch.zeros(3, 2, 1, 16))
    for other in (TreeAttention("reference").prepare(layout), attention.prepare(make_layout([(-1, 200)]))):
        with pytest.raises(UserError, match=r"prepared for another backend"):
            attention(q, k, v, layout.with_prepared(other.prepared_attention))
    with pytest.raises(UserError, match=r"layout of int32 tensors with at least one query, got torch.int64"):
        attention.prepare(
            TreeLayout(
                **{name: getattr(layout, name).long() for name in ("positions", "subtree_end", "key_index")}
            )
        )


def test_a_backend_asked_for_by_name_is_used_or_refused(monkeypatch):
    layout = make_layout(SMALL["chain of 5"])
    q, k, v = small_qkv()
    with pytest.raises(UserError, match=r"'triton' expected multiples of 8 up to 256 as head dims, got 20"):
        TreeAttention("triton")(*small_qkv(dim=20), layout)
    with pytest.raises(UserError, match=r"'triton' expected bfloat16, float16 or float32, got torch.float64"):
        TreeAttention("triton")(*small_qkv(dtype=torch.float64), layout)
    with pytest.raises(UserError, match=r"'flash' has no deterministic backward"):
        TreeAttention("flash", deterministic=True)(q.half(), k.half(), v.half(), layout)
    with pytest.raises(UserError, match=r"'hopper' needs a GPU of compute capability 9.0"):
        TreeAttention("hopper")(q, k, v, layout)
    with pytest.raises(UserError, match=r"'flex' needs a CUDA device"):
        TreeAttention("flex").prepare(layout)
    with pytest.raises(
        UserError, match=r"unknown TreeAttention backend 'magic' \(known: auto, hopper, triton"
    ):
        TreeAttention("magic")
    monkeypatch.setattr(triton_kernels, "INTERPRET", False)
    with pytest.raises(UserError, match=r"'triton' needs a CUDA device, got cpu"):
        TreeAttention("triton")(q, k, v, layout)


def test_a_registered_backend_needs_no_other_change(monkeypatch):
    """ "auto" chooses the new entry as soon as it is automatic and no earlier entry is."""
    mine = types.ModuleType("mine")
    mine.is_automatic = lambda device: True
    mine.refusal = lambda q, v, scoring, deterministic: "is not deterministic" if deterministic else None
    mine.prepare = lambda layout, window: "my blocks"

    def attention(q, k, v, context, layout, prepared, scale, scoring, deterministic):
        assert prepared == "my blocks"
        return 2 * q

    mine.attention = attention
    ATTENTION_BACKENDS.register("mine", mine)
    layout, (q, k, v) = make_layout(SMALL["chain of 5"]), small_qkv()
    assert torch.equal(TreeAttention("mine")(q, k, v, layout), 2 * q)
    assert not torch.equal(TreeAttention()(q, k, v, layout), 2 * q)
    with pytest.raises(UserError, match="TreeAttention: backend 'mine' is not deterministic"):
        TreeAttention("mine", deterministic=True)(q, k, v, layout)
    for name in ATTENTION_BACKENDS:
        if name != "mine":
            monkeypatch.setattr(ATTENTION_BACKENDS[name], "is_automatic", lambda device: False)
    assert torch.equal(TreeAttention()(q, k, v, layout), 2 * q)


def test_add_kernel_equals_addition():
    total, gradient = torch.randn(5000, dtype=torch.float64), torch.randn(5000)
    expected = total + gradient
    context._add_kernel[(2,)](total, gradient, 5000, 4096)
    assert torch.equal(total, expected)
