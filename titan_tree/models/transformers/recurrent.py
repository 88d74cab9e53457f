"""Gated DeltaNet of transformers on trees: the recurrent layers of Qwen3.5 and Qwen3-Next.

Such a layer mixes tokens in two functions of its own, which know sequences only. ``on_trees`` therefore gives
it another forward pass. It uses the layer's projections, weights and norm, and computes the convolution and
the gated delta rule along each path.

N tokens, H key heads, G value heads, K and V dims of a key and a value head, W width of the convolution.
"""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_tree.components.tree_gdn import tree_causal_conv1d
from titan_tree.models.layers import at_least_fp32
from titan_tree.models.transformers.attention_function import PartitionCache, TreeInputs

RECURRENT_CACHE = "cache_params"  # the argument of the mixer


def recurrent_mixer(layer: nn.Module) -> Any:
    """Returns the Gated DeltaNet of a layer of transformers, or None if the layer has attention."""
    return getattr(layer, "linear_attn", None)


def on_trees(mixer: Any) -> None:
    """Makes the Gated DeltaNet of a layer follow the paths of trees, in place. It keeps its parameters.

    Calls without a tree, such as those of ``generate``, run its own forward pass.
    """
    mixer.forward = MethodType(_forward, mixer)


def row_shapes(mixer: Any) -> list[tuple[int, ...]]:
    """Returns the shapes of what a partition exports after a token: a state, and the convolution's inputs."""
    channels, _, width = mixer.conv1d.weight.shape
    return [(mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim), (width - 1, channels)]


def _forward(
    mixer: Any,
    hidden_states: Tensor,
    cache_params: PartitionCache | None = None,
    *args: Any,
    tree: TreeInputs | None = None,
    **kwargs: Any,
) -> Tensor:
    """Runs the mixer on [1, N, d], called as transformers calls it. Returns [1, N, d]."""
    if tree is None:
        out: Tensor = type(mixer).forward(mixer, hidden_states, cache_params, *args, **kwargs)
        return out
    layout, wide = tree.layout, at_least_fp32(hidden_states)
    assert tree.gdn is not None
    qkv, z, b, a = _project(mixer, hidden_states)
    states, tails = (None, None) if cache_params is None else cache_params.rows
    weight = mixer.conv1d.weight[:, 0].to(qkv.dtype)  # they differ under autocast
    qkv, new_tails = tree_causal_conv1d(qkv, weight, layout, tails, layout.conv_index)
    sizes = mixer.key_dim, mixer.key_dim, mixer.value_dim
    dims = mixer.head_k_dim, mixer.head_k_dim, mixer.head_v_dim
    q, k, v = (x.unflatten(-1, (-1, dim)) for x, dim in zip(qkv.split(sizes, -1), dims, strict=True))
    g = -mixer.A_log.to(wide).exp() * F.softplus(a.to(wide) + mixer.dt_bias.to(wide))
    out, new_states = tree.gdn(q, k, v, g, b.sigmoid(), layout, states)
    if cache_params is not None:
        assert new_states is not None
        assert new_tails is not None
        cache_params.exports = new_states, new_tails
    gated = mixer.norm(out.flatten(0, 1), z.reshape(-1, mixer.head_v_dim))
    projected: Tensor = mixer.out_proj(gated.view(1, -1, mixer.value_dim))
    return projected


def _project(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns queries, keys and values [N, 2 H K + G V], output gates [N, G V or G, V], b and a [N, G]."""
    if not hasattr(mixer, "in_proj_qkvz"):
        qkv, z, b, a = (getattr(mixer, f"in_proj_{name}")(x)[0] for name in ("qkv", "z", "b", "a"))
        return qkv, z, b, a
    # Qwen3-Next packs its projections, one key head after another.
    parts = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(x), mixer.in_proj_ba(x))
    q, k, v, z, b, a = (part[0] for part in parts)
    return torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], -1), z, b, a
