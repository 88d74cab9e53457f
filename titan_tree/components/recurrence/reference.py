"""Backend "reference": the recurrences in plain PyTorch; and the definition of the causal convolution.

Both run on any device and in any float dtype. A chunk that starts from the state S is computed at once, with
decays summed from its start, G_i = g_1 + .. + g_i (Yang et al., arXiv:2412.06464, section 3.3):

    A_ij = beta_i exp(G_i - G_j) k_i.k_j  (j < i);   T = (I + A)^-1 diag(beta)
    n = T (v - exp(G) k S);   o_i = exp(G_i) q_i S + sum_{j <= i} exp(G_i - G_j) (q_i.k_j) n_j
    S' = exp(G_last) S + sum_j exp(G_last - G_j) k_j n_j^T

With a decay per channel, exp(G_i - G_j) is part of the sum over channels in k_i.k_j and q_i.k_j. It is
computed per pair of tokens: exp(-G_j) alone would overflow. Without the delta rule, n = v.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import titan_tree.components.recurrence.buffers as buffers
from titan_tree.components.recurrence.buffers import Saved
from titan_tree.tree.chunks import Chains, Chunks
from titan_tree.tree.layout import TreeLayout

EPSILON = 1e-6  # added to squared lengths, as Qwen's models do


# 1. The backend.


def is_automatic(device: torch.device) -> bool:
    """Returns whether ``device`` is not a GPU."""
    return device.type != "cuda"


def refusal(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None) -> str | None:
    """Returns None: it computes all inputs."""
    return None


def empty_saved(q: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, chains: Chains) -> Saved:
    """Returns tensors without elements: the backward pass recomputes everything."""
    return Saved(*(x.new_empty(0) for x in buffers.empty_saved(q, v, g, beta, chains)))


def forward(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, states: Tensor | None, chunks: Chunks,
    chains: Chains,
) -> tuple[Tensor, Tensor, Saved]:  # fmt: skip
    """See ``RecurrenceBackend.forward``."""
    o, exported = recurrence(q, k, v, g, beta, states, chunks)
    return o.contiguous(), exported, empty_saved(q, v, g, beta, chains)


def backward(
    do: Tensor, dexported: Tensor, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None,
    states: Tensor | None, saved: Saved, chunks: Chunks, chains: Chains,
) -> list[Tensor]:  # fmt: skip
    """See ``RecurrenceBackend.backward``. Repeats the forward pass under autograd and differentiates it."""
    # Inside an operator, autograd's dispatch keys are off, and enable_grad alone does not turn them on.
    recording = torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.AutogradFunctionality, False)
    with recording, torch.enable_grad():
        q, k, v, g = inputs = [x.detach().requires_grad_() for x in (q, k, v, g)]
        beta, states = optional = [None if x is None else x.detach().requires_grad_() for x in (beta, states)]
        inputs += [x for x in optional if x is not None]
        o, exported = recurrence(q, k, v, g, beta, states, chunks)
        # An empty tensor of exported states has no graph.
        outputs, upstream = ([o, exported], [do, dexported]) if len(exported) else ([o], [do])
        gradients = torch.autograd.grad(outputs, inputs, upstream, allow_unused=True, materialize_grads=True)
    return [x.contiguous() for x in gradients]


# 2. The rules.


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, states: Tensor | None, chunks: Chunks
) -> tuple[Tensor, Tensor]:
    """Returns o [N, G, V] and the states [X, G, K, V] after ``chunks.exported``.

    The result is differentiable any number of times. The arguments are those of ``TreeGDN``, ``TreeKDA`` or,
    without beta, ``TreeSSD``.
    """
    start, before, exported = (x.tolist() for x in chunks)
    dtype, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    repeat = v.shape[1] // k.shape[1]
    q, k, v, g = (x.to(wide) for x in (q, k, v, g))
    if beta is not None:
        beta, q, k = beta.to(wide), normalize(q) * k.shape[-1] ** -0.5, normalize(k)
    q, k = (x.repeat_interleave(repeat, 1) for x in (q, k))
    g = g.clamp(min=math.log(torch.finfo(wide).tiny))  # differences of infinite sums would be NaN
    prepared = _prepared(q, k, v, g if g.ndim == 3 else g[..., None], beta, start)

    zero = v.new_zeros(v.shape[1], k.shape[-1], v.shape[-1])
    outputs: list[Tensor] = []
    last: dict[int, Tensor] = {}  # states at the ends of chunks
    wanted = {*before, *exported}
    for c, source in enumerate(before):
        if source <= -2:
            assert states is not None
            state = states[-2 - source].to(wide)
        else:
            state = last[source] if source >= 0 else zero
        read, mixed, t, key_in, key_out, value, keep = prepared[c]
        new = value if t is None else t @ (value - key_in @ state)
        outputs.append((read @ state + mixed @ new)[:, : start[c + 1] - start[c]])
        if c in wanted:
            last[c] = keep * state + key_out.mT @ new
    out = torch.cat(outputs, dim=1).transpose(0, 1).to(dtype)
    return out, torch.stack([last[c] for c in exported]) if exported else zero.new_zeros(0, *zero.shape)


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, start: Sequence[int]
) -> dict[int, tuple[Any, ...]]:
    """Returns exp(G) q, P, T, exp(G) k, exp(G_last - G) k, v, exp(G_last) per chunk: [heads, size, ...].

    P_ij = exp(G_i - G_j) (q_i.k_j) for j <= i. Without beta, T is None. g is [N, G, 1] or [N, G, K]. The size
    of a chunk is rounded up to a power of two, so that short chunks cost little. The tokens that fill it up
    change nothing: their keys are 0 and they do not decay.
    """
    sizes = [1 << (stop - first - 1).bit_length() for first, stop in pairwise(start)]
    prepared: dict[int, tuple[Any, ...]] = {}
    for size in set(sizes):
        members = [c for c, other in enumerate(sizes) if other == size]
        first, stop = (torch.tensor([start[c + i] for c in members], device=v.device) for i in (0, 1))
        token = first[:, None] + torch.arange(size, device=v.device)
        is_token = token < stop[:, None]
        token = token.clamp(max=len(v) - 1)

        def in_chunks(x: Tensor, token: Tensor = token, is_token: Tensor = is_token) -> Tensor:
            return x[token].where(is_token.view(*is_token.shape, *[1] * (x.ndim - 1)), 0).transpose(1, 2)

        qs, ks, vs, gs = map(in_chunks, (q, k, v, g))
        total, t = gs.cumsum(-2), None
        if beta is not None:
            betas, one = in_chunks(beta), torch.eye(size, dtype=v.dtype, device=v.device)
            a = (betas[..., None] * _products(ks, ks, total)).tril(-1)
            t = torch.linalg.solve_triangular(a + one, torch.diag_embed(betas), upper=False)
        last = total[..., -1:, :]
        gain, rest = total.exp(), (last - total).exp()
        columns = qs * gain, _products(qs, ks, total), t, ks * gain, ks * rest, vs, last.mT.exp()
        prepared |= {c: tuple(None if x is None else x[i] for x in columns) for i, c in enumerate(members)}
    return prepared


def _products(rows: Tensor, columns: Tensor, total: Tensor) -> Tensor:
    """Returns the sum over channels of exp(G_i - G_j) rows_i columns_j for j <= i, else 0."""
    is_future = torch.ones(*[rows.shape[-2]] * 2, dtype=torch.bool, device=rows.device).triu(1)
    lost = total[..., :, None, :] - total[..., None, :, :]
    decay = lost.masked_fill(is_future[..., None], -torch.inf).exp()
    if decay.shape[-1] == 1:
        return decay[..., 0] * (rows @ columns.mT)
    return torch.einsum("...ik,...jk,...ijk->...ij", rows, columns, decay)


def normalize(x: Tensor) -> Tensor:
    """Returns x / |x| over the last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


