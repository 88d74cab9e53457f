"""Compares TreeLoss with plain code per path: the loss, its metrics and the gradients of shared log-probs."""

import dataclasses
import itertools
import math
import re
from typing import Any, get_args

import numpy as np
import pytest
import torch

from tests.support.cases import for_each
from tests.support.oracle import once_weights
from tests.support.partitions import RandomCuts
from tests.support.policy_losses import gspo, ppo
from titan_tree.components.tree_loss.corrections import KLPenalty
from titan_tree.components.tree_loss.loss import TreeLoss, register_loss
from titan_tree.components.tree_loss.settings import LOSSES, Reduction
from titan_tree.components.tree_loss.spec import COUNT_ONCE, LossSpec
from titan_tree.errors import UserError
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.partition import one_pass
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


def random_paths(seed: int, count: int = 8) -> list[TokenPath]:
    """Returns paths over two token ids: they branch, are prefixes of each other, and some are equal."""
    rng = np.random.default_rng(seed)
    paths = []
    for i in range(count):
        n = int(rng.integers(1, 12))
        paths.append(
            TokenPath(
                rng.integers(0, 2, n),
                # The first path trains on nothing. In the others, tokens count fully, partly or not at all.
                loss_mask=rng.choice([0, 1, 1, 0.5, 0.01], n) if i else np.zeros(n),
                weight=float(rng.uniform(0.2, 2)),
                advantage=float(rng.normal()) if i % 2 else rng.normal(size=n),
                old_logprobs=-np.abs(rng.normal(1, 0.5, n)),
                ref_logprobs=-np.abs(rng.normal(1, 0.5, n)),
            )
        )
    return [*paths, dataclasses.replace(paths[-1])]  # a duplicate


def edge_table(batch: TreeBatch) -> dict[tuple[int, ...], int]:
    """Returns the edge into every prefix of at least two tokens, by following edges from the roots."""
    depth = batch.layout.positions.tolist()
    prefix = {token: (int(batch.tokens[token]),) for token in range(len(batch)) if depth[token] == 0}
    targets = [token for token in range(len(batch)) if depth[token] > 0]  # edges are in this order
    for edge, target in enumerate(targets):
        prefix[target] = (*prefix[int(batch.edge_source[edge])], int(batch.edge_label[edge]))
    return {prefix[target]: edge for edge, target in enumerate(targets)}


def edges_of(path: TokenPath, table: dict[tuple[int, ...], int]) -> list[int]:
    """Returns the edges into the tokens of a path, found in an ``edge_table``."""
    tokens = path.tokens.tolist()
    return [table[tuple(tokens[: t + 1])] for t in range(1, len(tokens))]


CLIP = {"clip_low": 0.1, "clip_high": 0.3}
OPTIONS = {"ppo": CLIP, "gspo": CLIP, "grpo": CLIP | {"kl": KLPenalty(0.1)}}

# Name -> token losses [T - 1] of a path. n, o, f: new, old and reference log-probs, A: advantages, m: mask
TOKEN_LOSSES = {
    "sft": lambda n, o, f, A, m: -n,
    "reinforce": lambda n, o, f, A, m: -A * n,
    "ppo": lambda n, o, f, A, m: ppo(n, o, A, 0.1, 0.3),
    "grpo": lambda n, o, f, A, m: ppo(n, o, A, 0.1, 0.3) + 0.1 * ((f - n).exp() - (f - n) - 1).clamp(max=10),
    "gspo": lambda n, o, f, A, m: gspo(n, o, A, m, 0.1, 0.3),
}

# Name -> factors of a path's token losses, and what the path adds to Z. w: weight, m: mask, M: the sum of the
# masks of all paths of its rollout
REDUCTIONS = {
    "path_mean": lambda w, m, M: (w * m, w),
    "token_mean": lambda w, m, M: (w * m, w * m.sum()),
    "path_token_mean": lambda w, m, M: (w * m / (m.sum() or 1), w),
    "rollout_token_mean": lambda w, m, M: (w * m / (M or 1), w * m.sum() / (M or 1)),
}


