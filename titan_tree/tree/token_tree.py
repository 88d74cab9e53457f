"""TokenTree: the trie of a set of paths, every distinct token once, in DFS order.

Vocabulary (docs/design.md): a *node* is a maximal run of tokens shared by the same set of paths; tokens
are stored in DFS order, the heaviest child (most tokens below) first, so a token's subtree is one
contiguous range and the heavy path of a tree is contiguous too.

Built without per-token Python: paths are sorted as byte strings, so what a path shares with all earlier
ones is what it shares with its left neighbour (as in a suffix array's LCP table); everything else is
NumPy over tokens and one loop over nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from titan_tree.errors import UserError
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.replay import Records, Replay, merged_records, split_keys


@dataclass(frozen=True, slots=True)
class TreeStats:
    """Sizes of one tree, or of many (``TreeStats.total``). Tokens unless said otherwise."""

    n_tree: int  # distinct tokens
    n_flat: int  # summed path lengths
    n_nodes: int
    n_paths: int
    n_branches: int  # nodes with two children or more
    n_branch_children: int  # children of those
    max_depth: int  # nodes on the deepest path
    longest_path: int
    # Rows of routed experts (data/replay.py) that some path recorded, and those on which paths disagree.
    n_rows: int = 0
    n_disagreeing: int = 0

    @property
    def por(self) -> float:
        """Prefix overlap ratio 1 - N_tree / N_flat: the share of tokens that need not be computed."""
        return 1.0 - self.n_tree / self.n_flat if self.n_flat else 0.0

    @property
    def branching(self) -> float:
        """Mean number of children of a branching node (0 where nothing branches)."""
        return self.n_branch_children / self.n_branches if self.n_branches else 0.0

    @staticmethod
    def total(stats: Sequence[TreeStats]) -> TreeStats:
        """Statistics of all trees together: sums, and maxima of the two maxima."""

        def total(name: str) -> int:
            return sum(getattr(s, name) for s in stats)

        return TreeStats(
            n_tree=total("n_tree"),
            n_flat=total("n_flat"),
            n_nodes=total("n_nodes"),
            n_paths=total("n_paths"),
            n_branches=total("n_branches"),
            n_branch_children=total("n_branch_children"),
            max_depth=max((s.max_depth for s in stats), default=0),
            longest_path=max((s.longest_path for s in stats), default=0),
            n_rows=total("n_rows"),
            n_disagreeing=total("n_disagreeing"),
        )


@dataclass(frozen=True, eq=False)
class TokenTree:
    """The trie of ``paths``. K nodes, N tokens, P paths; all indices are DFS positions.

    Paths without a common first token make several roots (``node_parent`` -1): a forest is a tree too.
    """

    tokens: np.ndarray  # [N] int32
    node_offsets: np.ndarray  # [K + 1] int32: node k holds tokens[node_offsets[k]:node_offsets[k + 1]]
    node_parent: np.ndarray  # [K] int32, -1 at a root; parents come first
    node_depth: np.ndarray  # [K] int32: path position of the node's first token
    node_subtree_end: np.ndarray  # [K] int32: exclusive end of the node's subtree
    node_paths: np.ndarray  # [K] int32: number of paths through the node
    paths: tuple[TokenPath, ...]  # in the order given
    path_node: np.ndarray  # [P] int32: the node at whose end the path ends
    path_offsets: np.ndarray  # [P + 1] int64
    path_index: np.ndarray  # [N_flat] int32: DFS indices of path p in path_offsets[p]:path_offsets[p + 1]
    records: Records | None = None  # of routed experts, to be forced_experts

    @staticmethod
    def from_paths(paths: Sequence[TokenPath], replay: Replay = "off") -> TokenTree:
        """Merge ``paths`` by equal token prefixes. Duplicates, and paths inside paths, stay paths.

        replay: whether tokens have the routed experts that paths recorded, and which where these differ.
        Raises UserError where there are no paths, where they hold 2**31 tokens or more in all, where they
        have records of different models, or for an unknown ``replay``.
        """
        if not paths:
            raise UserError("TokenTree.from_paths: expected at least one path, got none")
        lengths = np.array([len(p) for p in paths], np.int64)
        if int(lengths.sum()) >= 2**31:
            raise UserError(
                f"TokenTree.from_paths: expected fewer than 2**31 tokens in all, got {lengths.sum():,}; "
                "split the group into several"
            )
        lex_index, parent = _lexicographic_trie([p.tokens for p in paths])
        records = merged_records(paths, lex_index, len(parent), replay)
        if records is not None and replay == "split":
            lex_index, parent = _lexicographic_trie(split_keys(paths))
            own = merged_records(paths, lex_index, len(parent), replay)
            assert own is not None
            assert not own.num_disagreeing
            records = records._replace(experts=own.experts)
        path_offsets = np.concatenate([[0], np.cumsum(lengths)])
        flat = np.concatenate(lex_index)

        # A node starts where the set of paths changes. A child's set lies inside its parent's, so the
        # sets are equal where their sizes are.
        n_through = np.bincount(flat, minlength=len(parent)).astype(np.int32)
        starts = (parent < 0) | (n_through != n_through[parent])
        node_of = np.cumsum(starts) - 1
        first = np.flatnonzero(starts)
        length = np.diff(first, append=len(parent))
        node_parent = np.where(parent[first] < 0, -1, node_of[parent[first]])

        start, depth, size = _heavy_first(node_parent, length)
        to_dfs = (start[node_of] + np.arange(len(parent)) - first[node_of]).astype(np.int32)
        tokens = np.empty(len(parent), np.int32)
        tokens[to_dfs[flat]] = np.concatenate([p.tokens for p in paths])

        if records is not None:
            records = records._replace(experts=records.experts[np.argsort(to_dfs)])
        order = np.argsort(start)  # nodes, lexicographic -> DFS
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        return TokenTree(
            tokens=tokens,
            node_offsets=np.append(start[order], len(parent)).astype(np.int32),
            node_parent=np.where(node_parent < 0, -1, rank[node_parent])[order].astype(np.int32),
            node_depth=depth[order].astype(np.int32),
            node_subtree_end=(start + size)[order].astype(np.int32),
            node_paths=n_through[first][order],
            paths=tuple(paths),
            path_node=rank[node_of[flat[path_offsets[1:] - 1]]].astype(np.int32),
            path_offsets=path_offsets,
            path_index=to_dfs[flat],
            records=records,
        )

    @staticmethod
    def forest(trees: Sequence[TokenTree]) -> TokenTree:
        """The trees side by side, in the order given. What they have in common is not merged.

        Raises UserError where there are no trees.
        """
        if not trees:
            raise UserError("TokenTree.forest: expected at least one tree, got none")
        if len(trees) == 1:
            return trees[0]

        def join(arrays: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray:
            """Arrays of indices, shifted by the sizes of the trees before; -1 stays."""
            shifts = np.cumsum([0, *sizes[:-1]])
            shifted = [np.where(x < 0, -1, x + shift) for x, shift in zip(arrays, shifts, strict=True)]
            return np.concatenate(shifted).astype(arrays[0].dtype)

        tokens, nodes = [len(t) for t in trees], [len(t.node_parent) for t in trees]
        return TokenTree(
            tokens=np.concatenate([t.tokens for t in trees]),
            node_offsets=np.append(join([t.node_offsets[:-1] for t in trees], tokens), np.int32(sum(tokens))),
            node_parent=join([t.node_parent for t in trees], nodes),
            node_depth=np.concatenate([t.node_depth for t in trees]),
            node_subtree_end=join([t.node_subtree_end for t in trees], tokens),
            node_paths=np.concatenate([t.node_paths for t in trees]),
            paths=tuple(path for t in trees for path in t.paths),
            path_node=join([t.path_node for t in trees], nodes),
            path_offsets=np.append(
                join([t.path_offsets[:-1] for t in trees], [len(t.path_index) for t in trees]),
                sum(len(t.path_index) for t in trees),
            ),
            path_index=join([t.path_index for t in trees], tokens),
            records=_side_by_side(trees),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def indices_of(self, path: int) -> np.ndarray:
        """DFS indices of the tokens of one path, root first."""
        return self.path_index[self.path_offsets[path] : self.path_offsets[path + 1]]

    @cached_property
    def node_length(self) -> np.ndarray:
        """[K] int32 tokens of each node."""
        return np.diff(self.node_offsets)

    @cached_property
    def positions(self) -> np.ndarray:
        """[N] int32: depth of each token in its path, the RoPE position."""
        offset = self.node_depth - self.node_offsets[:-1]
        return np.repeat(offset, self.node_length) + np.arange(len(self), dtype=np.int32)

    @cached_property
    def subtree_end(self) -> np.ndarray:
        """[N] int32: key k is seen by query q iff k <= q < subtree_end[k]."""
        return np.repeat(self.node_subtree_end, self.node_length)

    @cached_property
    def predecessor(self) -> np.ndarray:
        """[N] int32: the token before each token on its path, -1 at a root's first token."""
        previous = np.arange(-1, len(self) - 1, dtype=np.int32)
        previous[self.node_offsets[:-1]] = np.where(
            self.node_parent < 0, -1, self.node_offsets[self.node_parent + 1] - 1
        )
        return previous

    @cached_property
    def stats(self) -> TreeStats:
        children = np.bincount(self.node_parent[self.node_parent >= 0], minlength=1)
        level = [0] * len(self.node_parent)
        for node, parent in enumerate(self.node_parent.tolist()):
            level[node] = level[parent] + 1 if parent >= 0 else 1
        return TreeStats(
            n_tree=len(self),
            n_flat=len(self.path_index),
            n_nodes=len(self.node_parent),
            n_paths=len(self.paths),
            n_branches=int((children > 1).sum()),
            n_branch_children=int(children[children > 1].sum()),
            max_depth=max(level),
            longest_path=int(np.diff(self.path_offsets).max()),
            n_rows=self.records.num_rows if self.records else 0,
            n_disagreeing=self.records.num_disagreeing if self.records else 0,
        )


