"""Qwen3.5-MoE on token trees against transformers on every path alone, and its snapshots."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.cases import slow_except
from tests.support.oracle import (
    assert_same,
    hybrid_model,
    in_one_pass,
    per_path,
    random_groups,
    relative_error,
    tree_model,
)
from tests.support.routing import BALANCE, Z, assert_experts_of_paths, batch_of_paths
from tests.support.snapshots import assert_scores_like, same_weights
from titan_tree.components.moe.routing import RouterLoss
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.hf import model_from_config
from titan_tree.models.hf.names import split_experts
from titan_tree.models.pretrained import load_pretrained, save_pretrained
from titan_tree.tree.token_tree import TokenTree

TOLERANCE = 2e-5  # transformers' recurrence in fp32 differs from float64 by this


def moe(tied=True, seed=0):
    return hybrid_model(tied, "Qwen3_5Moe", seed=seed)


@pytest.mark.parametrize("seed", slow_except([2], [2, 3]))
def test_one_pass_equals_every_path_alone(seed):
    hf = moe(seed % 2 == 0, seed)
    model = tree_model(hf)
    groups = random_groups(seed)
    assert_experts_of_paths(model, hf, groups)
    want = per_path(hf, [path for paths in groups for path in paths])
    assert_same(in_one_pass(model, groups), want, TOLERANCE)


@pytest.mark.slow
def test_a_step_with_router_losses_equals_a_batch_of_the_paths():
    hf = moe()
    model = tree_model(hf)
    micro_batches = [random_groups(seed) for seed in (2, 3)]
    loss, gradients, balance, z = batch_of_paths(hf, micro_batches, "global_batch")
    step = TreeStep(
        model, TreeLoss(), "cpu", TreePartitioner("redundancy_free", 6), router_loss=RouterLoss(BALANCE, Z)
    )
    result = step.run(
        step.prepare([[TokenTree.from_paths(paths) for paths in groups] for groups in micro_batches])
    )
    assert result.loss.item() == pytest.approx(loss, rel=1e-5)
    assert result.router_metrics["router_balance"].item() == pytest.approx(balance, rel=1e-5)
    assert result.router_metrics["router_z"].item() == pytest.approx(z, rel=1e-5)
    for name, parameter in model.named_parameters():
        assert relative_error(parameter.grad, gradients[name]) <= TOLERANCE, name


@pytest.mark.parametrize("form", ["transformers'", "single", "fused"])
@pytest.mark.parametrize("tied", [True, False])
def test_snapshots_load_and_save(tmp_path, form, tied):
    """Experts are saved fused, as published, and under the source's prefix."""
    hf = moe(tied)
    hf.save_pretrained(tmp_path / "in")
    if form != "transformers'":
        weights = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
        if tied:
            del weights["lm_head.weight"]
        weights = split_experts(weights) if form == "single" else weights
        weights = {
            name.replace("model.", "model.language_model.", 1): w.contiguous() for name, w in weights.items()
        }
        save_file(weights, tmp_path / "in/model.safetensors", metadata={"format": "pt"})
    model = load_pretrained(tmp_path / "in", dtype=torch.float32)
    assert same_weights(model, hf)
    assert_scores_like(model, hf)

    save_pretrained(model, tmp_path / "out", source=tmp_path / "in")
    names = load_file(tmp_path / "out/model.safetensors").keys()
    assert "model.layers.2.mlp.experts.gate_up_proj" in names
    assert json.loads((tmp_path / "out/config.json").read_text())["model_type"] == "qwen3_5_moe_text"
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert type(again).__name__ == "Qwen3_5MoeForCausalLM"
    assert same_weights(model, again)


def test_the_text_config_of_a_model_with_vision_is_read(tmp_path):
    text = moe().config.to_dict()
    whole = {"model_type": "qwen3_5_moe", "tie_word_embeddings": True, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert model_from_config(tmp_path).config == tree_model(moe()).config
    text["num_experts_per_tok"] = 9
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(UserError, match=r"config.json: num_experts_per_tok: expected at most num_experts"):
        model_from_config(tmp_path)
