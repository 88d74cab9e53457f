"""Trees as lists of (parent, length), their layouts, and attention by its definition in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from titan_tree.components.backends import PLAIN
from titan_tree.components.tree_attention import Scoring, TreeAttention
from titan_tree.tree.layout import TreeLayout

Nodes = list[tuple[int, int]]  # DFS order; parent -1: a root


def random_nodes(seed: int, count: int, low: int, high: int, roots: float = 0.05) -> Nodes:
    """Returns a random tree in DFS order, with nodes of low .. high tokens. roots: chance of a new root."""
    rng = np.random.default_rng(seed)
    nodes: Nodes = []
    path: list[int] = []
    for i in range(count):
        keep = 0 if i == 0 or rng.random() < roots else 1 + int(len(path) * rng.random() ** 0.5)
        path = path[:keep]
        nodes.append((path[-1] if path else -1, int(rng.integers(low, high + 1))))
        path.append(i)
    return nodes


SMALL: dict[str, Nodes] = {
    "one token": [(-1, 1)],
    "chain of 5": [(-1, 5)],
    "chain of 129": [(-1, 129)],
    "chain of 300": [(-1, 300)],
    "star": [(-1, 70), *[(0, 3)] * 50],
    "1-token nodes": random_nodes(1, 260, 1, 1),
    "roots of 1": [(-1, 1)] * 150,
    "two of 140": [(-1, 140), (-1, 140)],
    "deep": random_nodes(2, 40, 1, 14, roots=0.0),
    "root in the last row of a block": [(-1, 255), (-1, 1)],
    "branch at a block edge": [(-1, 128), (0, 64), (1, 64), (0, 1), (0, 127)],
}


def subtree_ends(nodes: Nodes) -> np.ndarray:
    """Returns [N]: the exclusive end of each token's subtree."""
    lengths = [length for _, length in nodes]
    ends = np.cumsum(lengths)
    for i in range(len(nodes) - 1, -1, -1):
        if (parent := nodes[i][0]) >= 0:
            ends[parent] = max(ends[parent], ends[i])
    return np.repeat(ends, lengths)


def make_layout(nodes: Nodes, queries: np.ndarray | None = None) -> TreeLayout:
    """Returns the layout of all tokens, or of the given query columns with all other keys as context."""
    end = torch.from_numpy(subtree_ends(nodes)).int()
    columns = torch.arange(len(end)).int() if queries is None else torch.from_numpy(queries).int()
    return TreeLayout(positions=columns, subtree_end=end, key_index=columns)


def ancestor_mask(nodes: Nodes, queries: np.ndarray | None = None) -> Tensor:
    """Returns [N, M] bool: which keys each query may see, from parent pointers instead of intervals."""
    starts = np.cumsum([0] + [length for _, length in nodes])
    mask = torch.zeros(starts[-1], starts[-1], dtype=torch.bool)
    for i, (_, length) in enumerate(nodes):
        block = slice(starts[i], starts[i + 1])
        mask[block, block] = torch.ones(length, length).tril().bool()
        above = nodes[i][0]
        while above >= 0:
            mask[block, starts[above] : starts[above + 1]] = True
            above = nodes[above][0]
    return mask if queries is None else mask[torch.from_numpy(queries)]


def window_mask(nodes: Nodes, queries: np.ndarray | None, window: int) -> Tensor:
    """Returns [N, M] bool: the last ``window`` columns that each query sees.

    Ancestors precede their descendants in DFS order, so these are the last tokens of the query's path.
    """
    mask = ancestor_mask(nodes, queries)
    num_later = mask.flip(1).cumsum(1).flip(1)  # visible columns from each column on
    return mask & (num_later <= window)


