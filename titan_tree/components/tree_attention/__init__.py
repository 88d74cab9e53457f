"""TreeAttention: attention on a token tree, one module over several backends.

A backend is a file with two functions: ``prepare(layout)`` derives what it needs from the layout, once
per batch, and ``attention(q, k, v, layout, plan)`` computes. A backend asked for by name is used or
refused, never swapped.
"""

from __future__ import annotations

import logging
from types import ModuleType
from typing import Literal

import torch
from torch import Tensor, nn

from titan_tree.components.tree_attention import flex, reference, triton_kernels
from titan_tree.data.layout import TreeLayout
from titan_tree.errors import UserError

BACKENDS: dict[str, ModuleType] = {"reference": reference, "flex": flex, "triton": triton_kernels}
Backend = Literal["auto", "triton", "flex", "reference"]

logger = logging.getLogger(__name__)


class TreeAttention(nn.Module):
    """softmax(q k^T / sqrt(D)) v over the ancestors of each query: ``k <= key_index[q] < subtree_end[k]``.

    Args:
        backend: "triton" (own kernels, O(N) metadata), "flex" (compiled FlexAttention), "reference"
            (plain torch with a dense mask: any device and dtype, small trees), or "auto": triton on a
            GPU, reference elsewhere.
    """

    def __init__(self, backend: Backend = "auto") -> None:
        super().__init__()
        if backend != "auto" and backend not in BACKENDS:
            names = ", ".join(["auto", *BACKENDS])
            raise UserError(f"TreeAttention: backend: expected one of {names}, got {backend!r}")
        self.backend = backend
        self._logged = False

    def prepare(self, layout: TreeLayout) -> TreeLayout:
        """The layout with this backend's plan in it. Once per batch, for all layers and recomputation."""
        name = self._resolve(layout.positions.device)
        if self.backend == "auto" and not self._logged and not torch.compiler.is_compiling():
            logger.info("TreeAttention: backend auto chose %s on %s", name, layout.positions.device.type)
            self._logged = True
        with torch.no_grad():
            return layout.with_plan(BACKENDS[name].prepare(layout))

    def forward(self, q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout) -> Tensor:
        """[N, Hq, D] from q [N, Hq, D] and k, v [M, Hkv, D] with Hkv a divisor of Hq (GQA); layout of N, M.

        ``layout`` comes from ``prepare``; one that does not is prepared here, at that cost in every call.
        """
        if layout.attention_plan is None:
            layout = self.prepare(layout)
        return BACKENDS[self._resolve(q.device)].attention(q, k, v, layout, layout.attention_plan)

    def _resolve(self, device: torch.device) -> str:
        if self.backend == "auto":
            return "triton" if device.type == "cuda" else "reference"
        return self.backend

    def extra_repr(self) -> str:
        return f"backend={self.backend!r}"
