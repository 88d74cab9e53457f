"""Compares every policy loss with its formula on each path alone: losses, gradients, corrections, limits."""

import math

import numpy as np
import pytest
import torch

from tests.components.test_tree_loss import edge_table, edges_of, random_paths
from tests.support.cases import for_each, slow_except
from tests.support.policy_losses import LOSSES, gspo, ppo, reduced
from titan_tree.components.tree_loss import ratios
from titan_tree.components.tree_loss.corrections import KLPenalty, RolloutCorrection
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_loss.ratios import kl_estimate
from titan_tree.components.tree_loss.settings import LOSSES as NAMES
from titan_tree.components.tree_loss.settings import LossConfig
from titan_tree.components.tree_loss.spec import LossSpec
from titan_tree.errors import UserError
from titan_tree.run.build import build_loss
from titan_tree.run.config import load_config
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

FIELDS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantage", "loss_mask")


def forest(seed, zero_advantage=False):
    """Returns the paths of one tree per two random ones, its batch, and random log-probs of the edges."""
    rng = np.random.default_rng(seed + 100)
    paths = random_paths(seed)
    for path in paths:
        path.old_logprobs = path.old_logprobs.clip(max=-0.01)
        noisy = path.old_logprobs + rng.normal(0, 0.2, len(path))
        path.rollout_logprobs = noisy.clip(max=0).astype(np.float32)
        if zero_advantage:
            path.advantage[:] = 0
    batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])
    noise = torch.from_numpy(rng.normal(-1, 0.6, len(batch.edge_label))).clamp(max=-0.01)
    return paths, batch, noise.requires_grad_()


def columns(path, logprobs, table):
    """Returns n, o, f, b, A and m of the tokens of one path, found by following edges."""
    fields = (torch.from_numpy(getattr(path, name)[1:]).double() for name in FIELDS)
    return logprobs[edges_of(path, table)], *fields


def expected_loss(paths, batch, logprobs, formula, reduction):
    table = edge_table(batch)
    losses, masks = [], []
    for path in paths:
        values = columns(path, logprobs, table)
        masks.append(values[-1])
        losses.append(formula(*values) if len(path) > 1 else values[0])
    return reduced(losses, masks, [path.weight for path in paths], reduction)


def assert_equals(loss, formula, reduction, seeds=range(4)):
    for seed in seeds:
        paths, batch, logprobs = forest(seed)
        want = expected_loss(paths, batch, logprobs, formula, reduction)
        (want_grad,) = torch.autograd.grad(want, logprobs)
        got, metrics = loss(logprobs, batch, loss.normalizer(paths))
        (got_grad,) = torch.autograd.grad(got, logprobs)
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)  # fields are fp32
        torch.testing.assert_close(got_grad, want_grad, rtol=2e-6, atol=1e-7)
        assert want_grad.norm() > 1e-3
    return metrics


@pytest.mark.parametrize("case", LOSSES)
def test_the_loss_equals_its_formula_on_every_path_alone(case):
    options, reduction, formula = LOSSES[case]
    assert_equals(TreeLoss(case.partition(",")[0], reduction, **options), formula, reduction)


def test_every_policy_loss_has_a_formula():
    modules = ("token_losses", "sequence_ratios")
    names = {name for name in NAMES if LossSpec.of(name).function.__module__.endswith(modules)}
    assert names - {"sft", "distill_topk"} == {case.partition(",")[0] for case in LOSSES}


def test_a_kl_penalty_that_is_a_reward_has_no_importance_weights():
    with pytest.raises(UserError, match=r"loss\.kl\.importance: expected false together"):
        KLPenalty(0.3, importance=True, as_reward=True)


