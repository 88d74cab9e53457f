"""Hugging Face snapshots: titan_tree and transformers load what the other one wrote, bit for bit."""

import copy
import errno
import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.oracle import hf_model, path_logprobs
from tests.support.snapshots import assert_scores_like, edit_config, same_weights
from titan_tree.errors import UserError
from titan_tree.models.hf import model_from_config, read_weights
from titan_tree.models.hf import save as module
from titan_tree.models.pretrained import build_model, load_pretrained, save_pretrained
from titan_tree.models.settings import MODELS
from titan_tree.models.weights import whole_weights
from titan_tree.scoring.score_trees import tree_logprobs


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def written(request, tmp_path_factory):
    """Returns transformers' model, and the folder of its snapshot in several shards."""
    folder = tmp_path_factory.mktemp("hf")
    model = hf_model(tied=request.param)
    model.save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 1
    return model, folder


@pytest.fixture
def snapshot(written, tmp_path):
    """Returns a copy of the snapshot that a test may change."""
    return shutil.copytree(written[1], tmp_path / "snapshot")


def test_a_snapshot_written_by_transformers_loads(written):
    hf, folder = written
    model = load_pretrained(folder, dtype=torch.float32)
    assert same_weights(model, hf)
    assert_scores_like(model, hf)


def test_weights_load_in_bf16_by_default(written):
    hf, folder = written
    model = load_pretrained(folder)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert same_weights(model, copy.deepcopy(hf).bfloat16())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 30_000, 1])
def test_transformers_loads_a_saved_snapshot(written, tmp_path, dtype, max_shard_bytes):
    _, folder = written
    model = load_pretrained(folder, dtype=dtype)
    save_pretrained(model, tmp_path / "out", max_shard_bytes=max_shard_bytes)
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert again.dtype == dtype
    assert same_weights(model, again)
    assert again.config.rope_parameters["rope_theta"] == 1e4
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert all(file.stat().st_size < max_shard_bytes + 5000 for file in files) or max_shard_bytes == 1
    assert (len(files) == 1) == (max_shard_bytes == 10**9)
    assert same_weights(load_pretrained(tmp_path / "out", dtype=dtype), again)


def test_a_saved_model_loads_back_unchanged(tmp_path):
    model = build_model("qwen3", "debug")
    save_pretrained(model, tmp_path / "out")
    again = load_pretrained(tmp_path / "out", dtype=torch.float32)
    assert again.config == model.config
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))


def test_weights_can_be_read_for_a_model_without_storage(written):
    hf, folder = written
    with torch.device("meta"):
        model = model_from_config(folder)
    parts = read_weights(folder, model, whole_weights(model))
    streamed = {part.parameter: part.values for part in parts}
    assert all(p.is_meta for p in model.parameters())
    assert streamed.keys() == model.state_dict().keys()
    for name, parameter in hf.named_parameters():
        assert torch.equal(streamed[name.removeprefix("model.")], parameter)


def test_a_given_state_dict_is_saved(written, tmp_path):
    model = load_pretrained(written[1], dtype=torch.float32)
    doubled = {name: 2 * tensor for name, tensor in model.state_dict().items()}
    save_pretrained(model, tmp_path / "out", state_dict=doubled)
    again = load_pretrained(tmp_path / "out", dtype=torch.float32)
    assert all(torch.equal(again.state_dict()[name], tensor) for name, tensor in doubled.items())


def test_tokenizer_and_special_tokens_are_copied_from_the_source(written, snapshot, tmp_path):
    (snapshot / "tokenizer.json").write_text("{}")
    (snapshot / "chat_template.jinja").write_text("{{ messages }}")
    edit_config(snapshot, eos_token_id=7)
    save_pretrained(load_pretrained(snapshot), tmp_path / "out", source=snapshot)
    assert (tmp_path / "out/tokenizer.json").read_text() == "{}"
    assert (tmp_path / "out/chat_template.jinja").read_text() == "{{ messages }}"
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 7
    with pytest.raises(UserError, match=r"config.json or tokenizer files, found neither"):
        save_pretrained(load_pretrained(snapshot), tmp_path / "other", source=tmp_path)


