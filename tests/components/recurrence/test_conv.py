"""The causal convolution on trees: the definition, the operator and its kernels, against every path alone."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.support.cases import exhaustive, slow_except
from tests.support.forests import leaves, path_of, predecessors, recurrent_layout
from tests.support.layouts import random_nodes
from titan_tree.components.recurrence import conv, reference
from titan_tree.errors import UserError

TREES = {
    "one token": [(-1, 1)],
    "roots of 1": [(-1, 1)] * 5,
    "star": [(-1, 5), *[(0, 2)] * 6],
    "star of 1-token nodes": [(-1, 1), *[(0, 1)] * 10],
    "1- and 2-token nodes": random_nodes(1, 10, 1, 2),
    "forest": random_nodes(2, 9, 1, 7, roots=0.2),
    "deep": random_nodes(3, 9, 1, 3, roots=0.0),
    "branch at a chunk's edge": [(-1, 64), (0, 3), (1, 69), (0, 1), (3, 2)],
}


def make_layout(before, exports=(), device="cpu"):
    return recurrent_layout(before, exports).to(device)


def by_paths(x, weight, before, bias=None, activation=F.silu):
    """Returns silu(conv1d) of every root-to-leaf path. A token's results on its paths are equal."""
    y = [None] * len(x)
    for leaf in leaves(before):
        path = path_of(leaf, before)
        padded = F.pad(x[path].t(), (weight.shape[1] - 1, 0))
        out = activation(F.conv1d(padded[None], weight[:, None], bias, groups=len(weight)))[0].t()
        for token, row in zip(path, out, strict=True):
            y[token] = row
    return torch.stack(y)


def cut(convolve, x, weight, before, level):
    """Returns y of a tree computed in partitions, level 0 first; a gateway cache passes tails on."""
    cache = x.new_full((2, weight.shape[1] - 1, x.shape[1]), torch.nan)  # rows that nobody reads
    rows, order, outputs = {}, [], []
    follows = [(p, t) for t, p in enumerate(before) if p >= 0 and level[p] < level[t]]
    for this in range(level.max() + 1):
        own = np.flatnonzero(level == this)
        place = {token: i for i, token in enumerate(own)}
        part = np.array([-1 if p < 0 else place.get(p, -2 - rows.get(p, 0)) for p in before[own]])
        wanted = sorted({p for p, _ in follows if level[p] == this}, key=lambda p: -p)
        exports = np.array([place[p] for p in wanted] + [len(own) - 1] * 2)  # two more, as padding has
        y, tails = convolve(x[torch.from_numpy(own)], weight, make_layout(part, exports, x.device), cache)
        rows |= {p: len(cache) + i for i, p in enumerate(wanted)}
        cache = torch.cat([cache, tails])
        order.append(own)
        outputs.append(y)
    return torch.cat(outputs)[torch.from_numpy(np.concatenate(order).argsort())]


def random_levels(before, seed, share=0.2):
    """Returns [N]: how many times the path to each token is cut."""
    rng = np.random.default_rng(seed)
    level = np.zeros(len(before), int)
    for token, p in enumerate(before):
        level[token] = 0 if p < 0 else min(level[p] + (rng.random() < share), 3)
    return level


@dataclass
class Way:
    convolve: object
    dtype: torch.dtype
    tolerance: float
    device: str = "cpu"

    def inputs(self, n, channels=5, width=4, seed=0):
        """Returns x, weight and a gradient of y, the same numbers for every dtype."""
        generator = torch.Generator().manual_seed(seed)
        sizes = (n, channels), (channels, width), (n, channels)
        tensors = [torch.randn(*s, generator=generator).to(self.device, self.dtype) for s in sizes]
        return [t.requires_grad_(i < 2) for i, t in enumerate(tensors)]

    def assert_equal(self, y, inputs, want_y, want_inputs, dy):
        """Asserts that y and the gradients of inputs equal those in float64."""
        got = y, *torch.autograd.grad(y, inputs, dy)
        want = want_y, *torch.autograd.grad(want_y, want_inputs, dy.double())
        for a, b, like in zip(got, want, (y, *inputs), strict=True):
            assert a.shape == b.shape
            assert a.dtype == like.dtype
            assert ((a - b).norm() <= self.tolerance * b.norm()).item()


