"""Qwen3.5-MoE (text model) and Qwen3-Next on token trees: a Qwen3.5 with a mixture of experts in every layer.

Each mixture has routed experts and one shared expert for all tokens.

Parameter names are those of Hugging Face's Qwen3_5MoeForCausalLM without the prefix ``model.``. Qwen3-Next
has the same layers and names. Its snapshots hold the projections of Gated DeltaNet packed, and each expert by
itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from titan_tree.components.moe.layer import MoE
from titan_tree.config.checks import positive_int, required
from titan_tree.models.decoder_config import ConfigJson, flavor_table
from titan_tree.models.layers import MLP
from titan_tree.models.qwen3 import DEBUG_EXPERTS, check_experts, one_spelling_of_experts
from titan_tree.models.qwen3_5 import DEBUG_HYBRID, Hybrid, HybridConfig


@dataclass(frozen=True, kw_only=True)
class Qwen35MoeConfig(HybridConfig):
    """Sizes of a Qwen3.5-MoE model, by Hugging Face's names."""

    title = "Qwen3.5-MoE"
    # No layer is dense, so nothing has this size.
    hf_read = (*HybridConfig.hf_read, "intermediate_size", "num_local_experts")

    moe_intermediate_size: int = required(positive_int)
    shared_expert_intermediate_size: int = required(positive_int)
    num_experts: int = required(positive_int)
    num_experts_per_tok: int = required(positive_int)

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_experts, self.num_experts_per_tok)

    @classmethod
    def from_hf(cls, hf: ConfigJson, where: str) -> Self:
        text = hf.get("text_config")
        if isinstance(text, dict):
            return super().from_hf({**hf, "text_config": one_spelling_of_experts(text, where)}, where)
        return super().from_hf(one_spelling_of_experts(hf, where), where)

    def to_hf(self) -> ConfigJson:
        names = {"architectures": ["Qwen3_5MoeForCausalLM"], "model_type": "qwen3_5_moe_text"}
        return super().to_hf() | names


DEBUG_HYBRID_EXPERTS = DEBUG_HYBRID | DEBUG_EXPERTS
DEBUG_HYBRID_EXPERTS |= {"moe_intermediate_size": 64, "shared_expert_intermediate_size": 64}
COLUMNS = (
    "hidden_size moe_intermediate_size shared_expert_intermediate_size num_hidden_layers num_attention_heads "
    "linear_num_value_heads num_experts num_experts_per_tok"
)
FLAVORS = {"debug": Qwen35MoeConfig(**DEBUG_HYBRID_EXPERTS)} | flavor_table(
    Qwen35MoeConfig,
    COLUMNS,
    {
        "35B-A3B": (2048, 512, 512, 40, 16, 32, 256, 8),
        "122B-A10B": (3072, 1024, 1024, 48, 32, 64, 256, 8),
        "397B-A17B": (4096, 1024, 1024, 60, 32, 64, 512, 10),
    },
    vocab_size=248_320,
    num_key_value_heads=2,
)


class Qwen35Moe(Hybrid):
    """Qwen3.5 with mixtures of experts as MLPs."""

    Config = Qwen35MoeConfig
    hf_architectures: ClassVar[dict[str, str]] = {
        "qwen3_5_moe_text": "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
    }
    flavors: ClassVar[Mapping[str, Qwen35MoeConfig]] = FLAVORS
    config: Qwen35MoeConfig

    def make_mlp(self) -> MLP | MoE:
        c = self.config
        shared_expert = MLP(c.hidden_size, c.shared_expert_intermediate_size)
        return MoE(
            c.hidden_size,
            c.moe_intermediate_size,
            c.num_experts,
            c.num_experts_per_tok,
            norm_topk_prob=True,
            shared_expert=shared_expert,
        )


@dataclass(frozen=True, kw_only=True)
class Qwen3NextConfig(Qwen35MoeConfig):
    """Sizes of a Qwen3-Next model, by Hugging Face's names."""

    title = "Qwen3-Next"
    hf_accepted: ClassVar[Mapping[str, Collection[object]]] = {
        **Qwen35MoeConfig.hf_accepted,
        "decoder_sparse_step": (1,),
        "norm_topk_prob": (True,),
    }

    def to_hf(self) -> ConfigJson:
        return super().to_hf() | {
            "architectures": ["Qwen3NextForCausalLM"],
            "model_type": "qwen3_next",
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
            "norm_topk_prob": True,
        }


NEXT_FLAVORS = {"debug": Qwen3NextConfig(**DEBUG_HYBRID_EXPERTS)} | flavor_table(
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
    flavors: ClassVar[Mapping[str, Qwen35MoeConfig]] = NEXT_FLAVORS
    publishes_packed = True
    publishes_single_experts = True
