"""Qwen3-MoE on token trees against transformers on every path alone: experts, losses and gradients."""

import copy
import functools

import pytest
import torch

from tests.support.oracle import (
    assert_same,
    flat,
    hf_model,
    in_one_pass,
    per_path,
    random_groups,
    relative_error,
    tree_batch,
    tree_model,
)
from tests.support.partitions import RandomCuts
from tests.support.routing import BALANCE, Z, assert_experts_of_paths, batch_of_paths, chosen_experts
from titan_tree.components.moe.layer import MoE
from titan_tree.components.moe.routing import RouterLoss, Routing
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.parallelize import parallelize
from titan_tree.engine.partitions import train_micro_batch
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

LAYERS = {
    "all": {},
    "unnormalised": {"norm_topk_prob": False},
    "every second": {"decoder_sparse_step": 2},
    "not the first": {"mlp_only_layers": [0]},
}


# Modulo 4, the seeds are all kinds of forests.
@pytest.mark.parametrize(("layers", "seed"), zip(LAYERS, [0, 3, 5, 6], strict=True))
def test_one_pass_equals_every_path_alone(layers, seed):
    hf = hf_model(tied=seed % 2 == 0, kind="Qwen3Moe", seed=seed, **LAYERS[layers])
    model = tree_model(hf)
    groups = random_groups(seed)
    assert_experts_of_paths(model, hf, groups)
    assert_same(in_one_pass(model, groups), per_path(hf, flat(groups)))


def test_a_siblings_tokens_do_not_leak():
    """Gradients are exactly 0. Values differ by rounding, as products depend on the number of rows."""
    model = tree_model(hf_model(False, kind="Qwen3Moe")).double()
    prompt, mine = [1, 2, 3, 4], [5, 6, 7]

    def logprobs(before, after):
        batch = tree_batch([[TokenPath(prompt + branch) for branch in (before, mine, after)]])
        return model(batch).logprobs[batch.pairs.edge[batch.pairs.path == 1]]

    want = logprobs([10, 11, 12, 13, 14], [20, 21])
    torch.testing.assert_close(logprobs([30, 31, 32, 33, 34], [40, 41]), want, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(want.sum(), model.embed_tokens.weight)
    assert gradient.any(1).nonzero()[:, 0].tolist() == [*prompt, *mine[:-1]]


# The router's losses, over a step.

PARTITIONERS = {
    "none": lambda: None,
    "redundancy_free": lambda: TreePartitioner("redundancy_free", 6),
    "one token": lambda: RandomCuts(1.0),
    "random": lambda: RandomCuts(0.4, 3),
    # It repeats tokens, which must not count twice.
    "single_path": lambda: TreePartitioner("single_path", 20),
}


@functools.cache
def expected_step(num_micro_batches, scope):
    """Returns transformers' model, micro-batches, and what ``batch_of_paths`` returns for them."""
    hf = hf_model(tied=True, kind="Qwen3Moe", seed=num_micro_batches, num_hidden_layers=3)
    micro_batches = [random_groups(seed) for seed in (2, 0)[:num_micro_batches]]
    return hf, micro_batches, batch_of_paths(hf, micro_batches, scope)


@pytest.mark.parametrize(
    ("partitioner", "num_micro_batches", "scope"),
    [
        ("none", 2, "global_batch"),
        ("none", 2, "micro_batch"),
        ("redundancy_free", 2, "micro_batch"),
        ("one token", 2, "global_batch"),
        ("random", 1, "micro_batch"),
        ("single_path", 2, "global_batch"),
    ],
)
def test_a_step_with_router_losses_equals_a_batch_of_the_paths(partitioner, num_micro_batches, scope):
    hf, micro_batches, (loss, gradients, balance, z) = expected_step(num_micro_batches, scope)
    model = tree_model(hf)

    router_loss = RouterLoss(BALANCE, Z, scope)
    step = TreeStep(model, TreeLoss(), "cpu", PARTITIONERS[partitioner](), router_loss=router_loss)
    model.zero_grad(set_to_none=True)
    prepared = step.prepare([[TokenTree.from_paths(paths) for paths in groups] for groups in micro_batches])
    result = step.run(prepared)
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    assert result.router_metrics["router_z"].item() == pytest.approx(z, rel=1e-5)
    if scope == "global_batch" or num_micro_batches == 1:
        assert result.router_metrics["router_balance"].item() == pytest.approx(balance, rel=1e-5)
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, gradients[name]) <= 1e-5, name
    cut = any(len(partitions) > 1 for partitions in prepared.micro_batches)
    assert cut == (partitioner != "none")
    assert (prepared.counts.duplicates > 0) == (partitioner == "single_path")
    counted = cut or (num_micro_batches > 1 and scope == "global_batch")
    assert result.extra_forward_tokens == (prepared.counts.executed_tokens if counted else 0)


def test_router_metrics_need_no_extra_forward():
    model = build_model("qwen3_moe", "debug")
    step = TreeStep(model, TreeLoss(), "cpu", TreePartitioner("redundancy_free", 4))
    paths = [TokenPath([1, 2, 3, 4, 5, 6]), TokenPath([1, 2, 3, 4, 7])]
    result = step.run(step.prepare([[TokenTree.from_paths(paths)]] * 2))
    assert result.extra_forward_tokens == 0
    assert result.router_metrics.keys() == {"router_balance", "router_z", "expert_load"}
    experts = chosen_experts(model, [paths])  # the same for both micro-batches
    load = torch.stack([experts[:, layer].flatten().bincount(minlength=8) for layer in range(2)]).float()
    expected = (load.amax(1) / load.mean(1)).mean().item()
    assert result.router_metrics["expert_load"].item() == pytest.approx(expected, rel=1e-6)
    # The balance, whose f sums to k, is near k for a fresh router.
    assert result.router_metrics["router_balance"].item() == pytest.approx(2, rel=0.1)


