"""The forward and backward passes of one micro-batch, nested if it has several partitions.

    F(parent)  F(child 1) B(child 1)  F(child 2) B(child 2)  B(parent)

A partition writes its keys, values and recurrent states into the gateway cache. Its children read them as
leaves of their own autograd graphs. The children's backward passes sum the gradients of these leaves in fp32.
When all children are done, the parent runs its backward pass with these sums as gradients of its exports.
Every token runs once, unless its activations are recomputed, and only the activations of one chain of
partitions are live. The result is exact: only the order of the chain rule changes.

Method: Tree Training, arXiv:2511.00413, version 5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.distributed.fsdp import FSDPModule

from titan_tree.components.tree_attention.context import add_gradient
from titan_tree.engine.activations import Activations
from titan_tree.engine.feature_cache import cache_of
from titan_tree.models.layers import at_least_fp32
from titan_tree.models.tree_model import ModelOutput, TreeModel
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.gateway import CacheRows


class GatewayCache:
    """Exports of the partitions of one chain, and the sums of their gradients.

    It has one tensor for each tensor that a layer exports (``Mixer.cache_streams``). Its rows hold the
    exports of the chain, the root's first. A partition that finishes frees its rows for the next one.

    Args:
        streams: the stream of each exported tensor, "keys" or "states" (tree/gateway.py).
        batches: the partitions that will use the cache. The largest chain among them sets the number of rows.
    """

    def __init__(self, streams: Sequence[str], batches: Sequence[TreeBatch]) -> None:
        self.streams = streams
        stops = [[written.stop for written in self._written(batch)] for batch in batches]
        self._num_rows = list(map(max, zip(*stops, strict=True)))
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
        written = self._written(batch)
        rows = [rows[part] for rows, part in zip(self.rows, written, strict=True)]
        torch._foreach_copy_(rows, [exported.detach() for exported in exports])
        if self.gradients:
            torch._foreach_zero_([x[part] for x, part in zip(self.gradients, written, strict=True)])

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
                leaf.requires_grad_().register_post_accumulate_grad_hook(
                    partial(_move_gradient, gradients[: len(leaf)])
                )
        return leaves

    def export_gradients(self, batch: TreeBatch) -> list[Tensor]:
        """Returns the gradients of a partition's exports, in the dtypes of the exports."""
        parts = zip(self.rows, self.gradients, self._written(batch), strict=True)
        return [gradients[part].to(rows.dtype) for rows, gradients, part in parts]

    def _written(self, batch: TreeBatch) -> list[slice]:
        """Returns the rows that the partition writes in each tensor of the cache."""
        spans = zip(CacheRows._fields, batch.cache_offset, batch.cache_writes, strict=True)
        of_stream = {stream: slice(start, start + length) for stream, start, length in spans}
        return [of_stream[stream] for stream in self.streams]


def _move_gradient(total: Tensor, leaf: Tensor) -> None:
    """Moves a leaf's gradient into ``total``."""
    assert leaf.grad is not None
    add_gradient(total, leaf.grad)
    leaf.grad = None


def encode(model: TreeModel, batches: Sequence[TreeBatch]) -> tuple[list[Tensor] | None, Sequence[TreeBatch]]:
    """Returns the features of a micro-batch's images, if there are any, and its batches without the pixels.

    If ranks share the tower's weights, they all run it, also those without images.
    """
    first, *others = batches
    if first.image_row is None and not isinstance(model.visual, FSDPModule):
        return None, batches
    if model.visual is not None and model.keeps_features:
        rows = cache_of(model.visual).encode(model, first.image_keys, first.pixels)
    else:
        rows = model.encode(first.pixels)
    return rows, [replace(first, pixels=(), image_keys=()), *others]


ComputeLoss = Callable[[TreeBatch, ModelOutput], Tensor | None]


@dataclass
class _Partition:
    """A partition between its forward and its backward pass."""

    number: int  # its number in the plan
    batch: TreeBatch  # its batch on the device
    has_children: bool
    keeps_activations: bool = True  # if False, the backward pass recomputes the forward pass first
    # The backward pass starts at the loss tensors, each with its gradient, and at the exports, each with its
    # index. Edges of the autograd graph stand for the tensors, so that their memory can be freed.
    loss_edges: list[tuple[GradientEdge, Tensor | None]] = field(default_factory=list)
    export_edges: list[tuple[GradientEdge, int]] = field(default_factory=list)


def train_micro_batch(
    model: TreeModel,
    batches: Sequence[TreeBatch],
    compute_loss: ComputeLoss,
    device: torch.device,
    *,
    entropy: bool = False,
    activations: Activations | None = None,
    before_last_backward: Callable[[], None] | None = None,
) -> int:
    """Runs every forward and every backward pass of a micro-batch once, with or without partitions.

    Gradients accumulate in ``parameter.grad``.

    Args:
        model: the model to train.
        batches: one per partition, in the plan's order (``TreeBatch.from_plan``), on the host or on
            ``device``.
        compute_loss: maps a partition's batch on the device and its model output to its part of the loss.
            None means that there is nothing to differentiate. A recomputed partition calls it only after its
            second forward pass.
        device: the device of the model.
        entropy: whether the model also returns entropies.
        activations: stores the activations of suspended partitions. None keeps them on the device.
        before_last_backward: called right before the last backward pass: that of the tower if it is trained.
    Returns:
        The number of tokens whose forward pass ran twice, because ``activations`` dropped their activations.
    """
    runner = _Runner(model, batches, device, entropy, activations or Activations(device))
    runner.run(compute_loss, before_last_backward)
    return runner.recomputed_tokens


