"""ModelCosts: the sizes of a model from which the cost of a batch follows, without the model itself."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.partition import PAD

if TYPE_CHECKING:  # a worker process needs the costs, but not the model
    from titan_tree.models.tree_model import TreeModel


@dataclass(frozen=True)
class ModelCosts:
    """What tokens, pairs and edges cost. It can be pickled, so that other processes can plan steps."""

    flops_per_token: int  # of a forward and backward pass, without recomputation
    flops_per_pair: int  # per pair of a token and a token that it sees, itself included
    flops_per_edge: int
    num_recurrent_layers: int
    num_layers: int
    key_bytes: int  # keys and values of one token, in all layers
    state_bytes: int  # recurrent states after one token, in all layers

    @staticmethod
    def of(model: TreeModel) -> ModelCosts:
        """Returns what tokens, pairs and edges cost in this model."""
        dtype = model.compute_dtype or model.embedding_weight.dtype
        like = torch.empty(0, dtype=dtype, device="meta")
        cached = row_bytes(model.cache_streams, model.empty_rows(like))
        head = model.embedding_weight if model.output_weight is None else model.output_weight
        return ModelCosts(
            flops_per_token=model.layer_flops(1, 0),
            flops_per_pair=model.layer_flops(0, 1),
            flops_per_edge=(6 if head.requires_grad else 4) * head.numel(),
            num_recurrent_layers=model.num_recurrent_layers,
            num_layers=len(model.layers),
            key_bytes=cached["keys"],
            state_bytes=cached["states"],
        )

    def training_flops(self, batch: TreeBatch) -> int:
        """Returns the floating-point operations of a forward and backward pass, without recomputation.

        Each token counts 6 per parameter of the layers' matrices, or 4 if it is frozen; of the routed
        experts, only those that the token uses count. Each edge counts the same for the output projection.
        ``Mixer.flops`` adds what mixes tokens. The batch must be on the CPU.
        """
        tokens, pairs, edges, _ = self.sizes(batch)
        return self.flops_per_token * tokens + self.flops_per_pair * pairs + self.flops_per_edge * edges

    @staticmethod
    def sizes(batch: TreeBatch) -> tuple[int, int, int, int]:
        """Returns the batch's tokens, visible pairs, edges, and chunks of the recurrence.

        The batch must be on the CPU.
        """
        chunks = 0 if batch.layout.chunks is None else len(batch.layout.chunks.before)
        return len(batch), num_pairs(batch), len(batch.edge_label), chunks

    def gateway_bytes(self, batch: TreeBatch) -> int:
        """Returns how many bytes the batch's partition reads from the partitions above it."""
        layout = batch.layout
        num_keys = len(layout.subtree_end) - len(batch)
        num_states = 0
        if self.state_bytes and layout.predecessor is not None:
            num_states = len(torch.unique(layout.predecessor[layout.predecessor < -1]))
        return num_keys * self.key_bytes + num_states * self.state_bytes


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


def num_pairs(batch: TreeBatch) -> int:
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
