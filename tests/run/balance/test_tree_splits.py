"""Pieces of trees, against tries of prefix tuples in plain Python."""

import itertools
import random

import numpy as np
import pytest

from tests.support.cases import for_each
from tests.support.paths import random_token_lists
from tests.support.records import expected_records, random_recorded_path
from titan_tree.run.balance.splitting import split_tree
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

Prefix = tuple[int, ...]


def random_cuts(tree: TokenTree, draw: random.Random) -> list[int]:
    places = range(1, len(tree.leaves))
    return sorted(draw.sample(places, draw.randint(0, len(places))))


def prefixes(tree: TokenTree) -> list[Prefix]:
    """Returns the prefix of each token, according to the paths that run through it."""
    prefix_at: dict[int, Prefix] = {}
    for number, path in enumerate(tree.paths):
        for n, index in enumerate(tree.indices_of(number).tolist(), start=1):
            prefix = tuple(path.tokens[:n].tolist())
            assert prefix_at.setdefault(index, prefix) == prefix
    assert sorted(prefix_at) == list(range(len(tree)))
    return [prefix_at[i] for i in range(len(tree))]


@for_each("seed", range(60))
def test_a_piece_is_a_tree_of_its_paths(seed: int) -> None:
    """It holds the distinct prefixes of its paths, in the order of the whole tree."""
    draw = random.Random(seed)
    paths = [TokenPath(tokens, id=str(i)) for i, tokens in enumerate(random_token_lists(seed))]
    tree = TokenTree.from_paths(paths)
    cuts = random_cuts(tree, draw)
    pieces, place = split_tree(tree, cuts), {prefix: i for i, prefix in enumerate(prefixes(tree))}
    assert len(pieces) == len(cuts) + 1
    for piece in pieces:
        order = prefixes(piece)
        assert len(set(order)) == len(order)
        assert [place[prefix] for prefix in order] == sorted(place[prefix] for prefix in order)
        assert piece.tokens.tolist() == [prefix[-1] for prefix in order]
        assert piece.positions.tolist() == [len(prefix) - 1 for prefix in order]
        for index, prefix in enumerate(order):
            end = piece.subtree_end[index]
            assert set(order[index:end]) == {p for p in order if p[: len(prefix)] == prefix}
            before = piece.predecessor[index]
            assert (order[before] if before >= 0 else ()) == prefix[:-1]
        for number in range(len(piece.paths)):
            last = piece.node_offsets[piece.path_node[number] + 1] - 1
            assert last == piece.indices_of(number)[-1]
        assert [int(path.id) for path in piece.paths] == sorted(int(path.id) for path in piece.paths)


@for_each("seed", range(60))
def test_pieces_count_what_the_tree_counts(seed: int) -> None:
    draw = random.Random(seed)
    lists = random_token_lists(seed)
    tree = TokenTree.from_paths([TokenPath(tokens, id=str(i)) for i, tokens in enumerate(lists)])
    pieces = split_tree(tree, random_cuts(tree, draw))
    ids = sorted(int(path.id) for piece in pieces for path in piece.paths)
    assert ids == list(range(len(lists)))  # every path is in one piece
    assert [piece.is_counted for piece in pieces].count(True) == 1
    assert sum(piece.counted_tokens for piece in pieces) == tree.counted_tokens == len(tree)
    paths_of: dict[Prefix, list[int]] = {}
    for piece in pieces:
        num_paths = np.repeat(piece.node_paths, piece.node_length).tolist()
        for prefix, count in zip(prefixes(piece), num_paths, strict=True):
            paths_of.setdefault(prefix, []).append(count)
    for prefix, counts in paths_of.items():
        expected = sum(tuple(tokens[: len(prefix)]) == prefix for tokens in lists)
        assert counts == [expected, *[0] * (len(counts) - 1)]


def test_the_example_of_the_module() -> None:
    """The piece of the first path counts as the tree, even if it is not the first piece."""
    tree = TokenTree.from_paths([TokenPath([1, 2, 3, 4]), TokenPath([1, 2, 3, 5, 6]), TokenPath([1, 2, 7])])
    assert split_tree(tree, []) == [tree]
    first, second = split_tree(tree, [1])
    assert first.tokens.tolist() == [1, 2, 3, 5, 6]
    assert second.tokens.tolist() == [1, 2, 3, 4, 7]
    assert second.node_offsets.tolist() == [0, 2, 3, 4, 5]
    assert second.node_parent.tolist() == [-1, 0, 1, 0]
    assert (first.node_paths.tolist(), second.node_paths.tolist()) == ([3, 2, 1], [0, 0, 1, 1])
    assert (first.is_counted, second.is_counted) == (False, True)


@pytest.mark.parametrize("mode", ["first", "majority", "split"])
def test_pieces_keep_the_experts_of_the_tree(mode: str) -> None:
    """Paths of other pieces decided on some of them."""
    draw = random.Random(0)
    for seed in range(20):
        lists = random_token_lists(seed)
        paths = [random_recorded_path(tokens, draw, id=str(i)) for i, tokens in enumerate(lists)]
        tree = TokenTree.from_paths(paths, mode)  # type: ignore[arg-type]
        if tree.routed_experts is None:
            continue
        expected, *counts = expected_records(paths, mode)
        pieces = split_tree(tree, random_cuts(tree, draw))
        for piece in pieces:
            assert piece.routed_experts is not None
            for number, path in enumerate(piece.paths):
                got = piece.routed_experts.experts[piece.indices_of(number)]
                np.testing.assert_array_equal(np.sort(got), np.sort(expected[int(path.id)]))
        summed = np.sum([piece.routed_experts[1:] for piece in pieces if piece.routed_experts], axis=0)
        assert summed.tolist() == counts


def test_every_cut_of_a_small_tree() -> None:
    tree = TokenTree.from_paths([TokenPath([1, *tokens]) for tokens in ([2, 3], [2, 4], [5], [6, 7], [6])])
    places = range(1, len(tree.leaves))
    for n in range(len(places) + 1):
        for cuts in itertools.combinations(places, n):
            pieces = split_tree(tree, cuts)
            assert sorted(len(piece.leaves) for piece in pieces) == sorted(
                np.diff([0, *cuts, len(tree.leaves)]).tolist()
            )