@pytest.fixture(params=["reference", "operator", "interpreted", pytest.param("cuda", marks=pytest.mark.gpu)])
def way(request, monkeypatch):
    """Returns the implementation: the definition, or the operator in PyTorch, interpreted, or on a GPU."""
    if request.param == "reference":
        return Way(reference.tree_causal_conv1d, torch.float64, 1e-13)
    if request.param == "operator":
        return Way(conv.tree_causal_conv1d, torch.float64, 1e-13)
    if request.param == "cuda":
        return Way(conv.tree_causal_conv1d, torch.float32, 2e-6, "cuda")
    if torch.cuda.is_available():
        pytest.skip("Triton compiles if there is a GPU")
    monkeypatch.setattr(conv, "_use_kernels", lambda x: True)
    return Way(conv.tree_causal_conv1d, torch.float32, 2e-6)


def doubles(*tensors):
    return [t.detach().double().requires_grad_() for t in tensors]


EVERYDAY = ("roots of 1", "1- and 2-token nodes")
COVERED = ("star of 1-token nodes", "deep")  # other trees have the same parts
CUTS = [("star", 0.6), ("1- and 2-token nodes", 0.15), ("forest", 0.15), ("deep", 0.6)]


@pytest.mark.parametrize("name", slow_except(EVERYDAY, exhaustive(COVERED, TREES)))
def test_a_tree_equals_its_paths(name, way):
    before = predecessors(TREES[name])
    x, weight, dy = way.inputs(len(before))
    y, tails = way.convolve(x, weight, make_layout(before, device=way.device))
    assert tails is None
    exact = doubles(x, weight)
    way.assert_equal(y, (x, weight), by_paths(*exact, before), exact, dy)


@pytest.mark.parametrize(
    ("channels", "width"), slow_except([(1, 2), (5, 3)], [(3, 1), (1, 2), (5, 3), (2, 6), (300, 4)])
)
def test_any_number_of_channels_and_taps_works(channels, width, way):
    before = predecessors(random_nodes(4, 6, 1, 4, roots=0.2))
    x, weight, dy = way.inputs(len(before), channels, width)
    y, _ = way.convolve(x, weight, make_layout(before, device=way.device))
    exact = doubles(x, weight)
    way.assert_equal(y, (x, weight), by_paths(*exact, before), exact, dy)


@pytest.mark.parametrize(
    ("silu", "has_bias"), slow_except([(False, True)], [(True, True), (False, False), (False, True)])
)
def test_bias_and_no_activation_work_in_partitions(silu, has_bias, way):
    before = predecessors([(-1, 2), (0, 1), (0, 1)])
    x, weight, dy = way.inputs(len(before))
    bias = torch.linspace(-1, 1, 5).to(x).requires_grad_() if has_bias else None
    leaves = (x, weight) if bias is None else (x, weight, bias)

    def convolve(*inputs):
        return way.convolve(*inputs, bias=bias, silu=silu)

    y = cut(convolve, x, weight, before, np.array([0, 1, 1, 2]))
    exact = doubles(*leaves)
    want = by_paths(*exact[:2], before, *exact[2:], activation=F.silu if silu else lambda z: z)
    way.assert_equal(y, leaves, want, exact, dy)


@pytest.mark.parametrize(
    ("name", "share"),
    slow_except(
        [("1- and 2-token nodes", 0.15)],
        exhaustive([("star", 0.6), ("forest", 0.15)], CUTS),
    ),
)
def test_partitions_equal_the_unpartitioned_tree(name, share, way):
    before = predecessors(TREES[name])
    level = random_levels(before, seed=0, share=share)
    assert level.max() > 0
    x, weight, dy = way.inputs(len(before))
    exact = doubles(x, weight)
    y = cut(way.convolve, x, weight, before, level)
    way.assert_equal(y, (x, weight), by_paths(*exact, before), exact, dy)


