"""Backend "reference": the definition of TreeAttention in plain PyTorch, with a dense mask.

It runs on any device and in any float dtype. The [N, M] mask limits it to small trees.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_tree.components.backends import Scoring
from titan_tree.components.tree_attention.context import join
from titan_tree.tree.layout import TreeLayout


def is_automatic(device: torch.device) -> bool:
    """Returns whether ``device`` is not a GPU: large trees on a GPU would need too large a mask."""
    return device.type != "cuda"


def refusal(q: Tensor, v: Tensor, scoring: Scoring, deterministic: bool) -> str | None:
    """Returns None: it computes all inputs."""
    return None


def prepare(layout: TreeLayout, window: int | None = None) -> Tensor:
    """Returns the mask [N, M] bool. Its size is N * M bytes."""
    mask = layout.dense_mask()
    return mask if window is None else mask & layout.in_window(window)


def attention(
    q: Tensor, k: Tensor, v: Tensor, context: Tensor | None, layout: TreeLayout, prepared: Tensor,
    scale: float, scoring: Scoring, deterministic: bool,
) -> Tensor:  # fmt: skip
    """See ``AttentionBackend.attention``."""
    k, v = join(k, v, context, layout.key_source)
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))  # [H, N or M, D]
    if scoring.softcap is None and scoring.sinks is None:
        out = F.scaled_dot_product_attention(q[None], k[None], v[None], attn_mask=prepared, scale=scale)[0]
    else:
        out = _weights(q, k, prepared, scale, scoring).to(v.dtype) @ v
    return out.transpose(0, 1)


def _weights(q: Tensor, k: Tensor, mask: Tensor, scale: float, scoring: Scoring) -> Tensor:
    """Returns the weight [H, N, M] of each key, in fp32 or wider."""
    scores = (q @ k.mT).to(torch.promote_types(q.dtype, torch.float32)) * scale
    if (cap := scoring.softcap) is not None:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~mask, -torch.inf)
    if scoring.sinks is None:
        return scores.softmax(-1)
    sinks = scoring.sinks.to(scores.dtype)[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]
