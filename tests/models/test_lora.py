"""LoRA against PEFT on every path alone: log-probs, gradients of factors, files, merged weights."""

import copy
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.hf_families import hf_family, hf_logprobs
from tests.support.oracle import hf_model, hybrid_model, tree_model
from titan_tree import adapters_off, load_adapter, load_pretrained, save_adapter, save_pretrained
from titan_tree.components.lora import LoRA
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.parallelize import parallelize, weight_shards
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.lora.adapters import adaptable, add_lora, init_lora
from titan_tree.models.lora.peft import read_adapter
from titan_tree.models.pretrained import build_model
from titan_tree.models.transformers import TransformersModel
from titan_tree.models.weights import whole_weights
from titan_tree.scoring.score_trees import tree_logprobs
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

TRUNK = [7, 3, 9, 40, 12, 5, 33, 2, 18, 26]
PATHS = [[*TRUNK, 4, 8, 15], [*TRUNK, 4, 8, 16, 23, 42], [*TRUNK[:6], 11, 13], TRUNK, [*TRUNK[:6], 11, 14, 1]]
EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
# A model of transformers, and what PEFT adapts.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3": (lambda: hf_model(True), {"target_modules": "all-linear"}),
    "qwen3_moe": (
        lambda: hf_model(False, kind="Qwen3Moe"),
        {"target_modules": ["q_proj", "o_proj"], "target_parameters": EXPERTS, "use_rslora": True},
    ),
    "one expert weight": (
        lambda: hf_model(False, kind="Qwen3Moe"),
        {"target_modules": ["v_proj"], "target_parameters": EXPERTS[:1], "layers_to_transform": [1]},
    ),
    "qwen3_5": (lambda: hybrid_model(True), {"target_modules": "all-linear"}),
    "llama": (lambda: hf_family("llama"), {"target_modules": ["q_proj", "down_proj"]}),
    # Experts of transformers. Those of gpt-oss have biases, and their weights are transposed.
    "mixtral": (lambda: hf_family("mixtral"), {"target_modules": ["q_proj"], "target_parameters": EXPERTS}),
    "gpt_oss": (
        lambda: hf_family("gpt_oss", intermediate_size=32),  # a square weight
        {"target_modules": ["o_proj"], "target_parameters": EXPERTS},
    ),
    "one weight of gpt_oss": (
        lambda: hf_family("gpt_oss"),
        {"target_modules": ["o_proj"], "target_parameters": EXPERTS[1:]},
    ),
}


def with_peft(name: str, **changes: Any) -> tuple[Any, PeftModel]:
    """Returns a model of transformers without and with adapters, whose factors are all random."""
    make, options = CASES[name]
    base = make()
    peft = get_peft_model(copy.deepcopy(base), LoraConfig(**{"r": 4, "lora_alpha": 12} | options | changes))
    with torch.no_grad():
        for key, parameter in peft.named_parameters():
            if "lora_" in key:
                parameter.normal_(std=0.2)
    return base, peft.eval()


def ours(base: Any) -> Any:
    """Returns titan_tree's model with the weights of ``base``, which is not usable afterwards."""
    return tree_model(base) if base.config.model_type.startswith("qwen") else TransformersModel(base)


def by_peft(name: str, factor: Tensor, all_names: set[str]) -> tuple[str, Tensor]:
    """Returns PEFT's name and shape of a factor, or of its gradient, written down independently."""
    module, weight, letter = re.fullmatch(r"(.+)\.(\w+)_lora_([AB])", name).groups()
    module = re.sub(r"^layers\.(\d+)\.layer\.", r"layers.\1.", module)
    if weight != "weight":
        both = name.replace("gate_up_proj", "down_proj") in all_names
        module += ".base_layer" if weight == "gate_up_proj" and both else ""
        num_experts, rows, columns = factor.shape
        matrix = torch.zeros(num_experts * rows, columns) if letter == "A" else None
        if matrix is None:
            matrix = torch.zeros(rows, columns * num_experts)
        for e in range(num_experts):
            if letter == "A":
                matrix[e * rows : (e + 1) * rows] = factor[e]
            else:
                matrix[:, e::num_experts] = factor[e]
        factor = matrix
    return f"base_model.model.model.{module}.lora_{letter}.default.weight", factor


