"""TreeModel: the contract of all models. They return log-probabilities of a tree's edges, never logits.

An edge is a pair of a token and its successor on some path. The first token of the pair predicts the second.

N tokens, E edges, L layers with experts, k experts of a token, d hidden size, V vocabulary.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from titan_tree.components.edge_statistics import Statistic, edge_statistics
from titan_tree.components.logprobs import edge_logprobs
from titan_tree.components.lora import LoRA
from titan_tree.components.moe.layer import ExpertInfo
from titan_tree.components.moe.routing import Routing
from titan_tree.components.tree_attention import TreeAttention
from titan_tree.errors import UserError
from titan_tree.models.block import LayerOutput
from titan_tree.models.layers import at_least_fp32
from titan_tree.tree.batch import TokenShard, TreeBatch
from titan_tree.tree.costs import ModelCosts, row_bytes
from titan_tree.tree.images import NO_TOWER, ImageLimits
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.partition import PAD


class BoundaryTensor(NamedTuple):
    """A tensor of a partition that crosses from the layers into the loss.

    Backward passes have two stages. The first one differentiates the loss down to ``loss_leaf``, which frees
    the logits. The second one continues from ``layers_end`` when child partitions have added their gradients.
    """

    layers_end: Tensor  # the end of the layers' autograd graph
    loss_leaf: Tensor  # the leaf where the loss's graph begins; equal values


class ModelOutput(NamedTuple):
    """The result of a model: a tuple, because FSDP2 attaches its backward hooks to tensors in tuples."""

    logprobs: Tensor  # [E] fp32, nats
    entropy: Tensor | None = None  # [E] fp32, nats, on request
    routing: Routing | None = None  # sums over tokens, stacked over the L layers with experts
    # In a partition: the hidden states [E, d] of the predicting tokens, and the sums in ``routing``.
    loss_boundary: tuple[BoundaryTensor, ...] = ()
    # In a partition, what the layers export for child partitions, one tensor per entry of
    # ``TreeModel.cache_streams``.
    exports: tuple[Tensor, ...] | None = None
    routed_experts: tuple[Tensor, ...] = ()  # [N, k] int16 per layer with experts: the experts of each token
    statistics: Mapping[Statistic, Tensor] = MappingProxyType({})  # [E] each, on request: see edge_statistics
    target_logprobs: Tensor | None = None  # [S] fp32, nats: of the batch's ``edge_targets``, if it has them


class CachedRows(NamedTuple):
    """What a layer exports after a token: a row of one tensor of ``TreeModel.cache_streams``."""

    stream: str  # of the gateway cache
    shape: tuple[int, ...]
    is_wide: bool = False  # fp32 or wider, instead of the dtype of activations

    def empty(self, x: Tensor) -> Tensor:
        """Returns PAD zero rows on the device of the activations x."""
        return x.new_zeros(PAD, *self.shape, dtype=at_least_fp32(x) if self.is_wide else x.dtype)


def matrix_flops(matrices: Iterable[Tensor]) -> int:
    """Returns the operations that matrices need for a token, forward and backward.

    They are 6 per parameter, and 4 if it is frozen: its gradient is not computed.
    """
    return sum((6 if matrix.requires_grad else 4) * matrix.numel() for matrix in matrices)


def is_trained(module: nn.Module) -> bool:
    """Returns whether a module has weights that are not frozen."""
    return any(weight.requires_grad for weight in module.parameters())


def _pixel_flops(tower: Any) -> tuple[float, float]:
    """Returns the operations per pixel of an image, and per pair of pixels, without recomputation.

    See ``matrix_flops``. The operations of a frozen tower are those of its forward pass.
    """
    c, per_pixel = tower.config, 0.0
    for name, weight in tower.named_parameters():
        if weight.ndim > 1 and not name.startswith("pos_embed."):
            side = c.patch_size * (
                c.spatial_merge_size if "merger" in name else 1
            )  # of what it runs once for
            per_pixel += weight.numel() / side**2
    per_pair = 2 * c.depth * c.hidden_size / c.patch_size**4  # scores, and sums of values
    per_number = 6 if is_trained(tower) else 2
    return per_number * per_pixel, per_number * per_pair


@dataclass(frozen=True)
class Execution:
    """How a model runs. ``parallelize`` chooses it."""

    dtype: torch.dtype | None = None  # of the activations; None: that of the weights
    recompute_logits: bool = True  # in the backward pass, instead of keeping probabilities
    # The ranks that share the tokens and heads of every batch, and exchange them in every forward and
    # backward pass (distributed/sequence_parallel.py). None: each rank has all.
    sequence_group: ProcessGroup | None = None
    is_compiled: bool = False  # whether layers are compiled


class TreeModel(nn.Module, ABC):
    """A model that runs on a ``TreeBatch``: a ``Decoder``, or a model of the library transformers.

    Positions must be below ``config.max_position_embeddings`` and token ids below ``config.vocab_size``. The
    reader of the paths checks both on the host, where the check needs no synchronization.

    Args:
        config: sizes of the model, by Hugging Face's names.
        attention: backend of ``TreeAttention``.
    Attributes:
        layers: the units of FSDP, activation checkpointing and compilation.
        experts: the mixtures of experts that titan_tree runs itself; None: there are none.
        cache_streams: one entry per tensor that the layers export: the stream of the gateway cache that
            stores its rows.
        execution: how it runs.
        visual: the tower, which turns images into rows in place of embeddings; None: there is none. Set by
            ``add_tower`` (vision.py).
        image_token_id: the placeholder of image tokens; None: unknown, or there is no tower.
        lora: the updates that are trained instead of the weights; None: there are none. Set by ``add_lora``.
        logit_cap: c tanh(s / c) replaces each logit s; None: it stays.
        windows: the sliding windows of the layers' attention, see ``TreeAttention.prepare``.
        longest_path: tokens of the longest path for which the layers are exact; None: they are for all.
    Raises:
        UserError: an unknown backend.
    """

    layers: nn.ModuleList
    experts: ExpertInfo | None = None
    num_recurrent_layers = 0  # layers of Gated DeltaNet
    lora: LoRA | None = None
    logit_cap: float | None = None
    windows: Collection[int | None] = (None,)
    longest_path: int | None = None
    image_token_id: int | None = None
    execution = Execution()

    def __init__(self, config: Any, attention: str = "auto") -> None:
        super().__init__()
        self.config = config
        self.attention = TreeAttention(attention)  # without parameters, so all layers share it
        self.cache_streams: list[str] = []
        self.visual: nn.Module | None = None

    @abstractmethod
    def run_layers(
        self,
        batch: TreeBatch,
        layout: TreeLayout,
        gateway: Sequence[Tensor],
        embedding: Tensor,
        features: Sequence[Tensor] = (),
    ) -> LayerOutput:
        """Runs everything but the output projection.

        Args:
            batch: see ``forward``.
            layout: the batch's layout, from ``prepare``.
            gateway: a tensor for each of ``cache_streams``, or () if the batch is not a partition.
            embedding: the weight [V, d] of the embedding, in the dtype of the activations.
            features: see ``forward``; () without images.
        """

    @abstractmethod
    def empty_rows(self, x: Tensor) -> list[Tensor]:
        """Returns PAD zero rows for each of ``cache_streams``, in the dtype of the activations x."""

    @abstractmethod
    def layer_flops(self, num_tokens: int, num_visible_pairs: int) -> int:
        """Returns the operations of a forward and backward pass of all layers, without recomputation.

        They are linear in both arguments.

        Args:
            num_tokens: N. Each counts ``matrix_flops`` of the matrices that it uses.
            num_visible_pairs: pairs of a token and a token that it sees, itself included.
        """

    @property
    @abstractmethod
    def family(self) -> str:
        """The name of the model's architecture."""

    @property
    @abstractmethod
    def last_norm(self) -> nn.Module:
        """The norm after the last layer, which is compiled by itself."""

    @property
    @abstractmethod
    def embedding_weight(self) -> Tensor:
        """The weight [V, d] of the embedding."""

    @property
    @abstractmethod
    def output_weight(self) -> Tensor | None:
        """The weight [V, d] of the output projection; None: that of the embedding."""

    def forward(
        self,
        batch: TreeBatch,
        entropy: bool = False,
        gateway: Sequence[Tensor] | None = None,
        statistics: Collection[Statistic] = (),
        features: Sequence[Tensor] | None = None,
    ) -> ModelOutput:
        """Scores the batch's edges.

        Args:
            batch: N tokens and E edges, on the model's device.
            entropy: also return the entropy of each edge's distribution.
            gateway: needed by every partition but its plan's first: for each entry of ``cache_streams``, the
                first ``batch.cache_offset`` rows of that stream, with the exports of all partitions above.
            statistics: also return these, see ``edge_statistics``.
            features: the result of ``encode`` for the images of the whole micro-batch. None: of
                ``batch.pixels``, which only the first batch of a plan has.
        Raises:
            UserError: ``batch`` is not a TreeBatch, or ``gateway``, ``batch.routed_experts`` or its images do
                not fit the model.
        """
        if not isinstance(batch, TreeBatch):
            raise UserError(
                f"model: expected a TreeBatch, got {type(batch).__name__}; for log-probs of token ids use "
                "tree_logprobs(model, [ids]); to train, make a batch with "
                "TreeBatch.from_trees([TokenTree.from_paths([TokenPath(ids)])])"
            )
        embedding, head = self.cast_ends()
        rows = _gateways(self, batch, gateway, embedding)
        if batch.image_row is not None and features is None:
            if not batch.pixels:
                raise UserError("features: expected those of the first batch's pixels, from encode, got None")
            features = self.encode(batch.pixels)
        out = self.run_layers(batch, self.prepare(batch.layout), rows, embedding, features or ())
        hidden = out.hidden[batch.edge_source]
        if not out.exports:
            scores = self.score_edges(hidden, head, batch, entropy, statistics)
            return scores._replace(routing=out.routing, routed_experts=out.routed_experts)
        ends = (hidden, *(out.routing or ()))
        leaves = [end.detach().requires_grad_(end.requires_grad) for end in ends]
        # The tensors that autograd saves here are not offloaded like the activations of the layers, because
        # the loss is differentiated at once. The hooks only detach them: a saved output would otherwise keep
        # alive the graph that saves it.
        with saved_tensors_hooks(torch.Tensor.detach, torch.Tensor.detach):
            scores = self.score_edges(leaves[0], head, batch, entropy, statistics)
        return scores._replace(
            routing=Routing(*leaves[1:]) if out.routing else None,
            loss_boundary=tuple(map(BoundaryTensor, ends, leaves)),
            exports=tuple(out.exports),
            routed_experts=out.routed_experts,
        )

    @property
    def image_limits(self) -> ImageLimits:
        """What the model reads of images."""
        c: Any = getattr(self.visual, "config", None)
        return ImageLimits(c and c.patch_size * c.spatial_merge_size, self.image_token_id)

    @property
    def keeps_features(self) -> bool:
        """Whether an image has the same features until the tower's weights change: the tower is frozen."""
        return self.visual is not None and not is_trained(self.visual)

    def encode(self, pixels: Sequence[Tensor]) -> list[Tensor]:
        """Runs the tower on each image.

        Args:
            pixels: [H, W, 3] uint8 for each image, on any device.
        Returns:
            The rows of all images, [R, d], and the same of each deepstack output: the tensor i > 0 is added
            to the output of the layer i - 1.
        Raises:
            UserError: the model has no tower.
        """
        if self.visual is None:
            raise UserError(NO_TOWER)
        return list(self.visual(pixels))

    def prepare(self, layout: TreeLayout) -> TreeLayout:
        """Returns the layout with everything that layers derive from it. Called once per batch.

        It drops what no layer reads, because a compiled graph depends on the sizes of all of its inputs.
        """
        if "states" not in self.cache_streams:
            layout = layout.for_attention()
        return self.attention.prepare(layout, self.windows)

    @property
    def communicates(self) -> bool:
        """Whether ranks exchange tokens within forward and backward passes, beyond what FSDP2 does."""
        return self.execution.sequence_group is not None or (
            self.experts is not None and self.experts.group is not None
        )

    @property
    def root(self) -> nn.Module:
        """The module that FSDP2 shards as a whole."""
        return self

    @property
    def token_shard(self) -> TokenShard:
        """The part of each batch that this rank computes."""
        group = self.execution.sequence_group
        return TokenShard() if group is None else TokenShard(group.rank(), group.size())

    def costs(self) -> ModelCosts:
        """Returns the operations and bytes per token, pair and edge of this model."""
        dtype = self.execution.dtype or self.embedding_weight.dtype
        cached = row_bytes(self.cache_streams, self.empty_rows(torch.empty(0, dtype=dtype, device="meta")))
        head = self.embedding_weight if self.output_weight is None else self.output_weight
        tower: Any = self.visual
        pixel, pixel_pair = (0.0, 0.0) if tower is None else _pixel_flops(tower)
        return ModelCosts(
            flops_per_token=self.layer_flops(1, 0),
            flops_per_visible_pair=self.layer_flops(0, 1),
            flops_per_edge=matrix_flops([head]),
            num_layers=len(self.layers),
            num_recurrent_layers=self.num_recurrent_layers,
            has_experts=self.experts is not None,
            key_bytes=cached["keys"],
            state_bytes=cached["states"],
            flops_per_pixel=pixel,
            flops_per_pixel_pair=pixel_pair,
            recomputes_images=tower is not None and is_trained(tower),
        )

    def num_parameters(self) -> int:
        """Returns the number of parameters. A tied embedding counts once."""
        return sum(parameter.numel() for parameter in self.parameters())

    def num_trained(self) -> int:
        return sum(parameter.numel() for parameter in self.parameters() if parameter.requires_grad)

    def cast_ends(self) -> tuple[Tensor, Tensor]:
        """Returns the weights of the embedding and of the output projection in the dtype of activations.

        Within ``cast_weights`` or under FSDP2, they have this dtype already. A model that is called directly
        needs the cast. ``.to(None)`` returns a weight as it is, because activations then have its dtype.
        """
        embedding = self.embedding_weight.to(self.execution.dtype)
        if self.output_weight is None:
            return embedding, embedding
        return embedding, self.output_weight.to(self.execution.dtype)

    def score_edges(
        self, hidden: Tensor, head: Tensor, batch: TreeBatch, entropy: bool, statistics: Collection[Statistic]
    ) -> ModelOutput:
        """Returns log-probs of the batch's edges, and on request entropies and ``statistics``.

        Args:
            hidden: [E, d], hidden states of the tokens that predict.
            head: [V, d], the output projection, in hidden's dtype.
        """
        cap = None
        if self.logit_cap is not None:
            cap = torch.full_like(batch.edge_label, self.logit_cap, dtype=torch.float32)
        if batch.edge_temperature is not None:  # logits are linear in the hidden states, up to the cap
            hidden = (hidden / batch.edge_temperature[:, None]).to(hidden.dtype)
            cap = None if cap is None else cap / batch.edge_temperature
        label, support = batch.edge_label, batch.edge_support
        logprobs, entropies, of_targets = edge_logprobs(
            hidden,
            head,
            label,
            entropy,
            self.execution.recompute_logits,
            cap=cap,
            support=support,
            targets=batch.edge_targets,
        )
        metrics = {}
        if statistics:
            metrics = edge_statistics(statistics, hidden, head, label, cap=cap, support=support)
        return ModelOutput(logprobs, entropies, statistics=metrics, target_logprobs=of_targets)


