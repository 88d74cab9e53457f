"""Nested passes over partitions equal one pass over the tree, for all cuts."""

import copy
import gc
import weakref

import numpy as np
import pytest
import torch
from torch._dynamo.utils import counters

from tests.support.cases import slow_except
from tests.support.oracle import (
    hf_model,
    in_one_pass,
    once_weights,
    per_path,
    random_groups,
    relative_error,
    tree_model,
)
from tests.support.partitions import CPU, RandomCuts, forest_of, in_partitions
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.components.tree_loss.loss import TreeLoss, register_loss
from titan_tree.components.tree_loss.sequence_ratios import gspo
from titan_tree.components.tree_loss.spec import COUNT_ONCE
from titan_tree.components.tree_partitioner import PARTITION_STRATEGIES
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.parallelize import parallelize
from titan_tree.engine.forward import forward_passes
from titan_tree.engine.partitions import train_micro_batch
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.partition import PartitionPlan, in_tree_order, one_pass
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


@pytest.mark.parametrize("share", [0.05, 0.3, 1.0], ids=["few cuts", "many", "every token"])
@pytest.mark.parametrize("seed", slow_except(range(3), range(8)))
def test_gradients_equal_those_of_an_unpartitioned_pass(seed, share):
    """Cuts are inside nodes and at branches. Partitions have one token or several subtrees, in float64."""
    model = tree_model(hf_model(tied=seed % 2 == 0, dtype=torch.float64))
    groups = random_groups(seed)
    _, want_loss, want = in_one_pass(model, groups)
    plan = RandomCuts(share, seed).plan(forest_of(groups))
    loss, got = in_partitions(model, plan)
    assert loss == pytest.approx(want_loss, rel=1e-9)
    for name, gradient in want.items():
        assert relative_error(got[name], gradient) < 1e-12, name


TRAINED = ["", "norm", "layers.1", "layers.0.self_attn.q_proj", "layers.1.mlp"]


@pytest.mark.parametrize(
    ("trained", "tied"),
    [*((name, tied) for name in TRAINED for tied in (False, True)), ("lm_head", False)],  # tied: no lm_head
)
def test_frozen_weights_get_no_gradient(trained, tied):
    """Only the named weights train, or all but the embedding. Frozen weights get no gradient."""
    model = tree_model(hf_model(tied=tied, dtype=torch.float64))
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith(trained) if trained else name != "embed_tokens.weight")
    assert any(parameter.requires_grad for parameter in model.parameters())
    tree = forest_of(random_groups(3))
    _, want = in_partitions(model, one_pass(tree))
    _, got = in_partitions(model, RandomCuts(0.3, 3).plan(tree))
    for name, gradient in want.items():
        if gradient is None:
            assert got[name] is None, name
        else:
            assert relative_error(got[name], gradient) < 1e-12, name


def test_partitions_equal_transformers_on_every_path():
    """The comparison is in fp32."""
    hf = hf_model(tied=True)
    model = tree_model(hf)
    for seed, reduction in enumerate(["path_mean", "token_mean", "path_token_mean", "path_mean"]):
        groups = random_groups(seed)
        _, want_loss, want = per_path(hf, [path for paths in groups for path in paths], reduction)
        loss, got = in_partitions(model, RandomCuts(0.3, seed).plan(forest_of(groups)), reduction)
        assert loss == pytest.approx(want_loss, rel=1e-5)
        for name, gradient in want.items():
            assert relative_error(got[name], gradient) < 1e-5, name


def test_chain_of_fifty_partitions():
    """Gradients pass through all fifty."""
    model = tree_model(hf_model(tied=True, dtype=torch.float64))
    paths = [TokenPath(np.arange(100) % 61), TokenPath(np.arange(50) % 61)]
    tree = TokenTree.from_paths(paths)
    tokens = np.arange(100)
    parts = [in_tree_order(tree, i - 1, tokens[2 * i : 2 * i + 2], tokens[: 2 * i]) for i in range(50)]
    plan = PartitionPlan(tree, "", tuple(parts))
    assert plan.stats.chain_peak == 100
    _, want_loss, want = in_one_pass(model, [paths])
    loss, got = in_partitions(model, plan)
    assert loss == pytest.approx(want_loss, rel=1e-9)
    assert max(relative_error(got[name], want[name]) for name in want) < 1e-12


