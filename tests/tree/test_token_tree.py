"""Compares TokenTree and TreeBatch with a trie of prefix tuples in plain Python."""

import dataclasses
import random
import sys

import numpy as np
import pytest
import torch

from tests.support.cases import for_each
from tests.support.paths import random_token_lists
from titan_tree.errors import UserError
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.chunks import Chains, Chunks
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree, TreeStats, common_prefix, lexicographic_order

HAND_MADE = {
    "one token": [[5]],
    "one path": [[1, 2, 3]],
    "equal paths": [[1, 2], [1, 2]],
    "a path is a prefix of another": [[1, 2, 3, 4], [1, 2], [1, 2, 3, 4]],
    "1-token nodes": [[1], [1, 2], [1, 2, 3], [1, 2, 4], [1, 5]],
    "several roots": [[1, 2], [3], [1, 4], [3, 4, 5]],
    "star": [[7, i] for i in range(20)],
    "ids that sort differently by little-endian bytes": [
        [256, 1],
        [1, 256],
        [256, 2],
        [1, 1],
        [65536],
        [2**31 - 1],
    ],
}


CASES = [pytest.param(paths, id=name) for name, paths in HAND_MADE.items()] + [
    pytest.param(random_token_lists(seed), id=f"random {seed}") for seed in range(40)
]


class NaiveTrie:
    """A trie whose tokens are named by their prefix: the tokens from the root to the token itself."""

    def __init__(self, paths):
        self.users = {}  # prefix -> paths through it
        for number, path in enumerate(paths):
            for n in range(1, len(path) + 1):
                self.users.setdefault(tuple(path[:n]), set()).add(number)

    def size(self, prefix):
        return sum(p[: len(prefix)] == prefix for p in self.users)

    def children(self, prefix):
        return [p for p in self.users if p[:-1] == prefix]

    def starts_node(self, prefix):
        return len(prefix) == 1 or self.users[prefix] != self.users[prefix[:-1]]


def prefixes_in_dfs_order(tree, paths):
    """Returns the prefix of each DFS index, according to the paths that run through it."""
    prefix_at = {}
    for number, path in enumerate(paths):
        indices = tree.indices_of(number).tolist()
        assert len(indices) == len(path)
        for n, index in enumerate(indices, start=1):
            assert prefix_at.setdefault(index, tuple(path[:n])) == tuple(path[:n])
    assert sorted(prefix_at) == list(range(len(tree)))
    return [prefix_at[i] for i in range(len(tree))]


@for_each("paths", CASES)
def test_tokens_are_distinct_prefixes_and_subtrees_are_ranges(paths):
    tree, trie = TokenTree.from_paths([TokenPath(p) for p in paths]), NaiveTrie(paths)
    order = prefixes_in_dfs_order(tree, paths)
    assert set(order) == set(trie.users)
    assert len(set(order)) == len(order)
    assert tree.tokens.tolist() == [prefix[-1] for prefix in order]
    assert tree.positions.tolist() == [len(prefix) - 1 for prefix in order]
    for index, prefix in enumerate(order):
        end = tree.subtree_end[index]
        assert set(order[index:end]) == {p for p in trie.users if p[: len(prefix)] == prefix}
        before = tree.predecessor[index]
        assert (order[before] if before >= 0 else ()) == prefix[:-1]


@for_each("paths", CASES)
def test_nodes_are_maximal_runs_shared_by_the_same_paths(paths):
    tree, trie = TokenTree.from_paths([TokenPath(p) for p in paths]), NaiveTrie(paths)
    order = prefixes_in_dfs_order(tree, paths)
    starts = [i for i, prefix in enumerate(order) if trie.starts_node(prefix)]
    assert tree.node_offsets.tolist() == [*starts, len(tree)]
    for node, start in enumerate(starts):
        prefix = order[start]
        assert tree.node_depth[node] == len(prefix) - 1
        assert tree.node_paths[node] == len(trie.users[prefix])
        assert tree.node_subtree_end[node] == start + trie.size(prefix)
        parent = tree.node_parent[node]
        if len(prefix) == 1:
            assert parent == -1
        else:
            assert order[tree.node_offsets[parent + 1] - 1] == prefix[:-1]
    for number, path in enumerate(paths):
        assert order[tree.node_offsets[tree.path_node[number] + 1] - 1] == tuple(path)