def token_factors(
    reduction: str, trees: list[TokenTree], rollouts: list[list[TokenPath]]
) -> tuple[list[Any], float]:
    """Returns the factors of the token losses of every path, without 1 / Z, and Z."""
    if reduction in COUNT_ONCE:
        trees_factors, sums = zip(*(once_weights(tree.paths, reduction) for tree in trees), strict=True)
        return list(itertools.chain(*trees_factors)), sum(sums)
    counted = {}  # by path of a rollout
    for rollout in rollouts:
        counted |= dict.fromkeys(map(id, rollout), sum(path.loss_mask[1:].sum() for path in rollout))
    paths = [path for tree in trees for path in tree.paths]
    masks = [path.loss_mask[1:].astype(float) for path in paths]
    found = [
        REDUCTIONS[reduction](path.weight, mask, counted.get(id(path), mask.sum()))
        for path, mask in zip(paths, masks, strict=True)
    ]
    return [factors for factors, _ in found], sum(z for _, z in found)


@pytest.mark.parametrize("reduction", get_args(Reduction))
@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_the_loss_equals_that_of_every_path_alone(name, reduction):
    for seed, edges in itertools.product(range(4), ["all", "loss"]):
        paths = random_paths(seed)
        rollouts = [paths[:3], paths[3:7]]  # one of them has paths in both trees; the other paths are alone
        for i, rollout in enumerate(rollouts):
            TokenPath.join_rollout(rollout, f"rollout {i}")
        trees = [TokenTree.from_paths(paths[:5]), TokenTree.from_paths(paths[5:])]
        factors, z = token_factors(reduction, trees, rollouts)
        if reduction in COUNT_ONCE:
            for tree in trees:
                tree.weigh_edges()
        batch = TreeBatch.from_trees(trees)
        logprobs = (torch.randn(len(batch.edge_label), dtype=torch.float64) - 1).requires_grad_()
        tables = [edge_table(TreeBatch.from_trees([tree])) for tree in trees]
        of_tree = logprobs.split([len(table) for table in tables])

        expected, counted, nll = torch.zeros((), dtype=torch.float64), 0.0, 0.0
        for i, path in enumerate(paths):
            if len(path) > 1:
                new = of_tree[i >= 5][edges_of(path, tables[i >= 5])]
                old, ref, advantage, mask = (
                    torch.from_numpy(getattr(path, field)[1:]).double()
                    for field in ("old_logprobs", "ref_logprobs", "advantage", "loss_mask")
                )
                losses = TOKEN_LOSSES[name](new, old, ref, advantage, mask)
                expected = expected + (torch.as_tensor(factors[i]) * losses).sum() / z
                counted += path.weight * mask.sum().item()
                nll -= path.weight * (mask * new).sum().item()
        (expected_grad,) = torch.autograd.grad(expected, logprobs)

        loss = TreeLoss(name, reduction, **OPTIONS.get(name, {}))
        normalizer = loss.normalizer(paths)
        assert normalizer == pytest.approx(z, rel=1e-6)
        scored = logprobs
        if edges == "loss":  # the same edges without those that no path trains on
            full = batch
            batch = TreeBatch.from_trees(trees, edges="loss")
            kept = torch.zeros(len(full.edge_label), dtype=torch.bool)
            kept[full.pairs.edge[full.pairs.loss_mask > 0]] = True
            scored = logprobs[kept]
            assert torch.equal(full.edge_label[kept], batch.edge_label)
            assert torch.equal(full.edge_source[kept], batch.edge_source)
        got, metrics = loss(scored, batch, normalizer)
        assert metrics["nll"].item() == pytest.approx(nll, rel=1e-6)  # a mean over tokens for every reduction
        assert metrics["token_weight"].item() == pytest.approx(counted, rel=1e-6)
        (got_grad,) = torch.autograd.grad(got, logprobs)
        torch.testing.assert_close(got, expected, rtol=2e-7, atol=1e-7)  # weights and fields are fp32
        torch.testing.assert_close(got_grad, expected_grad, rtol=2e-6, atol=1e-7)


def test_ppo_clips_each_path_of_a_shared_edge_by_its_own_advantage():
    up = TokenPath([1, 2, 3], loss_mask=[0, 1, 0], advantage=1.0, old_logprobs=[0, -1.0, 0])
    down = TokenPath([1, 2, 4], loss_mask=[0, 1, 0], advantage=-2.0, old_logprobs=[0, -1.0, 0])
    batch = TreeBatch.from_trees([TokenTree.from_paths([up, down])], edges="loss")
    assert len(batch.edge_label) == 1
    logprob = torch.tensor([-0.5], requires_grad=True)  # ratio exp(0.5) = 1.65: above 1.2
    loss, metrics = TreeLoss("ppo")(logprob, batch, normalizer=2.0)
    ratio = math.exp(0.5)
    assert loss.item() == pytest.approx((-1.2 + 2 * ratio) / 2)
    (grad,) = torch.autograd.grad(loss, logprob)
    assert grad.item() == pytest.approx(2 * ratio / 2)
    assert metrics["clip_fraction"].item() == 1.0
    assert metrics["token_weight"].item() == 2.0
    assert metrics["nll"].item() == pytest.approx(1.0)