@pytest.mark.parametrize(("importance", "as_reward"), [(False, False), (False, True), (True, False)])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_the_kl_penalty(estimator, importance, as_reward):
    def divergence(log_p, log_q):
        if estimator == "k1":
            return log_p - log_q
        if estimator == "k2":
            return 0.5 * (log_p - log_q) ** 2
        return (log_q - log_p).exp() - (log_q - log_p) - 1

    def formula(n, o, f, b, A, m):
        if as_reward:
            return ppo(n, o, A - 0.3 * divergence(o, f))
        ratio = (n - o).exp() if importance else 1.0
        return ppo(n, o, A) + 0.3 * ratio * divergence(n, f)

    loss = TreeLoss("grpo", "token_mean", kl=KLPenalty(0.3, estimator, importance, as_reward))
    assert "ref_kl" in assert_equals(loss, formula, "token_mean")


@pytest.mark.parametrize("mode", ["truncate", "mask", "reject"])
@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
@pytest.mark.parametrize("name", ["ppo", "gspo"])
def test_the_correction_of_rollout_mismatch(name, level, mode):
    low, high = 0.85, 1.2

    def formula(n, o, f, b, A, m):
        w = (o - b).exp()
        if level != "token":
            total = (m * (o - b)).sum()
            if level == "geometric" and m.sum():
                total = total / m.sum()
            w = total.exp().expand_as(n)
        inside = (w >= low) & (w <= high)
        w = {"truncate": w.clamp(low, high), "mask": w * inside, "reject": 1.0 * inside}[mode]
        loss = ppo(n, o, A) if name == "ppo" else gspo(n, o, A, m, 0.1, 0.3)
        return w * loss + 0.1 * (n - f) ** 2 / 2  # the penalty has no weight

    options = {} if name == "ppo" else {"clip_low": 0.1, "clip_high": 0.3}
    correction = RolloutCorrection(level, mode, low, high)
    loss = TreeLoss(name, "path_token_mean", kl=KLPenalty(0.1, "k2"), correction=correction, **options)
    assert_equals(loss, formula, "path_token_mean")


def divergences(estimator, x):
    return x**2 / 2 if estimator == "k2" else x.exp() - 1 - x


@pytest.mark.parametrize("estimator", ["k2", "k3"])
@pytest.mark.parametrize(
    ("level", "high"), [("token", 0.02), ("sequence", 0.1), ("geometric", 0.025), ("max", 0.05)]
)
def test_rejection_by_divergence(level, high, estimator):
    """tests/integrations/test_losses.py compares the same with verl."""
    rejected = []

    def formula(n, o, f, b, A, m):
        d = divergences(estimator, o - b)
        if level != "token":
            counted = d[m > 0]
            of_path = {
                "sequence": (m * d).sum(),
                "geometric": (m * d).sum() / m.sum().clamp(min=1e-9),
                "max": counted.max() if len(counted) else 0 * m.sum(),
            }[level]
            d = of_path.expand_as(n)
        rejected.append((d > high).double())
        return (d <= high) * ppo(n, o, A)

    correction = RolloutCorrection(level, "reject", high=high, estimator=estimator)
    assert_equals(TreeLoss("ppo", "path_token_mean", correction=correction), formula, "path_token_mean")
    assert 0.1 < torch.cat(rejected).mean() < 0.9


@pytest.mark.parametrize("as_reward", [False, True])
def test_whitened_advantages(as_reward):
    """The variance divides by n - 1. A penalty of rewards comes after."""
    for seed in range(4):
        paths, *_ = forest(seed)
        A = np.concatenate([path.advantage[1:] for path in paths]).astype(np.float64)
        weights = np.concatenate([path.weight * path.loss_mask[1:] for path in paths]).astype(np.float64)
        mean = np.average(A, weights=weights)
        variance = (weights * (A - mean) ** 2).sum() / (weights.sum() - 1)

        def formula(n, o, f, b, A, m, mean=mean, variance=variance):
            A = (A - mean) / math.sqrt(variance + 1e-8)
            return ppo(n, o, A - 0.2 * (o - f) if as_reward else A)

        kl = KLPenalty(0.2, "k1", as_reward=True) if as_reward else None
        loss = TreeLoss("ppo", "token_mean", kl=kl, whiten=True)
        assert_equals(loss, formula, "token_mean", [seed])


