"""Block: one decoder layer, made of a mixer, such as Attention, and an MLP or a mixture of experts.

Activations are [N, d], one row per distinct token of a forest, without a batch dimension or padding.
A layer mixes a token with its ancestors only.

A tree that is cut into partitions runs in several forward passes. Each of them *exports* rows, such as keys
and values, that its child partitions need. Child partitions receive them as their *gateway*.

N tokens, d hidden size, H query heads, K key-value heads, D head dim, X exported tokens, k experts of a
token. With sequence parallelism, a rank projects n of the N tokens and computes attention for some heads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import ClassVar, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn

from titan_tree.components.moe.layer import MoE
from titan_tree.components.moe.routing import Routing
from titan_tree.components.tree_attention import TreeAttention
from titan_tree.models.decoder_config import DecoderConfig
from titan_tree.models.layers import MLP, Linear, RMSNorm, Rope
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.partition import PAD


class HeadExchange(Protocol):
    """Exchanges tokens for heads around the part of a mixer that mixes tokens.

    distributed/sequence_parallel.py implements and documents it, so that models do not depend on ranks.
    """

    def num_local_heads(self, num_heads: int) -> int: ...

    def local_heads(self, num_heads: int) -> slice: ...

    def to_heads(self, tensors: list[Tensor], num_tokens: int) -> list[Tensor]: ...

    def to_tokens(self, x: Tensor, num_local_tokens: int) -> Tensor: ...


class Mixer(nn.Module, ABC):
    """The part of a layer that mixes a token with its ancestors: attention or a recurrence.

    Attributes:
        num_heads: names and numbers of the heads that treat tokens independently of each other; {}: the mixer
            does not run with sequence parallelism.
        exchange: gives this rank all tokens of some heads; None without sequence parallelism. With it, ``x``
            and the output have n of the N tokens, and everything exported belongs to the rank's own heads.
    """

    # One entry per exported tensor: the stream of the gateway cache that stores its rows (tree/gateway.py).
    # "keys" has rows for tokens that descendants see, "states" for tokens that descendants continue from.
    cache_streams: ClassVar[tuple[str, ...]]
    # Names of heads that several ranks may hold, because each of them serves several other heads.
    copied_heads: ClassVar[tuple[str, ...]] = ()

    num_heads: Mapping[str, int]
    exchange: HeadExchange | None = None

    @abstractmethod
    def forward(
        self, x: Tensor, rope: Rope, layout: TreeLayout, gateway: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Mixes every token with its ancestors.

        Args:
            x: [N, d].
            rope: rotary embedding of the N tokens.
            layout: layout of the tokens, from ``TreeModel.prepare``.
            gateway: one tensor per entry of ``cache_streams`` with the rows that earlier partitions exported;
                () outside of partitions.
        Returns:
            [N, d], and in a partition the exports, one tensor per entry of ``cache_streams``; otherwise ().
        """

    @abstractmethod
    def empty_rows(self, x: Tensor) -> tuple[Tensor, ...]:
        """Returns one tensor of PAD zero rows per entry of ``cache_streams``, on the device of x.

        Each has the dtype that the layer exports if its input has the dtype of x.
        """

    @abstractmethod
    def flops(self, num_tokens: int, num_visible_pairs: int) -> int:
        """Returns the operations of a forward and backward pass, without those of weight matrices.

        They must be linear in both arguments.

        Args:
            num_tokens: N.
            num_visible_pairs: pairs of a token and a token that it sees, itself included.
        """


class LayerOutput(NamedTuple):
    """The result of a ``Block``, or of all layers of a model together.

    It is a tuple, because FSDP2 attaches its backward hooks to tensors in tuples.
    """

    hidden: Tensor  # [N, d] or [1, N, d], the next layer's input; of all layers, after the last norm
    exports: Sequence[Tensor]  # see ``Mixer.forward``; empty unless the batch is a partition
    routing: Routing | None = None  # sums over tokens, if there are experts; of all layers, stacked
    routed_experts: tuple[Tensor, ...] = ()  # [N, k] int16 per layer with experts: the experts of each token