def test_the_entropy_bonus_counts_every_token_of_every_path():
    batch = TreeBatch.from_trees(
        [TokenTree.from_paths([TokenPath([1, 2, 3]), TokenPath([1, 2, 5], weight=3)])]
    )
    logprobs, entropy = torch.tensor([-1.0, -2.0, -4.0]), torch.tensor([0.5, 0.25, 0.25], requires_grad=True)
    loss, metrics = TreeLoss("sft", entropy=0.1)(logprobs, batch, 4.0, entropy)
    heavy, light = (2, 1) if batch.edge_label[1] == 3 else (1, 2)
    nll = (1 + 3) * 1.0 - 3 * logprobs[heavy] - logprobs[light]
    assert loss.item() == pytest.approx((nll.item() - 0.1 * 4 * 0.75) / 4)
    assert metrics["entropy"].item() == pytest.approx(4 * 0.75)
    loss.backward()
    assert entropy.grad.sum().item() == pytest.approx(-0.1 * 2)
    with pytest.raises(ValueError, match="needs the model's entropy"):
        TreeLoss("sft", entropy=0.1)(logprobs, batch, 4.0)


def test_extreme_logprobs_of_masked_tokens_reach_neither_loss_nor_gradient():
    path = TokenPath(
        [1, 2, 3], [0, 1, 0], advantage=1.0, old_logprobs=[0, -1, -900], ref_logprobs=[0, -1, 900]
    )
    batch = TreeBatch.from_trees([TokenTree.from_paths([path])])
    logprobs = torch.tensor([-1.0, -5000.0], requires_grad=True)
    loss, _ = TreeLoss("grpo", kl=KLPenalty(0.5))(logprobs, batch, 1.0)
    (grad,) = torch.autograd.grad(loss, logprobs)
    assert loss.item() == pytest.approx(-1.0)
    assert grad.tolist() == [-1.0, 0.0]


