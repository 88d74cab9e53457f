"""Forests for recurrent layers: predecessors of tokens, layouts, and the gated delta rule path by path."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.layouts import Nodes
from titan_tree.components.recurrence.operator import tree_recurrence
from titan_tree.tree.chunks import Chains, Chunks, make_chains, make_chunks
from titan_tree.tree.layout import TreeLayout

# 1. Forests.


def forest(parents: Sequence[int], lengths: Sequence[int], rows: dict[int, int] | None = None) -> np.ndarray:
    """Returns [N] int32: the predecessor of each token of a forest, see ``TreeLayout.predecessor``.

    Args:
        parents: the parent of each node, -1 for a root; nodes are in DFS order.
        lengths: the number of tokens of each node.
        rows: {root node: gateway row it continues}. Other roots start from zero.
    """
    first = np.cumsum([0, *lengths])
    predecessor = np.arange(first[-1]) - 1
    for node, parent in enumerate(parents):
        root = -2 - rows[node] if rows and node in rows else -1
        predecessor[first[node]] = first[parent + 1] - 1 if parent >= 0 else root
    return predecessor.astype(np.int32)


def predecessors(nodes: Nodes) -> np.ndarray:
    """Returns [N] int32, each token's predecessor or -1 for a root, from (parent, length) of nodes."""
    return forest(*zip(*nodes, strict=True))


def random_forest(seed: int, nodes: int, longest: int, root: float = 0.0, rows: int = 0) -> np.ndarray:
    """Returns [N] int32: the predecessor of each token of a random forest.

    Args:
        seed: of the random numbers.
        nodes: number of nodes.
        longest: largest number of tokens in a node.
        root: probability that a node is a root.
        rows: number of gateway rows. Most roots continue one of them; without rows, all start from zero.
    """
    rng, path, parents, lengths, from_row = np.random.default_rng(seed), [], [], [], {}
    for node in range(nodes):
        path = [] if rng.random() < root else path[: 1 + int(len(path) * rng.random() ** 0.5)]
        parents.append(path[-1] if path else -1)
        if not path and rows and rng.random() < 0.7:
            from_row[node] = int(rng.integers(rows))
        lengths.append(int(rng.integers(1, longest + 1)))
        path.append(node)
    return forest(parents, lengths, from_row)


def ladder(depth: int) -> list[int]:
    """Returns the parents of nodes 0 .. 2 * depth.

    For each i < depth, node 2 i has two children: the leaf 2 i + 1, and node 2 i + 2.
    Chain i is nodes 2 i and 2 i + 1, and branches off chain i - 1. The last chain is one node.
    """
    return [-1, *itertools.chain(*((2 * i, 2 * i) for i in range(depth)))]


def path_of(token: int, predecessor: np.ndarray) -> list[int]:
    """Returns the tokens from the root to ``token``."""
    path = [token]
    while predecessor[path[-1]] >= 0:
        path.append(int(predecessor[path[-1]]))
    return path[::-1]


def leaves(predecessor: np.ndarray) -> list[int]:
    """Returns the tokens that are not predecessors."""
    return sorted(set(range(len(predecessor))) - set(predecessor.tolist()))


def recurrent_layout(
    predecessor: np.ndarray, exports: Sequence[int] | np.ndarray = (), size: int = 64
) -> TreeLayout:
    """Returns a layout for recurrent layers. Its positions, subtree_end and key_index are placeholders.

    Args:
        predecessor: [N], see ``forest``.
        exports: tokens whose states are exported.
        size: largest number of tokens in a chunk.
    """
    before = torch.from_numpy(predecessor).int()
    chunks = make_chunks(predecessor, np.array(exports, np.int64), size)
    return TreeLayout(
        positions=before,
        subtree_end=before,
        key_index=before,
        predecessor=before,
        state_exports=torch.tensor(exports) if len(exports) else None,
        chunks=chunks,
        chains=make_chains(chunks, max(0, -1 - int(predecessor.min()))),
    )


# 2. The recurrences.


class RecurrenceForest(NamedTuple):
    """A forest and the sizes of a layer on it."""

    predecessor: np.ndarray
    exports: list[int]  # tokens whose states are exported
    rows: int  # number of gateway rows
    size: int  # largest number of tokens in a chunk
    heads_k: int  # heads of q and k
    heads: int  # heads of v
    width_k: int  # head dim of q and k
    width: int  # head dim of v


class RecurrenceCase(NamedTuple):
    """Inputs of the rule, upstream gradients of its outputs, and the forest."""

    inputs: list[Tensor]  # q, k, v, g, beta (unless rule is "ssd") and, with a gateway, states
    upstream: list[Tensor]  # of o and of the exported states
    predecessor: np.ndarray
    exports: np.ndarray
    chunks: Chunks
    chains: Chains
    rule: str


