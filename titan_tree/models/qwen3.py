"""Qwen3 and Qwen3-MoE (arXiv:2505.09388) on token trees.

Parameter names are those of Hugging Face's Qwen3ForCausalLM and Qwen3MoeForCausalLM without the prefix
``model.``. The text model of Qwen3-VL (arXiv:2511.21631) is a Qwen3 or a Qwen3-MoE; vision.py has its tower.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

from titan_tree.components.moe.layer import MoE
from titan_tree.config.checks import boolean, list_of, natural_int, positive_int, required, setting
from titan_tree.errors import UserError
from titan_tree.models.block import Attention, Block
from titan_tree.models.decoder import Decoder
from titan_tree.models.decoder_config import DEBUG, ConfigJson, DecoderConfig, flavor_table
from titan_tree.models.layers import MLP, RMSNorm


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """Sizes of a Qwen3 model, by Hugging Face's names."""

    title = "Qwen3"
    hf_read: ClassVar[tuple[str, ...]] = (
        "layer_types",
        "max_window_layers",
        "sliding_window",
        "use_sliding_window",
    )

    intermediate_size: int = required(positive_int)

    @classmethod
    def from_hf(cls, hf: ConfigJson, where: str) -> Self:
        hf = cls.text_part(hf, where)
        rope = cls.rope_fields(hf, where)
        types = hf.get("layer_types")
        full = isinstance(types or [], list) and all(kind == "full_attention" for kind in types or ())
        cls.check_field(hf, where, "layer_types", full, "full_attention")
        config = cls.from_fields(hf, where, rope_theta=rope["rope_theta"])
        # Without "layer_types", layers from max_window_layers on have a sliding window if it is switched on.
        windowed = hf.get("use_sliding_window") and hf.get("sliding_window", 4096) is not None
        unused = hf.get("max_window_layers", 28) >= config.num_hidden_layers
        expected = "full attention (use_sliding_window false)"
        cls.check_field(hf, where, "max_window_layers", types is not None or not windowed or unused, expected)
        return config

    def to_hf(self) -> ConfigJson:
        """Returns the ``config.json`` for transformers, with both spellings of RoPE."""
        return super().to_hf() | {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "rope_scaling": None,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.num_hidden_layers,
        }


FLAVORS = {"debug": Qwen3Config(**DEBUG, num_hidden_layers=2, intermediate_size=384)} | flavor_table(
    Qwen3Config,
    "hidden_size intermediate_size num_hidden_layers num_attention_heads tie_word_embeddings",
    {
        "0.6B": (1024, 3072, 28, 16, True),
        "1.7B": (2048, 6144, 28, 16, True),
        "4B": (2560, 9728, 36, 32, True),
        "8B": (4096, 12_288, 36, 32, False),
        "14B": (5120, 17_408, 40, 40, False),
        "32B": (5120, 25_600, 64, 64, False),
    },
    vocab_size=151_936,
    num_key_value_heads=8,
)


class Qwen3(Decoder):
    """Qwen3, dense: grouped-query attention with RMSNorm on queries and keys, and SwiGLU MLPs."""

    Config: ClassVar[type[Qwen3Config]] = Qwen3Config
    hf_architectures: ClassVar[dict[str, str]] = {
        "qwen3": "Qwen3ForCausalLM",
        "qwen3_vl": "Qwen3VLForConditionalGeneration",
    }
    flavors: ClassVar[Mapping[str, Qwen3Config]] = FLAVORS
    norm_class = RMSNorm
    config: Qwen3Config

    def make_block(self, index: int) -> Block:
        mlp = self.make_mlp(index)
        attention = Attention(self.config, self.attention, qk_norm=RMSNorm)
        return Block(self.config, RMSNorm, "self_attn", attention, mlp)

    def make_mlp(self, index: int) -> MLP | MoE:
        """Makes the feed-forward part of the layer ``index``."""
        return MLP(self.config.hidden_size, self.config.intermediate_size)