def exact_clipped(x: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """Returns PPO's loss of one token with log-ratio x and its derivative. The ratio is at most e^20."""
    ratio = math.exp(min(x, 20.0))
    if advantage == 0:
        return 0.0, 0.0
    clipped = min(max(ratio, 1 - low), 1 + high)
    if clipped * advantage < ratio * advantage:
        return -clipped * advantage, 0.0
    return -ratio * advantage, -ratio * advantage if x <= 20 else 0.0


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_extreme_ratios_have_the_loss_and_the_gradient_of_their_limit(name):
    log_ratios = (-1e4, -1000.0, -100.0, -30.0, -0.5, 0.0, 0.05, 0.5, 19.0, 30.0, 100.0, 1000.0, 1e4)
    for cell in itertools.product(log_ratios, (-2.0, 0.0, 1.5), (torch.float32, torch.float64)):
        got, want, tolerance = extreme_ratio(name, *cell)
        assert got == pytest.approx(want, **tolerance), cell


def extreme_ratio(name, x, advantage, dtype):
    """Returns the loss and its derivative, the same of the formula, and the tolerance."""
    old = -1.0 if x <= 0 else -1.0 - x
    path = TokenPath([1, 2], advantage=advantage, old_logprobs=[0, old], ref_logprobs=[0, old])
    batch = TreeBatch.from_trees([TokenTree.from_paths([path])])
    logprobs = torch.tensor([old + x], dtype=dtype, requires_grad=True)
    loss, _ = TreeLoss(name, **OPTIONS.get(name, {}))(logprobs, batch, 1.0)
    (grad,) = torch.autograd.grad(loss, logprobs)

    if name == "sft":
        want = -logprobs.item(), -1.0
    elif name == "reinforce":
        want = -advantage * logprobs.item(), -advantage
    else:
        want = exact_clipped(x, advantage, 0.1, 0.3)
    if name == "grpo":
        penalty = math.exp(-x) if x > -700 else math.inf
        k3, slope = penalty - 1 + x, 1 - penalty
        want = want[0] + 0.1 * min(k3, 10.0), want[1] + 0.1 * (slope if k3 < 10 else 0.0)
    # A log-ratio is a difference: its rounding error is that of the log-probs.
    tolerance = {"rel": 1e-4, "abs": 1e-6} if dtype == torch.float32 else {"rel": 1e-6, "abs": 1e-9}
    return [loss.item(), grad.item()], want, tolerance


@pytest.mark.parametrize("name", TOKEN_LOSSES)
def test_a_path_without_weight_changes_nothing_even_if_its_ratio_overflows(name):
    def path(last, **fields):
        return TokenPath([1, 2, last], loss_mask=[0, 0, 1], ref_logprobs=[0, 0, -1], **fields)

    counted = path(3, advantage=0.5, old_logprobs=[0, 0, -1])
    ignored = path(4, advantage=-1.0, old_logprobs=[0, 0, -1e4], weight=0.0)
    logprobs = torch.tensor([-1.25, -1.25], requires_grad=True)
    batch = TreeBatch.from_trees([TokenTree.from_paths([counted, ignored])], edges="loss")
    options = {"kl": KLPenalty(0.1)} if name == "grpo" else {}
    loss, metrics = TreeLoss(name, **options)(logprobs, batch, 1.0)
    (grad,) = torch.autograd.grad(loss, logprobs)
    alone, expected = TreeLoss(name, **options)(
        logprobs[:1], TreeBatch.from_trees([TokenTree.from_paths([counted])], edges="loss"), 1.0
    )
    assert loss.item() == alone.item()
    assert metrics == expected
    assert grad[batch.edge_label == 4].item() == 0
    assert grad.isfinite().all()


def test_all_turns_of_a_rollout_share_one_denominator():
    """One rollout counts 1 and 3 tokens in its two turns; another one counts 2 tokens."""
    turns = [TokenPath([1, 2]), TokenPath([1, 2, 3, 4, 5], loss_mask=[0, 0, 1, 1, 1])]
    TokenPath.join_rollout(turns, "turns")
    assert [path.rollout_tokens for path in turns] == [4, 4]
    other = TokenPath([9, 8, 7])
    batch = TreeBatch.from_trees([TokenTree.from_paths(turns), TokenTree.from_paths([other])])
    logprobs = torch.tensor([-1.0, -2.0, -2.0, -2.0, -5.0, -5.0])
    tree_loss = TreeLoss("sft", "rollout_token_mean")
    normalizer = tree_loss.normalizer([*turns, other])
    assert normalizer == pytest.approx(2.0)
    loss, _ = tree_loss(logprobs, batch, normalizer)
    assert loss.item() == pytest.approx((7 / 4 + 5) / 2)


@pytest.mark.parametrize("reduction", ["path_mean", "token_mean", "distinct_token_mean"])
def test_merged_pairs_give_the_loss_of_all_pairs(reduction):
    loss = TreeLoss("sft", reduction)
    for seed in range(3):
        paths = [TokenPath(path.tokens, path.loss_mask, path.weight) for path in random_paths(seed)]
        paths[1].weight = 0.0
        tree = TokenTree.from_paths(paths)
        tree.weigh_edges()
        for plan in (one_pass(tree), RandomCuts(0.3, seed).plan(tree)):
            results, pair_tokens = [], []
            for merges_pairs in (False, True):
                batches = TreeBatch.from_plan(plan, "loss", merges_pairs)
                logprobs = torch.linspace(-2, -1, len(tree), dtype=torch.float64).requires_grad_()
                found = [
                    loss(logprobs[batch.edge_number], batch, loss.normalizer(paths)) for batch in batches
                ]
                total = sum(value for value, _ in found)
                metrics = {name: sum(sums[name].item() for _, sums in found) for name in found[0][1]}
                results.append((total.item(), metrics, torch.autograd.grad(total, logprobs)[0]))
                counted = [b.pairs.weight[b.pairs.path] * b.pairs.loss_mask > 0 for b in batches]
                tokens = [b.edge_number[b.pairs.edge][c] for b, c in zip(batches, counted, strict=True)]
                pair_tokens.append(torch.cat(tokens))
            assert torch.equal(pair_tokens[0].unique(), pair_tokens[1].sort().values)
            (want, metrics, gradient), (merged, merged_metrics, merged_gradient) = results
            assert merged == pytest.approx(want, rel=1e-6)
            assert merged_metrics == pytest.approx(metrics, rel=1e-6)
            torch.testing.assert_close(merged_gradient, gradient, rtol=1e-6, atol=1e-9)


def test_merged_pairs_of_weights_of_very_different_sizes_have_a_finite_loss():
    paths = [TokenPath([1, 2, 3], weight=1e-30), TokenPath([1, 2, 4], weight=1e12)]
    (batch,) = TreeBatch.from_plan(one_pass(TokenTree.from_paths(paths)), "loss", merges_pairs=True)
    logprobs = torch.tensor([-2.0, -8.0, -1.0])  # of the tokens 2, 3 and 4
    loss, sums = TreeLoss("sft", "token_mean")(logprobs, batch, 2e12)
    assert loss.item() == pytest.approx((2 + 1) / 2)
    assert sums["token_weight"].item() == pytest.approx(2e12)


def test_only_losses_that_weigh_all_paths_alike_merge_pairs():
    merged = {r: TreeLoss("sft", r).merges_pairs for r in get_args(Reduction)}
    assert [r for r in merged if merged[r]] == ["path_mean", "token_mean", "distinct_token_mean"]
    assert not TreeLoss("reinforce", "path_mean").merges_pairs


def test_pairs_with_fields_of_their_paths_are_not_merged():
    paths = [TokenPath([1, 2, 3], policy_version=version) for version in (4, 6)]
    plan = one_pass(TokenTree.from_paths(paths))
    (batch,) = TreeBatch.from_plan(plan, "loss", merges_pairs=True)
    assert batch.pairs.path.tolist() == [0, 0, 1, 1]


def test_edge_weights_must_be_set_and_paths_must_differ():
    path = TokenPath([1, 2], id="a")
    loss, tree = TreeLoss("sft", "distinct_token_mean"), TokenTree.from_paths([path, path])
    with pytest.raises(UserError) as error:
        loss.normalizer([path])
    assert str(error.value) == (
        "loss.reduction: 'distinct_token_mean' needs the edge weights of path a, which are missing; call "
        "weigh_edges() of the path's tree"
    )
    with pytest.raises(UserError) as error:
        loss(torch.zeros(1), TreeBatch.from_trees([tree]), 1.0)
    assert str(error.value) == (
        "loss: the paths have no edge_weight; give it to every path: call weigh_edges() of every tree"
    )
    with pytest.raises(UserError) as error:
        tree.weigh_edges()
    assert str(error.value) == "TokenTree.weigh_edges: a path object is in the tree twice; copy the path"


def test_path_mean_and_token_mean_differ_by_a_constant_factor():
    paths = random_paths(0)
    batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])
    logprobs = torch.randn(len(batch.edge_label), dtype=torch.float64).requires_grad_()

    def gradient(reduction):
        tree_loss = TreeLoss("grpo", reduction)
        normalizer = tree_loss.normalizer(paths)
        return torch.autograd.grad(tree_loss(logprobs, batch, normalizer)[0], logprobs)[0], normalizer

    (by_path, paths_sum), (by_token, tokens_sum) = gradient("path_mean"), gradient("token_mean")
    assert paths_sum != pytest.approx(tokens_sum, rel=0.1)
    torch.testing.assert_close(by_path * paths_sum, by_token * tokens_sum, rtol=1e-12, atol=0)


