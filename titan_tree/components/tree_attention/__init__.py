"""TreeAttention: attention on a token tree, one module over several backends.

A backend asked for by name is used or refused, never swapped.
"""

from __future__ import annotations

import logging
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from titan_tree.components.tree_attention import context as rows
from titan_tree.components.tree_attention import flash, flex, hopper, operator, plan, reference
from titan_tree.errors import UserError
from titan_tree.tree.layout import TreeLayout

Backend = Literal["auto", "hopper", "triton", "flash", "flex", "reference"]
LIBRARY = {"flash": flash, "flex": flex, "reference": reference}  # not our kernels

logger = logging.getLogger(__name__)


class TreeAttention(nn.Module):
    """softmax(q k^T / sqrt(D)) v over the ancestors of each query: ``k <= key_index[q] < subtree_end[k]``.

    Args:
        backend: whose kernels compute it.
            "hopper": ours for Hopper GPUs (Gluon), 16 bits, head dim 64, 128 or 256.
            "triton": ours for any GPU, 16 or 32 bits.
            "flash": FlashAttention-4's through FlexAttention, where flash-attn-4 is installed.
            "flex": FlexAttention's own, compiled.
            "reference": plain torch with a dense mask: any device and dtype, small trees.
            "auto": hopper where it can, else triton on a GPU, reference elsewhere.
        deterministic: equal gradients, bit for bit, run by run; on also under
            ``torch.use_deterministic_algorithms``. Triton's always are; hopper's backward takes 13 % longer.
    """

    def __init__(self, backend: str = "auto", deterministic: bool = False) -> None:
        super().__init__()
        if backend not in get_args(Backend):
            raise UserError(
                f"TreeAttention: backend: expected one of {', '.join(get_args(Backend))}, got {backend!r}"
            )
        self.backend = backend
        self.deterministic = deterministic
        self._logged = False

    def prepare(self, layout: TreeLayout) -> TreeLayout:
        """The layout with this backend's plan in it. Once per batch, for all layers and recomputation."""
        library = LIBRARY.get(self._resolve(layout.positions))
        if self.backend == "auto" and not self._logged and not torch.compiler.is_compiling():
            ours = "hopper for what it supports, else triton"
            logger.info("TreeAttention: backend auto is %s", "reference" if library else ours)
            self._logged = True
        with torch.no_grad():
            return layout.with_plan((library or plan).prepare(layout))

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, context: Tensor | None = None
    ) -> Tensor:
        """[N, Hq, D] from q [N, Hq, D] and k, v [M, Hkv, D] with Hkv a divisor of Hq (GQA); layout of N, M.

        ``layout`` comes from ``prepare``; one that does not is prepared here, at that cost in every call.
        Its tensors must stay as they were then.

        context: of a partition, [R, 2, Hkv, D] keys and values of ancestors; k and v are then of own tokens,
            [N, Hkv, D], and ``layout.key_source`` names rows of both. Kept for the backward are no others.
        """
        _check(q, k, v, layout, context)
        name = self._resolve(q)
        deterministic = self.deterministic or torch.are_deterministic_algorithms_enabled()
        if deterministic and name in ("flash", "flex"):
            raise UserError(
                f"TreeAttention: backend {name!r} has no deterministic backward; use 'hopper' or 'triton'"
            )
        if layout.attention_plan is None:
            layout = self.prepare(layout)
        if name in LIBRARY:
            if context is not None and layout.key_source is not None:
                k, v = rows.join(k, v, context, layout.key_source)
            return LIBRARY[name].attention(q, k, v, layout, layout.attention_plan)
        return operator.attention(q, k, v, context, layout, layout.attention_plan, name, deterministic)

    def _resolve(self, like: Tensor) -> str:
        """The backend for tensors like this one. All of our kernels share one plan, so dtypes may differ."""
        if self.backend != "auto":
            return self.backend
        if like.device.type != "cuda":
            return "reference"
        return "hopper" if hopper.supports(like) else "triton"

    def extra_repr(self) -> str:
        return f"backend={self.backend!r}, deterministic={self.deterministic}"


def _check(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, context: Tensor | None) -> None:
    n, m = layout.key_index.shape[0], layout.subtree_end.shape[0]
    if context is not None:
        if layout.key_source is None or context.ndim != 4 or context.shape[1:] != (2, *k.shape[1:]):
            raise UserError(
                "TreeAttention: context: expected [R, 2, Hkv, D] beside k of [N, Hkv, D] and a layout with "
                f"key_source, got {list(context.shape)} beside {list(k.shape)}"
            )
        m = n
    fits = q.ndim == k.ndim == v.ndim == 3 and q.shape[0] == n and k.shape[0] == m and k.shape == v.shape
    if not fits or q.shape[2] != k.shape[2] or not k.shape[1] or q.shape[1] % k.shape[1]:
        shapes = ", ".join(str(list(x.shape)) for x in (q, k, v))
        raise UserError(
            f"TreeAttention: expected q [{n}, H, D] and k, v [{m}, Hkv, D] with Hkv dividing H, got {shapes}"
        )
    dtypes = [x.dtype for x in (q, k, v, context) if x is not None]
    if len(set(dtypes)) > 1:
        raise UserError(
            f"TreeAttention: expected q, k, v and context of one dtype, got {', '.join(map(str, dtypes))}"
        )
