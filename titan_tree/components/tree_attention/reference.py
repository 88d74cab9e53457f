"""Backend "reference": the definition of TreeAttention in plain PyTorch, with a dense mask.

It runs on any device and in any float dtype. The [N, M] mask limits it to small trees.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_tree.components.tree_attention.context import join
from titan_tree.tree.layout import TreeLayout


def is_automatic(device: torch.device) -> bool:
    """Returns whether ``device`` is not a GPU: large trees on a GPU would need too large a mask."""
    return device.type != "cuda"


def refusal(q: Tensor, deterministic: bool) -> str | None:
    """Returns None: it computes all inputs."""
    return None


def prepare(layout: TreeLayout) -> Tensor:
    """Returns the mask [N, M] bool. Its size is N * M bytes."""
    return layout.dense_mask()


def attention(
    q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, layout: TreeLayout, plan: Tensor,
    deterministic: bool,
) -> Tensor:  # fmt: skip
    """See ``AttentionBackend.attention``."""
    k, v = join(k, v, context, layout.key_source)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=plan)
    return out.squeeze(0).transpose(0, 1)