class _Runner:
    """Runs the nested passes of ``train_micro_batch``, and counts recomputed tokens."""

    def __init__(
        self,
        model: TreeModel,
        batches: Sequence[TreeBatch],
        device: torch.device,
        entropy: bool,
        activations: Activations,
    ) -> None:
        self.model, self.device, self.entropy, self.activations = model, device, entropy, activations
        rows, self.batches = encode(model, batches)
        # The rows that require gradients, and the leaves that partitions read in their place. Gradients of a
        # leaf are summed over all of its tokens and all partitions, in fp32 or wider.
        self.rows = [x for x in rows or () if x.requires_grad]
        leaves = [x.detach().to(at_least_fp32(x)).requires_grad_() for x in self.rows]
        self.features = leaves or rows
        self.cache = GatewayCache(model.cache_streams, batches)
        self.recomputed_tokens = 0

    def run(self, compute_loss: ComputeLoss, before_last_backward: Callable[[], None] | None) -> None:
        suspended: list[_Partition] = []  # one chain: each is the parent of the next
        try:
            for number, batch in enumerate(self.batches):
                while suspended and suspended[-1].number != batch.parent:
                    self._backward(suspended.pop(), compute_loss)
                suspended.append(self._load(number))
                self._start(suspended[-1], compute_loss)
            while len(suspended) > 1:
                self._backward(suspended.pop(), compute_loss)
            self._backward(suspended.pop(), compute_loss, None if self.rows else before_last_backward)
            if self.rows:
                self._tower_backward(before_last_backward)
        finally:
            self.activations.release()

    def _forward(self, batch: TreeBatch) -> ModelOutput:
        """Runs the model on one partition, which reads the exports of its ancestors from the cache."""
        out: ModelOutput = self.model(
            batch, entropy=self.entropy, gateway=self.cache.read(batch), features=self.features
        )
        return out

    def _begin_backward(self, partition: _Partition, out: ModelOutput, compute_loss: ComputeLoss) -> None:
        """Computes the partition's loss and stores where its backward pass will start.

        In a partition, the loss is differentiated at once, down to the loss boundary. The vocabulary
        projection lies above this boundary, so no logits stay in memory while the children run. The backward
        pass of the blocks below it starts when the children have added their gradients. Without partitions,
        there is no boundary: nothing is differentiated here, and the backward pass starts at the loss itself.
        """
        loss = compute_loss(partition.batch, out)
        if loss is not None and loss.requires_grad:
            starts: list[tuple[Tensor, Tensor | None]] = [(loss, torch.ones_like(loss))]
            if out.loss_boundary:
                loss.backward()
                # Frozen tensors have no gradient, nor do routing sums that the loss does not use.
                starts = [
                    (tensor.layers_end, tensor.loss_leaf.grad)
                    for tensor in out.loss_boundary
                    if tensor.loss_leaf.grad is not None
                ]
            partition.loss_edges = [(get_gradient_edge(end), gradient) for end, gradient in starts]
        if partition.has_children:
            indexed = enumerate(out.exports or ())
            partition.export_edges = [(get_gradient_edge(x), i) for i, x in indexed if x.requires_grad]

    def _backward(
        self,
        partition: _Partition,
        compute_loss: ComputeLoss,
        before_backward: Callable[[], None] | None = None,
    ) -> None:
        """Runs the backward pass of a partition whose children are done.

        It first recomputes the forward pass if the activations were dropped.
        """
        if not partition.keeps_activations:
            self._forward_and_loss(partition, compute_loss, is_suspended=False)
            self.recomputed_tokens += len(partition.batch)
        starts = partition.loss_edges
        if partition.export_edges:
            gradients = self.cache.export_gradients(partition.batch)
            starts = starts + [(edge, gradients[i]) for edge, i in partition.export_edges]
        if before_backward is not None:
            before_backward()
        if starts:
            torch.autograd.backward([edge for edge, _ in starts], [gradient for _, gradient in starts])

    def _tower_backward(self, before_backward: Callable[[], None] | None) -> None:
        """Runs the backward pass of the tower, for all images and partitions."""
        gradients = [
            torch.zeros_like(x) if leaf.grad is None else leaf.grad.to(x.dtype)
            for x, leaf in zip(self.rows, self.features or (), strict=True)
        ]
        if before_backward is not None:
            before_backward()
        torch.autograd.backward(self.rows, gradients)

    def _load(self, number: int) -> _Partition:
        batch = self.batches[number].to(self.device, non_blocking=True)
        following = self.batches[number + 1 : number + 2]
        return _Partition(number, batch, has_children=any(child.parent == number for child in following))

    def _start(self, partition: _Partition, compute_loss: ComputeLoss) -> None:
        """Runs the forward pass, and the loss unless the forward pass will be recomputed."""
        if partition.has_children and self.activations.are_full():
            partition.keeps_activations = False
            with torch.no_grad():
                out = self._forward(partition.batch.without_edges())
        else:
            out = self._forward_and_loss(partition, compute_loss, is_suspended=partition.has_children)
        if partition.has_children and out.exports:
            self.cache.write(partition.batch, out.exports)

    def _forward_and_loss(
        self, partition: _Partition, compute_loss: ComputeLoss, is_suspended: bool
    ) -> ModelOutput:
        with self.activations.saving(is_suspended, shared=self.cache.rows):
            out = self._forward(partition.batch)
        self._begin_backward(partition, out, compute_loss)
        return out
