"""A step with each policy loss equals transformers on every path alone, in one pass and in partitions."""

import numpy as np
import pytest
import torch

from tests.support.oracle import flat, hf_model, hybrid_model, random_groups, relative_error, tree_model
from tests.support.partitions import RandomCuts
from tests.support.policy_losses import LOSSES, reduced
from titan_tree.components.tree_loss.corrections import KLPenalty, RolloutCorrection
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

FIELDS = ("old_logprobs", "ref_logprobs", "rollout_logprobs", "advantage", "loss_mask")
MODELS = {
    "dense": lambda: hf_model(tied=True, dtype=torch.float64),
    "experts": lambda: hf_model(tied=False, kind="Qwen3Moe"),  # the grouped product of experts has no float64
    "hybrid": lambda: hybrid_model(tied=True, dtype=torch.float64),
}
# Losses of tokens and of whole paths. tests/components/test_policy_losses.py has the formula of every loss.
CASES = [("dense", case) for case in ("ppo", "decoupled_ppo", "gspo", "vespo")]
CASES += [("experts", "dapo"), ("hybrid", "gmpo")]


def add_fields(hf, paths, seed):
    """Gives the paths log-probs near those of the model, so that some ratios are clipped."""
    rng = np.random.default_rng(seed)
    with torch.no_grad():
        for path in paths:
            own = np.concatenate([[-1], path_logprobs(hf, path).numpy()])
            for name in FIELDS[:3]:
                values = own + rng.normal(0, 0.15, len(path))
                setattr(path, name, values.clip(max=-0.01).astype(np.float32))
            path.advantage = rng.normal(size=len(path)).astype(np.float32)


def path_logprobs(hf, path):
    ids = torch.as_tensor(path.tokens).long()
    if len(ids) == 1:
        return torch.zeros(0, dtype=torch.float64)
    logits = hf(input_ids=ids[None], use_cache=False).logits[0, :-1].double()
    return logits.log_softmax(-1).gather(1, ids[1:, None])[:, 0]


def on_every_path(hf, paths, formula, reduction, corrects):
    """Returns the loss with a k2 penalty and a sequence-level correction, and gradients by name."""
    losses, masks = [], []
    for path in paths:
        n = path_logprobs(hf, path)
        o, f, b, a, m = (torch.from_numpy(getattr(path, name)[1:]).double() for name in FIELDS)
        weight = (m * (o - b)).sum().exp().clamp(max=1.1) if corrects else 1.0
        losses.append(weight * (formula(n, o, f, b, a, m) if len(n) else n) + 0.05 * (n - f) ** 2)
        masks.append(m)
    loss = reduced(losses, masks, [path.weight for path in paths], reduction)
    hf.zero_grad(set_to_none=True)
    loss.backward()
    return loss.item(), {name.removeprefix("model."): p.grad for name, p in hf.named_parameters()}


@pytest.mark.parametrize(("model", "case"), CASES)
def test_a_step_equals_transformers_on_every_path(model, case):
    options, reduction, formula = LOSSES[case]
    corrects = not case.startswith(("vespo", "decoupled"))
    correction = RolloutCorrection("sequence", high=1.1) if corrects else None
    name = case.partition(",")[0]
    loss = TreeLoss(name, reduction, kl=KLPenalty(0.1, "k2"), correction=correction, **options)
    hf = MODELS[model]()
    groups = random_groups(3)  # several trees
    add_fields(hf, flat(groups), seed=0)
    want_loss, want = on_every_path(hf, flat(groups), formula, reduction, corrects)
    mine = tree_model(hf)
    trees = [TokenTree.from_paths(paths) for paths in groups]
    metrics = []
    for partitioner in (None, RandomCuts(0.3, 0)):
        mine.zero_grad(set_to_none=True)
        step = TreeStep(mine, loss, "cpu", partitioner)
        result = step.run(step.prepare([trees]))
        assert result.loss.item() == pytest.approx(want_loss, rel=1e-5)
        for parameter, p in mine.named_parameters():
            assert relative_error(p.grad, want[parameter]) < 1e-5, parameter
        metrics.append({name: value.item() for name, value in result.loss_metrics.items()})
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-5, abs=1e-7)
    assert ("ess" in metrics[0]) == corrects
    if corrects:
        assert 0 < metrics[0]["ess"] < 1