def assert_same_step(model, eager, plan):
    (want_loss, want), (loss, got) = in_partitions(eager, plan), in_partitions(model, plan)
    assert loss == pytest.approx(want_loss, rel=1e-6)
    for (name, gradient), other in zip(want.items(), got.values(), strict=True):
        assert relative_error(other, gradient) < 1e-5, name


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(
    ("checkpoint", "compile", "seeds"),
    slow_except([("full", False, range(3))], [("full", False, range(3)), ("selective", True, [0])]),
)
def test_compiled_and_checkpointed_blocks_equal_eager_ones(checkpoint, compile, seeds):
    torch._dynamo.reset()
    eager = tree_model(hf_model(tied=True))
    changed = copy.deepcopy(eager)
    parallelize(changed, OneRank(), dtype=torch.float32, activation_checkpoint=checkpoint, compile=compile)
    for seed in seeds:
        assert_same_step(changed, eager, RandomCuts(0.2, seed).plan(forest_of(random_groups(seed))))


@pytest.mark.exhaustive
@pytest.mark.usefixtures("without_codegen")
def test_new_plans_compile_no_new_graphs():
    """Each plan also has the gradients of eager blocks."""
    torch._dynamo.reset()
    eager = tree_model(hf_model(tied=True, max_position_embeddings=4096))
    model = copy.deepcopy(eager)
    parallelize(model, OneRank(), dtype=torch.float32, compile=True)

    def graphs(seed):
        for share, length in ((0.01, 30), (0.05, 30), (1.0, 7)):
            tree = forest_of(random_groups(seed, max_length=length))
            assert_same_step(model, eager, RandomCuts(share, seed).plan(tree))
        return counters["stats"]["unique_graphs"]

    first = graphs(0)
    assert first > 0
    assert [graphs(seed) for seed in range(1, 5)] == [first] * 4


def test_training_with_partitions_equals_training_without(tmp_path):
    """A small data.max_tokens in the configuration partitions every tree."""
    whole = train(tiny_config(tmp_path / "whole", optimizer__eps=1e-3))
    cut = train(tiny_config(tmp_path / "cut", optimizer__eps=1e-3, data__max_tokens=12))
    rows = list(zip(read_metrics(cut.config), read_metrics(whole.config), strict=True))
    assert len(rows) == 4
    for mine, theirs in rows:
        assert int(mine["forwards"]) > int(theirs["forwards"])
        assert mine["executed_tokens"] == theirs["executed_tokens"]
        for column in ("loss", "grad_norm", "nll", "err", "por"):
            assert float(mine[column]) == pytest.approx(float(theirs[column]), rel=1e-5), column


@pytest.mark.parametrize("edges", ["all", "loss"])
def test_each_edge_and_pair_belongs_to_one_partition(edges):
    """The partitions' edges and (edge, path) pairs together are those of the unpartitioned batch."""
    for seed in range(12):
        tree = forest_of(random_groups(seed))
        (whole,) = TreeBatch.from_plan(one_pass(tree), edges)
        batches = TreeBatch.from_plan(RandomCuts(0.3, seed).plan(tree), edges)

        def rows(batch):
            predicts = batch.tokens[batch.edge_source], batch.layout.positions[batch.edge_source]
            edge = zip(
                batch.edge_number.tolist(),
                batch.edge_label.tolist(),
                *(x.tolist() for x in predicts),
                strict=True,
            )
            return list(edge)

        def pairs(batch):
            p = batch.pairs
            of_path = (x[p.path].tolist() for x in (p.weight, p.loss_tokens))
            return list(zip(batch.edge_number[p.edge].tolist(), p.loss_mask.tolist(), *of_path, strict=True))

        for of in (rows, pairs):
            assert sorted(row for batch in batches for row in of(batch)) == sorted(of(whole))
        assert sum(batch.n_logical for batch in batches) == whole.n_logical
        assert sum(map(len, batches)) == len(whole)


