"""The reference of every rule in float64, against the recurrence on every path alone; chunks of forests."""

import itertools
from itertools import product

import numpy as np
import pytest
import torch

from tests.support.cases import for_each
from tests.support.forests import path_recurrence, predecessors, recurrent_layout
from tests.support.layouts import random_nodes
from titan_tree.components.backends import RECURRENCE_BACKENDS
from titan_tree.components.recurrence import TreeGDN, TreeKDA, TreeSSD, hopper, triton_kernels
from titan_tree.components.recurrence.reference import recurrence
from titan_tree.errors import UserError
from titan_tree.tree.chunks import make_chunks
from titan_tree.tree.layout import TreeLayout

TREES = {
    "chain": [(-1, 30)],
    "1-token nodes": random_nodes(1, 14, 1, 1),
    "star": [(-1, 9), *[(0, 1 + i) for i in range(6)]],
    "deep": random_nodes(3, 10, 1, 6, roots=0.0),
    "forest": random_nodes(4, 12, 1, 9, roots=0.3),
}
MODULES = {"gdn": TreeGDN, "kda": TreeKDA, "ssd": TreeSSD}
NO_EXPORTS = np.empty(0, np.int64)


def random_inputs(n, heads_k=2, heads=4, key=5, value=3, rule="gdn"):
    """Returns q, k, v, g and, unless ``rule`` is "ssd", beta in float64. For "kda", a channel decays fast."""
    q, k = (torch.randn(n, heads_k, key, dtype=torch.float64) for _ in range(2))
    v = torch.randn(n, heads, value, dtype=torch.float64)
    g, beta = -torch.rand(n, heads, dtype=torch.float64), torch.rand(n, heads, dtype=torch.float64)
    if rule == "kda":
        g = -torch.rand(n, heads, key, dtype=torch.float64)
        g[..., 1] = -20  # its sum over a chunk of 64 tokens is beyond the range of exp
    return [x.requires_grad_() for x in ((q, k, v, g) if rule == "ssd" else (q, k, v, g, beta))]


def assert_close(got, want):
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@for_each("name, rule", [*product(TREES, ["gdn"]), *product(["star", "deep"], ["kda", "ssd"])])
def test_reference_equals_recurrence(name, rule):
    before = predecessors(TREES[name])
    x = random_inputs(len(before), rule=rule)
    do = torch.randn_like(x[2])
    q, k, v, g, beta = x if len(x) == 5 else (*x, None)
    want, _ = path_recurrence(q, k, v, g, beta, predecessor=before, exports=NO_EXPORTS)
    want = [want, *torch.autograd.grad(want, x, do)]
    for size in (1, 4, 64):
        out, states = recurrence(q, k, v, g, beta, None, recurrent_layout(before, size=size).chunks)
        assert not len(states)
        assert_close([out, *torch.autograd.grad(out, x, do)], want)


@pytest.mark.parametrize("rule", MODULES)
@pytest.mark.parametrize("size", [2, 64])
def test_states_come_from_gateways_and_are_exported(size, rule):
    """Pieces continue rows 1 and 3 of a gateway, one piece is a root; one state is exported twice."""
    before = np.array([-3, 0, 1, 1, -5, 4, -1, 6, -3])
    exports = np.array([1, 1, 5, 8])
    tensors = random_inputs(len(before), rule=rule)
    states = torch.randn(4, 4, 5, 3, dtype=torch.float64, requires_grad=True)
    x = [*tensors, states]
    layout = recurrent_layout(before, exports.tolist(), size)
    outputs = MODULES[rule]("reference")(*tensors, layout, states)
    beta = [None] if rule == "ssd" else []
    want = path_recurrence(*tensors, *beta, states, predecessor=before, exports=exports)
    upstream = [torch.randn_like(y) for y in outputs]
    gradients = torch.autograd.grad(outputs, x, upstream)
    assert_close([*outputs, *gradients], [*want, *torch.autograd.grad(want, x, upstream)])
    assert not gradients[-1][[0, 2]].any()  # no piece starts from these rows


@pytest.mark.parametrize("rule", MODULES)
def test_decays_to_zero_forget_the_past(rule):
    before = predecessors([(-1, 5), (0, 3), (0, 2)])
    x = random_inputs(len(before), rule=rule)
    x[3].data[[1, 4, 6]] = torch.tensor([-1e9, -torch.inf, -torch.inf], dtype=torch.float64).view(
        3, *[1] * (x[3].ndim - 1)
    )
    do, beta = torch.randn_like(x[2]), [None] if rule == "ssd" else []
    want, _ = path_recurrence(*x, *beta, predecessor=before, exports=NO_EXPORTS)
    got, _ = MODULES[rule]("reference")(*x, recurrent_layout(before))
    assert_close([got, *torch.autograd.grad(got, x, do)], [want, *torch.autograd.grad(want, x, do)])


@pytest.mark.parametrize("rule", MODULES)
def test_a_siblings_nan_stays_there(rule):
    """Its tokens 3 and 4 fill up the parent's chunk."""
    x = random_inputs(7, rule=rule)
    layout = recurrent_layout(predecessors([(-1, 3), (0, 2), (0, 2)]))
    want, _ = MODULES[rule]("reference")(*x, layout)
    for y in x:
        y.data[3:5] = torch.nan
    got, _ = MODULES[rule]("reference")(*x, layout)
    assert torch.equal(got[[0, 1, 2, 5, 6]], want[[0, 1, 2, 5, 6]])
    gradients = torch.autograd.grad(got[5:].sum(), x)
    assert not any(y[5:].isnan().any() for y in gradients)