def test_the_policy_version_is_averaged_over_counted_tokens():
    paths = [
        TokenPath([1, 2, 3], policy_version=[9, 4, 5], weight=2),
        TokenPath([1, 2, 4], loss_mask=[1, 0, 1], policy_version=8),
    ]
    batch = TreeBatch.from_trees([TokenTree.from_paths(paths)], edges="loss")
    _, metrics = TreeLoss("sft")(torch.zeros(3), batch, 3.0)
    mean = metrics["policy_version"] / metrics["token_weight"]
    assert mean.item() == pytest.approx((2 * 4 + 2 * 5 + 8) / 5)


def test_a_registered_loss_can_be_used_by_name():
    @register_loss("squared")
    def squared(logprobs, pairs, power=2.0):
        return logprobs.abs() ** power

    batch = TreeBatch.from_trees([TokenTree.from_paths([TokenPath([1, 2, 3]), TokenPath([1, 2, 4])])])
    tree_loss = TreeLoss("squared", "token_mean", power=3.0)
    loss, _ = tree_loss(torch.tensor([-1.0, -2.0, -3.0]), batch, 4.0)
    assert loss.item() == pytest.approx((2 * 1 + 8 + 27) / 4)
    assert not tree_loss.spec.needs_whole_paths


def test_a_loss_can_declare_that_it_needs_whole_paths():
    def mean(logprobs, pairs):
        return logprobs.mean().expand_as(logprobs)

    register_loss("argument", whole_paths=True)(lambda logprobs, pairs: mean(logprobs, pairs))
    register_loss("spec")(LossSpec(mean, needs_whole_paths=True))
    needs = {name: LossSpec.of(name).needs_whole_paths for name in LOSSES}
    ratios = ["gspo", "gspo_token", "luspo", "gmpo", "vespo"]
    preferences = ["dpo", "ipo", "apo_zero", "kto", "simpo", "orpo", "cpo"]
    expected = [*ratios, *preferences, "argument", "spec"]
    assert [name for name, needed in needs.items() if needed] == expected


