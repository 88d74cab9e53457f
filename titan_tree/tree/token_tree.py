"""TokenTree: the trie of a set of paths. It stores every distinct token once, in depth-first (DFS) order.

A *node* is a maximal run of tokens shared by the same set of paths. The child with the most tokens in its
subtree (the heaviest) comes first. Each subtree is a contiguous range of tokens. So is the heavy path, which
goes from the root to the heaviest child, from there to its heaviest child, and so on.

Building a tree runs no Python code per token: ``lexicographic_trie`` merges the paths, and the rest is NumPy
over tokens and a few loops over nodes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from titan_tree.errors import UserError, require_list
from titan_tree.tree.images import Image, distinct_images, first_rows, mrope_positions, renumbered_rows
from titan_tree.tree.path_fields import TokenTargets
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.routed_experts import Replay, RoutedExperts, merged_experts, split_keys

# Largest difference in nats between two log-probs of one teacher for the same token. Servers round batches of
# different sizes differently, and a logit of 32 in bf16 is rounded to a multiple of 0.25.
TOLERANCE = 0.5


def reuse_ratio(n_rows: int, n_run: int) -> float:
    """Returns the share of ``n_rows`` tokens that is saved if only ``n_run`` tokens run. 0 without tokens."""
    return 1.0 - n_run / n_rows if n_rows else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeStats:
    """Sizes of one tree, or of several trees together (``TreeStats.total``)."""

    n_tree: int  # distinct tokens
    n_leaf: int  # sum of the lengths of one path per leaf, in tokens
    n_flat: int  # sum of the lengths of all paths, also of those that are prefixes of others
    n_nodes: int
    n_paths: int
    n_leaves: int  # nodes without children, so paths that are no prefix of another one; duplicates count once
    n_branches: int  # nodes with at least two children
    n_branch_children: int  # children of these nodes
    max_depth: int  # nodes on the deepest path
    longest_path: int  # in tokens
    n_rows: int = 0  # token-layers, not tokens, with recorded experts (tree/routed_experts.py)
    n_disagreeing: int = 0  # recorded token-layers on which paths disagree

    @property
    def por(self) -> float:
        """Potential overlap ratio: the share that a tree saves of the tokens of one path per leaf.

        This is the ratio of Tree Training (arXiv:2511.00413). A trainer without trees runs ``n_leaf`` tokens
        if it trains a path together with its prefixes, as one row with the loss masks of all of them.
        """
        return reuse_ratio(self.n_leaf, self.n_tree)

    @property
    def por_samples(self) -> float:
        """The share that a tree saves of the tokens of all paths, each trained as a row of its own."""
        return reuse_ratio(self.n_flat, self.n_tree)

    @property
    def bound(self) -> float:
        """N_leaf / N_tree: the largest speed-up over one row per leaf path, if time follows tokens."""
        return self.n_leaf / self.n_tree

    @property
    def branching(self) -> float:
        """Mean number of children of a branching node; 0 if no node branches."""
        return self.n_branch_children / self.n_branches if self.n_branches else 0.0

    @staticmethod
    def total(stats: Sequence[TreeStats]) -> TreeStats:
        """Returns statistics over all trees: maxima of ``max_depth`` and ``longest_path``, else sums."""

        def total(name: str) -> int:
            return sum(getattr(s, name) for s in stats)

        return TreeStats(
            n_tree=total("n_tree"),
            n_leaf=total("n_leaf"),
            n_flat=total("n_flat"),
            n_nodes=total("n_nodes"),
            n_paths=total("n_paths"),
            n_leaves=total("n_leaves"),
            n_branches=total("n_branches"),
            n_branch_children=total("n_branch_children"),
            max_depth=max((s.max_depth for s in stats), default=0),
            longest_path=max((s.longest_path for s in stats), default=0),
            n_rows=total("n_rows"),
            n_disagreeing=total("n_disagreeing"),
        )


@dataclass(frozen=True, eq=False, kw_only=True)
class TokenTree:
    """The trie of P ``paths``: N distinct tokens in K nodes. Tokens and nodes are numbered in DFS order.

    Paths that differ in their first token make several roots, so a forest is a TokenTree, too. The paths
    a = 1 2 3 4, b = 1 2 3 5 6 and c = 1 2 7 make five nodes:

        node 0: [1 2] -+- node 1: [3] -+- node 2: [5 6]   b ends here
                       |               +- node 3: [4]     a ends here
                       +- node 4: [7]                     c ends here

    >>> paths = [TokenPath([1, 2, 3, 4]), TokenPath([1, 2, 3, 5, 6]), TokenPath([1, 2, 7])]
    >>> tree = TokenTree.from_paths(paths)
    >>> def show(*names):
    ...     for name in names:
    ...         print(f"{name:16}", *getattr(tree, name))
    >>> show("node_offsets", "node_parent", "node_depth", "node_subtree_end", "node_paths", "path_node")
    node_offsets     0 2 3 5 6 7
    node_parent      -1 0 1 1 0
    node_depth       0 2 3 3 2
    node_subtree_end 7 6 5 6 7
    node_paths       3 2 1 1 1
    path_node        3 2 4
    >>> show("tokens", "positions", "predecessor", "subtree_end")
    tokens           1 2 3 5 6 4 7
    positions        0 1 2 3 4 3 2
    predecessor      -1 0 1 2 3 2 1
    subtree_end      7 7 6 5 5 6 7
    >>> print(*tree.indices_of(0))  # the tokens 1 2 3 4 of path a
    0 1 2 5
    """

    tokens: np.ndarray  # [N] int32
    node_offsets: np.ndarray  # [K + 1] int32: node k holds tokens[node_offsets[k]:node_offsets[k + 1]]
    node_parent: np.ndarray  # [K] int32, -1 for a root. Parents come before their children.
    node_depth: np.ndarray  # [K] int32: position of the node's first token on its paths
    node_subtree_end: np.ndarray  # [K] int32: exclusive end of the node's subtree, in tokens
    node_paths: np.ndarray  # [K] int32: paths through the node; 0 in pieces of a tree that only repeat it
    paths: tuple[TokenPath, ...]  # in the order given
    path_node: np.ndarray  # [P] int32: the node whose last token is the last token of the path
    path_offsets: np.ndarray  # [P + 1] int64
    path_index: np.ndarray  # [N_flat] int32: path p is path_index[path_offsets[p]:path_offsets[p + 1]]
    routed_experts: RoutedExperts | None = None  # recorded experts, which the tokens must use
    images: tuple[Image, ...] = ()  # the distinct images of the paths, see tree/images.py
    image_row: np.ndarray | None = None  # [N] int32: row among those of ``images``; -1: text. None: no images
    is_counted: bool = True  # False for all but the first piece of a split tree, which counts once

    @staticmethod
    def from_paths(paths: Sequence[TokenPath], replay: Replay = "off") -> TokenTree:
        """Merges ``paths`` by equal token prefixes. Image tokens are equal if their pixels are, too.

        Equal paths, and paths that are prefixes of others, all remain in ``TokenTree.paths``.

        Args:
            replay: what the tree does with the experts that paths recorded, see tree/routed_experts.py.

        Raises:
            UserError: ``paths`` is not a list of paths or is empty, the paths hold 2**31 tokens or more in
                total, models of different sizes recorded their experts, ``replay`` is unknown, or a teacher
                contradicts itself, see ``_check_targets``.
        """
        require_list(
            paths, TokenPath, "TokenTree.from_paths", "pass [TokenPath(tokens)], or tree.paths of a tree"
        )
        if not paths:
            raise UserError("TokenTree.from_paths: expected at least one path, got none")
        lengths = np.array([len(p) for p in paths], np.int64)
        if int(lengths.sum()) >= 2**31:
            raise UserError(
                f"TokenTree.from_paths: expected fewer than 2**31 tokens in total, got {lengths.sum():,}; "
                "split the group into several groups"
            )
        path_offsets = np.concatenate([[0], np.cumsum(lengths)])

        # 1. Merge the paths. "lex" indices number the trie's tokens in lexicographic order.
        keys, images = merge_keys(paths)
        lex_index, lex_parent, records = _merge(paths, keys, replay)
        flat = np.concatenate(lex_index)

        # 2. Group the tokens into nodes. A node starts where the set of paths changes. A child's set is a
        # subset of its parent's, so the sets are equal if their sizes are.
        num_paths = np.bincount(flat, minlength=len(lex_parent)).astype(np.int32)
        starts = (lex_parent < 0) | (num_paths != num_paths[lex_parent])
        node_of = np.cumsum(starts) - 1
        first = np.flatnonzero(starts)
        length = np.diff(first, append=len(lex_parent))
        parent = np.where(lex_parent[first] < 0, -1, node_of[lex_parent[first]])

        # 3. Renumber nodes and tokens: the heaviest child comes first.
        start, depth, size = _heavy_first(parent, length)
        order = np.argsort(start)  # nodes in DFS order
        rank = np.empty_like(order)
        rank[order] = np.arange(len(order))
        to_dfs = (start[node_of] + np.arange(len(lex_parent)) - first[node_of]).astype(np.int32)
        path_index = to_dfs[flat]
        _check_targets(paths, path_index)
        tokens = np.empty(len(lex_parent), np.int32)
        tokens[path_index] = np.concatenate([p.tokens for p in paths])
        if records is not None:
            records = records._replace(experts=records.experts[np.argsort(to_dfs)])
        image_row = None
        if images:
            image_row = np.empty(len(tokens), np.int32)
            image_row[path_index] = np.maximum(-1 - np.concatenate(keys), -1)
        return TokenTree(
            tokens=tokens,
            node_offsets=np.append(start[order], len(tokens)).astype(np.int32),
            node_parent=np.where(parent < 0, -1, rank[parent])[order].astype(np.int32),
            node_depth=depth[order].astype(np.int32),
            node_subtree_end=(start + size)[order].astype(np.int32),
            node_paths=num_paths[first][order],
            paths=tuple(paths),
            path_node=rank[node_of[flat[path_offsets[1:] - 1]]].astype(np.int32),
            path_offsets=path_offsets,
            path_index=path_index,
            routed_experts=records,
            images=images,
            image_row=image_row,
        )

    @staticmethod
    def forest(trees: Sequence[TokenTree]) -> TokenTree:
        """Puts trees side by side, in the order given. Prefixes that different trees share are not merged.

        Images that different trees share are.

        Raises:
            UserError: ``trees`` is not a list of trees or is empty, or models of different sizes recorded
                their experts.
        """
        require_list(trees, TokenTree, "TokenTree.forest", "pass [tree]")
        if not trees:
            raise UserError("TokenTree.forest: expected at least one tree, got none")
        if len(trees) == 1:
            return trees[0]

        def join(arrays: Sequence[np.ndarray], sizes: Sequence[int]) -> np.ndarray:
            """Concatenates arrays of indices, shifted by the sizes of the preceding trees."""
            shifts = np.cumsum([0, *sizes[:-1]], dtype=arrays[0].dtype)
            return np.concatenate([x + shift for x, shift in zip(arrays, shifts, strict=True)])

        tokens, nodes = [len(t) for t in trees], [len(t.node_parent) for t in trees]
        is_root = np.concatenate([t.node_parent for t in trees]) < 0
        images, image_row = _forest_images(trees)
        return TokenTree(
            tokens=np.concatenate([t.tokens for t in trees]),
            node_offsets=np.append(join([t.node_offsets[:-1] for t in trees], tokens), np.int32(sum(tokens))),
            node_parent=np.where(is_root, np.int32(-1), join([t.node_parent for t in trees], nodes)),
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
            routed_experts=_forest_experts(trees),
            images=images,
            image_row=image_row,
        )

    @property
    def counted_tokens(self) -> int:
        """The number of tokens that no earlier piece of the same tree counts; all if the tree is whole."""
        return int(self.node_length[self.node_paths > 0].sum())

    def __len__(self) -> int:
        return len(self.tokens)

    def indices_of(self, path: int) -> np.ndarray:
        """Returns the indices of the tokens of path number ``path``, from root to leaf."""
        return self.path_index[self.path_offsets[path] : self.path_offsets[path + 1]]

    def weigh_edges(self) -> None:
        """Sets ``edge_weight`` and ``is_first`` of all paths, for reductions that count an edge once.

        Both depend on all paths of the tree. Call it before the paths are divided among rows or ranks, and
        again after a weight or a loss mask has changed.

        Raises:
            UserError: the tree contains a path object twice, so that it cannot be the first of both.
        """
        if len(set(map(id, self.paths))) < len(self.paths):
            raise UserError("TokenTree.weigh_edges: a path object is in the tree twice; copy the path")
        weight = np.concatenate([path.weight * path.loss_mask.astype(np.float64) for path in self.paths])
        weight[self.path_offsets[:-1]] = 0  # no edge predicts the first token of a path
        total = np.bincount(self.path_index, weight, minlength=len(self))[self.path_index]
        first = np.full(len(self), -1)  # the first entry of ``path_index`` that counts each token
        (counted,) = weight.nonzero()
        first[self.path_index[counted[::-1]]] = counted[::-1]  # the last assignment wins
        is_first = first[self.path_index] == np.arange(len(weight))
        ends = self.path_offsets[1:-1]
        of_paths = zip(np.split(total.astype(np.float32), ends), np.split(is_first, ends), strict=True)
        for path, (edge_weight, of_path) in zip(self.paths, of_paths, strict=True):
            path.edge_weight, path.is_first = edge_weight, of_path

    @cached_property
    def node_length(self) -> np.ndarray:
        """[K] int32: number of tokens of each node."""
        return np.diff(self.node_offsets)

    @cached_property
    def leaves(self) -> np.ndarray:
        """[leaves] int64: the nodes without children, in DFS order."""
        is_leaf = np.ones(len(self.node_parent), bool)
        is_leaf[self.node_parent[self.node_parent >= 0]] = False
        return np.flatnonzero(is_leaf)

    @property
    def leaf_of_path(self) -> np.ndarray:
        """[P] int64: which of ``leaves`` is the first at or below the end of each path."""
        return np.searchsorted(self.leaves, self.path_node)

    @property
    def leaf_tokens(self) -> int:
        """Sum of the lengths of one path per leaf: N_leaf. The pieces of a tree add up to the tree's."""
        return int((self.node_depth + self.node_length)[self.leaves].sum(dtype=np.int64))

    @cached_property
    def positions(self) -> np.ndarray:
        """[N] int32: position of each token on its paths, which is the number of tokens before it."""
        offset = self.node_depth - self.node_offsets[:-1]
        return np.repeat(offset, self.node_length) + np.arange(len(self), dtype=np.int32)

    @cached_property
    def rope_positions(self) -> np.ndarray:
        """int32: what rotary embeddings (RoPE) read: ``positions`` [N], or with images [3, N].

        See ``mrope_positions``.
        """
        if self.image_row is None:
            return self.positions
        return mrope_positions(self.image_row, self.images, self.node_offsets, self.node_parent)

    @cached_property
    def subtree_end(self) -> np.ndarray:
        """[N] int32: exclusive end of each subtree. Token q sees token k iff k <= q < subtree_end[k]."""
        return np.repeat(self.node_subtree_end, self.node_length)

    @cached_property
    def predecessor(self) -> np.ndarray:
        """[N] int32: the preceding token on the path, -1 for the first token of a root."""
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
            n_leaf=self.leaf_tokens,
            n_flat=len(self.path_index),
            n_nodes=len(self.node_parent),
            n_paths=len(self.paths),
            n_leaves=len(self.leaves),
            n_branches=int((children > 1).sum()),
            n_branch_children=int(children[children > 1].sum()),
            max_depth=max(level),
            longest_path=int(np.diff(self.path_offsets).max()),
            n_rows=self.routed_experts.num_token_layers if self.routed_experts else 0,
            n_disagreeing=self.routed_experts.num_disagreeing if self.routed_experts else 0,
        )


