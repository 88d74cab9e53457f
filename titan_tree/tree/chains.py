"""Chains: in which order the chunks of a forest run, and where the states between them are kept.

A *chain* is a maximal run of chunks that go on from the chunk right before; one program runs it from end to
end. Other chains start from a *slot*, a state in memory: a gateway's row, or one that a chain leaves where it
branches. A *round* is all chains that can run at once, after those that they start from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_tree.tree.chunks import Chunks
from titan_tree.tree.partition import PAD


class Chains(NamedTuple):
    """C chunks, B chains, L slots, X exported states. Int32, but for ``rounds``.

    torch.compile makes graphs of their own for sizes 0 and 1: B and L are ``PAD`` at least, which chains and
    slots of no round fill up.
    """

    slot: Tensor  # [C]: where chunk c leaves its last state; -1: only the chunk after it asks for that
    # Chains round by round, and the longest of a round first.
    first: Tensor  # [B]: chain b is chunks first[b] .. end[b] - 1
    end: Tensor  # [B]
    source: Tensor  # [B]: the slot that chain b starts from; -1: from zero
    # Slots: the gateway's rows, then those of chunks in the order of their chains' rounds.
    exported: Tensor  # [X]: slots of ``Chunks.exported``
    # Who starts from slot s: child[first_child[s]] .. child[first_child[s + 1] - 1]. b is chain b, B + x the
    # exported state x.
    first_child: Tensor  # [L + 1]
    child: Tensor
    # [rounds + 1, 2] int64, on the CPU for good: the first chain and slot of each round, then their numbers
    rounds: Tensor

    def map(self, function: Callable[[Tensor], Tensor]) -> Chains:
        """All tensors but ``rounds`` through ``function``, which moves or pins them."""
        return Chains._make([*map(function, self[:-1]), self.rounds])


def make_chains(chunks: Chunks, num_rows: int = 0) -> Chains:
    """Chains of chunks on the CPU, of which some may start from a gateway's ``num_rows`` rows."""
    before, exported = chunks.before.numpy(), chunks.exported.numpy()
    is_first = before != np.arange(len(before)) - 1
    is_first[0] = True  # -1, "from zero", is no chunk
    first = np.flatnonzero(is_first)
    end = np.append(first[1:], len(before))
    chain = np.cumsum(is_first) - 1  # of each chunk
    origin = before[first]
    from_chunk = origin.clip(min=0)  # where it is one
    rank = _depths(np.where(origin >= 0, chain[from_chunk], -1))  # the round of each chain

    asked = np.unique(np.concatenate([origin[origin >= 0], exported]))
    asked_rank = rank[chain[asked]]
    asked = asked[np.argsort(asked_rank, kind="stable")]
    slot = np.full(len(before), -1)
    slot[asked] = num_rows + np.arange(len(asked))

    order = np.lexsort((first - end, rank))
    source = np.where(origin >= 0, slot[from_chunk], np.where(origin < -1, -2 - origin, -1))[order]
    first, end, source = _padded(first[order], 0), _padded(end[order], 0), _padded(source, -1)
    num_slots = num_rows + len(asked)
    starts = np.concatenate([source, slot[exported]])
    child = np.argsort(starts, kind="stable")
    first_child = np.searchsorted(starts[child], np.arange(max(num_slots, PAD) + 1))
    edges = np.arange(rank.max() + 2)
    rounds = [np.searchsorted(np.sort(rank), edges), num_rows + np.searchsorted(np.sort(asked_rank), edges)]
    columns = slot, first, end, source, slot[exported], first_child, child
    tensors = [torch.from_numpy(x.astype(np.int32)) for x in columns]
    return Chains._make([*tensors, torch.from_numpy(np.stack(rounds, axis=1))])


def _depths(parent: np.ndarray) -> np.ndarray:
    """How many ancestors each element has; -1: no parent. Steps double, so that deep forests take few."""
    depth = (parent >= 0).astype(np.int64)
    while (parent >= 0).any():
        depth += np.where(parent >= 0, depth[parent], 0)
        parent = np.where(parent >= 0, parent[parent], -1)
    return depth


def _padded(values: np.ndarray, fill: int) -> np.ndarray:
    return np.pad(values, (0, max(PAD - len(values), 0)), constant_values=fill)
