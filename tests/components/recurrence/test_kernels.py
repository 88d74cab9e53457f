"""The Triton kernels and the operator of the recurrences, against the recurrence on every path."""

import itertools
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.support.cases import exhaustive, slow_except
from tests.support.forests import (
    RecurrenceForest,
    arguments,
    assert_relative,
    exact_rule,
    forest,
    ladder,
    random_forest,
    recurrence_case,
    results,
    run_rule,
)
from titan_tree.components.recurrence import operator
from titan_tree.components.recurrence.launch import run_rounds
from titan_tree.components.recurrence.operator import tree_recurrence
from titan_tree.errors import UserError
from titan_tree.tree.chunks import make_chains, make_chunks

CASES = {
    "chain": RecurrenceForest(forest([-1], [150]), [], 0, 64, 1, 2, 32, 16),
    "two tokens": RecurrenceForest(forest([-1], [2]), [], 0, 64, 1, 1, 16, 16),
    "1-token nodes": RecurrenceForest(random_forest(1, 8, 1), [7, 3], 0, 16, 1, 1, 16, 16),
    "star": RecurrenceForest(forest([-1, 0, 0], [17, 1, 2]), [], 0, 16, 2, 4, 16, 16),
    "deep": RecurrenceForest(forest(ladder(4), [3] * 9), [], 0, 16, 1, 1, 16, 16),
    "forest": RecurrenceForest(forest([-1, 0, -1], [70, 9, 5]), [], 0, 64, 1, 3, 16, 32),
    # Rows 0 and 3 are read by nobody, row 1 twice. One token is exported twice, as padding is.
    "gateway": RecurrenceForest(
        forest([-1, 0, 0, -1, -1], [20, 10, 8, 5, 30], {0: 2, 3: 1, 4: 1}),
        [19, 40, 72, 72], 4, 16, 1, 2, 32, 16,
    ),
}  # fmt: skip
SMALL_GATEWAY = RecurrenceForest(forest([-1, 0, -1], [3, 2, 2], {0: 1}), [2, 6], 2, 64, 1, 2, 16, 16)

EVERYDAY = ("1-token nodes", "gdn"), ("two tokens", "gdn"), ("two tokens", "kda"), ("two tokens", "ssd")
SOME = [*product(CASES, ["gdn"]), *product(["two tokens", "gateway"], ["kda", "ssd"])]
OTHERS = [case for case in product(CASES, ["kda", "ssd"]) if case not in SOME]
INTERPRETED = [*slow_except(EVERYDAY, SOME), *exhaustive(OTHERS, OTHERS)]
in_interpreter = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton compiles if there is a GPU")