def test_reference_passes_gradcheck():
    before = predecessors([(-1, 3), (0, 2), (0, 1)])
    chunks = recurrent_layout(before, size=2).chunks
    x = random_inputs(len(before), heads_k=1, heads=2, key=2, value=2)
    assert torch.autograd.gradcheck(lambda *x: recurrence(*x, None, chunks)[0], x)


def test_a_token_reads_its_ancestors_alone():
    """The derivative of an output with respect to a value is nonzero exactly on the output's own path."""
    before = predecessors(TREES["deep"])
    n = len(before)
    q, k, v, g, beta = random_inputs(n)
    chunks = recurrent_layout(before, size=4).chunks
    jacobian = torch.autograd.functional.jacobian(
        lambda v: recurrence(q, k, v, g, beta, None, chunks)[0].sum((1, 2)), v
    )
    reads = jacobian.abs().sum((2, 3)) > 0
    is_ancestor = torch.eye(n, dtype=torch.bool)
    for t in range(n):
        if before[t] >= 0:
            is_ancestor[t] |= is_ancestor[before[t]]
    assert torch.equal(reads, is_ancestor)


@for_each("seed", range(20))
def test_chunks_are_runs_of_one_path_and_end_at_exports(seed):
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


def test_shapes_that_do_not_fit_are_refused():
    before = predecessors(TREES["chain"])
    q, k, v, g, beta = random_inputs(len(before))
    layout = recurrent_layout(before)
    with pytest.raises(
        UserError, match=r"expected q, k \[N, H, K\], .* got \[30, 2, 5\], \[30, 2, 5\], \[30, 3"
    ):
        TreeGDN()(q, k, v[:, :3], g[:, :3], beta[:, :3], layout)
    with pytest.raises(UserError, match=r"^TreeKDA: .* and g \[N, G, K\], beta \[N, G\], got .* \[30, 4\]"):
        TreeKDA()(q, k, v, g, beta, layout)
    with pytest.raises(UserError, match=r"^TreeSSD: .* and g \[N, G\], got .* \[30, 4, 3\], \[30, 3\]$"):
        TreeSSD()(q, k, v, g[:, :3], layout)
    with pytest.raises(UserError, match="expected a layout of 30 tokens with chunks and chains"):
        TreeGDN()(
            q,
            k,
            v,
            g,
            beta,
            TreeLayout(
                positions=layout.positions, subtree_end=layout.subtree_end, key_index=layout.key_index
            ),
        )


def test_a_backend_asked_for_by_name_is_used_or_refused(monkeypatch):
    layout = recurrent_layout(predecessors(TREES["chain"]))
    small = random_inputs(30, key=5)
    fitting = [x.detach().float() for x in random_inputs(30, key=16, value=16)]
    with pytest.raises(UserError, match=r"unknown recurrence backend 'hoper'; did you mean 'hopper'\?"):
        TreeGDN("hoper")
    with pytest.raises(UserError, match=r"backend 'hopper' needs a GPU of compute capability 9.0.* got cpu"):
        TreeGDN("hopper")(*fitting, layout)
    with pytest.raises(UserError, match=r"backend 'triton' expected q, k and v all in bfloat16.*float64"):
        TreeGDN("triton")(*small, layout)
    with pytest.raises(UserError, match=r"backend 'triton' expected head dims .* got 5 and 3"):
        TreeGDN("triton")(*(x.detach().float() for x in small), layout)
    monkeypatch.setattr(triton_kernels, "INTERPRET", False)
    with pytest.raises(UserError, match="backend 'triton' needs a CUDA device, got cpu"):
        TreeGDN("triton")(*fitting, layout)


def test_auto_takes_the_first_automatic_backend_that_supports_the_tensors(monkeypatch):
    layout = recurrent_layout(predecessors(TREES["chain"]))
    x = random_inputs(30)
    calls = []

    class Spy:
        def __init__(self, name, automatic, reason):
            self.name, self.automatic, self.reason = name, automatic, reason

        def is_automatic(self, device):
            return self.automatic

        def refusal(self, *inputs):
            return self.reason

        def __getattr__(self, attribute):
            calls.append(self.name)
            return getattr(RECURRENCE_BACKENDS["reference"], attribute)

    entries = {
        "hopper": Spy("hopper", False, None),
        "triton": Spy("triton", True, "cannot"),
        "reference": RECURRENCE_BACKENDS["reference"],
        "mine": Spy("mine", True, None),
    }
    monkeypatch.setattr(RECURRENCE_BACKENDS, "_entries", entries)
    want = TreeGDN("reference")(*x, layout)[0]
    assert torch.equal(TreeGDN()(*x, layout)[0], want)
    assert not calls
    monkeypatch.setattr(RECURRENCE_BACKENDS["reference"], "is_automatic", lambda device: False)
    assert torch.equal(TreeGDN()(*x, layout)[0], want)
    assert set(calls) == {"mine"}
    entries["mine"].reason = "is busy"
    with pytest.raises(UserError, match="recurrence: backend 'triton' cannot; backend 'mine' is busy"):
        TreeGDN()(*x, layout)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests the choice on CPUs")
def test_auto_on_a_cpu_is_the_reference():
    device = torch.device("cpu")
    assert not hopper.is_automatic(device)
    assert not triton_kernels.is_automatic(device)
    assert RECURRENCE_BACKENDS["reference"].is_automatic(device)
