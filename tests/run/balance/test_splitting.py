"""Plans with pieces: sizes against those of real pieces, cuts against all cuts, times against other plans."""

import itertools
import random

import numpy as np
import pytest

from tests.run.balance.test_assignment import assert_complete
from tests.support.cases import for_each
from tests.support.oracle import random_groups
from tests.support.paths import random_token_lists
from titan_tree.run.balance.splitting import (
    MIN_GAIN,
    StepAssignment,
    StepBalancer,
    best_cuts,
    may_split,
    split_tree,
    unit_sizes,
)
from titan_tree.tree.costs import TreeCosts, leaf_sizes, tree_sizes
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

COSTS = TreeCosts(token=1e-3, visible_pair=1e-6, edge=1e-4, chunk=1e-3, pixel=0, pixel_pair=0, forward=1e-3)


def bushy_tree(branches: int, prompt: int = 10, length: int = 100, name: str = "") -> TokenTree:
    """Returns a tree whose paths share a prompt; all branches are equally long."""
    paths = [
        TokenPath([*range(prompt), 1000 + i, *range(length - 1)], id=f"{name}{i}") for i in range(branches)
    ]
    return TokenTree.from_paths(paths)


def step_of(
    trees: list[TokenTree], num_owners: int, **options: bool
) -> tuple[StepBalancer, StepAssignment, StepAssignment]:
    """Returns the balancer, the assignment of whole trees, and the one with pieces."""
    balancer = StepBalancer(COSTS, num_owners, max_tokens=5000, **options)
    whole = balancer.whole(tree_sizes(trees))
    leaves = {i: leaf_sizes(trees[i]) for i in balancer.candidates(whole)}
    return balancer, whole, balancer.split(whole, leaves)


@for_each("seed", range(30))
def test_planned_sizes_are_those_of_the_pieces(seed: int) -> None:
    """Tokens and pairs are equal. Edges and chunks are upper bounds, and equal for a whole tree."""
    draw = random.Random(seed)
    tree = TokenTree.from_paths(
        [TokenPath(tokens, [draw.randrange(2) for _ in tokens]) for tokens in random_token_lists(seed)]
    )
    leaves = leaf_sizes(tree)
    np.testing.assert_array_equal(unit_sizes(leaves, []), tree_sizes([tree]))
    places = range(1, len(tree.leaves))
    cuts = sorted(draw.sample(places, draw.randint(0, len(places))))
    planned, real = unit_sizes(leaves, cuts), tree_sizes(split_tree(tree, cuts))
    np.testing.assert_array_equal(planned[:, :2], real[:, :2])
    assert (planned[:, 2:] >= real[:, 2:]).all()


@for_each("seed", range(20))
def test_cuts_repeat_least_within_the_target(seed: int) -> None:
    """Among all cuts of which no piece of several leaves exceeds the target."""
    draw = random.Random(seed)
    (tree, *_) = map(TokenTree.from_paths, random_groups(seed))
    leaves = leaf_sizes(tree)
    total = float(COSTS.seconds(unit_sizes(leaves, [])[0]))
    for target in (total, total * draw.uniform(0.1, 0.9), total / 100):
        valid = {}
        for n in range(len(leaves)):
            for cuts in itertools.combinations(range(1, len(leaves)), n):
                pieces = COSTS.seconds(unit_sizes(leaves, cuts))
                num_leaves = np.diff([0, *cuts, len(leaves)])
                if ((pieces <= target + 1e-12) | (num_leaves == 1)).all():
                    valid[cuts] = pieces.sum()
        assert valid[tuple(best_cuts(leaves, COSTS, target + 1e-12))] == pytest.approx(min(valid.values()))


