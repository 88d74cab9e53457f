"""Chunks: runs of tokens that a recurrent layer processes at once.

The state of a recurrent layer passes from token to token along each path. A *chunk* is a run of at most CHUNK
tokens, each of which follows the one before it. With the heaviest child first, most tokens directly follow
their predecessor in DFS order. Only such runs become chunks, so every chunk is a range of tokens. It ends

- after CHUNK tokens,
- before a token whose predecessor is not the token right before it in DFS order,
- after a token whose state is needed elsewhere: by the first chunk of another child, or by a later partition.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CHUNK = 64


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
    num_pieces = -(-np.diff(bounds) // size)
    piece = np.arange(num_pieces.sum()) - np.repeat(np.cumsum(num_pieces) - num_pieces, num_pieces)
    start = np.append(np.repeat(bounds[:-1], num_pieces) + size * piece, n)
    last = predecessor[start[:-1]]
    before = np.where(last >= 0, np.searchsorted(start, last, side="right") - 1, last)
    exported = np.searchsorted(start, exports, side="right") - 1
    return Chunks(*map(int32, (start, before, exported)))


def int32(values: np.ndarray) -> Tensor:
    """Returns a copy of ``values`` with contiguous strides.

    An empty array of NumPy may have the stride 0, for which torch.compile would make a graph of its own.
    """
    return torch.empty(values.shape, dtype=torch.int32).copy_(torch.from_numpy(values))
