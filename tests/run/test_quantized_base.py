"""QLoRA: the frozen base in NF4 computes what its dequantized weights compute."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from tests.support.hf_families import hf_family, hf_logprobs
from tests.support.tiny_run import read_metrics, tiny_config, train
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.distributed import ao
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.settings import ParallelConfig
from titan_tree.engine.activations import Activations
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.pretrained import save_pretrained
from titan_tree.models.settings import LoRAConfig, ModelConfig
from titan_tree.models.tree_model import TreeModel
from titan_tree.run.config import Config
from titan_tree.run.model_setup import build_parallel_model
from titan_tree.run.settings import TrainingConfig
from titan_tree.scoring.score_trees import tree_logprobs
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree

pytest.importorskip("torchao", reason="needs torchao: pip install -e '.[torchao]'")

# Projections of queries, outputs and MLPs have multiples of 16,384 weights, those of keys and values half.
SIZES = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES |= {"head_dim": 32}
QUANTIZED = ("q_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PATHS = [[5, 6, 7, 8, 9, 10, 11, 12], [5, 6, 7, 8, 3, 4, 1, 2], [5, 6, 20, 21]]
LORA = {"lora__rank": 4, "lora__quantize": "nf4", "optimizer__lr": 0.01, "optimizer__eps": 1e-3}


def is_quantized(weight: Tensor) -> bool:
    return type(weight).__name__ == "NF4Tensor"


def num_bytes(weight: Any) -> int:
    """Returns the bytes of a weight, which may consist of several tensors."""
    parts = (
        [getattr(weight, name) for name in weight.__tensor_flatten__()[0]]
        if is_quantized(weight)
        else [weight]
    )
    return sum(part.numel() * part.element_size() for part in parts)


def build(quantize: Any, model: ModelConfig, **options: Any) -> TreeModel:
    """Returns a model with random factors, so that updates are not 0."""
    training = TrainingConfig(dtype="float32", **options)
    made = build_parallel_model(
        model, training, ParallelConfig(), OneRank(), LoRAConfig(rank=4, quantize=quantize)
    )
    torch.manual_seed(1)
    for name, parameter in made.named_parameters():
        if "_lora_" in name:
            nn.init.normal_(parameter, std=0.1)
    return made


def gradients(
    model: TreeModel, max_tokens: int | None = None, activations: Any = "keep"
) -> dict[str, Tensor]:
    partitioner = None if max_tokens is None else TreePartitioner("redundancy_free", max_tokens)
    step = TreeStep(
        model, TreeLoss(), partitioner=partitioner, activations=Activations(torch.device("cpu"), activations)
    )
    step.run(step.prepare([[TokenTree.from_paths([TokenPath(path) for path in PATHS])]]))
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return found


@pytest.fixture(params=["native", "transformers"])
def model_config(request: pytest.FixtureRequest, tmp_path: Path) -> ModelConfig:
    hf_family("qwen3", **SIZES, pad_token_id=None).save_pretrained(tmp_path / "base")
    return ModelConfig(hf_path=str(tmp_path / "base"), implementation=request.param)


def test_equals_the_model_of_the_dequantized_weights(model_config: ModelConfig) -> None:
    """Log-probs, and the gradients of all factors, which flow through the quantized linears."""
    quantized, plain = build("nf4", model_config), build("none", model_config)
    weights = dict(plain.named_parameters())
    names = [name for name, weight in quantized.named_parameters() if is_quantized(weight)]
    assert len(names) == 2 * len(QUANTIZED)
    assert {name.split(".")[-2] for name in names} == set(QUANTIZED)
    for name in names:
        original, dequantized = weights[name].detach(), quantized.get_parameter(name).to(torch.float32)
        # Neighbouring codes are at most 0.304 apart. A scale is off by at most 1/256 of the range of scales.
        blocks, errors = (
            original.view(-1, 64).abs().amax(1),
            (dequantized - original).view(-1, 64).abs().amax(1),
        )
        assert (errors <= 0.16 * blocks + (blocks.max() - blocks.min()) / 128).all()
        assert errors.max() > 0.05 * blocks.max()
        weights[name].data.copy_(dequantized)
    with torch.no_grad():
        pairs = zip(tree_logprobs(quantized, PATHS), tree_logprobs(plain, PATHS), strict=True)
        for got, want in pairs:
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    want = gradients(plain)
    assert len(want) == 2 * 2 * 7
    for max_tokens, activations in ((None, "keep"), (6, "offload"), (6, "recompute")):
        got = gradients(quantized, max_tokens, activations)
        assert got.keys() == want.keys()
        for name, gradient in want.items():
            assert gradient.norm() > 0
            assert (got[name] - gradient).norm() <= 1e-5 * gradient.norm(), name


@pytest.mark.parametrize("policy", ["selective", "full"])
def test_checkpointed_layers_give_the_same_gradients(model_config: ModelConfig, policy: Any) -> None:
    want = gradients(build("nf4", model_config))
    got = gradients(build("nf4", model_config, activation_checkpoint=policy))
    for a, b in zip(got.values(), want.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_memory_falls_to_a_seventh_of_fp32(model_config: ModelConfig) -> None:
    """Also that of what autograd saves: no dequantized weight."""
    quantized, plain = build("nf4", model_config), build("none", model_config)
    for name, weight in quantized.named_parameters():
        if is_quantized(weight):
            numel = weight.numel()
            # Codes, scales, scales of scales; the mean of scales and the table of 16 values.
            assert num_bytes(weight) == numel // 2 + numel // 64 + 4 * numel // (64 * 256) + 4 + 4 * 16
            assert num_bytes(plain.get_parameter(name)) == 4 * numel
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    batch = TreeStep(quantized, TreeLoss()).prepare([[TokenTree.from_paths([TokenPath(PATHS[0])])]])
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        TreeStep(quantized, TreeLoss()).run(batch)
    # Nothing below the first layer of a model of transformers needs gradients.
    assert sum(map(is_quantized, saved)) == 2 * len(QUANTIZED) - (model_config.implementation != "native")
    shapes = {tuple(w.shape) for n, w in quantized.named_parameters() if is_quantized(w)}
    assert not [
        t.shape for t in saved if not is_quantized(t) and tuple(t.shape) in shapes | {s[::-1] for s in shapes}
    ]


def config(folder: Path, **options: Any) -> Config:
    sizes = {f"model__overrides__{name}": size for name, size in SIZES.items()}
    cut = {"data__max_tokens": 24, "partition__activations": "offload", "checkpoint__export_hf": True}
    cut |= {"lr_scheduler__min_lr_factor": 1.0}
    return tiny_config(folder, **sizes | LORA | cut | {"checkpoint__interval": 2} | options)


@pytest.mark.slow
def test_a_run_saves_adapters_resumes_exactly_and_exports_dequantized_weights(tmp_path: Path) -> None:
    whole = train(config(tmp_path / "whole"))
    tensors = json.loads((whole.folder.path / "checkpoints" / "step-4" / "tensors.json").read_text())
    assert all("_lora_" in name for name in tensors)
    train(config(tmp_path / "two", training__steps=2))
    resumed = train(config(tmp_path / "two"))
    assert resumed.optimizer_step.good_steps == 2
    assert read_metrics(resumed.config)[2:] == read_metrics(whole.config)[2:]

    save_pretrained(whole.model, tmp_path / "saved")
    for folder in (whole.folder.path / "hf", tmp_path / "saved"):
        exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for path in PATHS:
            with torch.no_grad():
                (got,), want = tree_logprobs(whole.model, [path]), hf_logprobs(exported, path)
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    with pytest.raises(UserError, match=r"base = random weights, training.seed 0, in nf4 \(now .*seed 0\)"):
        train(config(tmp_path / "whole", lora__quantize="none"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"training__compile": True}, r"training\.compile: expected false with lora\.quantize, .* to false"),
        ({"model__overrides__hidden_size": 32}, r"lora\.quantize: expected linears .* multiple of 16,384"),
        ({"lora__rank": 0}, r"lora\.quantize: expected 'none' without lora\.rank or lora\.adapter"),
        ({"lora__quantize": "int4"}, r"lora\.quantize: .*nf4"),
    ],
)
def test_what_quantized_weights_cannot_do_is_refused(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message) as caught:
        train(config(tmp_path, **options))
    assert "\n" not in str(caught.value)


def test_without_torchao_the_error_names_the_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise ModuleNotFoundError(name="torchao")

    monkeypatch.setattr(ao, "import_module", missing)
    with pytest.raises(UserError, match=r"^lora\.quantize: needs torchao, which is not installed: "):
        train(config(tmp_path))