def test_only_the_graphs_of_one_chain_are_live():
    """A chain is a partition with its ancestors."""
    model = tree_model(hf_model(tied=True))
    plan = RandomCuts(0.3, 3).plan(forest_of(random_groups(3)))
    saved, done = [], []

    class Saved:
        def __init__(self, tensor):
            self.tensor = tensor

    def pack(tensor):
        kept = Saved(tensor)
        saved.append((weakref.ref(kept), len(done)))
        return kept

    def compute_loss(batch, out):
        number = len(done)
        done.append(number)
        alive = {of for kept, of in saved if kept() is not None}
        assert sum(len(plan.partitions[i]) for i in alive) == plan.chain_tokens[number]
        return out.logprobs.sum()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept.tensor):
        train_micro_batch(model, TreeBatch.from_plan(plan), compute_loss, CPU)
    assert len(done) == len(plan) > 5
    assert not any(kept() is not None for kept, _ in saved)


def test_a_token_does_not_affect_other_branches():
    """Changing a token in a partition of its own leaves the log-probs of other branches equal bit for bit."""
    model = tree_model(hf_model(tied=True))
    trunk, *branches = ([1, 2, 3, 4], [5, 6, 7], [8, 9, 10], [11, 12])

    def scores(branches):
        tree = TokenTree.from_paths([TokenPath(trunk + branch) for branch in branches])
        found = {}

        batches = TreeBatch.from_plan(RandomCuts(0.5, 1).plan(tree))
        for batch, out in forward_passes(model, batches, CPU):
            for source, label, value in zip(batch.edge_source, batch.edge_label, out.logprobs, strict=True):
                found[int(batch.tokens[source]), int(label)] = value.item()
        return found

    before, after = scores(branches), scores([branches[0], [8, 9, 20], branches[2]])
    assert {edge: x for edge, x in before.items() if 10 not in edge} == {
        edge: x for edge, x in after.items() if 20 not in edge
    }


def add_rl_fields(paths, seed):
    r = np.random.default_rng(seed)
    for path in paths:
        path.advantage = r.normal(size=len(path)).astype(np.float32)
        path.old_logprobs = (-4 + 0.3 * r.normal(size=len(path))).astype(np.float32)
        path.ref_logprobs = 1.1 * path.old_logprobs


@pytest.mark.parametrize(
    ("name", "reduction", "entropy"),
    [
        ("sft", "token_mean", 0.0),
        ("grpo", "token_mean", 0.02),
        ("gspo", "path_token_mean", 0.01),
    ],
)
def test_partitioned_step_equals_unpartitioned_step(name, reduction, entropy):
    """Losses, metrics and gradients are equal, also for losses of whole paths, which need a score pass."""
    options = {} if name == "sft" else {"clip_low": 0.5, "clip_high": 0.5}
    for seed in range(4):
        model = tree_model(hf_model(tied=True, dtype=torch.float64))
        groups = random_groups(seed)
        add_rl_fields([path for paths in groups for path in paths], seed)
        trees = [TokenTree.from_paths(paths) for paths in groups]
        results, gradients = [], []
        for partitioner in (None, RandomCuts(0.3, seed)):
            model.zero_grad(set_to_none=True)
            step = TreeStep(model, TreeLoss(name, reduction, entropy, **options), "cpu", partitioner)
            results.append(step.run(step.prepare([trees, trees[:1]])))
            gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        one, cut = results
        assert cut.counts.forwards > one.counts.forwards == 2
        assert cut.counts.executed_tokens == cut.counts.distinct_tokens == one.counts.executed_tokens
        assert cut.counts.flops == one.counts.flops
        assert cut.loss.item() == pytest.approx(one.loss.item(), rel=1e-5)
        assert cut.loss_metrics.keys() == one.loss_metrics.keys()
        for metric, value in one.loss_metrics.items():
            assert cut.loss_metrics[metric].item() == pytest.approx(value.item(), rel=1e-5, abs=1e-7), metric
        for parameter, gradient in gradients[0].items():
            assert relative_error(gradients[1][parameter], gradient) < 1e-9, parameter


