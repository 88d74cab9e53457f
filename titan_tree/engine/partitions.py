"""Gateways: what partitions of a tree hand down in their forwards, and hand back up in their backwards.

A partition's keys and values, and the states of recurrent layers, are all that reaches its descendants. So it
leaves them in a bank, from which children read them as leaves of graphs of their own; a child runs forward
and backward, and the gradients of what it read are added up, in fp32, beside those of its siblings; when all
children are done the parent runs backward, with these sums as gradients of what it left. Every token runs
once, and alive are the activations of one chain. Exact: it is the chain rule, in another order (Tree
Training, arXiv:2511.00413, version 5).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from titan_tree.components.tree_attention.context import add_gradient
from titan_tree.engine.activations import Activations
from titan_tree.models.decoder import Decoder, ModelOutput
from titan_tree.tree.batch import TreeBatch


class GatewayCache:
    """What layers export for later forwards, and its gradients: cache_streams for one chain at a time.

    For each tensor that layers export (``Decoder.cache_streams``) its rows, one partition's after another's. See
    ``GatewayRows`` for who writes where.
    """

    def __init__(self, cache_streams: Sequence[str], batches: Sequence[TreeBatch]) -> None:
        self.cache_streams = cache_streams
        self._num_rows = [
            max(
                sum(getattr(rows, stack) for rows in (batch.cache_offset, batch.cache_writes))
                for batch in batches
            )
            for stack in cache_streams
        ]
        self.rows: list[Tensor] = []  # [] until the first partition writes
        self.sums: list[Tensor] = []  # of their gradients, fp32 at least

    def write(self, batch: TreeBatch, exports: Sequence[Tensor]) -> None:
        """Put a partition's exports on the cache_streams."""
        if not self.rows:
            sized = zip(exports, self._num_rows, strict=True)
            self.rows = [x.new_zeros(num_rows, *x.shape[1:]) for x, num_rows in sized]
            if torch.is_grad_enabled():
                self.sums = [
                    torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in self.rows
                ]
        for i, (rows, exported) in enumerate(zip(self.rows, exports, strict=True)):
            rows[self._written(batch, i)] = exported.detach()
        for i, sums in enumerate(self.sums):
            sums[self._written(batch, i)] = 0

    def read(self, batch: TreeBatch) -> list[Tensor] | None:
        """The rows above a partition: leaves, without a copy, whose gradients go into the sums at once."""
        if not self.rows:
            return None
        stops = [getattr(batch.cache_offset, stack) for stack in self.cache_streams]
        # .data: writes to rows further up the stack, later, are no changes of these.
        leaves = [rows.data[:stop] for rows, stop in zip(self.rows, stops, strict=True)]
        if torch.is_grad_enabled():
            for leaf, sums in zip(leaves, self.sums, strict=True):
                leaf.requires_grad_().register_post_accumulate_grad_hook(_AddTo(sums[: len(leaf)]))
        return leaves

    def gradient(self, batch: TreeBatch, i: int) -> Tensor:
        """That of a partition's i-th export."""
        return self.sums[i][self._written(batch, i)].to(self.rows[i].dtype)

    def _written(self, batch: TreeBatch, i: int) -> slice:
        above, left = (
            getattr(rows, self.cache_streams[i]) for rows in (batch.cache_offset, batch.cache_writes)
        )
        return slice(above, above + left)


@dataclass
class _AddTo:
    """Moves a leaf's gradient into ``sums``."""

    sums: Tensor

    def __call__(self, leaf: Tensor) -> None:
        assert leaf.grad is not None
        add_gradient(self.sums, leaf.grad)
        leaf.grad = None


@dataclass
class _Running:
    """A partition whose forward has run, but not its backward."""

    number: int  # in its plan
    batch: TreeBatch
    waits: bool  # for others, which hang from it
    saved: bool = True  # False: its forward runs again before its backward
    # Where the backward begins: edges of the graph, not tensors, whose numbers nobody needs any more.
    scored: list[tuple[GradientEdge, Tensor]] = field(
        default_factory=list
    )  # with its gradient, if it has one
    exports: list[tuple[GradientEdge, int]] = field(default_factory=list)  # with its number, but frozen ones


