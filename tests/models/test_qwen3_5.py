"""Qwen3.5 on token trees: against transformers on every path alone, in one pass and in partitions."""

import pytest
import torch

from tests.support.cases import exhaustive
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
from tests.support.partitions import RandomCuts, assert_parallelized_equals, forest_of, in_partitions
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.pretrained import build_model
from titan_tree.models.qwen3_5 import Qwen35, Qwen35Config
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


CUTS = {
    "some": lambda: RandomCuts(0.3, 1),
    "many": lambda: RandomCuts(0.6),
    "one token each": lambda: RandomCuts(1.0),
    "redundancy_free, 1": lambda: TreePartitioner("redundancy_free", 1),
    "redundancy_free, 4": lambda: TreePartitioner("redundancy_free", 4),
    "greedy": lambda: TreePartitioner("greedy", 20),
    "single_path": lambda: TreePartitioner("single_path", 20),
}


CUTS_AND_SEEDS = list(zip(CUTS, [2, 0, 1, 3, 0, 2, 3], strict=True))


@pytest.mark.parametrize(
    ("cuts", "seed"), exhaustive([("some", 2), ("redundancy_free, 4", 0)], CUTS_AND_SEEDS)
)
def test_partitions_equal_one_pass(cuts, seed):
    """Exported states, exported inputs of the convolution and their gradients are equal, too, in float64."""
    model = tree_model(hybrid_model(tied=seed % 2 == 0, seed=seed)).double()
    groups = random_groups(seed)
    _, want_loss, want = in_one_pass(model, groups)
    plan = CUTS[cuts]().plan(forest_of(groups))
    loss, got = in_partitions(model, plan)
    assert len(plan) > 1
    assert loss == pytest.approx(want_loss, rel=1e-12)
    assert got.keys() == want.keys()
    for name, gradient in want.items():
        assert relative_error(got[name], gradient) < 1e-9, name


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


def test_published_sizes():
    """The names of the models count parameters without vision and multi-token prediction."""
    counts = {"0.8B": 0.752e9, "2B": 1.882e9, "4B": 4.206e9, "9B": 8.954e9, "27B": 26.896e9}
    for flavor, count in counts.items():
        with torch.device("meta"):
            model = Qwen35(Qwen35.flavors[flavor])
        assert model.num_parameters() == pytest.approx(count, rel=1e-3), flavor


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


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"linear_num_key_heads": 3}, "linear_num_key_heads: expected a divisor of linear_num_value_heads"),
        (
            {"partial_rotary_factor": 0.1},
            "partial_rotary_factor: expected a factor that rotates an even",
        ),
        ({"linear_conv_kernel_dim": 0}, "linear_conv_kernel_dim: expected an integer > 0, got 0"),
    ],
)
def test_impossible_sizes_are_refused(sizes, message):
    good = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "linear_num_value_heads": 4}
    with pytest.raises(UserError, match=message):
        Qwen35Config(**good | heads | {"linear_num_key_heads": 2} | sizes)


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
@pytest.mark.parametrize(
    "checkpoint", [pytest.param("none", marks=pytest.mark.exhaustive), "full", "selective"]
)
def test_compiled_and_checkpointed_blocks_give_the_same_gradients(checkpoint):
    """This holds in one pass and in partitions."""
    assert_parallelized_equals(tree_model(hybrid_model(tied=True)), checkpoint)
