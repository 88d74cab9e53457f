"""The definition of TreeAttention in plain torch: a dense [N, M] mask. Any device, any float dtype."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from titan_tree.tree.layout import TreeLayout


def prepare(layout: TreeLayout) -> Tensor:
    """[N, M] bool: N * M bytes, which is why this is for CPUs and small trees."""
    return layout.dense_mask()


def attention(q: Tensor, k: Tensor, v: Tensor, layout: TreeLayout, plan: Tensor) -> Tensor:
    """See ``TreeAttention.forward``."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=plan)
    return out.squeeze(0).transpose(0, 1)