@pytest.mark.parametrize("in_step", [None, True])
def test_a_tree_of_half_of_the_work_goes_to_all_owners(in_step: bool | None) -> None:
    trees = [bushy_tree(40), *(bushy_tree(2) for _ in range(4))]
    planner, whole, plan = step_of(trees, 4, **({} if in_step is None else {"in_step": in_step}))
    assert len(plan.cuts[0]) >= 2
    assert not any(plan.cuts[1:])
    assert plan.seconds < 0.5 * whole.seconds
    (message,) = planner.describe(whole, plan).values()
    pieces = len(plan.cuts[0]) + 1
    assert message == (
        f"a tree of 4,010 tokens is split into {pieces} pieces, because other ranks would wait for it; the "
        f"pieces repeat {10 * (pieces - 1)} tokens; a larger parallel.sequence_parallel would compute each "
        "token once"
    )


def test_trees_stay_whole_if_pieces_gain_nothing() -> None:
    """Owners have equal work, or pieces would repeat nearly everything, or paths cannot be divided."""
    equal = [bushy_tree(10, name=str(i)) for i in range(4)]
    planner, whole, plan = step_of(equal, 4)
    assert (plan, planner.candidates(whole), planner.describe(whole, plan)) == (whole, [], {})
    for tree in (bushy_tree(4, prompt=3000, length=5), TokenTree.from_paths([TokenPath(range(3000))])):
        planner, whole, plan = step_of([tree, bushy_tree(1)], 2)
        assert plan.cuts == [[], []]
        (message,) = planner.describe(whole, plan).values()
        even = sum(COSTS.seconds(whole.sizes)) / 2 + COSTS.forward
        assert message == (
            f"other ranks wait for a tree of {len(tree):,} tokens, which takes "
            f"{whole.seconds / even:.1f} times as long as the "
            "mean work of a rank; it stays in one piece; a larger parallel.sequence_parallel would share its "
            "tokens"
        )


@pytest.mark.parametrize("in_step", [None, True])
def test_plans_are_complete_and_never_slower(in_step: bool | None) -> None:
    gains = []
    for seed in range(40):
        draw = random.Random(seed)
        sizes = [draw.choice([1, 2, 3, 30]) for _ in range(draw.randint(1, 8))]
        trees = [bushy_tree(n, draw.randint(1, 200), draw.randint(5, 100)) for n in sizes]
        num_owners = draw.randint(1, 5)
        options = {} if in_step is None else {"in_step": in_step}
        _, whole, plan = step_of(trees, num_owners, **options)
        assert_complete(plan.micro_batches, plan.sizes, num_owners, 5000)
        units = plan.units(dict(enumerate(trees)))
        assert sorted(units) == list(range(len(plan.sizes)))
        for unit, tree in units.items():
            assert len(tree) == plan.sizes[unit, 0]
        assert plan.cuts == whole.cuts or plan.seconds < (1 - MIN_GAIN) * whole.seconds
        gains.append(1 - plan.seconds / whole.seconds)
    assert min(gains) >= 0
    assert np.mean(gains) > 0.1


def test_finer_pieces_must_gain_more() -> None:
    """Of two plans of nearly the same time, the one that repeats less is used."""
    _, _, plan = step_of([bushy_tree(8)], 2)
    assert plan.cuts == [[4]]


def test_a_step_without_trees_has_a_plan() -> None:
    planner, whole, plan = step_of([], 2)
    assert (plan.micro_batches, planner.candidates(whole), planner.describe(whole, plan)) == (
        [[], []],
        [],
        {},
    )


def test_trees_that_a_batch_might_refuse_stay_whole() -> None:
    def tree(*fields: dict[str, object]) -> TokenTree:
        return TokenTree.from_paths([TokenPath([1, 2, i], **f) for i, f in enumerate(fields)])  # type: ignore[arg-type]

    advantage, version = {"advantage": 1.0}, {"policy_version": 1}
    assert may_split(tree({}, {}))
    assert may_split(tree(advantage | version, advantage | version))
    for other in (advantage, version, {"old_logprobs": [0, 0, 0]}):
        assert not may_split(tree({}, other))
    assert may_split(tree({}, {"temperature": 0.5}))
