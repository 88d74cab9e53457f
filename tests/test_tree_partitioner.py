"""Plans run every token, score every edge once, keep their bounds; the exact ones against brute force."""

import random
import time

import numpy as np
import pytest

from tests.oracle import random_groups
from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.data.partition import PartitionPlan
from titan_tree.data.paths import TokenPath
from titan_tree.data.tree import TokenTree
from titan_tree.errors import UserError

STRATEGIES = ("single_path", "multi_path", "greedy", "redundancy_free")


def tree_of(nodes) -> TokenTree:
    """From (parent, length), parents first, -1 for roots. Node i starts with token i."""
    prefixes: list[list[int]] = []
    for i, (parent, length) in enumerate(nodes):
        prefixes.append((prefixes[parent] if parent >= 0 else []) + [i] + [0] * (length - 1))
    inner = {parent for parent, _ in nodes}
    return TokenTree.from_paths([TokenPath(p) for i, p in enumerate(prefixes) if i not in inner])


def random_nodes(r, num, max_length):
    nodes = [(-1, r.randint(1, max_length))]
    for i in range(1, num):
        nodes.append((r.randint(max(0, i - r.randint(1, i)), i - 1), r.choice([1, r.randint(1, max_length)])))
    return nodes


def forest(seed) -> TokenTree:
    if seed % 2:
        r = random.Random(seed)
        return tree_of(random_nodes(r, r.randint(1, 12), r.choice([1, 4, 9])))
    return TokenTree.forest([TokenTree.from_paths(paths) for paths in random_groups(seed // 2)])


def ancestors(tree, token):
    found = [token]
    while (token := int(tree.predecessor[token])) >= 0:
        found.append(token)
    return found[::-1]


def check_plan(plan: PartitionPlan, max_tokens: int, max_chain: int) -> None:
    tree = plan.tree
    times_run, times_scored = (np.zeros(len(tree), int) for _ in range(2))
    visited = []
    for number, p in enumerate(plan.partitions):
        assert len(p) <= max_tokens
        assert p.parent < number
        # Depth first: the parent is the partition before, or above it.
        while visited and visited[-1] != p.parent:
            visited.pop()
        assert (visited[-1] if visited else -1) == p.parent
        visited.append(number)
        np.add.at(times_run, p.own, 1)
        np.add.at(times_scored, p.own[p.scores], 1)
        if p.parent >= 0:
            assert set(p.context.tolist()) <= set(plan.partitions[p.parent].keys.tolist())
        else:
            assert not len(p.context)
        seen = np.zeros(len(p.keys), bool)
        for column in p.key_index.tolist():
            visible = [k for k in range(column + 1) if column < p.subtree_end[k]]
            assert p.keys[visible].tolist() == ancestors(tree, int(p.keys[column]))
            seen[visible] = True
        assert seen.all(), "context that nobody reads"
    assert (times_scored == 1).all()
    assert (times_run >= 1).all()
    if plan.strategy in ("none", "redundancy_free"):
        assert (times_run == 1).all()
    assert plan.stats.n_part == times_run.sum()
    assert plan.chain_tokens.max() == plan.stats.chain_peak <= max_chain


@pytest.mark.parametrize("strategy", [*STRATEGIES, "auto"])
def test_plans_are_sound(strategy):
    for seed in range(60):
        tree = forest(seed)
        longest, n = tree.stats.longest_path, len(tree)
        for size in {1, 2, longest // 2 + 1, longest, longest + 1, 2 * longest, n, n + 1}:
            if strategy in ("redundancy_free", "auto"):
                for chain in (None, max(size, longest), max(size, longest) + 2, 2 * max(size, longest)):
                    plan = TreePartitioner(strategy, size, chain).plan(tree)
                    cut = plan.strategy == "redundancy_free"
                    check_plan(plan, size, max(size, longest) if chain is None or not cut else chain)
            elif size >= longest:
                leaves = len(set(tree.path_node.tolist()) - set(tree.node_parent.tolist()))
                if strategy == "multi_path" and leaves > 8:
                    continue
                check_plan(TreePartitioner(strategy, size).plan(tree), size, size)


def partitions_of(items):
    if not items:
        yield []
        return
    first, *rest = items
    for groups in partitions_of(rest):
        yield [[first], *groups]
        for i in range(len(groups)):
            yield [*groups[:i], [first, *groups[i]], *groups[i + 1 :]]


def fewest_tokens(tree, max_tokens):
    """Over all divisions of the leaves, by brute force."""
    leaves = sorted(set(tree.path_node.tolist()) - set(tree.node_parent.tolist()))
    tokens = [set(ancestors(tree, int(tree.node_offsets[leaf + 1]) - 1)) for leaf in leaves]
    sizes = (
        [len(set().union(*(tokens[i] for i in group))) for group in groups]
        for groups in partitions_of(list(range(len(leaves))))
    )
    return min(sum(division) for division in sizes if max(division) <= max_tokens)


def test_multi_path_is_the_optimum_and_the_others_are_near():
    worst = dict.fromkeys(("single_path", "greedy"), 1.0)
    for seed in range(150):
        r = random.Random(seed)
        tree = tree_of(random_nodes(r, r.randint(2, 9), 6))
        longest = tree.stats.longest_path
        size = r.randint(longest, max(longest, len(tree)))
        best = fewest_tokens(tree, size)
        assert TreePartitioner("multi_path", size).plan(tree).stats.n_part == best
        for name in worst:
            worst[name] = max(worst[name], TreePartitioner(name, size).plan(tree).stats.n_part / best)
    assert worst["greedy"] <= 1.5
    assert worst["single_path"] <= 2.5


@pytest.mark.parametrize("unit", [1000, 1])
def test_published_example(unit):
    """Tree Training, figure 5: root 19k -> {A 24k -> {10k, 10k}, 10k, 10k}, C = 64k."""
    tree = tree_of(
        [(-1, 19 * unit), (0, 24 * unit), (1, 10 * unit), (1, 10 * unit), (0, 10 * unit), (0, 10 * unit)]
    )
    stats = {name: TreePartitioner(name, 64 * unit).plan(tree).stats for name in STRATEGIES}
    assert {name: s.n_part // unit for name, s in stats.items()} == {
        "single_path": 121, "multi_path": 102, "greedy": 102, "redundancy_free": 83,
    }  # fmt: skip
    assert tree.stats.por == pytest.approx(0.494, abs=5e-4)
    assert stats["multi_path"].err == pytest.approx(0.378, abs=5e-4)
    assert stats["redundancy_free"].err == tree.stats.por


def test_redundancy_free_has_few_forwards():
    """Little more than tokens / max_tokens where the chain is no bound; 4.5 times as many where it is."""
    for seed in range(10):
        r = random.Random(seed)
        nodes = [(-1, 400)]
        for i in range(1, 300):
            nodes.append((r.randint(max(0, i - 30), i - 1), r.randint(1, 200)))
        tree = tree_of(nodes)
        size = 2000
        least = -(-len(tree) // size)
        loose = TreePartitioner("redundancy_free", size, len(tree)).plan(tree).stats
        tight = TreePartitioner("redundancy_free", size).plan(tree).stats
        assert loose.n_forwards <= 1.3 * least + 1
        assert tight.n_forwards <= 4.5 * least
        assert tight.chain_peak <= max(size, tree.stats.longest_path)


def test_long_chains_and_large_trees_are_planned_in_time():
    started = time.perf_counter()
    chain = TreePartitioner("redundancy_free", 1).plan(tree_of([(-1, 1000)]))
    assert len(chain) == 1000
    assert chain.stats.chain_peak == 1000
    r = random.Random(0)
    nodes = [(-1, 5)] + [(r.randint(max(0, i - 50), i - 1), 5) for i in range(1, 20_000)]
    parents = np.array([parent for parent, _ in nodes])
    tree = tree_of_arrays(parents, 5)
    assert len(tree) == 100_000
    for strategy in ("greedy", "redundancy_free"):
        plan = TreePartitioner(strategy, max(4000, tree.stats.longest_path)).plan(tree)
        assert plan.stats.n_part >= len(tree)
    assert time.perf_counter() - started < 10


def tree_of_arrays(parents, length) -> TokenTree:
    """A large tree with a path to every leaf, nodes of one length."""
    depth = np.zeros(len(parents), int)
    for i, parent in enumerate(parents[1:], start=1):
        depth[i] = depth[parent] + 1
    leaves = sorted(set(range(len(parents))) - set(parents.tolist()))
    paths = []
    for leaf in leaves:
        chain = [leaf]
        while parents[chain[-1]] >= 0:
            chain.append(int(parents[chain[-1]]))
        tokens = np.repeat(np.array(chain[::-1]), length)
        paths.append(TokenPath(tokens.astype(np.int32)))
    return TokenTree.from_paths(paths)


def test_auto_takes_one_pass_where_it_fits_and_says_what_it_compared():
    tree = tree_of([(-1, 50), (0, 20), (0, 20)])
    assert TreePartitioner("auto", 90).plan(tree).strategy == "none"
    plan = TreePartitioner("auto", 80).plan(tree)
    assert plan.strategy in ("redundancy_free", "greedy")
    assert "redundancy_free" in plan.reason
    assert "greedy" in plan.reason
    assert TreePartitioner("auto", 30).plan(tree).strategy == "redundancy_free"  # no path fits


@pytest.mark.parametrize(
    ("arguments", "nodes", "message"),
    [
        (("best", 8), [(-1, 3)], r"strategy: expected one of auto, none, .*, got 'best'"),
        (("auto", 0), [(-1, 3)], "max_tokens: expected at least 1, got 0"),
        (("greedy", 4), [(-1, 5)], r"strategy greedy: .*path 0 has 5 tokens, more than max_tokens = 4"),
        (("redundancy_free", 2, 4), [(-1, 5)], "expected at least the longest path, 5 tokens, got 4"),
    ],
)
def test_errors(arguments, nodes, message):
    with pytest.raises(UserError, match=message):
        TreePartitioner(*arguments).plan(tree_of(nodes))


def test_multi_path_refuses_what_would_take_forever():
    r = random.Random(0)
    tree = tree_of([(-1, 50)] + [(0, r.randint(1, 60)) for _ in range(60)])
    started = time.perf_counter()
    with pytest.raises(UserError, match=r"multi_path.*greedy"):
        TreePartitioner("multi_path", 400).plan(tree)
    assert time.perf_counter() - started < 10


def test_bounds_are_used():
    """A chain of its longest path alone keeps siblings apart; a longer one lets them share a forward."""
    tree = tree_of([(-1, 10), (0, 5), (0, 5), (0, 5)])
    tight, loose = (TreePartitioner("redundancy_free", 15, chain).plan(tree).stats for chain in (15, 30))
    assert (tight.n_forwards, tight.chain_peak) == (4, 15)
    assert loose.n_forwards == 2


def test_plans_are_saved_for_their_tree_alone(tmp_path):
    tree, other = forest(1), forest(3)
    plan = TreePartitioner("redundancy_free", 5, 100).plan(tree)
    plan.save(tmp_path / "plan.npz")
    loaded = PartitionPlan.load(tmp_path / "plan.npz", tree)
    assert (loaded.strategy, loaded.reason, loaded.stats) == (plan.strategy, plan.reason, plan.stats)
    for mine, theirs in zip(loaded.partitions, plan.partitions, strict=True):
        for name in ("parent", "keys", "subtree_end", "key_index", "scores"):
            assert np.array_equal(getattr(mine, name), getattr(theirs, name)), name
    with pytest.raises(UserError, match=r"plan.npz"):
        PartitionPlan.load(tmp_path / "plan.npz", other)
    (tmp_path / "none.npz").write_text("no plan")
    with pytest.raises(UserError, match=r"none.npz"):
        PartitionPlan.load(tmp_path / "none.npz", tree)


def test_drawing_shows_every_partition_below_its_parent():
    plan = TreePartitioner("redundancy_free", 15, 15).plan(tree_of([(-1, 10), (0, 5), (0, 5), (0, 5)]))
    title, *lines = plan.draw().splitlines()
    assert "4 forwards run 25 tokens, 25 distinct; chain peak 15" in title
    assert lines[0].startswith("0: 10 own, 0 context, tokens 0 to 9, chain 10")
    assert all(f"  {i}: 5 own, 10 context" in line for i, line in enumerate(lines[1:], start=1))
    long = TreePartitioner("redundancy_free", 1).plan(tree_of([(-1, 300)])).draw().splitlines()
    assert any("partitions left out" in line for line in long)
    assert len(long) < 150
