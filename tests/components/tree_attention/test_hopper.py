"""The Gluon kernels of attention on a CPU, emulated to test their logic."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.support.gluon_emulator import Descriptor, EmulatedKernel, Pointer, Program, here
from tests.support.layouts import (
    SMALL,
    Nodes,
    ancestor_mask,
    exact_attention,
    make_layout,
    random_nodes,
    random_qkv,
)
from titan_tree.components.tree_attention import Scoring, block_lists, hopper, triton_kernels
from titan_tree.components.tree_attention.block_lists import KEY_GROUP, KEYS, TILE, BlockLists, prepare
from titan_tree.components.tree_attention.hopper import (
    forward_pass,
    jobs,
    key_pass,
    query_pass,
    wide_key_pass,
)
from titan_tree.components.tree_attention.hopper import key_groups as work_items


class Case(NamedTuple):
    nodes: Nodes
    queries: np.ndarray | None = None  # key columns of the queries; None: all
    heads: tuple[int, int] = (2, 1)
    dim: int = 64
    dtype: torch.dtype = torch.float16


KERNELS = (
    (forward_pass, "_forward_kernel"),
    (key_pass, "_keys_kernel"),
    (wide_key_pass, "_wide_keys_kernel"),
    (query_pass, "_queries_kernel"),
)
SCALE = 0.1  # of scores
SOME = np.random.default_rng(0)
TRUNK: Nodes = [(-1, 300), *[(0, 3)] * 50]
FOREST = random_nodes(7, 60, 1, 12)
N_FOREST = sum(length for _, length in FOREST)
# Queries 160 .. 191 read key groups 5, 2 and 3, and one past the end.
SCATTERED: Nodes = [(-1, 64), (-1, 20), (1, 8), (1, 20), (3, 16), (3, 32), (3, 32), (-1, 64)]

CASES = {
    "one token": Case(SMALL["one token"], heads=(4, 4)),
    "chain of 129": Case(SMALL["chain of 129"], dim=128, dtype=torch.bfloat16),
    "star": Case(SMALL["star"], heads=(4, 1)),
    "forest": Case(FOREST, dim=128),
    "trunk": Case(TRUNK, heads=(4, 2)),
    "long": Case([(-1, 384), (0, 100), (0, 28)], heads=(1, 1), dim=128),
    "both sides": Case([(-1, 100), (0, 92), (0, 64)]),
    "two trees": Case(SMALL["two of 140"], dtype=torch.bfloat16),
    "last third of a forest": Case(FOREST, np.arange(N_FOREST - N_FOREST // 3, N_FOREST), heads=(2, 2)),
    "some of a forest": Case(FOREST, np.flatnonzero(SOME.random(N_FOREST) < 0.4), heads=(4, 1)),
    "some of a trunk": Case(TRUNK, np.flatnonzero(SOME.random(450) < 0.7), dim=128),
    "few, scattered groups": Case(SCATTERED, np.arange(160, 192), dim=128),
}


@pytest.fixture
def emulator(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Emulates 3 multiprocessors, cuts ranges of more than 4 tiles into jobs and fills memory with NaN.

    All heads are sorted together if there are less than 6 work items, so some cases sort each key head alone.
    """
    if not triton_kernels.INTERPRET:
        pytest.skip("the Triton kernels between the Gluon kernels need Triton's interpreter")
    for module in (forward_pass, query_pass):
        monkeypatch.setattr(module, "num_multiprocessors", lambda device: 3)
    monkeypatch.setattr(block_lists, "SHORTEST_JOB", 4)
    monkeypatch.setattr(work_items, "FEW_ITEMS", 6)
    torch.use_deterministic_algorithms(True)
    yield monkeypatch
    torch.use_deterministic_algorithms(False)


def error(got: torch.Tensor, exact: torch.Tensor, do: torch.Tensor) -> float:
    assert got.shape == exact.shape
    return ((got.double() - exact).norm() / do.double().norm()).item()


