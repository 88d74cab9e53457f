"""Chunks: how layers with a recurrent state run over a forest.

Such a layer reads tokens of one path in turn, up to CHUNK at once. In DFS order with the heaviest child
first, most tokens directly follow the one before them on their path, so that a chunk is a range of tokens; it
ends where CHUNK tokens are in it, where the next token follows another one, and at tokens whose state someone
else wants: the chunk of another child, or a later forward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

CHUNK = 64


class Chunks(NamedTuple):
    """C chunks of N tokens in order, and where the state that each starts from is to be found."""

    start: Tensor  # [C + 1] int32: chunk c holds tokens start[c] .. start[c + 1] - 1
    # [C] int32: an earlier chunk, from whose end this one goes on; -1: from zero; -2 - r: a gateway's row r
    before: Tensor
    exported: Tensor  # [X] int32: chunks whose last states later forwards read; [0] where none does

    def map(self, function: Callable[[Tensor], Tensor]) -> Chunks:
        """All tensors through ``function``, which moves or pins them."""
        return Chunks(*map(function, self))


def make_chunks(predecessor: np.ndarray, exports: np.ndarray, size: int = CHUNK) -> Chunks:
    """Chunks of at most ``size`` tokens.

    Args:
        predecessor: [N] of each token the one before it on its path, see ``TreeLayout.predecessor``.
        exports: [X] tokens after which the state is wanted.
    """
    n = len(predecessor)
    follows = predecessor == np.arange(n) - 1
    follows[0] = False  # -1, the root's, is no token
    first = np.flatnonzero(~follows)
    left_from = predecessor[first]
    ends = np.concatenate([first, left_from[left_from >= 0] + 1, exports + 1, [n]])
    edges = np.unique(ends)  # of ranges, which are chunks if they are not too long
    length = np.diff(edges)
    parts = -(-length // size)
    into = np.arange(parts.sum()) - np.repeat(np.cumsum(parts) - parts, parts)
    start = np.append(np.repeat(edges[:-1], parts) + size * into, n)
    last = predecessor[start[:-1]]
    before = np.where(last >= 0, np.searchsorted(start, last, side="right") - 1, last)
    exported = np.searchsorted(start, exports, side="right") - 1
    return Chunks(*(torch.from_numpy(x.astype(np.int32)) for x in (start, before, exported)))
