"""The kernels and the operator of the gated delta rule, against its recurrence along every path in fp64."""

import itertools
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from titan_tree.components.tree_gdn import operator
from titan_tree.components.tree_gdn.operator import gated_delta_rule
from titan_tree.errors import UserError
from titan_tree.tree.chains import make_chains
from titan_tree.tree.chunks import make_chunks

CUDA = torch.cuda.is_available()


def forest(parents, lengths, rows=None):
    """Predecessors of the tokens of nodes in DFS order. rows: {root: the gateway's row it goes on from}."""
    first = np.cumsum([0, *lengths])
    predecessor = np.arange(first[-1]) - 1
    for node, parent in enumerate(parents):
        root = -2 - rows[node] if rows and node in rows else -1
        predecessor[first[node]] = first[parent + 1] - 1 if parent >= 0 else root
    return predecessor.astype(np.int32)


def random_forest(seed, nodes, longest, root=0.0, rows=0):
    rng, path, parents, lengths, from_row = np.random.default_rng(seed), [], [], [], {}
    for node in range(nodes):
        path = [] if rng.random() < root else path[: 1 + int(len(path) * rng.random() ** 0.5)]
        parents.append(path[-1] if path else -1)
        if not path and rows and rng.random() < 0.7:
            from_row[node] = int(rng.integers(rows))
        lengths.append(int(rng.integers(1, longest + 1)))
        path.append(node)
    return forest(parents, lengths, from_row)


def ladder(depth):
    """Parents: each node has a leaf, and below it comes the next one. The chains are as deep as the tree."""
    return [-1, *itertools.chain(*((2 * i, 2 * i) for i in range(depth)))]


# predecessors, exported tokens, gateway rows, chunk size, key heads, value heads, K, V
CASES = {
    "chain": (forest([-1], [150]), [], 0, 64, 1, 2, 32, 16),
    "two tokens": (forest([-1], [2]), [], 0, 64, 1, 1, 16, 16),
    "1-token nodes": (random_forest(1, 14, 1), [13, 3], 0, 16, 2, 2, 16, 16),
    "star": (forest([-1] + [0] * 6, [20, 30, 9, 1, 17, 2, 5]), [], 0, 16, 2, 4, 16, 16),
    "deep": (forest(ladder(4), [3] * 9), [], 0, 16, 1, 2, 16, 16),
    "forest": (random_forest(4, 9, 40, 0.3), [], 0, 64, 1, 3, 16, 32),
    # Rows 0 and 3 are read by nobody, row 1 twice; one token is exported twice, as padding is.
    "gateway": (
        forest([-1, 0, 0, -1, -1], [20, 10, 8, 5, 30], {0: 2, 3: 1, 4: 1}),
        [19, 40, 72, 72], 4, 16, 1, 2, 32, 16,
    ),
}  # fmt: skip


def case(name, dtype=torch.float32, device="cpu", seed=0):
    """Inputs (states last, if any), upstream gradients, and where things are."""
    predecessor, exports, rows, size, heads_k, heads, width_k, width = CASES[name]
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape):
        return torch.randn(*shape, generator=generator)

    n = len(predecessor)
    q, k, v = (
        randn(n, heads_k, width_k),
        randn(n, heads_k, width_k) + randn(1, heads_k, width_k),
        randn(n, heads, width),
    )
    g, beta = F.logsigmoid(randn(n, heads) + 2), randn(n, heads).sigmoid()
    beta[n // 2] = 0  # has a gradient, too
    states = [0.3 * randn(rows, heads, width_k, width)] if rows else []
    upstream = [randn(n, heads, width).to(dtype), randn(len(exports), heads, width_k, width)]
    inputs = [
        x.to(device, dtype if i < 3 else None).requires_grad_()
        for i, x in enumerate([q, k, v, g, beta, *states])
    ]
    exports = np.array(exports, np.int64)
    chunks = make_chunks(predecessor, exports, size)
    return inputs, [x.to(device) for x in upstream], predecessor, exports, chunks, make_chains(chunks, rows)


def results(function, inputs, upstream):
    outputs = function(*inputs)
    upstream = [dy.to(y.dtype) for y, dy in zip(outputs, upstream, strict=True)]
    outputs, upstream = zip(
        *((y, dy) for y, dy in zip(outputs, upstream, strict=True) if len(y)), strict=True
    )
    return [x.detach() for x in (*outputs, *torch.autograd.grad(outputs, inputs, upstream))]


def recurrence(q, k, v, g, beta, states=None, *, predecessor, exports):
    """Every root-to-leaf path for itself, token by token. A token's output is any of its paths'."""
    group = v.shape[1] // k.shape[1]
    q, k = (
        (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(group, 1) for x in (q, k)
    )
    outputs, after = {}, {}
    for leaf in set(range(len(v))) - set(predecessor.tolist()):
        path = [leaf]
        while path[-1] >= 0:
            path.append(int(predecessor[path[-1]]))
        root, *path = reversed(path)
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2]) if root == -1 else states[-2 - root]
        for t in path:
            state = state * g[t].exp()[:, None, None]
            error = v[t] - torch.einsum("gkv,gk->gv", state, k[t])
            state = state + torch.einsum("gk,gv->gkv", k[t], beta[t][:, None] * error)
            outputs[t] = torch.einsum("gkv,gk->gv", state, q[t]) * k.shape[2] ** -0.5
            after[t] = state
    exported = [after[t] for t in exports.tolist()]
    return torch.stack([outputs[t] for t in range(len(v))]), torch.stack(exported) if exported else v[:0]


