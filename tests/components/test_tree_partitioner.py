"""Every plan runs every token, scores every edge once and keeps its limits; exact strategies are optimal."""

import itertools
import random
import time

import numpy as np
import pytest

from titan_tree.components.tree_partitioner import PARTITION_STRATEGIES, redundancy_free
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.components.tree_partitioner.subtree_cut import Heights
from titan_tree.errors import UserError
from titan_tree.tree.partition import PartitionPlan
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

TRAVERSALS = ("single_path", "multi_path", "greedy")  # strategies whose partitions run whole paths


def tree_of(nodes, ends=()) -> TokenTree:
    """Builds a tree from (parent, length) of its nodes, parents first, with parent -1 for roots.

    Paths end at the leaves and at the nodes ``ends``. Node i starts with token i, so siblings differ.
    """
    prefixes: list[list[int]] = []
    for i, (parent, length) in enumerate(nodes):
        prefixes.append((prefixes[parent] if parent >= 0 else []) + [i] + [0] * (length - 1))
    ends = (set(range(len(nodes))) - {parent for parent, _ in nodes}) | set(ends)
    return TokenTree.from_paths([TokenPath(prefixes[i], id=f"path {i}") for i in sorted(ends)])


def random_tree(seed, max_nodes=14) -> TokenTree:
    """Returns a bush, forest, chain, star or comb of short nodes; some paths end at inner nodes."""
    r = random.Random(seed)
    count, longest = r.randint(1, max_nodes), r.choice([1, 3, 9])
    parent = {
        "bush": lambda i: r.randrange(i),
        "forest": lambda i: r.randrange(-1, i),
        "chain": lambda i: i - 1,
        "star": lambda i: 0,
        "comb": lambda i: i - 1 if i % 2 else max(0, i - 2),
    }[r.choice(["bush", "bush", "forest", "forest", "chain", "star", "comb"])]
    nodes = [(parent(i) if i else -1, r.choice([1, r.randint(1, longest)])) for i in range(count)]
    return tree_of(nodes, ends=r.sample(range(count), r.randint(0, count // 3)))


def random_bush(seed, count, length, back) -> TokenTree:
    """Returns a tree of nodes of ``length`` tokens on average, each below one of ``back`` nodes before it."""
    r = random.Random(seed)
    parents = [r.randint(max(0, i - back), i - 1) if i else -1 for i in range(count)]
    return tree_of([(parent, r.randint(1, 2 * length - 1)) for parent in parents])


def ancestors(tree) -> list[list[int]]:
    """Returns for each token its ancestors and itself, from the root down."""
    found: list[list[int]] = []
    for token, before in enumerate(tree.predecessor.tolist()):
        found.append([*(found[before] if before >= 0 else []), token])
    return found


def check_plan(plan: PartitionPlan, max_tokens: int, max_chain_tokens: int) -> None:
    """Checks what every plan must satisfy, by definition."""
    tree = plan.tree
    above = ancestors(tree)
    runs, scored = np.zeros(len(tree), int), np.zeros(len(tree), int)
    chain: list[int] = []  # partitions from a root of the plan down to the current one
    for number, partition in enumerate(plan.partitions):
        assert 0 < len(partition) <= max_tokens
        while chain and chain[-1] != partition.parent:
            chain.pop()  # depth first: the parent is the partition before this one, or above it
        assert (chain[-1] if chain else -1) == partition.parent
        chain.append(number)
        assert sum(len(plan.partitions[i]) for i in chain) == plan.chain_tokens[number] <= max_chain_tokens

        own = set(partition.own_tokens.tolist())
        assert set(partition.keys.tolist()) == own.union(*(above[token] for token in own))
        readable = plan.partitions[partition.parent].keys.tolist() if partition.parent >= 0 else []
        assert set(partition.context.tolist()) <= set(readable) - own
        assert np.all(np.diff(partition.key_index) > 0)
        for column in partition.key_index.tolist():
            visible = np.arange(len(partition.keys)) <= column
            visible &= column < partition.subtree_end
            # The right copies, from the root down, each once.
            assert partition.keys[visible].tolist() == above[partition.keys[column]]
        assert len(partition.scores) == len(partition)
        np.add.at(runs, partition.own_tokens, 1)
        np.add.at(scored, partition.own_tokens[partition.scores], 1)
    assert runs.min() >= 1
    assert np.all(scored == 1)
    if plan.strategy in ("none", "redundancy_free"):
        assert np.all(runs == 1)
    assert plan.stats.n_part == runs.sum()
    assert plan.stats.n_forwards == len(plan.partitions)
    assert plan.stats.chain_peak == plan.chain_tokens.max()


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["auto", *PARTITION_STRATEGIES])
def test_every_plan_runs_every_token_and_keeps_its_limits(strategy):
    for seed in range(20 if strategy == "auto" else 40):  # "auto" only chooses among the others
        r, tree = random.Random(-seed), random_tree(seed)
        n, longest = len(tree), tree.stats.longest_path
        for max_tokens in {1, 2, r.randint(1, n), longest, longest + 1, r.randint(longest, n + 1)}:
            if strategy in TRAVERSALS and max_tokens < longest:
                continue
            for chain in (None, longest, r.randint(longest, n + 1)):
                plan = TreePartitioner(strategy, max_tokens, chain).plan(tree)
                most = max(max_tokens, longest) if chain is None else chain
                check_plan(plan, *((n, n) if strategy == "none" else (min(max_tokens, most), most)))


def set_partitions(items):
    """Yields all ways to divide a list into groups."""
    if not items:
        yield []
        return
    first, *rest = items
    for groups in set_partitions(rest):
        yield [[first], *groups]
        for i, group in enumerate(groups):
            yield [*groups[:i], [first, *group], *groups[i + 1 :]]


def leaf_paths(tree) -> list[list[int]]:
    above, inner = ancestors(tree), set(tree.predecessor.tolist())
    return [above[token] for token in range(len(tree)) if token not in inner]


def fewest_tokens(tree, max_tokens) -> int:
    """Returns the minimum over all divisions of the leaves into traversals that fit."""
    divisions = set_partitions(leaf_paths(tree))
    costs = ([len(set().union(*group)) for group in division] for division in divisions)
    return min(sum(cost) for cost in costs if max(cost) <= max_tokens)


def fewest_unmerged_tokens(tree, max_tokens) -> int:
    """Returns the minimum over all choices of nodes, none above another, whose leaves share one prefix."""
    above, paths = ancestors(tree), leaf_paths(tree)
    groups = []  # (leaves, tokens) of each node that fits; -1: nothing is shared
    for last in [-1, *(tree.node_offsets[1:] - 1).tolist()]:
        leaves = {i for i, path in enumerate(paths) if last < 0 or last in path}
        shared = len(above[last]) if last >= 0 else 0
        tokens = shared + sum(len(paths[i]) - shared for i in leaves)
        groups += [(leaves, tokens)] if tokens <= max_tokens else []
    fewest = sum(map(len, paths))
    for chosen in itertools.chain(*(itertools.combinations(groups, n) for n in range(len(paths) + 1))):
        covered = set().union(*(leaves for leaves, _ in chosen))
        if len(covered) == sum(len(leaves) for leaves, _ in chosen):
            alone = sum(len(path) for i, path in enumerate(paths) if i not in covered)
            fewest = min(fewest, alone + sum(tokens for _, tokens in chosen))
    return fewest


def test_dynamic_programs_find_the_optimum_and_greedy_is_near_it():
    """The factor of greedy is that of its docstring, measured on 20,000 such trees."""
    worst = 1.0
    for seed in range(250):
        tree = random_tree(seed, max_nodes=10)
        longest = tree.stats.longest_path
        max_tokens = random.Random(seed).randint(longest, max(longest, len(tree)))
        tokens = {name: TreePartitioner(name, max_tokens).plan(tree).stats.n_part for name in TRAVERSALS}
        assert tokens["multi_path"] == fewest_tokens(tree, max_tokens)
        assert tokens["single_path"] == fewest_unmerged_tokens(tree, max_tokens)
        worst = max(worst, tokens["greedy"] / tokens["multi_path"])
    assert worst <= 1.3


@pytest.mark.parametrize("unit", [1000, 1])
def test_token_counts_equal_those_of_the_paper(unit):
    """Figure 5 of Tree Training: root 19k -> {A 24k -> {10k, 10k}, 10k, 10k}, with 64k tokens at most."""
    lengths = [(-1, 19), (0, 24), (1, 10), (1, 10), (0, 10), (0, 10)]
    tree = tree_of([(parent, length * unit) for parent, length in lengths])
    plans = {name: TreePartitioner(name, 64 * unit).plan(tree) for name in PARTITION_STRATEGIES}
    assert {name: plan.stats.n_part / unit for name, plan in plans.items()} == {
        "none": 83, "single_path": 121, "multi_path": 102, "greedy": 102, "redundancy_free": 83,
    }  # fmt: skip
    assert {name: len(plan) for name, plan in plans.items()} == {
        "none": 1, "single_path": 3, "multi_path": 2, "greedy": 2, "redundancy_free": 3,
    }  # fmt: skip
    assert tree.stats.por == pytest.approx(0.494, abs=5e-4)
    assert plans["multi_path"].stats.err == pytest.approx(0.378, abs=5e-4)
    assert plans["redundancy_free"].stats.err == tree.stats.por
    assert plans["redundancy_free"].stats.chain_peak == 63 * unit


def test_a_path_is_cut_into_pieces_of_one_size():
    tree = tree_of([(-1, 10), (0, 1), (1, 10)], ends=[0, 1])
    for max_tokens, sizes in [(21, [21]), (20, [11, 10]), (8, [7, 7, 7]), (2, [2] * 10 + [1]), (1, [1] * 21)]:
        plan = TreePartitioner("redundancy_free", max_tokens).plan(tree)
        assert list(map(len, plan.partitions)) == sizes
        assert [p.parent for p in plan.partitions] == list(range(-1, len(sizes) - 1))
        assert plan.stats.chain_peak == 21
        check_plan(plan, max_tokens, 21)


def test_siblings_share_a_partition_if_the_chain_has_room():
    tree = tree_of([(-1, 10), (0, 5), (0, 5), (0, 5)])
    forwards = {}
    for chain in (15, 19, 20, 24, 25, 30):
        plan = TreePartitioner("redundancy_free", 15, chain).plan(tree)
        check_plan(plan, 15, chain)
        forwards[chain] = len(plan)
    # A chain of 15 tokens holds the prompt of 10 and one answer, one of 25 the whole tree.
    assert forwards == {15: 4, 19: 4, 20: 3, 24: 3, 25: 2, 30: 2}
    # An answer of 13 tokens runs in pieces of 10 and 3, and its siblings share the second piece.
    tree = tree_of([(-1, 10), (0, 13), (0, 10), (0, 4), (0, 3)])
    plan = TreePartitioner("redundancy_free", 10, 30).plan(tree)
    assert list(map(len, plan.partitions)) == [10, 10, 10, 10]
    check_plan(plan, 10, 30)


@pytest.mark.parametrize("max_tokens", [300, 1000, 3000])
def test_redundancy_free_needs_few_partitions(max_tokens):
    """Partitions are full unless the chain limits them. A short chain separates siblings deep in the tree."""
    for seed in range(8):
        tree = random_bush(seed, count=300, length=50, back=50)
        chain, full = max(tree.stats.longest_path, max_tokens), -(-len(tree) // max_tokens)
        free, double, tight = (
            TreePartitioner("redundancy_free", max_tokens, k).plan(tree).stats.n_forwards
            for k in (len(tree), 2 * chain, chain)
        )
        assert free == full
        assert double <= 1.5 * full
        assert tight <= 4.5 * full


def test_thousands_of_pieces_of_one_path_share_the_memory_of_their_keys():
    plan = TreePartitioner("redundancy_free", 1).plan(tree_of([(-1, 5000)]))
    assert plan.stats.n_forwards == plan.stats.chain_peak == 5000
    assert plan.stats.n_context == 5000 * 4999 // 2
    assert all(np.shares_memory(p.keys, plan.partitions[-1].keys) for p in plan.partitions)
    assert all(p.parent == i - 1 for i, p in enumerate(plan.partitions))
    started = time.process_time()
    planner = redundancy_free.LevelPlanner(Heights(tree_of([(-1, 50_000)])), 1, 50_000, discount=1)
    planner.run()
    assert planner.parents == list(range(-1, 49_999))
    assert time.process_time() - started < 5


@pytest.mark.slow
def test_planning_scales_to_20000_nodes():
    """One plan of 100,000 tokens takes 0.2 s of CPU time; a quadratic algorithm exceeds the limit."""
    tree = random_bush(0, count=20_000, length=5, back=20_000)
    for strategy in ("greedy", "redundancy_free", "auto"):
        for max_tokens in (tree.stats.longest_path, 8192):
            started = time.process_time()
            plan = TreePartitioner(strategy, max_tokens).plan(tree)
            assert time.process_time() - started < 3, (strategy, max_tokens)
            assert plan.stats.chain_peak <= max_tokens
            assert plan.stats.n_part < 1.6 * len(tree)


def test_auto_takes_the_faster_plan_and_says_why():
    tree = tree_of([(-1, 5000), *[(0, 2000)] * 4])
    plan = TreePartitioner("auto", 13_000).plan(tree)
    assert (plan.strategy, len(plan)) == ("none", 1)
    assert plan.reason == "the tree's 13,000 tokens fit max_tokens = 13,000"
    # 5,000 more tokens, at 15 us each and 1.6 ns per pair, take longer than one more partition, at 15 ms.
    plan = TreePartitioner("auto", 9000).plan(tree)
    assert plan.strategy == "redundancy_free"
    assert plan.reason == (
        "redundancy_free 0.35 s (13,000 tokens, 3 forward passes) against greedy 0.42 s (18,000 tokens, "
        "2 forward passes), estimated for one H200"
    )
    # A few more tokens take less time.
    tree = tree_of([(-1, 10), *[(0, 400)] * 40])
    plan = TreePartitioner("auto", 8192).plan(tree)
    assert plan.strategy == "greedy"
    assert plan.reason.startswith("greedy 0.")
    plan = TreePartitioner("auto", 100).plan(tree)
    assert plan.strategy == "redundancy_free"
    assert plan.reason == "greedy cannot cut the longest path, 410 tokens, to max_tokens = 100"


def test_a_saved_plan_loads_with_equal_arrays(tmp_path):
    for seed, name in enumerate(["none", "single_path", "redundancy_free", "auto"] * 5):
        tree = random_tree(seed)
        plan = TreePartitioner(name, tree.stats.longest_path).plan(tree)
        plan.save(tmp_path / "plan")
        loaded = PartitionPlan.load(tmp_path / "plan", tree)
        assert (loaded.strategy, loaded.reason, loaded.stats) == (plan.strategy, plan.reason, plan.stats)
        for got, want in zip(loaded.partitions, plan.partitions, strict=True):
            assert got.parent == want.parent
            for field in ("keys", "subtree_end", "key_index", "scores"):
                assert getattr(got, field).dtype == getattr(want, field).dtype
                assert np.array_equal(getattr(got, field), getattr(want, field))


def test_a_saved_plan_does_not_load_for_another_tree(tmp_path):
    tree = tree_of([(-1, 3), (0, 2), (0, 2)])
    path = tmp_path / "plan.npz"
    TreePartitioner("none").plan(tree).save(path)
    for other in ([(-1, 3), (0, 2), (1, 2)], [(-1, 3), (0, 2), (0, 3)], [(-1, 3), (-1, 2), (0, 2)]):
        with pytest.raises(
            UserError, match=r"plan.npz: the plan is for a different tree than this one of . tok"
        ):
            PartitionPlan.load(path, tree_of(other))
    np.savez(tmp_path / "other.npz", x=1)
    (tmp_path / "text").write_text("no plan")
    (tmp_path / "empty").touch()
    for name in ("other.npz", "text", "empty", "missing"):
        with pytest.raises(UserError, match=f"{name}: expected a file written by PartitionPlan.save"):
            PartitionPlan.load(tmp_path / name, tree)


def test_a_drawing_shows_one_line_per_partition_and_omits_the_middle():
    tree = tree_of([(-1, 1900), (0, 2400), (1, 1000), (1, 1000), (0, 1000), (0, 1000)])
    assert TreePartitioner("redundancy_free", 6400).plan(tree).draw() == (
        "redundancy_free: 3 forward passes run 8,300 tokens, 8,300 of them distinct; chain peak 6,300\n"
        "0: 1,900 own, 0 context, tokens 0 to 1,899, chain 1,900\n"
        "  1: 4,400 own, 1,900 context, tokens 1,900 to 6,299, chain 6,300\n"
        "  2: 2,000 own, 1,900 context, tokens 6,300 to 8,299, chain 3,900"
    )
    lines = TreePartitioner("redundancy_free", 1).plan(tree_of([(-1, 100)])).draw(width=60).split("\n")
    assert len(lines) == 1 + 40 + 1
    assert lines[1].startswith("0: 1 own")
    assert lines[21] == "... 60 partitions omitted ..."
    assert lines[-1].strip().startswith("99: 1 own, 99 context")
    assert max(map(len, lines[1:])) == 60


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("best", 8),
            "unknown partition strategy 'best' (known: auto, none, single_path, multi_path, greedy, "
            "redundancy_free)",
        ),
        (("auto", 0), "TreePartitioner: max_tokens: expected at least 1, got 0"),
        (("auto", 8, 0), "TreePartitioner: max_chain_tokens: expected at least 1, got 0"),
        (
            ("redundancy_free", 2, 6),
            "TreePartitioner: max_chain_tokens: expected at least the longest path, 7 tokens, got 6; "
            "raise it or remove it",
        ),
        *(
            (
                (strategy, 6),
                f"TreePartitioner: strategy {strategy} runs whole paths, but path path 1 has 7 tokens, more "
                "than max_tokens = 6; raise max_tokens, or use strategy redundancy_free, which cuts paths",
            )
            for strategy in TRAVERSALS
        ),
    ],
)
def test_errors_name_the_limit_and_the_fix(arguments, message):
    with pytest.raises(UserError) as error:
        TreePartitioner(*arguments).plan(tree_of([(-1, 3), (0, 4), (0, 2)]))
    assert str(error.value) == message


def test_multi_path_refuses_a_tree_that_is_too_large():
    r = random.Random(0)
    tree = tree_of([(-1, 50), *((0, r.randint(30, 60)) for _ in range(40))])
    started = time.process_time()
    with pytest.raises(UserError, match=r"tree of 40 leaves is too large .* 10,000 combinations"):
        TreePartitioner("multi_path", 300).plan(tree)
    assert time.process_time() - started < 10
