"""The list of passes of a step, and what TreeStep accepts."""

import pytest

from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.step_run import plan_passes
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

ONE, TWO = ["batch"], ["parent", "child"]  # micro-batches with one and two partitions


COUNTED, MEASURED, TRAIN = ([(kind, i) for i in range(3)] for kind in ("count", "measure", "train"))
SCORED = [("train", 0), ("score", 1), *TRAIN[1:]]


@pytest.mark.parametrize(
    ("count", "measure", "score", "expected"),
    [
        (False, False, False, TRAIN),
        (False, False, True, SCORED),
        (False, True, True, MEASURED + SCORED),
        (True, False, True, COUNTED + SCORED),
    ],
    ids=["train", "whole paths", "a mean over the batch", "router and whole paths"],
)
def test_passes_count_first_and_score_only_partitioned_micro_batches(count, measure, score, expected):
    assert plan_passes([ONE, TWO, ONE], count=count, measure=measure, score=score) == expected


def test_a_step_without_micro_batches_has_no_passes():
    assert plan_passes([], count=True, measure=True, score=True) == []
    passes = plan_passes([TWO], count=False, measure=False, score=True)
    assert passes == [("score", 0), ("train", 0)]


def test_a_step_is_prepared_from_lists_of_lists_of_trees():
    step = TreeStep(build_model("qwen3", "debug", vocab_size=16), TreeLoss())
    tree = TokenTree.from_paths([TokenPath([1, 2, 3])])
    for wrong, got in ((tree, "TokenTree"), ([tree], "list of TokenTree")):
        with pytest.raises(UserError, match=rf"^TreeStep.prepare: .* got {got}; pass \[\[tree, \.\.\.\]"):
            step.prepare(wrong)
    with pytest.raises(UserError, match=r"^TreeStep.run: expected a StepInput, got list; pass what prepare"):
        step.run([[tree]])


def test_scores_have_names():
    step = TreeStep(
        build_model("qwen3", "debug", vocab_size=16),
        TreeLoss("gspo"),
        partitioner=TreePartitioner("redundancy_free", 2),
    )
    fields = {"advantage": 1.0, "old_logprobs": [0, -1, -1]}
    tree = TokenTree.from_paths([TokenPath([1, 2, 3], **fields), TokenPath([1, 2, 4], **fields)])
    ((batch, scores),) = step.score(step.prepare([[tree]]))
    assert list(scores) == ["logprobs"]
    assert scores["logprobs"].shape == batch.edge_label.shape == (3,)
