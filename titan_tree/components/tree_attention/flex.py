"""TreeAttention by compiled FlexAttention (Dong et al., arXiv:2412.05496) with the interval mask."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from titan_tree.data.layout import TreeLayout
from titan_tree.errors import UserError

_flex_attention = torch.compile(flex_attention, dynamic=True)
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


def attention(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, plan: BlockMask) -> Tensor:
    """See ``TreeAttention.forward``."""
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = _flex_attention(q, k, v, block_mask=plan, enable_gqa=q.shape[1] != k.shape[1])
    return out.squeeze(0).transpose(0, 1)
