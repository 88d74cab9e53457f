"""Decoder: the base class of all models. It returns log-probabilities of a tree's edges, never logits.

An edge is a pair of a token and its successor on some path. The first token of the pair predicts the second.

N tokens, E edges, L layers with experts, k experts of a token, d hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from titan_tree.components.logprobs import edge_is_top1, edge_logprobs
from titan_tree.components.moe import MoE, Routing
from titan_tree.components.tree_attention import TreeAttention
from titan_tree.components.tree_gdn import TreeGDN
from titan_tree.errors import UserError
from titan_tree.models.block import Block, gateway_rows
from titan_tree.models.decoder_config import INIT_STD, DecoderConfig
from titan_tree.models.experts import ExpertInfo
from titan_tree.models.layers import Linear, RMSNorm
from titan_tree.models.random_weights import ElementDraws, draw_weights
from titan_tree.models.rope import Rope
from titan_tree.models.shards import WeightShards, whole_weights
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.shares import Share


class ModelOutput(NamedTuple):
    """The result of a model: a tuple, because FSDP2 attaches its backward hooks to tensors in tuples."""

    logprobs: Tensor  # [E] fp32, nats
    entropy: Tensor | None = None  # [E] fp32, nats, on request
    routing: Routing | None = None  # sums over tokens, stacked over the L layers with experts
    # In a partition, one pair per tensor that crosses from the layers into the loss: the end of the layers'
    # autograd graph, and the leaf where the loss's graph begins. The tensors are the hidden states [E, d] of
    # the predicting tokens and the sums in ``routing``. The loss, with all its logits, can therefore be
    # differentiated at once, while the layers' graph stays until child partitions have added their gradients.
    loss_boundary: tuple[tuple[Tensor, Tensor], ...] = ()
    # In a partition, what the layers export for child partitions, one tensor per entry of
    # ``Decoder.cache_streams``.
    exports: tuple[Tensor, ...] | None = None
    routed_experts: tuple[Tensor, ...] = ()  # [N, k] int16 per layer with experts: the experts of each token
    is_top1: Tensor | None = None  # [E] bool, on request: whether the label has the largest logit


class Decoder(nn.Module, ABC):
    """A decoder that runs on a ``TreeBatch``. Parameters are uninitialized until ``init_weights`` or loading.

    Positions must be below ``config.max_position_embeddings`` and token ids below ``config.vocab_size``. The
    reader of the paths checks both on the host, where the check needs no synchronization.

    Args:
        config: sizes of the model.
        attention: backend of ``TreeAttention``.
        gdn: backend of ``TreeGDN``.
    Attributes:
        experts: the model's mixtures of experts; None for a dense model.
        cache_streams: one entry per tensor that the layers export: the stream of the gateway cache that
            stores its rows.
        sequence_group: the ranks that share the tokens and heads of every batch, and exchange them in every
            forward and backward pass. None: each rank has all. Set by distributed/sequence_parallel.py.
        compute_dtype: dtype of the activations; None: that of the weights.
        recompute_logits: recompute the logits in the backward pass instead of keeping probabilities.
    Raises:
        UserError: an unknown backend, or a named ``gdn`` backend for a model without Gated DeltaNet.
    """

    Config: ClassVar[type[DecoderConfig]]
    hf_architectures: ClassVar[Mapping[str, str]]  # architecture for each model_type of a config.json
    flavors: ClassVar[Mapping[str, DecoderConfig]]
    norm_class: ClassVar[type[RMSNorm]]
    # Snapshot tensors that hold several parameters each. Maps the end of a tensor's name to the ends of the
    # names of its parameters.
    packed: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    publishes_single_experts: ClassVar[bool] = False  # snapshots have one tensor per expert and projection

    def __init__(self, config: DecoderConfig, attention: str = "auto", gdn: str = "auto") -> None:
        super().__init__()
        self.config = config
        # Both have no parameters, so all layers share them.
        self.attention = TreeAttention(attention)
        self.gdn = TreeGDN(gdn)
        self.sequence_group: ProcessGroup | None = None
        self.compute_dtype: torch.dtype | None = None
        self.recompute_logits = True
        blocks = [self.make_block(i) for i in range(config.num_hidden_layers)]
        self.cache_streams = [stream for block in blocks for stream in block.mixer.cache_streams]
        if gdn != "auto" and "states" not in self.cache_streams:
            raise UserError(
                f"gdn: expected backend 'auto' for a {config.family} model, which has no Gated DeltaNet "
                f"layers, got {gdn!r}"
            )
        mixtures = [block.mlp if isinstance(block.mlp, MoE) else None for block in blocks]
        self.experts = ExpertInfo(mixtures) if any(mixtures) else None
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(blocks)
        self.norm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)

    @abstractmethod
    def make_block(self, index: int) -> Block:
        """Makes the layer ``index``."""

    def make_rope(self, positions: Tensor) -> Rope:
        """Makes the rotary embedding for positions [N]."""
        return Rope.at(positions, self.config.rotary_dim, self.config.rope_theta)

    def forward(
        self,
        batch: TreeBatch,
        entropy: bool = False,
        gateway: Sequence[Tensor] | None = None,
        is_top1: bool = False,
    ) -> ModelOutput:
        """Scores the batch's edges.

        Args:
            batch: N tokens and E edges, on the model's device.
            entropy: also return the entropy of each edge's distribution.
            gateway: needed by every partition but its plan's first: for each entry of ``cache_streams``, the
                first ``batch.cache_offset`` rows of that stream, with the exports of all partitions above.
            is_top1: also return whether each edge's label has the largest logit.
        Raises:
            UserError: ``batch`` is not a TreeBatch, or ``gateway`` or ``batch.routed_experts`` does not fit
                the model.
        """
        _check_batch(batch)
        layout = self.prepare(batch.layout)
        rope = self.make_rope(layout.positions)
        embedding = self.embed_tokens.weight.to(self.compute_dtype)
        x = F.embedding(batch.tokens, embedding)
        if self.communicates and torch.is_grad_enabled():
            # All ranks must exchange gradients in the same layers. If the weights below a layer are frozen, a
            # partition still needs the exchange there, for the gradients of its gateway. A dummy batch on
            # another rank has no gateway, and would skip the exchange if x did not require gradients.
            x.requires_grad_()
        gateways = gateway_rows(self.blocks, batch, gateway, x)
        exports: list[Tensor] = []
        routings: list[Routing] = []
        experts: list[Tensor] = []
        for layer, context, forced in zip(self.blocks, gateways, self._forced_experts(batch), strict=True):
            x, exported, routing, chosen = layer(x, rope, layout, context, forced)
            exports += exported
            if routing is not None:
                routings.append(routing)
                experts.append(chosen)
        hidden = self.norm(x)[batch.edge_source]
        head = embedding if self.lm_head is None else self.lm_head.weight.to(self.compute_dtype)
        routing = Routing.stack(routings) if routings else None
        top1 = edge_is_top1(hidden, head, batch.edge_label) if is_top1 else None
        if not exports:
            scores = self._scores(hidden, head, batch, entropy)
            return ModelOutput(*scores, routing, routed_experts=tuple(experts), is_top1=top1)
        ends = (hidden, *(routing or ()))
        leaves = [end.detach().requires_grad_(end.requires_grad) for end in ends]
        # The tensors that autograd saves here are not offloaded like the activations of the layers, because
        # the loss is differentiated at once. The hooks only detach them: a saved output would otherwise keep
        # alive the graph that saves it.
        with saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
            scores = self._scores(leaves[0], head, batch, entropy)
        routing = Routing(*leaves[1:]) if routing else None
        boundary = tuple(zip(ends, leaves, strict=True))
        return ModelOutput(*scores, routing, boundary, tuple(exports), tuple(experts), top1)

    def prepare(self, layout: TreeLayout) -> TreeLayout:
        """Returns the layout with everything that layers derive from it. Called once per batch.

        It drops what no layer reads, because a compiled graph depends on the sizes of all of its inputs.
        """
        if "states" not in self.cache_streams:
            layout = layout.for_attention()
        return self.attention.prepare(layout)

    def unpack(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Returns the parameters that the snapshot tensor ``name``, one of ``packed``, holds.

        Families that set ``packed`` override this method.
        """
        raise NotImplementedError

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange tokens within forward and backward passes, beyond what FSDP2 does."""
        return self.sequence_group is not None or (
            self.experts is not None and self.experts.group is not None
        )

    @property
    def share(self) -> Share:
        """The share of each batch that this rank computes."""
        group = self.sequence_group
        return Share() if group is None else Share(group.rank(), group.size())

    @property
    def blocks(self) -> Iterable[Block]:
        """The entries of ``layers``, typed as blocks: activation checkpointing may have wrapped them."""
        return cast(Iterable[Block], self.layers)

    def _scores(
        self, hidden: Tensor, head: Tensor, batch: TreeBatch, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        if batch.edge_temperature is not None:  # logits are linear in the hidden states
            hidden = (hidden / batch.edge_temperature[:, None]).to(hidden.dtype)
        return edge_logprobs(hidden, head, batch.edge_label, entropy, self.recompute_logits)

    def _forced_experts(self, batch: TreeBatch) -> Sequence[Tensor | None]:
        """Returns the recorded experts [N, k] for each layer; None for a layer that chooses by itself."""
        if batch.routed_experts is None:
            return [None] * self.config.num_hidden_layers
        if self.experts is None:
            raise UserError("routed_experts: expected none, because this model has no experts; remove them")
        return self.experts.by_layer(batch.routed_experts)

    @torch.no_grad()
    def init_weights(self, seed: int | None = None, shards: WeightShards | None = None) -> None:
        """Draws all parameters. It also initializes a model after ``to_empty`` from the meta device.

        Args:
            seed: determines all weights, for any number of ranks; None: drawn by torch's default generator.
            shards: the part of each parameter that this rank holds; None if the model is not sharded.
        """
        if seed is None:
            seed = int(torch.randint(2**62, (), device="cpu"))
        for name, shard in (whole_weights(self) if shards is None else shards).items():
            draw_weights(shard, name, seed, self.initial_values)

    def initial_values(self, name: str, draws: ElementDraws) -> Tensor:
        """Returns initial values for some elements of the parameter ``name``.

        Matrices are drawn from N(0, 0.02^2). Weights of norms are 1.
        """
        return draws.constant(1.0) if self.get_parameter(name).ndim == 1 else draws.normal(INIT_STD)

    def num_parameters(self) -> int:
        """Returns the number of parameters. A tied embedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())


def _check_batch(batch: object) -> None:
    if not isinstance(batch, TreeBatch):
        raise UserError(
            f"model: expected a TreeBatch, got {type(batch).__name__}; for log-probs of token ids use "
            "tree_logprobs(model, [ids]); to train, make a batch with "
            "TreeBatch.from_trees([TokenTree.from_paths([TokenPath(ids)])])"
        )