# 3. The convolution.


def tree_causal_conv1d(
    x: Tensor,
    weight: Tensor,
    layout: TreeLayout,
    tails: Tensor | None = None,
    bias: Tensor | None = None,
    silu: bool = True,
) -> tuple[Tensor, Tensor | None]:
    """Defines ``conv.tree_causal_conv1d``, see there."""
    assert layout.predecessor is not None
    wide = torch.promote_types(x.dtype, torch.float32)
    width = weight.shape[1]
    sources = conv_sources(layout.predecessor, width)
    rows = [x, x.new_zeros(1, x.shape[1])]
    if tails is not None:
        rows.insert(1, tails.flatten(0, 1))
    inputs = torch.cat(rows)
    # Index -1 is the last row: zeros. The rows of tails follow the N own ones.
    old = torch.where(sources < -1, len(x) - 2 - sources, sources)
    window = inputs[old]
    z = (window.to(wide) * weight.to(wide).T).sum(1)
    z = z if bias is None else z + bias.to(wide)
    y = (F.silu(z) if silu else z).to(x.dtype)
    if layout.state_exports is None:
        return y, None
    return y, window[layout.state_exports][:, 1:]


def conv_sources(predecessor: Tensor, width: int) -> Tensor:
    """Returns [N, W] int64: the last ``width`` = W tokens of each token's path, with the token itself last.

    -1 means that the path is shorter. -2 - i names row i of the gateway's tails, flattened to [R * (W - 1)]
    rows.
    """
    n, size = len(predecessor), width - 1
    before = predecessor.long()
    # Gateway row r: begin at its newest element and continue with older ones.
    before = torch.where(before < -1, -2 - ((-2 - before) * size + size - 1), before)
    sources = [torch.arange(n, device=predecessor.device)]
    for _ in range(size):
        now = sources[-1]
        sources.append(torch.where(now >= 0, before[now.clamp(min=0)], torch.where(now < -1, now + 1, now)))
    return torch.stack(sources[::-1], dim=1)