@for_each(
    ("function", "error"),
    [
        (lambda logprobs, pairs: logprobs.sum(), r"losses of shape \[3\], .* got a scalar; TreeLoss applies"),
        (lambda logprobs, pairs: None, r"losses of shape \[3\], one number per log-prob, on cpu, got None"),
        (lambda logprobs, pairs: logprobs.tolist(), r"losses of .* got a value of type list"),
        (lambda logprobs, pairs: logprobs[1:], r"losses of shape \[3\], .* got shape \[2\]"),
        (lambda logprobs, pairs: logprobs[:, None], r"losses of shape \[3\], .* got shape \[3, 1\]"),
        (lambda logprobs, pairs: logprobs.long(), r"expected floating-point losses, got dtype torch.int64"),
        (
            lambda logprobs, pairs: logprobs.to("meta"),
            "on cpu, got a tensor on meta",
        ),
        (lambda logprobs, pairs: (logprobs, {}, {}), "losses of .* got a value of type tuple"),
        (lambda logprobs, pairs: (logprobs, logprobs), "a dict of metrics beside the losses, got Tensor"),
        (lambda logprobs, pairs: (logprobs, {"m": 1.0}), "metric 'm': expected values of .* got a value of"),
        (lambda logprobs, pairs: (logprobs, {"m": logprobs.mean()}), "metric 'm': .* got a scalar"),
        (
            lambda logprobs, pairs: logprobs - pairs.old_logprobs,
            r"'NoneType' .*test_tree_loss\.py:\d+\); the pairs have edge, path, .*; the paths lack "
            "advantage, old_logprobs, ref_logprobs, rollout_logprobs, policy_version, so give the field",
        ),
        (lambda logprobs, pairs: torch.where(logprobs > 0, logprobs, pairs.advantage), "lack advantage"),
        (lambda logprobs, pairs: pairs.advantage.exp(), "lack advantage"),
        (lambda logprobs, pairs: logprobs * pairs.reward, "has no attribute 'reward' .* the pairs have edge"),
    ],
)
def test_mistakes_of_a_registered_loss_are_one_line(function, error):
    register_loss("mine")(function)
    batch = TreeBatch.from_trees([TokenTree.from_paths([TokenPath([1, 2, 3, 4])])])
    with pytest.raises(UserError, match=rf"^loss 'mine': .*{error}"):
        TreeLoss("mine")(torch.zeros(3), batch, 1.0)


def test_logprobs_of_another_batch_are_refused():
    tree = TokenTree.from_paths([TokenPath([1, 2, 3])])
    with pytest.raises(UserError, match=r"got shape \[7\] and a TreeBatch of 2 edges; pass model"):
        TreeLoss()(torch.zeros(7), TreeBatch.from_trees([tree]), 1.0)
    with pytest.raises(UserError, match=r"got shape \[2\] and a TokenTree of 0 edges; pass model"):
        TreeLoss()(torch.zeros(2), tree, 1.0)


