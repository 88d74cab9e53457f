"""Qwen3 (dense), arXiv:2505.09388, on token trees.

What differs from a plain decoder: activations are [N, d], one row per distinct token of a packed forest,
with no batch dimension and no padding; rotary angles follow a token's depth in its path; attention sees
ancestors only; and the output is log-probabilities of edges, never logits. Parameter names are those of
Hugging Face's Qwen3ForCausalLM without the prefix ``model.``.

N tokens, E edges, d hidden size, H query heads, K key-value heads, D head dim.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from titan_tree.components.logprobs import edge_logprobs
from titan_tree.components.tree_attention import Backend, TreeAttention
from titan_tree.data.batch import TreeBatch
from titan_tree.data.layout import TreeLayout
from titan_tree.data.partition import PAD
from titan_tree.errors import UserError

INIT_STD = 0.02


@dataclass(frozen=True, kw_only=True)
class Qwen3Config:
    """Sizes of a Qwen3, by Hugging Face's names. Raises UserError for sizes that cannot be."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int = 128
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    max_position_embeddings: int = 40_960
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "bool":
                ok, expected = isinstance(value, bool), "true or false"
            else:
                kinds = (int,) if field.type == "int" else (int, float)
                number = isinstance(value, kinds) and not isinstance(value, bool)
                ok, expected = number and 0 < value < math.inf, f"{field.type} > 0"
            if not ok:
                raise UserError(f"{field.name}: expected {expected}, got {value!r}")
        if self.num_attention_heads % self.num_key_value_heads:
            raise UserError(
                f"num_key_value_heads: expected a divisor of num_attention_heads "
                f"({self.num_attention_heads}), got {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise UserError(f"head_dim: expected an even number, got {self.head_dim}")

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any], where: str) -> Qwen3Config:
        """From a Hugging Face ``config.json``, old or new spelling of RoPE's fields.

        Raises UserError, naming ``where``, for missing sizes and for whatever this model does not compute.
        """

        def expect(field: str, ok: bool, expected: str) -> None:
            if not ok:
                raise UserError(f"{where}: {field}: Qwen3 here supports {expected} only, got {hf.get(field)}")

        # "rope_parameters" since transformers 5; before, "rope_theta" beside "rope_scaling".
        rope = hf.get("rope_parameters") or {"rope_theta": hf.get("rope_theta")}
        scaling = hf.get("rope_scaling") or {}
        for spelling in (rope, scaling):
            rope_type = spelling.get("rope_type", spelling.get("type", "default"))
            if rope_type != "default" or spelling.get("partial_rotary_factor", 1.0) != 1.0:
                raise UserError(
                    f"{where}: Qwen3 here supports RoPE of type default only, got {dict(spelling)}"
                )
        expect("attention_bias", not hf.get("attention_bias"), "false")
        expect("attention_dropout", not hf.get("attention_dropout"), "0")
        expect("hidden_act", hf.get("hidden_act", "silu") == "silu", "silu")
        expect("layer_types", set(hf.get("layer_types") or ()) <= {"full_attention"}, "full_attention")
        expect("quantization_config", not hf.get("quantization_config"), "unquantised weights")

        sizes = {f.name: hf[f.name] for f in dataclasses.fields(cls) if hf.get(f.name) is not None}
        if rope.get("rope_theta") is not None:
            sizes["rope_theta"] = rope["rope_theta"]
        optional = ("rms_norm_eps", "tie_word_embeddings")  # our defaults are transformers'
        missing = [f.name for f in dataclasses.fields(cls) if f.name not in (*sizes, *optional)]
        if missing:
            raise UserError(f"{where}: missing {', '.join(missing)}; is it the config.json of a Qwen3?")
        # Without "layer_types", layers from max_window_layers on have a window where it is switched on.
        windowed = hf.get("use_sliding_window") and hf.get("sliding_window", 4096) is not None
        if "layer_types" not in hf and windowed:
            expect(
                "max_window_layers",
                hf.get("max_window_layers", 28) >= sizes["num_hidden_layers"],
                "full attention (use_sliding_window false)",
            )
        try:
            return cls(**sizes)
        except UserError as error:
            raise UserError(f"{where}: {error}") from None

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


