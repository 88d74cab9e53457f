"""What titan-tree inspect says about lines without a group_id."""

import re

import numpy as np
import pytest

from titan_tree.data import packing
from titan_tree.data.data_files import Group
from titan_tree.data.packing import UngroupedLines
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


def advice(lines, **fields):
    """Returns the advice for lines, each given as the tokens of its samples."""
    found = UngroupedLines()
    for number, paths in enumerate(lines):
        tree = TokenTree.from_paths([TokenPath(tokens) for tokens in paths])
        found.add(Group(f"f:{number}", [(f"f:{number}", {"tokens": [], **fields})]), tree)
    return found.advice()


def test_the_numbers_are_those_of_one_tree_and_of_all_trees():
    """Random lines with one to four samples each, some of which are prefixes of others or equal."""
    draw = np.random.default_rng(0)
    told = 0
    for _ in range(100):
        lines = [
            [draw.integers(0, 2, draw.integers(1, 12)).tolist() for _ in range(draw.integers(1, 5))]
            for _ in range(draw.integers(1, 6))
        ]
        trees = [TokenTree.from_paths([TokenPath(tokens) for tokens in paths]) for paths in lines]
        apart = sum(map(len, trees))
        together = len(TokenTree.from_paths([path for tree in trees for path in tree.paths]))
        text = advice(lines)
        assert (text is None) == (together >= 0.95 * apart)
        if text is not None:
            assert [int(n) for n in re.findall(r"\d+", text)] == [len(lines), len(lines), together, apart]
            told += 1
    assert told > 50


def test_the_advice_says_what_to_do():
    assert advice([[[1, 2, 3]], [[1, 2, 4]]]) == (
        "2 lines without group_id share prefixes: one tree instead of 2 would hold 4 tokens instead of 6; "
        'give the lines of a task the same group_id, or set data.merge = "batch"'
    )


def test_groups_and_tasks_need_no_advice():
    lines = [[[1, 2, 3]], [[1, 2, 4]]]
    assert advice(lines, group_id="a") is None
    assert advice(lines, trajectories=[]) is None
    assert advice([]) is None
    assert advice([[[1, 2, 3], [1, 2, 4]]]) is None  # one line is one tree already


def test_memory_is_bounded(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(packing, "MAX_HELD_TOKENS", 6)
    text = advice([[[1, 2, 3]], [[1, 2, 4]], [[1, 2, 5]]])
    assert text is not None
    assert text.startswith(
        "the first 2 lines without group_id share prefixes: one tree instead of 2 would hold 4 "
    )
