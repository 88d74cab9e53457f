"""PEFT computes what was trained: adapters of every supported architecture, read by PEFT and written by it.

The tests use the installed PEFT, whose version is pinned. Another version runs beside it:

    pip install --target /tmp/peft --no-deps peft==0.20.0
    PYTHONPATH=/tmp/peft:. python -m pytest tests/models/test_peft_families.py
"""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as DEFAULTS

from tests.support.cases import slow_except
from tests.support.hf_families import FAMILIES, hf_family, hf_logprobs
from titan_tree import load_adapter, load_pretrained, save_adapter
from titan_tree.components.lora import LoRA
from titan_tree.models.lora.adapters import add_lora
from titan_tree.models.transformers import TransformersModel
from titan_tree.scoring.score_trees import tree_logprobs

TRUNK = [7, 3, 9, 40, 12, 5, 33, 2, 18, 26]
PATHS = [[*TRUNK, 4, 8, 15], [*TRUNK, 4, 8, 16, 23, 42], [*TRUNK[:6], 11, 13]]
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
GEMMA_EXPERTS = {"num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 16, "enable_moe_block": True}
CHANGES: dict[str, dict[str, Any]] = {
    "gemma4_text with experts": GEMMA_EXPERTS,
    "qwen3_moe with a dense layer": {"mlp_only_layers": [0]},
    # The norm of Gated DeltaNet magnifies rounding where outputs cancel.
    **{name: {"rms_norm_eps": 1e-3} for name in ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")},
    "olmo_hybrid": {"rms_norm_eps": 1e-3},
}
NATIVE = ("llama", "qwen3", "qwen3_moe", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
CASES = [*FAMILIES, "gemma4_text with experts", "qwen3_moe with a dense layer"]
CASES += [f"native {name}" for name in (*NATIVE, "qwen3_moe with a dense layer")]
ONE_PART: list[dict[str, Any]] = [{"targets": ("in_proj_z", "layers.0.linear_attn.in_proj_b")}]
MORE_TARGETS: dict[str, list[dict[str, Any]]] = {
    "deepseek_v3": [{"targets": ("down_proj", *EXPERTS), "rslora": True}],
    "native qwen3_next": [*ONE_PART, {"rslora": True}, {"targets": ("in_proj_qkv", "in_proj_z", *EXPERTS)}],
    "native qwen3_5_moe_text": [{"targets": ("shared_expert.up_proj", *EXPERTS[:1])}],
}
EVERYDAY = ("deepseek_v3", "native qwen3_next")
LIKE_LLAMA = (
    *("cohere2", "ernie4_5", "exaone4", "gemma2", "glm4", "granite", "hunyuan_v1_dense", "ministral3"),
    *("mistral", "olmo2", "olmo3", "qwen2", "seed_oss", "smollm3"),
)


def make(name: str, folder: Path) -> tuple[Any, Any]:
    """Returns the model of transformers, and ours of the same weights."""
    family = name.removeprefix("native ")
    base = hf_family(family.split()[0], **CHANGES.get(family, {}))
    if name == family:
        return base, TransformersModel(copy.deepcopy(base))
    base.save_pretrained(folder / "base")
    return base, load_pretrained(folder / "base", torch.float32, implementation="native")


def train(model: torch.nn.Module) -> None:
    """Gives all factors of LoRA random numbers."""
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.normal_(std=0.1)


def largest_difference(model: Any, hf: Any) -> float:
    """Returns the largest difference of two models' log-probs, in nats."""
    with torch.no_grad():
        mine, theirs = tree_logprobs(model, PATHS), [hf_logprobs(hf, path) for path in PATHS]
    return max(float((a - b).abs().max()) for a, b in zip(mine, theirs, strict=True))


def assert_same(model: Any, other: Any) -> None:
    with torch.no_grad():
        for got, want in zip(tree_logprobs(model, PATHS), tree_logprobs(other, PATHS), strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("name", slow_except(EVERYDAY, CASES))
def test_peft_reads_what_was_trained(name: str, tmp_path: Path) -> None:
    base, plain = make(name, tmp_path)
    for i, options in enumerate([{}, *MORE_TARGETS.get(name, ())]):
        model = copy.deepcopy(plain)
        add_lora(model, LoRA(rank=2, alpha=6, **options))
        train(model)
        save_adapter(model, tmp_path / str(i))
        peft = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / str(i)).eval()
        assert largest_difference(model, peft) <= 3e-6
        assert largest_difference(model, base) > 1e-2
        again = copy.deepcopy(plain)
        load_adapter(again, tmp_path / str(i))
        assert_same(again, model)
        if options not in ONE_PART:
            assert again.lora == model.lora


@pytest.mark.parametrize("name", slow_except(EVERYDAY, [name for name in CASES if name not in LIKE_LLAMA]))
def test_adapters_of_peft_are_read(name: str, tmp_path: Path) -> None:
    """With the linears that are adapted by default here, and with those that are in PEFT.

    In some models with experts, PEFT then adapts the experts instead of MLPs, with updates of another rank.
    """
    base, plain = make(name, tmp_path)
    ours = copy.deepcopy(plain)
    add_lora(ours, LoRA(rank=2))
    save_adapter(ours, tmp_path / "ours")
    config = json.loads((tmp_path / "ours" / "adapter_config.json").read_text())
    parameters = [target.removesuffix(".weight") for target in config["target_parameters"] or ()]
    has_default = base.config.model_type in DEFAULTS.keys() - {"mixtral"}  # which fails in PEFT
    for targets in ([*config["target_modules"], *parameters], *([None] if has_default else [])):
        options: Any = {"r": 4, "lora_alpha": 6, "target_modules": targets, "task_type": "CAUSAL_LM"}
        peft = get_peft_model(copy.deepcopy(base), LoraConfig(**options)).eval()
        train(peft)
        folder = tmp_path / ("listed" if targets else "default")
        peft.save_pretrained(folder)
        model = copy.deepcopy(plain)
        load_adapter(model, folder)
        assert largest_difference(model, peft) <= 3e-6
        assert largest_difference(model, base) > 1e-2
        # What is saved again may adapt more than PEFT did, but computes the same.
        save_adapter(model, tmp_path / f"{folder.name} again")
        again = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / f"{folder.name} again").eval()
        assert largest_difference(model, again) <= 3e-6
