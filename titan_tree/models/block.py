"""Block: one decoder layer, made of a mixer and an MLP or a mixture of experts.

Activations are [N, d], one row per distinct token of a forest, without a batch dimension or padding.
A layer mixes a token with its ancestors only.

A tree that is cut into partitions runs in several forward passes. Each of them *exports* rows, such as keys
and values, that its child partitions need. Child partitions receive them as their *gateway*.

N tokens, d hidden size, k experts of a token.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import ClassVar, NamedTuple, Protocol, cast

from torch import Tensor, nn

from titan_tree.components.moe import MoE, Routing
from titan_tree.models.decoder_config import DecoderConfig
from titan_tree.models.layers import MLP, RMSNorm, Rope
from titan_tree.tree.layout import TreeLayout


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
        num_heads: names and numbers of the heads that treat tokens independently of each other.
        exchange: gives this rank all tokens of some heads; None without sequence parallelism. With it, ``x``
            and the output have n of the N tokens, and everything exported belongs to the rank's own heads.
    """

    # One entry per exported tensor: the stream of the gateway cache that stores its rows (tree/gateway.py).
    # "keys" has rows for tokens that descendants see, "states" for tokens that descendants continue from.
    cache_streams: ClassVar[tuple[str, ...]]
    # Attribute names of linears that must not run in float8, because they need more precision.
    high_precision: ClassVar[tuple[str, ...]] = ()
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
            layout: layout of the tokens, from ``Decoder.prepare``.
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
    """The result of a ``Block``: a tuple, because FSDP2 attaches its backward hooks to tensors in tuples."""

    hidden: Tensor  # [N, d] or [1, N, d], the next layer's input
    exports: tuple[Tensor, ...]  # see ``Mixer.forward``
    routing: Routing | None = None  # sums over tokens, if the layer has experts
    routed_experts: Tensor | None = None  # [N, k] int16, the experts of each token, if the layer has experts


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
        return LayerOutput(x + out, exports, routing, experts)