def assert_exact(monkeypatch: pytest.MonkeyPatch, case: Case) -> None:
    """Asserts small errors of output, lse and gradients against float64, relative to the norm of do."""
    layout, mask = make_layout(case.nodes, case.queries), ancestor_mask(case.nodes, case.queries)
    n, m = mask.shape
    q, k, v, do = random_qkv(n, m, case.heads, case.dim, dtype=case.dtype)
    exact = exact_attention(q.double() * (SCALE * case.dim**0.5), k, v, mask)
    exact_gradients = torch.autograd.grad(exact, (q, k, v), do.double())
    q, k, v = (x.detach() for x in (q, k, v))
    tree = layout.subtree_end, layout.key_index, prepare(layout)
    tolerance = 3e-4 if case.dtype == torch.float16 else 2e-3

    with monkeypatch.context() as patch:
        for module, kernel in KERNELS:
            emulated = EmulatedKernel(getattr(module, kernel), _tma_add=Descriptor.add)
            patch.setattr(module, kernel, emulated)
        options = SCALE, Scoring()
        o, lse = hopper.forward(q, k, v, *tree, *options)
        gradients = {
            deterministic: hopper.backward(do, q, k, v, o, lse, *tree, *options, deterministic)
            for deterministic in (True, False)
        }

    assert error(o, exact, do) < tolerance
    k_of_head = k.double().repeat_interleave(case.heads[0] // case.heads[1], 1)
    scores = torch.einsum("qhd,khd->hqk", q.double() * SCALE, k_of_head)
    exact_lse = scores.masked_fill(~mask, -torch.inf).logsumexp(-1) / math.log(2)
    assert (lse[:, :n] - exact_lse).abs().max() < 1e-5
    assert (lse[:, n:] == torch.inf).all()
    unseen = ~mask.any(0)
    for deterministic, got in gradients.items():
        for name, a, b in zip(["dq", "dk", "dv"], got, exact_gradients, strict=True):
            assert error(a, b, do) < tolerance, f"{name}, deterministic {deterministic}"
        assert not any(gradient[unseen].any() for gradient in got[1:])


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_emulated_kernels_equal_definition(name, emulator):
    assert_exact(emulator, CASES[name])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["star", "trunk", "few, scattered groups"])
def test_emulated_kernels_of_head_dim_256_equal_definition(name, emulator):
    heads = (2, 1) if name == "star" else (1, 1)
    assert_exact(emulator, CASES[name]._replace(dim=256, heads=heads))


