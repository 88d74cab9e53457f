"""Snapshots of models with Gated DeltaNet: Qwen3.5 with and without vision, and Qwen3-Next."""

import json
import logging

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.support.cases import for_each
from tests.support.oracle import hybrid_model, path_logprobs, tree_batch
from tests.support.snapshots import TOKENS, assert_scores_like, edit_config
from titan_tree.errors import UserError
from titan_tree.models.hf import model_from_config
from titan_tree.models.pretrained import load_pretrained, save_pretrained
from titan_tree.models.qwen3_5_moe import Qwen3Next
from titan_tree.scoring.score_trees import tree_logprobs
from titan_tree.tree.paths import TokenPath


def with_vision(tied=True):
    """Returns transformers' Qwen3.5 with vision, and the text model inside."""
    text = hybrid_model(tied)
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen3_5Config(
        text_config=text.config.to_dict(), vision_config=vision, tie_word_embeddings=tied
    )
    whole = transformers.Qwen3_5ForConditionalGeneration(config).float()
    whole.model.language_model.load_state_dict(text.model.state_dict())
    whole.lm_head.weight.data.copy_(text.lm_head.weight)
    return whole, text


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["Qwen3_5", "Qwen3Next"])
def test_a_snapshot_written_by_transformers_loads(tmp_path, kind, tied):
    hf = hybrid_model(tied, kind)
    hf.save_pretrained(tmp_path, max_shard_size="30KB")
    model = load_pretrained(tmp_path, dtype=torch.float32)
    assert_scores_like(model, hf)
    assert model.config.layer_types == hf.config.layer_types


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_loads_a_saved_snapshot(tmp_path, tied):
    hf = hybrid_model(tied, "Qwen3Next")
    hf.save_pretrained(tmp_path / "next")
    model = load_pretrained(tmp_path / "next", dtype=torch.float32)
    save_pretrained(model, tmp_path / "out", max_shard_bytes=30_000)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert type(again).__name__ == "Qwen3NextForCausalLM"
    want = dict(hf.named_parameters())
    got = dict(again.named_parameters())
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)
    torch.testing.assert_close(path_logprobs(again, TOKENS), path_logprobs(hf, TOKENS))


@pytest.mark.parametrize("tied", [True, False])
def test_vision_is_not_loaded_but_copied_to_the_export(tmp_path, caplog, tied):
    whole, text = with_vision(tied)
    whole.save_pretrained(tmp_path / "in")
    weights = load_file(tmp_path / "in/model.safetensors")
    weights["mtp.fc.weight"] = torch.randn(4, 8)
    (tmp_path / "in/preprocessor_config.json").write_text("{}")
    path = tmp_path / "in/config.json"
    config = json.loads(path.read_text())
    config["text_config"] |= {"mtp_num_hidden_layers": 1}
    config["text_config"]["rope_parameters"] |= {"mrope_section": [2, 2, 0], "mrope_interleaved": True}
    path.write_text(json.dumps(config | {"torch_dtype": "float16"}))
    save_file(weights, tmp_path / "in/model.safetensors", metadata={"format": "pt"})
    with caplog.at_level(logging.INFO):
        model = load_pretrained(tmp_path / "in", dtype=torch.float32)
    (line,) = [record.getMessage() for record in caplog.records if "not loaded" in record.getMessage()]
    vision = [name for name in weights if name.startswith("model.visual.")]
    assert f"not loaded: {len(vision) + 1} tensors of mtp and visual" in line
    assert_scores_like(model, text)

    with torch.no_grad():
        model.norm.weight.add_(1)  # represents training
    save_pretrained(model, tmp_path / "out", source=tmp_path / "in")
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert config["architectures"] == ["Qwen3_5ForConditionalGeneration"]
    text = config["text_config"]
    assert (text["model_type"], text["mtp_num_hidden_layers"]) == ("qwen3_5_text", 1)
    assert text["rope_parameters"]["mrope_section"] == [2, 2, 0]
    assert config["dtype"] == text["dtype"] == "float32"
    assert "torch_dtype" not in config
    assert (tmp_path / "out/preprocessor_config.json").is_file()
    saved = load_file(tmp_path / "out/model.safetensors")
    assert saved.keys() == weights.keys() - ({"lm_head.weight"} if tied else set())
    changed = {name for name, weight in saved.items() if not torch.equal(weight, weights[name])}
    assert changed == {"model.language_model.norm.weight"}
    again = transformers.Qwen3_5ForConditionalGeneration.from_pretrained(tmp_path / "out", dtype="auto")
    ids = torch.tensor([TOKENS])
    with torch.no_grad():
        logprobs = again(input_ids=ids).logits[0, :-1].log_softmax(-1).gather(1, ids.T[1:])[:, 0]
        ours = model(tree_batch([[TokenPath(TOKENS)]])).logprobs
    torch.testing.assert_close(ours, logprobs, rtol=1e-5, atol=1e-5)


