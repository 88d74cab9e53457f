"""The order of launches of a recurrence, shared by backends "triton" and "hopper".

They differ in ``Passes``. So do the rules with a decay per head and the one with a decay per channel.
Without the delta rule, n is v and X is dv, so no kernel writes them.

A round (``tree/chunks.py``) is all chains that can run at once. The forward pass runs rounds in order: a
chain starts from a slot that an earlier round filled. The backward pass runs them in reverse. There, each
chain writes the gradient of the state that it starts from into a buffer of its own. Before the chain that
filled a slot runs, ``_slot_kernel`` adds the gradients of the slot's other readers to that of the first, in
the order of ``Chains.readers``. So every sum has a fixed order, and the serial loop of a chain contains no
other loop.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from titan_tree.components.recurrence.buffers import Saved, empty_saved, empty_states
from titan_tree.errors import UserError
from titan_tree.tree.chunks import Chains, Chunks

Run = Callable[[int, int], None]  # runs a pass over chains, or chunks, first .. end - 1


class Passes(NamedTuple):
    """The functions in which the backends and rules differ."""

    # (q, k, v, g, beta, o, saved, chunks, chains): fills o and, but for slots of the gateway, ``saved``
    outputs: Callable[..., None]
    scores: Callable[..., Tensor]  # (q, k, v, saved, chunks): returns s P
    # (k, v, state, new, saved, chunks, chains): a pass that fills S^T and n^T, from filled slots
    states: Callable[..., Run]
    # (q, k, do, scores, dstate, x, start_gradient, saved, chunks, chains): a pass that fills dstate, x and
    # start_gradient
    state_gradients: Callable[..., Run]
    # (q, k, v, do, state, dstate, new, x, gradients, saved, chunks): fills gradients
    input_gradients: Callable[..., None]


def forward(
    passes: Passes, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, states: Tensor | None,
    chunks: Chunks, chains: Chains,
) -> tuple[Tensor, Tensor, Saved]:  # fmt: skip
    """Runs ``RecurrenceBackend.forward`` with the kernels of ``passes``.

    Raises:
        UserError: the number of states is not the one that the layout expects.
    """
    q, k, v, g = (x.contiguous() for x in (q, k, v, g))
    beta = None if beta is None else beta.contiguous()
    expected, num_rows = int(chains.rounds[0, 1]), 0 if states is None else len(states)
    if num_rows != expected:
        raise UserError(f"recurrence: the layout expected {expected} states from a gateway, got {num_rows}")
    saved = empty_saved(q, v, g, beta, chains)
    if states is not None:
        saved.slots[:num_rows] = states.mT
    o = torch.empty_like(v)
    passes.outputs(q, k, v, g, beta, o, saved, chunks, chains)
    return o, saved.slots.index_select(0, chains.exported).mT.contiguous(), saved


def backward(
    passes: Passes, do: Tensor, dexported: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor,
    beta: Tensor | None, states: Tensor | None, saved: Saved, chunks: Chunks, chains: Chains,
) -> list[Tensor]:  # fmt: skip
    """Runs ``RecurrenceBackend.backward`` with the kernels of ``passes``."""
    do, q, k, v, g = (x.contiguous() for x in (do, q, k, v, g))
    rounds = chains.rounds.tolist()
    dq, dk, dv, dg = (torch.empty_like(x) for x in (q, k, v, g))
    dbeta = None if beta is None else torch.empty_like(beta, memory_format=torch.contiguous_format)
    state, new = empty_states(saved)
    recompute = passes.states(k, v, state, new, saved, chunks, chains)
    scores = passes.scores(q, k, v, saved, chunks)

    dstate, x = empty_states(saved)
    if beta is None:
        new, x = v, dv
    num_rows, num_chains = rounds[0][1], len(chains.first)
    gateway_gradient = saved.slots.new_empty(num_rows, *saved.slots.shape[1:])
    start_gradient = saved.slots.new_empty(num_chains + len(dexported), *saved.slots.shape[1:])
    start_gradient[num_chains:] = dexported.mT
    run = passes.state_gradients(q, k, do, scores, dstate, x, start_gradient, saved, chunks, chains)

    # The states are recomputed from their slots, all chains at once. The reverse pass does not need them, and
    # a few chains cannot fill the GPU, so both run at the same time. The longer one, the reverse pass, goes
    # first.
    with beside(k, priority=-1):
        for (chain, slot, _), (end, slot_end, _) in reversed(list(itertools.pairwise(rounds))):
            _sum_readers(start_gradient, start_gradient, chains, slot, slot_end)
            run(chain, end)
        _sum_readers(start_gradient, gateway_gradient, chains, 0, num_rows)
    with beside(k):
        recompute(0, rounds[-1][0])
    join(k, priority=-1)
    join(k)
    passes.input_gradients(q, k, v, do, state, dstate, new, x, (dq, dk, dv, dg, dbeta), saved, chunks)
    gradients = [y for y in (dq, dk, dv, dg, dbeta) if y is not None]
    if states is not None:
        gradients.append(gateway_gradient.mT.contiguous().to(states.dtype))
    return gradients


def _sum_readers(starts: Tensor, totals: Tensor, chains: Chains, first: int, end: int) -> None:
    """Adds up the gradients of slots first .. end - 1 over the readers of each slot.

    Row s of ``totals`` gets the sum of slot s. If ``totals`` is ``starts``, the row of its first reader does.
    """
    if first == end:
        return
    _, heads, width, width_k = starts.shape
    size, block = heads * width * width_k, min(width * width_k, 2048)
    readers = chains.reader_offsets, chains.readers
    _slot_kernel[(end - first, size // block)](
        starts, totals, *readers, first, size, IN_PLACE=totals is starts, BLOCK=block
    )


@triton.jit(do_not_specialize=["first_slot"])
def _slot_kernel(
    start_gradient_ptr, total_ptr, reader_offsets_ptr, readers_ptr, first_slot, SIZE, IN_PLACE: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """The gradient of one slot: the sum over its readers."""
    slot = first_slot + tl.program_id(0).to(tl.int64)
    element = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    first, end = tl.load(reader_offsets_ptr + slot), tl.load(reader_offsets_ptr + slot + 1)
    row = tl.load(readers_ptr + first).to(tl.int64) if IN_PLACE else slot
    if not IN_PLACE or end - first > 1:
        total = tl.zeros([BLOCK], tl.float32)
        for i in range(first, end):
            total += tl.load(start_gradient_ptr + tl.load(readers_ptr + i).to(tl.int64) * SIZE + element)
        tl.store(total_ptr + row * SIZE + element, total)


# How passes are launched: round by round, and beside other kernels.


def run_rounds(run: Run, chains: Chains) -> None:
    """Runs all chains, one launch per round: a round needs the slots that earlier rounds fill."""
    for first, end in itertools.pairwise(chains.rounds[:, 0].tolist()):
        run(first, end)


@functools.cache
def _side_stream(device: torch.device, priority: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device, priority)


@contextmanager
def beside(x: Tensor, priority: int = 0) -> Iterator[None]:
    """Launches kernels beside those that follow on the current stream of x's GPU, after those before.

    priority: -1, if programs of these kernels go first. Without a GPU, nothing changes.
    """
    if not x.is_cuda:
        yield
        return
    stream = _side_stream(x.device, priority)
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        yield


def join(x: Tensor, priority: int = 0) -> None:
    """Lets the current stream wait for the kernels that were launched ``beside`` it."""
    if x.is_cuda:
        torch.cuda.current_stream(x.device).wait_stream(_side_stream(x.device, priority))