def test_metrics_are_means_over_counted_tokens():
    paths = [
        TokenPath([1, 2, 3], [0, 1, 1], advantage=1, old_logprobs=[0, -1, -1], rollout_logprobs=[0, -1, -2]),
        TokenPath([1, 2, 4], [0, 0, 1], advantage=-1, old_logprobs=[0, 0, -1], rollout_logprobs=[0, 0, -1]),
    ]
    batch = TreeBatch.from_trees([TokenTree.from_paths(paths)], edges="loss")
    correction = RolloutCorrection("token", "mask", high=2.0)
    logprobs = torch.where(batch.edge_label == 3, -0.5, -1.0)
    loss = TreeLoss("ppo", correction=correction)
    _, metrics = loss(logprobs, batch, 2.0)
    mean = {name: value.item() for name, value in loss.finish_metrics(metrics).items()}
    assert mean["masked_fraction"] == pytest.approx(1 / 3)  # e > 2
    assert mean["masked_path_fraction"] == pytest.approx(1 / 2)
    assert mean["rollout_weight"] == mean["ess"] == pytest.approx(2 / 3)
    assert mean["clip_fraction"] == pytest.approx(1 / 3)
    assert mean["ratio"] == pytest.approx((2 + math.exp(0.5)) / 3)
    assert mean["old_kl"] == pytest.approx((math.exp(0.5) - 1.5) / 3)
    assert mean["rollout_kl"] == pytest.approx((math.e - 2) / 3)


@pytest.mark.parametrize("dtype", slow_except([torch.float32], [torch.float32, torch.float64]))
@pytest.mark.parametrize("case", LOSSES)
def test_extreme_ratios_are_finite(case, dtype):
    """The loss, its gradient and all metrics."""
    options, reduction, _ = LOSSES[case]
    penalty = KLPenalty(0.1, "k3", importance=True)
    for correction in (None, RolloutCorrection("sequence", "mask")):
        if case.startswith(("vespo", "decoupled")) and correction:
            continue
        loss = TreeLoss(case.partition(",")[0], reduction, kl=penalty, correction=correction, **options)
        for x in (-1e4, -1000.0, -100.0, -30.0, 30.0, 100.0, 1000.0, 1e4):
            for advantage in (-2.0, 0.0, 1.5):
                old = -1.0 if x <= 0 else -1.0 - x
                fields = {"old_logprobs": [0, old], "ref_logprobs": [0, -2], "rollout_logprobs": [0, -1]}
                path = TokenPath([1, 2], advantage=advantage, **fields)
                batch = TreeBatch.from_trees([TokenTree.from_paths([path])])
                logprobs = torch.tensor([old + x], dtype=dtype, requires_grad=True)
                value, metrics = loss(logprobs, batch, 1.0)
                (gradient,) = torch.autograd.grad(value, logprobs)
                numbers = torch.stack([value, *gradient, *metrics.values()])
                assert numbers.isfinite().all(), (x, advantage, metrics)


@pytest.mark.parametrize("importance", [False, True])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_estimates_of_kl_are_finite_and_exact_up_to_the_bound(estimator, importance):
    """k3 has its value at -20 below -20, without gradient; the penalty k3 ends at 10."""
    exact = {
        "k1": lambda d: (d, 1.0),
        "k2": lambda d: (d * d / 2, d),
        "k3": lambda d: (math.expm1(-max(d, -20.0)) + max(d, -20.0), 0.0 if d < -20 else -math.expm1(-d)),
    }[estimator]
    unbounded = {"k1": lambda d: d, "k2": lambda d: d.square() / 2, "k3": lambda d: (-d).expm1() + d}[
        estimator
    ]
    for x in (-1000.0, -100.0, -30.0, -20.0, -13.5, -0.3, 0.0, 1e-6, 0.3, 13.5, 20.0, 30.0, 100.0, 1000.0):
        d = torch.tensor([x], requires_grad=True)
        value = kl_estimate(estimator, d)
        (gradient,) = torch.autograd.grad(value, d)
        assert value.item() == pytest.approx(exact(d.item())[0], rel=1e-6, abs=1e-12)
        assert gradient.item() == pytest.approx(exact(d.item())[1], rel=1e-6, abs=1e-7)
        if abs(x) <= 20:
            assert torch.equal(value, unbounded(d))
            assert torch.equal(gradient, torch.autograd.grad(unbounded(d), d)[0])
        path = TokenPath([1, 2], old_logprobs=[0, min(-x, 0) - 1], ref_logprobs=[0, min(-x, 0) - 1])
        batch = TreeBatch.from_trees([TokenTree.from_paths([path])])
        logprobs = (batch.pairs.ref_logprobs + x).requires_grad_()
        penalty = KLPenalty(1.0, estimator, importance).estimate(logprobs, batch.pairs)
        (gradient,) = torch.autograd.grad(penalty.sum(), logprobs)
        assert torch.cat([penalty, gradient]).isfinite().all(), x