def exact_attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float | None = None, scoring: Scoring = PLAIN
) -> Tensor:
    """Returns attention in float64, [N, Hq, Dv]. ``mask`` contains the window."""
    group = q.shape[1] // k.shape[1]
    q, k, v = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if scoring.softcap is not None:
        scores = scoring.softcap * (scores / scoring.softcap).tanh()
    scores = scores.masked_fill(~mask, -torch.inf)
    total = scores.logsumexp(-1)
    if scoring.sinks is not None:
        total = torch.logaddexp(total, scoring.sinks.double()[:, None])
    return torch.einsum("hqk,khd->qhd", (scores - total[..., None]).exp(), v)


def exact_results(q: Tensor, k: Tensor, v: Tensor, do: Tensor, layout: TreeLayout) -> list[Tensor]:
    """Returns o, dq, dk and dv in float64, 1024 queries at a time, for trees with too large a dense mask."""
    out, dq = (torch.zeros_like(q, dtype=torch.float64) for _ in range(2))
    dk, dv = (torch.zeros_like(k, dtype=torch.float64) for _ in range(2))
    key = torch.arange(len(k), device=k.device)
    for rows in torch.arange(len(q), device=q.device).split(1024):
        column = layout.key_index[rows, None]
        inputs = [x.detach().double().requires_grad_() for x in (q[rows], k, v)]
        chunk = exact_attention(*inputs, (key <= column) & (column < layout.subtree_end))
        dq[rows], dk_part, dv_part = torch.autograd.grad(chunk, inputs, do[rows].double())
        out[rows] = chunk.detach()
        dk += dk_part
        dv += dv_part
    return [out, dq, dk, dv]


def random_qkv(n: int, m: int, heads: tuple[int, int], dim: int, **factory) -> list[Tensor]:
    """Returns q [n, Hq, dim], k and v [m, Hkv, dim], which require gradients, and a gradient do like q."""
    q, do = (torch.randn(n, heads[0], dim, **factory) for _ in range(2))
    k, v = (torch.randn(m, heads[1], dim, **factory) for _ in range(2))
    return [*(x.requires_grad_() for x in (q, k, v)), do]


def assert_exact_in_gateway_cache(
    backend: str,
    tolerance: float,
    dim: int = 16,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    nodes: Nodes | None = None,
) -> None:
    """Asserts that context rows scattered over a larger cache give the results of keys in one tensor."""
    nodes = nodes or random_nodes(0, 20, 5, 20, roots=0.0)
    n, heads = sum(length for _, length in nodes), (4, 2)
    columns = np.arange(n // 3, n, 2)
    own = np.isin(np.arange(n), columns)
    rows = n + 50
    place = np.random.default_rng(0).permutation(rows)[: n - len(columns)]
    source = np.empty(n, np.int64)
    source[~own], source[own] = place, rows + np.arange(len(columns))
    layout = replace(make_layout(nodes, columns), key_source=torch.from_numpy(source)).to(device)
    mask = ancestor_mask(nodes, columns).to(device)
    q, k, v, do = random_qkv(*mask.shape, heads, dim, dtype=dtype, device=device)
    q, k, v = (x.detach() for x in (q, k, v))
    cache = torch.randn(rows, 2, heads[1], dim, device=device, dtype=dtype)
    cache[place] = torch.stack([k, v], 1)[~own]
    inputs = [x.requires_grad_() for x in (q, k[own], v[own], cache)]
    attention = TreeAttention(backend)
    out = attention(*inputs[:3], attention.prepare(layout), inputs[3])
    got = torch.autograd.grad(out, inputs, do)
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    expected = exact_attention(*exact, mask)
    dq, dk, dv = torch.autograd.grad(expected, exact, do.double())
    dcache = torch.zeros_like(cache, dtype=torch.float64)
    dcache[place] = torch.stack([dk, dv], 1)[~own]
    results = zip((out, *got), (expected, dq, dk[own], dv[own], dcache), strict=True)
    assert all((a - b).norm() < tolerance * b.norm() for a, b in results)
    assert not got[3][[row for row in range(rows) if row not in place]].any()  # nobody reads these rows
