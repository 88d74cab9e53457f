"""TreeAttention by FlexAttention on the kernels of FlashAttention-4, with the interval mask. Hopper only.

Optional: ``pip install -e '.[flash]'``. Its backward adds dq in no fixed order: not deterministic.
"""

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

from titan_tree.components.rings import is_hopper
from titan_tree.components.tree_attention import flex
from titan_tree.errors import UserError
from titan_tree.tree.layout import TreeLayout


def available(device: torch.device) -> bool:
    """Whether flash-attn-4 is installed and ``device`` is a GPU that this backend is for."""
    return _installed() and is_hopper(device)


def prepare(layout: TreeLayout) -> BlockMask:
    """The 128 x 128 block mask. Raises UserError without flash-attn-4 or a Hopper GPU."""
    device = layout.positions.device
    if not is_hopper(device):
        raise UserError(
            f"TreeAttention: backend 'flash' needs a Hopper GPU, got {device}; use 'auto' or 'flex'"
        )
    if not _installed():
        raise UserError("TreeAttention: backend 'flash' needs flash-attn-4: pip install -e '.[flash]'")
    return flex.prepare(layout)


def attention(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, plan: BlockMask) -> Tensor:
    """See ``TreeAttention.forward``."""
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.dtype == k.dtype == v.dtype:
        raise UserError(
            "TreeAttention: backend 'flash': expected q, k, v all bfloat16 or float16, "
            f"got {q.dtype}, {k.dtype}, {v.dtype}; use 'auto'"
        )
    if q.shape[-1] not in (64, 128):  # wider heads want another block size, in the forward or the backward
        raise UserError(
            f"TreeAttention: backend 'flash': expected head dim 64 or 128, got {q.shape[-1]}; use 'auto'"
        )
    return flex.attention(q, k, v, layout, plan, kernels="FLASH")


def _installed() -> bool:
    try:
        return importlib.util.find_spec("flash_attn.cute") is not None
    except ModuleNotFoundError:  # no flash_attn at all
        return False