@pytest.mark.parametrize("name", CASES)
def test_trees_equal_paths_with_peft(name: str, tmp_path: Path) -> None:
    """In one pass and in partitions. Files of PEFT are read, and written again as they were."""
    base, peft = with_peft(name)
    peft.save_pretrained(tmp_path / "peft")
    logprobs = [hf_logprobs(peft, path) for path in PATHS]
    loss = -torch.cat(logprobs).sum() / sum(map(len, logprobs))
    loss.backward()
    want = {key: p.grad for key, p in peft.named_parameters() if p.grad is not None}
    plain = [hf_logprobs(base, path).detach() for path in PATHS]

    model = ours(base)
    load_adapter(model, tmp_path / "peft")
    # A Gated DeltaNet in fp32 has gradients with errors of 4e-5, in transformers as well.
    tolerance = 1e-4 if name == "qwen3_5" else 2e-5
    for max_tokens in (None, 6):
        with torch.no_grad():
            scores = tree_logprobs(model, PATHS, max_tokens)
            with adapters_off(model):
                off = tree_logprobs(model, PATHS, max_tokens)
        for got, expected in ((scores, logprobs), (off, plain)):
            for mine, theirs in zip(got, expected, strict=True):
                torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-5)
        partitioner = None if max_tokens is None else TreePartitioner("redundancy_free", max_tokens)
        step = TreeStep(model, TreeLoss("sft", reduction="token_mean"), partitioner=partitioner)
        prepared = step.prepare([[TokenTree.from_paths([TokenPath(path) for path in PATHS])]])
        assert (prepared.counts.forwards > 1) == (max_tokens is not None)
        model.zero_grad()
        torch.testing.assert_close(step.run(prepared).loss, loss.detach(), rtol=1e-5, atol=0)
        found = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
        got = dict(by_peft(key, grad, set(found)) for key, grad in found.items())
        assert got.keys() == want.keys()
        for key, gradient in want.items():
            assert (got[key] - gradient).norm() <= tolerance * gradient.norm(), key
    assert any((a - b).abs().max() > 0.1 for a, b in zip(logprobs, plain, strict=True))

    save_adapter(model, tmp_path / "ours")
    files = [load_file(tmp_path / each / "adapter_model.safetensors") for each in ("peft", "ours")]
    assert files[0].keys() == files[1].keys()
    assert all(torch.equal(files[0][key], files[1][key]) for key in files[0])


