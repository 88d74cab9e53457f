"""Temperatures and sampling masks, against transformers on every path alone; and versions of the policy."""

import random

import numpy as np
import pytest
import torch

from tests.support.oracle import hf_model, random_groups, tree_model
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.tree_step import TreeStep
from titan_tree.scoring.score_trees import score_trees, tree_logprobs
from titan_tree.tree.batch import TokenShard, TreeBatch
from titan_tree.tree.partition import one_pass
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


@pytest.fixture(scope="module")
def models():
    hf = hf_model(tied=False, dtype=torch.float64)
    return hf, tree_model(hf)


def tempered(hf, path):
    """Returns the log-probs and entropies [T - 1] of one path, at its temperature and over its mask."""
    logits = hf(torch.tensor([path.tokens.tolist()])).logits[0, :-1].double()
    logits = logits / float(np.float32(path.temperature))
    rows = []
    kept = [[]] * len(path) if path.sampling_mask is None else path.sampling_mask.by_token()
    for row, ids, label in zip(logits, kept[1:], path.tokens[1:], strict=True):
        ids = sorted({*map(int, ids)}) or list(range(len(row)))  # the mask may repeat an id
        log_p = row[ids].log_softmax(-1)
        rows.append(torch.stack([log_p[ids.index(label)], -(log_p.exp() * log_p).sum()]))
    return torch.stack(rows).unbind(1) if rows else (logits.new_empty(0),) * 2


def sampled_groups(seed):
    """Returns the groups of a random forest. Paths have one of two temperatures, masks and random fields.

    A token's mask is missing, or its id and one of two sets of ids.
    """
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
                temperature=draw.choice([1.0, 1.0, 1.7]),
                sampling_mask=[
                    draw.choice([None, [token, *range(0, 60, 4)], [*range(30, 40), token]])
                    for token in path.tokens.tolist()
                ],
            )
            for path in paths
        ]
        for paths in groups
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


def counted(path):
    """Returns the indices of the tokens that the loss counts."""
    return [t for t in range(1, len(path)) if path.loss_mask[t]]


@pytest.mark.parametrize("max_tokens", [None, 6], ids=["one pass", "partitions"])
@pytest.mark.parametrize("name", ["sft", "gspo"])
def test_steps_equal_every_path_in_its_own_distribution(models, name, max_tokens):
    hf, model = models
    partitioner = TreePartitioner("redundancy_free", max_tokens) if max_tokens else None
    for seed in (2, 3):
        groups = sampled_groups(seed)
        loss, gradients = expected(hf, groups, name, entropy=0.1)
        model.zero_grad(set_to_none=True)
        step = TreeStep(model, TreeLoss(name, entropy=0.1), partitioner=partitioner)
        step_input = step.prepare([[TokenTree.from_paths(paths) for paths in groups]])
        assert (len(step_input.micro_batches[0]) > 1) == (max_tokens is not None)
        labels = {tuple(path.tokens[: t + 1]) for paths in groups for path in paths for t in counted(path)}
        num_edges = sum(len(batch.edge_label) for batch in step_input.micro_batches[0])
        assert num_edges > len(labels) + 2  # some paths count a token in different distributions
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


@pytest.mark.parametrize("tokens", [[1], [1, 2]])
def test_trees_without_counted_tokens_may_have_several_temperatures(tokens):
    paths = [TokenPath(tokens, loss_mask=[0] * len(tokens), temperature=value) for value in (0.5, 1.0)]
    for edges, size in (("all", len(tokens) - 1), ("loss", 0)):
        batch = TreeBatch.from_trees([TokenTree.from_paths(paths)], edges)
        assert (len(batch.edge_label), len(batch.pairs.edge)) == (size, 2 * size)


def test_the_paths_that_count_an_edge_decide_its_temperature():
    counted = TokenPath([1, 2, 3], loss_mask=[0, 0, 1], temperature=0.5, id="a")
    context = TokenPath([1, 2, 3, 4], loss_mask=[0, 0, 0, 1], temperature=2.0, id="b")
    for paths, first in (((counted, context), 0.5), ((context, counted), 2.0)):
        batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])
        assert batch.edge_label.tolist() == [2, 3, 4]
        assert batch.edge_temperature.tolist() == [first, 0.5, 2.0]


def test_paths_that_count_a_token_in_different_distributions_have_an_edge_each():
    """Masks are sets. Paths that do not count the token belong to the first edge, and tokens stay merged."""
    mask = [4, 6]
    paths = [
        TokenPath([1, 2, 3], loss_mask=[0, 0, 0], sampling_mask=[None, None, mask]),
        TokenPath([1, 2, 3], loss_mask=[0, 0, 1], sampling_mask=[mask, mask, [3, 7]]),
        TokenPath([1, 2, 3], loss_mask=[0, 0, 1]),
        TokenPath([1, 2, 3], loss_mask=[0, 0, 1], sampling_mask=[None, [], [7, 3]]),
        TokenPath([1, 2, 3], loss_mask=[0, 0, 2], temperature=0.5, sampling_mask=[None, [], [3, 7]]),
    ]
    assert paths[0].sampling_mask is None
    assert [ids.tolist() for ids in paths[1].sampling_mask.by_token()] == [[], [], [3, 7]]
    tree = TokenTree.from_paths(paths)
    batch = TreeBatch.from_trees([tree])
    assert len(batch) == 3
    assert batch.edge_label.tolist() == [2, 3, 3, 3]
    by_path = batch.pairs.edge[1::2].tolist()
    assert by_path[0] == by_path[1] == by_path[3]
    assert len(set(by_path)) == 3
    assert batch.edge_temperature[batch.pairs.edge].tolist() == [1.0] * 9 + [0.5]
    kept = {edge: [] for edge in range(4)}
    for edge, token in batch.edge_support.t().tolist():
        kept[edge].append(token)
    assert [sorted(kept[edge]) for edge in by_path] == [[3, 7], [3, 7], [], [3, 7], [3, 7]]
    (merged,) = TreeBatch.from_plan(one_pass(tree), "loss", merges_pairs=True)
    assert merged.pairs.loss_mask[merged.pairs.edge.argsort()].sort().values.tolist() == [1, 2, 2]
    first, second, third = (TokenShard(rank, 3).of(batch) for rank in range(3))
    assert (len(first.edge_label), first.edge_support.tolist()) == (1, [[], []])
    edge, token = batch.edge_support  # all of them begin at the token of the second rank
    assert (second.edge_number - 1).tolist() == [0, 1, 2]
    assert second.edge_support.tolist() == [(edge - 1).tolist(), token.tolist()]
    assert third.edge_support.tolist() == [[], []]


def test_scores_are_those_of_the_masks(models):
    hf, model = models
    paths = sampled_groups(1)[0]
    with torch.no_grad():
        for max_tokens in (None, 5):
            partitioner = TreePartitioner("redundancy_free", 5) if max_tokens else None
            (scores,) = score_trees(
                model, [TokenTree.from_paths(paths)], max_tokens, partitioner, entropies=True
            )
            for path, got in zip(paths, scores, strict=True):
                if not (index := counted(path)):
                    continue
                for mine, theirs in zip((got.logprobs, got.entropies), tempered(hf, path), strict=True):
                    want = theirs[[t - 1 for t in index]].float()
                    torch.testing.assert_close(mine[index].float(), want, rtol=1e-5, atol=1e-6)


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
