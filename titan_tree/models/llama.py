"""Llama 3 (arXiv:2407.21783) on token trees.

Parameter names are those of Hugging Face's LlamaForCausalLM without the prefix ``model.``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from titan_tree.config.checks import positive_int, positive_number, required, setting
from titan_tree.models.block import Attention, Block
from titan_tree.models.decoder import Decoder
from titan_tree.models.decoder_config import DEBUG, ConfigJson, DecoderConfig, flavor_table
from titan_tree.models.layers import MLP, RMSNorm, Rope

SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, kw_only=True)
class LlamaConfig(DecoderConfig):
    """Sizes of a Llama, by Hugging Face's names. The last four describe the scaling of RoPE."""

    title = "Llama"

    intermediate_size: int = required(positive_int)
    rms_norm_eps: float = setting(1e-5, positive_number)
    rope_theta: float = setting(5e5, positive_number)
    factor: float = setting(1.0, positive_number)  # 1: no scaling
    low_freq_factor: float = setting(1.0, positive_number)
    high_freq_factor: float = setting(4.0, positive_number)
    original_max_position_embeddings: int = setting(8192, positive_int)

    hf_optional: ClassVar[tuple[str, ...]] = (*DecoderConfig.hf_optional, *SCALING)
    rope_scalings: ClassVar[Mapping[str, tuple[str, ...]]] = {"llama3": SCALING}

    @classmethod
    def from_hf(cls, hf: ConfigJson, where: str) -> Self:
        rope = cls.rope_fields(hf, where)
        for name in SCALING:
            cls.check_field(hf, where, name, not hf.get(name), f"{name} in rope_parameters")
        # What transformers takes for missing fields.
        overrides = {"rope_theta": rope["rope_theta"] or 1e4, "rms_norm_eps": hf.get("rms_norm_eps") or 1e-6}
        overrides |= {name: rope[name] for name in SCALING if name in rope}
        return cls.from_fields(hf, where, **overrides, **cls.default_heads(hf))

    def to_hf(self) -> ConfigJson:
        fields = super().to_hf() | {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        scaling = {name: fields.pop(name) for name in SCALING}
        if self.factor != 1:
            fields["rope_parameters"] |= {"rope_type": "llama3", **scaling}
        rope_scaling = None if self.factor == 1 else fields["rope_parameters"]
        return fields | {"rope_scaling": rope_scaling, "mlp_bias": False}

    def scale(self, frequencies: Tensor) -> Tensor:
        """Returns the frequencies of RoPE for long paths.

        Frequencies with fewer than ``low_freq_factor`` turns in the original number of positions are divided
        by ``factor``, those with more than ``high_freq_factor`` stay, and the others lie between.
        """
        turns = self.original_max_position_embeddings * frequencies / (2 * math.pi)
        unscaled_weight = (turns - self.low_freq_factor) / (self.high_freq_factor - self.low_freq_factor)
        return torch.lerp(frequencies / self.factor, frequencies, unscaled_weight.clamp(0, 1))


FLAVORS = {"debug": LlamaConfig(**DEBUG, num_hidden_layers=2, intermediate_size=384)} | flavor_table(
    LlamaConfig,
    "hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim factor tie_word_embeddings",
    {
        "3.2-1B": (2048, 8192, 16, 32, 64, 32.0, True),
        "3.2-3B": (3072, 8192, 28, 24, 128, 32.0, True),
        "3.1-8B": (4096, 14_336, 32, 32, 128, 8.0, False),
        "3.1-70B": (8192, 28_672, 80, 64, 128, 8.0, False),
    },
    vocab_size=128_256,
    num_key_value_heads=8,
    max_position_embeddings=131_072,
)


class Llama(Decoder):
    """Llama 3: grouped-query attention without a norm on queries and keys, and SwiGLU MLPs."""

    Config: ClassVar[type[LlamaConfig]] = LlamaConfig
    hf_architectures: ClassVar[dict[str, str]] = {"llama": "LlamaForCausalLM"}
    flavors: ClassVar[Mapping[str, LlamaConfig]] = FLAVORS
    norm_class = RMSNorm
    config: LlamaConfig

    def make_block(self, index: int) -> Block:
        mlp = MLP(self.config.hidden_size, self.config.intermediate_size)
        return Block(self.config, RMSNorm, "self_attn", Attention(self.config, self.attention), mlp)

    def make_rope(self, positions: Tensor) -> Rope:
        scale = None if self.config.factor == 1 else self.config.scale
        return Rope.at(positions, self.config.rotary_dim, self.config.rope_theta, scale)
