"""Qwen3.5 (dense text model) on token trees: three layers of Gated DeltaNet, one of gated attention, in turn.

Parameter names are those of Hugging Face's Qwen3_5ForCausalLM without the prefix ``model.``. Its rotary
embedding has a section for each of three axes of pictures; in text all three are the position, which makes
it a plain one.

N tokens, d hidden size, H query heads, K key-value heads, D head dim; of DeltaNet G value heads.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_tree.components.moe import MoE
from titan_tree.components.tree_attention import TreeAttention
from titan_tree.components.tree_gdn import TreeGDN, prepare_conv, tree_causal_conv1d
from titan_tree.errors import UserError
from titan_tree.models.block import MLP, Block, Linear, Mixer, RMSNorm, Rope, at_least_fp32
from titan_tree.models.decoder import Decoder
from titan_tree.models.decoder_config import INIT_STD, DecoderConfig
from titan_tree.models.qwen3 import Attention
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.partition import PAD

FULL, LINEAR = "full_attention", "linear_attention"


@dataclass(frozen=True, kw_only=True)
class HybridConfig(DecoderConfig):
    """Sizes of a Qwen3.5, by Hugging Face's names, but for those of its MLPs."""

    family = "Qwen3.5"

    head_dim: int = 256
    rope_theta: float = 1e7
    max_position_embeddings: int = 262_144
    partial_rotary_factor: float = 0.25
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_conv_kernel_dim: int = 4
    full_attention_interval: int = 4  # every so many layers one has attention, the others DeltaNet

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.linear_num_value_heads % self.linear_num_key_heads:
            raise UserError(
                f"linear_num_key_heads: expected a divisor of linear_num_value_heads "
                f"({self.linear_num_value_heads}), got {self.linear_num_key_heads}"
            )
        if not 0 < self.rotary_dim <= self.head_dim or self.rotary_dim % 2:
            raise UserError(
                f"partial_rotary_factor: expected an even number of the head's {self.head_dim} dims, got "
                f"{self.partial_rotary_factor}"
            )

    @property
    def rotary_dim(self) -> int:
        return int(self.head_dim * self.partial_rotary_factor)

    @property
    def layer_types(self) -> list[str]:
        every = self.full_attention_interval
        return [FULL if (i + 1) % every == 0 else LINEAR for i in range(self.num_hidden_layers)]

    @property
    def key_dim(self) -> int:
        """Of all DeltaNet's keys of a token, and of its queries."""
        return self.linear_num_key_heads * self.linear_key_head_dim

    @property
    def value_dim(self) -> int:
        return self.linear_num_value_heads * self.linear_value_head_dim

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], where: str) -> Self:
        """See ``DecoderConfig.from_hf``. Of a model with vision, its text model."""
        text = hf.get("text_config", hf)
        cls._expect(hf, where, "text_config", isinstance(text, dict), "a table")
        for field in ("quantization_config", "tie_word_embeddings"):  # of the whole, where there is one
            text = {**text, field: hf.get(field)}
        cls._expect(text, where, "layer_types", isinstance(text.get("layer_types") or [], list), "a list")
        rope = cls._read_rope(text, where)
        types = text.get("layer_types")
        every = text.get("full_attention_interval")
        if types:
            every = types.index(FULL) + 1 if FULL in types else len(types) + 1
        config = cls._read(
            text,
            where,
            optional=[*_OURS, "rms_norm_eps", "tie_word_embeddings", "partial_rotary_factor"],
            rope_theta=rope.get("rope_theta"),
            partial_rotary_factor=rope.get("partial_rotary_factor"),
            full_attention_interval=every,
        )
        pattern = f"{FULL} in every n-th layer and {LINEAR} in all others"
        cls._expect(text, where, "layer_types", not types or types == config.layer_types, pattern)
        gate = text.get("output_gate_type")
        cls._expect(text, where, "output_gate_type", gate in (None, "swish", "silu"), "swish")
        gated = text.get("attn_output_gate", True)
        cls._expect(text, where, "attn_output_gate", bool(gated), "true")
        return config

    def to_hf(self) -> dict[str, Any]:
        fields = {name: value for name, value in vars(self).items() if name != "full_attention_interval"}
        return {
            **fields,
            "layer_types": self.layer_types,
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": self.rope_theta,
                "partial_rotary_factor": self.partial_rotary_factor,
            },
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": INIT_STD,
            "use_cache": True,
        }


