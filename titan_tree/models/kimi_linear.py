"""Kimi-Linear (arXiv:2510.26692) on token trees.

Three of four layers have Kimi Delta Attention (KDA): a gated delta rule with a decay per channel of the keys.
The others have multi-head latent attention (MLA, arXiv:2405.04434) without positions. The first layers have
dense MLPs, all others mixtures of experts with sigmoid routers.

Parameter names are those of Hugging Face's KimiLinearForCausalLM without the prefix ``model.``. Snapshots
name some of them in another way, and hold the convolution as three tensors.

N tokens, d hidden size, H heads, K head dim of KDA, R rank of the latents, P dims of MLA's keys that all
heads share, W width of the convolution, X exported tokens, S exported states.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_tree.components.moe.layer import BIAS, MoE
from titan_tree.components.recurrence import TreeKDA, TreeRecurrence, prepare_conv, tree_causal_conv1d
from titan_tree.components.tree_attention import TreeAttention
from titan_tree.config.checks import (
    boolean,
    list_of,
    natural_int,
    one_of,
    positive_int,
    positive_number,
    required,
    setting,
)
from titan_tree.errors import UserError
from titan_tree.models.block import Block, Mixer
from titan_tree.models.decoder import Decoder
from titan_tree.models.decoder_config import DEBUG, ConfigJson, DecoderConfig
from titan_tree.models.gated_delta_net import Conv
from titan_tree.models.layers import MLP, Linear, RMSNorm, Rope, at_least_fp32
from titan_tree.models.qwen3 import DEBUG_EXPERTS, check_experts, one_spelling_of_experts
from titan_tree.models.weights import ElementDraws, log
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.partition import PAD

FULL, LINEAR = "full_attention", "linear_attention"
DENSE, SPARSE = "dense", "sparse"
LATENT_EPS = 1e-6  # of the norm of MLA's latents, in any config
# Other names of fields, which snapshots have.
SPELLINGS = {
    "max_position_embeddings": "model_max_length",
    "norm_topk_prob": "moe_renormalize",
    "num_experts_per_tok": "num_experts_per_token",
    "n_shared_experts": "num_shared_experts",
    "n_group": "num_expert_group",
}
# Names of parameters, and what snapshots call them.
STORED = (
    (".self_attn.forget_gate.", ".self_attn."),
    *((f".mlp.{part}.", f".block_sparse_moe.{part}.") for part in ("gate", "experts", "shared_experts")),
)
EXPERT = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
OF_FORGET_GATE = re.compile(r"\.self_attn\.(f_a_proj\.|f_b_proj\.|dt_bias|A_log)")
OWN_EXPERT = re.compile(r"(\.experts\.\d+\.)(gate_proj|down_proj|up_proj)\.")
STORED_EXPERT = re.compile(r"(\.experts\.\d+\.)(w1|w2|w3)\.")


@dataclass(frozen=True, kw_only=True)
class KimiLinearConfig(DecoderConfig):
    """Sizes of a Kimi-Linear model, by Hugging Face's names."""

    title = "Kimi-Linear"
    hf_optional = (*DecoderConfig.hf_optional, "head_dim", "rope_theta", "linear_conv_kernel_dim")

    intermediate_size: int = required(positive_int)  # of layers without experts
    moe_intermediate_size: int = required(positive_int)
    num_experts: int = required(positive_int)
    num_experts_per_tok: int = required(positive_int)
    n_shared_experts: int = setting(1, positive_int)
    norm_topk_prob: bool = setting(True, boolean)  # divide the chosen probabilities by their sum
    routed_scaling_factor: float = setting(1.0, positive_number)
    first_k_dense_replace: int = setting(1, natural_int)  # so many layers have no experts
    kv_lora_rank: int = required(positive_int)
    qk_nope_head_dim: int = required(positive_int)
    qk_rope_head_dim: int = required(positive_int)
    v_head_dim: int = required(positive_int)
    linear_num_heads: int = required(positive_int)
    linear_head_dim: int = required(positive_int)
    linear_conv_kernel_dim: int = setting(4, positive_int)
    layer_types: list[str] = required(list_of(one_of(FULL, LINEAR)))

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts(self.num_experts, self.num_experts_per_tok)
        if len(self.layer_types) != self.num_hidden_layers:
            raise UserError(
                f"layer_types: expected one for each of {self.num_hidden_layers} layers, got "
                f"{len(self.layer_types)}"
            )
        if self.num_key_value_heads != self.num_attention_heads:
            raise UserError(
                f"num_key_value_heads: expected that of num_attention_heads, {self.num_attention_heads}, "
                f"got {self.num_key_value_heads}"
            )

    @property
    def value_dim(self) -> int:
        """Size of one token's values in all heads of KDA, H K."""
        return self.linear_num_heads * self.linear_head_dim

    @property
    def mlp_layer_types(self) -> list[str]:
        """Whether each layer has experts, as transformers calls it."""
        dense = min(self.first_k_dense_replace, self.num_hidden_layers)
        return [DENSE] * dense + [SPARSE] * (self.num_hidden_layers - dense)

    @classmethod
    def from_hf(cls, hf: ConfigJson, where: str) -> Self:
        hf = one_spelling_of_experts(hf, where)
        hf |= {name: hf[other] for name, other in SPELLINGS.items() if hf.get(other) is not None}
        linear = hf.get("linear_attn_config") or {}
        cls.check_field(hf, where, "linear_attn_config", isinstance(linear, dict), "a table")
        sizes = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"}
        sizes["short_conv_kernel_size"] = "linear_conv_kernel_dim"
        hf |= {sizes[name]: linear[name] for name in sizes if name in linear}
        if hf.get("layer_types") is None and "full_attn_layers" in linear:  # they count from 1
            full = linear["full_attn_layers"]
            hf["layer_types"] = [
                FULL if i + 1 in full else LINEAR for i in range(hf.get("num_hidden_layers", 0))
            ]
        for field, ok, expected in (
            ("q_lora_rank", hf.get("q_lora_rank") is None, "null"),
            ("mla_use_nope", hf.get("mla_use_nope", True), "true"),
            ("n_group", hf.get("n_group", 1) == 1, "one group of experts"),
            (
                "moe_router_activation_func",
                hf.get("moe_router_activation_func", "sigmoid") == "sigmoid",
                "sigmoid",
            ),
            ("moe_layer_freq", hf.get("moe_layer_freq", 1) == 1, "1"),
            ("linear_attn_config", linear.get("gate_lower_bound") is None, "gates without a lower bound"),
            ("linear_attn_config", not linear.get("use_full_rank_gate"), "gates of low rank"),
        ):
            cls.check_field(hf, where, field, bool(ok), expected)
        config = cls.from_fields(hf, where, head_dim=hf.get("qk_rope_head_dim"))
        types = hf.get("mlp_layer_types") or config.mlp_layer_types
        cls.check_field(
            hf, where, "mlp_layer_types", types == config.mlp_layer_types, "dense layers before sparse ones"
        )
        return config

    def to_hf(self) -> ConfigJson:
        fields = {SPELLINGS.get(name, name): value for name, value in super().to_hf().items()}
        return fields | {
            "architectures": ["KimiLinearForCausalLM"],
            "model_type": "kimi_linear",
            "mlp_layer_types": self.mlp_layer_types,
            "q_lora_rank": None,
            "num_expert_group": 1,
            "topk_group": 1,
            "pad_token_id": None,  # transformers' default is a token of the published vocabulary
        }