def _forest_experts(trees: Sequence[TokenTree]) -> RoutedExperts | None:
    """Concatenates the trees' records. Raises UserError if models of different sizes recorded them."""
    shapes = {tree.routed_experts.experts.shape[1:] for tree in trees if tree.routed_experts}
    if not shapes:
        return None
    if len(shapes) > 1:
        raise UserError(
            "TokenTree.forest: expected routed experts of one model, got (layers, experts per token) = "
            + " and ".join(map(str, sorted(shapes)))
        )
    (shape,) = shapes
    experts = [
        tree.routed_experts.experts if tree.routed_experts else np.full((len(tree), *shape), -1, np.int16)
        for tree in trees
    ]
    recorded = [tree.routed_experts for tree in trees if tree.routed_experts]
    return RoutedExperts(
        experts=np.concatenate(experts),
        num_token_layers=sum(part.num_token_layers for part in recorded),
        num_disagreeing=sum(part.num_disagreeing for part in recorded),
    )


def _forest_images(trees: Sequence[TokenTree]) -> tuple[tuple[Image, ...], np.ndarray | None]:
    """Returns the distinct images of all trees, and the image row of every token."""
    images = distinct_images(image for tree in trees for image in tree.images)
    if not images:
        return (), None
    rows = [
        np.full(len(tree), -1, np.int32)
        if tree.image_row is None
        else renumbered_rows(tree.image_row, tree.images, images)
        for tree in trees
    ]
    return images, np.concatenate(rows)


