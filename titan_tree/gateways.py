"""Gateways: what partitions of a tree hand down in their forwards, and hand back up in their backwards.

A partition's keys and values are all that reaches its descendants. So a child runs forward on detached
copies of the rows it needs, then backward; the gradients of its copies are added up, in fp32, beside those
of its siblings; when all children are done the parent runs backward, with these sums as gradients of what it
exported. Every token runs once, and alive are the partitions of one chain. Exact: it is the chain rule, in
another order (Tree Training, arXiv:2511.00413, version 5).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from titan_tree.data.batch import TreeBatch
from titan_tree.models.qwen3 import ModelOutput, Qwen3


class Gateway:
    """What a partition leaves while others below it may still run.

    Its bank, of each layer [rows, 2, Hkv, D]: its own context, then its exports. And the gradients of these,
    from all that has run below.
    """

    def __init__(self, number: int, batch: TreeBatch, context: list[Tensor]) -> None:
        self.number = number  # of the partition in its plan
        self.batch = batch
        self.context = context  # of each layer, leaves of this partition's graph; [] without context
        self.exports: list[Tensor] = []  # of each layer; [] without exports
        self.loss: Tensor | None = None  # None: nothing is scored here
        self.gradients: list[Tensor] = []  # of each layer's bank, fp32 at least; [] until a child is done

    def banks(self) -> Iterator[list[Tensor]]:
        """Of each layer the one or two parts of the bank."""
        return (list(parts) for parts in zip(*(x for x in (self.context, self.exports) if x), strict=True))

    def hand_down(self, rows: Tensor) -> list[Tensor]:
        """Of each layer a copy of the bank's ``rows``: leaves of a child's graph."""
        copies = (torch.cat([part.detach() for part in bank]).index_select(0, rows) for bank in self.banks())
        return [copy.requires_grad_(torch.is_grad_enabled()) for copy in copies]

    def backward(self, parent: Gateway | None) -> None:
        """The gradients of the parameters, and those of the context into the parent's sums.

        To be called when all that runs below is done.
        """
        roots = [] if self.loss is None else [self.loss]
        gradients: list[Tensor | None] = [None] * len(roots)
        num_context = len(self.context[0]) if self.context else 0
        if self.gradients:
            for export, total in zip(self.exports, self.gradients, strict=bool(self.exports)):
                roots.append(export)
                gradients.append(total[num_context:].to(export.dtype))
        if roots:
            torch.autograd.backward(roots, gradients)
        if parent is not None and self.context:
            below = [total[:num_context] for total in self.gradients]
            assert self.batch.context is not None
            parent._add(self.batch.context, [leaf.grad for leaf in self.context])
            parent._add(self.batch.context, below)

    def _add(self, rows: Tensor, gradients: Sequence[Tensor | None]) -> None:
        """Add a child's gradients, of each layer or of none, to the bank's ``rows``, which are distinct."""
        if not self.gradients:
            self.gradients = [_zeros_like(bank) for bank in self.banks()]
        for total, gradient in zip(self.gradients, gradients, strict=False):
            if gradient is not None:
                total.index_add_(0, rows, gradient.to(total.dtype))


def _zeros_like(bank: Sequence[Tensor]) -> Tensor:
    """fp32 at least."""
    rows, like = sum(map(len, bank)), bank[0]
    return like.new_zeros(rows, *like.shape[1:], dtype=torch.promote_types(like.dtype, torch.float32))


def run_partitions(
    model: Qwen3,
    batches: Sequence[TreeBatch],
    device: torch.device,
    use: Callable[[int, TreeBatch, ModelOutput], Tensor | None],
    *,
    entropy: bool = False,
    before_last: Callable[[], None] | None = None,
) -> None:
    """Run the batches of a plan: every forward once and, where gradients are enabled, every backward once.

    A partition's graph, keys and values are freed as soon as all that hangs from it is done.

    Args:
        batches: in the plan's order (``TreeBatch.from_plan``), on the host or the device.
        use: gets the number of a partition, its batch on the device and the model's output; returns the
            loss, or None where there is nothing to differentiate.
        entropy: of the model's output.
        before_last: called right before the last backward.
    """
    alive: list[Gateway] = []

    def finish() -> None:
        done = alive.pop()
        if torch.is_grad_enabled():
            done.backward(alive[-1] if alive else None)

    for number, on_host in enumerate(batches):
        while alive and alive[-1].number != on_host.parent:
            finish()
        batch = on_host.to(device, non_blocking=True)
        context = [] if batch.context is None else alive[-1].hand_down(batch.context)
        alive.append(Gateway(number, batch, context))
        out = model(batch, entropy=entropy, gateway=context or None)
        alive[-1].exports = list(out.exports or ())
        alive[-1].loss = use(number, batch, out)
        del out
    while len(alive) > 1:
        finish()
    if before_last is not None:
        before_last()
    finish()
