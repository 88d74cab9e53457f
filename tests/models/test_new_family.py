"""The model family of docs/extending.md: one class made of existing parts."""

import json
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch
import transformers

from tests.support.markdown import blocks
from tests.support.oracle import assert_same, flat, in_one_pass, per_path, random_groups, tree_model
from tests.support.page_runner import ROOT
from titan_tree.errors import UserError
from titan_tree.models.hf import model_from_config
from titan_tree.models.pretrained import build_model, load_pretrained, save_pretrained
from titan_tree.models.settings import MODELS


@pytest.fixture
def page() -> Iterator[ModuleType]:
    """Provides the definitions of the page's example, and registers the family as "mistral"."""
    code = next(block.code for block in blocks(ROOT / "docs/extending.md") if "class Mistral(" in block.code)
    module = sys.modules["page"] = ModuleType("page")  # dataclasses look up their module
    exec(code, vars(module))
    MODELS.register("mistral", module.Mistral)
    yield module
    del sys.modules["page"]


@pytest.fixture
def hf(page: ModuleType) -> transformers.MistralForCausalLM:
    """Returns a small random Mistral of transformers."""
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


def test_snapshots_of_a_new_family_are_read_and_written(hf, tmp_path, page):
    hf.save_pretrained(tmp_path / "theirs")
    model = load_pretrained(tmp_path / "theirs", dtype=torch.float32)
    assert isinstance(model, page.Mistral)
    assert torch.equal(model.embed_tokens.weight, hf.model.embed_tokens.weight)
    save_pretrained(model, tmp_path / "ours")
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    for name in ("rope_parameters", "sliding_window", "head_dim", "rms_norm_eps", "max_position_embeddings"):
        assert getattr(saved.config, name) == getattr(hf.config, name), name
    for name, weight in hf.state_dict().items():
        assert torch.equal(saved.state_dict()[name], weight), name


def test_a_new_family_refuses_what_it_does_not_compute(hf, tmp_path):
    hf.config.sliding_window = 4096
    hf.config.save_pretrained(tmp_path)
    with pytest.raises(UserError, match="sliding_window: titan_tree's Mistral supports null only, got 4096"):
        model_from_config(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["sliding_window"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="supports null only, got no such field"):
        model_from_config(tmp_path)


def test_two_families_for_one_type_of_snapshot_are_refused(hf, tmp_path, page):
    hf.config.save_pretrained(tmp_path)
    MODELS.register("mine", page.Mistral)
    with pytest.raises(
        UserError, match=r"config.json: model_type: expected one .* 'mistral', got mistral and mine; "
    ):
        load_pretrained(tmp_path)


def test_a_named_recurrence_backend_is_refused_by_models_without_gated_delta_net():
    with pytest.raises(UserError, match="recurrence: expected backend 'auto' for a Qwen3 model"):
        build_model("qwen3", "debug", recurrence="triton")
    assert build_model("qwen3_5", "debug", recurrence="reference").recurrence.backend == "reference"
