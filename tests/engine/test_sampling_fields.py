"""Sampling temperatures, against transformers on every path alone; and versions of the sampling policy."""

import random

import numpy as np
import pytest
import torch

from tests.support.oracle import hf_model, random_groups, tree_model
from titan_tree.components.tree_loss import TreeLoss
from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.scoring.score_trees import tree_logprobs
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


@pytest.fixture(scope="module")
def models():
    hf = hf_model(tied=False, dtype=torch.float64)
    return hf, tree_model(hf)


def tempered(hf, path):
    """Returns the log-probs and entropies [T - 1] of one path, from its logits divided by its temperature."""
    logits = hf(torch.tensor([path.tokens.tolist()])).logits[0, :-1].double()
    log_p = (logits / float(np.float32(path.temperature))).log_softmax(-1)
    labels = torch.as_tensor(path.tokens[1:]).long()
    return log_p.gather(1, labels[:, None])[:, 0], -(log_p.exp() * log_p).sum(-1)


def groups_with_temperatures(seed):
    """Returns the groups of a random forest; group g has temperature 0.5, 1, 1.7, ... and random fields."""
    draw = random.Random(seed)
    groups = random_groups(seed)
    return [
        [
            TokenPath(
                path.tokens,
                path.loss_mask,
                path.weight,
                advantage=draw.uniform(-1, 1),
                old_logprobs=[draw.uniform(-5, -3) for _ in path.tokens],
                temperature=(0.5, 1.0, 1.7)[(g + seed) % 3],
            )
            for path in paths
        ]
        for g, paths in enumerate(groups)
    ]


def expected(hf, groups, name, entropy):
    """Returns the loss and the gradients by name, one path after another."""
    paths = [path for group in groups for path in group]
    hf.zero_grad(set_to_none=True)
    total, weights = torch.zeros((), dtype=torch.float64), sum(path.weight for path in paths)
    for path in paths:
        if len(path) < 2:
            continue
        logprobs, entropies = tempered(hf, path)
        mask = torch.as_tensor(path.loss_mask[1:]).double()
        if not mask.sum():
            continue
        advantage = torch.as_tensor(path.advantage[1:]).double()
        log_ratio = logprobs - torch.as_tensor(path.old_logprobs[1:]).double()
        losses = -logprobs
        if name == "gspo":
            ratio = ((log_ratio * mask).sum() / mask.sum()).exp().expand_as(logprobs)
            clipped = ratio.clamp(1 - 3e-4, 1 + 4e-4)
            losses = -torch.minimum(ratio * advantage, clipped * advantage)
        total = total + path.weight * (mask * (losses - entropy * entropies)).sum() / weights
    total.backward()
    return total.item(), {n.removeprefix("model."): p.grad for n, p in hf.named_parameters()}


@pytest.mark.parametrize("max_tokens", [None, 6], ids=["one pass", "partitions"])
@pytest.mark.parametrize("name", ["sft", "gspo"])
def test_steps_equal_every_path_at_its_own_temperature(models, name, max_tokens):
    hf, model = models
    partitioner = TreePartitioner("redundancy_free", max_tokens) if max_tokens else None
    for seed in (2, 3):
        groups = groups_with_temperatures(seed)
        loss, gradients = expected(hf, groups, name, entropy=0.1)
        model.zero_grad(set_to_none=True)
        step = TreeStep(model, TreeLoss(name, entropy=0.1), partitioner=partitioner)
        step_input = step.prepare([[TokenTree.from_paths(paths) for paths in groups]])
        assert (len(step_input.micro_batches[0]) > 1) == (max_tokens is not None)
        assert step.run(step_input).loss.item() == pytest.approx(loss, rel=1e-5)  # summed in fp32
        for parameter, want in gradients.items():
            got = dict(model.named_parameters())[parameter].grad
            assert (got - want).norm() <= 2e-6 * want.norm(), parameter


@pytest.mark.parametrize("max_tokens", [None, 5])
def test_scores_are_of_logits_divided_by_the_temperature(models, max_tokens):
    hf, model = models
    lists = [path.tokens for path in random_groups(1)[0]]
    with torch.no_grad():
        scores = tree_logprobs(model, lists, max_tokens, temperature=0.6)
        for tokens, got in zip(lists, scores, strict=True):
            want, _ = tempered(hf, TokenPath(tokens, temperature=0.6))
            torch.testing.assert_close(got.double(), want, rtol=1e-6, atol=1e-6)  # its RoPE is in fp32


def test_without_temperatures_batches_have_none():
    assert TreeBatch.from_trees([TokenTree.from_paths([TokenPath([1, 2])])]).edge_temperature is None


def test_the_paths_that_count_an_edge_decide_its_temperature():
    counted = TokenPath([1, 2, 3], loss_mask=[0, 0, 1], temperature=0.5, id="a")
    context = TokenPath([1, 2, 3, 4], loss_mask=[0, 0, 0, 1], temperature=2.0, id="b")
    for paths, first in (((counted, context), 0.5), ((context, counted), 2.0)):
        batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])
        assert batch.edge_label.tolist() == [2, 3, 4]
        assert batch.edge_temperature.tolist() == [first, 0.5, 2.0]
    clash = TokenPath([1, 2, 3, 5], loss_mask=[0, 0, 1, 1], id="c")
    message = "path c: temperature: expected 0.5, as in path a, because .* got 1; put samples"
    with pytest.raises(UserError, match=message):
        TreeBatch.from_trees([TokenTree.from_paths([context, counted, clash])])


def test_the_policy_lag_is_the_distance_from_the_newest_version(models):
    old = TokenPath([1, 2, 3], policy_version=[9, 4, 5], weight=2)
    new = TokenPath([7, 8, 9], loss_mask=[0, 0, 1], policy_version=8)
    step = TreeStep(models[1], TreeLoss("sft"))
    metrics = step.run(step.prepare([[TokenTree.from_paths([path])] for path in (old, new)])).loss_metrics
    mean = (2 * 4 + 2 * 5 + 8) / 5
    assert metrics["policy_version"].item() == pytest.approx(mean)
    assert metrics["policy_lag"].item() == pytest.approx(9 - mean)
    alone = step.run(step.prepare([[TokenTree.from_paths([TokenPath([1, 2])])]])).loss_metrics
    assert "policy_lag" not in alone
