"""Distillation from a teacher's likeliest tokens, against plain torch on every path alone."""

import random
from functools import cache

import numpy as np
import pytest
import torch

from tests.support.oracle import hf_model, random_groups, tree_model
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.tree.batch import TokenShard, TreeBatch
from titan_tree.tree.paths import ModelLimits, TokenPath
from titan_tree.tree.token_tree import TokenTree

K = 5


@pytest.fixture(scope="module")
def models():
    hf = hf_model(tied=False, dtype=torch.float64)
    return hf, tree_model(hf)


@cache
def teacher():
    return hf_model(tied=False, dtype=torch.float64, seed=1)


def log_p(hf, path):
    """Returns the log-probs [T - 1, V] of one path at its temperature."""
    logits = hf(torch.tensor([path.tokens.tolist()])).logits[0, :-1]
    return (logits / float(np.float32(path.temperature))).log_softmax(-1)


@torch.no_grad()
def taught_groups(seed):
    """Returns the groups of a random forest at one of two temperatures, with K or fewer targets per token."""
    draw, groups = random.Random(seed), []
    for paths in random_groups(seed):
        groups.append([])
        for path in paths:
            fields = {"temperature": draw.choice([1.0, 1.0, 1.7]), "id": f"{len(groups)}/{len(groups[-1])}"}
            path = TokenPath(path.tokens, path.loss_mask, path.weight, **fields)
            values, ids = log_p(teacher(), path).topk(K)
            sizes = [1 + int(token) % K for token in path.tokens[1:]]
            rows = [
                dict(zip(i[:n].tolist(), v[:n].tolist(), strict=True))
                for i, v, n in zip(ids, values, sizes, strict=True)
            ]
            topk = [None, *rows]
            groups[-1].append(
                TokenPath(path.tokens, path.loss_mask, path.weight, teacher_topk=topk, **fields)
            )
    return groups


def divergence(t, s, beta, tail):
    """Returns the divergence of one token, from log-probs [V'] under the teacher and the student."""
    if tail:
        t, s = (torch.cat([x, (1 - x.exp().sum()).log()[None]]) for x in (t, s))
    else:
        t, s = t.log_softmax(0), s.log_softmax(0)
    p, q = t.exp(), s.exp()
    if beta == 0:
        return (p * (p / q).log()).sum()
    if beta == 1:
        return (q * (q / p).log()).sum()
    m = beta * p + (1 - beta) * q
    return (beta * p * (p / m).log() + (1 - beta) * q * (q / m).log()).sum()


def expected(hf, groups, beta, tail, entropy):
    """Returns the loss and the gradients by name, one path after another."""
    hf.zero_grad(set_to_none=True)
    paths = [path for group in groups for path in group]
    loss, weights = 0.0, sum(path.weight for path in paths)
    for path in paths:
        if not path.loss_tokens:
            continue
        student, start = log_p(hf, path), 0
        for t, size in enumerate(path.teacher_topk.sizes):
            chosen = slice(start, start := start + size)
            if t and path.loss_mask[t]:
                ids = torch.from_numpy(path.teacher_topk.ids[chosen]).long()
                taught = torch.from_numpy(path.teacher_topk.logprobs[chosen]).double()
                row = student[t - 1]
                value = divergence(taught, row[ids], beta, tail) + entropy * (row.exp() * row).sum()
                loss = loss + path.weight / weights * float(path.loss_mask[t]) * value
    loss.backward()
    return loss.item(), {n.removeprefix("model."): p.grad.clone() for n, p in hf.named_parameters()}


@pytest.mark.parametrize("max_tokens", [None, 6], ids=["one pass", "partitions"])
@pytest.mark.parametrize(
    ("beta", "tail"), [(0.0, 1.0), (0.0, 0.0), (1.0, 1.0), (1.0, 0.0), (0.3, 1.0), (0.3, 0.0)]
)
def test_steps_equal_every_path_alone(models, beta, tail, max_tokens):
    hf, model = models
    partitioner = TreePartitioner("redundancy_free", max_tokens) if max_tokens else None
    for seed in (2, 3):
        groups = taught_groups(seed)
        loss, gradients = expected(hf, groups, beta, tail, entropy=0.1)
        model.zero_grad(set_to_none=True)
        step = TreeStep(
            model, TreeLoss("distill_topk", entropy=0.1, beta=beta, tail=tail), partitioner=partitioner
        )
        trees = [TokenTree.from_paths(paths) for paths in groups]
        inputs = step.prepare([trees[:1], trees[1:]] if trees[1:] else [trees])
        assert (len(inputs.micro_batches[0]) > 1) == (max_tokens is not None)
        batches = [batch for partitions in inputs.micro_batches for batch in partitions]
        numbers = [batch.pairs.targets.number for batch in batches]
        assert sum(map(len, numbers)) > sum(
            batch.edge_targets.shape[1] for batch in batches
        )  # paths share some
        result = step.run(inputs)
        assert result.loss.item() == pytest.approx(loss, rel=1e-5)  # summed in fp32
        assert 0 < result.loss_metrics["teacher_mass"].item() <= 1
        for parameter, want in gradients.items():
            got = dict(model.named_parameters())[parameter].grad
            assert (got - want).norm() <= 1e-6 * want.norm(), parameter
        assert "loss of every single path is finite" in step.find_cause(inputs)


