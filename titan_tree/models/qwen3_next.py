"""Qwen3-Next with experts on token trees: the layers of Qwen3.5-MoE, published in another form.

Parameter names are those of Qwen3.5-MoE. Snapshots hold the projections of Gated DeltaNet packed, and each
expert by itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from titan_tree.models.decoder_config import ConfigJson, flavor_table
from titan_tree.models.qwen3_5_moe import COLUMNS, DEBUG_HYBRID_EXPERTS, Qwen35Moe, Qwen35MoeConfig


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(Qwen35MoeConfig):
    """Sizes of a Qwen3-Next model, by Hugging Face's names."""

    title = "Qwen3-Next"

    @classmethod
    def from_hf(cls, hf: ConfigJson, where: str) -> Self:
        config = super().from_hf(hf, where)
        every = hf.get("decoder_sparse_step", 1) == 1 and not hf.get("mlp_only_layers")
        cls.check_field(hf, where, "mlp_only_layers", every, "experts in every layer")
        cls.check_field(hf, where, "norm_topk_prob", hf.get("norm_topk_prob", True) is True, "true")
        return config

    def to_hf(self) -> ConfigJson:
        return super().to_hf() | {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }


FLAVORS = {"debug": Qwen3NextConfig(**DEBUG_HYBRID_EXPERTS)} | flavor_table(
    Qwen3NextConfig,
    COLUMNS,
    {"80B-A3B": (2048, 512, 512, 48, 16, 32, 512, 10)},
    vocab_size=151_936,
    num_key_value_heads=2,
)


class Qwen3Next(Qwen35Moe):
    """Qwen3-Next: gated DeltaNet, gated attention in every fourth layer, and experts in every layer."""

    Config = Qwen3NextConfig
    hf_architectures: ClassVar[dict[str, str]] = {"qwen3_next": "Qwen3NextForCausalLM"}
    flavors: ClassVar[Mapping[str, Qwen35MoeConfig]] = FLAVORS
    publishes_packed = True
    publishes_single_experts = True