def _merge(
    paths: Sequence[TokenPath], keys: Sequence[np.ndarray], replay: Replay
) -> tuple[list[np.ndarray], np.ndarray, RoutedExperts | None]:
    """Returns the trie (see ``lexicographic_trie``) of the ``keys``, and the records of its tokens."""
    index, parent = lexicographic_trie(keys)
    records = merged_experts(paths, index, len(parent), replay)
    if records is None or replay != "split":
        return index, parent, records
    # Merge again, by tokens and records. The counts remain those of the trie merged by tokens alone.
    index, parent = lexicographic_trie(split_keys(paths, keys))
    split = merged_experts(paths, index, len(parent), replay)
    assert split is not None
    assert not split.num_disagreeing
    return index, parent, records._replace(experts=split.experts)


def _heavy_first(parent: np.ndarray, length: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns each node's first token in DFS order, its depth on the path and its subtree size, in tokens.

    The heaviest child comes first; siblings of equal weight keep their order.

    Args:
        parent: [K] parent of each node, which must precede it; -1 for roots.
        length: [K] tokens of each node.
    """
    size = length.tolist()
    parents = parent.tolist()
    for node in range(len(size) - 1, -1, -1):
        if parents[node] >= 0:
            size[parents[node]] += size[node]
    sizes = np.array(size, np.int64)
    by_parent = np.lexsort((-sizes, parent))
    before = np.cumsum(sizes[by_parent]) - sizes[by_parent]
    is_first_child = np.diff(parent[by_parent], prepend=-2) != 0
    before -= before[is_first_child][np.cumsum(is_first_child) - 1]  # tokens of heavier siblings
    offset = np.empty_like(before)
    offset[by_parent] = before

    start, depth = offset.tolist(), [0] * len(size)
    lengths = length.tolist()
    for node, above in enumerate(parents):
        if above >= 0:
            start[node] += start[above] + lengths[above]
            depth[node] = depth[above] + lengths[above]
    return np.array(start, np.int64), np.array(depth, np.int64), sizes


def merge_keys(paths: Sequence[TokenPath]) -> tuple[list[np.ndarray], tuple[Image, ...]]:
    """Returns the keys by which paths are merged, [T] int32 per path, and the paths' distinct images.

    The key of text is its token id, and that of an image token is -1 - its image row.
    """
    images = distinct_images(image for path in paths for _, image in path.images)
    first = first_rows(images)
    keys = []
    for path in paths:
        key = path.tokens.copy() if path.images else path.tokens
        for start, image in path.images:
            key[start : start + len(image)] = -1 - first[image.key] - np.arange(len(image))
        keys.append(key)
    return keys, images


def lexicographic_trie(paths: Sequence[np.ndarray]) -> tuple[list[np.ndarray], np.ndarray]:
    """Builds the trie of integer sequences. Trie tokens are numbered in lexicographic pre-order.

    Sequences are sorted as byte strings. After sorting, a sequence shares its longest prefix with the one
    right before it, so one comparison is enough, as in the longest-common-prefix table of a suffix array.

    Args:
        paths: the integers to merge by, one array per path: tokens, or keys that represent tokens.

    Returns:
        For each path the numbers of its trie tokens; and for each trie token its parent, -1 for roots.
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
    """Returns the indices that sort ``paths``. A prefix comes first; equal paths keep their order."""
    # In big-endian order, comparing bytes compares integers; negative ones, of images, come last.
    return sorted(
        range(len(paths)), key=lambda p: paths[p].astype(paths[p].dtype.newbyteorder(">")).tobytes()
    )


def common_prefix(a: np.ndarray, b: np.ndarray) -> int:
    """Returns the number of leading tokens that ``a`` and ``b`` share."""
    n = min(len(a), len(b))
    differs = a[:n] != b[:n]
    first = int(differs.argmax()) if n else 0
    return first if n and differs[first] else n


def _check_targets(paths: Sequence[TokenPath], path_index: np.ndarray) -> None:
    """Checks that paths through an edge have the same targets there, if one teacher made them.

    Only ids that both paths have are compared: servers may disagree on which id is the last of the likeliest.

    Args:
        paths: the paths of a tree.
        path_index: [N_flat] the index of each of their tokens in the tree.

    Raises:
        UserError: two log-probs differ by more than ``TOLERANCE``. It names both paths and the token.
    """
    if all(path.teacher_topk is None for path in paths):
        return
    lengths = list(map(len, paths))
    targets = TokenTargets.concatenate([path.teacher_topk for path in paths], lengths)
    # Distributions at other temperatures differ, and over other sampling masks, which are not compared.
    groups: dict[tuple[object, ...], int] = {}
    group = [groups.setdefault((path.teacher, path.temperature), len(groups)) for path in paths]
    edge = path_index * np.int64(len(groups)) + np.repeat(group, lengths)
    has_targets = (targets.sizes > 0) & np.repeat([path.sampling_mask is None for path in paths], lengths)
    _, number, count = np.unique(edge[has_targets], return_inverse=True, return_counts=True)
    (shared,) = has_targets.nonzero()
    shared, number = shared[count[number] > 1], number[count[number] > 1]
    sizes, ids, logprobs = targets.of_tokens(shared)
    keys, token = np.repeat(number, sizes) << 32 | ids, np.repeat(shared, sizes)
    order = np.argsort(keys, kind="stable")
    keys, token, logprobs = keys[order], token[order], logprobs[order]
    gap = np.abs(np.diff(logprobs)) * (np.diff(keys) == 0)
    if (bad := gap > TOLERANCE).any():
        at = int(bad.argmax())
        offsets = np.cumsum([0, *lengths])
        first, second = (int(np.searchsorted(offsets, entry, "right")) - 1 for entry in token[at : at + 2])
        raise UserError(
            f"path {paths[second].id or '?'}: teacher_topk of token {token[at + 1] - offsets[second]}: "
            f"expected {logprobs[at]:.4g} for id {keys[at] & 0xFFFFFFFF}, as in path "
            f"{paths[first].id or '?'}, which has the same tokens up to there, got {logprobs[at + 1]:.4g}; "
            "score both with one teacher, or name their teachers in the field teacher"
        )