OWN_CODE = {
    "configuration_own.py": "from transformers import Qwen3Config as OwnConfig\n",
    "modeling_own.py": "from transformers import Qwen3ForCausalLM as OwnModel\n",
    "tokenization_own.py": """from pathlib import Path
from transformers import PreTrainedTokenizer

class OwnTokenizer(PreTrainedTokenizer):
    vocab_files_names = {"vocab_file": "tiktoken.model"}

    def __init__(self, vocab_file, **options):
        self.vocabulary = Path(vocab_file).read_text().split()
        super().__init__(**options)

    vocab_size = property(lambda self: len(self.vocabulary))

    def get_vocab(self):
        return {token: i for i, token in enumerate(self.vocabulary)}

    def _tokenize(self, text):
        return text.split()

    def _convert_token_to_id(self, token):
        return self.vocabulary.index(token)
""",
}


@pytest.mark.parametrize("implementation", ["native", "transformers"])
def test_exports_of_snapshots_with_code_of_their_own_load(
    snapshot, implementation, tmp_path, monkeypatch, caplog
):
    """An export has the tokenizer's code and files. Its config.json does not name the model's own code."""
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.syspath_prepend(tmp_path / "modules")
    for name, code in OWN_CODE.items():
        (snapshot / name).write_text(code)
    (snapshot / "tiktoken.model").write_text("a b c")
    (snapshot / "additional_chat_templates").mkdir()
    (snapshot / "additional_chat_templates/tool_use.jinja").write_text("{{ tools }}")
    own = {
        "tokenizer_class": "OwnTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]},
    }
    (snapshot / "tokenizer_config.json").write_text(json.dumps(own))
    own = {"AutoConfig": "configuration_own.OwnConfig", "AutoModelForCausalLM": "modeling_own.OwnModel"}
    edit_config(snapshot, auto_map=own)
    for name in ("README.md", "optimizer.pt", ".gitattributes", "trainer_state.json"):
        (snapshot / name).write_text("of the source")
    model = load_pretrained(snapshot, dtype=torch.float32, implementation=implementation)
    assert "auto_map: the snapshot's own code is not run" in caplog.text
    out = tmp_path / "out"
    save_pretrained(model, out, source=snapshot)
    again, info = AutoModelForCausalLM.from_pretrained(out, trust_remote_code=True, output_loading_info=True)
    assert not any(info.values()), info
    assert type(again).__module__ == "transformers.models.qwen3.modeling_qwen3"
    tokenizer = AutoTokenizer.from_pretrained(out, trust_remote_code=True)
    assert tokenizer("c a")["input_ids"] == [2, 0]
    assert tokenizer.chat_template == {"tool_use": "{{ tools }}"}
    names = {file.name for file in out.iterdir()} - {"generation_config.json"}
    assert names == {*OWN_CODE, *("additional_chat_templates", "config.json", "model.safetensors")} | {
        "tiktoken.model",
        "tokenizer_config.json",
    }


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_every_tensor_of_an_export_and_no_more(name, tmp_path, caplog):
    save_pretrained(build_model(name, "debug"), tmp_path / "out", max_shard_bytes=10**6)
    caplog.clear()
    _, info = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(info.values()), info
    assert not caplog.text


def test_both_spellings_of_rope_are_read(snapshot):
    edit_config(snapshot, rope_parameters=..., rope_theta=5e5, rope_scaling=None)
    assert model_from_config(snapshot).config.rope_theta == 5e5
    edit_config(snapshot, rope_theta=..., rope_parameters={"rope_type": "default", "rope_theta": 7e5})
    assert model_from_config(snapshot).config.rope_theta == 7e5


