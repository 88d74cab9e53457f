"""How long trees take to train: the cost model of "auto" partitioning and balance.

    sizes of trees                x   work of one model   /   rates of a GPU      =   seconds
    tokens, visible pairs, ...        ModelCosts              the tables below        TreeCosts

``TreeCosts`` is linear in the sizes of trees. It compares trees, ranks and partitions quickly, and balance
fits it to measured times.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.chunks import CHUNK
from titan_tree.tree.images import first_rows
from titan_tree.tree.partition import PAD
from titan_tree.tree.token_tree import TokenTree

# ---- Rates of one H200 in bf16. Most were measured or fitted to measured steps, see docs/performance.md and
# docs/memory.md. Only their ratios matter for "auto" and for balance.

# FLOP/s of a whole model, forward and backward. They include norms, RoPE, SwiGLU and activations of layers.
DENSE_FLOPS = 560e12  # of all that a dense model does for each token, and of the output projection
MOE_FLOPS = 330e12  # of all that a model with experts does for each token
PAIR_FLOPS = 430e12  # of attention, as a mean over trees of different shapes
CHUNK_SECONDS = 3.5e-3 / 512  # per chunk and DeltaNet layer: a layer takes 3.5 ms for 512 chunks
# Seconds per layer and forward pass, with its backward pass.
LAUNCH_SECONDS = 4e-3  # in which the host launches the kernels: the least time of a small batch
PARTITION_SECONDS = 15e-3 / 28  # that a partition adds: smaller kernels, weight gradients that are added
# Bytes of cached keys and values per second. They are gathered twice, and their gradients are added.
CONTEXT_BANDWIDTH = 164e9


# Distinct tokens; visible pairs, each a token and a token that it sees, itself included; edges that the loss
# counts; chunks of the recurrence (tree/chunks.py); pixels of distinct images, and pairs within an image.
SIZES = ("tokens", "visible_pairs", "edges", "chunks", "pixels", "pixel_pairs")


class TreeCosts(NamedTuple):
    """Seconds of a forward and backward pass, per unit of each size and per forward pass."""

    token: float
    visible_pair: float
    edge: float
    chunk: float
    pixel: float
    pixel_pair: float
    forward: float

    def seconds(self, sizes: np.ndarray) -> np.ndarray:
        """Returns [...] float64: the seconds of trees or of passes.

        Every rank must get the same bits, so this sums element by element in a fixed order. BLAS sums in an
        order that depends on the CPU.

        Args:
            sizes: [..., 6] of ``SIZES``, or [..., 7] with the number of forward passes.
        """
        total = np.zeros(sizes.shape[:-1])
        for i in range(sizes.shape[-1]):
            total = total + self[i] * sizes[..., i].astype(np.float64)
        return total


@dataclass(frozen=True, kw_only=True)
class ModelCosts:
    """Operations and bytes of one model. It can be pickled, so data workers can plan without the model.

    ``TreeModel.costs`` returns those of a model.

    Attributes:
        flops_per_token: operations of all layers per token, forward and backward, without recomputation.
        flops_per_visible_pair: the same per visible pair: a token and a token that it sees, itself included.
        flops_per_edge: operations of the output projection per scored edge.
        num_layers: number of all layers.
        num_recurrent_layers: number of Gated DeltaNet layers.
        has_experts: whether some layers are mixtures of experts.
        key_bytes: bytes of the keys and values of one token, in all layers.
        state_bytes: bytes of the recurrent states after one token, in all layers.
        flops_per_pixel: operations of the tower per pixel of an image; only its forward pass if it is frozen.
        flops_per_pixel_pair: the same per pair of pixels of one image.
        recomputes_images: whether the tower runs a second time in the backward pass.
    """

    flops_per_token: int
    flops_per_visible_pair: int
    flops_per_edge: int
    num_layers: int
    num_recurrent_layers: int
    has_experts: bool
    key_bytes: int
    state_bytes: int
    flops_per_pixel: float = 0.0
    flops_per_pixel_pair: float = 0.0
    recomputes_images: bool = False

    def tree_costs(self) -> TreeCosts:
        """Returns estimated seconds of the model on one H200."""
        recomputed = 4 / 3 if self.recomputes_images else 1.0
        return TreeCosts(
            token=self.flops_per_token / (MOE_FLOPS if self.has_experts else DENSE_FLOPS),
            visible_pair=self.flops_per_visible_pair / PAIR_FLOPS,
            edge=self.flops_per_edge / DENSE_FLOPS,
            chunk=self.num_recurrent_layers * CHUNK_SECONDS,
            pixel=recomputed * self.flops_per_pixel / DENSE_FLOPS,
            pixel_pair=recomputed * self.flops_per_pixel_pair / PAIR_FLOPS,
            forward=self.num_layers * LAUNCH_SECONDS,
        )

    def partition_seconds(
        self, num_tokens: int, num_visible_pairs: int, num_partitions: int, num_context: int
    ) -> float:
        """Returns the estimated seconds of all forward and backward passes of a partitioned tree.

        They exclude the output projection: it takes the same time however a tree is partitioned.

        Args:
            num_tokens: number of executed tokens of all partitions.
            num_visible_pairs: number of pairs of an executed token and a token that it sees, itself included.
            num_partitions: number of partitions.
            num_context: number of tokens whose keys and values partitions read from the gateway cache.
        """
        costs = self.tree_costs()
        return (
            (costs.token + costs.chunk / CHUNK) * num_tokens
            + costs.visible_pair * num_visible_pairs
            + PARTITION_SECONDS * self.num_layers * num_partitions
            + self.key_bytes / CONTEXT_BANDWIDTH * num_context
        )

    def training_flops(self, batch: TreeBatch) -> int:
        """Returns the floating-point operations of a forward and backward pass, without recomputation.

        Each token counts 6 per parameter of the layers' matrices, or 4 if it is frozen; of the routed
        experts, only those that the token uses count. Each edge counts the same for the output projection.
        ``Mixer.flops`` adds what mixes tokens. The tower counts each distinct image of ``batch.pixels`` once.
        The batch must be on the CPU.
        """
        return self._flops(batch_sizes(batch))

    def training_flops_of_trees(self, trees: Sequence[TokenTree]) -> int:
        """Returns the same for whole trees, of whose edges only those that the loss counts are scored."""
        return self._flops(tree_sizes(trees).sum(0).tolist())

    def _flops(self, sizes: Sequence[int]) -> int:
        tokens, visible_pairs, edges, _, pixels, pixel_pairs = sizes
        layers = self.flops_per_token * tokens + self.flops_per_visible_pair * visible_pairs
        tower = self.flops_per_pixel * pixels + self.flops_per_pixel_pair * pixel_pairs
        return layers + self.flops_per_edge * edges + round(tower)

    def gateway_bytes(self, batch: TreeBatch) -> int:
        """Returns how many bytes the batch's partition reads from the partitions above it."""
        layout = batch.layout
        num_keys = len(layout.subtree_end) - len(batch)
        num_states = 0
        if self.state_bytes and layout.predecessor is not None:
            num_states = len(torch.unique(layout.predecessor[layout.predecessor < -1]))
        return num_keys * self.key_bytes + num_states * self.state_bytes


