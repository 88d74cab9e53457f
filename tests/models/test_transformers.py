"""Models of transformers on trees, against the unmodified models on every path alone."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch._dynamo.utils import counters
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from tests.support.cases import for_each, slow_except
from tests.support.hf_families import VOCAB, hf_family, hf_logprobs, known_config
from titan_tree.components.lora import is_factor
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.distributed.gradient_sync import cast_weights
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.parallelize import parallelize
from titan_tree.distributed.settings import ParallelConfig
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.pretrained import load_pretrained, save_pretrained
from titan_tree.models.settings import LoRAConfig, ModelConfig
from titan_tree.models.transformers import TransformersModel
from titan_tree.models.transformers.support import REASONS, SUPPORTED, check_supported
from titan_tree.run.model_setup import build_parallel_model
from titan_tree.run.settings import TrainingConfig
from titan_tree.scoring.score_trees import tree_logprobs
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree


def random_paths() -> list[list[int]]:
    """Returns paths that branch twice and are longer than the windows. One ends where another goes on."""
    draw = random.Random(0)

    def tokens(number: int) -> list[int]:
        return [draw.randrange(VOCAB) for _ in range(number)]

    trunk = tokens(12)
    stem = trunk + tokens(5)
    return [stem + tokens(6), stem + tokens(3), stem, trunk + tokens(9), trunk[:7] + tokens(8)]


PATHS = random_paths()
# Parameters of Gated DeltaNet whose gradients both implementations compute with errors of up to 2e-5 in fp32.
DECAYS = ("A_log", "dt_bias")
BIASED = {"bailing_hybrid", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "nemotron_h"}  # of routers, in fp32
# Parameters that transformers keeps in fp32. ``cast_weights`` and FSDP2 cast all of them.
FP32: dict[str, tuple[str, ...]] = {
    "bailing_hybrid": ("conv1d.weight", "forget_gate.A_log", "forget_gate.dt_bias")
}
if Version(transformers.__version__) >= Version("5.24"):
    FP32 |= {name: (*FP32.get(name, ()), ".gate.weight") for name in (*BIASED, "kimi_linear")}
    FP32["kimi_linear"] += ("forget_gate.dt_bias",)
# Other families have the same parts.
SLOW = {
    *("granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "kimi_linear", "lfm2_moe"),
    *("lfm3", "olmo_hybrid"),
}


def oracle(model: PreTrainedModel) -> tuple[list[Tensor], Tensor, dict[str, Tensor]]:
    """Returns log-probs of all paths, the mean loss, and its gradients by parameter, path by path."""
    model.zero_grad()
    logprobs = [hf_logprobs(model, path) for path in PATHS]
    loss = -torch.cat(logprobs).sum() / sum(map(len, logprobs))
    loss.backward()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return [each.detach() for each in logprobs], loss.detach(), gradients


@pytest.mark.parametrize("name", slow_except(SUPPORTED - SLOW, sorted(SUPPORTED)))
def test_trees_equal_paths_through_the_unmodified_model(name: str) -> None:
    hf = hf_family(name)
    logprobs, loss, gradients = oracle(hf)
    names = {id(parameter): name for name, parameter in hf.named_parameters()}
    model = TransformersModel(hf)
    for max_tokens in (None, 12):
        for got, want in zip(tree_logprobs_of(model, max_tokens), logprobs, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5, check_dtype=False)
        partitioner = None if max_tokens is None else TreePartitioner("redundancy_free", max_tokens)
        step = TreeStep(model, TreeLoss("sft", reduction="token_mean"), partitioner=partitioner)
        prepared = step.prepare([[TokenTree.from_paths([TokenPath(path) for path in PATHS])]])
        assert (prepared.counts.forwards > 1) == (max_tokens is not None)
        torch.testing.assert_close(step.run(prepared).loss, loss, rtol=1e-5, atol=0, check_dtype=False)
        found = {names[id(p)]: p.grad for p in model.parameters() if p.grad is not None}
        assert found.keys() == gradients.keys()
        for key, want in gradients.items():
            assert (found[key] - want).norm() <= (1e-4 if key.endswith(DECAYS) else 1e-5) * want.norm(), key
        model.zero_grad()


def tree_logprobs_of(model: TransformersModel, max_tokens: int | None) -> list[Tensor]:
    with torch.no_grad():
        return tree_logprobs(model, PATHS, max_tokens)


@pytest.mark.parametrize(
    "name",
    [
        *("gpt_oss", "deepseek_v3", "gemma3_text", "lfm2", "llama", "qwen3_5_text", "qwen3_next"),
        *slow_except((), ("bailing_hybrid", "granitemoe_swa", "kimi_linear", "lfm3", "nemotron_h")),
    ],
)
def test_branches_do_not_leak(name: str) -> None:
    """Other tokens in one branch do not change its siblings."""
    model = TransformersModel(hf_family(name))
    trunk, branch, sibling = PATHS[0][:12], PATHS[0][12:], PATHS[3][12:]
    for max_tokens in (None, 12):
        with torch.no_grad():
            before, after = (
                tree_logprobs(model, [trunk + other, trunk + sibling], max_tokens)
                for other in (branch, branch[::-1])
            )
        assert not torch.allclose(before[0], after[0], atol=1e-2)
        torch.testing.assert_close(before[1], after[1], rtol=0, atol=1e-6)


@pytest.mark.parametrize("policy", ["full", "selective"])
@pytest.mark.parametrize(
    "name",
    slow_except(
        ("llama", "gpt_oss", "deepseek_v3", "qwen3_5_text"),
        ["llama", "gpt_oss", "deepseek_v3", "nemotron_h", "qwen3_5_text"],
    ),
)
def test_checkpointed_layers_give_the_same_gradients(name: str, policy: Any) -> None:
    trees = [[TokenTree.from_paths([TokenPath(path) for path in PATHS])]]
    gradients = []
    for activation_checkpoint in ("none", policy):
        model = TransformersModel(hf_family(name))
        parallelize(model, OneRank(), dtype=torch.float32, activation_checkpoint=activation_checkpoint)
        step = TreeStep(model, TreeLoss(), partitioner=TreePartitioner("redundancy_free", 12))
        step.run(step.prepare(trees))
        gradients.append([p.grad for p in model.parameters()])
    for got, want in zip(*gradients, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-7)


@pytest.mark.usefixtures("without_codegen")
@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("kimi_linear", {"mlp_layer_types": ["dense", "dense"]}),  # the loop over experts does not compile
        ("lfm2", {}),
        ("llama", {}),
        ("nemotron_h", {"layer_types": ["linear_attention", "mlp", "full_attention"]}),
        ("qwen3_5_text", {}),
    ],
)
def test_compiled_layers_share_their_graphs(name: str, changes: dict[str, Any]) -> None:
    torch._dynamo.reset()
    trees = [[TokenTree.from_paths([TokenPath(path) for path in PATHS])]]
    eager, compiled = (TransformersModel(hf_family(name, **changes)) for _ in range(2))
    parallelize(compiled, OneRank(), dtype=torch.float32, compile=True)
    graphs = []
    for max_tokens in (None, 12, 9, 14):
        partitioner = None if max_tokens is None else TreePartitioner("redundancy_free", max_tokens)
        steps = [TreeStep(model, TreeLoss(), partitioner=partitioner) for model in (eager, compiled)]
        losses = [step.run(step.prepare(trees)).loss for step in steps]
        torch.testing.assert_close(*losses, rtol=1e-6, atol=0)
        for got, want in zip(compiled.parameters(), eager.parameters(), strict=True):
            assert (got.grad - want.grad).norm() <= 1e-5 * want.grad.norm()
            got.grad = want.grad = None
        graphs.append(counters["stats"]["unique_graphs"])
    assert graphs[0] > 0
    assert graphs[-1] == graphs[-2]


@for_each("name", sorted(REASONS))
def test_models_that_cannot_run_on_trees_are_refused(name: str) -> None:
    config = known_config(name)
    with pytest.raises(UserError, match=f"^here: model_type: {name} cannot run on trees: "):
        check_supported(config, "here")


@for_each(
    ("name", "changes", "message"),
    [
        ("gpt2", {}, "model_type: gpt2 has not been tested on trees; expected one of bailing_hybrid, "),
        ("llama", {"attention_dropout": 0.1}, "attention_dropout: expected 0 on trees, got 0.1; set it to 0"),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise: expected 0 on trees, got 0.1"),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, "expected unquantized weights"),
        ("phi3", {"resid_pdrop": 0.1}, "resid_pdrop: expected 0 on trees, got 0.1; set it to 0"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention: expected false"),
        ("qwen3", {"layer_types": ["chunked_attention"]}, "layer_types: only full_attention and sliding_att"),
        ("qwen3", {"layer_types": ["linear_attention"]}, "only full_attention and sliding_attention can run"),
        (
            "qwen3_next",
            {"hidden_act": "gelu"},
            "hidden_act: expected silu, which the convolutions of qwen3_n",
        ),
        ("gemma4_text", {"num_kv_shared_layers": 2}, "num_kv_shared_layers: only models whose layers have"),
    ],
)
def test_wrong_configs_are_refused(name: str, changes: dict[str, Any], message: str) -> None:
    config = AutoConfig.for_model(name)
    for key, value in changes.items():
        setattr(config, key, value)
    with pytest.raises(UserError, match=message):
        check_supported(config, "here")


@pytest.mark.parametrize(
    "name",
    [
        *("llama", "gpt_oss", "deepseek_v3", "qwen3_moe", "gemma3_text", "qwen3_next"),
        *slow_except((), ("bailing_hybrid", "granitemoe_swa", "kimi_linear", "lfm2", "lfm3", "nemotron_h")),
    ],
)
def test_snapshots_go_in_and_out(name: str, tmp_path: Path) -> None:
    hf = hf_family(name)
    hf.save_pretrained(tmp_path / "in")
    model = load_pretrained(tmp_path / "in", torch.float32, implementation="transformers")
    want = hf_logprobs(hf, PATHS[0]).detach()
    torch.testing.assert_close(tree_logprobs(model, [PATHS[0]])[0], want, rtol=1e-5, atol=1e-5)
    save_pretrained(model, tmp_path / "out")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "out", attn_implementation="eager")
    for (key, ours), (_, theirs) in zip(
        sorted(again.state_dict().items()), sorted(hf.state_dict().items()), strict=True
    ):
        assert torch.equal(ours, theirs), key
    names = [{*safe_open(tmp_path / each / "model.safetensors", "pt").keys()} for each in ("in", "out")]
    assert names[0] == names[1]


def test_broken_snapshots_are_one_line(tmp_path: Path) -> None:
    folder = tmp_path / "mistral"
    hf_family("mistral").save_pretrained(folder)
    with pytest.raises(UserError, match=r"^recurrence: expected backend 'auto' for a mistral model, which"):
        load_pretrained(folder, recurrence="triton")
    config = (folder / "config.json").read_text()
    (folder / "config.json").write_text(config.replace('"mistral"', '"mistrall"'))
    with pytest.raises(
        UserError, match="model type `mistrall` but Transformers does not recognize this arch"
    ):
        load_pretrained(folder)
    (folder / "config.json").write_text(config)
    weights = load_file(folder / "model.safetensors")
    removed = weights.pop("model.norm.weight")
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(UserError, match=r"mistral: missing tensors: model\.norm\.weight; do weights and"):
        load_pretrained(folder)
    save_file(
        {**weights, "model.norm.weight": removed * torch.nan}, folder / "model.safetensors", {"format": "pt"}
    )
    with pytest.raises(UserError, match=r"mistral: model\.norm\.weight: expected finite weights"):
        load_pretrained(folder)
    (folder / "model.safetensors").write_bytes(b"1234")
    with pytest.raises(UserError, match=r"mistral: transformers cannot load it: "):
        load_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"mistral: expected model.safetensors or "):
        load_pretrained(folder)


def test_fields_that_an_architecture_ignores_change_nothing() -> None:
    hf = hf_family("mistral", logit_scale=0.3, logits_scaling=7.0, final_logit_softcapping=1.0)
    want = hf_logprobs(hf, PATHS[0]).detach()
    got = tree_logprobs(TransformersModel(hf), [PATHS[0]])[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("granitemoehybrid", {"time_step_limit": (0.2, 1.0)}),
        pytest.param("nemotron_h", {"time_step_min": 0.2}, marks=pytest.mark.slow),
    ],
)
def test_time_steps_stay_within_their_limits(name: str, limits: dict[str, Any]) -> None:
    hf = hf_family(name, **limits)
    want, other = (hf_logprobs(model, PATHS[0]).detach() for model in (hf, hf_family(name)))
    assert (want - other).abs().max() > 1e-2
    got = tree_logprobs(TransformersModel(hf), [PATHS[0]])[0]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_layers_that_only_mask_their_window_are_refused() -> None:
    window = {"use_sliding_window": True, "max_window_layers": 1, "sliding_window": 6}
    with pytest.raises(UserError, match="layer 0 has a sliding window of 6 tokens, but asks its"):
        TransformersModel(hf_family("qwen2_moe", **window))


@pytest.mark.parametrize("name", ["gpt_oss", "qwen3_5_text"])
def test_models_can_be_copied(name: str) -> None:
    model = TransformersModel(hf_family(name))
    again = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    want = hf_logprobs(hf_family(name), PATHS[0]).detach()
    torch.testing.assert_close(tree_logprobs(again, [PATHS[0]])[0], want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["deepseek_v3", "gemma3_text"])
def test_checkpointed_layers_load_their_constants(name: str, tmp_path: Path) -> None:
    """Also from a snapshot of another dtype, which transformers would give other constants."""
    hf = hf_family(name)
    hf.to(torch.bfloat16).save_pretrained(tmp_path)
    config, loaded = ModelConfig(hf_path=str(tmp_path)), []
    for policy in ("none", "full"):
        training = TrainingConfig(activation_checkpoint=policy, dtype="float32")
        loaded.append(build_parallel_model(config, training, ParallelConfig(), OneRank()))
    want = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, attn_implementation="eager")
    expected = hf_logprobs(want, PATHS[0]).detach()
    for model in loaded:
        torch.testing.assert_close(tree_logprobs(model, [PATHS[0]])[0], expected, rtol=1e-5, atol=1e-5)


def test_the_attention_function_answers_other_calls_like_sdpa() -> None:
    """A model that was loaded with our attention still generates, outside of trees."""
    hf = hf_family("llama")
    want = hf.generate(torch.tensor([PATHS[0][:8]]), max_new_tokens=8, do_sample=False)
    hf.set_attn_implementation("titan_tree")
    got = hf.generate(torch.tensor([PATHS[0][:8]]), max_new_tokens=8, do_sample=False)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "name",
    ["bailing_hybrid", "deepseek_v3", "glm4_moe", "glm4_moe_lite", "gpt_oss", "nemotron_h", "qwen3_next"],
)
def test_training_in_bfloat16_keeps_in_fp32_what_transformers_keeps(name: str, tmp_path: Path) -> None:
    """In the forward pass, weights and constants have the dtypes that transformers loads, except ``FP32``."""
    hf_family(name).save_pretrained(tmp_path)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    want = TransformersModel(theirs).state_dict()
    want |= {key: value.bfloat16() for key, value in want.items() if key.endswith(FP32.get(name, ()))}
    config = ModelConfig(hf_path=str(tmp_path), implementation="transformers")
    training = TrainingConfig(dtype="bfloat16")
    for lora in (None, LoRAConfig(rank=2)):
        model = build_parallel_model(config, training, ParallelConfig(), OneRank(), lora)
        with cast_weights(model):
            got = {key: value for key, value in model.state_dict().items() if not is_factor(key)}
        assert got.keys() == want.keys()
        for key, value in want.items():
            assert got[key].dtype == value.dtype, key
            torch.testing.assert_close(got[key], value, rtol=0, atol=0)
    kept = {key.rpartition(".")[2] for key, value in want.items() if value.dtype == torch.float32}
    assert kept == ({"e_score_correction_bias"} if name in BIASED else set())


@pytest.mark.parametrize("name", sorted(SUPPORTED))
def test_transformers_keeps_no_other_parameter_in_fp32(name: str) -> None:
    """It keeps ``FP32``, and buffers, which are never cast."""
    hf = hf_family(name)
    kept = [key for key, _ in hf.named_parameters() if any(k in key for k in hf._keep_in_fp32_modules_strict)]
    assert kept == [key for key, _ in hf.named_parameters() if key.endswith(FP32.get(name, ()))]