def test_shards_of_tokens_have_the_targets_of_their_edges(models):
    batch = TreeBatch.from_trees([TokenTree.from_paths(taught_groups(2)[0])], "loss", targets=True)

    def taught(batch):
        targets, pairs = batch.pairs.targets, batch.pairs
        edge, id = batch.edge_targets[:, targets.number]
        assert torch.equal(edge, pairs.edge[targets.pair])
        keys = pairs.path[targets.pair], batch.edge_number[edge], id
        columns = [x.tolist() for x in (*keys, targets.teacher)]
        return {tuple(key): value for *key, value in zip(*columns, strict=True)}

    shards = [TokenShard(rank, 3).of(batch) for rank in range(3)]
    assert sum(shard.edge_targets.shape[1] for shard in shards) == batch.edge_targets.shape[1]
    joined = [item for shard in shards for item in taught(shard).items()]
    assert len(joined) == len(dict(joined))
    assert dict(joined) == taught(batch)


def test_a_path_with_an_infinite_loss_is_named(models):
    paths = taught_groups(2)[0]
    bad = next(path for path in paths if path.loss_tokens and path.weight)
    bad.teacher_topk.logprobs[:] = np.inf
    step = TreeStep(models[1], TreeLoss("distill_topk", beta=1.0))
    cause = step.find_cause(step.prepare([[TokenTree.from_paths([bad]), TokenTree.from_paths(paths[-1:])]]))
    assert cause == f"paths with a loss or a derivative that is not finite: {bad.id}"


def test_one_teacher_must_not_contradict_itself_on_shared_tokens():
    def path(value, tokens=(1, 2, 3), **fields):
        topk = [None, {2: -0.1}, {3: value, 4: -3.0}, {5: -1.0}][: len(tokens)]
        return TokenPath(tokens, teacher_topk=topk, **fields)

    first, second = path(-0.2, id="a", teacher="x"), path(-0.8, (1, 2, 3, 4), id="b", teacher="x")
    message = (
        r"^path b: teacher_topk of token 2: expected -0\.2 for id 3, as in path a, which has the same tokens "
        r"up to there, got -0\.8; score both with one teacher, or name their teachers in the field teacher$"
    )
    with pytest.raises(UserError, match=message):
        TokenTree.from_paths([path(-0.2), first, second])
    apart = [
        path(-0.6, id="b", teacher="x"),  # within the tolerance
        path(-0.8, id="b", teacher="y"),
        path(-0.8, id="b", teacher="x", temperature=2),
        path(-0.8, (1, 9, 3), id="b", teacher="x"),
        path(-0.8, id="b", teacher="x", loss_mask=[1, 1, 0]),
    ]
    for other in apart:
        TokenTree.from_paths([first, other])


@pytest.mark.parametrize(
    ("topk", "fields", "message"),
    [
        ([None, {2: -1}], {}, "expected 3 objects of log-probs, one per token, got 2 with 1 ids"),
        ([None, {2: -1}, {}], {}, r"of token 2: expected log-probs, got none; only tokens with loss mask 0"),
        ([None, {2: -1}, {3: 0.5}], {}, r"of token 2: expected log-probs from -1e12 to 0, got 0\.5 of id 3"),
        ([None, {2: -1}, {"3": float("nan")}], {}, "from -1e12 to 0, got nan of id 3"),
        ([None, {2: -1}, {3: -0.1, 4: -0.2}], {}, r"of token 2: expected probabilities that .* got 1\.724"),
        ([None, {2: -1}, {3: -1, "03": -2}], {}, "of token 2: expected different ids, got 3 twice"),
        (
            [None, {2: -1}, {"a": -1}],
            {},
            "expected for each token an object of log-probs by token id, or null",
        ),
        ([None, {2: -1}, {3: {"rank": 1}}], {}, "got KeyError: 'logprob'"),
        ([None, {2: -1}, [3]], {}, r"or null, got \[3\]"),
        ([None, {2: -1}, {-3: -1}], {}, "expected ids from 0"),
        (
            [None, {2: -1}, {3: -1, 5: -2}],
            {"sampling_mask": [None, None, [3, 4]]},
            "of token 2: expected ids of the sampling mask, because the student .* got 5; remove",
        ),
    ],
)
def test_a_wrong_field_is_one_line(topk, fields, message):
    with pytest.raises(UserError, match=f"^path p: teacher_topk[^\n]*{message}[^\n]*$"):
        TokenPath([1, 2, 3], id="p", teacher_topk=topk, **fields)


def test_other_mistakes_are_one_line(models):
    path = TokenPath([1, 2], id="p", teacher_topk=[None, {61: -1.0}])
    with pytest.raises(
        UserError, match=r"^path p: teacher_topk: expected ids below .* 61, got 61; choose a te"
    ):
        path.check_limits(ModelLimits(vocab_size=61))
    step = TreeStep(models[1], TreeLoss("distill_topk"))
    without = TokenPath([1, 3], id="q")
    with pytest.raises(
        UserError, match=r"^path q: teacher_topk: missing, but other paths of the batch have it"
    ):
        step.prepare([[TokenTree.from_paths([TokenPath([1, 2], teacher_topk=[None, {6: -1.0}]), without])]])
    with pytest.raises(
        UserError, match=r"^loss: the paths have no targets of a teacher; give teacher_topk to"
    ):
        step.run(step.prepare([[TokenTree.from_paths([without])]]))
    with pytest.raises(UserError, match=r"^loss 'distill_topk': expected beta from 0 to 1 and tail 0 or 1"):
        TreeLoss("distill_topk", beta=2.0)(
            torch.zeros(1), TreeBatch.from_trees([TokenTree.from_paths([path])]), 1
        )