# The costs of Qwen3-1.7B in bf16, for trees whose model is not known.
QWEN3_1_7B = ModelCosts(
    flops_per_token=6 * 28 * (2 * 2048 * 2048 + 2 * 2048 * 1024 + 3 * 2048 * 6144),
    flops_per_visible_pair=12 * 28 * 16 * 128,
    flops_per_edge=6 * 2048 * 151_936,
    num_layers=28,
    num_recurrent_layers=0,
    has_experts=False,
    key_bytes=28 * 2 * 8 * 128 * 2,
    state_bytes=0,
)


def row_bytes(streams: Iterable[str], rows: Iterable[Tensor]) -> dict[str, int]:
    """Returns the bytes of a row of the gateway cache by stream.

    Args:
        streams: the stream of each tensor.
        rows: PAD rows of each tensor.
    """
    sizes = {"keys": 0, "states": 0}
    for stream, tensor in zip(streams, rows, strict=True):
        sizes[stream] += tensor.nbytes // PAD
    return sizes


def batch_sizes(batch: TreeBatch) -> tuple[int, ...]:
    """Returns the ``SIZES`` of a batch. The batch must be on the CPU."""
    chunks = 0 if batch.layout.chunks is None else len(batch.layout.chunks.before)
    areas = [image.shape[0] * image.shape[1] for image in batch.pixels]
    images = sum(areas), sum(area**2 for area in areas)
    return len(batch), num_visible_pairs(batch), len(batch.edge_label), chunks, *images