def with_images(
    x: Tensor, image_row: Tensor | None, features: Sequence[Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """Returns embeddings with images, and what images add to the outputs of the first layers, [N, d] each.

    Args:
        x: [N, d], embeddings of tokens.
        image_row: [N] int64, -1 for text; None: there are no images.
        features: see ``TreeModel.encode``; () without images.
    """
    if not features or image_row is None:
        return x, []
    first, *added = (_of_tokens(rows, image_row).to(x.dtype) for rows in features)
    return torch.where(image_row[:, None] >= 0, first, x), added


def _of_tokens(rows: Tensor, image_row: Tensor) -> Tensor:
    """Returns the row of each token, [N, d], and zeros for text. Gradients of a row are summed over tokens.

    Args:
        rows: [R, d].
        image_row: [N] int64, -1 for text.
    """
    # Text reads a row of zeros, of which ``padding_idx`` skips the gradient.
    return F.embedding(image_row + 1, F.pad(rows, (0, 0, 1, 0)), padding_idx=0)


def _gateways(
    model: TreeModel, batch: TreeBatch, gateway: Sequence[Tensor] | None, x: Tensor
) -> Sequence[Tensor]:
    """Returns a tensor for each of ``cache_streams``, or () if the batch is not a partition."""
    offset = batch.cache_offset
    if gateway is None and offset == (0, 0):
        return ()
    if gateway is None and offset == (PAD, PAD):  # a plan's first partition
        # They require gradients, as the rows of later partitions do, so that one compiled graph serves
        # both.
        return [rows.requires_grad_(torch.is_grad_enabled()) for rows in model.empty_rows(x)]
    expected = [getattr(offset, stream) for stream in model.cache_streams]
    sizes = [len(rows) for rows in gateway or ()]
    if sizes != expected or not offset.keys:
        raise UserError(
            f"gateway: expected tensors of {expected} rows from the gateway cache, one per exported "
            f"tensor, got {sizes}"
        )
    return list(gateway or ())
