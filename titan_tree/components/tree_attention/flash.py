"""Backend "flash": FlexAttention on the kernels of FlashAttention-4, with the interval mask.

It needs a Hopper GPU and an optional package: ``pip install -e '.[flash]'``. Its backward pass adds up dq in
no fixed order.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from titan_tree.components.backends import Scoring
from titan_tree.components.rings import is_hopper
from titan_tree.components.tree_attention import flex
from titan_tree.components.tree_attention.operator import plain_only
from titan_tree.errors import UserError
from titan_tree.tree.layout import TreeLayout


def is_automatic(device: torch.device) -> bool:
    """Returns False: titan_tree's own kernels are faster."""
    return False


def refusal(q: Tensor, v: Tensor, scoring: Scoring, deterministic: bool) -> str | None:
    """See ``AttentionBackend.refusal``."""
    if deterministic:
        return flex.NOT_DETERMINISTIC
    if q.dtype not in (torch.bfloat16, torch.float16):
        return f"expected bfloat16 or float16, got {q.dtype}"
    if q.shape[-1] not in (64, 128):  # wider heads need another block size in the forward or backward pass
        return f"expected head dim 64 or 128, got {q.shape[-1]}"
    return plain_only(q, v, scoring)


def prepare(layout: TreeLayout, window: int | None = None) -> BlockMask:
    """Returns the mask in blocks of 128 x 128.

    Raises:
        UserError: flash-attn-4 is not installed, or the layout is not on a Hopper GPU.
    """
    device = layout.positions.device
    if not is_hopper(device):
        raise UserError(f"TreeAttention: backend 'flash' needs a Hopper GPU, got {device}; use 'auto'")
    if not _is_installed():
        raise UserError("TreeAttention: backend 'flash' needs flash-attn-4: pip install -e '.[flash]'")
    return flex.prepare(layout, window)


def attention(
    q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, layout: TreeLayout, prepared: BlockMask,
    scale: float, scoring: Scoring, deterministic: bool,
) -> Tensor:  # fmt: skip
    """See ``AttentionBackend.attention``."""
    return flex.attention(
        q,
        k,
        v,
        context,
        layout,
        prepared,
        scale=scale,
        scoring=scoring,
        deterministic=deterministic,
        kernels="FLASH",
    )


def _is_installed() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:  # the parent package flash_attn is missing too
        return False