def num_visible_pairs(batch: TreeBatch) -> int:
    """Returns the number of pairs of a token and a token that it sees, itself included.

    The batch must be on the CPU.
    """
    layout = batch.layout
    # The tokens with key <= key_index < subtree_end see a key (``TreeLayout``).
    end = layout.subtree_end.numpy()
    first = np.arange(len(end))
    if len(batch) < len(end):  # a partition runs only some of its keys
        first, end = np.searchsorted(layout.key_index.numpy(), [first, end])
    return int((end - first).sum())


def tree_sizes(trees: Sequence[TokenTree]) -> np.ndarray:
    """Returns [trees, 6] int64: the ``SIZES`` of each tree."""
    return np.array([_node_sizes(tree).sum(0) for tree in trees], np.int64).reshape(-1, len(SIZES))


def leaf_sizes(tree: TokenTree) -> np.ndarray:
    """Returns [leaves, 2, 6] int64: the ``SIZES`` that each leaf adds to a tree or to a piece of it.

    For each leaf in DFS order, entry 0 holds the sizes of the tokens that its path does not share with the
    paths of earlier leaves. Entry 1 holds those of the tokens that it shares: a piece that starts with this
    leaf (run/balance/splitting.py) computes them again. The tokens and visible pairs of a piece are the sums
    of these entries. Its edges and chunks are at most the sums. An image counts where a tree shows it first.
    """
    nodes = _node_sizes(tree)
    down_to = np.zeros((len(nodes) + 1, len(SIZES)), np.int64)  # from the root; the last row is for no node
    for node, parent in enumerate(tree.node_parent.tolist()):
        down_to[node] = down_to[parent] + nodes[node]
    starts = np.append(0, tree.leaves[:-1] + 1)  # the first node that each leaf adds
    return np.stack([np.add.reduceat(nodes, starts), down_to[tree.node_parent[starts]]], axis=1)


def _node_sizes(tree: TokenTree) -> np.ndarray:
    """Returns [K, 6] int64: the ``SIZES`` of each node. An image counts in the first node that shows it."""
    is_scored = np.concatenate([path.loss_mask for path in tree.paths]) > 0
    is_scored[tree.path_offsets[:-1]] = False  # no edge predicts the first token of a path
    is_label = np.zeros(len(tree), bool)
    is_label[tree.path_index[is_scored]] = True
    starts, tokens = tree.node_offsets[:-1], tree.node_length
    visible_pairs = np.add.reduceat(tree.positions, starts, dtype=np.int64) + tokens
    edges = np.add.reduceat(is_label, starts, dtype=np.int64)
    chunks = -(-tokens // CHUNK)  # a node without siblings may share a chunk with its parent
    pixels, pixel_pairs = np.zeros((2, len(tokens)), np.int64)
    if tree.image_row is not None:
        rows, first_tokens = np.unique(tree.image_row, return_index=True)
        for image, row in zip(tree.images, first_rows(tree.images).values(), strict=True):
            token = first_tokens[np.searchsorted(rows, row)]
            node, area = np.searchsorted(starts, token, side="right") - 1, image.pixels[..., 0].size
            pixels[node] += area
            pixel_pairs[node] += area**2
    sizes = [tokens, visible_pairs, edges, chunks, pixels, pixel_pairs]
    return np.stack(sizes, axis=1).astype(np.int64)