def exact(inputs, upstream, predecessor, exports):
    wide = [x.detach().double().cpu().requires_grad_() for x in inputs]
    return results(
        lambda *x: recurrence(*x, predecessor=predecessor, exports=exports), wide, [x.cpu() for x in upstream]
    )


def run(inputs, upstream, chunks, chains, device="cpu", kernels=True):
    chunks, chains = type(chunks)(*(x.to(device) for x in chunks)), chains.map(lambda x: x.to(device))

    def rule(q, k, v, g, beta, states=None):
        return gated_delta_rule(q, k, v, g, beta, states, chunks, chains, kernels)

    return results(rule, inputs, upstream)


def assert_close(got, want, tolerance):
    """Outputs, then gradients of q, k, v, g, beta and states."""
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert (a.double().cpu() - b).norm() < tolerance * b.norm()


@pytest.mark.skipif(CUDA, reason="Triton compiles where there is a GPU")
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_in_the_interpreter(name):
    inputs, upstream, predecessor, exports, chunks, chains = case(name)
    got = run(inputs, upstream, chunks, chains)
    assert_close(got, exact(inputs, upstream, predecessor, exports), 5e-6)
    if name in ("1-token nodes", "gateway"):
        again = run(inputs, upstream, chunks, chains)
        assert all(map(torch.equal, got, again))


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_on_a_gpu(name, dtype, tolerance):
    inputs, upstream, predecessor, exports, chunks, chains = case(name, dtype, "cuda")
    got = run(inputs, upstream, chunks, chains, "cuda")
    assert_close(got, exact(inputs, upstream, predecessor, exports), tolerance)
    again = run(inputs, upstream, chunks, chains, "cuda")
    assert all(map(torch.equal, got, again))


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_of_the_reference(name):
    inputs, upstream, predecessor, exports, chunks, chains = case(name)
    got = run(inputs, upstream, chunks, chains, kernels=False)
    assert_close(got, exact(inputs, upstream, predecessor, exports), 5e-6)


def test_strided_inputs_and_one_gradient_alone():
    """Only the exported states are used, and only beta asks for a gradient."""
    inputs, upstream, predecessor, exports, chunks, chains = case("gateway")
    want = exact(inputs, [torch.zeros_like(upstream[0]), upstream[1]], predecessor, exports)
    strided = [x.detach().mT.contiguous().mT for x in inputs]
    beta = strided[4].requires_grad_()
    _, exported = gated_delta_rule(*strided, chunks, chains, True)
    (dbeta,) = torch.autograd.grad(exported, beta, upstream[1])
    assert_close([dbeta], [want[-2]], 5e-6)


@torch.fx.experimental._config.patch(use_duck_shape=False)  # sizes of small forests are equal by chance
def test_compiled_is_one_graph_for_all_forests():
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    def rule(chunks, chains, q, *others):
        return [gated_delta_rule(q.sin(), *others, None, chunks, chains, False)[0].cos()]

    torch._dynamo.reset()
    compiled = torch.compile(rule, backend=backend, fullgraph=True, dynamic=True)
    for predecessor in (forest([-1, 0, 0], [70, 3, 2]), random_forest(5, 12, 9, 0.2), forest([-1], [130])):
        chunks = make_chunks(predecessor, np.empty(0, np.int64))
        n, chains = len(predecessor), make_chains(chunks)
        x = [torch.randn(n, 2, 16) for _ in range(3)] + [-torch.rand(n, 2), torch.rand(n, 2)]
        for y in x:
            y.requires_grad_()
        do = torch.randn(n, 2, 16)
        got, want = (results(partial(f, chunks, chains), x, [do]) for f in (compiled, rule))
        assert all(map(torch.equal, got, want))
    assert len(graphs) == 1


def test_inductor_and_checkpointing():
    inputs, upstream, _, _, chunks, chains = case("gateway")

    def rule(*x):
        return gated_delta_rule(*x, chunks, chains, False)

    want = results(rule, inputs, upstream)
    torch._dynamo.reset()
    for function in (
        torch.compile(rule, fullgraph=True, dynamic=True),
        lambda *x: checkpoint(rule, *x, use_reentrant=False),
    ):
        assert all(map(torch.equal, results(function, inputs, upstream), want))


