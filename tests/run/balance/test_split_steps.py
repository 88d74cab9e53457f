"""A step on the pieces of trees equals the step on the whole trees, in float64."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.engine.test_partitions import add_rl_fields
from tests.support.cases import slow_except
from tests.support.oracle import hf_model, hybrid_model, random_groups, relative_error, tree_model
from tests.support.records import with_records
from titan_tree.components.moe.routing import RouterLoss
from titan_tree.components.tree_loss.loss import TreeLoss, register_loss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.data.tree_bytes import tree_from_bytes, tree_to_bytes
from titan_tree.engine.step_io import StepCounts, StepResult
from titan_tree.engine.tree_step import TreeStep
from titan_tree.run.balance.splitting import split_tree
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

DTYPE = torch.float64
MODELS: dict[str, Callable[[], Any]] = {
    "qwen3": lambda: hf_model(tied=True, dtype=DTYPE),
    "qwen3_moe": lambda: hf_model(tied=True, kind="Qwen3Moe", dtype=DTYPE),
    "qwen3_5": lambda: hybrid_model(tied=True, dtype=DTYPE),
}
# Counts that grow with the tokens that pieces repeat, or with the number of passes.
REPEATED = {
    "executed_tokens",
    "split_tokens",
    "scored_edges",
    "forwards",
    "flops",
    "gateway_bytes",
    *("max_micro_batches", "max_partitions", "chain_peak"),
}


class ExactLoss(TreeLoss):
    """Also sums the losses in float64. TreeStep sums them in float32."""

    total = 0.0

    def __call__(self, *args: Any, **options: Any) -> tuple[Tensor, dict[str, Tensor]]:
        loss, sums = super().__call__(*args, **options)
        self.total += loss.item()
        return loss, sums


def trees_of(seed: int, replays: bool) -> list[TokenTree]:
    groups = random_groups(seed)
    if replays:
        groups = with_records(groups, seed)
    paths = [path for group in groups for path in group]
    add_rl_fields(paths, seed)
    for number, path in enumerate(paths):
        path.id = f"p{number}"
    for group in groups:
        TokenPath.join_rollout(group[::2], group[0].id)
    trees = [TokenTree.from_paths(group, "majority" if replays else "off") for group in groups]
    for tree in trees:
        tree.weigh_edges()
    return trees


def in_pieces(trees: list[TokenTree], seed: int) -> list[list[TokenTree]]:
    """Returns micro-batches of pieces, as they arrive from other ranks, in any order."""
    draw = random.Random(seed)
    pieces = []
    for tree in trees:
        places = range(1, len(tree.leaves))
        pieces += split_tree(tree, sorted(draw.sample(places, min(len(places), 3))))
    assert len(pieces) > len(trees)
    copies = [tree_from_bytes(tree_to_bytes(piece)) for piece in pieces]
    draw.shuffle(copies)
    return [copies[:2], copies[2:]]


ROUTERS = RouterLoss(0.3, 0.05)
CUT = TreePartitioner("redundancy_free", 4)  # some partitions hold only tokens that another piece counts
CASES: dict[str, tuple[Any, ...]] = {  # model, partitioner, router losses, loss, whether experts are replayed
    "sft": ("qwen3", None, None, ("sft", "path_mean"), False),
    "rollouts": ("qwen3", None, None, ("sft", "rollout_token_mean"), False),
    "whole paths, partitions": ("qwen3", CUT, None, ("gspo", "first_path_token_mean"), False),
    "repeating partitions": (
        "qwen3",
        TreePartitioner("greedy", 40),
        None,
        ("grpo", "distinct_token_mean", 0.02),
        False,
    ),
    "recurrent, partitions": ("qwen3_5", CUT, None, ("sft", "token_mean"), False),
    "routers, partitions, replay": ("qwen3_moe", CUT, ROUTERS, ("sft", "path_mean"), True),
}
EVERYDAY = ("sft", "rollouts", "whole paths, partitions", "repeating partitions")


@pytest.mark.parametrize("case", slow_except(EVERYDAY, CASES))
def test_pieces_train_as_the_tree_does(case: str) -> None:
    model, partitioner, router_loss, loss, replays = CASES[case]
    for seed in (0, 2, 3):  # seed 1 is a chain, which has one leaf
        trees = trees_of(seed, replays)
        results: list[StepResult] = []
        losses, gradients = [], []
        for micro_batches in ([trees], in_pieces(trees, seed)):
            decoder = tree_model(MODELS[model]())
            options = {"clip_low": 0.5, "clip_high": 0.5} if loss[0] in ("gspo", "grpo") else {}
            exact = ExactLoss(*loss, **options)
            step = TreeStep(decoder, exact, "cpu", partitioner, router_loss=router_loss)
            results.append(step.run(step.prepare(micro_batches)))
            losses.append(exact.total)
            gradients.append({name: p.grad for name, p in decoder.named_parameters()})
        assert losses[1] == pytest.approx(losses[0], rel=1e-12)
        for name, gradient in gradients[0].items():
            assert relative_error(gradients[1][name], gradient) < 1e-12, name
        assert_same_result(*results)


def assert_same_result(whole: StepResult, pieces: StepResult) -> None:
    """Asserts that all metrics are equal, and that repeated tokens count only as executed."""
    assert pieces.loss.item() == pytest.approx(whole.loss.item(), rel=1e-5)
    for metrics, expected in (
        (pieces.loss_metrics, whole.loss_metrics),
        (pieces.router_metrics, whole.router_metrics),
    ):
        assert metrics.keys() == expected.keys()
        for name, value in expected.items():
            assert metrics[name].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-7), name
    for routed, same in zip(pieces.routing or (), whole.routing or (), strict=True):
        torch.testing.assert_close(routed, same, rtol=1e-12, atol=1e-12)
    for name in StepCounts.__dataclass_fields__.keys() - REPEATED:
        assert getattr(pieces.counts, name) == pytest.approx(getattr(whole.counts, name), rel=1e-12), name
    assert whole.counts.split_tokens == 0 < pieces.counts.split_tokens
    assert pieces.counts.por == whole.counts.por
    if whole.counts.duplicates == 0:
        assert pieces.counts.duplicates == 0
        assert pieces.counts.executed_tokens == whole.counts.executed_tokens + pieces.counts.split_tokens


def test_a_bad_step_names_paths_and_trees_of_pieces() -> None:
    register_loss("root")(lambda logprobs, pairs: (pairs.advantage * -logprobs).sqrt())

    def pieces(bad: set[str]) -> list[list[TokenTree]]:
        def path(name: str, last: int) -> TokenPath:
            return TokenPath([1, 2, 3, 4, last], id=name, advantage=0.0 if name in bad else 1.0)

        trees = [TokenTree.from_paths([path(f"{name}{i}", 5 + i) for i in range(4)]) for name in "ab"]
        (first, *rest), other = split_tree(trees[0], [1, 3]), split_tree(trees[1], [2])
        return [[*rest, other[0]], [other[1], first]]

    step = TreeStep(tree_model(hf_model(tied=True)), TreeLoss("root"))
    cause = step.find_cause(step.prepare(pieces({"a1", "a3", "b2"})))
    assert cause == "paths with a loss or a derivative that is not finite: a1, a3, b2"
    cause = step.find_cause(step.prepare(pieces(set())))
    assert cause.endswith("is finite; the first paths of the step's trees: b0, a0")


@pytest.mark.parametrize("name", ["sft", "reinforce", "ppo", "grpo", "gspo"])
def test_only_registered_losses_of_whole_paths_may_compare_paths(name: str) -> None:
    assert not TreeLoss(name).spec.compares_paths
    register_loss("of tokens")(lambda logprobs, pairs: -logprobs)
    register_loss("of pairs of paths", whole_paths=True)(lambda logprobs, pairs: -logprobs)
    assert not TreeLoss("of tokens").spec.compares_paths
    assert TreeLoss("of pairs of paths").spec.compares_paths
