"""Qwen3-Next with experts on token trees: the layers of Qwen3.5-MoE, published in another form.

Parameter names are those of Qwen3.5-MoE. Snapshots hold the projections of Gated DeltaNet packed, and each
expert by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from titan_tree.models.qwen3_5_moe import Qwen35Moe, Qwen35MoeConfig

FLAVORS = {
    # About a million parameters: for the byte-level demo and for tests on a CPU.
    "debug": {**vars(Qwen35Moe.flavors["debug"])},
    "80B-A3B": {
        "vocab_size": 151_936,
        "hidden_size": 2048,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 2,
        "linear_num_value_heads": 32,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 512,
        "num_experts_per_tok": 10,
    },
}


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(Qwen35MoeConfig):
    """Sizes of a Qwen3-Next model, by Hugging Face's names."""

    family = "Qwen3-Next"

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], where: str) -> Self:
        config = super().from_hf(hf, where)
        every = hf.get("decoder_sparse_step", 1) == 1 and not hf.get("mlp_only_layers")
        cls._expect(hf, where, "mlp_only_layers", every, "experts in every layer")
        cls._expect(hf, where, "norm_topk_prob", hf.get("norm_topk_prob", True) is True, "true")
        return config

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }


class Qwen3Next(Qwen35Moe):
    """Qwen3-Next: gated DeltaNet, gated attention in every fourth layer, and experts in every layer."""

    Config = Qwen3NextConfig
    hf_architectures: ClassVar[dict[str, str]] = {"qwen3_next": "Qwen3NextForCausalLM"}
    flavors: ClassVar[dict[str, Qwen35MoeConfig]] = {
        name: Qwen3NextConfig(**sizes) for name, sizes in FLAVORS.items()
    }
    publishes_packed = True
    publishes_single_experts = True
