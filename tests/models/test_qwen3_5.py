"""Qwen3.5 on token trees: against transformers on every path alone, in one pass and in partitions."""

import pytest
import torch

from tests.support.oracle import (
    assert_same,
    flat,
    hybrid_model,
    in_one_pass,
    per_path,
    random_groups,
    relative_error,
    tree_batch,
    tree_model,
)
from tests.support.partitions import assert_parallelized_equals, forest_of, in_partitions
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.tree_step import TreeStep
from titan_tree.models.pretrained import build_model
from titan_tree.tree.paths import TokenPath

# transformers' recurrence, always in fp32, differs from float64 by this much.
TOLERANCE = 2e-5


@pytest.mark.parametrize("seed", range(4))
def test_one_pass_equals_every_path_alone(seed):
    hf = hybrid_model(tied=seed % 2 == 0, seed=seed)
    groups = random_groups(seed)
    assert_same(in_one_pass(tree_model(hf), groups), per_path(hf, flat(groups)), TOLERANCE)


@pytest.mark.parametrize("seed", range(2))
def test_nodes_of_several_chunks_equal_every_path_alone(seed):
    """Some chunks are full, others are not."""
    hf = hybrid_model(tied=True, seed=seed)
    groups = random_groups(seed, max_length=150, num_nodes=5)
    assert_same(in_one_pass(tree_model(hf), groups), per_path(hf, flat(groups)), TOLERANCE)


def test_a_long_chain_of_partitions_equals_one_pass():
    """Each of 35 partitions is the child of the one before. Cuts are inside the convolution's window."""
    model = tree_model(hybrid_model(tied=True)).double()
    groups = [[TokenPath(torch.randint(61, (70,)).tolist())]]
    _, want_loss, want = in_one_pass(model, groups)
    plan = TreePartitioner("redundancy_free", 2).plan(forest_of(groups))
    assert len(plan) == 35
    loss, got = in_partitions(model, plan)
    assert loss == pytest.approx(want_loss, rel=1e-12)
    assert max(relative_error(got[name], gradient) for name, gradient in want.items()) < 1e-9


def test_a_siblings_tokens_do_not_leak():
    model = tree_model(hybrid_model(tied=True)).double()
    trunk, left = [3, 1, 4], [1, 5, 9]
    batches = [
        tree_batch([[TokenPath(trunk + left), TokenPath(trunk + right)]]) for right in ([2, 6, 5], [7, 7, 7])
    ]
    first, second = (model(batch).logprobs for batch in batches)
    on_left = [i for i, edge in enumerate(batches[0].edge_number.tolist()) if edge < len(trunk + left) - 1]
    assert len(on_left) == 5
    assert torch.equal(first[on_left], second[on_left])
    assert not torch.equal(first, second)


def test_fresh_weights_are_drawn_as_published():
    torch.manual_seed(0)
    model = build_model("qwen3_5", "debug")
    weights = dict(model.named_parameters())
    assert model.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    assert not weights["norm.weight"].any()
    assert not weights["layers.0.input_layernorm.weight"].any()
    assert (weights["layers.0.linear_attn.norm.weight"] == 1).all()
    assert (weights["layers.0.linear_attn.dt_bias"] == 1).all()
    decay = weights["layers.0.linear_attn.A_log"].detach().exp()
    assert 0.01 <= decay.min() < decay.max() <= 16
    assert weights["layers.0.linear_attn.conv1d.weight"].std().item() == pytest.approx(0.02, rel=0.1)


def test_flops_count_the_operations_of_each_layer():
    """The expected mixing of 2 DeltaNet layers and an attention layer is counted by hand."""
    model = tree_model(hybrid_model(tied=True))
    batch = tree_batch([[TokenPath([1, 2, 3]), TokenPath([1, 4])]])
    matrices = sum(p.numel() for p in model.layers.parameters() if p.ndim == 2)
    pairs = 1 + 2 + 3 + 2
    mixing = 2 * 18 * 4 * (4 * 8 * 16) + 12 * 4 * 16 * pairs
    assert model.costs().training_flops(batch) == 6 * (4 * matrices + 3 * 61 * 32) + mixing


def test_a_step_counts_the_bytes_of_gateways():
    model = tree_model(hybrid_model(tied=True))
    step = TreeStep(model, TreeLoss(), "cpu", TreePartitioner("redundancy_free", 4))
    prepared = step.prepare([[forest_of([[TokenPath([1, 2, 3, 4, 5, 6]), TokenPath([1, 2, 3, 4, 7])]])]])
    state, tail, key = 4 * (4 * 16 * 8), 4 * 3 * (2 * 2 * 16 + 4 * 8), 4 * 2 * (2 * 16)
    assert prepared.counts.forwards == 3  # two of them read the first one's exports
    assert prepared.counts.gateway_bytes == 2 * (2 * (state + tail) + 4 * key)
    assert step.run(prepared).loss.isfinite()


@pytest.mark.usefixtures("without_codegen")
@torch.fx.experimental._config.patch(use_duck_shape=True)  # ``parallelize`` changes it
@pytest.mark.parametrize("checkpoint", ["full", "selective"])
def test_compiled_and_checkpointed_blocks_give_the_same_gradients(checkpoint):
    """This holds in one pass and in partitions."""
    assert_parallelized_equals(tree_model(hybrid_model(tied=True)), checkpoint)
