"""Chunks: runs of tokens that a recurrent layer processes at once. Chains: the order in which chunks run.

The state of a recurrent layer passes from token to token along each path. A *chunk* is a run of at most CHUNK
tokens, each of which follows the one before it. With the heaviest child first, most tokens directly follow
their predecessor in DFS order. Only such runs become chunks, so every chunk is a range of tokens. It ends

- after CHUNK tokens,
- before a token whose predecessor is not the token right before it in DFS order,
- after a token whose state is needed elsewhere: by the first chunk of another child, or by a later partition.

A *chain* is a maximal run of chunks, each of which starts from the final state of the one before it. (A chain
of partitions is something else, see tree/partition.py.) One program runs a chain from its first chunk to its
last and keeps the state in registers. The first chunk starts from zero or from a *slot*, which is a state in
memory: either a row of the gateway cache, or a state that an earlier chain stores where others branch off.

Chains run in *rounds*. The chains of a round run at the same time; each starts from zero, from the gateway
cache, or from a slot that an earlier round filled. Chains of more than LONGEST chunks are cut, so that
kernels can prepare the chunks of later rounds while a round runs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_tree.tree.partition import PAD

CHUNK = 64
LONGEST = 256


class Chunks(NamedTuple):
    """C chunks of N tokens, in the order of the tokens, and the state from which each of them starts."""

    start: Tensor  # [C + 1] int32: chunk c holds tokens start[c] .. start[c + 1] - 1
    before: Tensor  # [C] int32: the chunk whose final state this one starts from; -1: it starts from zero;
    # -2 - r: it starts from row r of the gateway cache
    exported: Tensor  # [X] int32: chunks whose final states descendants read; empty if there are none

    def map(self, function: Callable[[Tensor], Tensor]) -> Chunks:
        """Applies ``function``, which moves or pins a tensor, to all tensors."""
        return Chunks(*map(function, self))


def make_chunks(predecessor: np.ndarray, exports: np.ndarray, size: int = CHUNK) -> Chunks:
    """Divides a forest into chunks.

    Args:
        predecessor: [N] the token before each token on its path, see ``TreeLayout.predecessor``.
        exports: [X] tokens whose states descendants read.
        size: largest number of tokens in a chunk.
    """
    n = len(predecessor)
    follows = predecessor == np.arange(n) - 1
    follows[0] = False  # its predecessor is -1, which is not a token
    first = np.flatnonzero(~follows)
    branches_from = predecessor[first]
    ends = np.concatenate([first, branches_from[branches_from >= 0] + 1, exports + 1, [n]])
    bounds = np.unique(ends)  # of runs; runs longer than ``size`` are divided below
    num_chunks = -(-np.diff(bounds) // size)
    number = np.arange(num_chunks.sum()) - np.repeat(np.cumsum(num_chunks) - num_chunks, num_chunks)
    start = np.append(np.repeat(bounds[:-1], num_chunks) + size * number, n)
    last = predecessor[start[:-1]]
    before = np.where(last >= 0, np.searchsorted(start, last, side="right") - 1, last)
    exported = np.searchsorted(start, exports, side="right") - 1
    return Chunks(*map(int32, (start, before, exported)))


def int32(values: np.ndarray) -> Tensor:
    """Returns a copy of ``values`` with contiguous strides.

    An empty array of NumPy may have the stride 0, for which torch.compile would make a graph of its own.
    """
    return torch.empty(values.shape, dtype=torch.int32).copy_(torch.from_numpy(values))


class Chains(NamedTuple):
    """C chunks in B chains, with L slots and X exported states. All tensors but ``rounds`` are int32.

    Chains are sorted by round, and within a round by length, the longest first. Slots are the rows of the
    gateway cache, then those that chunks fill, sorted by round. torch.compile specializes on sizes 0 and 1,
    so B and L are padded to at least ``PAD``; padding belongs to no round.
    """

    slot: Tensor  # [C]: the slot that stores the final state of chunk c; -1: only the next chunk needs it
    first_reader: Tensor  # [C]: the first reader of this slot, see ``readers``; -1: there is no slot
    first: Tensor  # [B]: chain b consists of the chunks first[b] .. end[b] - 1
    end: Tensor  # [B]
    source: Tensor  # [B]: the slot that chain b starts from; -1: it starts from zero
    exported: Tensor  # [X]: the slots of the states of ``Chunks.exported``
    # The readers of slot s are readers[reader_offsets[s]] .. readers[reader_offsets[s + 1] - 1]. A reader
    # b < B is chain b; a reader B + x is the exported state x.
    reader_offsets: Tensor  # [L + 1]
    readers: Tensor
    # Row r: the first chain and the first slot of round r, and how many chunks the rounds before it need. The
    # last row: the numbers of chains, slots and chunks. This tensor always stays on the CPU.
    rounds: Tensor  # [rounds + 1, 3] int64

    def map(self, function: Callable[[Tensor], Tensor]) -> Chains:
        """Applies ``function``, which moves or pins a tensor, to all tensors but ``rounds``."""
        return Chains._make([*map(function, self[:-1]), self.rounds])


def make_chains(chunks: Chunks, num_rows: int = 0) -> Chains:
    """Arranges chunks in chains.

    Args:
        chunks: the chunks, on the CPU.
        num_rows: rows of the gateway cache, from which chunks may start.
    """
    before, exported = chunks.before.numpy(), chunks.exported.numpy()
    is_first = before != np.arange(len(before)) - 1
    is_first[0] = True  # its ``before`` is -1, which is not a chunk
    first = np.flatnonzero(is_first)
    is_first |= (np.arange(len(before)) - first[np.cumsum(is_first) - 1]) % LONGEST == 0  # cut
    first = np.flatnonzero(is_first)
    end = np.append(first[1:], len(before))
    chain = np.cumsum(is_first) - 1  # the chain of each chunk
    origin = before[first]
    from_chunk = origin.clip(min=0)  # meaningful only where a chain starts from a chunk
    rank = _depths(np.where(origin >= 0, chain[from_chunk], -1))  # the round of each chain

    needed = np.zeros(rank.max() + 2, np.int64)  # see ``Chains.rounds``
    np.maximum.at(needed, rank + 1, end)

    stored = np.unique(np.concatenate([origin[origin >= 0], exported]))
    stored_rank = rank[chain[stored]]
    stored = stored[np.argsort(stored_rank, kind="stable")]
    slot = np.full(len(before), -1)
    slot[stored] = num_rows + np.arange(len(stored))

    order = np.lexsort((first - end, rank))
    source = np.where(origin >= 0, slot[from_chunk], np.where(origin < -1, -2 - origin, -1))[order]
    first, end, source = _padded(first[order], 0), _padded(end[order], 0), _padded(source, -1)
    num_slots = num_rows + len(stored)
    starts = np.concatenate([source, slot[exported]])
    readers = np.argsort(starts, kind="stable")
    reader_offsets = np.searchsorted(starts[readers], np.arange(max(num_slots, PAD) + 1))
    first_reader = np.where(slot >= 0, readers.take(reader_offsets[slot], mode="clip"), -1)
    edges = np.arange(rank.max() + 2)
    rounds = [
        np.searchsorted(np.sort(rank), edges),
        num_rows + np.searchsorted(np.sort(stored_rank), edges),
        np.maximum.accumulate(needed),
    ]
    columns = slot, first_reader, first, end, source, slot[exported], reader_offsets, readers
    return Chains._make([*map(int32, columns), torch.from_numpy(np.stack(rounds, axis=1))])


def _depths(parent: np.ndarray) -> np.ndarray:
    """Returns the number of ancestors of each element; parent -1: none.

    The step up doubles each time, so a forest of depth d takes log2(d) steps.
    """
    depth = (parent >= 0).astype(np.int64)
    while (parent >= 0).any():
        depth += np.where(parent >= 0, depth[parent], 0)
        parent = np.where(parent >= 0, parent[parent], -1)
    return depth


def _padded(values: np.ndarray, fill: int) -> np.ndarray:
    return np.pad(values, (0, max(PAD - len(values), 0)), constant_values=fill)