class LatentAttention(Mixer):
    """Multi-head latent attention without positions. It exports latents [X, 1, R + P].

    The heads' keys and values are projections of a latent. A partition projects the latents of its context
    again, which takes less memory than their keys and values.
    """

    cache_streams = ("keys",)
    num_heads: Mapping[str, int] = {}

    def __init__(self, config: KimiLinearConfig, attention: TreeAttention) -> None:
        super().__init__()
        c = self.config = config
        self.attention = attention
        heads, nope, shared = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
        self.q_proj = Linear(c.hidden_size, heads * (nope + shared))
        self.kv_a_proj_with_mqa = Linear(c.hidden_size, c.kv_lora_rank + shared)
        self.kv_a_layernorm = RMSNorm(c.kv_lora_rank, LATENT_EPS)
        self.kv_b_proj = Linear(c.kv_lora_rank, heads * (nope + c.v_head_dim))
        self.o_proj = Linear(heads * c.v_head_dim, c.hidden_size)

    def forward(
        self, x: Tensor, rope: Rope, layout: TreeLayout, gateway: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        c, heads = self.config, self.config.num_attention_heads
        q = self.q_proj(x).unflatten(-1, (heads, -1))
        latent, shared = self.kv_a_proj_with_mqa(x).split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        latents = torch.cat([self.kv_a_layernorm(latent), shared], -1)
        exports: tuple[Tensor, ...] = ()
        if layout.exports is not None:
            exports = (latents.index_select(0, layout.exports)[:, None],)
        if gateway:
            assert layout.key_source is not None
            latents = torch.cat([gateway[0][:, 0], latents]).index_select(0, layout.key_source)
        latent, shared = latents.split([c.kv_lora_rank, c.qk_rope_head_dim], -1)
        keys, v = (
            self.kv_b_proj(latent).unflatten(-1, (heads, -1)).split([c.qk_nope_head_dim, c.v_head_dim], -1)
        )
        k = torch.cat([keys, shared[:, None].expand(-1, heads, -1)], -1)
        out = self.attention(q, k, v, layout)
        return self.o_proj(out.flatten(-2)), exports

    def empty_rows(self, x: Tensor) -> tuple[Tensor, ...]:
        return (x.new_zeros(PAD, 1, self.config.kv_lora_rank + self.config.qk_rope_head_dim),)

    def flops(self, num_tokens: int, num_visible_pairs: int) -> int:
        """Returns 6 H (D + Dv) per pair: scores and values, once forward and twice backward."""
        c = self.config
        sizes = c.qk_nope_head_dim + c.qk_rope_head_dim + c.v_head_dim
        return 6 * c.num_attention_heads * sizes * num_visible_pairs


class ForgetGate(nn.Module):
    """Computes the natural logarithm of the decay of each channel of the keys, from [N, d] to [N, H, K]."""

    def __init__(self, config: KimiLinearConfig) -> None:
        super().__init__()
        heads, size = config.linear_num_heads, config.linear_head_dim
        self.f_a_proj = Linear(config.hidden_size, size)
        self.f_b_proj = Linear(size, heads * size)
        self.dt_bias = nn.Parameter(torch.empty(heads * size))
        self.A_log = nn.Parameter(torch.empty(1, 1, heads, 1))

    def forward(self, x: Tensor) -> Tensor:
        wide = at_least_fp32(x)
        step = F.softplus(self.f_b_proj(self.f_a_proj(x)).to(wide) + self.dt_bias.to(wide))
        rate = self.A_log[0, 0].to(wide).exp()  # [H, 1]
        return -rate * step.unflatten(-1, (len(rate), -1))


class KimiDeltaAttention(Mixer):
    """KDA after a short causal convolution.

    It exports states [S, H, K, K] and the convolution's last inputs [S, W - 1, 3 H K].
    """

    cache_streams = ("states", "states")
    num_heads: Mapping[str, int] = {}

    def __init__(self, config: KimiLinearConfig, kda: TreeRecurrence) -> None:
        super().__init__()
        self.config, self.kda = config, kda
        d, heads, size = config.hidden_size, config.linear_num_heads, config.linear_head_dim
        self.q_proj, self.k_proj, self.v_proj = (Linear(d, heads * size) for _ in range(3))
        self.conv1d = Conv(3 * heads * size, config.linear_conv_kernel_dim)
        self.forget_gate = ForgetGate(config)
        self.b_proj = Linear(d, heads)
        self.g_a_proj = Linear(d, size)
        self.g_b_proj = Linear(size, heads * size)
        self.o_norm = RMSNorm(size, config.rms_norm_eps)
        self.o_proj = Linear(heads * size, d)

    def forward(
        self, x: Tensor, rope: Rope, layout: TreeLayout, gateway: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        heads, wide = (self.config.linear_num_heads, -1), at_least_fp32(x)
        states, tails = gateway or (None, None)
        qkv = torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], -1)
        qkv, new_tails = tree_causal_conv1d(qkv, self.conv1d.weight[:, 0], layout, tails, layout.conv_index)
        q, k, v = (part.unflatten(-1, heads) for part in qkv.chunk(3, -1))
        beta = self.b_proj(x).sigmoid()
        out, new_states = self.kda(q, k, v, self.forget_gate(x), beta, layout, states)
        gate = self.g_b_proj(self.g_a_proj(x)).unflatten(-1, heads)
        gated = (self.o_norm(out.to(wide)) * gate.to(wide).sigmoid()).to(x.dtype)
        mixed = self.o_proj(gated.flatten(-2))
        return mixed, () if new_states is None or new_tails is None else (new_states, new_tails)

    def empty_rows(self, x: Tensor) -> tuple[Tensor, ...]:
        c = self.config
        heads, size = c.linear_num_heads, c.linear_head_dim
        states = x.new_zeros(PAD, heads, size, size, dtype=at_least_fp32(x))
        return states, x.new_zeros(PAD, c.linear_conv_kernel_dim - 1, 3 * heads * size)

    def flops(self, num_tokens: int, num_visible_pairs: int) -> int:
        """Returns 18 K K per token and head, see ``GatedDeltaNet.flops``."""
        return 18 * num_tokens * self.config.linear_num_heads * self.config.linear_head_dim**2