@for_each("paths", CASES)
def test_the_heaviest_child_comes_first(paths):
    tree, trie = TokenTree.from_paths([TokenPath(p) for p in paths]), NaiveTrie(paths)
    order = prefixes_in_dfs_order(tree, paths)
    for prefix in [(), *trie.users]:
        sizes = [trie.size(child) for child in sorted(trie.children(prefix), key=order.index)]
        assert sizes == sorted(sizes, reverse=True)


@for_each("paths", CASES)
def test_statistics_equal_those_of_the_naive_trie(paths):
    stats, trie = TokenTree.from_paths([TokenPath(p) for p in paths]).stats, NaiveTrie(paths)
    fan_out = {p: len(trie.children(p)) for p in trie.users}
    levels = [sum(trie.starts_node(tuple(p[:n])) for n in range(1, len(p) + 1)) for p in paths]
    assert stats == TreeStats(
        n_tree=len(trie.users),
        n_leaf=sum(map(len, {tuple(p) for p in paths if not trie.children(tuple(p))})),
        n_flat=sum(map(len, paths)),
        n_nodes=sum(map(trie.starts_node, trie.users)),
        n_paths=len(paths),
        n_leaves=len({tuple(p) for p in paths if not trie.children(tuple(p))}),
        n_branches=sum(n > 1 for n in fan_out.values()),
        n_branch_children=sum(n for n in fan_out.values() if n > 1),
        max_depth=max(levels),
        longest_path=max(map(len, paths)),
    )
    assert stats.por == pytest.approx(1 - stats.n_tree / stats.n_leaf)
    assert stats.por_samples == pytest.approx(1 - stats.n_tree / stats.n_flat)


def test_total_statistics_are_sums_and_maxima():
    a = TokenTree.from_paths([TokenPath([1, 2, 3]), TokenPath([1, 2, 4]), TokenPath([1])]).stats
    b = TokenTree.from_paths([TokenPath([1, 2, 3, 4, 5])]).stats
    assert TreeStats.total([a, b]) == TreeStats(
        n_tree=9,
        n_leaf=11,
        n_flat=12,
        n_nodes=5,
        n_paths=4,
        n_leaves=3,
        n_branches=1,
        n_branch_children=2,
        max_depth=3,
        longest_path=5,
    )


def random_samples(paths, seed):
    r = np.random.default_rng(seed)
    return [
        TokenPath(
            p,
            loss_mask=r.integers(0, 2, len(p)),
            weight=float(r.random()),
            advantage=r.normal(size=len(p)),
            old_logprobs=-r.random(len(p)),
        )
        for p in paths
    ]


