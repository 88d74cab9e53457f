"""Qwen3 (dense), arXiv:2505.09388, on token trees. Parameter names are those of Hugging Face's
Qwen3ForCausalLM without the prefix ``model.``.

N tokens, d hidden size, H query heads, K key-value heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from titan_tree.components.moe import MoE
from titan_tree.components.tree_attention import TreeAttention
from titan_tree.errors import UserError
from titan_tree.models.block import MLP, Block, Linear, Mixer, RMSNorm, Rope
from titan_tree.models.decoder import Decoder
from titan_tree.models.decoder_config import INIT_STD, DecoderConfig
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.partition import PAD


@dataclass(frozen=True, kw_only=True)
class Qwen3Config(DecoderConfig):
    """Sizes of a Qwen3, by Hugging Face's names."""

    family = "Qwen3"

    intermediate_size: int

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], where: str) -> Self:
        rope = cls._read_rope(hf, where)
        if (rope.get("partial_rotary_factor") or 1.0) != 1.0:
            raise UserError(f"{where}: Qwen3 here supports RoPE of all dims only, got {rope}")
        types = hf.get("layer_types")
        full = isinstance(types or [], list) and all(kind == "full_attention" for kind in types or ())
        cls._expect(hf, where, "layer_types", full, "full_attention")
        optional = ("rms_norm_eps", "tie_word_embeddings")  # our defaults are transformers'
        config = cls._read(hf, where, optional, rope_theta=rope.get("rope_theta"))
        # Without "layer_types", layers from max_window_layers on have a window where it is switched on.
        windowed = hf.get("use_sliding_window") and hf.get("sliding_window", 4096) is not None
        whole = hf.get("max_window_layers", 28) >= config.num_hidden_layers
        expected = "full attention (use_sliding_window false)"
        cls._expect(hf, where, "max_window_layers", types is not None or not windowed or whole, expected)
        return config

    def to_hf(self) -> dict[str, Any]:
        """The ``config.json`` that transformers loads as the same model, with both spellings of RoPE."""
        return {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            **vars(self),
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "rope_scaling": None,
            "hidden_act": "silu",
            "attention_bias": False,
            "attention_dropout": 0.0,
            "initializer_range": INIT_STD,
            "use_sliding_window": False,
            "sliding_window": None,
            "max_window_layers": self.num_hidden_layers,
            "use_cache": True,
        }


def _published(hidden: int, intermediate: int, layers: int, heads: int, *, tied: bool) -> Qwen3Config:
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=hidden,
        intermediate_size=intermediate,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=8,
        tie_word_embeddings=tied,
    )


FLAVORS = {
    # A few hundred thousand parameters, for the byte-level demo and for tests on a CPU.
    "debug": Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
    ),
    "0.6B": _published(1024, 3072, 28, 16, tied=True),
    "1.7B": _published(2048, 6144, 28, 16, tied=True),
    "4B": _published(2560, 9728, 36, 32, tied=True),
    "8B": _published(4096, 12_288, 36, 32, tied=False),
    "14B": _published(5120, 17_408, 40, 40, tied=False),
    "32B": _published(5120, 25_600, 64, 64, tied=False),
}


class Attention(Mixer):
    """Grouped-query attention with RMSNorm on each head's queries and keys.

    Exports are keys and values [X, 2, Hkv, D].
    """

    cache_streams = ("keys",)

    def __init__(
        self, config: DecoderConfig, attention: TreeAttention, norm: type[RMSNorm] = RMSNorm
    ) -> None:
        super().__init__()
        d, D = config.hidden_size, config.head_dim
        self.config, self.attention = config, attention
        self.q_proj = Linear(d, config.num_attention_heads * D)
        self.k_proj = Linear(d, config.num_key_value_heads * D)
        self.v_proj = Linear(d, config.num_key_value_heads * D)
        self.o_proj = Linear(config.num_attention_heads * D, d)
        self.q_norm = norm(D, config.rms_norm_eps)
        self.k_norm = norm(D, config.rms_norm_eps)

    def forward(
        self, x: Tensor, rope: Rope, layout: TreeLayout, gateway: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        q = self.q_proj(x).unflatten(-1, (-1, self.config.head_dim))
        out, exports = self.attend(q, x, rope, layout, gateway)
        return self.o_proj(out.flatten(-2)), exports

    def attend(
        self, q: Tensor, x: Tensor, rope: Rope, layout: TreeLayout, gateway: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Heads' outputs [N, H, D] for queries q [N, H, D] of x, before their norm; and the exports."""
        k, v = (proj(x).unflatten(-1, (-1, self.config.head_dim)) for proj in (self.k_proj, self.v_proj))
        q, k = rope.rotate(self.q_norm(q)), rope.rotate(self.k_norm(k))
        exports: tuple[Tensor, ...] = ()
        if layout.exports is not None:
            exports = (torch.stack([part.index_select(0, layout.exports) for part in (k, v)], dim=1),)
        (context,) = gateway or (None,)
        return self.attention(q, k, v, layout, context), exports

    def empty_rows(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.new_zeros(PAD, 2, self.config.num_key_value_heads, self.config.head_dim),)

    def flops(self, num_tokens: int, num_pairs: int) -> int:
        """12 H D per pair: scores and values, forward once and backward twice."""
        return 12 * self.config.num_attention_heads * self.config.head_dim * num_pairs


class Qwen3(Decoder):
    """Qwen3, dense."""

    Config: ClassVar[type[Qwen3Config]] = Qwen3Config
    hf_architectures: ClassVar[dict[str, str]] = {"qwen3": "Qwen3ForCausalLM"}
    flavors: ClassVar[Mapping[str, Qwen3Config]] = FLAVORS

    norm_class = RMSNorm
    config: Qwen3Config

    def make_block(self, index: int) -> Block:
        mlp = self.make_mlp(index)
        return Block(self.config, RMSNorm, "self_attn", Attention(self.config, self.attention), mlp)

    def make_mlp(self, index: int) -> MLP | MoE:
        """That of the layer ``index``."""
        return MLP(self.config.hidden_size, self.config.intermediate_size)
