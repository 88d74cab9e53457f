"""The interface of TreeGDN's backends.

To add a backend, write a module with the functions of ``GdnBackend`` and register it in
``titan_tree.registry.GDN_BACKENDS``. The operator (``operator.py``) runs them and handles autograd,
torch.compile and activation checkpointing.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from titan_tree.components.tree_gdn.buffers import Saved
from titan_tree.tree.chains import Chains
from titan_tree.tree.chunks import Chunks


class GdnBackend(Protocol):
    """One implementation of the gated delta rule: a module, or any other object, with these functions.

    Sizes: N tokens, H key heads, G value heads, K and V head dims, R states from a gateway, X exported
    states.
    """

    def is_automatic(self, device: torch.device) -> bool:
        """Returns whether "auto" may choose this backend for tensors on ``device``."""

    def refusal(self, q: Tensor, k: Tensor, v: Tensor) -> str | None:
        """Returns the reason why this backend cannot compute tensors like these, or None if it can.

        The reason completes the sentence "backend 'name' ..." in one line: what the backend expects, what it
        got, and which backend to use instead. torch.compile traces this function, so it must not read values.
        """

    def empty_saved(self, q: Tensor, v: Tensor, chains: Chains) -> Saved:
        """Returns uninitialized tensors like those that ``forward`` saves; they may be empty."""

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        states: Tensor | None,
        chunks: Chunks,
        chains: Chains,
    ) -> tuple[Tensor, Tensor, Saved]:
        """Returns o [N, G, V], the exported states [X, G, K, V], and what ``backward`` needs. X may be 0.

        Arguments are those of ``TreeGDN.forward``, of any strides. Exported states are those at the ends of
        the chunks ``chunks.exported``: fp32, or wider if v is.
        """

    def backward(
        self,
        do: Tensor,
        dexported: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        g: Tensor,
        beta: Tensor,
        states: Tensor | None,
        saved: Saved,
        chunks: Chunks,
        chains: Chains,
    ) -> list[Tensor]:
        """Returns dq, dk, dv, dg, dbeta and, with states, dstates: contiguous, in their inputs' dtypes."""