class Block(nn.Module):
    """Pre-norm decoder layer: the unit of FSDP, activation checkpointing and compilation.

    Args:
        config: sizes of the model.
        norm: class of both norms.
        mixer_name: attribute name of the mixer, as in the published model's parameter names.
        mixer: attention or a recurrence.
        mlp: the feed-forward layer, dense or a mixture of experts.
    """

    def __init__(
        self, config: DecoderConfig, norm: type[RMSNorm], mixer_name: str, mixer: Mixer, mlp: MLP | MoE
    ) -> None:
        super().__init__()
        self.input_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.mixer_name = mixer_name
        self.add_module(mixer_name, mixer)
        self.post_attention_layernorm = norm(config.hidden_size, config.rms_norm_eps)
        self.mlp = mlp

    @property
    def mixer(self) -> Mixer:
        return cast(Mixer, getattr(self, self.mixer_name))

    def forward(
        self,
        x: Tensor,
        rope: Rope,
        layout: TreeLayout,
        gateway: tuple[Tensor, ...] = (),
        forced_experts: Tensor | None = None,
    ) -> LayerOutput:
        """Runs the layer on x [N, d].

        Args:
            x, rope, layout, gateway: see ``Mixer.forward``.
            forced_experts: see ``MoE.forward``; None for a dense layer.
        """
        mixed, exports = self.mixer(self.input_layernorm(x), rope, layout, gateway)
        x = x + mixed
        normed = self.post_attention_layernorm(x)
        if isinstance(self.mlp, MLP):
            return LayerOutput(x + self.mlp(normed), exports)
        assert layout.num_paths is not None
        out, routing, experts = self.mlp(normed, layout.num_paths, forced_experts)
        return LayerOutput(x + out, exports, routing, (experts,))


class Attention(Mixer):
    """Grouped-query attention (arXiv:2305.13245) with rotary positions.

    It exports keys and values, [X, 2, K, D].

    Args:
        config: sizes of the model.
        attention: the kernels, shared by all layers.
        qk_norm: class of a norm on each head's queries and keys; None: no such norm.
        output_gate: multiply each head's output by a sigmoid gate. ``q_proj`` then holds, for each head, the
            rows of its query and then the rows of its gate.
    """

    cache_streams = ("keys",)
    copied_heads = ("num_key_value_heads",)

    def __init__(
        self,
        config: DecoderConfig,
        attention: TreeAttention,
        *,
        qk_norm: type[RMSNorm] | None = None,
        output_gate: bool = False,
    ) -> None:
        super().__init__()
        d, D = config.hidden_size, config.head_dim
        self.config, self.attention, self.output_gate = config, attention, output_gate
        self.num_heads = {name: getattr(config, name) for name in ("num_attention_heads", *self.copied_heads)}
        self.q_proj = Linear(d, config.num_attention_heads * D * (1 + output_gate))
        self.k_proj = Linear(d, config.num_key_value_heads * D)
        self.v_proj = Linear(d, config.num_key_value_heads * D)
        self.o_proj = Linear(config.num_attention_heads * D, d)
        norms = [nn.Identity() if qk_norm is None else qk_norm(D, config.rms_norm_eps) for _ in range(2)]
        self.q_norm, self.k_norm = norms

    def forward(
        self, x: Tensor, rope: Rope, layout: TreeLayout, gateway: tuple[Tensor, ...]
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        D = self.config.head_dim
        q, gate = self.q_proj(x), None
        if self.output_gate:
            q, gate = q.unflatten(-1, (-1, 2 * D)).chunk(2, dim=-1)
        else:
            q = q.unflatten(-1, (-1, D))
        k, v = (proj(x).unflatten(-1, (-1, D)) for proj in (self.k_proj, self.v_proj))
        q, k = rope.rotate(self.q_norm(q)), rope.rotate(self.k_norm(k))
        if self.exchange is not None:
            q, k, v = self.exchange.to_heads([q, k, v], layout.key_index.shape[0])
        exports: tuple[Tensor, ...] = ()
        if layout.exports is not None:
            exports = (torch.stack([part.index_select(0, layout.exports) for part in (k, v)], dim=1),)
        (gateway_rows,) = gateway or (None,)
        out = self.attention(q, k, v, layout, gateway_rows)
        if self.exchange is not None:
            out = self.exchange.to_tokens(out, x.shape[0])
        if gate is not None:
            out = out * torch.sigmoid(gate)
        return self.o_proj(out.flatten(-2)), exports

    def empty_rows(self, x: Tensor) -> tuple[Tensor, ...]:
        num_heads = self.config.num_key_value_heads
        if self.exchange is not None:
            num_heads = self.exchange.num_local_heads(num_heads)
        return (x.new_zeros(PAD, 2, num_heads, self.config.head_dim),)

    def flops(self, num_tokens: int, num_visible_pairs: int) -> int:
        """Returns 12 H D per pair: scores and values, once forward and twice backward."""
        return 12 * self.config.num_attention_heads * self.config.head_dim * num_visible_pairs