def of_rollouts(hf, rollouts, formula, is_mean):
    """Returns the loss of rollouts with one ratio each, and gradients by name.

    It is the mean of rollouts' means, or else the sum over tokens, divided by the paths' weights.
    """
    total, z = 0.0, 0.0
    for paths in rollouts:
        n = torch.cat([path_logprobs(hf, path) for path in paths])
        fields = [np.concatenate([getattr(path, name)[1:] for path in paths]) for name in FIELDS]
        o, f, b, a, m = (torch.from_numpy(values).double() for values in fields)
        weight = np.concatenate([np.full(len(path) - 1, path.weight) for path in paths])
        if m.sum():
            counted = m.sum().item() if is_mean else 1.0
            total = total + (torch.from_numpy(weight) * m * formula(n, o, f, b, a, m)).sum() / counted
            z += (weight * m.numpy()).sum() / counted if is_mean else 0.0
        z += 0.0 if is_mean else sum(path.weight for path in paths)
    hf.zero_grad(set_to_none=True)
    (total / z).backward()
    return (total / z).item(), {name.removeprefix("model."): p.grad for name, p in hf.named_parameters()}


@pytest.mark.parametrize("case", ["gspo", "gspo_token", "luspo", "gmpo", "vespo"])
def test_a_step_with_one_ratio_per_rollout_equals_transformers(case):
    """In float64, in one pass and in partitions, with rollouts in two micro-batches."""
    options, _, formula = LOSSES[case]
    hf = hf_model(tied=True, dtype=torch.float64)
    groups = random_groups(7)  # several trees
    add_fields(hf, flat(groups), seed=0)
    rollouts = [paths[start::3] for paths in groups for start in range(3)]
    for number, paths in enumerate(rollouts):
        TokenPath.join_rollout(paths, str(number))
    want_loss, want = of_rollouts(hf, rollouts, formula, is_mean=case != "luspo")
    reduction = "path_mean" if case == "luspo" else "rollout_token_mean"
    loss = TreeLoss(case, reduction, sequence="rollout", **options)
    trees = [TokenTree.from_paths(paths) for paths in groups]
    mine = tree_model(hf)
    for partitioner in (None, RandomCuts(0.3, 0)):
        mine.zero_grad(set_to_none=True)
        step = TreeStep(mine, loss, "cpu", partitioner)
        result = step.run(step.prepare([trees[:1], trees[1:]]))
        assert result.counts.is_partitioned == (partitioner is not None)
        assert result.loss.item() == pytest.approx(want_loss, rel=1e-6)
        for parameter, p in mine.named_parameters():
            assert relative_error(p.grad, want[parameter]) < 1e-6, parameter
    with pytest.raises(UserError, match=r"^loss\.sequence: expected all paths of each rollout"):
        step.run(step.prepare([[TokenTree.from_paths([path])] for path in flat(groups)]))


def test_whitening_counts_tokens_by_their_weights():
    """A step of several micro-batches, against one whose advantages NumPy has whitened."""
    rng = np.random.default_rng(0)
    paths = [
        TokenPath(rng.integers(0, 16, 6), [1, 0, 1, 1, 1, 0], weight=weight, advantage=rng.normal(size=6))
        for weight in (0.5, 1.0, 2.5)
    ]
    trees = [[TokenTree.from_paths([path])] for path in paths]
    model = build_model("qwen3", "debug", vocab_size=16)
    model.init_weights(0)

    def loss(whiten):
        step = TreeStep(model, TreeLoss("reinforce", "token_mean", whiten=whiten))
        return step.run(step.prepare(trees)).loss.item()

    whitened = loss(whiten=True)
    A = np.concatenate([path.advantage[1:] for path in paths]).astype(np.float64)
    counts = np.concatenate([path.weight * path.loss_mask[1:] for path in paths])
    mean = np.average(A, weights=counts)
    variance = (counts * (A - mean) ** 2).sum() / (counts.sum() - 1)
    for path in paths:
        path.advantage = ((path.advantage - mean) / np.sqrt(variance + 1e-8)).astype(np.float32)
    assert whitened == pytest.approx(loss(whiten=False), rel=1e-5)