def test_fields_of_the_paths_must_be_constants():
    """The gradients of new and old log-probs would cancel."""
    paths = [TokenPath([1, 2], advantage=1.0, old_logprobs=[0, -1])]
    batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])
    old = torch.zeros(1, requires_grad=True)
    batch = dataclasses.replace(batch, pairs=dataclasses.replace(batch.pairs, old_logprobs=old))
    with pytest.raises(
        UserError, match=r"^loss: old_logprobs: .* requires grad; .* old_logprobs\.detach\(\)"
    ):
        TreeLoss("ppo")(torch.zeros(1), batch, 1.0)


def with_too_few(logprobs):
    return -logprobs


def with_a_bug(logprobs, pairs):
    return logprobs + "text"


def with_an_exit(logprobs, pairs):
    raise SystemExit(0)


def without_gradient(logprobs, pairs):
    return -logprobs.detach()


def under_no_grad(logprobs, pairs):
    torch.set_grad_enabled(False)
    return -logprobs


def in_place(logprobs, pairs):
    return -logprobs.mul_(2)


def in_place_of_a_field(logprobs, pairs):
    pairs.loss_mask.zero_()
    return -logprobs


def with_a_backward_pass(logprobs, pairs):
    losses = -logprobs
    losses.sum().backward()
    return losses


CALLED = r" \(loss\.name\), called with \(logprobs, pairs\): "
HERE = rf"{re.escape(__file__)}:\d+: "


@for_each(
    "loss, message",
    [
        (with_too_few, rf"{CALLED}TypeError: with_too_few\(\) takes 1"),
        (with_a_bug, rf"{CALLED}{HERE}TypeError: .*str"),
        (with_an_exit, rf"{CALLED}{HERE}SystemExit: 0$"),
        (without_gradient, ": expected losses with a gradient with respect to logprobs, got none; compute"),
        (under_no_grad, ": expected losses with a gradient with respect to logprobs, got none; compute"),
        (in_place, ": expected unchanged inputs, but it changes logprobs in place; compute"),
        (in_place_of_a_field, ": expected unchanged inputs, but it changes loss_mask in place; compute"),
        (with_a_backward_pass, r": expected losses, but it calls backward\(\) itself; remove the call"),
        (lambda logprobs, pairs: logprobs * 1j, ": expected losses .* got dtype torch.complex"),
        (
            lambda logprobs, pairs: (-logprobs, {"m": logprobs * 1j}),
            ": metric 'm': .* got dtype torch.complex",
        ),
    ],
)
def test_a_loss_of_ones_own_that_fails_is_one_line(loss, message):
    batch = TreeBatch.from_trees([TokenTree.from_paths([TokenPath([1, 2])])])
    logprobs = torch.zeros(1, requires_grad=True)
    with LOSSES.registered("mine", loss), pytest.raises(UserError, match=f"^loss 'mine'{message}"):
        TreeLoss("mine")(logprobs, batch, 1.0)
    assert torch.is_grad_enabled()


def test_errors_name_the_setting_and_what_was_expected():
    batch = TreeBatch.from_trees([TokenTree.from_paths([TokenPath([1, 2])])])
    with pytest.raises(UserError, match=r"unknown loss 'stf'; did you mean 'sft'\? \(known: sft, "):
        TreeLoss("stf")
    with pytest.raises(UserError, match=r"loss.reduction: expected one of path_mean, .* got 'mean'"):
        TreeLoss("sft", "mean")
    with pytest.raises(
        UserError, match=r"'ppo': unknown option 'clip' \(known: clip_low, clip_high, dual_clip\)"
    ):
        TreeLoss("ppo", clip=0.1)
    with pytest.raises(UserError, match="loss: the paths have no advantage"):
        TreeLoss("reinforce")(torch.zeros(1), batch, 1.0)
    with pytest.raises(UserError, match=r"nothing to train on"):
        TreeLoss()(torch.zeros(1), batch, 0.0)
    sampled = [TokenPath([1, 2], advantage=1, rollout_logprobs=[0, -1])]
    with pytest.raises(
        UserError, match=r"no old_logprobs; .*titan-tree score, or rename rollout_logprobs to"
    ):
        TreeLoss("ppo")(torch.zeros(1), TreeBatch.from_trees([TokenTree.from_paths(sampled)]), 1.0)
    mixed = [TokenPath([1, 2], advantage=1.0), TokenPath([1, 3], id="b")]
    with pytest.raises(UserError, match=r"path b: advantage: missing, but other paths of the batch have it"):
        TreeBatch.from_trees([TokenTree.from_paths(mixed)])
