"""The gated delta rule on trees in plain torch, in float64, against its recurrence on every path alone."""

import itertools

import numpy as np
import pytest
import torch

from tests.support.layouts import random_nodes
from titan_tree.components.tree_gdn import TreeGDN
from titan_tree.components.tree_gdn.reference import gated_delta_rule
from titan_tree.errors import UserError
from titan_tree.tree.chains import make_chains
from titan_tree.tree.chunks import make_chunks
from titan_tree.tree.layout import TreeLayout

TREES = {
    "chain": [(-1, 30)],
    "1-token nodes": random_nodes(1, 14, 1, 1),
    "star": [(-1, 9), *[(0, 1 + i) for i in range(6)]],
    "deep": random_nodes(3, 10, 1, 6, roots=0.0),
    "forest": random_nodes(4, 12, 1, 9, roots=0.3),
}


def predecessors(nodes):
    """[N] from (parent, length) of nodes in DFS order."""
    ends, before = [], []
    for parent, length in nodes:
        start = len(before)
        before += [ends[parent] - 1 if parent >= 0 else -1, *range(start, start + length - 1)]
        ends.append(start + length)
    return np.array(before)


def layout_of(before, exports=(), size=64):
    n = torch.zeros(len(before), dtype=torch.int32)
    chunks = make_chunks(before, np.array(exports, int), size)
    return TreeLayout(
        positions=n,
        subtree_end=n,
        key_index=n,
        predecessor=torch.from_numpy(before).int(),
        state_exports=torch.tensor(exports) if len(exports) else None,
        chunks=chunks,
        chains=make_chains(chunks, max(0, -1 - int(before.min()))),
    )


def inputs(n, heads_k=2, heads=4, key=5, value=3, seed=0):
    torch.manual_seed(seed)
    q, k = (torch.randn(n, heads_k, key, dtype=torch.float64) for _ in range(2))
    v = torch.randn(n, heads, value, dtype=torch.float64)
    g, beta = -torch.rand(n, heads, dtype=torch.float64), torch.rand(n, heads, dtype=torch.float64)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def recurrence(q, k, v, g, beta, before, states=None):
    """Token by token: o, and the state after every token. Each state comes from the token before."""
    group = v.shape[1] // k.shape[1]
    q, k = (
        (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt()).repeat_interleave(group, 1) for x in (q, k)
    )
    out, after = [], []
    for t, source in enumerate(before.tolist()):
        if source >= 0:
            state = after[source]
        else:
            state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2]) if source == -1 else states[-2 - source]
        state = g[t].exp()[:, None, None] * state
        change = beta[t][:, None] * (v[t] - torch.einsum("hkv,hk->hv", state, k[t]))
        state = state + torch.einsum("hk,hv->hkv", k[t], change)
        out.append(torch.einsum("hkv,hk->hv", state, q[t]) * q.shape[2] ** -0.5)
        after.append(state)
    return torch.stack(out), torch.stack(after)


def assert_close(got, want):
    assert len(got) == len(want)
    for mine, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("size", [1, 4, 64])
@pytest.mark.parametrize("name", TREES)
def test_equals_the_recurrence(name, size):
    before = predecessors(TREES[name])
    x = inputs(len(before))
    do = torch.randn_like(x[2])
    out, states = gated_delta_rule(*x, layout_of(before, size=size), None)
    want, _ = recurrence(*x, before)
    assert states is None
    assert_close([out, *torch.autograd.grad(out, x, do)], [want, *torch.autograd.grad(want, x, do)])


@pytest.mark.parametrize("size", [2, 64])
def test_states_come_from_and_go_to_gateways(size):
    """Two pieces that hang from rows 1 and 3 of a gateway, and a root; four states are left, one twice."""
    before = np.array([-3, 0, 1, 1, -5, 4, -1, 6, -3])
    exports = [1, 1, 5, 8]
    x = [*inputs(len(before)), torch.randn(4, 4, 5, 3, dtype=torch.float64, requires_grad=True)]
    out, states = gated_delta_rule(*x[:5], layout_of(before, exports, size), x[5])
    want, after = recurrence(*x[:5], before, x[5])
    do, dstates = torch.randn_like(out), torch.randn_like(states)
    got = torch.autograd.grad([out, states], x, [do, dstates])
    assert_close(
        [out, states, *got],
        [want, after[exports], *torch.autograd.grad([want, after[exports]], x, [do, dstates])],
    )
    assert not got[5][[0, 2]].any()  # nobody starts from these rows


def test_gradcheck():
    before = predecessors([(-1, 3), (0, 2), (0, 1)])
    layout = layout_of(before, size=2)
    x = inputs(len(before), heads_k=1, heads=2, key=2, value=2)
    assert torch.autograd.gradcheck(lambda *x: gated_delta_rule(*x, layout, None)[0], x)


def test_a_token_reads_its_ancestors_alone():
    """The derivative of every output with respect to every value: 0 but on one's own path."""
    before = predecessors(TREES["deep"])
    n = len(before)
    x = inputs(n)
    v = x[2]
    jacobian = torch.autograd.functional.jacobian(
        lambda v: gated_delta_rule(x[0], x[1], v, x[3], x[4], layout_of(before, size=4), None)[0].sum((1, 2)),
        v,
    )
    reads = jacobian.abs().sum((2, 3)) > 0
    is_ancestor = torch.eye(n, dtype=torch.bool)
    for t in range(n):
        if before[t] >= 0:
            is_ancestor[t] |= is_ancestor[before[t]]
    assert torch.equal(reads, is_ancestor)


@pytest.mark.parametrize("seed", range(20))
def test_chunks(seed):
    """Ranges of tokens, each from the state after a chunk's last token, and a chunk ends at every export."""
    rng = np.random.default_rng(seed)
    before = predecessors(random_nodes(seed, 15, 1, 9, roots=0.2))
    n, size = len(before), int(rng.integers(1, 8))
    before[before == -1] = rng.integers(-4, 0, (before == -1).sum())  # roots, or pieces below a gateway
    exports = rng.integers(0, n, 3)
    start, source, exported = (x.tolist() for x in make_chunks(before, exports, size))
    assert start[0] == 0
    assert start[-1] == n
    for chunk, (first, stop) in enumerate(itertools.pairwise(start)):
        assert 0 < stop - first <= size
        assert all(before[t] == t - 1 for t in range(first + 1, stop))
        if before[first] < 0:
            assert source[chunk] == before[first]
        else:
            assert source[chunk] < chunk
            assert start[source[chunk] + 1] == before[first] + 1
    assert [start[chunk + 1] - 1 for chunk in exported] == exports.tolist()
    full = [chunk for chunk, first in enumerate(start[:-1]) if start[chunk + 1] - first == size]
    assert size > 5 or full


def test_shapes_are_checked():
    before = predecessors(TREES["chain"])
    q, k, v, g, beta = inputs(len(before))
    layout = layout_of(before)
    with pytest.raises(
        UserError, match=r"expected q, k \[N, H, K\], .* got \[30, 2, 5\], \[30, 2, 5\], \[30, 3"
    ):
        TreeGDN()(q, k, v[:, :3], g[:, :3], beta[:, :3], layout)
    with pytest.raises(UserError, match="expected a layout of 30 tokens with chunks and chains"):
        TreeGDN()(q, k, v, g, beta, TreeLayout(layout.positions, layout.subtree_end, layout.key_index))