def _side_by_side(trees: Sequence[TokenTree]) -> Records | None:
    """The records of a forest; UserError where they are of different models."""
    shapes = {tree.records.experts.shape[1:] for tree in trees if tree.records}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise UserError(
            "TokenTree.forest: expected routed experts of one model, got (layers, experts of a token) "
            + " and ".join(map(str, sorted(shapes)))
        )
    (shape,) = shapes
    experts = [t.records.experts if t.records else np.full((len(t), *shape), -1, np.int16) for t in trees]
    counts = [(tree.records.num_rows, tree.records.num_disagreeing) for tree in trees if tree.records]
    return Records(np.concatenate(experts), *map(sum, zip(*counts, strict=True)))


def _lexicographic_trie(paths: Sequence[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Trie token of every path token, and each trie token's predecessor (-1: none).

    paths: of each its tokens, or whatever integers are to be merged by. Trie tokens are numbered in
        lexicographic pre-order.
    """
    index: list[np.ndarray] = [np.empty(0, np.int32)] * len(paths)
    predecessors: list[np.ndarray] = []
    n = 0
    tokens, trie = np.empty(0, np.int32), np.empty(0, np.int32)
    for p in lexicographic_order(paths):
        shared = common_prefix(tokens, paths[p])
        tokens = paths[p]
        new = np.arange(n, n + len(tokens) - shared, dtype=np.int32)
        if len(new):
            predecessors.append(new - 1)
            predecessors[-1][0] = trie[shared - 1] if shared else -1
        index[p] = trie = np.concatenate([trie[:shared], new])
        n += len(new)
    return index, np.concatenate(predecessors)


def lexicographic_order(paths: Sequence[np.ndarray]) -> list[int]:
    """Indices of ``paths``, sorted by their integers; a prefix comes first, equal paths keep their order."""
    # Big-endian, so that comparing bytes compares integers.
    return sorted(
        range(len(paths)), key=lambda p: paths[p].astype(paths[p].dtype.newbyteorder(">")).tobytes()
    )


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Number of leading tokens that ``a`` and ``b`` share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _heavy_first(parent: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """DFS start, path depth and subtree size (tokens) of each node, heaviest child first.

    Nodes come in pre-order; equally heavy siblings keep their order.
    """
    size = length.tolist()
    parents = parent.tolist()
    for node in range(len(size) - 1, -1, -1):
        if parents[node] >= 0:
            size[parents[node]] += size[node]
    sizes = np.array(size, np.int64)
    by_parent = np.lexsort((-sizes, parent))
    before = np.cumsum(sizes[by_parent]) - sizes[by_parent]  # tokens left of a node, all families in a row
    family = np.diff(parent[by_parent], prepend=-2) != 0
    before -= before[family][np.cumsum(family) - 1]
    offset = np.empty_like(before)
    offset[by_parent] = before

    start, depth = offset.tolist(), [0] * len(size)
    lengths = length.tolist()
    for node, above in enumerate(parents):
        if above >= 0:
            start[node] += start[above] + lengths[above]
            depth[node] = depth[above] + lengths[above]
    return np.array(start, np.int64), np.array(depth, np.int64), sizes
