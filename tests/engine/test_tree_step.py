"""The passes of a step in their order, and what TreeStep accepts."""

from typing import Any

import pytest

from titan_tree.components.moe.routing import RouterLoss
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.losses import MicroBatchLoss
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

TRAIN = [("train", 1), ("train", 3), ("train", 1)]  # with the numbers of partitions
SCORED = [("train", 1), ("score", None), *TRAIN[1:]]


@pytest.mark.parametrize(
    ("name", "loss", "expected"),
    [
        ("qwen3", "sft", TRAIN),
        ("qwen3", "gspo", SCORED),
        ("qwen3", "kto", [("measure", 3), *SCORED]),
        ("qwen3_moe", "gspo", [("count", 3), *SCORED]),
    ],
    ids=["train", "whole paths", "a mean over the batch", "router and whole paths"],
)
def test_passes_count_first_and_score_only_partitioned_micro_batches(
    name: str, loss: str, expected: list[tuple[str, int | None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes: list[tuple[str, int | None]] = []

    def record(kind: str, owner: type, method: str, position: int | None) -> None:
        original = getattr(owner, method)

        def recorded(*args: Any, **options: Any) -> Any:
            passes.append((kind, None if position is None else len(args[position])))
            return original(*args, **options)

        monkeypatch.setattr(owner, method, recorded)

    record("count", TreeStep, "_count", 1)
    record("measure", TreeStep, "_measure", 2)
    record("score", MicroBatchLoss, "score", None)
    record("train", TreeStep, "_train", 1)
    router_loss = RouterLoss(balance=0.1) if name == "qwen3_moe" else None
    partitioner = TreePartitioner("redundancy_free", 4)
    model = build_model(name, "debug", vocab_size=16)
    tree_loss = TreeLoss(loss, "path_token_mean")
    step = TreeStep(model, tree_loss, partitioner=partitioner, router_loss=router_loss)
    small, large = (tree(tokens) for tokens in ([1, 2], [1, 2, 3]))
    step.run(step.prepare([[small], [large], [small]]))
    assert passes == expected


def tree(trunk: list[int]) -> TokenTree:
    """Returns a tree of two paths, with the fields that the losses above read."""
    logprobs = [0.0, *[-1.0] * len(trunk)]
    fields: dict[str, Any] = {"advantage": 1.0, "old_logprobs": logprobs, "ref_logprobs": logprobs}
    return TokenTree.from_paths(
        [
            TokenPath([*trunk, leaf], preference=preference, **fields)
            for leaf, preference in ((4, "desirable"), (5, "mismatched"))
        ]
    )


def test_a_step_is_prepared_from_lists_of_lists_of_trees():
    step = TreeStep(build_model("qwen3", "debug", vocab_size=16), TreeLoss())
    tree = TokenTree.from_paths([TokenPath([1, 2, 3])])
    wrongs = (tree, "TokenTree"), ([tree], "list of TokenTree"), ([[*tree.paths]], "list of TokenPath")
    for wrong, got in wrongs:
        with pytest.raises(UserError, match=rf"^TreeStep.prepare: .* got {got}; pass \[\[tree, \.\.\.\]"):
            step.prepare(wrong)
    with pytest.raises(UserError, match=r"^TreeStep.run: expected a StepInput, got list; pass what prepare"):
        step.run([[tree]])
    with pytest.raises(UserError, match="token id 16 at token 1: expected ids below the model's vocabulary"):
        step.prepare([[tree, TokenTree.from_paths([TokenPath([1, 16], id="a")])]])


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