@pytest.mark.parametrize("name", CASES)
def test_peft_computes_the_same_with_our_files(name: str, tmp_path: Path) -> None:
    """Both with the adapter on the base, and with the merged weights."""
    base, peft = with_peft(name)
    peft.save_pretrained(tmp_path / "peft")
    base.save_pretrained(tmp_path / "base")
    model = load_pretrained(tmp_path / "base", torch.float32)
    load_adapter(model, tmp_path / "peft")
    # The adapter of PEFT would hide a wrong config of ours.
    shutil.rmtree(tmp_path / "peft")
    save_adapter(model, tmp_path / "ours", source=tmp_path / "base")
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == str(tmp_path / "base")
    again = PeftModel.from_pretrained(base, tmp_path / "ours")
    save_pretrained(model, tmp_path / "merged")
    merged = load_pretrained(tmp_path / "merged", torch.float32)
    assert merged.lora is None
    with torch.no_grad():
        for path, score in zip(PATHS, tree_logprobs(merged, PATHS), strict=True):
            want = hf_logprobs(peft, path)
            torch.testing.assert_close(hf_logprobs(again, path), want, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(score, want, rtol=1e-4, atol=1e-4)


def test_factors_start_as_in_peft_and_do_not_depend_on_shards() -> None:
    model = build_model("qwen3_moe", "debug")
    add_lora(model, LoRA(rank=4, targets=("q_proj", "experts.down_proj")))
    init_lora(whole_weights(model), seed=3)
    a = model.get_parameter("layers.0.self_attn.q_proj.weight_lora_A")
    experts = model.get_parameter("layers.1.mlp.experts.down_proj_lora_A")
    for factor, size_in in ((a, 128), (experts, 96)):
        bound = size_in**-0.5  # kaiming_uniform_ with a = sqrt(5)
        assert 0.98 * bound < factor.abs().max() <= bound
        assert factor.std().item() == pytest.approx(bound / 3**0.5, rel=0.1)
    assert not any(p.any() for name, p in model.named_parameters() if name.endswith("_lora_B"))
    shard = whole_weights(model)["layers.0.self_attn.q_proj.weight_lora_A"]
    part = shard._replace(values=torch.empty(2, 64), start=(1, 64))
    init_lora({"layers.0.self_attn.q_proj.weight_lora_A": part}, seed=3)
    assert torch.equal(part.values, a[1:3, 64:])


def test_default_targets_are_linears_without_routers_and_experts() -> None:
    model = build_model("qwen3_5_moe", "debug")
    names = {name.split(".", 2)[2] for name in adaptable(model)}
    delta_net = {
        f"linear_attn.{name}" for name in ("in_proj_qkv", "in_proj_z", "in_proj_a", "in_proj_b", "out_proj")
    }
    attention = {f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "o_proj")}
    shared = {f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")}
    experts = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    assert names == delta_net | attention | shared | experts
    add_lora(model, LoRA(rank=2))
    trained = [name.split(".", 2)[2] for name, p in model.named_parameters() if p.requires_grad]
    assert {name.removesuffix(f".weight_lora_{x}") for name in trained for x in "AB" if x == name[-1]} == (
        names - experts
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"activation_checkpoint": "full"},
        pytest.param({"compile": True, "activation_checkpoint": "selective"}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_compiled_and_checkpointed_models_compute_the_same(options: Any, without_codegen: None) -> None:
    lora = LoRA(rank=4, targets=("q_proj", "experts.gate_up_proj"))
    tree = TokenTree.from_paths([TokenPath(path) for path in PATHS])
    results = []
    for each in ({}, options):
        model = build_model("qwen3_moe", "debug", num_hidden_layers=1)
        add_lora(model, lora, torch.float32)
        parallelize(model, OneRank(), dtype=torch.float32, **each)
        model.init_weights(0, weight_shards(model))
        init_lora(weight_shards(model), 0)
        with torch.no_grad():
            for name, p in model.named_parameters():
                if name.endswith("_lora_B"):
                    p.copy_(torch.linspace(-0.1, 0.1, p.numel()).view_as(p))
        step = TreeStep(model, TreeLoss())
        loss = step.run(step.prepare([[tree]])).loss
        with torch.no_grad():
            on = torch.cat(tree_logprobs(model, PATHS))
            with adapters_off(model):
                off = torch.cat(tree_logprobs(model, PATHS))
            again = torch.cat(tree_logprobs(model, PATHS))
        torch.testing.assert_close(again, on, rtol=0, atol=0)
        assert (on - off).abs().max() > 1e-3
        results.append([loss, on, off, *(p.grad for p in model.parameters() if p.requires_grad)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-6)


def test_frozen_weights_have_the_compute_dtype_and_cost_less() -> None:
    trained = build_model("qwen3", "debug")
    frozen = build_model("qwen3", "debug")
    add_lora(frozen, LoRA(rank=1, targets=("q_proj",)), torch.bfloat16)
    parallelize(frozen, OneRank(), dtype=torch.bfloat16)
    dtypes = {name: p.dtype for name, p in frozen.named_parameters()}
    assert all(
        dtype == (torch.float32 if "_lora_" in name else torch.bfloat16) for name, dtype in dtypes.items()
    )
    full, cheap = trained.costs(), frozen.costs()
    factors = 2 * (128 + 128)  # two layers, rank 1
    assert cheap.flops_per_token == full.flops_per_token * 4 // 6 + 6 * factors
    assert cheap.flops_per_edge == full.flops_per_edge * 4 // 6


@pytest.mark.parametrize(
    ("targets", "message"),
    [
        (("q_pro",), "did you mean 'q_proj'"),
        (("gate_up_proj",), "did you mean 'experts.gate_up_proj'"),
        (("gate",), "unknown target of LoRA (lora.targets) 'gate'"),
    ],
)
def test_wrong_targets_are_refused(targets: tuple[str, ...], message: str) -> None:
    with pytest.raises(UserError, match=re.escape(message)):
        add_lora(build_model("qwen3_moe", "debug"), LoRA(rank=2, targets=targets))


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma4_text", "glm4_moe", "minimax_m2", "qwen3_next"])
def test_updates_of_zero_change_no_experts_of_transformers(name: str) -> None:
    options = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16, "enable_moe_block": True}
    hf = hf_family(name, **options if name == "gemma4_text" else {})
    plain, model = TransformersModel(copy.deepcopy(hf)), TransformersModel(hf)
    add_lora(model, LoRA(rank=2, targets=("experts.gate_up_proj", "experts.down_proj")))
    init_lora(whole_weights(model), 0)
    with torch.no_grad():
        for got, want in zip(tree_logprobs(model, PATHS), tree_logprobs(plain, PATHS), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type: expected 'LORA', got 'IA3'"),
        ({"use_dora": True}, "use_dora: expected an adapter that is plain LoRA"),
        (
            {"rank_pattern": {"q_proj": 2}},
            "got 3 for layers.0.mlp.down_proj and 6 for layers.0.self_attn.q_proj",
        ),
        (
            {"alpha_pattern": {"model.layers.1.mlp.up_proj": 6}},
            "expected one factor alpha / rank for all updates, got 1.5 for layers.1.mlp.up_proj and 3 for ",
        ),
        ({"alpha_pattern": {"(a+)+": 6}}, "alpha_pattern: expected a table from names of modules to numbers"),
        (
            {"rank_pattern": {"q_proj": 2.5}},
            "rank_pattern: expected a table from names of modules to numbers",
        ),
        (
            {"rank_pattern": [3]},
            "rank_pattern: expected a table from names of modules to numbers > 0, got [3]",
        ),
        ({"target_parameters": 5}, "target_parameters: expected a list of names, got 5"),
        ({"bias": "lora_only"}, "bias: expected 'none', got 'lora_only'"),
        ({"lora_dropout": "0.1"}, "lora_dropout: expected a number from 0 to 1, got '0.1'"),
        ({"alora_invocation_tokens": [5]}, "alora_invocation_tokens: expected an adapter that is plain LoRA"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights: expected an initialization that keeps"),
        ({"r": 8}, "expected a tensor of shape (8, 48), got (4, 48)"),
        ({"r": 0}, "r: expected an integer > 0, got 0"),
        ({"target_modules": ["q_proj"]}, "does not name it, got factors of it; save the adapter again"),
        ({"exclude_modules": ["up_proj"]}, "does not name it, got factors of it; save the adapter again"),
        ({"use_rslora": "false"}, "use_rslora: expected true or false, got 'false'"),
        ({"layers_to_transform": 0}, "does not name it, got factors of it; save the adapter again"),
        ({"layers_to_transform": [0, None]}, "does not name it, got factors of it; save the adapter again"),
    ],
)
def test_adapters_that_are_more_than_lora_are_refused(
    changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    _, peft = with_peft("qwen3")
    peft.save_pretrained(tmp_path)
    path = tmp_path / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=re.escape(message)):
        load_adapter(tree_model(hf_model(True)), tmp_path)


def test_dropout_of_an_adapter_is_taken_for_0(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """As in PEFT's evaluation. A line says once that further training has none either."""
    _, peft = with_peft("qwen3", lora_dropout=0.05)
    peft.save_pretrained(tmp_path / "in")
    model = tree_model(hf_model(True))
    for _ in range(2):
        read_adapter(model, tmp_path / "in")
    load_adapter(model, tmp_path / "in")
    assert caplog.text.count("lora_dropout: 0.05 is taken for 0, also in further training") == 1
    with torch.no_grad():
        for got, path in zip(tree_logprobs(model, PATHS), PATHS, strict=True):
            torch.testing.assert_close(got, hf_logprobs(peft, path), rtol=1e-5, atol=1e-5)
    save_adapter(model, tmp_path / "out")
    assert json.loads((tmp_path / "out/adapter_config.json").read_text())["lora_dropout"] == 0


def test_factors_of_single_experts_are_refused(tmp_path: Path) -> None:
    """vLLM reads such adapters. PEFT, which adapts fused experts as parameters, does not."""
    _, peft = with_peft("qwen3_moe")
    peft.save_pretrained(tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    key = "base_model.model.model.layers.0.mlp.experts.3.gate_proj.lora_A.weight"
    save_file(load_file(file) | {key: torch.zeros(4, 32)}, file)
    with pytest.raises(
        UserError, match=r"qwen3_moe; experts need PEFT's target_parameters, with all experts"
    ):
        load_adapter(tree_model(hf_model(False, kind="Qwen3Moe")), tmp_path)


def test_adapters_of_other_models_are_refused(tmp_path: Path) -> None:
    _, peft = with_peft("qwen3")
    peft.save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"does the adapter belong to this model\?"):
        load_adapter(build_model("qwen3", "debug"), tmp_path)
    file = tmp_path / "adapter_model.safetensors"
    tensors = load_file(file)
    key = "base_model.model.model.layers.1.mlp.up_proj.lora_B.weight"
    save_file({name: tensor for name, tensor in tensors.items() if name != key}, file)
    with pytest.raises(UserError, match=r"lora_B of layers.1.mlp.up_proj: expected .* got none"):
        load_adapter(tree_model(hf_model(True)), tmp_path)
    save_file(tensors | {key.replace("up_proj", "side_proj"): tensors[key].clone()}, file)
    with pytest.raises(UserError, match=r"side_proj.* expected a factor of a linear of qwen3"):
        load_adapter(tree_model(hf_model(True)), tmp_path)
    save_file(tensors | {key.replace("model.layers", "layers"): tensors[key].clone()}, file)
    with pytest.raises(UserError, match=r"expected every factor once; another name holds it, too"):
        load_adapter(tree_model(hf_model(True)), tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda factor: factor.index_fill(0, torch.tensor(3), torch.nan), "expected finite numbers, got NaN"),
        (lambda factor: factor / 0, "expected finite numbers, got NaN or infinity"),
        (
            lambda factor: factor.to(torch.int8),
            "expected numbers of the type float32, bfloat16 or float16, got int8",
        ),
        (lambda factor: factor.to(torch.float8_e4m3fn), "or float16, got float8_e4m3fn"),
        (lambda factor: factor[None], "expected a tensor of shape (48, 4), got (1, 48, 4)"),
    ],
    ids=["NaN", "infinity", "int8", "float8", "shape"],
)
def test_factors_with_wrong_numbers_are_refused(change: Any, message: str, tmp_path: Path) -> None:
    _, peft = with_peft("qwen3")
    peft.save_pretrained(tmp_path)
    file, module = tmp_path / "adapter_model.safetensors", "layers.1.mlp.up_proj"
    tensors = load_file(file)
    key = f"base_model.model.model.{module}.lora_B.weight"
    save_file(tensors | {key: change(tensors[key])}, file)
    with pytest.raises(UserError, match=re.escape(message)) as caught:
        load_adapter(tree_model(hf_model(True)), tmp_path)
    assert (module if "shape" in message else key) in str(caught.value)


def test_a_folder_without_an_adapter_names_one_below(tmp_path: Path) -> None:
    model = tree_model(hf_model(True))
    missing, run = tmp_path / "missing", tmp_path / "run"
    with pytest.raises(UserError, match=f"^{missing}: no such folder; expected an adapter of PEFT$"):
        load_adapter(model, missing)
    (run / "adapter").mkdir(parents=True)
    (run / "adapter" / "adapter_config.json").touch()
    with pytest.raises(UserError) as error:
        load_adapter(model, run)
    expected = f"no such file; expected an adapter of PEFT; did you mean {run}/adapter?"
    assert str(error.value) == f"{run}/adapter_config.json: {expected}"


def test_a_smaller_rank_is_filled_with_zeros_which_stay(tmp_path: Path) -> None:
    """Updates of two ranks and one factor alpha / rank, as PEFT writes them for fused experts."""
    patterns = {"rank_pattern": {r".*\.down_proj": 8}, "alpha_pattern": {"down_proj": 24}}
    base, peft = with_peft("qwen3", **patterns)
    peft.save_pretrained(tmp_path)
    model = tree_model(base)
    load_adapter(model, tmp_path)
    assert model.lora == LoRA(rank=8, alpha=24.0, targets=model.lora.targets)
    step = TreeStep(model, TreeLoss("sft", reduction="token_mean"))
    step.run(step.prepare([[TokenTree.from_paths([TokenPath(path) for path in PATHS])]]))
    for path, score in zip(PATHS, tree_logprobs(model, PATHS), strict=True):
        torch.testing.assert_close(score, hf_logprobs(peft, path), rtol=1e-5, atol=1e-5)
    for name, p in model.named_parameters():
        if "_lora_" in name and "down_proj" not in name:
            for values in (p.detach(), p.grad):
                rows = values if name.endswith("A") else values.T
                assert rows[:4].any()
                assert not rows[4:].any()


def test_settings_may_be_integers(tmp_path: Path) -> None:
    model = build_model("qwen3", "debug")
    add_lora(model, LoRA(rank=2, alpha=4))
    init_lora(whole_weights(model), 0)
    save_adapter(model, tmp_path / "adapter")
    again = build_model("qwen3", "debug")
    load_adapter(again, tmp_path / "adapter")
    assert again.lora == model.lora
    assert json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["lora_alpha"] == 4
