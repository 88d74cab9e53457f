"""TreeAttention by compiled FlexAttention (Dong et al., arXiv:2412.05496) with the interval mask."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from titan_tree.errors import UserError
from titan_tree.tree.layout import TreeLayout

# fullgraph: past the recompilation limit an error, not FlexAttention's fallback to a dense [N, M] of scores.
_flex_attention = torch.compile(flex_attention, dynamic=True, fullgraph=True)
_create_block_mask = torch.compile(create_block_mask, dynamic=True)


def prepare(layout: TreeLayout) -> BlockMask:
    """The 128 x 128 block mask. Raises UserError on CPU, where FlexAttention has no backward."""
    if layout.positions.device.type != "cuda":
        raise UserError("TreeAttention: backend 'flex' needs a CUDA device; use 'reference' on CPU")
    end, key_index = layout.subtree_end, layout.key_index

    def visible(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        column = key_index[query]
        return (key <= column) & (column < end[key])

    return _create_block_mask(visible, None, None, len(key_index), len(end), device=end.device)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: TreeLayout,
    plan: BlockMask,
    kernels: Literal["AUTO", "FLASH"] = "AUTO",
) -> Tensor:
    """See ``TreeAttention.forward``; ``kernels`` is FlexAttention's ``BACKEND``."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    gqa = q.shape[1] != k.shape[1]
    out = _flex_attention(q, k, v, block_mask=plan, enable_gqa=gqa, kernel_options={"BACKEND": kernels})
    return out.squeeze(0).transpose(0, 1)
