"""ExpertInfo: what code outside the layers knows about a model's experts."""

import copy

import torch

from titan_tree.models.pretrained import build_model

SPARSE = {"num_hidden_layers": 4, "decoder_sparse_step": 2}  # layers 1 and 3 have experts


def test_only_models_with_experts_have_expert_info():
    assert build_model("qwen3", "debug").experts is None
    assert build_model("qwen3_5", "debug").experts is None
    assert build_model("qwen3_moe", "debug", **SPARSE).experts.sizes == (2, 2, 8)
    assert build_model("qwen3_5_moe", "debug").experts.sizes == (4, 2, 8)


def test_router_biases_are_those_of_the_state_dict():
    model = build_model("qwen3_moe", "debug", **SPARSE)
    assert model.experts.router_biases() == {}
    model.experts.add_router_biases()
    biases = model.experts.router_biases()
    assert list(biases) == [f"layers.{i}.mlp.e_score_correction_bias" for i in (1, 3)]
    for name, bias in biases.items():
        bias += 1
        assert torch.equal(model.state_dict()[name], torch.ones(8))
    model.experts.add_router_biases()  # keeps those that exist
    assert all(torch.equal(bias, torch.ones(8)) for bias in model.experts.router_biases().values())


def test_a_copied_model_has_experts_of_its_own():
    model = build_model("qwen3_moe", "debug")
    copied = copy.deepcopy(model)
    copied.experts.add_router_biases()
    assert len(copied.experts.router_biases()) == 2
    assert model.experts.router_biases() == {}


def test_recorded_experts_go_to_the_layers_that_have_experts():
    experts = build_model("qwen3_moe", "debug", **SPARSE).experts
    recorded = torch.arange(12).view(2, 3, 2)
    first, second, third, fourth = experts.by_layer(recorded)
    assert first is None
    assert third is None
    assert torch.equal(second, recorded[0])
    assert torch.equal(fourth, recorded[1])
