"""Assignments of trees to ranks, against the best of all assignments; costs, against counts by hand."""

import itertools
import json
import random
from collections.abc import Iterator

import numpy as np
import pytest

from tests.support.oracle import random_groups
from titan_tree.errors import UserError
from titan_tree.run.balance.assignment import (
    Assignment,
    assign_freely,
    assign_in_step,
    idle_share,
    planned_work,
)
from titan_tree.run.balance.balancing import CostFit
from titan_tree.tree.costs import TreeCosts, tree_sizes
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

COSTS = TreeCosts(token=1e-3, visible_pair=1e-6, edge=1e-4, chunk=1e-3, pixel=0, pixel_pair=0, forward=0.05)


def random_sizes(draw: random.Random, trees: int, longest: int = 100) -> np.ndarray:
    """Returns [trees, 4] sizes of chains and of bushy trees."""
    rows = []
    for _ in range(trees):
        tokens = draw.randint(5, longest)
        pairs = draw.randint(tokens, tokens * (tokens + 1) // 2)
        rows.append((tokens, pairs, draw.randint(0, tokens - 1), draw.randint(1, tokens)))
    return np.array(rows).reshape(-1, 4)


def step_time(assignment: Assignment, sizes: np.ndarray, in_step: bool) -> float:
    """Returns the seconds of a step by definition."""
    time_of = [sum(c * s for c, s in zip(COSTS, row, strict=False)) for row in sizes.tolist()]
    passes = [[COSTS.forward + sum(time_of[tree] for tree in mb) for mb in owner] for owner in assignment]
    if in_step:
        return sum(max(row) for row in itertools.zip_longest(*passes, fillvalue=0.0))
    return max(map(sum, passes))


def set_partitions(items: list[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, *rest = items
    for parts in set_partitions(rest):
        yield [[first], *parts]
        for i in range(len(parts)):
            yield [*parts[:i], [first, *parts[i]], *parts[i + 1 :]]


def best_in_step(sizes: np.ndarray, num_owners: int, max_tokens: int) -> float:
    """Returns the seconds of the best of all assignments of micro-batches to rows."""
    best = float("inf")
    for bins in set_partitions(list(range(len(sizes)))):
        if any(len(b) > 1 and sizes[b, 0].sum() > max_tokens for b in bins):
            continue
        bins.sort(key=lambda b: -step_time([[b]], sizes, True))  # similar ones in a row: no better order
        owners: Assignment = [bins[owner::num_owners] for owner in range(num_owners)]
        best = min(best, step_time(owners, sizes, True))
    return best


def assert_complete(assignment: Assignment, sizes: np.ndarray, num_owners: int, max_tokens: int) -> None:
    assert len(assignment) == num_owners
    micro_batches = list(itertools.chain(*assignment))
    assert all(micro_batches)
    assert sorted(itertools.chain(*micro_batches)) == list(range(len(sizes)))
    for trees in micro_batches:
        assert len(trees) == 1 or sizes[trees, 0].sum() <= max_tokens


@pytest.mark.parametrize("num_owners", [1, 2, 3])
def test_in_step_comes_close_to_the_best_assignment(num_owners: int) -> None:
    ratios = []
    for seed in range(40):
        draw = random.Random(seed)
        sizes = random_sizes(draw, draw.randint(1, 7))
        max_tokens = draw.choice([60, 150, 1000])
        assignment = assign_in_step(sizes, COSTS, num_owners, max_tokens)
        assert_complete(assignment, sizes, num_owners, max_tokens)
        best = best_in_step(sizes, num_owners, max_tokens)
        ratios.append(step_time(assignment, sizes, True) / best)
        assert ratios[-1] >= 1 - 1e-9
    assert max(ratios) < 1.25
    assert np.mean(ratios) < 1.02


def test_free_ranks_finish_within_the_bound_of_longest_processing_time_first() -> None:
    for seed in range(40):
        draw = random.Random(seed)
        sizes, num_owners = random_sizes(draw, draw.randint(1, 7)), draw.randint(1, 3)
        assignment = assign_freely(sizes, COSTS, num_owners, max_tokens=120)
        assert_complete(assignment, sizes, num_owners, 120)
        seconds = COSTS.seconds(sizes)
        best = min(
            max(sum(seconds[np.array(owners) == owner]) for owner in range(num_owners))
            for owners in itertools.product(range(num_owners), repeat=len(sizes))
        )
        longest = max(sum(seconds[list(itertools.chain(*owner))]) for owner in assignment)
        assert best - 1e-9 <= longest <= best * (4 / 3 - 1 / (3 * num_owners)) + 1e-9


def test_rows_of_large_steps_are_even() -> None:
    """In step, ranks wait much less than if each packed its own trees."""
    draw = random.Random(0)
    sizes = random_sizes(draw, 200, longest=1000)
    own = [assign_freely(sizes, COSTS, 4, max_tokens=1500)]
    rows = assign_in_step(sizes, COSTS, 4, max_tokens=1500)
    idle = [idle_share(planned_work(a, sizes, COSTS, in_step=True)) for a in (*own, rows)]
    assert idle[1] < 0.02 < idle[0]
    assert step_time(rows, sizes, True) < 0.9 * step_time(own[0], sizes, True)


def test_pairs_count_where_tokens_do_not() -> None:
    """A chain of 100 tokens costs as much as two bushes of 100 tokens."""
    costs = TreeCosts(token=0, visible_pair=1, edge=0, chunk=0, pixel=0, pixel_pair=0, forward=0)
    sizes = np.array([(100, 200, 0, 0), (100, 100, 0, 0), (100, 100, 0, 0)])
    assert assign_freely(sizes, costs, 2, 100) == [[[0]], [[1], [2]]]
    assert assign_in_step(sizes, costs, 2, 200) == [[[0]], [[1, 2]]]


def test_a_step_without_trees_has_no_micro_batches() -> None:
    sizes = tree_sizes([])
    assert assign_in_step(sizes, COSTS, 2, 10) == assign_freely(sizes, COSTS, 2, 10) == [[], []]
    assert idle_share(planned_work([[], []], sizes, COSTS, in_step=True)) == 0


def test_idle_share_by_hand() -> None:
    work = np.array([[9.0, 4.0], [8.0, 4.0], [9.0, 3.0]])
    assert idle_share(work) == pytest.approx(1 - (26 + 11) / 3 / 13)
    assignment = [[[0], [1]], [[2]]]
    sizes = np.array([(10, 0, 0, 0), (30, 0, 0, 0), (50, 0, 0, 0)])
    np.testing.assert_allclose(planned_work(assignment, sizes, COSTS, True), [[0.06, 0.08], [0.1, 0]])
    np.testing.assert_allclose(planned_work(assignment, sizes, COSTS, False), [[0.14], [0.1]])


@pytest.mark.parametrize("seed", range(3))
def test_sizes_are_counts_over_distinct_prefixes(seed: int) -> None:
    draw = random.Random(seed)
    trees, expected = [], []
    for group in random_groups(seed):
        paths = [TokenPath(path.tokens, [draw.randrange(2) for _ in path.tokens]) for path in group]
        lists = [path.tokens.tolist() for path in paths]
        prefixes = {tuple(tokens[:n]) for tokens in lists for n in range(1, len(tokens) + 1)}
        edges = {
            tuple(tokens[: n + 1])
            for tokens, path in zip(lists, paths, strict=True)
            for n in range(1, len(tokens))
            if path.loss_mask[n]
        }
        trees.append(TokenTree.from_paths(paths))
        expected.append([len(prefixes), sum(map(len, prefixes)), len(edges)])
    sizes = tree_sizes(trees)
    assert sizes[:, :3].tolist() == expected
    assert not sizes[:, 4:].any()
    for tree, chunks in zip(trees, sizes[:, 3], strict=True):
        assert len(tree) / 64 <= chunks <= len(tree)
    chain = TokenTree.from_paths([TokenPath(np.arange(130))])
    assert tree_sizes([chain])[0].tolist() == [130, 130 * 131 // 2, 129, 3, 0, 0]


def test_a_fit_finds_the_costs_that_made_the_times() -> None:
    draw = random.Random(0)
    true = TreeCosts(token=3e-3, visible_pair=5e-6, edge=1e-4, chunk=0.0, pixel=0, pixel_pair=0, forward=0.2)
    fit = CostFit(start := TreeCosts(1e-3, 1e-6, 1e-4, 0.0, 0.0, 0.0, 0.05))
    assert fit.solve() == start
    for sizes in random_sizes(draw, 300, longest=5000):
        row = np.array([*sizes, *[0] * (6 - len(sizes)), draw.randint(1, 4)])
        fit.add(row, float(true.seconds(row)) * draw.uniform(0.98, 1.02))
    fitted = fit.solve()
    assert fitted.chunk == 0
    assert fitted.token == pytest.approx(true.token, rel=0.05)
    assert fitted.visible_pair == pytest.approx(true.visible_pair, rel=0.05)
    again = CostFit(start)
    again.load_state_dict(json.loads(json.dumps(fit.state_dict())))
    assert again.solve() == fit.solve() != start


def test_like_measurements_keep_the_ratios_of_the_start() -> None:
    """They cannot tell the coefficients apart, only that everything takes three times as long.

    The tower is not measured.
    """
    costs = COSTS._replace(pixel=1e-6, pixel_pair=1e-12)
    fit = CostFit(costs)
    row = np.array([1000, 10_000, 500, 20, 10**6, 10**12, 1])
    for _ in range(50):
        fit.add(row, 3 * float(COSTS.seconds(row)))
    np.testing.assert_allclose(fit.solve(), 3 * np.array(costs), rtol=1e-6)


@pytest.mark.parametrize("state", [{}, {"products": [[0]], "moments": None}, {"products": "x"}])
def test_malformed_sums_are_refused(state: dict) -> None:
    with pytest.raises(UserError, match=r"checkpoint: balance\.products: expected finite numbers of shape"):
        CostFit(COSTS).load_state_dict(state)