@pytest.mark.parametrize("case", LOSSES)
def test_up_to_the_bound_every_bit_is_that_of_the_ratio(case, monkeypatch):
    """The loss and the gradient, against the same code with a bound that no ratio reaches."""
    options, reduction, _ = LOSSES[case]

    def results():
        loss = TreeLoss(case.partition(",")[0], reduction, kl=KLPenalty(0.1, importance=True), **options)
        found = []
        for seed in range(3):
            paths, batch, logprobs = forest(seed)
            value, metrics = loss(logprobs, batch, loss.normalizer(paths))
            found += [value.detach(), torch.autograd.grad(value, logprobs)[0], *metrics.values()]
        return found

    bounded = results()
    monkeypatch.setattr(ratios, "MAX_LOG_RATIO", 80.0)
    assert all(map(torch.equal, bounded, results()))


@for_each("case", [case for case in LOSSES if case != "distill"])
def test_a_group_without_advantages_has_no_gradient(case):
    options, reduction, _ = LOSSES[case]
    paths, batch, logprobs = forest(0, zero_advantage=True)
    loss = TreeLoss(case.partition(",")[0], reduction, **options)
    value, _ = loss(logprobs, batch, loss.normalizer(paths))
    (gradient,) = torch.autograd.grad(value, logprobs)
    assert value.item() == 0
    assert gradient.abs().max() == 0


def test_a_rejected_token_may_overflow():
    path = TokenPath(
        [1, 2, 3], advantage=-1, old_logprobs=[0, -1e4, -1], rollout_logprobs=[0, -1, -1], id="overflow"
    )
    batch = TreeBatch.from_trees([TokenTree.from_paths([path])])
    logprobs = torch.tensor([-1.0, -1.0], requires_grad=True)
    loss = TreeLoss("ppo", correction=RolloutCorrection("token", "reject", low=0.5))
    value, _ = loss(logprobs, batch, 1.0)
    (gradient,) = torch.autograd.grad(value, logprobs)
    assert (value.item(), gradient.tolist()) == (1.0, [0.0, 1.0])


def test_gspo_and_gspo_token_differ_only_in_the_advantage_of_each_token():
    paths, batch, logprobs = forest(1)
    options = {"clip_low": 10.0, "clip_high": 10.0}
    for same in (True, False):
        for path in paths:
            path.advantage[:] = path.advantage[0] if same else np.linspace(-1, 1, len(path))
        batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])
        gradients = []
        for name in ("gspo", "gspo_token"):
            loss = TreeLoss(name, "path_token_mean", **options)
            value, _ = loss(logprobs, batch, loss.normalizer(paths))
            gradients.append(torch.autograd.grad(value, logprobs)[0])
        difference = (gradients[0] - gradients[1]).norm() / gradients[0].norm()
        assert difference < 1e-6 if same else difference > 0.1