@dataclass(frozen=True, kw_only=True)
class Qwen3MoeConfig(Qwen3Config):
    """Sizes of a Qwen3-MoE model, by Hugging Face's names.

    ``intermediate_size`` is that of layers without experts.
    """

    title = "Qwen3-MoE"
    hf_optional = (*Qwen3Config.hf_optional, "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers")
    hf_read = (*Qwen3Config.hf_read, "num_local_experts")

    moe_intermediate_size: int = required(positive_int)
    num_experts: int = required(positive_int)
    num_experts_per_tok: int = required(positive_int)
    norm_topk_prob: bool = setting(False, boolean)  # divide the chosen probabilities by their sum
    decoder_sparse_step: int = setting(1, positive_int)  # every n-th layer has experts
    mlp_only_layers: list[int] = setting([], list_of(natural_int))  # layers without experts

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_experts, self.num_experts_per_tok)

    @classmethod
    def from_hf(cls, hf: ConfigJson, where: str) -> Self:
        of_vision = hf.get("model_type") == "qwen3_vl_moe"
        hf = one_spelling_of_experts(cls.text_part(hf, where), where)
        if of_vision:  # Qwen3-VL always divides
            cls.check_field(hf, where, "norm_topk_prob", hf.get("norm_topk_prob") is not False, "true")
            hf["norm_topk_prob"] = True
        # In this family the sliding window applies to all layers.
        windowed = hf.get("use_sliding_window") and hf.get("sliding_window", 4096) is not None
        cls.check_field(hf, where, "use_sliding_window", not windowed, "false")
        return super().from_hf({name: value for name, value in hf.items() if value is not None}, where)

    def to_hf(self) -> ConfigJson:
        return {
            **super().to_hf(),
            "architectures": ["Qwen3MoeForCausalLM"],
            "model_type": "qwen3_moe",
        }

    def has_experts(self, index: int) -> bool:
        return index not in self.mlp_only_layers and (index + 1) % self.decoder_sparse_step == 0


def check_experts(num_experts: int, per_token: int) -> None:
    """Raises UserError if a token would have more experts than there are, or if ids would exceed int16."""
    if num_experts > 2**15:
        raise UserError(f"num_experts: expected at most 32768, because ids are int16, got {num_experts}")
    if per_token > num_experts:
        raise UserError(f"num_experts_per_tok: expected at most num_experts ({num_experts}), got {per_token}")


def one_spelling_of_experts(hf: ConfigJson, where: str) -> ConfigJson:
    """Returns the ``config.json`` with "num_experts", which transformers may save as "num_local_experts".

    Raises:
        UserError: both are present and differ.
    """
    number, local = (hf.get(name) for name in ("num_experts", "num_local_experts"))
    if None not in (number, local) and number != local:
        raise UserError(f"{where}: num_experts is {number}, but num_local_experts is {local}; remove one")
    return {**hf, "num_experts": local if number is None else number}


DEBUG_EXPERTS: ConfigJson = {"num_experts": 8, "num_experts_per_tok": 2}
MOE_FLAVORS = {
    "debug": Qwen3MoeConfig(
        **DEBUG,
        **DEBUG_EXPERTS,
        num_hidden_layers=2,
        intermediate_size=384,
        moe_intermediate_size=96,
        norm_topk_prob=True,
    )
} | flavor_table(
    Qwen3MoeConfig,
    "hidden_size intermediate_size moe_intermediate_size num_hidden_layers num_attention_heads",
    {"30B-A3B": (2048, 6144, 768, 48, 32), "235B-A22B": (4096, 12_288, 1536, 94, 64)},
    vocab_size=151_936,
    num_key_value_heads=4,
    num_experts=128,
    num_experts_per_tok=8,
    norm_topk_prob=True,
)


class Qwen3Moe(Qwen3):
    """Qwen3 with mixtures of experts as MLPs, in all layers or some."""

    Config = Qwen3MoeConfig
    hf_architectures: ClassVar[dict[str, str]] = {
        "qwen3_moe": "Qwen3MoeForCausalLM",
        "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    }
    publishes_single_experts = True
    flavors: ClassVar[Mapping[str, Qwen3MoeConfig]] = MOE_FLAVORS
    config: Qwen3MoeConfig

    def make_mlp(self, index: int) -> MLP | MoE:
        c = self.config
        if not c.has_experts(index):
            return super().make_mlp(index)
        return MoE(
            c.hidden_size, c.moe_intermediate_size, c.num_experts, c.num_experts_per_tok, c.norm_topk_prob
        )