def test_a_tied_model_may_store_its_embedding_twice_if_both_are_equal(tmp_path):
    hf = hf_model(tied=True)
    hf.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, tmp_path / "model.safetensors")
    assert same_weights(load_pretrained(tmp_path, dtype=torch.float32), hf)
    weights["lm_head.weight"][3, 3] += 1
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        load_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type: expected one of qwen3, .*, got gpt2"),
        ({"architectures": ["Qwen3ForTokenClassification"]}, "architectures: expected .*Qwen3ForCausalLM"),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4}},
            "RoPE of type default only",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "RoPE of type default only"),
        ({"rope_parameters": ...}, "missing rope_theta"),
        ({"head_dim": ...}, "missing head_dim"),
        (
            {"attention_bias": True},
            "attention_bias: .* supports null, false, 0 or no such .*, got True",
        ),
        ({"hidden_act": "gelu"}, "hidden_act: .* supports silu only, got 'gelu'"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types: .* full_attention only"),
        (
            {"layer_types": ..., "use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "max_window_layers",
        ),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config: .* null, false, 0"),
        ({"attn_logit_softcapping": 50.0}, 'attn_logit_softcapping: .* got 50.0; set model.impl.* = "auto"'),
        ({"rope_parameters": {"rope_theta": 1e4, "factor": 2.0}}, "RoPE without \\['factor'\\] only"),
        ({"new\nfield" * 99: {"text": "a\nb" * 999}}, "config.json: new.nfield.* only, got .'text': 'a"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: .* RoPE on whole heads only, got 0.5"),
        ({"vocab_size": "61"}, "vocab_size: expected an integer > 0, got '61'"),
        ({"rms_norm_eps": True}, "rms_norm_eps: expected a finite number > 0, got True"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings: expected true or false, got 1"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: expected a divisor"),
        ({"num_hidden_layers": 3}, r"missing tensors: model.layers.2.* and \d+ more"),
        ({"num_hidden_layers": 1}, r"unexpected tensors: model.layers.1.* and \d+ more"),
        ({"intermediate_size": 40}, r"mlp.*: expected shape \(.*40.*\) by config.json, got \(.*48.*\)"),
    ],
)
def test_an_unsupported_config_is_refused(snapshot, changes, message):
    edit_config(snapshot, **changes)
    with pytest.raises(UserError, match=message) as error:
        load_pretrained(snapshot, implementation="native")
    assert "\n" not in str(error.value)
    assert str(snapshot) in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
def test_quantised_weights_are_refused(tmp_path, dtype):
    """Weights that are cast to a float without their scales would be wrong."""
    hf_model(tied=True).save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = weights[name].to(dtype)
    save_file(weights, tmp_path / "model.safetensors")
    with pytest.raises(
        UserError, match=rf"model.safetensors: {name}: expected unquantized weights .* got (I8|F8)"
    ):
        load_pretrained(tmp_path)


@pytest.mark.parametrize("device", ["gpu", "cuda:99"])
def test_a_device_that_the_machine_lacks_is_one_line(snapshot, device):
    with pytest.raises(
        UserError, match=f"^device: expected one of this machine, such as cpu, got {device}: "
    ):
        load_pretrained(snapshot, device=device)


ROPE = {"rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}
OTHER_LAYERS = {
    "yarn": ({"rope_parameters": ROPE | {"rope_type": "yarn"}}, "rope_parameters"),
    "llama3": (
        {"rope_parameters": ROPE | {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}},
        "rope_parameters",
    ),
    "linear": ({"rope_parameters": {**ROPE, "rope_type": "linear"}}, "rope_parameters"),
    "bias": ({"attention_bias": True}, "attention_bias"),
    "activation": ({"hidden_act": "gelu"}, "hidden_act"),
    "window": (
        {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        "layer_types",
    ),
}


@pytest.mark.parametrize("name", OTHER_LAYERS)
def test_what_the_native_model_lacks_runs_with_the_layers_of_transformers(tmp_path, name, caplog):
    """Exactly, in one pass and in partitions, and so does its export."""
    changes, field = OTHER_LAYERS[name]
    hf = hf_model(True, **changes)
    hf.save_pretrained(tmp_path / "in")
    model = load_pretrained(tmp_path / "in", dtype=torch.float32)
    assert f"{field}: titan_tree's Qwen3 supports " in caplog.text
    assert "; therefore, it runs with the layers of transformers" in caplog.text
    save_pretrained(model, tmp_path / "out", source=tmp_path / "in")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    trunk = [3, 1, 4, 1, 5, 9, 2, 6] * 4  # longer than the window, and than the original positions
    paths = [[*trunk, 5, 3, 5], [*trunk, 9, 7], [*trunk[:20], 9, 3, 2], trunk[:11]]
    with torch.no_grad():
        for max_tokens in (None, 12):
            for got, path in zip(tree_logprobs(model, paths, max_tokens), paths, strict=True):
                for theirs in (hf, again):
                    torch.testing.assert_close(got, path_logprobs(theirs, path), rtol=1e-5, atol=1e-5)


def test_what_neither_computes_is_refused_with_both_reasons(snapshot):
    rope = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4}
    edit_config(snapshot, rope_parameters=rope, attention_dropout=0.1)
    with pytest.raises(UserError) as error:
        load_pretrained(snapshot)
    for reason in (
        "RoPE of type default only",
        "; with the layers of transformers: attention_dropout: expected 0 on trees",
    ):
        assert reason in str(error.value)


def test_a_sliding_window_that_no_layer_uses_changes_nothing(written, snapshot):
    edit_config(snapshot, layer_types=..., use_sliding_window=True, sliding_window=8, max_window_layers=2)
    assert_scores_like(load_pretrained(snapshot, dtype=torch.float32), written[0])


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (shutil.rmtree, "no such folder"),
        (lambda f: (shutil.rmtree(f), f.write_text("")), "got a file; name the folder that holds it"),
        (lambda f: (f / "config.json").unlink(), r"config.json: no such file"),
        (
            lambda f: (f / "config.json").rename(f / "adapter_config.json"),
            "an adapter: set lora.adapter to it",
        ),
        (
            lambda f: ((f / "hf").mkdir(), (f / "config.json").rename(f / "hf/config.json")),
            "expected a local Hugging Face snapshot; did you mean .*/hf\\?",
        ),
        (lambda f: (f / "config.json").write_text("{"), r"config.json: broken JSON at character 2"),
        (lambda f: (f / "config.json").write_text("[]"), r"config.json: expected a JSON object, got a list"),
        (lambda f: (f / "model.safetensors.index.json").unlink(), "expected model.safetensors or"),
        (lambda f: (f / "model.safetensors.index.json").write_text("{}"), "expected a table weight_map"),
        (lambda f: min(f.glob("*.safetensors")).unlink(), "-00001-of-.*complete the download"),
        (lambda f: _truncate(min(f.glob("*.safetensors"))), "-00001-of-.*not a complete safetensors file"),
    ],
)
def test_a_damaged_snapshot_is_refused_in_one_line(snapshot, broken, message):
    broken(snapshot)
    with pytest.raises(UserError, match=message) as error:
        load_pretrained(snapshot)
    assert "\n" not in str(error.value)


def test_a_failed_save_leaves_nothing_behind(tmp_path, monkeypatch):
    """The disk fills up at the second shard. Afterwards, the save works."""
    model = build_model("qwen3", "debug")
    written = []

    def full_disk(tensors, file, **options):
        if written:
            raise OSError(errno.ENOSPC, "No space left on device")
        save_file(tensors, file, **options)
        written.append(file)

    monkeypatch.setattr(module, "save_file", full_disk)
    with pytest.raises(UserError, match="No space left on device"):
        save_pretrained(model, tmp_path / "out", max_shard_bytes=100_000)
    assert written
    assert list(tmp_path.iterdir()) == []
    monkeypatch.undo()
    save_pretrained(model, tmp_path / "out", max_shard_bytes=100_000)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_existing_snapshot_is_never_overwritten(snapshot):
    before = {file: file.read_bytes() for file in snapshot.iterdir()}
    with pytest.raises(UserError, match="exists already"):
        save_pretrained(build_model("qwen3", "debug"), snapshot)
    assert {file: file.read_bytes() for file in snapshot.iterdir()} == before


def _truncate(file):
    file.write_bytes(file.read_bytes()[:-100])
