"""Snapshots of Qwen3-MoE: fused and single experts load, single experts are saved, as published."""

import json
from contextlib import contextmanager

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from tests.support.oracle import hf_model
from tests.support.snapshots import assert_scores_like, edit_config, same_weights
from titan_tree.errors import UserError
from titan_tree.models.hf import load as module
from titan_tree.models.hf import model_from_config, read_weights
from titan_tree.models.pretrained import load_pretrained, save_pretrained
from titan_tree.models.weights import whole_weights


def write_fused(hf, folder):
    """Saves a snapshot with fused experts, as the model has them in memory."""
    weights = {name: tensor.clone() for name, tensor in hf.state_dict().items()}
    if hf.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    hf.config.architectures = [type(hf).__name__]
    hf.config.save_pretrained(folder)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("form", ["single", "fused"])
@pytest.mark.parametrize("tied", [True, False])
def test_single_and_fused_experts_load(tmp_path, form, tied):
    hf = hf_model(tied, kind="Qwen3Moe", mlp_only_layers=[0])
    if form == "single":
        hf.save_pretrained(tmp_path, max_shard_size="20KB")  # spreads a layer's experts over several files
        assert len(list(tmp_path.glob("*.safetensors"))) > 2
    else:
        write_fused(hf, tmp_path)
    names = {name for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
    assert ("model.layers.1.mlp.experts.5.up_proj.weight" in names) == (form == "single")
    model = load_pretrained(tmp_path, dtype=torch.float32)
    assert same_weights(model, hf)
    assert_scores_like(model, hf)


def test_one_file_is_open_at_a_time(tmp_path, monkeypatch):
    """An open file stays mapped in memory. Experts are read before later files are opened."""
    hf_model(True, kind="Qwen3Moe").save_pretrained(tmp_path, max_shard_size="20KB")
    is_open, opened = set(), []
    open_file = module.open_weights

    @contextmanager
    def watched(file):
        opened.append(file)
        is_open.add(file)
        assert len(is_open) == 1
        with open_file(file) as shard:
            yield shard
        is_open.remove(file)

    monkeypatch.setattr(module, "open_weights", watched)
    model = model_from_config(tmp_path)
    num_opened = {}
    for part in read_weights(tmp_path, model, whole_weights(model)):
        assert len(is_open) == 1
        num_opened[part.parameter] = len(opened)
    assert num_opened["layers.0.mlp.experts.gate_up_proj"] < max(num_opened.values())


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_transformers_loads_a_saved_snapshot(tmp_path, dtype, max_shard_bytes):
    write_fused(hf_model(False, kind="Qwen3Moe", mlp_only_layers=[0]), tmp_path)
    model = load_pretrained(tmp_path, dtype=dtype)
    save_pretrained(model, tmp_path / "out", max_shard_bytes=max_shard_bytes, source=tmp_path)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) == 1) == (max_shard_bytes == 10**9)
    names = {name for file in files for name in load_file(file)}
    assert "model.layers.1.mlp.experts.5.gate_proj.weight" in names
    assert not any(name.endswith(("gate_up_proj", "experts.down_proj")) for name in names)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert (config["num_experts"], config["architectures"]) == (6, ["Qwen3MoeForCausalLM"])
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == dtype
    assert same_weights(model, again)
    assert same_weights(load_pretrained(tmp_path / "out", dtype=dtype), again)


def test_both_spellings_of_the_number_of_experts_are_read(tmp_path):
    hf_model(True, kind="Qwen3Moe").save_pretrained(tmp_path)
    for spelling in (
        {"num_experts": 6, "num_local_experts": ...},
        {"num_experts": ..., "num_local_experts": 6},
    ):
        edit_config(tmp_path, **spelling)
        assert model_from_config(tmp_path).config.num_experts == 6
    defaults = ("norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
    edit_config(tmp_path, **dict.fromkeys(defaults, ...))
    config = model_from_config(tmp_path).config
    assert [getattr(config, name) for name in defaults] == [False, 1, []]  # as in transformers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts": 5, "num_local_experts": 6}, "num_experts is 5, but num_local_experts is 6"),
        ({"num_experts": ..., "num_local_experts": ...}, "missing num_experts; expected .* of a Qwen3-MoE"),
        ({"num_experts_per_tok": 7}, "num_experts_per_tok: expected at most num_experts"),
        ({"mlp_only_layers": [0]}, r"missing tensors: model.layers.0.mlp.down_proj"),
        ({"num_experts": 7, "num_local_experts": ...}, r"missing tensors: .*experts.6.down_proj.weight"),
        (
            {"moe_intermediate_size": 8},
            r"experts.0.*: expected shape \(.*8.*\) by config.json, got \(.*24.*\)",
        ),
        (
            {"use_sliding_window": True, "sliding_window": 8},
            "use_sliding_window: .* Qwen3-MoE .* false only, got True; set model",
        ),
    ],
)
def test_an_unsupported_config_is_refused(tmp_path, changes, message):
    hf_model(True, kind="Qwen3Moe").save_pretrained(tmp_path)
    edit_config(tmp_path, **changes)
    with pytest.raises(UserError, match=message) as error:
        load_pretrained(tmp_path, implementation="native")
    assert "\n" not in str(error.value)


def test_single_experts_beside_a_fused_parameter_are_refused(tmp_path):
    hf = hf_model(True, kind="Qwen3Moe")
    write_fused(hf, tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["model.layers.0.mlp.experts.0.down_proj.weight"] = torch.zeros(32, 24)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"unexpected tensors: model.layers.0.mlp.experts.0.down_proj.weight"):
        load_pretrained(tmp_path)
