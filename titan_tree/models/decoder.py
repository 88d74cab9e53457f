"""Decoder: the base class of titan_tree's own models.

N tokens, L layers with experts, k experts of a token.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_tree.components.lora import is_factor
from titan_tree.components.moe.layer import ExpertInfo, MoE
from titan_tree.components.moe.routing import Routing
from titan_tree.components.recurrence import TreeGDN
from titan_tree.errors import UserError
from titan_tree.models.block import Block, LayerOutput
from titan_tree.models.decoder_config import INIT_STD, ConfigJson, DecoderConfig
from titan_tree.models.layers import Linear, RMSNorm, Rope
from titan_tree.models.tree_model import TreeModel, matrix_flops, with_images
from titan_tree.models.weights import ElementDraws, WeightShards, draw_weights, whole_weights
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.layout import TreeLayout


class Decoder(TreeModel):
    """A decoder made of ``Block``s. Parameters are uninitialized until ``init_weights`` or loading.

    Args:
        config: sizes of the model.
        attention: backend of ``TreeAttention``.
        recurrence: backend of the recurrence.
    Raises:
        UserError: an unknown backend, or a named ``recurrence`` backend for a model without one.
    """

    Config: ClassVar[type[DecoderConfig]]
    hf_architectures: ClassVar[Mapping[str, str]]  # architecture for each model_type of a config.json
    flavors: ClassVar[Mapping[str, DecoderConfig]]
    norm_class: ClassVar[type[RMSNorm]]
    # Snapshot tensors that hold several parameters each. Maps the end of a tensor's name to the ends of the
    # names of its parameters.
    packed: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    publishes_packed: ClassVar[bool] = False  # snapshots have the tensors of ``packed``
    publishes_single_experts: ClassVar[bool] = False  # snapshots have one tensor per expert and projection

    config: DecoderConfig
    # Set by ``add_tower`` (vision.py): see ``Rope.at``, and the fields of config.json beside "text_config".
    mrope_sections: tuple[int, ...] = ()
    vision_json: ConfigJson | None = None

    def __init__(self, config: DecoderConfig, attention: str = "auto", recurrence: str = "auto") -> None:
        super().__init__(config, attention)
        self.recurrence = TreeGDN(recurrence)  # without parameters, so all layers share it
        blocks = [self.make_block(i) for i in range(config.num_hidden_layers)]
        self.cache_streams = [stream for block in blocks for stream in block.mixer.cache_streams]
        if recurrence != "auto" and "states" not in self.cache_streams:
            raise UserError(
                f"recurrence: expected backend 'auto' for a {config.title} model, which has no recurrent "
                f"layers, got {recurrence!r}"
            )
        self.num_recurrent_layers = sum("states" in block.mixer.cache_streams for block in blocks)
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
        """Makes the rotary embedding for positions [N], or [3, N] with images."""
        c = self.config
        return Rope.at(positions, c.rotary_dim, c.rope_theta, sections=self.mrope_sections)

    def run_layers(
        self,
        batch: TreeBatch,
        layout: TreeLayout,
        gateway: Sequence[Tensor],
        embedding: Tensor,
        features: Sequence[Tensor] = (),
    ) -> LayerOutput:
        rope = self.make_rope(layout.positions)
        if layout.positions.ndim == 2:  # layers read only the rotary embedding: no further compiled graphs
            layout = dataclasses.replace(layout, positions=layout.positions[0])
        x, of_images = with_images(F.embedding(batch.tokens, embedding), batch.image_row, features)
        if torch.is_grad_enabled():
            # If the embedding is frozen, x would not require gradients. Dummy batches, which have no gateway,
            # would then skip exchanges of gradients that other ranks make, and the layers would need
            # different compiled graphs.
            x.requires_grad_()
        rows = iter(gateway)
        exports: list[Tensor] = []
        routings: list[Routing] = []
        experts: list[Tensor] = []
        added = iter(of_images)
        for layer, forced in zip(self.blocks, self._forced_experts(batch), strict=True):
            layer_gateway = tuple(islice(rows, len(layer.mixer.cache_streams)))
            x, exported, routing, chosen = layer(x, rope, layout, layer_gateway, forced)
            if (deepstack := next(added, None)) is not None:
                x = x + deepstack
            exports += exported
            routings += [] if routing is None else [routing]
            experts += chosen
        return LayerOutput(
            self.norm(x),
            exports,
            Routing(*map(torch.stack, zip(*routings, strict=True))) if routings else None,
            tuple(experts),
        )

    def empty_rows(self, x: Tensor) -> list[Tensor]:
        return [rows for layer in self.blocks for rows in layer.mixer.empty_rows(x)]

    def layer_flops(self, num_tokens: int, num_visible_pairs: int) -> int:
        flops = matrix_flops(p for p in self.layers.parameters() if p.ndim == 2)
        if self.experts is not None:
            experts = (p for name, p in self.layers.named_parameters() if ".experts." in name)
            flops += matrix_flops(experts) * self.experts.sizes.top_k // self.experts.sizes.num_experts
        mixers = sum(layer.mixer.flops(num_tokens, num_visible_pairs) for layer in self.blocks)
        return flops * num_tokens + mixers

    @property
    def family(self) -> str:
        """The first model_type of the class, or its name."""
        return next(iter(self.hf_architectures), type(self).__name__)

    @property
    def last_norm(self) -> nn.Module:
        return self.norm

    @property
    def embedding_weight(self) -> Tensor:
        return self.embed_tokens.weight

    @property
    def output_weight(self) -> Tensor | None:
        return None if self.lm_head is None else self.lm_head.weight

    def unpack(self, name: str, tensor: Tensor) -> list[Tensor]:
        """Returns the parameters that the snapshot tensor ``name``, one of ``packed``, holds.

        Families that set ``packed`` override this method.
        """
        raise NotImplementedError

    @property
    def blocks(self) -> Iterable[Block]:
        """The entries of ``layers``, typed as blocks: activation checkpointing may have wrapped them."""
        return cast(Iterable[Block], self.layers)

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
            if not is_factor(name):  # those of LoRA are drawn by ``init_lora``
                draw_weights(shard, name, seed, self.initial_values)

    def initial_values(self, name: str, draws: ElementDraws) -> Tensor:
        """Returns initial values for some elements of the parameter ``name``.

        Matrices are drawn from N(0, 0.02^2). Weights of norms are 1, and biases of the tower 0.
        """
        if name.startswith("visual.") and name.endswith(".bias"):
            return draws.constant(0.0)
        return draws.constant(1.0) if self.get_parameter(name).ndim == 1 else draws.normal(INIT_STD)
