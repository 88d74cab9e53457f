"""A new family takes one class made of existing parts, and one registry entry."""

from dataclasses import dataclass

import pytest
import torch
import transformers

from tests.support.oracle import assert_same, flat, in_one_pass, per_path, random_groups, tree_model
from titan_tree.config.checks import positive_int, required
from titan_tree.errors import UserError
from titan_tree.models.block import Attention, Block
from titan_tree.models.decoder import Decoder, build_model
from titan_tree.models.decoder_config import DecoderConfig
from titan_tree.models.layers import MLP, RMSNorm
from titan_tree.models.pretrained import load_pretrained
from titan_tree.registry import MODELS


@dataclass(frozen=True, kw_only=True)
class MistralConfig(DecoderConfig):
    title = "Mistral"

    intermediate_size: int = required(positive_int)

    @classmethod
    def from_hf(cls, hf, where):
        return cls.from_fields(hf, where, rope_theta=cls.rope_fields(hf, where).get("rope_theta"))

    def to_hf(self):
        return {"architectures": ["MistralForCausalLM"], "model_type": "mistral", **vars(self)}


class Mistral(Decoder):
    """Mistral: no norm on queries and keys."""

    Config = MistralConfig
    hf_architectures = {"mistral": "MistralForCausalLM"}  # noqa: RUF012
    flavors = {}  # noqa: RUF012
    norm_class = RMSNorm

    def make_block(self, index):
        c = self.config
        mlp = MLP(c.hidden_size, c.intermediate_size)
        return Block(c, RMSNorm, "self_attn", Attention(c, self.attention), mlp)


@pytest.fixture
def hf() -> transformers.MistralForCausalLM:
    """Returns a small random Mistral of transformers, with the family above registered for the test."""
    MODELS.register("mistral", Mistral)
    config = transformers.MistralConfig(
        vocab_size=61,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        sliding_window=None,
        initializer_range=0.1,
        attn_implementation="eager",
    )
    return transformers.MistralForCausalLM(config).float()


@pytest.mark.parametrize("seed", range(4))
def test_a_family_of_parts_equals_transformers_on_every_path(hf, seed):
    groups = random_groups(seed)
    assert_same(in_one_pass(tree_model(hf), groups), per_path(hf, flat(groups)))


def test_snapshots_of_a_new_family_load(hf, tmp_path):
    hf.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, dtype=torch.float32)
    assert isinstance(model, Mistral)
    assert torch.equal(model.embed_tokens.weight, hf.model.embed_tokens.weight)


def test_two_families_for_one_type_of_snapshot_are_refused(hf, tmp_path):
    hf.config.save_pretrained(tmp_path)
    MODELS.register("mine", Mistral)
    with pytest.raises(
        UserError, match=r"config.json: model_type: expected one .* 'mistral', got mistral and mine; "
    ):
        load_pretrained(tmp_path)


def test_a_named_gdn_backend_is_refused_by_models_without_gated_delta_net():
    with pytest.raises(UserError, match="gdn: expected backend 'auto' for a Qwen3 model"):
        build_model("qwen3", "debug", gdn="triton")
    assert build_model("qwen3_5", "debug", gdn="reference").gdn.backend == "reference"