def test_settings_that_contradict_the_loss_are_refused():
    for name, reduction in (("dapo", "token_mean"), ("dr_grpo", "path_mean"), ("luspo", "path_mean")):
        TreeLoss(name, reduction)
        with pytest.raises(UserError, match=rf"^loss\.reduction: expected '{reduction}', .* loss '{name}'"):
            TreeLoss(name, "path_token_mean")
    for name in ("vespo", "decoupled_ppo"):
        with pytest.raises(UserError, match=rf"^loss\.correction: expected none for the loss '{name}'"):
            TreeLoss(name, correction=RolloutCorrection())
    with pytest.raises(UserError, match=r"^loss\.kl: expected a KLPenalty, got 0\.1"):
        TreeLoss("grpo", kl=0.1)
    with pytest.raises(
        UserError, match=r"^loss\.correction\.low: .* below loss\.correction\.high = 1, got 2"
    ):
        RolloutCorrection(low=2, high=1)
    with pytest.raises(UserError, match=r"^loss\.correction\.level: expected 'max' only with .* 'k2' or"):
        RolloutCorrection("max", "reject")
    for options in ({"mode": "mask"}, {"mode": "reject", "low": 0.1}):
        with pytest.raises(
            UserError, match=r"^loss\.correction\.estimator: expected mode = 'reject' and low"
        ):
            RolloutCorrection(estimator="k3", **options)
    _, batch, logprobs = forest(0)
    with pytest.raises(UserError, match=r"^loss 'cispo': expected either clip_high or max_ratio, got both"):
        TreeLoss("cispo", clip_high=0.2, max_ratio=2)(logprobs, batch, 1.0)
    with pytest.raises(UserError, match=r"^loss: dual_clip: .* at least 1 \+ clip_high = 1\.2, got 1\.1"):
        TreeLoss("ppo", dual_clip=1.1)(logprobs, batch, 1.0)
    batch = TreeBatch.from_trees(
        [TokenTree.from_paths([TokenPath([1, 2], advantage=1, old_logprobs=[0, -1])])]
    )
    for loss, field in (
        (TreeLoss("ppo", kl=KLPenalty(0.1)), "ref_logprobs"),
        (TreeLoss("ppo", correction=RolloutCorrection()), "rollout_logprobs"),
        (TreeLoss("decoupled_ppo"), "rollout_logprobs"),
        (TreeLoss("distill"), "ref_logprobs"),
    ):
        with pytest.raises(UserError, match=f"^loss: the paths have no {field}; give it to every path"):
            loss(torch.zeros(1), batch, 1.0)
    batch = TreeBatch.from_trees([TokenTree.from_paths([TokenPath([1, 2], advantage=1)])])
    with pytest.raises(
        UserError, match="no old_logprobs; give it to every path, compute it with titan-tree score"
    ):
        TreeLoss("ppo")(torch.zeros(1), batch, 1.0)


def test_the_configuration_builds_both_terms(tmp_path):
    file = tmp_path / "run.toml"
    file.write_text(
        '[model]\nflavor = "debug"\n[data]\nfiles = "demo"\n[loss]\nname = "grpo"\n'
        '[loss.kl]\ncoefficient = 0.1\nestimator = "k2"\n[loss.correction]\nlevel = "sequence"\n'
    )
    loss = build_loss(load_config(file, ["loss.correction.high=3", "loss.kl.importance=true"]).loss)
    assert loss.kl == KLPenalty(0.1, "k2", importance=True)
    assert loss.correction == RolloutCorrection("sequence", "truncate", 0.0, 3.0)
    off = build_loss(LossConfig())
    assert (off.kl, off.correction) == (None, None)
    for argument, error in (
        ("loss.kl.coefficient='0.1'", r"loss\.kl\.coefficient: expected a number, got '0\.1'"),
        ("loss.kl.coeficient=1", r"unknown key 'loss\.kl\.coeficient'; did you mean 'loss\.kl\.coefficient'"),
        ("loss.kl=0.1", r"loss\.kl: expected a table, got 0\.1"),
        ("loss.options.kl=0.1", r"loss\.options\.kl: expected no such option \(set loss\.kl instead\)"),
        ("loss.correction.mode=clip", r"loss\.correction\.mode: expected one of .*, got 'clip'"),
    ):
        with pytest.raises(UserError, match=error):
            load_config(file, [argument])