@pytest.mark.parametrize("reduction", COUNT_ONCE)
def test_shared_tokens_count_once_for_every_partition_strategy(reduction):
    """Two micro-batches of partitions are compared with every path alone, in float64."""
    model = tree_model(hf_model(tied=True, dtype=torch.float64))
    trees = [TokenTree.from_paths(paths) for paths in random_groups(3)]
    paths = [path for tree in trees for path in tree.paths]
    for number, path in enumerate(paths):
        path.advantage = np.full(len(path), 1 + number % 3, np.float32)
    once = [once_weights(tree.paths, reduction) for tree in trees]
    want, z = 0.0, sum(total for _, total in once)
    for path, weights in zip(paths, [w for by_path, _ in once for w in by_path], strict=True):
        if any(weights):
            logprobs = model(TreeBatch.from_trees([TokenTree.from_paths([path])])).logprobs
            want = want - float(path.advantage[0]) * (logprobs * torch.tensor(weights)).sum() / z
    gradients = torch.autograd.grad(want, list(model.parameters()))
    for strategy in ("none", *PARTITION_STRATEGIES):
        model.zero_grad(set_to_none=True)
        cut = None if strategy == "none" else TreePartitioner(strategy, 24)
        step = TreeStep(model, TreeLoss("reinforce", reduction), "cpu", cut)
        result = step.run(step.prepare([trees[:1], trees[1:]]))
        assert result.counts.normalizer == pytest.approx(z, rel=1e-6)
        assert result.loss.item() == pytest.approx(want.item(), rel=1e-5)
        for parameter, gradient in zip(model.parameters(), gradients, strict=True):
            assert relative_error(parameter.grad, gradient) < 1e-6, strategy


def test_a_whole_path_loss_without_score_pass_is_wrong():
    """GSPO registered as a loss of single tokens gives a different value over partitions."""

    @register_loss("gspo_as_if_per_token")
    def gspo_as_if_per_token(logprobs, pairs, clip_low, clip_high):
        return gspo(logprobs, pairs, clip_low, clip_high)

    groups = random_groups(0)
    add_rl_fields(groups[0], 0)
    tree = TokenTree.from_paths(groups[0])
    losses = []
    for name in ("gspo", "gspo_as_if_per_token"):
        step = TreeStep(
            tree_model(hf_model(tied=True)),
            TreeLoss(name, clip_low=0.5, clip_high=0.5),
            "cpu",
            RandomCuts(0.3),
        )
        losses.append(step.run(step.prepare([[tree]])).loss.item())
    assert losses[0] != pytest.approx(losses[1], rel=1e-3)


def test_out_of_memory_frees_everything_and_names_the_budget(monkeypatch):
    model = tree_model(hf_model(tied=True))
    step = TreeStep(model, TreeLoss(), "cpu", RandomCuts(0.3))
    inputs = step.prepare([[forest_of(random_groups(3))]])
    outputs, forward = [], type(model).forward

    def third_fails(self, *args, **kwargs):
        if len(outputs) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        out = forward(self, *args, **kwargs)
        outputs.append(weakref.ref(out.logprobs))
        return out

    monkeypatch.setattr(type(model), "forward", third_fails)
    with pytest.raises(UserError, match=r"lower data.max_tokens or partition.max_chain_tokens.*2.00 GiB"):
        step.run(inputs)
    gc.collect()
    assert len(outputs) == 3
    assert not any(output() is not None for output in outputs)


def test_gateway_must_fit_the_batch():
    model = tree_model(hf_model(tied=True))
    batches = TreeBatch.from_plan(RandomCuts(1.0).plan(forest_of(random_groups(1))))
    with pytest.raises(UserError, match=r"gateway: expected tensors of \[4, 4\] rows.*got \[\]"):
        model(batches[1])
