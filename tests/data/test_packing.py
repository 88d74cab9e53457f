"""Shuffling, merging, balancing and packing, on sizes worked out by hand."""

import random
from itertools import pairwise

from titan_tree.data.packing import balanced, flat_trees, longest_path, merged_trees, pack, shuffled
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


def trees_of(*sizes):
    return [TokenTree.from_paths([TokenPath([1] * size)]) for size in sizes]


def naive_trie_size(paths):
    return len({tuple(path[:n]) for path in paths for n in range(1, len(path) + 1)})


def test_shuffled_yields_every_item_once():
    for buffer_size in (0, 1, 5, 200):
        order = list(shuffled(range(100), buffer_size, random.Random(0)))
        assert sorted(order) == list(range(100))
        assert (order == list(range(100))) == (buffer_size < 2)


def test_shuffled_reads_ahead_by_its_buffer_only():
    taken = []
    stream = shuffled((taken.append(i) or i for i in range(100)), 5, random.Random(0))
    for number, _ in enumerate(stream, start=1):
        assert len(taken) <= number + 5


def test_merged_trees_start_a_new_tree_when_the_next_path_does_not_fit():
    r = random.Random(1)
    for _ in range(50):
        limit = r.randint(8, 30)
        paths = [
            [r.randrange(300) // 299 * 256 + r.randrange(2) for _ in range(r.randint(1, 8))]
            for _ in range(20)
        ]
        trees = merged_trees([TokenPath(path) for path in paths], limit)
        found = [sorted(path.tokens.tolist() for path in tree.paths) for tree in trees]
        assert [path for run in found for path in run] == sorted(paths)
        assert [len(tree) for tree in trees] == [naive_trie_size(run) for run in found]
        for run, following in pairwise(found):
            # Prefixes go to the tree of a path that continues them.
            path = next(a for a, b in pairwise([*following, [-1]]) if b[: len(a)] != a)
            assert naive_trie_size(run) <= limit < naive_trie_size([*run, path])


def test_merged_trees_make_no_leaf_of_a_prefix():
    r = random.Random(0)
    for _ in range(200):
        paths = [TokenPath([r.randrange(2) for _ in range(r.randint(1, 9))]) for _ in range(12)]
        max_tokens = r.randint(1, 20)
        trees = merged_trees(paths, max_tokens)
        assert sorted(map(id, paths)) == sorted(id(path) for tree in trees for path in tree.paths)
        assert all(len(tree) <= max(max_tokens, *map(len, tree.paths)) for tree in trees)
        assert sum(tree.leaf_tokens for tree in trees) == TokenTree.from_paths(paths).leaf_tokens


def test_longest_path_keeps_the_first_longest_one_with_its_prefixes_once():
    lists = [[1, 2, 3], [1, 2, 4], [1], [1, 2, 3], [2, 2], [1]]
    paths = [TokenPath(tokens, id=str(i)) for i, tokens in enumerate(lists)]
    assert [path.id for path in longest_path(paths)] == ["0", "2"]
    assert [path.id for path in longest_path(paths[1:])] == ["1", "2"]
    assert longest_path(paths[4:5]) == paths[4:5]


def test_longest_path_has_the_turns_of_its_own_rollout():
    rollouts = {"a": [[1], [1, 5]], "b": [[1], [1, 2], [1, 2, 3]], "c": [[1], [1, 2], [1, 2, 4]]}
    paths = [TokenPath(tokens, id=name) for name, turns in rollouts.items() for tokens in turns]
    assert [(path.id, len(path)) for path in longest_path(paths)] == [("b", 1), ("b", 2), ("b", 3)]


def test_flat_trees_share_nothing():
    trees = flat_trees([TokenPath([1, 2, 3]), TokenPath([1, 2])])
    assert [tree.tokens.tolist() for tree in trees] == [[1, 2, 3], [1, 2]]


def test_pack_is_first_fit_decreasing():
    packed = pack(trees_of(2, 3, 6, 5, 4, 1), 10)
    assert [[len(tree) for tree in micro_batch] for micro_batch in packed] == [[6, 4], [5, 3, 2], [1]]
    assert pack([], 10) == []


def test_pack_leaves_a_larger_tree_alone():
    packed = pack(trees_of(2, 12, 8), 10)
    assert [[len(tree) for tree in micro_batch] for micro_batch in packed] == [[12], [8, 2]]


def test_balanced_gives_the_largest_tree_to_the_lightest_part():
    parts = balanced(trees_of(1, 7, 5, 4, 3, 2), 3)
    assert [[len(tree) for tree in part] for part in parts] == [[7, 1], [5, 2], [4, 3]]
    assert balanced(trees_of(3), 2)[1] == []