@in_interpreter
@pytest.mark.parametrize(("name", "rule"), INTERPRETED)
def test_interpreted_kernels_equal_recurrence(name, rule):
    case = recurrence_case(CASES[name], rule=rule)
    got = run_rule(case, "triton")
    assert_relative(got, exact_rule(case), 5e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("rule", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize("name", CASES)
def test_kernels_equal_recurrence_on_a_gpu(name, dtype, tolerance, rule):
    case = recurrence_case(CASES[name], dtype, "cuda", rule=rule)
    got = run_rule(case, "triton")
    assert_relative(got, exact_rule(case), tolerance)
    assert all(map(torch.equal, got, run_rule(case, "triton")))


@pytest.mark.parametrize("rule", ["gdn", "kda", "ssd"])
@pytest.mark.parametrize("name", CASES)
def test_reference_operator_equals_recurrence(name, rule):
    case = recurrence_case(CASES[name], rule=rule)
    assert_relative(run_rule(case, "reference"), exact_rule(case), 5e-6)


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("rule", exhaustive(("gdn", "kda"), ("gdn", "kda", "ssd")))
def test_a_sibling_changes_nothing(rule):
    """Other inputs of the second child's tokens 5 and 6 change no result of the other tokens in any bit."""
    case = recurrence_case(
        RecurrenceForest(forest([-1, 0, 0], [3, 2, 2]), [], 0, 64, 1, 2, 16, 16), rule=rule
    )
    case.upstream[0][5:] = 0  # so that the sibling sends no gradients to the tokens before it
    want = run_rule(case, "triton")
    for x in case.inputs:
        x.data[5:] = x.data[5:].flip(0) / 2
    got = run_rule(case, "triton")
    assert not torch.equal(got[0], want[0])
    assert all(torch.equal(a[:5], b[:5]) for a, b in zip(got, want, strict=True))
    for x in case.inputs:
        x.data[5:] = torch.nan
    got = run_rule(case, "triton")
    assert torch.equal(got[0][:5], want[0][:5])
    assert all(torch.equal(a[3:5], b[3:5]) for a, b in zip(got, want, strict=True))


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("rule", exhaustive(("ssd",), ("gdn", "kda", "ssd")))
def test_a_decay_to_zero_forgets_the_past(rule):
    sizes = RecurrenceForest(forest([-1], [3]), [], 0, 64, 1, 1, 16, 16)
    case = recurrence_case(sizes, hard=False, rule=rule)
    case.inputs[3].data[1] = -torch.inf
    assert_relative(run_rule(case, "triton"), exact_rule(case), 1e-5)


@in_interpreter
@pytest.mark.slow
def test_kda_reads_no_later_token():
    """Other inputs of tokens 5 .. 8 change no output of tokens 0 .. 4, of the same chunk, in any bit."""
    case = recurrence_case(RecurrenceForest(forest([-1], [9]), [], 0, 64, 1, 1, 16, 16), rule="kda")
    x = [y.detach() for y in case.inputs]
    changed = [torch.cat([y[:5], y[5:].flip(0) / 2]) for y in x]
    want, got = (tree_recurrence("triton", *y, None, case.chunks, case.chains)[0] for y in (x, changed))
    assert torch.equal(got[:5], want[:5])
    assert not (got[5:] == want[5:]).any()


@in_interpreter
@pytest.mark.slow
@pytest.mark.parametrize("factor", exhaustive((0,), (0, 1)))
def test_kda_with_equal_channels_is_gated_deltanet(factor):
    """factor: of g; 0: nothing decays."""
    case = recurrence_case(RecurrenceForest(forest([-1, 0], [66, 2]), [65], 0, 64, 1, 1, 16, 16))
    case.inputs[3].data *= factor
    want = run_rule(case, "triton")
    g = case.inputs[3].detach()[..., None].repeat(1, 1, 16).requires_grad_()
    got = run_rule(case._replace(inputs=[*case.inputs[:3], g, case.inputs[4]]), "triton")
    got[5] = got[5].sum(-1)
    assert_relative(got, [x.double() for x in want], 2e-6)


@in_interpreter
@pytest.mark.parametrize(
    ("channels", "tolerance"),
    [
        pytest.param(True, 2e-6, marks=pytest.mark.slow),
        pytest.param(False, 2e-5, marks=pytest.mark.exhaustive),
    ],
)
def test_kda_survives_decays_of_exp_minus_20(channels, tolerance):
    """Half of the channels, or a fifth of all numbers, decay fast. The sum over a chunk is exact to 1e-4."""
    case = recurrence_case(RecurrenceForest(forest([-1], [90]), [], 0, 64, 1, 1, 16, 16), rule="kda")
    g = case.inputs[3].data
    fast = torch.arange(g.shape[2]) % 2 == 0 if channels else torch.rand_like(g) < 0.2
    g.copy_(torch.where(fast, -20.0, g / 20))
    assert_relative(run_rule(case, "triton"), exact_rule(case), tolerance)


def test_strides_and_one_gradient_alone():
    """Only beta requires a gradient. Exported states are used alone, and beside a strided gradient of o."""
    case = recurrence_case(SMALL_GATEWAY)
    do, dexported = case.upstream
    alone, together = (exact_rule(case._replace(upstream=[x, dexported]))[-2] for x in (0 * do, do))
    *strided, do = (x.detach().mT.contiguous().mT for x in (*case.inputs, do))
    beta = strided[4].requires_grad_()
    for backend in ("triton", "reference"):
        if backend == "triton" and torch.cuda.is_available():
            continue
        o, exported = tree_recurrence(backend, *strided, case.chunks, case.chains)
        got = torch.autograd.grad(exported, beta, dexported, retain_graph=True)
        got += torch.autograd.grad([o, exported], beta, [do, dexported])
        assert_relative(got, [alone, together], 5e-6)


@torch.fx.experimental._config.patch(use_duck_shape=False)  # in small forests, sizes are equal by chance
def test_all_forests_share_one_compiled_graph():
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph

    def rule(chunks, chains, q, *others):
        return [tree_recurrence("reference", q.sin(), *others, None, chunks, chains)[0].cos()]

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


@pytest.mark.slow
def test_inductor_and_checkpointing_change_nothing():
    case = recurrence_case(CASES["gateway"])

    def rule(*x):
        return tree_recurrence("reference", *x, case.chunks, case.chains)

    want = results(rule, case.inputs, case.upstream)
    torch._dynamo.reset()
    for function in (
        torch.compile(rule, fullgraph=True, dynamic=True),
        lambda *x: checkpoint(rule, *x, use_reentrant=False),
    ):
        assert all(map(torch.equal, results(function, case.inputs, case.upstream), want))


@pytest.mark.slow
@pytest.mark.parametrize("rule", exhaustive(("kda", "ssd"), ("gdn", "kda", "ssd")))
@pytest.mark.parametrize("backend", [pytest.param("triton", marks=in_interpreter), "reference"])
def test_operator_keeps_its_contract(backend, rule):
    """Fake results have the true shapes, strides and dtypes, and inputs stay unchanged."""
    case = recurrence_case(SMALL_GATEWAY, rule=rule)
    inputs = [x if x is None else x.detach() for x in arguments(case, case.inputs)]
    metadata = [*case.chunks, *case.chains]
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(operator.recurrence, (*inputs, metadata, backend), test_utils=tests)
    _, _, *saved = operator.recurrence(*inputs, metadata, backend)
    backward = *case.upstream, *inputs, saved, metadata, backend
    torch.library.opcheck(operator.recurrence_backward, backward, test_utils=tests)


def test_a_wrong_number_of_states_is_refused():
    case = recurrence_case(CASES["gateway"])
    with pytest.raises(UserError, match="expected 4 states from a gateway, got 3"):
        tree_recurrence("triton", *case.inputs[:-1], case.inputs[-1][1:], case.chunks, case.chains)


def test_a_launch_reads_only_slots_that_earlier_launches_fill():
    chains = make_chains(make_chunks(forest(ladder(4), [3] * 9), np.empty(0, np.int64), size=4))
    filled, launches = {-1}, []

    def run(first, end):
        launches.append((first, end))
        assert set(chains.source[first:end].tolist()) <= filled
        for chain in range(first, end):
            filled.update(chains.slot[chains.first[chain] : chains.end[chain]].tolist())

    run_rounds(run, chains)
    assert len(launches) > 2
    assert [first for first, _ in launches] == [0, *(end for _, end in launches[:-1])]


@pytest.mark.parametrize("seed", slow_except(range(10), range(30)))
def test_chains_are_maximal_runs_in_rounds(seed):
    rng = np.random.default_rng(seed)
    rows = int(rng.integers(0, 4))
    predecessor = random_forest(seed, int(rng.integers(1, 60)), int(rng.choice([1, 9])), 0.2, rows)
    exports = rng.integers(0, len(predecessor), int(rng.integers(0, 5)))
    chunks = make_chunks(predecessor, exports, size=4)
    chains = make_chains(chunks, rows)
    assert all(x.dtype == torch.int32 for x in chains[:-1])
    before, exported = chunks.before.tolist(), chunks.exported.tolist()
    slot, first_reader, first, end, source, exported_slots, reader_offsets, readers = (
        x.tolist() for x in chains[:-1]
    )
    num_chains, num_slots, num_chunks = chains.rounds[-1].tolist()
    assert num_chunks == len(before)

    # Every chunk is in exactly one chain, and chains are as long as possible.
    ranges = list(zip(first, end, strict=True))[:num_chains]
    assert sorted(itertools.chain(*(range(*x) for x in ranges))) == list(range(len(before)))
    for a, b in ranges:
        assert a == 0 or before[a] != a - 1
        assert [before[c] for c in range(a + 1, b)] == list(range(a, b - 1))

    # Every required state has its own slot, and there are no other slots.
    wanted = {c for a, _ in ranges if (c := before[a]) >= 0} | set(exported)
    assert {c for c in range(len(before)) if slot[c] >= 0} == wanted
    assert sorted(slot[c] for c in wanted) == list(range(rows, num_slots))
    for a, s in zip([a for a, _ in ranges], source, strict=False):
        assert s == (slot[before[a]] if before[a] >= 0 else -2 - before[a] if before[a] < -1 else -1)
    assert exported_slots == [slot[c] for c in exported]
    starts = source + exported_slots
    for s in range(len(reader_offsets) - 1):
        found = readers[reader_offsets[s] : reader_offsets[s + 1]]
        assert found == [i for i, x in enumerate(starts) if x == s]
    assert first_reader == [starts.index(s) if s >= 0 else -1 for s in slot]

    # A chain's round follows the round that fills its slot. Within a round, longer chains come first.
    chain_of = {c: i for i, x in enumerate(ranges) for c in range(*x)}
    edges = chains.rounds.tolist()
    assert edges[0] == [0, rows, 0]
    edge_of = [a for a, _, _ in edges]
    for (a, s, _), (b, t, needed) in itertools.pairwise(edges):
        assert needed == max(end[:b])
        lengths = [y - x for x, y in ranges[a:b]]
        assert lengths
        assert lengths == sorted(lengths, reverse=True)
        for i in range(a, b):
            origin = before[first[i]]
            earlier = edge_of[edge_of.index(a) - 1] if a else 0
            assert earlier <= chain_of[origin] < a if origin >= 0 else a == 0
        assert {slot[c] for i in range(a, b) for c in range(*ranges[i])} - {-1} == set(range(s, t))

    # torch.compile specializes on sizes 0 and 1.
    assert min(len(first), len(reader_offsets) - 1) >= 2


def test_long_chains_are_cut():
    chains = make_chains(make_chunks(forest([-1, 0, 0], [600, 40, 30]), np.empty(0, np.int64), size=1))
    ranges = list(zip(chains.first.tolist(), chains.end.tolist(), strict=True))
    assert ranges == [(0, 256), (256, 512), (512, 640), (640, 670)]
    assert chains.source.tolist() == [-1, 0, 1, 2]
    assert [int(chains.slot[c]) for c in (255, 511, 599)] == [0, 1, 2]
    assert chains.rounds.tolist() == [[0, 0, 0], [1, 1, 256], [2, 2, 512], [3, 3, 640], [4, 3, 670]]


def test_a_single_chunk_below_a_gateway_has_padded_chains():
    chains = make_chains(make_chunks(forest([-1], [3], {0: 5}), np.empty(0, np.int64)), 6)
    assert chains.source.tolist() == [5, -1]
    assert chains.rounds.tolist() == [[0, 6, 0], [1, 6, 1]]


def test_a_deep_forest_has_one_round_per_level():
    depth = 1000
    chains = make_chains(make_chunks(forest(ladder(depth), [1] * (2 * depth + 1)), np.empty(0, np.int64)))
    assert len(chains.rounds) == depth + 2
    assert chains.rounds[-1].tolist() == [depth + 1, depth, 2 * depth + 1]
    *moved, rounds = chains.map(lambda x: x.to("meta"))
    assert all(x.is_meta for x in moved)
    assert rounds is chains.rounds
