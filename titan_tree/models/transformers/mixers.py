"""Recurrent layers of transformers on token trees.

Such a layer has a *mixer* with a causal convolution, and in most families a recurrence behind it. In
transformers, both know sequences only. ``on_trees`` gives a mixer another forward pass, which uses its
projections, weights and norms, and computes convolution and recurrence along each path:

    Gated DeltaNet     Qwen3.5, Qwen3-Next, OLMo-Hybrid (arXiv:2412.06464)
    KDA                Kimi-Linear (arXiv:2510.26692), Ling 3.0
    Mamba-2            Granite-4-H, Nemotron-H (arXiv:2405.21060)
    short convolution  LFM2 (arXiv:2511.23404), LFM3

N tokens, d hidden size, C channels of the convolution and W its width, H key heads, G value heads, K and V
dims of a key and a value head.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from titan_tree.components.recurrence import TreeGDN, TreeKDA, TreeSSD, tree_causal_conv1d
from titan_tree.models.layers import at_least_fp32
from titan_tree.models.transformers.attention_function import PartitionCache, TreeInputs
from titan_tree.models.tree_model import CachedRows

# What a mixer reads of earlier partitions, or exports for later ones: states and the convolution's inputs, or
# only the latter; () outside of partitions.
Rows = Sequence[Tensor]


class Kind(NamedTuple):
    """One kind of mixer.

    Args:
        run: runs a mixer on x [N, d], with the rows of earlier partitions; returns [N, d] and its exports.
        state: returns the shape of a mixer's state, (G, K, V); None: it has a convolution only.
        kernel: the module that computes the recurrence, made from the name of a backend.
        flops: operations of a forward and backward pass per token and element of the state.
    """

    run: Callable[[Any, Tensor, TreeInputs, Rows], tuple[Tensor, Rows]]
    state: Callable[[Any], tuple[int, int, int]] | None = None
    kernel: Callable[[str], nn.Module] | None = None
    flops: int = 0


def recurrent_mixer(layer: nn.Module) -> Any:
    """Returns the mixer of a layer of transformers, or None if the layer has none with a convolution."""
    return next((part for part in layer.children() if _convolution(part) is not None), None)


def kind_of(mixer: nn.Module) -> Kind:
    return next((KINDS[name] for name in KINDS if hasattr(mixer, name)), SHORT_CONVOLUTION)


def on_trees(mixer: Any) -> None:
    """Makes a mixer follow the paths of trees, in place. It keeps its parameters.

    Calls without a tree, such as those of ``generate``, run its own forward pass.
    """
    mixer.forward = MethodType(_forward, mixer)


def conv_width(mixer: nn.Module) -> int:
    conv = _convolution(mixer)
    assert conv is not None
    return conv.kernel_size[0]


def cached_rows(mixer: nn.Module) -> list[CachedRows]:
    """Returns what a partition exports after a token: a state, if any, and the convolution's inputs."""
    conv, state = _convolution(mixer), kind_of(mixer).state
    assert conv is not None
    tail = CachedRows("states", (conv.kernel_size[0] - 1, conv.in_channels))
    return [tail] if state is None else [CachedRows("states", state(mixer), is_wide=True), tail]


def _convolution(mixer: nn.Module) -> nn.Conv1d | None:
    return next((part for part in mixer.children() if isinstance(part, nn.Conv1d)), None)


def _forward(
    mixer: Any, hidden_states: Tensor, *args: Any, tree: TreeInputs | None = None, **kwargs: Any
) -> Tensor:
    """Runs the mixer on [1, N, d], called as transformers calls it. Returns [1, N, d]."""
    if tree is None:
        plain: Tensor = type(mixer).forward(mixer, hidden_states, *args, **kwargs)
        return plain
    # Families and versions of transformers differ in the argument's name.
    names = ("cache", "cache_params", "past_key_values")
    cache: PartitionCache | None = next(filter(None, map(kwargs.get, names)), None)
    out, exports = kind_of(mixer).run(mixer, hidden_states[0], tree, () if cache is None else cache.rows)
    if cache is not None:
        cache.exports = tuple(exports)
    return out[None]


def _convolve(
    mixer: nn.Module, x: Tensor, tree: TreeInputs, rows: Rows, silu: bool = True
) -> tuple[Tensor, list[Tensor]]:
    """Returns the convolution of x [N, C], and in a partition its exports."""
    conv = _convolution(mixer)
    assert conv is not None
    weight, index = conv.weight[:, 0], tree.layout.conv_index
    tails = rows[-1].to(x.dtype) if rows else None  # they differ under autocast
    y, exports = tree_causal_conv1d(x, weight, tree.layout, tails, index, conv.bias, silu)
    return y, [] if exports is None else [exports.to(rows[-1].dtype)]


