"""TreeCosts: how long a tree takes to train, from its sizes. CostFit refines them by measurements.

The time of a forward and backward pass is close to linear in four sizes of its trees, see ``SIZES``, plus a
constant per forward pass. Plans compare times, so only the ratios of the coefficients matter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from titan_tree.errors import UserError, shorten
from titan_tree.tree.token_tree import TokenTree

# Distinct tokens; pairs of a token and a token that it sees, itself included; edges that the loss counts;
# chunks of the recurrence (tree/chunks.py).
SIZES = ("tokens", "pairs", "edges", "chunks")
CHUNK = 64  # tokens
# Relative weight of the start values against the measurements, which cannot tell tokens from edges if all
# trees are alike.
PRIOR = 1e-3
LARGEST_CHANGE = 10.0  # of a coefficient, relative to the others


class TreeCosts(NamedTuple):
    """Seconds of a forward and backward pass, per unit of each size and per forward pass."""

    token: float
    pair: float
    edge: float
    chunk: float
    forward: float

    def seconds(self, sizes: np.ndarray) -> np.ndarray:
        """Returns [...] float64: the seconds of trees or of passes.

        Every rank must get the same bits, so this sums element by element in a fixed order. BLAS sums in an
        order that depends on the CPU.

        Args:
            sizes: [..., 4] of ``SIZES``, or [..., 5] with the number of forward passes.
        """
        total = np.zeros(sizes.shape[:-1])
        for i in range(sizes.shape[-1]):
            total = total + self[i] * sizes[..., i].astype(np.float64)
        return total


def tree_sizes(trees: Sequence[TokenTree]) -> np.ndarray:
    """Returns [trees, 4] int64: the ``SIZES`` of each tree."""
    return np.array([_node_sizes(tree).sum(0) for tree in trees], np.int64).reshape(-1, len(SIZES))


def leaf_sizes(tree: TokenTree) -> np.ndarray:
    """Returns [leaves, 2, 4] int64: ``SIZES`` from which those of a tree's pieces follow (tree_splits.py).

    For each leaf in DFS order, entry 0 holds the sizes of the tokens that its path does not share with the
    paths of earlier leaves. Entry 1 holds those of the tokens that it shares: a piece that starts with this
    leaf computes them again. The tokens and pairs of a piece are the sums of these entries. Its edges and
    chunks are at most the sums.
    """
    nodes = _node_sizes(tree)
    down_to = np.zeros((len(nodes) + 1, len(SIZES)), np.int64)  # from the root; the last row is for no node
    for node, parent in enumerate(tree.node_parent.tolist()):
        down_to[node] = down_to[parent] + nodes[node]
    starts = np.append(0, tree.leaves[:-1] + 1)  # the first node that each leaf adds
    return np.stack([np.add.reduceat(nodes, starts), down_to[tree.node_parent[starts]]], axis=1)


def _node_sizes(tree: TokenTree) -> np.ndarray:
    """Returns [K, 4] int64: the ``SIZES`` of each node."""
    is_scored = np.concatenate([path.loss_mask for path in tree.paths]) > 0
    is_scored[tree.path_offsets[:-1]] = False  # no edge predicts the first token of a path
    is_label = np.zeros(len(tree), bool)
    is_label[tree.path_index[is_scored]] = True
    starts, tokens = tree.node_offsets[:-1], tree.node_length
    pairs = np.add.reduceat(tree.positions, starts, dtype=np.int64) + tokens
    edges = np.add.reduceat(is_label, starts, dtype=np.int64)
    chunks = -(-tokens // CHUNK)  # a node without siblings may share a chunk with its parent
    return np.stack([tokens, pairs, edges, chunks], axis=1).astype(np.int64)


class CostFit:
    """Fits TreeCosts to measured seconds by least squares.

    All sums are made element by element, so that every rank gets the same bits. Only ``solve`` may round
    differently on another CPU.

    Args:
        start: the coefficients without measurements. A coefficient of 0 stays 0.
    """

    def __init__(self, start: TreeCosts) -> None:
        self.start = start
        self._products = np.zeros((len(start), len(start)))  # sums of size_i size_j, in units of ``start``
        self._moments = np.zeros(len(start))  # sums of size_i seconds, in units of ``start``

    def add(self, sizes: np.ndarray, seconds: float) -> None:
        """Adds a measurement: the sizes of a pass [4], the number of its forward passes, and its seconds."""
        shares = np.array(self.start) * sizes.astype(np.float64)
        self._products += shares[:, None] * shares
        self._moments += shares * seconds

    def solve(self) -> TreeCosts:
        """Returns the fitted coefficients, or ``start`` without measurements."""
        products, moments = self._products, self._moments
        total = products.sum()
        if total <= 0 or moments.sum() <= 0:
            return self.start
        scale = moments.sum() / total  # of all coefficients together
        prior = PRIOR * np.trace(products) * np.eye(len(self.start))
        factors = scale + np.linalg.solve(products + prior, moments - products.sum(1) * scale)
        factors = factors.clip(scale / LARGEST_CHANGE, scale * LARGEST_CHANGE)
        return TreeCosts(*(np.array(self.start) * factors).tolist())

    def state_dict(self) -> dict[str, Any]:
        """Returns the sums as JSON values, which keep every bit."""
        return {"products": self._products.tolist(), "moments": self._moments.tolist()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raises UserError unless ``state`` is one that ``state_dict`` has returned."""
        self._products = finite_array("products", state.get("products"), self._products.shape)
        self._moments = finite_array("moments", state.get("moments"), self._moments.shape)


def finite_array(name: str, values: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Returns ``values`` of a checkpoint as float64. Raises UserError for another shape or a bad number."""
    try:
        array = np.array(values, np.float64)
    except (TypeError, ValueError, OverflowError):
        array = np.empty(0)
    if array.shape != shape or not np.isfinite(array).all():
        raise UserError(
            f"checkpoint: balance.{name}: expected finite numbers of shape {shape}, got {shorten(values)}; "
            "resume from another checkpoint"
        )
    return array