@for_each("seed", range(12))
@for_each("edges", ["all", "loss"])
def test_pairs_of_packed_trees_list_every_predicted_token_of_every_path(seed, edges):
    forests = [random_samples(random_token_lists(3 * seed + i), seed) for i in range(3)]
    trees = [TokenTree.from_paths(f) for f in forests]
    batch = TreeBatch.from_trees(trees, edges=edges)
    paths = [path for f in forests for path in f]

    # A loader without trees has one row per predicted token of each path.
    expected = [
        (number, t, path)
        for number, path in enumerate(paths)
        for t in range(1, len(path))
        if edges == "all" or path.loss_mask[t]
    ]
    assert batch.pairs.path.tolist() == [number for number, *_ in expected]
    assert batch.pairs.loss_mask.tolist() == [path.loss_mask[t] for _, t, path in expected]
    for name in ("advantage", "old_logprobs"):  # 0 where the loss mask is 0
        values = [getattr(path, name)[t] * (path.loss_mask[t] > 0) for _, t, path in expected]
        assert getattr(batch.pairs, name).tolist() == values
    assert batch.pairs.ref_logprobs is None
    assert batch.pairs.weight.tolist() == pytest.approx([path.weight for path in paths])
    assert batch.pairs.loss_tokens.tolist() == [path.loss_mask[1:].sum() for path in paths]
    assert batch.edge_label[batch.pairs.edge].tolist() == [path.tokens[t] for _, t, path in expected]
    source = batch.edge_source[batch.pairs.edge]
    assert batch.tokens[source].tolist() == [path.tokens[t - 1] for _, t, path in expected]
    assert batch.layout.positions[source].tolist() == [t - 1 for _, t, _ in expected]

    # There is one edge per distinct (tree, prefix), and each is used.
    names = {
        (number, tuple(path.tokens[: t + 1]))
        for number, forest in enumerate(forests)
        for path in forest
        for t in range(1, len(path))
        if edges == "all" or path.loss_mask[t]
    }
    assert len(batch.edge_source) == len(batch.edge_label) == len(names)
    assert batch.pairs.edge.unique().tolist() == list(range(len(names)))
    assert batch.n_logical == sum(map(len, paths))


@for_each("seed", range(12))
def test_the_attention_mask_of_a_batch_is_the_ancestor_relation(seed):
    forests = [random_token_lists(seed), random_token_lists(seed + 100)]
    trees = [TokenTree.from_paths([TokenPath(p) for p in paths]) for paths in forests]
    names = [
        (number, prefix)
        for number, (tree, paths) in enumerate(zip(trees, forests, strict=True))
        for prefix in prefixes_in_dfs_order(tree, paths)
    ]
    expected = [[a == b and q[: len(k)] == k for b, k in names] for a, q in names]
    batch = TreeBatch.from_trees(trees)
    assert batch.layout.dense_mask().tolist() == expected
    assert batch.layout.positions.tolist() == [len(prefix) - 1 for _, prefix in names]
    assert batch.layout.positions.dtype == batch.layout.subtree_end.dtype == torch.int32


def test_common_prefix_equals_a_loop():
    r = random.Random(0)
    for _ in range(200):
        a, b = ([r.randrange(2) for _ in range(r.randint(0, 6))] for _ in range(2))
        expected = 0
        while expected < min(len(a), len(b)) and a[expected] == b[expected]:
            expected += 1
        assert common_prefix(np.array(a, np.int32), np.array(b, np.int32)) == expected


def test_lexicographic_order_is_that_of_lists():
    r = random.Random(0)
    ids = (0, 1, 255, 256, 65_536, 2**31 - 1)  # their little-endian bytes have a different order
    lists = [[r.choice(ids) for _ in range(r.randint(1, 4))] for _ in range(300)]
    assert lexicographic_order([np.array(tokens, np.int32) for tokens in lists]) == sorted(
        range(300), key=lambda i: (lists[i], i)
    )


def test_trees_and_batches_are_made_from_lists():
    path = TokenPath([1, 2])
    tree = TokenTree.from_paths([path])
    for make, wrong, message in (
        (
            TokenTree.from_paths,
            tree,
            "TokenTree.from_paths: expected a list of TokenPaths, got TokenTree; ",
        ),
        (
            TokenTree.from_paths,
            path,
            "TokenTree.from_paths: expected a list of TokenPaths, got TokenPath; ",
        ),
        (
            TokenTree.from_paths,
            [[1, 2]],
            "TokenTree.from_paths: expected a list of TokenPaths, got list of list; ",
        ),
        (
            TokenTree.forest,
            tree,
            r"TokenTree.forest: expected a list of TokenTrees, got .*; pass \[tree\]",
        ),
        (
            TreeBatch.from_trees,
            tree,
            "TreeBatch.from_trees: expected a list of TokenTrees, got TokenTree; ",
        ),
        (
            TreeBatch.from_trees,
            [path],
            "TreeBatch.from_trees: expected .* TokenTrees, got list of TokenPath; ",
        ),
    ):
        with pytest.raises(UserError, match=f"^{message}"):
            make(wrong)