@dataclass(frozen=True)
class Rope:
    """Rotary embedding (RoFormer, arXiv:2104.09864) of N tokens, in the half-split layout of NeoX and Qwen.

    Not a tuple: FSDP2's mixed precision would cast the tensors of a tuple to bf16.
    """

    cos: Tensor  # [N, 1, D / 2] fp32
    sin: Tensor  # [N, 1, D / 2] fp32

    @staticmethod
    def at(positions: Tensor, head_dim: int, theta: float) -> Rope:
        """The angles ``position * theta ** (-2i / D)`` for positions [N]."""
        exponent = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
        angle = positions[:, None, None].float() * (1.0 / theta**exponent)
        return Rope(angle.cos(), angle.sin())

    def rotate(self, x: Tensor) -> Tensor:
        """x [N, heads, D] rotated, computed in fp32 at least, in x's dtype."""
        low, high = x.to(_at_least_fp32(x)).chunk(2, dim=-1)
        rotated = torch.cat([low * self.cos - high * self.sin, high * self.cos + low * self.sin], dim=-1)
        return rotated.to(x.dtype)


class RMSNorm(nn.Module):
    """x / rms(x) over the last dimension in fp32 at least, cast back to x's dtype, then times the weight.

    Of this and of ``Linear`` the weights may be wider than x, as master weights are; x's dtype counts.
    """

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(_at_least_fp32(x))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight.to(x.dtype) * (wide * scale).to(x.dtype)


