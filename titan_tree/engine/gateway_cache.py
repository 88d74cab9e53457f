"""The gateway cache: tensors that partitions export to their descendants, and the gradients of these tensors.

Attention reads the keys and values of a token's ancestors, and a recurrent layer the state of its
predecessor. If an ancestor ran in an earlier partition, these tensors come from the gateway cache. The cache
has one tensor for each tensor that a layer exports (``Mixer.cache_streams``). Its rows hold the exports of
one chain of partitions, the root's first. A partition that finishes frees its rows for the next one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from titan_tree.components.tree_attention.context import add_gradient
from titan_tree.tree.batch import TreeBatch


class GatewayCache:
    """Exports of the partitions of one chain, and the sums of their gradients.

    Args:
        streams: the stream of each exported tensor, "keys" or "states" (tree/gateway.py).
        batches: the partitions that will use the cache. The largest chain among them sets the number of rows.
    """

    def __init__(self, streams: Sequence[str], batches: Sequence[TreeBatch]) -> None:
        self.streams = streams
        self._num_rows = [max(self._written(batch, i).stop for batch in batches) for i in range(len(streams))]
        self.rows: list[Tensor] = []  # empty until the first partition writes
        self.gradients: list[Tensor] = []  # gradients of ``rows``, summed over all readers in fp32 or wider

    def write(self, batch: TreeBatch, exports: Sequence[Tensor]) -> None:
        """Copies the exports of a partition into its rows, and sets the gradients of these rows to zero."""
        if not self.rows:
            sized = zip(exports, self._num_rows, strict=True)
            self.rows = [x.new_zeros(num_rows, *x.shape[1:]) for x, num_rows in sized]
            if torch.is_grad_enabled():
                self.gradients = [
                    torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in self.rows
                ]
        for i, (rows, exported) in enumerate(zip(self.rows, exports, strict=True)):
            rows[self._written(batch, i)] = exported.detach()
        for i, gradients in enumerate(self.gradients):
            gradients[self._written(batch, i)] = 0

    def read(self, batch: TreeBatch) -> list[Tensor] | None:
        """Returns the rows that the ancestors of a partition wrote, as leaves that share the cache's memory.

        Each leaf adds its gradient to ``gradients`` as soon as autograd has computed it. Returns None while
        the cache is empty, and for a dummy batch.
        """
        if not self.rows or not batch.cache_offset.keys:
            return None
        stops = [getattr(batch.cache_offset, stream) for stream in self.streams]
        # ``.data`` gives a leaf its own version counter. Without it, autograd would take later writes to
        # other rows for in-place changes of the leaf.
        leaves = [rows.data[:stop] for rows, stop in zip(self.rows, stops, strict=True)]
        if torch.is_grad_enabled():
            for leaf, gradients in zip(leaves, self.gradients, strict=True):
                leaf.requires_grad_().register_post_accumulate_grad_hook(_AddTo(gradients[: len(leaf)]))
        return leaves

    def gradient(self, batch: TreeBatch, i: int) -> Tensor:
        """Returns the gradient of a partition's i-th export, in the dtype of the export."""
        return self.gradients[i][self._written(batch, i)].to(self.rows[i].dtype)

    def _written(self, batch: TreeBatch, i: int) -> slice:
        """Returns the rows that the partition writes in the i-th tensor of the cache."""
        start, length = (getattr(rows, self.streams[i]) for rows in (batch.cache_offset, batch.cache_writes))
        return slice(start, start + length)


@dataclass
class _AddTo:
    """A hook that moves a leaf's gradient into ``total``."""

    total: Tensor

    def __call__(self, leaf: Tensor) -> None:
        assert leaf.grad is not None
        add_gradient(self.total, leaf.grad)
        leaf.grad = None