@pytest.mark.parametrize("kernels", [pytest.param(True, marks=pytest.mark.skipif(CUDA, reason="CPU")), False])
def test_the_operator_keeps_its_promises(kernels):
    """Shapes, strides and dtypes of the fake kernels are those of the real ones, no input is changed, ..."""
    inputs, upstream, _, _, chunks, chains = case("gateway")
    metadata = [*chunks, *chains]
    tests = ("test_schema", "test_faketensor", "test_autograd_registration")
    torch.library.opcheck(operator.tree_gdn, (*inputs, metadata, kernels), test_utils=tests)
    plain = [x.detach() for x in inputs]
    _, _, *saved = operator.tree_gdn(*plain, metadata, kernels)
    arguments = *upstream, *plain, saved, metadata, kernels
    torch.library.opcheck(operator.tree_gdn_backward, arguments, test_utils=tests)


def test_limits_have_messages():
    inputs, _, _, _, chunks, chains = case("gateway")
    q, k, v, *_ = inputs
    with pytest.raises(UserError, match="float64"):
        operator.check(q, k, v.double())
    with pytest.raises(UserError, match="got 8 and 16"):
        operator.check(q[..., :8], k[..., :8], v)
    with pytest.raises(UserError, match="expected 4 states, got 3"):
        gated_delta_rule(*inputs[:-1], inputs[-1][1:], chunks, chains, True)


@pytest.mark.parametrize("seed", range(30))
def test_chains_are_the_obvious_ones(seed):
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(0, 4))
    predecessor = random_forest(seed, int(rng.integers(1, 60)), int(rng.choice([1, 9])), 0.2, rows)
    exports = rng.integers(0, len(predecessor), int(rng.integers(0, 5)))
    chunks = make_chunks(predecessor, exports, size=4)
    chains = make_chains(chunks, rows)
    assert all(x.dtype == torch.int32 for x in chains[:-1])
    before, exported = chunks.before.tolist(), chunks.exported.tolist()
    slot, first, end, source, exported_slots, first_child, child = (x.tolist() for x in chains[:-1])
    num_chains, num_slots = chains.rounds[-1].tolist()

    # Chains are all chunks, each once, in runs that are as long as can be.
    ranges = list(zip(first, end, strict=True))[:num_chains]
    assert sorted(itertools.chain(*(range(*x) for x in ranges))) == list(range(len(before)))
    for a, b in ranges:
        assert a == 0 or before[a] != a - 1
        assert [before[c] for c in range(a + 1, b)] == list(range(a, b - 1))

    # Slots: who wants a state finds it, and nobody else's.
    wanted = {c for a, _ in ranges if (c := before[a]) >= 0} | set(exported)
    assert {c for c in range(len(before)) if slot[c] >= 0} == wanted
    assert sorted(slot[c] for c in wanted) == list(range(rows, num_slots))
    for a, s in zip([a for a, _ in ranges], source, strict=False):
        assert s == (slot[before[a]] if before[a] >= 0 else -2 - before[a] if before[a] < -1 else -1)
    assert exported_slots == [slot[c] for c in exported]
    starts = source + exported_slots
    for s in range(len(first_child) - 1):
        children = child[first_child[s] : first_child[s + 1]]
        assert children == [i for i, x in enumerate(starts) if x == s]

    # Rounds: a chain is one after that which it starts from, so that its slot is full; long ones are first.
    chain_of = {c: i for i, x in enumerate(ranges) for c in range(*x)}
    edges = chains.rounds.tolist()
    assert edges[0] == [0, rows]
    for (a, s), (b, t) in itertools.pairwise(edges):
        lengths = [y - x for x, y in ranges[a:b]]
        assert lengths
        assert lengths == sorted(lengths, reverse=True)
        for i in range(a, b):
            origin = before[first[i]]
            earlier = edges[edges.index([a, s]) - 1][0] if a else 0
            assert earlier <= chain_of[origin] < a if origin >= 0 else a == 0
        assert {slot[c] for i in range(a, b) for c in range(*ranges[i])} - {-1} == set(range(s, t))

    # torch.compile would make other graphs for sizes of 0 and 1.
    assert min(len(first), len(first_child) - 1) >= 2


def test_chains_of_a_single_chunk_below_a_gateway():
    chains = make_chains(make_chunks(forest([-1], [3], {0: 5}), np.empty(0, np.int64)), 6)
    assert chains.source.tolist() == [5, -1]
    assert chains.rounds.tolist() == [[0, 6], [1, 6]]


def test_chains_of_deep_forests():
    depth = 1000
    chains = make_chains(make_chunks(forest(ladder(depth), [1] * (2 * depth + 1)), np.empty(0, np.int64)))
    assert len(chains.rounds) == depth + 2
    assert chains.rounds[-1].tolist() == [depth + 1, depth]
    *moved, rounds = chains.map(lambda x: x.to("meta"))
    assert all(x.is_meta for x in moved)
    assert rounds is chains.rounds
