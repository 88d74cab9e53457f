"""What our models share: a decoder on token trees, whose output is log-probabilities of edges, never logits.

N tokens, E edges, d hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import ClassVar, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from titan_tree.components.logprobs import edge_logprobs
from titan_tree.components.moe import BIAS, MoE, Routing
from titan_tree.components.tree_attention import TreeAttention
from titan_tree.errors import UserError
from titan_tree.models.block import Block, Linear, RMSNorm, Rope
from titan_tree.models.decoder_config import INIT_STD, DecoderConfig
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.partition import PAD
from titan_tree.tree.paths import ExpertSizes


class ModelOutput(NamedTuple):
    """What a model returns. A tuple, because FSDP2 hooks its backward on tensors found in tuples."""

    logprobs: Tensor  # [E] fp32, nats
    entropy: Tensor | None = None  # [E] fp32, nats, on request
    routing: Routing | None = None  # of the layers that have experts
    # Of a partition all that reaches the loss, hidden states [E, d] of the predicting tokens and sums of
    # ``routing``, each twice: where the blocks' graph ends, and the leaf where the loss's own begins: that
    # part, with all logits, waits for no other partition.
    loss_boundary: tuple[tuple[Tensor, Tensor], ...] = ()
    # Of each layer in turn what it exports, see ``Mixer.cache_streams``, for child partitions.
    exports: tuple[Tensor, ...] | None = None
    # Of each layer that has experts those of its tokens, [N, k] int16.
    routed_experts: tuple[Tensor, ...] = ()


class Decoder(nn.Module, ABC):
    """A decoder on a ``TreeBatch``. Parameters are uninitialised until ``init_weights`` or a checkpoint.

    Positions must lie below ``config.max_position_embeddings`` and tokens below ``config.vocab_size``;
    whoever reads the paths checks that on the host, where it costs no synchronisation.

    Args:
        attention: backend of ``TreeAttention``.
    """

    Config: ClassVar[type[DecoderConfig]]
    hf_architectures: ClassVar[Mapping[str, str]]  # by model_type, of a config.json
    flavors: ClassVar[Mapping[str, DecoderConfig]]
    norm_class: ClassVar[type[RMSNorm]]
    # Tensors of a snapshot that hold several parameters: ends of their names, and of those.
    packed: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    publishes_single_experts: ClassVar[bool] = False  # or fused, see expert_names.py

    def __init__(self, config: DecoderConfig, attention: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.attention = TreeAttention(attention)  # no parameters: one for all layers
        self.compute_dtype: torch.dtype | None = None  # of activations; None: that of the weights
        self.recompute_logits = True  # in the backward; or keep [E, V] probabilities for it
        self.expert_group: ProcessGroup | None = None  # ranks that share out the experts, in lockstep
        blocks = [self.make_block(i) for i in range(config.num_hidden_layers)]
        self.expert_sizes: ExpertSizes | None = None
        if mixtures := [block.mlp for block in blocks if isinstance(block.mlp, MoE)]:
            self.expert_sizes = ExpertSizes(len(mixtures), mixtures[0].top_k, mixtures[0].gate.out_features)
        self.has_experts = self.expert_sizes is not None
        # Of each tensor that layers export, one after another, the stack that has its rows.
        self.cache_streams = [stack for block in blocks for stack in block.mixer.cache_streams]
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(blocks)
        self.norm = self.norm_class(config.hidden_size, config.rms_norm_eps)
        self.lm_head = None if config.tie_word_embeddings else Linear(config.hidden_size, config.vocab_size)

    @abstractmethod
    def make_block(self, index: int) -> Block:
        """The layer ``index``."""

    def forward(
        self, batch: TreeBatch, entropy: bool = False, gateway: Sequence[Tensor] | None = None
    ) -> ModelOutput:
        """Log-probabilities, and on request entropies, of the batch's edges.

        gateway: for a partition that is not its plan's first, for each of ``cache_streams`` the first rows of the
            bank, ``batch.cache_offset``, with the exports of all partitions above it.
        """
        layout = self.prepare(batch.layout)
        rope = Rope.at(layout.positions, self.config.rotary_dim, self.config.rope_theta)
        embedding = self.embed_tokens.weight.to(self.compute_dtype)
        x = F.embedding(batch.tokens, embedding)
        if self.expert_group is not None and torch.is_grad_enabled():
            # All ranks exchange gradients in every layer, also where all below is frozen: a partition's
            # gateway wants them there, the dummy beside it does not.
            x.requires_grad_()
        gateways = iter(self._gateways(batch, gateway, x))
        forced_experts = iter(self._replayed(batch))
        exports: list[Tensor] = []
        routings: list[Routing] = []
        experts: tuple[Tensor, ...] = ()
        for layer in self.blocks:
            context = tuple(islice(gateways, len(layer.mixer.cache_streams)))
            own = next(forced_experts, None) if isinstance(layer.mlp, MoE) else None
            x, exported, routed = layer(x, rope, layout, context, own)
            exports += exported
            if routed is not None:
                routings.append(routed[0])
                experts += (routed[1],)
        hidden = self.norm(x)[batch.edge_source]
        head = embedding if self.lm_head is None else self.lm_head.weight.to(self.compute_dtype)
        routing = Routing(*map(torch.stack, zip(*routings, strict=True))) if routings else None
        if not exports:
            return ModelOutput(*self._scores(hidden, head, batch, entropy), routing, routed_experts=experts)
        ends = (hidden, *(routing or ()))
        leaves = [end.detach().requires_grad_(end.requires_grad) for end in ends]
        # Whatever moves what the blocks save. Detached: an output would hold the graph that holds it.
        with saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
            scores = self._scores(leaves[0], head, batch, entropy)
        routing = Routing(*leaves[1:]) if routing else None
        return ModelOutput(*scores, routing, tuple(zip(ends, leaves, strict=True)), tuple(exports), experts)

    def prepare(self, layout: TreeLayout) -> TreeLayout:
        """The layout with all that layers derive from it, once per batch."""
        return self.attention.prepare(layout)

    def _replayed(self, batch: TreeBatch) -> Sequence[Tensor]:
        """For each layer that has experts; or none."""
        given = batch.routed_experts
        if given is None:
            return ()
        sizes = None if self.expert_sizes is None else self.expert_sizes[:2]
        if sizes != (len(given), given.shape[2]):
            raise UserError(
                f"routed_experts: expected (layers, experts of a token) as the model has, {sizes}, got "
                f"{(len(given), given.shape[2])}"
            )
        return given.unbind()

    @property
    def router_biases(self) -> dict[str, Tensor]:
        """Those of ``add_router_biases``, by their names in ``state_dict``."""
        return {name: value for name, value in self.state_dict().items() if name.endswith(BIAS)}

    def add_router_biases(self) -> None:
        """Zeros [E] fp32, where there are none, in every layer that has experts.

        Raises UserError where no layer has.
        """
        mixtures = [block.mlp for block in self.blocks if isinstance(block.mlp, MoE)]
        if not mixtures:
            raise UserError(
                "router_bias: expected a model with experts, such as qwen3_moe; this one has none: leave out "
                "router_bias.rate"
            )
        for moe in mixtures:
            if moe.e_score_correction_bias is None:
                weight = moe.gate.weight
                moe.e_score_correction_bias = torch.zeros(moe.gate.out_features, device=weight.device)

    def unpack(self, name: str, tensor: Tensor) -> list[Tensor]:
        """The parameters in a tensor of ``packed``."""
        raise NotImplementedError

    @property
    def blocks(self) -> Iterable[Block]:
        """``layers``, whatever they are wrapped in."""
        return cast(Iterable[Block], self.layers)

    def _scores(
        self, hidden: Tensor, head: Tensor, batch: TreeBatch, entropy: bool
    ) -> tuple[Tensor, Tensor | None]:
        return edge_logprobs(hidden, head, batch.edge_label, entropy, self.recompute_logits)

    def _gateways(self, batch: TreeBatch, gateway: Sequence[Tensor] | None, x: Tensor) -> Sequence[Tensor]:
        """For each of ``cache_streams``; for a plan's first partition empty rows."""
        above = batch.cache_offset
        if gateway is None and above == (0, 0):
            return ()
        if gateway is None and above == (PAD, PAD):
            # With gradients, as rows of the bank have them, so that torch.compile makes one graph of both.
            rows = [row for layer in self.blocks for row in layer.mixer.empty_rows(x)]
            return [row.requires_grad_(torch.is_grad_enabled()) for row in rows]
        expected = [getattr(above, stack) for stack in self.cache_streams]
        given = [len(rows) for rows in gateway or ()]
        if given != expected or not above.keys:
            raise UserError(f"gateway: expected {expected} rows of the bank's tensors, got {given}")
        return list(gateway or ())

    @torch.no_grad()
    def init_weights(self, generator: torch.Generator | None = None) -> None:
        """Draw all parameters. Also after ``to_empty`` from the meta device."""
        for name, parameter in self.named_parameters():
            self.init_parameter(name, parameter, generator)

    def init_parameter(self, name: str, tensor: Tensor, generator: torch.Generator | None = None) -> None:
        """Fill ``tensor`` as the parameter ``name`` begins: matrices from N(0, 0.02^2), norm weights 1."""
        if tensor.ndim == 1:
            tensor.fill_(1.0)
        else:
            tensor.normal_(0.0, INIT_STD, generator=generator)

    def num_parameters(self) -> int:
        """Parameters, a tied embedding counted once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def gateway_bytes(self, batch: TreeBatch) -> int:
        """What the batch's partition reads from those above it."""
        layout = batch.layout
        used = {"keys": len(layout.subtree_end) - len(batch), "states": 0}
        if layout.predecessor is not None:
            used["states"] = len(torch.unique(layout.predecessor[layout.predecessor < -1]))
        like = torch.empty(0, dtype=self.compute_dtype or self.embed_tokens.weight.dtype, device="meta")
        rows = [row for layer in self.blocks for row in layer.mixer.empty_rows(like)]
        return sum(
            row.nbytes // PAD * used[stack] for row, stack in zip(rows, self.cache_streams, strict=True)
        )

    def training_flops(self, batch: TreeBatch) -> int:
        """Floating-point operations of a forward and backward pass on ``batch``, recomputation not counted.

        6 per parameter of a layer's matrices and token, of experts those that a token has; 6 per parameter
        of the output projection and edge; and what mixes tokens (``Mixer.flops``). Reads the layout, so
        call it before the batch goes to a GPU.
        """
        layout, c = batch.layout, self.config
        key = torch.arange(len(layout.subtree_end), dtype=torch.int32)
        first, end = torch.searchsorted(layout.key_index, torch.stack([key, layout.subtree_end]))
        num_pairs = int((end - first).sum())
        matrices = sum(p.numel() for p in self.layers.parameters() if p.ndim == 2)
        experts = [module for module in self.layers.modules() if isinstance(module, MoE)]
        matrices += sum(moe.active_parameters for moe in experts)
        head = c.vocab_size * c.hidden_size
        mixing = sum(layer.mixer.flops(len(batch), num_pairs) for layer in self.blocks)
        return 6 * (matrices * len(batch) + head * len(batch.edge_label)) + mixing