def test_exported_tails_are_the_last_inputs(way):
    """Gradients of gateway rows and of tokens that several windows or exports read are compared, too."""
    before, exports = np.array([-4, 0, 1, -2, 3, 3, -1, -4]), np.array([1, 3, 6, 1])
    x, weight, dy = way.inputs(8)
    tails, _, dtails = way.inputs(4 * 3)  # rows 0 .. 3; nobody reads rows 1 and 3
    tails, dtails = (t.detach().view(4, 3, 5) for t in (tails, dtails))
    tails[[1, 3]] = torch.nan
    tails.requires_grad_()
    y, got = way.convolve(x, weight, make_layout(before, exports, way.device), tails)
    zero = torch.zeros_like(x[0])
    one = torch.stack([tails[2, 2], x[0], x[1]])  # the last three inputs at token 1
    want = torch.stack(
        [one, torch.stack([tails[0, 1], tails[0, 2], x[3]]), torch.stack([zero, zero, x[6]]), one]
    )
    assert torch.equal(got, want)
    windows = [
        *((tails[2, 0], tails[2, 1], tails[2, 2], x[0]), (tails[2, 1], *one), (*one, x[2])),
        *((*tails[0], x[3]), (*tails[0, 1:], x[3], x[4]), (*tails[0, 1:], x[3], x[5])),
        *((zero, zero, zero, x[6]), (*tails[2], x[7])),
    ]
    want_y = F.silu((torch.stack([torch.stack(window) for window in windows]) * weight.t()).sum(1))
    leaves, gradients = (x, weight, tails), (dy, dtails)
    grads = torch.autograd.grad((y, got), leaves, gradients)
    want_grads = torch.autograd.grad((want_y, want), leaves, gradients)
    assert torch.equal(grads[2][[1, 3]], torch.zeros_like(tails[[1, 3]]))
    for a, b in zip((y, *grads), (want_y, *want_grads), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-14 if way.dtype == torch.float64 else 2e-6)


@pytest.mark.parametrize("convolve", [reference.tree_causal_conv1d, conv.tree_causal_conv1d])
def test_gradients_pass_gradcheck(convolve):
    layout = make_layout(np.array([-3, 0, 1, 1, -1, -2, 5]), np.array([1, 5, 6, 6]))
    x, weight, tails = (
        torch.randn(*size, dtype=torch.float64, requires_grad=True) for size in ((7, 2), (2, 4), (2, 3, 2))
    )
    assert torch.autograd.gradcheck(lambda x, w, t: convolve(x, w, layout, t), (x, weight, tails))


def test_nothing_leaks(way):
    """A token changes exactly the windows with it, and a window's gradient reaches exactly its tokens."""
    before = predecessors(TREES["forest"])
    n = len(before)
    in_window = np.zeros((n, n), bool)
    for token in range(n):
        in_window[token, path_of(token, before)[-4:]] = True
    x, weight, _ = way.inputs(n)
    layout = make_layout(before, device=way.device)
    y, _ = way.convolve(x, weight, layout)
    for token in np.random.default_rng(0).choice(n, 3, replace=False):
        with torch.no_grad():
            other = x.clone()
            other[token] += 1
            changed = (way.convolve(other, weight, layout)[0] != y).cpu().numpy()
        assert (changed == in_window[:, token, None]).all()
        (dx,) = torch.autograd.grad(y[token].sum(), x, retain_graph=True)
        assert ((dx != 0).cpu().numpy() == in_window[token, :, None]).all()


# Triton's interpreter runs one program after another.
@pytest.mark.parametrize(
    "way", ["reference", "operator", pytest.param("cuda", marks=pytest.mark.gpu)], indirect=True
)
def test_results_repeat_bit_for_bit(way):
    before = predecessors(TREES["deep"])
    level = random_levels(before, seed=1)
    x, weight, dy = way.inputs(len(before))

    def results():
        y = cut(way.convolve, x, weight, before, level)
        return y, *torch.autograd.grad(y, (x, weight), dy)

    assert all(map(torch.equal, results(), results()))


@pytest.mark.slow
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_bf16_is_rounded_once(weight_dtype, way):
    """Results are the nearest bf16 numbers, up to fp32 rounding. The interpreter rounds towards zero."""
    if way.convolve is reference.tree_causal_conv1d:
        pytest.skip("the definition sums dx in bf16")
    before = predecessors(TREES["star of 1-token nodes"])
    x, weight, dy = (t.detach().bfloat16() for t in way.inputs(len(before)))
    x, weight = x.requires_grad_(), weight.to(weight_dtype).requires_grad_()
    y, _ = way.convolve(x, weight, make_layout(before, device=way.device))
    exact = doubles(x, weight)
    want = by_paths(*exact, before)
    want = want, *torch.autograd.grad(want, exact, dy.double())
    for got, exact in zip((y, *torch.autograd.grad(y, (x, weight), dy)), want, strict=True):
        unit = 2.0**-8 if way.dtype == torch.float32 and way.device == "cpu" else 2.0**-9
        assert got.dtype == (weight_dtype if got.shape == weight.shape else torch.bfloat16)
        assert ((got - exact).abs() <= unit * 2 ** exact.abs().log2().ceil() + 2e-6).all()


