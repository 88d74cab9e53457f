"""The gated delta rule and the causal convolution on forests, in plain torch, on any device and dtype.

Within a chunk that starts from state S, with decays summed from its start, G_i = g_1 + .. + g_i
(Yang et al., arXiv:2412.06464, section 3.3):

    A_ij = beta_i exp(G_i - G_j) k_i.k_j  (j < i);   T = (I + A)^-1 diag(beta)
    n = T (v - exp(G) k S);   o_i = exp(G_i) q_i S + sum_{j <= i} exp(G_i - G_j) (q_i.k_j) n_j
    S' = exp(G_last) S + sum_j exp(G_last - G_j) k_j n_j^T
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor

from titan_tree.tree.layout import TreeLayout

EPSILON = 1e-6  # added to squared lengths, as Qwen's models do


def gated_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, layout: TreeLayout, states: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """See ``TreeGDN.forward``."""
    assert layout.chunks is not None
    start, before, exported = (x.tolist() for x in layout.chunks)
    dtype, wide = v.dtype, torch.promote_types(v.dtype, torch.float32)
    repeat = v.shape[1] // k.shape[1]
    q, k, v, g, beta = (x.to(wide) for x in (q, k, v, g, beta))
    q, k = (normalize(x).repeat_interleave(repeat, 1) for x in (q, k))
    chunks = _prepared(q * k.shape[-1] ** -0.5, k, v, g, beta, start)

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
        read, mixed, t, key_in, key_out, value, keep = chunks[c]
        new = t @ (value - key_in @ state)
        outputs.append((read @ state + mixed @ new)[:, : start[c + 1] - start[c]])
        if c in wanted:
            last[c] = keep * state + key_out.mT @ new
    out = torch.cat(outputs, dim=1).transpose(0, 1).to(dtype)
    if layout.state_exports is None:
        return out, None
    return out, torch.stack([last[c] for c in exported])


def _prepared(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, start: Sequence[int]
) -> dict[int, tuple[Tensor, ...]]:
    """Of each chunk, [heads, size, ...]: exp(G) q, P, T, exp(G) k, exp(G_last - G) k, v and exp(G_last).

    Chunks are filled up to a power of two, so that short ones cost little, with tokens that change nothing:
    of keys 0, that do not decay.
    """
    sizes = [1 << (stop - first - 1).bit_length() for first, stop in pairwise(start)]
    prepared: dict[int, tuple[Tensor, ...]] = {}
    for size in set(sizes):
        members = [c for c, other in enumerate(sizes) if other == size]
        first, stop = (torch.tensor([start[c + i] for c in members], device=v.device) for i in (0, 1))
        token = first[:, None] + torch.arange(size, device=v.device)
        is_token = token < stop[:, None]
        token = token.clamp(max=len(v) - 1)

        def in_chunks(x: Tensor, token: Tensor = token, is_token: Tensor = is_token) -> Tensor:
            return (x[token] * is_token.view(*is_token.shape, *[1] * (x.ndim - 1))).transpose(1, 2)

        qs, ks, vs, gs, betas = map(in_chunks, (q, k, v, g, beta))
        total = gs.cumsum(-1)
        decay = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
        a = (betas[..., None] * decay * (ks @ ks.mT)).tril(-1)
        one = torch.eye(size, dtype=v.dtype, device=v.device)
        t = torch.linalg.solve_triangular(a + one, torch.diag_embed(betas), upper=False)
        p = decay * (qs @ ks.mT)
        gain, rest = total.exp()[..., None], (total[..., -1:] - total).exp()[..., None]
        columns = qs * gain, p, t, ks * gain, ks * rest, vs, total[..., -1].exp()[..., None, None]
        prepared |= {c: tuple(x[i] for x in columns) for i, c in enumerate(members)}
    return prepared


def normalize(x: Tensor) -> Tensor:
    """x / |x| over the last dimension."""
    return x * (x.square().sum(-1, keepdim=True) + EPSILON).rsqrt()


def tree_causal_conv1d(
    x: Tensor, weight: Tensor, layout: TreeLayout, tails: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """silu(sum_j weight[:, W - 1 - j] x[j-th token before on the path]) of N tokens, each channel for itself.

    Args:
        x: [N, D].
        weight: [D, W]; the last column is that of the token itself.
        tails: of a partition [R, W - 1, D]: what the last tokens of a path left, the newest last.
    Returns:
        [N, D], and of a partition the tails [S, W - 1, D] after the tokens ``layout.state_exports``.
    """
    assert layout.predecessor is not None
    wide = torch.promote_types(x.dtype, torch.float32)
    width = weight.shape[1]
    sources = conv_sources(layout.predecessor, width)
    rows = [x, x.new_zeros(1, x.shape[1])]
    if tails is not None:
        rows.insert(1, tails.flatten(0, 1))
    inputs = torch.cat(rows)
    # Names of rows that are not here: -1 is the last row, the zeros; older gateway rows come before newer.
    old = torch.where(sources < -1, len(x) - 2 - sources, sources)
    window = inputs[old]
    y = F.silu((window.to(wide) * weight.to(wide).T).sum(1)).to(x.dtype)
    if layout.state_exports is None:
        return y, None
    return y, window[layout.state_exports][:, 1:]


def conv_sources(predecessor: Tensor, width: int) -> Tensor:
    """[N, W] int64: of each token the last ``width`` tokens of its path, itself the last.

    -1: none, the path is shorter. -2 - i: not here, row i of the gateway's tails [R * (W - 1)].
    """
    n, size = len(predecessor), width - 1
    before = predecessor.long()
    # A gateway's row r: first its newest element, then older ones.
    before = torch.where(before < -1, -2 - ((-2 - before) * size + size - 1), before)
    sources = [torch.arange(n, device=predecessor.device)]
    for _ in range(size):
        now = sources[-1]
        sources.append(torch.where(now >= 0, before[now.clamp(min=0)], torch.where(now < -1, now + 1, now)))
    return torch.stack(sources[::-1], dim=1)