def _recur(tree: TreeInputs, rows: Rows, *inputs: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Returns the recurrence of the inputs, [N, G, V], and in a partition its exports."""
    assert tree.recurrence is not None
    out, exports = tree.recurrence(*inputs, tree.layout, rows[0] if rows else None)
    return out, [] if exports is None else [exports]


def _run_gated_delta_net(mixer: Any, x: Tensor, tree: TreeInputs, rows: Rows) -> tuple[Tensor, Rows]:
    qkv, gate, b, a = _project_gated_delta_net(mixer, x)
    qkv, tails = _convolve(mixer, qkv, tree, rows)
    sizes = mixer.key_dim, mixer.key_dim, mixer.value_dim
    dims = mixer.head_k_dim, mixer.head_k_dim, mixer.head_v_dim
    q, k, v = (part.unflatten(-1, (-1, dim)) for part, dim in zip(qkv.split(sizes, -1), dims, strict=True))
    wide = at_least_fp32(x)
    g = -mixer.A_log.to(wide).exp() * F.softplus(a.to(wide) + mixer.dt_bias.to(wide))
    beta = b.sigmoid() * (2 if getattr(mixer, "allow_neg_eigval", False) else 1)
    out, states = _recur(tree, rows, q, k, v, g, beta)
    norm, project = (mixer.o_norm, mixer.o_proj) if hasattr(mixer, "o_norm") else (mixer.norm, mixer.out_proj)
    gated = norm(out.flatten(0, 1), gate.reshape(-1, mixer.head_v_dim))
    return project(gated.view(-1, mixer.value_dim)), [*states, *tails]


def _project_gated_delta_net(mixer: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns queries, keys and values [N, 2 H K + G V], output gates [N, G V or G, V], b and a [N, G]."""
    if hasattr(mixer, "g_proj"):  # OLMo-Hybrid
        q, k, v, gate, b, a = (getattr(mixer, f"{name}_proj")(x) for name in "qkvgba")
        return torch.cat([q, k, v], -1), gate, b, a
    if hasattr(mixer, "in_proj_qkv"):  # Qwen3.5
        qkv, gate, b, a = (getattr(mixer, f"in_proj_{name}")(x) for name in ("qkv", "z", "b", "a"))
        return qkv, gate, b, a
    # Qwen3-Next packs its projections, one key head after another.
    parts = mixer.fix_query_key_value_ordering(mixer.in_proj_qkvz(x[None]), mixer.in_proj_ba(x[None]))
    q, k, v, gate, b, a = (part[0] for part in parts)
    return torch.cat([q.flatten(1), k.flatten(1), v.flatten(1)], -1), gate, b, a


def _run_kda(mixer: Any, x: Tensor, tree: TreeInputs, rows: Rows) -> tuple[Tensor, Rows]:
    qkv = torch.cat([mixer.q_proj(x), mixer.k_proj(x), mixer.v_proj(x)], -1)
    qkv, tails = _convolve(mixer, qkv, tree, rows)
    heads = mixer.num_heads, mixer.head_dim
    q, k, v = (part.unflatten(-1, heads) for part in qkv.chunk(3, -1))
    g = mixer.forget_gate(x[None])[0].to(at_least_fp32(x))  # Ling 3.0 rounds it to x's dtype
    out, states = _recur(tree, rows, q, k, v, g, mixer.b_proj(x).sigmoid())
    # Ling 3.0 has one projection, Kimi-Linear the product of two.
    gate = mixer.g_proj(x) if hasattr(mixer, "g_proj") else mixer.g_b_proj(mixer.g_a_proj(x))
    return mixer.o_proj(mixer.o_norm(out, gate.unflatten(-1, heads)).flatten(1)), [*states, *tails]


def _run_mamba2(mixer: Any, x: Tensor, tree: TreeInputs, rows: Rows) -> tuple[Tensor, Rows]:
    size, groups = mixer.intermediate_size, mixer.n_groups * mixer.ssm_state_size
    gate, mixed, dt = mixer.in_proj(x).split([size, size + 2 * groups, mixer.num_heads], -1)
    mixed, tails = _convolve(mixer, mixed, tree, rows)
    value, b, c = mixed.split([size, groups, groups], -1)
    b, c = (part.unflatten(-1, (mixer.n_groups, -1)) for part in (b, c))
    value, wide = value.unflatten(-1, (mixer.num_heads, -1)), at_least_fp32(x)
    dt = F.softplus(dt.to(wide) + mixer.dt_bias.to(wide)).clamp(*mixer.time_step_limit)
    g = -mixer.A_log.to(wide).exp() * dt
    out, states = _recur(tree, rows, c, b, (dt[..., None] * value).to(x.dtype), g)
    out = out.to(wide) + mixer.D.to(wide)[:, None] * value
    return mixer.out_proj(mixer.norm(out.flatten(1), gate).to(x.dtype)), [*states, *tails]


def _run_short_convolution(mixer: Any, x: Tensor, tree: TreeInputs, rows: Rows) -> tuple[Tensor, Rows]:
    gate_in, gate_out, value = mixer.in_proj(x).chunk(3, -1)
    y, tails = _convolve(mixer, gate_in * value, tree, rows, silu=False)
    return mixer.out_proj(gate_out * y), tails


SHORT_CONVOLUTION = Kind(_run_short_convolution)
# Other kinds, by an attribute that only their mixers have. With the delta rule, a key and a query read a
# state and one update writes it, as in ``GatedDeltaNet.flops``. Without it, no key reads.
KINDS = {
    "forget_gate": Kind(
        _run_kda, lambda mixer: (mixer.num_heads, mixer.head_dim, mixer.head_dim), TreeKDA, 18
    ),
    "D": Kind(
        _run_mamba2, lambda mixer: (mixer.num_heads, mixer.ssm_state_size, mixer.head_dim), TreeSSD, 12
    ),
    "A_log": Kind(
        _run_gated_delta_net,
        lambda mixer: (mixer.num_v_heads, mixer.head_k_dim, mixer.head_v_dim),
        TreeGDN,
        18,
    ),
}