@pytest.mark.slow
def test_operators_keep_their_contract():
    """Fake results have the true shapes, strides and dtypes, and inputs stay unchanged."""
    layout = make_layout(np.array([-3, 0, 1, 1, -1, -2, 5]), np.array([1, 5, 6]))
    x, weight, tails = (torch.randn(size) for size in ((7, 2), (2, 4), (2, 3, 2)))
    root = make_layout(np.array([-1, 0, 1, 1, -1, 4, 5]))
    for x_dtype, old, plan in (
        (torch.float32, tails, conv.prepare(layout, 4)),
        (torch.bfloat16, None, conv.prepare(root, 4)),
    ):
        inputs = x.to(x_dtype), weight, None if old is None else torch.randn(2), old
        options = list(plan), old is not None
        torch.library.opcheck(conv.tree_conv, (*inputs, *options))
        upstream = torch.randn(7, 2), torch.randn(*plan.exported.shape, 2)
        torch.library.opcheck(conv.tree_conv_backward, (*upstream, *inputs, *options))


@pytest.mark.parametrize("recompute", [False, True])
@torch.fx.experimental._config.patch(use_duck_shape=False)  # as distributed/compiling.py sets it
def test_all_trees_share_one_compiled_graph(recompute):
    """With fullgraph, dynamic shapes and checkpointing, numbers are equal and one graph serves all trees."""
    graphs = 0

    def count_graphs(graph, inputs):
        nonlocal graphs
        graphs += 1
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    weight = torch.nn.Parameter(torch.randn(5, 4))

    def block(x, layout, tails, plan):
        y, tails = conv.tree_causal_conv1d(x * 2, weight, layout, tails, plan)
        return y.sin(), tails.cos()

    def maybe_recomputed(*inputs):
        return checkpoint(block, *inputs, use_reentrant=False) if recompute else block(*inputs)

    torch._dynamo.reset()
    compiled = torch.compile(maybe_recomputed, fullgraph=True, dynamic=True, backend=count_graphs)
    for seed in (5, 6, 7):
        before = predecessors(random_nodes(seed, 4 + seed, 1, 6, roots=0.3))
        before[np.flatnonzero(before == -1)[-1]] = -3
        layout = make_layout(before, np.arange(seed - 3))
        plan = conv.prepare(layout, 4)
        x, tails = (torch.randn(*s, requires_grad=True) for s in ((len(before), 5), (seed + 4, 3, 5)))
        got, want = compiled(x, layout, tails, plan), block(x, layout, tails, plan)
        leaves, gradients = (x, weight, tails), [torch.randn_like(t) for t in want]
        got, want = ((*y, *torch.autograd.grad(y, leaves, gradients)) for y in (got, want))
        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
    assert graphs == 1


def test_a_call_without_an_index_compiles():
    compiled = torch.compile(conv.tree_causal_conv1d, fullgraph=True, dynamic=True, backend="eager")
    before = predecessors(TREES["forest"])
    x, weight = torch.randn(len(before), 5), torch.randn(5, 4)
    y, _ = compiled(x, weight, make_layout(before))
    torch.testing.assert_close(y, by_paths(x, weight, before))


def test_inputs_that_do_not_fit_are_refused():
    layout = make_layout(np.array([-1, 0, 1]))
    x, weight = torch.randn(3, 5), torch.randn(5, 4)
    with pytest.raises(UserError, match="expected a layout of 4 tokens"):
        conv.tree_causal_conv1d(torch.randn(4, 5), weight, layout)
    for tails in (torch.randn(2, 4, 5), torch.randn(2, 3, 5, dtype=torch.float64)):
        with pytest.raises(UserError, match=r"tails .* of x's dtype"):
            conv.tree_causal_conv1d(x, weight, layout, tails)
    with pytest.raises(UserError, match=r"weight \[D, W\]"):
        conv.tree_causal_conv1d(x, weight.t(), layout)
    with pytest.raises(UserError, match=r"bias \[D\] if any, .* got .*, \[4\] torch.float32$"):
        conv.tree_causal_conv1d(x, weight, layout, bias=torch.zeros(4))


def test_a_partition_needs_its_tails():
    """Without tails, its first tokens would silently see an empty past."""
    x, weight = torch.randn(3, 5), torch.randn(5, 4)
    with pytest.raises(UserError, match="expected the gateway's tails for a partition, got none"):
        conv.tree_causal_conv1d(x, weight, make_layout(np.array([-2, 0, 1]), np.array([2])))