@for_each(
    ("changes", "message"),
    [
        ({"layer_types": ["full_attention"] * 2 + ["linear_attention"]}, "layer_types: .* every n-th layer"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6}}, "RoPE of type default only"),
        (
            {"output_gate_type": "tanh"},
            "output_gate_type: .* Qwen3.5 supports swish or silu only, got 'tanh'",
        ),
        ({"num_experts": 4}, "num_experts: .* Qwen3.5 supports null, false, 0 or no such field only, got 4"),
        ({"linear_num_value_heads": ...}, "missing linear_num_value_heads; expected .* of a Qwen3.5"),
        ({"linear_key_head_dim": 8}, r"conv1d.weight: expected shape \(64, 1, 4\) by config.json, got"),
        (
            {"num_hidden_layers": 5, "layer_types": ..., "full_attention_interval": 2},
            "missing tensors: .*layers.3",
        ),
        ({"rope_parameters": ...}, "missing rope_theta"),
        ({"rope_parameters": "default"}, "rope_parameters: .* a table only, got 'default'"),
        ({"layer_types": 5}, "layer_types: .* a list only, got 5"),
        ({"text_config": [1]}, r"text_config: .* a table only, got \[1\]"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: .* supports null"),
        ({"model_type": ["x"]}, "model_type: expected one of"),
        (
            {"architectures": "Qwen3_5ForCausalLM"},
            r"expected \['Qwen3_5.*'\], got Qwen3_5ForCaus",
        ),
        ({"attn_output_gate": False}, "attn_output_gate: .* supports true only"),
    ],
)
def test_an_unsupported_config_is_refused(tmp_path, changes, message):
    hybrid_model(tied=True).save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as error:
        load_pretrained(tmp_path, implementation="native")
    assert "\n" not in str(error.value)


def test_older_configs_with_an_attention_interval_are_read(tmp_path):
    hybrid_model(tied=True).save_pretrained(tmp_path)
    edit_config(
        tmp_path,
        layer_types=...,
        rope_parameters=...,
        full_attention_interval=2,
        rope_theta=5e5,
        partial_rotary_factor=0.25,
    )
    ours = model_from_config(tmp_path).config
    assert ours.layer_types == ["linear_attention", "full_attention", "linear_attention"]
    assert (ours.rope_theta, ours.rotary_dim) == (5e5, 4)


def test_two_tensors_for_one_parameter_are_refused(tmp_path):
    hybrid_model(tied=True).save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    weights = load_file(path)
    save_file(weights | {"norm.weight": weights["model.norm.weight"].clone()}, path)
    with pytest.raises(UserError, match=r"a second tensor for norm.weight"):
        load_pretrained(tmp_path)
    layer = "model.layers.0.linear_attn."
    both = [weights[f"{layer}in_proj_{name}.weight"] for name in ("qkv", "z")]
    save_file(weights | {f"{layer}in_proj_qkvz.weight": torch.cat(both)}, path)
    with pytest.raises(UserError, match=r"linear_attn.in_proj_(qkv|z).weight: two tensors hold it"):
        load_pretrained(tmp_path)


def test_the_source_must_be_of_the_same_family(tmp_path):
    hybrid_model(tied=True).save_pretrained(tmp_path / "in")
    model = load_pretrained(tmp_path / "in")
    edit_config(tmp_path / "in", model_type="qwen3")
    with pytest.raises(UserError, match=r"model_type: expected .* the types of the model to save, got qwen3"):
        save_pretrained(model, tmp_path / "out", source=tmp_path / "in")
    assert not (tmp_path / "out").exists()


def test_a_tree_through_qwen3_next_equals_transformers_on_every_path(tmp_path):
    hf = hybrid_model(False, "Qwen3Next")
    hf.save_pretrained(tmp_path)
    model = load_pretrained(tmp_path, dtype=torch.float32)
    trunk = [3, 1, 4, 1, 5, 9, 2, 6] * 9  # longer than a chunk of the recurrence
    paths = [[*trunk, 5, 3, 5, 8], [*trunk, 9, 7], [*trunk[:70], 9, 3, 2], trunk[:11]]
    for max_tokens in (None, 40):
        with torch.no_grad():
            for got, path in zip(tree_logprobs(model, paths, max_tokens), paths, strict=True):
                torch.testing.assert_close(got, path_logprobs(hf, path), rtol=1e-5, atol=2e-5)


def test_the_published_qwen3_next_has_the_parameters_of_transformers():
    with torch.device("meta"):
        ours = Qwen3Next(Qwen3Next.flavors["80B-A3B"])
        theirs = transformers.AutoModelForCausalLM.from_config(transformers.Qwen3NextConfig())
    assert ours.num_parameters() == theirs.num_parameters()
    with pytest.raises(UserError, match=r"mlp_only_layers: .* supports null, .*got \[0\]"):
        Qwen3Next.Config.from_hf({**theirs.config.to_dict(), "mlp_only_layers": [0]}, "here")