def run_partitions(
    model: Decoder,
    batches: Sequence[TreeBatch],
    device: torch.device,
    use: Callable[[int, TreeBatch, ModelOutput], Tensor | None],
    *,
    entropy: bool = False,
    before_last: Callable[[], None] | None = None,
    activations: Activations | None = None,
) -> int:
    """Run the batches of a plan: every forward once and, where gradients are enabled, every backward once.

    A partition's graph and what it left are freed as soon as all that hangs from it is done.

    Args:
        batches: in the plan's order (``TreeBatch.from_plan``), on the host or the device.
        use: gets the number of a partition, its batch on the device and the model's output; returns the
            loss, or None where there is nothing to differentiate.
        entropy: of the model's output.
        before_last: called right before the last backward.
        activations: where those of waiting partitions are kept; None: where they are.
    Returns:
        Tokens of forwards that ran again, because ``activations`` did not keep them.
    """
    activations = activations or Activations(device)
    gradients = torch.is_grad_enabled()
    bank = GatewayCache(model.cache_streams, batches)
    alive: list[_Running] = []
    num_again = 0

    def forward(batch: TreeBatch) -> ModelOutput:
        gateway = bank.read(batch) if batch.cache_offset.keys else None  # a dummy reads and leaves nothing
        return model(batch, entropy=entropy, gateway=gateway)

    def score(running: _Running, out: ModelOutput) -> None:
        """Differentiates what the loss needs of the vocabulary; the rest waits."""
        loss = use(running.number, running.batch, out)
        if not gradients:
            return
        if loss is not None and loss.requires_grad:
            begins = [(loss, torch.ones_like(loss))]
            if out.loss_boundary:
                loss.backward()
                # Not what is frozen, nor sums of the routing that the loss leaves out.
                begins = [(end, leaf.grad) for end, leaf in out.loss_boundary if leaf.grad is not None]
            running.scored = [(get_gradient_edge(end), gradient) for end, gradient in begins]
        if running.waits:
            numbered = enumerate(out.exports or ())
            running.exports = [(get_gradient_edge(x), i) for i, x in numbered if x.requires_grad]

    def run(running: _Running) -> None:
        batch = running.batch
        if running.waits and gradients and activations.are_full():
            running.saved = False
            with torch.no_grad():
                out = forward(batch.without_edges())
        else:
            with activations.saving(running.waits, shared=bank.rows):
                out = forward(batch)
            score(running, out)
        if running.waits and out.exports:
            bank.write(batch, out.exports)

    def finish(before_backward: Callable[[], None] | None = None) -> None:
        nonlocal num_again
        running = alive.pop()
        batch = running.batch
        if not gradients:
            return
        if not running.saved:
            with activations.saving(waits=False, shared=bank.rows):
                out = forward(batch)
            score(running, out)
            del out  # its exports' numbers: the bank has them
            num_again += len(batch)
        pairs = running.scored + [(edge, bank.gradient(batch, i)) for edge, i in running.exports]
        if before_backward is not None:
            before_backward()
        if pairs:
            torch.autograd.backward([edge for edge, _ in pairs], [gradient for _, gradient in pairs])

    try:
        for number, on_host in enumerate(batches):
            while alive and alive[-1].number != on_host.parent:
                finish()
            waits = number + 1 < len(batches) and batches[number + 1].parent == number
            alive.append(_Running(number, on_host.to(device, non_blocking=True), waits))
            run(alive[-1])
        while len(alive) > 1:
            finish()
        finish(before_last)
    finally:
        activations.release()
    return num_again


@torch.no_grad()
def score_partitions(
    model: Decoder, batches: Sequence[TreeBatch], device: torch.device, entropy: bool = False
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Of all edges of a plan: predicted tokens, ascending; log-probs; on request entropies. No gradients."""
    tokens: list[Tensor] = []
    logprobs: list[Tensor] = []
    entropies: list[Tensor] = []

    def keep(number: int, batch: TreeBatch, out: ModelOutput) -> None:
        if batch.is_dummy:
            return
        tokens.append(batch.edge_token)
        logprobs.append(out.logprobs)
        if out.entropy is not None:
            entropies.append(out.entropy)

    run_partitions(model, batches, device, keep, entropy=entropy)
    ascending, order = torch.cat(tokens).sort()
    return ascending, torch.cat(logprobs)[order], torch.cat(entropies)[order] if entropies else None