def test_partitions_do_not_differentiate_routing_without_a_router_loss():
    model, seen = tree_model(hf_model(True, kind="Qwen3Moe")), []
    tree = TokenTree.from_paths([TokenPath([1, 2, 3, 4, 5, 6]), TokenPath([1, 2, 3, 4, 7])])

    def compute_loss(batch, out):
        for name, (end, _) in zip(("hidden", *Routing._fields), out.loss_boundary, strict=True):
            if end.requires_grad:
                end.register_hook(lambda _, name=name: seen.append(name))
        return out.logprobs.sum()

    batches = TreeBatch.from_plan(TreePartitioner("redundancy_free", 4).plan(tree))
    train_micro_batch(model, batches, compute_loss, torch.device("cpu"))
    assert seen == ["hidden"] * len(batches)


def test_whole_path_losses_and_router_losses_combine():
    """One step has score passes, which gspo needs over partitions, and count passes."""
    hf = hf_model(tied=True, kind="Qwen3Moe")
    groups = [
        [
            TokenPath(p.tokens, advantage=0.5 * i - 1, old_logprobs=[-4.0] * len(p))
            for i, p in enumerate(paths)
        ]
        for paths in random_groups(2)
    ]
    results = []
    for partitioner in (None, TreePartitioner("redundancy_free", 6)):
        model = tree_model(hf)
        loss = TreeLoss("gspo", "path_token_mean", clip_low=1.0, clip_high=1.0)
        step = TreeStep(model, loss, "cpu", partitioner, router_loss=RouterLoss(BALANCE, Z))
        results.append(step.run(step.prepare([[TokenTree.from_paths(paths) for paths in groups]])))
        results[-1] = results[-1].loss, {name: p.grad for name, p in model.named_parameters()}
    assert results[1][0].item() == pytest.approx(results[0][0].item(), rel=1e-5)
    for name, gradient in results[0][1].items():
        assert relative_error(results[1][1][name], gradient) < 1e-5, name


def test_router_losses_need_experts():
    with pytest.raises(UserError, match="router_loss: expected a model with experts"):
        TreeStep(build_model("qwen3", "debug"), TreeLoss(), router_loss=RouterLoss(z=1e-3))


# The rest of the model.


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.parametrize(
    "checkpoint", [pytest.param("compiled", marks=pytest.mark.exhaustive), "full", "selective"]
)
def test_compiled_and_checkpointed_blocks_give_the_same_gradients(checkpoint):
    """This holds with router losses, in one pass and in partitions."""
    plain = tree_model(hf_model(tied=True, kind="Qwen3Moe"))
    changed = parallelize(
        copy.deepcopy(plain),
        OneRank(),
        dtype=torch.float32,
        compile=checkpoint == "compiled",
        activation_checkpoint="none" if checkpoint == "compiled" else checkpoint,
    )
    trees = [TokenTree.from_paths([TokenPath(range(20)), TokenPath([*range(8), 30, 31])])]
    for partitioner in (None, TreePartitioner("redundancy_free", 12)):
        results = []
        for model in (plain, changed):
            step = TreeStep(model, TreeLoss(), "cpu", partitioner, router_loss=RouterLoss(BALANCE, Z))
            model.zero_grad(set_to_none=True)
            result = step.run(step.prepare([trees]))
            results.append([result.loss, *(p.grad for p in model.parameters())])
        for got, want in zip(*reversed(results), strict=True):
            assert relative_error(got, want) < 1e-5


def test_some_layers_may_have_no_experts():
    model = build_model("qwen3_moe", "debug", num_hidden_layers=6, decoder_sparse_step=2, mlp_only_layers=[3])
    assert [i for i, layer in enumerate(model.layers) if isinstance(layer.mlp, MoE)] == [1, 5]


def test_flops_count_only_the_experts_of_a_token():
    """The sum by hand: 2 of 4 experts, the router's matrix, attention's matrices and pairs."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 1, "moe_intermediate_size": 32, "num_experts": 4}
    model = build_model("qwen3_moe", "debug", **sizes)
    batch = tree_batch([[TokenPath([1, 2, 3]), TokenPath([1, 4])]])
    attention = 2 * 64 * 4 * 32 + 2 * 64 * 2 * 32
    matrices = attention + 4 * 64 + 2 * 3 * 32 * 64
    pairs = 1 + 2 + 3 + 2
    mixing = 12 * 4 * 32 * pairs
    assert model.costs().training_flops(batch) == 6 * (4 * matrices + 3 * 512 * 64) + mixing


def test_fresh_weights_have_the_published_deviation():
    torch.manual_seed(0)
    model = build_model("qwen3_moe", "debug")
    weights = dict(model.named_parameters())
    for name in ("gate.weight", "experts.gate_up_proj", "experts.down_proj"):
        assert weights[f"layers.0.mlp.{name}"].std().item() == pytest.approx(0.02, rel=0.1), name