@dataclass(frozen=True, kw_only=True)
class Qwen35Config(HybridConfig):
    """Sizes of a dense Qwen3.5."""

    intermediate_size: int

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], where: str) -> Self:
        """Also of a Qwen3-Next whose layers are all dense."""
        config = super().from_hf(hf, where)
        text = hf.get("text_config", hf)
        mlp_only = text.get("mlp_only_layers") or []
        cls._expect(text, where, "mlp_only_layers", isinstance(mlp_only, list), "a list")
        dense = set(mlp_only) >= set(range(config.num_hidden_layers))
        cls._expect(text, where, "num_experts", not text.get("num_experts") or dense, "dense models")
        return config

    def to_hf(self) -> dict[str, Any]:
        return super().to_hf() | {"architectures": ["Qwen3_5ForCausalLM"], "model_type": "qwen3_5_text"}


# Fields with a default that transformers has too.
_OURS = ("full_attention_interval", "linear_conv_kernel_dim")


class ZeroCentredRMSNorm(RMSNorm):
    """x / rms(x) * (1 + weight), all in fp32 at least, cast back to x's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(at_least_fp32(x))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (wide * scale * (1.0 + self.weight.to(wide.dtype))).to(x.dtype)


class GatedAttention(Attention):
    """Attention whose output, of each head for itself, passes a sigmoid gate."""

    def __init__(self, config: HybridConfig, attention: TreeAttention) -> None:
        super().__init__(config, attention, ZeroCentredRMSNorm)
        # Of each head the query, then its gate.
        self.q_proj = Linear(config.hidden_size, 2 * config.num_attention_heads * config.head_dim)

    def forward(
        self, x: Tensor, rope: Rope, layout: TreeLayout, gateway: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        q, gate = self.q_proj(x).unflatten(-1, (-1, 2 * self.config.head_dim)).chunk(2, dim=-1)
        out, exports = self.attend(q, x, rope, layout, gateway)
        return self.o_proj((out * torch.sigmoid(gate)).flatten(-2)), exports


class Conv(nn.Module):
    """The weight [D, 1, W] of a convolution of each of D channels for itself."""

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, 1, width))


class GatedDeltaNet(Mixer):
    """Gated DeltaNet (Yang et al., arXiv:2412.06464) behind a short convolution.

    Exports are states [S, G, K, V] and the convolution's last inputs [S, W - 1, 2 H K + G V].
    """

    cache_streams = ("states", "states")
    # One output per head: float8 saves nothing, and errors of the decays add up along a path.
    high_precision = ("in_proj_a", "in_proj_b")

    def __init__(self, config: HybridConfig) -> None:
        super().__init__()
        d, heads = config.hidden_size, config.linear_num_value_heads
        self.config = config
        self.gdn = TreeGDN()
        self.in_proj_qkv = Linear(d, 2 * config.key_dim + config.value_dim)
        self.in_proj_z = Linear(d, config.value_dim)
        self.in_proj_b = Linear(d, heads)
        self.in_proj_a = Linear(d, heads)
        self.conv1d = Conv(2 * config.key_dim + config.value_dim, config.linear_conv_kernel_dim)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.norm = RMSNorm(config.linear_value_head_dim, config.rms_norm_eps)
        self.out_proj = Linear(config.value_dim, d)

    def forward(
        self, x: Tensor, rope: Rope, layout: TreeLayout, gateway: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        c = self.config
        states, tails = gateway or (None, None)
        qkv, new_tails = tree_causal_conv1d(
            self.in_proj_qkv(x), self.conv1d.weight[:, 0], layout, tails, layout.conv_plan
        )
        q, k, v = qkv.split([c.key_dim, c.key_dim, c.value_dim], dim=-1)
        q, k = (part.unflatten(-1, (-1, c.linear_key_head_dim)) for part in (q, k))
        v, z = (part.unflatten(-1, (-1, c.linear_value_head_dim)) for part in (v, self.in_proj_z(x)))
        wide = at_least_fp32(x)
        beta = torch.sigmoid(self.in_proj_b(x))
        step = F.softplus(self.in_proj_a(x).to(wide) + self.dt_bias.to(wide))
        g = -self.A_log.to(wide).exp() * step
        out, new_states = self.gdn(q, k, v, g, beta, layout, states)
        gated = (self.norm(out) * F.silu(z.to(wide))).to(x.dtype)
        out = self.out_proj(gated.flatten(-2))
        if new_states is None or new_tails is None:
            return out, ()
        return out, (new_states, new_tails)

    def empty_rows(self, x: Tensor) -> tuple[Tensor, ...]:
        c = self.config
        state = c.linear_num_value_heads, c.linear_key_head_dim, c.linear_value_head_dim
        tail = c.linear_conv_kernel_dim - 1, 2 * c.key_dim + c.value_dim
        return x.new_zeros(PAD, *state, dtype=at_least_fp32(x)), x.new_zeros(PAD, *tail)

    def flops(self, num_tokens: int, num_pairs: int) -> int:
        """18 K V per token and head: the state read by a key and a query and written once, three times."""
        return 18 * num_tokens * self.config.value_dim * self.config.linear_key_head_dim


class Hybrid(Decoder):
    """What a Qwen3.5 is but for its MLPs."""

    norm_class = ZeroCentredRMSNorm
    # As Qwen3-Next has them, one key head after another.
    packed: ClassVar[dict[str, tuple[str, ...]]] = {
        "in_proj_qkvz.weight": ("in_proj_qkv.weight", "in_proj_z.weight"),
        "in_proj_ba.weight": ("in_proj_b.weight", "in_proj_a.weight"),
    }
    config: HybridConfig

    @abstractmethod
    def make_mlp(self) -> MLP | MoE:
        """That of a layer."""

    def make_block(self, index: int) -> Block:
        mlp = self.make_mlp()
        if self.config.layer_types[index] == FULL:
            attention = GatedAttention(self.config, self.attention)
            return Block(self.config, ZeroCentredRMSNorm, "self_attn", attention, mlp)
        return Block(self.config, ZeroCentredRMSNorm, "linear_attn", GatedDeltaNet(self.config), mlp)

    def prepare(self, layout: TreeLayout) -> TreeLayout:
        plan = prepare_conv(layout, self.config.linear_conv_kernel_dim)
        return dataclasses.replace(super().prepare(layout), conv_plan=plan)

    def unpack(self, name: str, tensor: Tensor) -> list[Tensor]:
        c = self.config
        group = c.linear_num_value_heads // c.linear_num_key_heads
        key, value = c.linear_key_head_dim, group * c.linear_value_head_dim
        sizes = [key, key, value, value] if name.endswith("qkvz.weight") else [group, group]
        heads = tensor.unflatten(0, (c.linear_num_key_heads, -1)).split(sizes, dim=1)
        *first, last = (part.flatten(0, 1) for part in heads)
        return [torch.cat(first), last]

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None = None) -> None:
        """Matrices and convolutions from N(0, 0.02^2), norms that change nothing, decays as published."""
        module, _, kind = name.rpartition(".")
        if isinstance(self.get_submodule(module), ZeroCentredRMSNorm):
            tensor.zero_()
        elif kind == "A_log":
            tensor.uniform_(0.01, 16.0, generator=generator).log_()
        else:
            super().init_parameter(name, tensor, generator)


def _published(
    hidden: int, intermediate: int, layers: int, heads: int, kv_heads: int, value_heads: int, *, tied: bool
) -> Qwen35Config:
    return Qwen35Config(
        vocab_size=248_320,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        linear_num_value_heads=value_heads,
        tie_word_embeddings=tied,
    )


class Qwen35(Hybrid):
    """Qwen3.5, dense."""

    Config = Qwen35Config
    hf_architectures: ClassVar[dict[str, str]] = {
        "qwen3_5_text": "Qwen3_5ForCausalLM",
        "qwen3_5": "Qwen3_5ForConditionalGeneration",  # with vision, which is not loaded
        "qwen3_next": "Qwen3NextForCausalLM",
    }
    flavors: ClassVar[dict[str, Qwen35Config]] = {
        # Less than a million parameters, for the byte-level demo and for tests on a CPU.
        "debug": Qwen35Config(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            linear_num_key_heads=2,
            linear_num_value_heads=4,
            linear_key_head_dim=32,
            linear_value_head_dim=32,
            tie_word_embeddings=True,
        ),
        "0.8B": _published(1024, 3584, 24, 8, 2, 16, tied=True),
        "2B": _published(2048, 6144, 24, 8, 2, 16, tied=True),
        "4B": _published(2560, 9216, 32, 16, 4, 32, tied=True),
        "9B": _published(4096, 12_288, 32, 16, 4, 32, tied=False),
        "27B": _published(5120, 17_408, 64, 24, 4, 48, tied=False),
    }
    config: Qwen35Config

    def make_mlp(self) -> MLP | MoE:
        return MLP(self.config.hidden_size, self.config.intermediate_size)
