"""Qwen3.5 (dense text model) on token trees.

Every fourth layer has gated attention; the others are Gated DeltaNet layers.

Parameter names are those of Hugging Face's Qwen3_5ForCausalLM without the prefix ``model.``. The published
rotary embedding has sections for the three axes of images. In text all three equal the position, so it is a
plain rotary embedding there. vision.py has the tower.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from titan_tree.components.moe.layer import MoE
from titan_tree.components.recurrence import prepare_conv
from titan_tree.config.checks import positive_int, positive_number, required, setting
from titan_tree.errors import UserError
from titan_tree.models.block import Attention, Block
from titan_tree.models.decoder import Decoder
from titan_tree.models.decoder_config import DEBUG, ConfigJson, flavor_table
from titan_tree.models.gated_delta_net import GatedDeltaNet, GatedDeltaNetConfig
from titan_tree.models.layers import MLP, ZeroCentredRMSNorm
from titan_tree.models.weights import ElementDraws, log
from titan_tree.tree.layout import TreeLayout

FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True, kw_only=True)
class HybridConfig(GatedDeltaNetConfig):
    """Sizes of a Qwen3.5 model without those of its MLPs, by Hugging Face's names."""

    title = "Qwen3.5"
    hf_optional = (*GatedDeltaNetConfig.hf_optional, "partial_rotary_factor", "full_attention_interval")
    hf_accepted: ClassVar[Mapping[str, Collection[object]]] = {
        **GatedDeltaNetConfig.hf_accepted,
        "attn_output_gate": (True,),
        "output_gate_type": ("swish", "silu"),
    }
    # Tiny and text-only snapshots of transformers name a shared expert that dense models lack.
    hf_read: ClassVar[tuple[str, ...]] = ("layer_types", "shared_expert_intermediate_size")

    head_dim: int = setting(256, positive_int)
    rope_theta: float = setting(1e7, positive_number)
    max_position_embeddings: int = setting(262_144, positive_int)
    partial_rotary_factor: float = setting(0.25, positive_number)
    full_attention_interval: int = setting(4, positive_int)  # every n-th layer has attention, others DeltaNet

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise UserError(
                f"partial_rotary_factor: expected a factor that rotates an even number of the head's "
                f"{self.head_dim} dims, got {self.partial_rotary_factor}"
            )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def layer_types(self) -> list[str]:
        """The kind of each layer, as transformers calls it."""
        every = self.full_attention_interval
        return [FULL if (i + 1) % every == 0 else LINEAR for i in range(self.num_hidden_layers)]

    @classmethod
    def from_hf(cls, hf: ConfigJson, where: str) -> Self:
        text = cls.text_part(hf, where)
        cls.check_field(text, where, "layer_types", isinstance(text.get("layer_types") or [], list), "a list")
        rope = cls.rope_fields(text, where)
        types = text.get("layer_types")
        every = text.get("full_attention_interval")
        if types:
            every = types.index(FULL) + 1 if FULL in types else len(types) + 1
        config = cls.from_fields(
            text,
            where,
            rope_theta=rope["rope_theta"],
            partial_rotary_factor=rope["partial_rotary_factor"],
            full_attention_interval=every,
        )
        pattern = f"{FULL} in every n-th layer and {LINEAR} in all others"
        cls.check_field(text, where, "layer_types", not types or types == config.layer_types, pattern)
        return config

    def to_hf(self) -> ConfigJson:
        fields = super().to_hf() | {"layer_types": self.layer_types}
        fields["rope_parameters"]["partial_rotary_factor"] = self.partial_rotary_factor
        del fields["full_attention_interval"]
        return fields


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(HybridConfig):
    """Sizes of a dense Qwen3.5 model."""

    intermediate_size: int = required(positive_int)

    def to_hf(self) -> ConfigJson:
        return super().to_hf() | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}


class Hybrid(Decoder):
    """The base class of the Qwen3.5 families. Subclasses only add the MLPs or mixtures of experts."""

    norm_class = ZeroCentredRMSNorm
    # Qwen3-Next publishes projections packed, one key head after another.
    packed: ClassVar[dict[str, tuple[str, ...]]] = {
        "in_proj_qkvz.weight": ("in_proj_qkv.weight", "in_proj_z.weight"),
        "in_proj_ba.weight": ("in_proj_b.weight", "in_proj_a.weight"),
    }
    config: HybridConfig

    @abstractmethod
    def make_mlp(self) -> MLP | MoE:
        """Makes the feed-forward part of a layer."""

    def make_block(self, index: int) -> Block:
        c, norm = self.config, ZeroCentredRMSNorm
        mlp = self.make_mlp()
        if c.layer_types[index] == FULL:
            attention = Attention(c, self.attention, qk_norm=norm, output_gate=True)
            return Block(c, norm, "self_attn", attention, mlp)
        return Block(c, norm, "linear_attn", GatedDeltaNet(c, self.recurrence), mlp)

    def prepare(self, layout: TreeLayout) -> TreeLayout:
        plan = prepare_conv(layout, self.config.linear_conv_kernel_dim)
        return dataclasses.replace(super().prepare(layout), conv_index=plan)

    def unpack(self, name: str, tensor: Tensor) -> list[Tensor]:
        c = self.config
        group = c.linear_num_value_heads // c.linear_num_key_heads
        # For each key head, the tensor has the rows of q, k, v and z, or those of b and a.
        key, value = c.linear_key_head_dim, group * c.linear_value_head_dim
        sizes = [key, key, value, value] if name.endswith("qkvz.weight") else [group, group]
        heads = tensor.unflatten(0, (c.linear_num_key_heads, -1)).split(sizes, dim=1)
        *first, last = (part.flatten(0, 1) for part in heads)
        return [torch.cat(first), last]

    def initial_values(self, name: str, draws: ElementDraws) -> Tensor:
        """Returns initial values for some elements of the parameter ``name``.

        Matrices and convolutions are drawn from N(0, 0.02^2). Norms begin as the identity. Decays are drawn
        as published.
        """
        module, _, kind = name.rpartition(".")
        if isinstance(self.get_submodule(module), ZeroCentredRMSNorm):
            return draws.constant(0.0)
        if kind == "A_log":
            return log(draws.uniform(0.01, 16.0))
        return super().initial_values(name, draws)


DEBUG_HYBRID = DEBUG | {
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
}
FLAVORS = {"debug": Qwen35Config(**DEBUG_HYBRID, intermediate_size=384)} | flavor_table(
    Qwen35Config,
    "hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads "
    "linear_num_value_heads tie_word_embeddings",
    {
        "0.8B": (1024, 3584, 24, 8, 2, 16, True),
        "2B": (2048, 6144, 24, 8, 2, 16, True),
        "4B": (2560, 9216, 32, 16, 4, 32, True),
        "9B": (4096, 12_288, 32, 16, 4, 32, False),
        "27B": (5120, 17_408, 64, 24, 4, 48, False),
    },
    vocab_size=248_320,
)


class Qwen35(Hybrid):
    """Qwen3.5 with dense MLPs."""

    Config = Qwen35Config
    hf_architectures: ClassVar[dict[str, str]] = {
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5": "Qwen3_5ForConditionalGeneration",
    }
    flavors: ClassVar[Mapping[str, Qwen35Config]] = FLAVORS
    config: Qwen35Config

    def make_mlp(self) -> MLP | MoE:
        return MLP(self.config.hidden_size, self.config.intermediate_size)
