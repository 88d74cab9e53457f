"""Kimi-Linear on token trees: against transformers on every path alone, in one pass and in partitions."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.cases import for_each
from tests.support.hf_families import hf_family
from tests.support.oracle import (
    assert_same,
    flat,
    in_one_pass,
    per_path,
    random_groups,
    relative_error,
    tree_batch,
    tree_model,
)
from tests.support.partitions import RandomCuts, assert_parallelized_equals, forest_of, in_partitions
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.distributed.sequence_parallel import check_heads
from titan_tree.errors import UserError
from titan_tree.models.kimi_linear import SIZES_48B, KimiLinear, KimiLinearConfig
from titan_tree.models.pretrained import build_model, load_pretrained, save_pretrained
from titan_tree.scoring.score_trees import tree_logprobs
from titan_tree.tree.paths import TokenPath


def kimi(seed=0, **sizes):
    """Returns a model of transformers whose biases of routers matter."""
    options = {"rms_norm_eps": 1e-3, "num_hidden_layers": 3, "vocab_size": 61}
    options["pad_token_id"] = None  # transformers does not train the embedding of the padding token
    kinds = {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    model = hf_family("kimi_linear", **options | kinds | sizes)
    torch.manual_seed(seed)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.uniform_(-0.3, 0.3)
    return model


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_one_pass_equals_every_path_alone(seed):
    hf = kimi(seed)
    groups = random_groups(seed)
    assert_same(in_one_pass(tree_model(hf), groups), per_path(hf, flat(groups)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "cuts",
    [RandomCuts(0.6), RandomCuts(1.0), TreePartitioner("redundancy_free", 4)],
    ids=["some", "all", "partitioner"],
)
def test_partitions_equal_one_pass(cuts):
    model = tree_model(kimi()).double()
    groups = random_groups(2)
    _, want_loss, want = in_one_pass(model, groups)
    plan = cuts.plan(forest_of(groups))
    loss, got = in_partitions(model, plan)
    assert len(plan) > 1
    assert loss == pytest.approx(want_loss, rel=1e-12)
    assert got.keys() == want.keys()
    assert max(relative_error(got[name], gradient) for name, gradient in want.items()) < 1e-9


def test_a_siblings_tokens_do_not_leak():
    model = tree_model(kimi()).double()
    trunk, left = [3, 1, 4], [1, 5, 9]
    batches = [
        tree_batch([[TokenPath(trunk + left), TokenPath(trunk + right)]]) for right in ([2, 6, 5], [7, 7, 7])
    ]
    first, second = (model(batch).logprobs for batch in batches)
    on_left = [i for i, edge in enumerate(batches[0].edge_number.tolist()) if edge < len(trunk + left) - 1]
    torch.testing.assert_close(first[on_left], second[on_left], rtol=1e-12, atol=0)  # experts have other rows
    assert not torch.allclose(first, second)


@pytest.mark.slow
def test_snapshots_go_in_and_out(tmp_path):
    """They have the published names, and transformers loads what is written bit for bit."""
    hf = kimi()
    hf.save_pretrained(tmp_path / "in")
    model = load_pretrained(tmp_path / "in", torch.float32)
    assert isinstance(model, KimiLinear)
    path = [5, 4, 3, 2, 1, 7, 8]
    want = hf(input_ids=torch.tensor([path])).logits[0, :-1].log_softmax(-1)
    want = want.gather(1, torch.tensor(path[1:])[:, None])[:, 0].detach()
    torch.testing.assert_close(tree_logprobs(model, [path])[0].detach(), want, rtol=1e-5, atol=1e-5)
    save_pretrained(model, tmp_path / "out", source=tmp_path / "in")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert again.keys() == hf.state_dict().keys()
    for name, weight in hf.state_dict().items():
        assert torch.equal(again[name], weight), name


def test_published_sizes():
    with torch.device("meta"):
        model = KimiLinear(KimiLinear.flavors["48B-A3B"])
    assert model.num_parameters() == pytest.approx(49.1e9, rel=1e-2)
    active = sum(
        moe.active_parameters for block in model.blocks if (moe := block.mlp) and hasattr(moe, "gate")
    )
    routed = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert model.num_parameters() - routed + active == pytest.approx(3.0e9, rel=0.2)


def test_fresh_weights_are_drawn_as_published():
    torch.manual_seed(0)
    weights = dict(build_model("kimi_linear", "debug").named_parameters())
    decay = weights["layers.0.self_attn.forget_gate.A_log"].detach().exp()
    assert 1 <= decay.min() < decay.max() <= 16
    step = torch.nn.functional.softplus(weights["layers.0.self_attn.forget_gate.dt_bias"].detach())
    assert 0.0009 < step.min() < step.max() < 0.1
    assert not weights["layers.1.mlp.gate.e_score_correction_bias"].any()


PUBLISHED = {  # the spelling of moonshotai/Kimi-Linear-48B-A3B-Instruct
    **{name: SIZES_48B[name] for name in SIZES_48B.keys() - {"layer_types", "head_dim"}},
    "model_type": "kimi_linear",
    "linear_attn_config": {
        "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
        "head_dim": 128,
        "num_heads": 32,
        "short_conv_kernel_size": 4,
    },
    "first_k_dense_replace": 1,
    "num_experts_per_token": 8,
    "moe_renormalize": True,
    "model_max_length": 1_048_576,
    "mla_use_nope": True,
    "q_lora_rank": None,
    "num_expert_group": 1,
    "num_shared_experts": 1,
}


def test_the_published_config_is_read():
    config = KimiLinearConfig.from_hf(PUBLISHED, "here")
    assert config == KimiLinear.flavors["48B-A3B"]
    assert KimiLinearConfig.from_hf(config.to_hf(), "here") == config


@for_each(
    ("fields", "message"),
    [
        ({"q_lora_rank": 64}, "here: q_lora_rank: titan_tree's Kimi-Linear supports null only, got 64"),
        (
            {"num_expert_group": 8},
            "here: n_group: titan_tree's Kimi-Linear supports one group of experts only",
        ),
        (
            {"mlp_layer_types": ["sparse"] * 27},
            "here: mlp_layer_types: .* dense layers before sparse ones only",
        ),
        (
            {"num_hidden_layers": 26, "layer_types": ["full_attention"]},
            "layer_types: expected one for each of 26",
        ),
        ({"num_key_value_heads": 8}, "num_key_value_heads: expected that of num_attention_heads, 32, got 8"),
        ({"hidden_act": "gelu"}, "here: hidden_act: titan_tree's Kimi-Linear supports silu only"),
    ],
)
def test_other_models_are_refused(fields, message):
    with pytest.raises(UserError, match=message):
        KimiLinearConfig.from_hf(PUBLISHED | fields, "here")


def test_ranks_cannot_share_its_heads():
    model = build_model("kimi_linear", "debug")
    check_heads(model, 1)
    with pytest.raises(UserError, match=r"sequence_parallel: expected 1 for a Kimi-Linear model, .* got 2$"):
        check_heads(model, 2)


@pytest.mark.usefixtures("without_codegen")
@torch.fx.experimental._config.patch(use_duck_shape=True)  # ``parallelize`` changes it
@pytest.mark.parametrize(
    "checkpoint",
    [
        pytest.param(name, marks=getattr(pytest.mark, mark))
        for name, mark in (("none", "exhaustive"), ("full", "slow"))
    ],
)
def test_compiled_and_checkpointed_blocks_give_the_same_gradients(checkpoint):
    assert_parallelized_equals(tree_model(kimi()), checkpoint)