@pytest.mark.parametrize(
    ("n_blocks", "heads"),
    [(64, (16, 8)), (128, (16, 8)), (128, (32, 8)), (256, (16, 16)), (256, (32, 8)), (270, (32, 8))],
)
def test_programs_get_equal_work(n_blocks, heads):
    """The query blocks of a chain have 1, 2, 3, ... steps. A GPU has 132 multiprocessors."""
    work_item = EmulatedKernel(work_items.work_item).function
    count_rounds = EmulatedKernel(work_items.count_rounds).function
    together = work_items.heads_together(n_blocks, *heads)
    order = Pointer(torch.arange(n_blocks).flip(0))
    lists = work_items.GroupLists(*[None] * 4, order, None, n_blocks, n_blocks * heads[0], together)
    seen, work = [], []
    for index in range(132):
        here.program = Program(index, 132, random.Random(0))
        items = [work_item(lists, turn, heads[0] // heads[1]) for turn in range(count_rounds(lists.n_items))]
        assert all(head // (heads[0] // heads[1]) == head_k for _, head, head_k in items)
        seen += [(int(block), int(head)) for block, head, _ in items]
        work.append(sum(int(block) + 1 for block, _, _ in items))
    assert sorted(seen) == [(block, head) for block in range(n_blocks) for head in range(heads[0])]
    assert max(work) < 1.04 * sum(work) / 132


@pytest.mark.parametrize("split", [1, 2])
def test_programs_take_each_job_and_head_once(split):
    """Jobs come in the order of their key blocks, but the last key head's heaviest jobs come first."""
    lists = prepare(make_layout([(-1, 3000), *[(0, 400)] * 6]))
    job_of, n_jobs, heads_k = EmulatedKernel(jobs.job_of).function, len(lists.job_block), 3
    names = "first_full", "end_full", "job_block", "job_begin", "job_end", "job_part", "job_order"
    columns = jobs.Jobs(*(Pointer(getattr(lists, name)) for name in names), n_jobs)
    taken = []
    for index in range(n_jobs * heads_k * split):
        here.program = Program(index, n_jobs * heads_k * split, random.Random(0))
        job = job_of(columns, index, TILE, KEYS, KEYS // split)
        taken.append(tuple(int(x) for x in (job.head_k, job.key, job.begin, job.end)))
    used = [job for job in taken if job[2] >= 0]
    n_used = int(lists.job_stop[-1]) * split
    assert len(set(used)) == len(used) == n_used * heads_k
    assert [job[0] for job in used] == [head for head in range(heads_k) for _ in range(n_used)]
    for head in range(heads_k - 1):
        of_head = used[head * n_used : (head + 1) * n_used : split]
        assert of_head == sorted(of_head)
    work = [end - begin for _, _, begin, end in used[-n_used:]]
    assert work == sorted(work, reverse=True) != [end - begin for _, _, begin, end in used[:n_used]]


def step_branches(lists: BlockLists, n_keys: int) -> set[str]:
    """Returns the branches that the forward pass takes for its lists of key groups, four per step."""
    taken = set()
    for i, groups in enumerate(lists.key_groups.tolist()):
        steps = [groups[j : j + 4] for j in range(0, int(lists.n_key_groups[i]), 4)]
        n_diagonal, n_masked = -(-int(lists.n_diagonal[i]) // 4), -(-int(lists.n_masked[i]) // 4)
        for j, (a, b, c, d) in enumerate(steps):
            ends_fit, all_fit = d == a + 3, [b, c, d] == [a + 1, a + 2, a + 3]
            taken.add("one copy" if all_fit else "first and last fit" if ends_fit else "four copies")
            taken.add("diagonal" if j < n_diagonal else "masked" if j < n_masked else "full")
            taken |= {"past the end"} if max(a, b, c, d) * KEY_GROUP >= n_keys else set()
        taken |= {"second diagonal step"} if n_diagonal > 1 else set()
    return taken


def job_branches(lists: BlockLists) -> set[str]:
    """Returns the branches that the backward pass takes for its jobs."""
    taken = set()
    jobs = torch.stack([lists.job_block, lists.job_begin, lists.job_end, lists.job_part], 1)
    for block, begin, end, part in jobs.tolist():
        first_full = min(max(-(-int(lists.first_full[block]) // TILE), begin), end)
        end_full = max(min(int(lists.end_full[block]) // TILE, end), first_full)
        steps = [begin < first_full, first_full < end_full, end_full < end]
        if begin < 0:
            taken.add("no job")
        elif begin == end:
            taken.add("unseen keys")
        else:
            taken.add("part" if part >= 0 else "whole")
            taken.add(" ".join(np.array(["masked", "full", "masked"])[steps]))
    return taken


def test_cases_take_every_branch(emulator):
    steps, jobs, rounds = set(), set(), set()
    for nodes, queries, heads, *_ in CASES.values():
        layout = make_layout(nodes, queries)
        lists = prepare(layout)
        steps |= step_branches(lists, len(layout.subtree_end))
        jobs |= job_branches(lists)
        rounds.add(min(2, len(lists.query_order) * heads[0] // 3))
    assert steps == {
        "one copy", "first and last fit", "four copies", "diagonal", "second diagonal step", "masked", "full",
        "past the end",
    }  # fmt: skip
    assert jobs == {
        "no job", "unseen keys", "part", "whole", "masked", "full", "masked full", "full masked",
        "masked masked", "masked full masked",
    }  # fmt: skip
    assert rounds == {0, 1, 2}
