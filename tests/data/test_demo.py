"""The bundled sample is reproducible, small, and branches as real rollouts do."""

import json
from functools import cache

import pytest

from tests.support.datasets import sample_reader
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data import demo
from titan_tree.data.divergence import ENDS, OTHER_TEXT, branch_points
from titan_tree.tree.token_tree import TokenTree, TreeStats


@cache
def trees(**options):
    reader = sample_reader("demo", TreeTokenizer.byte_level(), sample=options)
    return [TokenTree.from_paths(reader.paths(group)) for group in reader.files.groups()]


def test_records_are_the_same_on_every_call_and_in_a_file(tmp_path):
    first = list(demo.records())
    assert first == list(demo.records())
    demo.write(tmp_path / "demo.jsonl")
    assert [json.loads(line) for line in (tmp_path / "demo.jsonl").read_text().splitlines()] == first
    assert len({record["id"] for record in first}) == len(first) == demo.NUM_TASKS


def test_only_correct_answers_have_reward_1():
    """The expected answer is the sum of the tool results."""
    for record in demo.records():
        for trial in record["trajectories"]:
            total = sum(int(m["content"]) for m in trial["messages"] if m["role"] == "tool")
            assert (int(trial["messages"][-1]["content"]) == total) == (trial["reward"] == 1)


@pytest.mark.slow
def test_paths_overlap_and_diverge_as_real_rollouts_do():
    for options in ({}, {"keep_reasoning": False}):
        stats = [tree.stats for tree in trees(**options)]
        total = TreeStats.total(stats)
        assert total.por > 0.4
        assert total.por_samples > 0.6
        assert total.longest_path < 1000
        assert max(s.n_tree for s in stats) <= 2048
        assert sum(s.n_branches > 0 for s in stats) == len(stats)
    reasons = {
        r
        for tree in trees()
        for p in branch_points(tree, TreeTokenizer.byte_level().decode)
        for r in p.reasons
    }
    assert reasons == {ENDS, OTHER_TEXT}


@pytest.mark.slow
def test_dropping_earlier_thoughts_adds_branches():
    with_thoughts, without = (
        sum(t.stats.n_branches for t in trees(keep_reasoning=keep)) for keep in (True, False)
    )
    assert without > with_thoughts