class Linear(nn.Linear):
    """x @ weight.T in x's dtype."""

    def __init__(self, size_in: int, size_out: int) -> None:
        super().__init__(size_in, size_out, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Grouped-query attention with RMSNorm on each head's queries and keys."""

    def __init__(self, config: Qwen3Config, attention: TreeAttention) -> None:
        super().__init__()
        d, D = config.hidden_size, config.head_dim
        self.head_dim = D
        self.q_proj = Linear(d, config.num_attention_heads * D)
        self.k_proj = Linear(d, config.num_key_value_heads * D)
        self.v_proj = Linear(d, config.num_key_value_heads * D)
        self.o_proj = Linear(config.num_attention_heads * D, d)
        self.q_norm = RMSNorm(D, config.rms_norm_eps)
        self.k_norm = RMSNorm(D, config.rms_norm_eps)
        self.attention = attention

    def forward(
        self, x: Tensor, rope: Rope, layout: TreeLayout, context: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """See ``Block``."""
        q, k, v = (
            projection(x).unflatten(-1, (-1, self.head_dim))
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = rope.rotate(self.q_norm(q)), rope.rotate(self.k_norm(k))
        exports = None
        if layout.exports is not None:
            exports = torch.stack([x.index_select(0, layout.exports) for x in (k, v)], dim=1)
        return self.o_proj(self.attention(q, k, v, layout, context).flatten(-2)), exports


class MLP(nn.Module):
    """SwiGLU (Shazeer, arXiv:2002.05202)."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        d, hidden = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(d, hidden)
        self.up_proj = Linear(d, hidden)
        self.down_proj = Linear(hidden, d)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """Pre-norm decoder layer: the unit of FSDP, activation checkpointing and compilation."""

    def __init__(self, config: Qwen3Config, attention: TreeAttention) -> None:
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config, attention)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)

    def forward(
        self, x: Tensor, rope: Rope, layout: TreeLayout, context: Tensor | None = None
    ) -> tuple[Tensor, Tensor | None]:
        """x [N, d] of the next layer; of a partition also keys and values [X, 2, Hkv, D] of its exports.

        context: of a partition [R, 2, Hkv, D] keys and values that earlier forwards exported.
        """
        attended, exports = self.self_attn(self.input_layernorm(x), rope, layout, context)
        x = x + attended
        return x + self.mlp(self.post_attention_layernorm(x)), exports


class ModelOutput(NamedTuple):
    """What a model returns. A tuple, because FSDP2 hooks its backward on tensors found in tuples."""

    logprobs: Tensor  # [E] fp32, nats
    entropy: Tensor | None = None  # [E] fp32, nats, on request
    # Of a partition hidden states [E, d] of the predicting tokens, twice: where the blocks' graph ends, and
    # the leaf where that of logprobs begins: the loss's part, with all logits, waits for no other partition.
    cut: tuple[Tensor, Tensor] | None = None
    # Of each layer keys and values [X, 2, Hkv, D] of ``layout.exports``, for child partitions.
    exports: tuple[Tensor, ...] | None = None


class Qwen3(nn.Module):
    """Qwen3 on a ``TreeBatch``. Parameters are uninitialised until ``init_weights`` or a checkpoint.

    Positions must lie below ``config.max_position_embeddings`` and tokens below ``config.vocab_size``;
    whoever reads the paths checks that on the host, where it costs no synchronisation.

    Args:
        attention: backend of ``TreeAttention``.
    """

    Config = Qwen3Config
    hf_architecture = "Qwen3ForCausalLM"
    flavors: ClassVar[dict[str, Qwen3Config]] = FLAVORS

    def __init__(self, config: Qwen3Config, attention: Backend = "auto") -> None:
        super().__init__()
        self.config = config
        self.attention = TreeAttention(attention)  # no parameters: one for all layers
        self.compute_dtype: torch.dtype | None = None  # of activations; None: that of the weights
        self.recompute_logits = True  # in the backward; or keep [E, V] probabilities for it
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, self.attention) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)

    def forward(
        self, batch: TreeBatch, entropy: bool = False, gateway: Sequence[Tensor] | None = None
    ) -> ModelOutput:
        """Log-probabilities, and on request entropies, of the batch's edges.

        gateway: for a partition that is not its plan's first, of each layer the bank's first
            ``batch.bank_rows`` rows [R, 2, Hkv, D], with the ``exports`` of all partitions above it.
        """
        layout = self.attention.prepare(batch.layout)
        rope = Rope.at(layout.positions, self.config.head_dim, self.config.rope_theta)
        embedding = self.embed_tokens.weight.to(self.compute_dtype)
        x = F.embedding(batch.tokens, embedding)
        contexts = self._contexts(batch, gateway, x)
        exports: list[Tensor] = []
        for layer, context in zip(self.layers, contexts, strict=True):
            x, exported = layer(x, rope, layout, context)
            if exported is not None:
                exports.append(exported)
        hidden = self.norm(x)[batch.edge_source]
        head = embedding if self.lm_head is None else self.lm_head.weight.to(self.compute_dtype)
        if not exports:
            return ModelOutput(*self._scores(hidden, head, batch, entropy))
        leaf = hidden.detach().requires_grad_(hidden.requires_grad)
        # Whatever moves what the blocks save. Detached: an output would hold the graph that holds it.
        with saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
            scores = self._scores(leaf, head, batch, entropy)
        return ModelOutput(*scores, (hidden, leaf), tuple(exports))

    def _scores(
        self, hidden: Tensor, head: Tensor, batch: TreeBatch, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        return edge_logprobs(hidden, head, batch.edge_label, entropy, self.recompute_logits)

    def _contexts(
        self, batch: TreeBatch, gateway: Sequence[Tensor] | None, like: Tensor
    ) -> Sequence[Tensor | None]:
        """Of each layer; of a plan's first partition the bank's PAD empty rows."""
        if not batch.bank_rows and gateway is None:
            return [None] * len(self.layers)
        if batch.bank_rows == PAD and gateway is None:
            # With gradients, as rows of the bank have them, so that torch.compile makes one graph of both.
            shape = PAD, 2, self.config.num_key_value_heads, self.config.head_dim
            return [like.new_zeros(shape, requires_grad=torch.is_grad_enabled())] * len(self.layers)
        given = [len(context) for context in gateway or ()]
        if given != [batch.bank_rows] * len(self.layers) or not batch.bank_rows:
            raise UserError(
                f"Qwen3: gateway: expected {batch.bank_rows} rows for each of {len(self.layers)} layers, got "
                f"{given}"
            )
        return list(gateway or ())

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Matrices from N(0, 0.02^2), norm weights 1. Also after ``to_empty`` from the meta device."""
        for parameter in self.parameters():
            if parameter.ndim == 1:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0.0, INIT_STD, generator=generator)

    def num_parameters(self) -> int:
        """Parameters, a tied embedding counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def gateway_bytes(self, batch: TreeBatch) -> int:
        """Keys and values that the batch's partition reads from those above it."""
        rows = len(batch.layout.subtree_end) - len(batch)
        c, dtype = self.config, self.compute_dtype or self.embed_tokens.weight.dtype
        return 2 * rows * c.num_hidden_layers * c.num_key_value_heads * c.head_dim * dtype.itemsize

    def training_flops(self, batch: TreeBatch) -> int:
        """Floating-point operations of a forward and backward pass on ``batch``, recomputation not counted.

        6 per parameter of a layer's matrices and token, 6 per parameter of the output projection and
        edge, and 12 * H * D per layer and visible (query, key) pair: scores and values, forward once and
        backward twice. Reads the layout, so call it before the batch goes to a GPU.
        """
        layout, c = batch.layout, self.config
        key = torch.arange(len(layout.subtree_end), dtype=torch.int32)
        first, end = torch.searchsorted(layout.key_index, torch.stack([key, layout.subtree_end]))
        num_pairs = int((end - first).sum())
        matrices = sum(p.numel() for p in self.layers.parameters() if p.ndim == 2)
        head = c.vocab_size * c.hidden_size
        attention = 12 * c.num_hidden_layers * c.num_attention_heads * c.head_dim
        return 6 * (matrices * len(batch) + head * len(batch.edge_label)) + attention * num_pairs


def _at_least_fp32(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)
