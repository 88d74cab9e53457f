"""Llama 3 against transformers on every path alone."""

import json

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM

from tests.support.oracle import assert_same, flat, in_one_pass, per_path, random_groups, tree_model
from tests.support.snapshots import assert_scores_like, edit_config
from titan_tree.errors import UserError
from titan_tree.models.llama import FLAVORS, Llama
from titan_tree.models.pretrained import load_pretrained, save_pretrained

# As published, but the original positions are so few that paths of the tests reach all three ranges.
SCALING = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
NUM_PARAMETERS = {
    "3.2-1B": 1_235_814_400,
    "3.2-3B": 3_212_749_824,
    "3.1-8B": 8_030_261_248,
    "3.1-70B": 70_553_706_496,
}


def hf_model(**changes: object) -> transformers.LlamaForCausalLM:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 61,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "initializer_range": 0.1,
        "rope_parameters": SCALING,
        "attn_implementation": "eager",
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes)).float()


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_trees_equal_transformers_on_every_path(seed: int, tied: bool) -> None:
    hf, groups = hf_model(tie_word_embeddings=tied), random_groups(seed)
    assert_same(in_one_pass(tree_model(hf), groups), per_path(hf, flat(groups)))


@pytest.mark.parametrize("rope", [SCALING, {"rope_type": "default", "rope_theta": 1e4}])
def test_snapshots_load_and_are_written_back(tmp_path, rope) -> None:
    hf = hf_model(rope_parameters=rope)
    hf.save_pretrained(tmp_path / "in")
    edit_config(tmp_path / "in", _model_name_or_path="Converted from GGUF")  # by transformers
    model = load_pretrained(tmp_path / "in", torch.float32)
    assert isinstance(model, Llama)
    assert_scores_like(model, hf)
    save_pretrained(model, tmp_path / "out", source=tmp_path / "in")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    assert_scores_like(model, again)
    assert again.config.rope_parameters == hf.config.rope_parameters


def test_the_first_published_form_of_a_config_loads(tmp_path) -> None:
    """RoPE's fields lie at the top level, and the head dim and the key heads follow from others."""
    hf = hf_model(num_key_value_heads=4)
    hf.save_pretrained(tmp_path)
    scaling = {name: value for name, value in SCALING.items() if name != "rope_theta"}
    edit_config(
        tmp_path,
        rope_parameters=...,
        rope_scaling=scaling,
        rope_theta=SCALING["rope_theta"],
        head_dim=...,
        num_key_value_heads=...,
    )
    assert "rope_parameters" not in json.loads((tmp_path / "config.json").read_text())
    assert_scores_like(load_pretrained(tmp_path, torch.float32), hf)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "RoPE of type default and llama3 only"),
        ({"rope_parameters": {"rope_type": "llama3", "factor": 8.0}}, "llama3 with factor, low_freq_factor,"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope_scaling: .* default and llama3"),
        ({"original_max_position_embeddings": 8}, "original_max_position_embeddings in rope_parameters only"),
        ({"mlp_bias": True}, "mlp_bias: titan_tree's Llama supports null, false, 0 or no such field only"),
    ],
)
def test_what_the_model_does_not_compute_is_refused(tmp_path, changes, message) -> None:
    hf_model().save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message):
        load_pretrained(tmp_path, implementation="native")


def test_a_config_without_the_epsilon_of_norms_has_that_of_transformers(tmp_path) -> None:
    hf_model().save_pretrained(tmp_path)
    edit_config(tmp_path, rms_norm_eps=...)
    assert load_pretrained(tmp_path).config.rms_norm_eps == 1e-6


@pytest.mark.parametrize("flavor", NUM_PARAMETERS)
def test_published_sizes(flavor: str) -> None:
    with torch.device("meta"):
        assert Llama(FLAVORS[flavor]).num_parameters() == NUM_PARAMETERS[flavor]
