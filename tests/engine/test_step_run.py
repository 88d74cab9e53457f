"""The list of passes of a step."""

import pytest

from titan_tree.engine.step_run import Pass, plan_passes

ONE, TWO = ["batch"], ["parent", "child"]  # micro-batches with one and two partitions


@pytest.mark.parametrize(
    ("count", "score", "expected"),
    [
        (False, False, ["train 0", "train 1", "train 2 last"]),
        (False, True, ["train 0", "score 1", "train 1", "train 2 last"]),
        (
            True,
            True,
            ["count 0", "count 1", "count 2 last", "train 0", "score 1", "train 1", "train 2 last"],
        ),
    ],
    ids=["train", "whole paths", "router and whole paths"],
)
def test_passes_count_first_and_score_only_partitioned_micro_batches(count, score, expected):
    passes = plan_passes([ONE, TWO, ONE], count=count, score=score)
    assert [f"{p.kind} {p.micro_batch}{' last' if p.is_last else ''}" for p in passes] == expected


def test_a_step_without_micro_batches_has_no_passes():
    assert plan_passes([], count=True, score=True) == []
    assert plan_passes([TWO], count=False, score=True) == [Pass("score", 0, True), Pass("train", 0, True)]
