"""Losses with one ratio per rollout, against their formulas on the tokens of all its paths in one row."""

import dataclasses

import pytest
import torch

from tests.components.test_policy_losses import columns, forest
from tests.components.test_tree_loss import edge_table
from tests.support.policy_losses import LOSSES, ppo
from titan_tree.components.tree_loss.corrections import RolloutCorrection
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.data.tree_bytes import tree_from_bytes, tree_to_bytes
from titan_tree.errors import UserError
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

WHOLE = ("gspo", "gspo_token", "luspo", "gmpo", "vespo")
ROLLOUTS = ((1, 4, 6), (2, 3), (8, 9))  # numbers of paths; 8 and 9 are equal, so they share all tokens


def rollouts(seed):
    """Returns what ``forest`` does. Its paths belong to rollouts that interleave; one has no weight."""
    paths, _, logprobs = forest(seed)
    paths.append(dataclasses.replace(paths[-1], advantage=0.7))
    paths[4].weight = 0.0
    for members in ROLLOUTS:
        TokenPath.join_rollout([paths[i] for i in members], f"rollout {members[0]}")
    return paths, TreeBatch.from_trees([TokenTree.from_paths(paths)]), logprobs


def expected_loss(paths, batch, logprobs, formula, reduction):
    """Returns the loss by applying ``formula`` to the tokens of all paths of a rollout, joined in one row."""
    table, total, z = edge_table(batch), 0.0, 0.0
    alone = [(i,) for i in range(len(paths)) if not any(i in members for members in ROLLOUTS)]
    for members in (*ROLLOUTS, *alone):
        of_paths = [columns(paths[i], logprobs, table) for i in members]
        joined = [torch.cat(values) for values in zip(*of_paths, strict=True)]
        masks = [values[-1] for values in of_paths]
        counted = sum(m.sum() for m in masks)
        losses = formula(*joined) if len(joined[0]) else joined[0]
        for i, m, of_path in zip(members, masks, losses.split([len(m) for m in masks]), strict=True):
            w = paths[i].weight
            c, share = w * m, w * float(m.sum()) if reduction == "token_mean" else w
            if reduction == "rollout_token_mean":
                c, share = w * m / counted.clamp(min=1e-9), w * float(m.sum() / counted.clamp(min=1e-9))
            if reduction == "path_token_mean":
                c = w * m / m.sum().clamp(min=1e-9)
            total, z = (
                total + (c * of_path).sum(),
                z + share,
            )
    return total / z


def assert_equals(loss, formula, seeds=range(4)):
    for seed in seeds:
        paths, batch, logprobs = rollouts(seed)
        want = expected_loss(paths, batch, logprobs, formula, loss.reduction)
        (want_gradient,) = torch.autograd.grad(want, logprobs)
        got, metrics = loss(logprobs, batch, loss.normalizer(paths))
        (gradient,) = torch.autograd.grad(got, logprobs)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)  # fields are fp32
        torch.testing.assert_close(gradient, want_gradient, rtol=2e-6, atol=1e-7)
        assert want_gradient.norm() > 1e-3
    return metrics


@pytest.mark.parametrize("reduction", ["rollout_token_mean", None])
@pytest.mark.parametrize("name", WHOLE)
def test_the_loss_equals_its_formula_on_every_rollout(name, reduction):
    options, own, formula = LOSSES[name]
    reduction = own if reduction is None or name == "luspo" else reduction
    assert_equals(TreeLoss(name, reduction, sequence="rollout", **options), formula)


CORRECTIONS = [
    *(("sequence", estimator, high) for estimator, high in (("ratio", 1.1), ("k2", 0.2), ("k3", 0.2))),
    *(("geometric", estimator, high) for estimator, high in (("ratio", 1.05), ("k2", 0.025), ("k3", 0.025))),
    *(("max", estimator, 0.08) for estimator in ("k2", "k3")),
]


@pytest.mark.parametrize(("level", "estimator", "high"), CORRECTIONS)
def test_the_correction_of_every_rollout(level, estimator, high):
    kept = []

    def formula(n, o, f, b, A, m):
        x = o - b
        d = {"ratio": x, "k2": x**2 / 2, "k3": x.exp() - 1 - x}[estimator]
        value = {"sequence": (m * d).sum(), "geometric": (m * d).sum() / m.sum().clamp(min=1e-9)}.get(level)
        value = value if value is not None else d[m > 0].max() if m.any() else m.sum()
        kept.append((value.exp() if estimator == "ratio" else value) <= high)
        return kept[-1] * ppo(n, o, A)

    correction = RolloutCorrection(level, "reject", high=high, estimator=estimator)
    loss = TreeLoss("ppo", "rollout_token_mean", correction=correction, sequence="rollout")
    assert loss.spec.needs_whole_paths
    assert loss.spec.compares_paths
    assert_equals(loss, formula, range(12) if level == "max" else range(4))
    assert 0.1 < torch.stack(kept).double().mean() < 0.95


def test_a_rollout_of_one_path_has_the_ratio_of_this_path():
    paths, batch, logprobs = forest(2)
    values = []
    for sequence in ("path", "rollout"):
        loss = TreeLoss("gspo", "path_token_mean", sequence=sequence, clip_low=0.1, clip_high=0.3)
        value, metrics = loss(logprobs, batch, loss.normalizer(paths))
        values.append((value, torch.autograd.grad(value, logprobs)[0], metrics))
    assert torch.equal(values[0][0], values[1][0])
    assert torch.equal(values[0][1], values[1][1])
    assert values[0][2] == values[1][2]


def test_a_group_may_occur_twice_in_a_batch():
    paths, _, _ = rollouts(0)
    copies = [tree_from_bytes(tree_to_bytes(TokenTree.from_paths(paths))) for _ in range(2)]
    numbers = TreeBatch.from_trees(copies).pairs.rollout.tolist()
    assert numbers[4] == numbers[6] == numbers[1]
    assert numbers[3] == numbers[2]
    assert numbers[len(paths) :] == [number + len(paths) for number in numbers[: len(paths)]]


def test_what_has_no_ratio_per_rollout_is_refused():
    for name in ("ppo", "dpo", "kto", "sft"):
        with pytest.raises(UserError, match=rf"^loss\.sequence: expected 'path' for the loss '{name}'"):
            TreeLoss(name, sequence="rollout")
    with pytest.raises(UserError, match=r"^loss\.sequence: .*, got 'turn'"):
        TreeLoss("gspo", sequence="turn")
    with pytest.raises(UserError, match=r"^loss\.sequence: expected 'path'"):
        TreeLoss("ppo", correction=RolloutCorrection("token"), sequence="rollout")
    for change in ("a path is missing", "two have one name", "they have no name"):
        paths, _, _ = rollouts(0)
        if change == "a path is missing":
            del paths[6]
        for path in paths if change != "a path is missing" else ():
            path.rollout = "same" if change == "two have one name" else None
        batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])
        with pytest.raises(UserError, match=r"^loss\.sequence: expected all paths of each rollout in one"):
            TreeLoss("gspo", sequence="rollout")(torch.zeros(len(batch.edge_label)) - 1, batch, 1.0)