def test_pin_memory_pins_every_tensor_and_drops_what_was_prepared(monkeypatch):
    """Pinning needs a GPU, so a copy replaces it here."""
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda t: pinned.append(t.clone()) or pinned[-1])
    tree = TokenTree.from_paths([TokenPath([1, 2, 3], advantage=0.5), TokenPath([1, 4], advantage=1.0)])
    batch = TreeBatch.from_trees([tree])
    batch = dataclasses.replace(batch, layout=batch.layout.with_prepared("of this device"))
    result = batch.pin_memory()

    def tensors(record):
        for name, value in vars(record).items():
            if isinstance(value, torch.Tensor):
                yield name, value
            elif isinstance(value, Chunks | Chains):  # Chains.rounds always stays on the CPU
                yield from list(zip(value._fields, value, strict=True))[
                    : 8 if isinstance(value, Chains) else 3
                ]
            elif hasattr(value, "__dataclass_fields__"):
                yield from tensors(value)

    before, after = list(tensors(batch)), list(tensors(result))
    assert len(after) == len(pinned) == 4 + 6 + 3 + 8 + 8
    for (name, old), (same_name, new) in zip(before, after, strict=True):
        assert name == same_name
        assert any(new is tensor for tensor in pinned), name
        assert torch.equal(old, new), name
    assert result.n_logical == 5
    assert result.layout.prepared_attention is batch.to("cpu").layout.prepared_attention is None


def test_errors_name_path_field_and_expectation():
    with pytest.raises(UserError, match="at least one path"):
        TokenTree.from_paths([])
    with pytest.raises(UserError, match="at least one tree"):
        TreeBatch.from_trees([])
    with pytest.raises(
        UserError, match="path a: tokens: expected a flat list of token ids, got a nested list"
    ):
        TokenPath([1, [2]], id="a")
    with pytest.raises(UserError, match=r"path a: loss_mask: expected every entry from 0 to 1e12, got -1.0"):
        TokenPath([1, 2], loss_mask=[0, -1], id="a")
    some = TokenTree.from_paths([TokenPath([1, 2], advantage=1.0), TokenPath([1, 3], id="bare")])
    with pytest.raises(UserError, match="path bare: advantage: missing"):
        TreeBatch.from_trees([some])


def wide() -> list[TokenPath]:
    """Returns 32 paths of 8k tokens that share the first 6k."""
    r = np.random.default_rng(0)
    head = r.integers(0, 50_000, 6000)
    return [TokenPath(np.concatenate([head, r.integers(0, 50_000, 2000)])) for _ in range(32)]


def nested() -> list[TokenPath]:
    """Returns 256 paths, each 16 tokens longer than the one before, like the turns of one rollout."""
    tokens = np.random.default_rng(0).integers(0, 50_000, 16 * 256)
    return [TokenPath(tokens[: 16 * n]) for n in range(1, 257)]


@pytest.mark.parametrize("paths", [wide, nested])
def test_building_a_tree_runs_no_python_code_per_token(paths):
    samples, num_lines = paths(), 0

    def count(frame, event, arg):
        nonlocal num_lines
        num_lines += event == "line"
        return count

    before = sys.gettrace()
    sys.settrace(count)
    try:
        tree = TokenTree.from_paths(samples)
    finally:
        sys.settrace(before)
    assert num_lines < 100 * (len(samples) + len(tree.node_parent))
    assert num_lines < tree.stats.n_flat / 10
