"""Merging recorded experts: the records of trees against plain loops over paths."""

import random

import numpy as np
import pytest

from tests.support.cases import for_each
from tests.support.paths import random_token_lists
from tests.support.records import MODES, expected_records, random_recorded_path, rows_of
from titan_tree.errors import UserError
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


@for_each("mode", MODES)
@for_each("seed", range(12))
def test_records_of_a_tree_equal_those_of_plain_loops(seed, mode):
    """With three experts, paths often agree, disagree and tie. The order of a record means nothing."""
    draw = random.Random(seed)
    paths = [random_recorded_path(tokens, draw, kinds=3) for tokens in random_token_lists(seed)]
    experts, num_rows, disagreeing = expected_records(paths, mode)
    tree = TokenTree.from_paths(paths, mode)
    if tree.routed_experts is None:
        assert num_rows == 0
        return
    for i, want in enumerate(experts):
        got = tree.routed_experts.experts[tree.indices_of(i)]
        order = np.sort if mode == "split" else np.asarray  # equal sets may have any order
        assert np.array_equal(order(got), order(want))
        assert np.array_equal(tree.tokens[tree.indices_of(i)], paths[i].tokens)
    assert tree.routed_experts[1:] == (num_rows, disagreeing)
    merged = TokenTree.from_paths(paths)
    assert merged.routed_experts is None
    if mode != "split":
        assert np.array_equal(tree.tokens, merged.tokens)
        assert np.array_equal(tree.path_index, merged.path_index)
    else:  # tokens are distinct if prefixes or records up to them differ
        cells = [
            tuple(
                (token, *(frozenset(r or ()) for r in row))
                for token, row in zip(p.tokens, rows_of(p), strict=True)
            )
            for p in paths
        ]
        assert len(tree) == len({cell[: n + 1] for cell in cells for n in range(len(cell))})


def test_a_forest_concatenates_the_records_of_its_trees():
    draw = random.Random(1)
    with_some, without = random_recorded_path([1, 2, 3], draw), TokenPath([1, 2, 4])
    trees = [TokenTree.from_paths([path], "first") for path in (without, with_some)]
    records = TokenTree.forest(trees).routed_experts
    assert (records.experts[:3] == -1).all()
    assert np.array_equal(records.experts[3:], with_some.routed_experts)
    assert records.num_token_layers == trees[1].routed_experts.num_token_layers
    other = TokenTree.from_paths([TokenPath([1], routed_experts=[[[0, 1]] * 3])], "first")
    with pytest.raises(UserError, match=r"experts of one model, got .* \(2, 2\) and \(3, 2\)"):
        TokenTree.forest([trees[1], other])
    with pytest.raises(UserError, match="path b: routed_experts: expected 2 layers and 2 experts per token"):
        TokenTree.from_paths([with_some, TokenPath([1], routed_experts=[[[0, 1]] * 3], id="b")], "split")


def test_an_unknown_replay_is_refused():
    with pytest.raises(UserError, match="replay: expected one of off, first, majority, split; got 'last'"):
        TokenTree.from_paths([TokenPath([1])], "last")