def recurrence_case(
    sizes: RecurrenceForest,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    seed: int = 0,
    hard: bool = True,
    rule: str = "gdn",
) -> RecurrenceCase:
    """Returns a case with random values: q, k, v and the gradient of o in ``dtype``, everything else in fp32.

    hard: keys resemble each other, and one beta is 0. A beta of 0 is hard because the kernels divide by beta
    to compute its gradient. Use False in fp16: its exponent range is too small to compute this gradient
    accurately.
    rule: "gdn", "kda" or "ssd". For "kda", a channel of the keys decays by exp(-5) per token.
    """
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    n, heads_k, heads, width_k, width = len(sizes.predecessor), *sizes[4:]
    q, k = randn(n, heads_k, width_k), randn(n, heads_k, width_k)
    if hard:
        k += randn(1, heads_k, width_k)
    v = randn(n, heads, width)
    g, beta = F.logsigmoid(randn(n, heads) + 2), randn(n, heads).sigmoid()
    if hard:
        beta[n // 2] = 0
    if rule == "kda":
        g = F.logsigmoid(randn(n, heads, width_k) + 2)
        g[..., 1] = -5
    states = [0.3 * randn(sizes.rows, heads, width_k, width)] if sizes.rows else []
    upstream = [randn(n, heads, width).to(dtype), randn(len(sizes.exports), heads, width_k, width)]
    inputs = [x.to(dtype) for x in (q, k, v)] + [g, *([] if rule == "ssd" else [beta]), *states]
    exports = np.array(sizes.exports, np.int64)
    chunks = make_chunks(sizes.predecessor, exports, sizes.size)
    chains = make_chains(chunks, sizes.rows)
    return RecurrenceCase(
        [x.to(device).requires_grad_() for x in inputs],
        [x.to(device) for x in upstream],
        sizes.predecessor,
        exports,
        Chunks(*(x.to(device) for x in chunks)),
        chains.map(lambda x: x.to(device)),
        rule,
    )


def results(function: Callable, inputs: list[Tensor], upstream: list[Tensor]) -> list[Tensor]:
    """Returns the non-empty outputs, and the gradients of all inputs."""
    outputs = function(*inputs)
    pairs = [(y, dy.to(y.dtype)) for y, dy in zip(outputs, upstream, strict=True) if len(y)]
    outputs, upstream = zip(*pairs, strict=True)
    return [x.detach() for x in (*outputs, *torch.autograd.grad(outputs, inputs, upstream))]


def run_rule(case: RecurrenceCase, backend: str) -> list[Tensor]:
    """Returns ``results`` of the operator with a backend's kernels, without its check of the inputs."""

    return results(
        lambda *x: tree_recurrence(backend, *arguments(case, x), case.chunks, case.chains),
        case.inputs,
        case.upstream,
    )


def arguments(case: RecurrenceCase, inputs: Sequence[Tensor]) -> list[Tensor | None]:
    """Returns q, k, v, g, beta and states, from tensors like ``case.inputs``."""
    given = [*inputs[:4], *([None] if case.rule == "ssd" else []), *inputs[4:]]
    return given + [None] * (6 - len(given))


def path_recurrence(q, k, v, g, beta, states=None, *, predecessor, exports):
    """Returns o [N, G, V] and the exported states [X, G, K, V], for the inputs of ``tree_recurrence``.

    The rule runs token by token on every root-to-leaf path. A shared token's result is equal on all its
    paths. N: tokens, G: heads of v, V: their head dim, K: head dim of q and k, X: exported states.
    """
    group = v.shape[1] // k.shape[1]
    if beta is not None:
        q, k = (x * (x.square().sum(-1, keepdim=True) + 1e-6).rsqrt() for x in (q, k))
        q = q * k.shape[2] ** -0.5
    q, k = (x.repeat_interleave(group, 1) for x in (q, k))
    g = g if g.ndim == 3 else g[..., None]
    outputs, after = {}, {}
    for leaf in leaves(predecessor):
        path = path_of(leaf, predecessor)
        root = predecessor[path[0]]
        state = v.new_zeros(v.shape[1], k.shape[2], v.shape[2]) if root == -1 else states[-2 - root]
        for t in path:
            state = state * g[t].exp()[..., None]
            new = v[t]
            if beta is not None:
                new = beta[t][:, None] * (new - torch.einsum("gkv,gk->gv", state, k[t]))
            state = state + torch.einsum("gk,gv->gkv", k[t], new)
            outputs[t] = torch.einsum("gkv,gk->gv", state, q[t])
            after[t] = state
    exported = [after[t] for t in exports.tolist()]
    return torch.stack([outputs[t] for t in range(len(v))]), torch.stack(exported) if exported else v[:0]


def exact_rule(case: RecurrenceCase) -> list[Tensor]:
    """Returns ``results`` of the recurrence in float64, on the CPU."""
    inputs = [x.detach().double().cpu().requires_grad_() for x in case.inputs]
    return results(
        lambda *x: path_recurrence(*arguments(case, x), predecessor=case.predecessor, exports=case.exports),
        inputs,
        [x.cpu() for x in case.upstream],
    )


def assert_relative(got: list[Tensor], want: list[Tensor], tolerance: float) -> None:
    """Asserts that each error's norm is below ``tolerance`` times the norm of the exact tensor."""
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert a.shape == b.shape
        assert (a.double().cpu() - b).norm() < tolerance * b.norm()