SIZES_48B: ConfigJson = {
    "vocab_size": 163_840,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "moe_intermediate_size": 1024,
    "num_hidden_layers": 27,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 1_048_576,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "routed_scaling_factor": 2.446,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "linear_num_heads": 32,
    "linear_head_dim": 128,
    "layer_types": [FULL if i % 4 == 3 or i == 26 else LINEAR for i in range(27)],
}
DEBUG_SIZES: ConfigJson = (
    DEBUG
    | DEBUG_EXPERTS
    | {
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_key_value_heads": 4,
        "tie_word_embeddings": False,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 16,
        "v_head_dim": 32,
        "linear_num_heads": 4,
        "linear_head_dim": 32,
        "layer_types": [LINEAR, LINEAR, LINEAR, FULL],
    }
)


class KimiLinear(Decoder):
    """Kimi-Linear: KDA in most layers, latent attention in the others, and mixtures of experts."""

    Config = KimiLinearConfig
    hf_architectures: ClassVar[dict[str, str]] = {"kimi_linear": "KimiLinearForCausalLM"}
    flavors: ClassVar[Mapping[str, KimiLinearConfig]] = {
        "debug": KimiLinearConfig(**DEBUG_SIZES),
        "48B-A3B": KimiLinearConfig(**SIZES_48B),
    }
    norm_class = RMSNorm
    recurrence_class = TreeKDA
    publishes_single_experts = True
    joined: ClassVar[dict[str, tuple[str, ...]]] = {
        "conv1d.weight": ("q_conv1d.weight", "k_conv1d.weight", "v_conv1d.weight")
    }
    config: KimiLinearConfig

    def make_block(self, index: int) -> Block:
        c = self.config
        is_full = c.layer_types[index] == FULL
        mixer = LatentAttention(c, self.attention) if is_full else KimiDeltaAttention(c, self.recurrence)
        return Block(c, RMSNorm, "self_attn", mixer, self.make_mlp(index))

    def make_mlp(self, index: int) -> MLP | MoE:
        """Makes the feed-forward part of the layer ``index``."""
        c = self.config
        if c.mlp_layer_types[index] == DENSE:
            return MLP(c.hidden_size, c.intermediate_size)
        return MoE(
            c.hidden_size,
            c.moe_intermediate_size,
            c.num_experts,
            c.num_experts_per_tok,
            c.norm_topk_prob,
            shared_experts=MLP(c.hidden_size, c.moe_intermediate_size * c.n_shared_experts),
            sigmoid_scale=c.routed_scaling_factor,
        )

    def prepare(self, layout: TreeLayout) -> TreeLayout:
        plan = prepare_conv(layout, self.config.linear_conv_kernel_dim)
        return dataclasses.replace(super().prepare(layout), conv_index=plan)

    def stored_name(self, name: str) -> str:
        for own, stored in STORED:
            name = name.replace(own, stored)
        return OWN_EXPERT.sub(lambda match: f"{match[1]}{EXPERT[match[2]]}.", name)

    def own_name(self, stored: str) -> str:
        name = OF_FORGET_GATE.sub(r".self_attn.forget_gate.\1", stored).replace(".block_sparse_moe.", ".mlp.")
        own = {other: name for name, other in EXPERT.items()}
        return STORED_EXPERT.sub(lambda match: f"{match[1]}{own[match[2]]}.", name)

    def initial_values(self, name: str, draws: ElementDraws) -> Tensor:
        """Returns initial values for some elements of the parameter ``name``.

        Matrices and convolutions are drawn from N(0, 0.02^2). Norms begin as the identity, decays as
        published, biases of routers at 0.
        """
        kind = name.rpartition(".")[2]
        if kind == "A_log":
            return log(draws.uniform(1.0, 16.0))
        if kind == "dt_bias":  # steps from 0.001 to 0.1, whose softplus is almost their exponential
            return draws.uniform(math.log(1e-3), math.log(1e-1))
        return draws.constant(0.0) if kind == BIAS else super().initial_values(name, draws)
