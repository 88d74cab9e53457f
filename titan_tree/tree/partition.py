"""Partition and PartitionPlan: a token tree cut into parts, each run in one forward pass.

A partition runs its *own* tokens. Attention also needs their ancestors. Ancestors that are not own tokens are
the partition's *context*: other partitions ran them, and their keys and values come from the gateway cache
(tree/gateway.py). The parent partition always holds all of this context, among its own tokens or in its own
context. A partition and all partitions above it form its *chain*. Their activations exist at the same time.

An edge (token, next token) is scored in the partition that runs its first token, because this token's hidden
state predicts the next one. So no hidden state crosses from one partition to another.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from titan_tree.config.files import regular
from titan_tree.errors import UserError
from titan_tree.tree.token_tree import TokenTree, reuse_ratio

MAX_DRAWN = 40  # partitions in a drawing; a longer plan shows its first and last ones

# torch.compile specializes graphs on sizes 0 and 1. Tensors that vary with the partition, such as the gateway
# cache, the exports and the chains, are therefore padded to at least this many rows.
PAD = 2


@dataclass(frozen=True, eq=False, kw_only=True)
class Partition:
    """n own tokens among m keys, the columns of attention. Tokens are named by their index in the tree.

    ``scores`` is a mask, not log-probs: it tells which tokens this partition scores edges of.
    """

    parent: int  # number of the partition above, which holds all of the context; -1: there is no context
    keys: np.ndarray  # [m] int32: the token of each column, in DFS order
    subtree_end: np.ndarray  # [m] int32, exclusive, in columns: q sees key k iff k <= q < subtree_end[k]
    key_index: np.ndarray  # [n] int32, ascending: the columns of the own tokens
    scores: np.ndarray  # [n] bool: whether the edges from the own token to its children are scored here

    def __len__(self) -> int:
        return len(self.key_index)

    @cached_property
    def own_tokens(self) -> np.ndarray:
        """[n] int32: the tokens that this partition runs."""
        tokens: np.ndarray = self.keys[self.key_index]
        return tokens

    @cached_property
    def context_index(self) -> np.ndarray:
        """[m - n] int32: the columns of the context, ascending."""
        is_context = np.ones(len(self.keys), bool)
        is_context[self.key_index] = False
        return np.flatnonzero(is_context).astype(np.int32)

    @cached_property
    def context(self) -> np.ndarray:
        """[m - n] int32: the tokens of the context."""
        tokens: np.ndarray = self.keys[self.context_index]
        return tokens


@dataclass(frozen=True, kw_only=True)
class PlanStats:
    """Sizes of a plan, in tokens unless stated otherwise."""

    n_leaf: int  # sum of the lengths of one path per leaf
    n_flat: int  # sum of the lengths of all paths
    n_tree: int  # distinct tokens
    n_part: int  # executed tokens: n_tree if no token runs twice
    n_forwards: int  # number of partitions
    longest_path: int
    chain_peak: int  # own tokens of the largest chain
    n_context: int  # context tokens, summed over partitions

    @property
    def err(self) -> float:
        """Effective reuse ratio. The potential overlap ratio (POR) is its upper bound."""
        return reuse_ratio(self.n_leaf, self.n_part)

    @property
    def duplicates(self) -> float:
        """Repeated tokens as a fraction of the distinct ones: N_part / N_tree - 1."""
        return self.n_part / self.n_tree - 1.0


@dataclass(frozen=True, eq=False)
class PartitionPlan:
    """The partitions of a tree, in the order in which their forward passes run: DFS, parents first."""

    tree: TokenTree
    strategy: str
    partitions: tuple[Partition, ...]
    reason: str = ""  # why "auto" chose this strategy

    def __len__(self) -> int:
        return len(self.partitions)

    @cached_property
    def chain_tokens(self) -> np.ndarray:
        """[len(self)] int64: own tokens of each partition's chain."""
        chain = np.zeros(len(self), np.int64)
        for i, partition in enumerate(self.partitions):
            chain[i] = len(partition) + (chain[partition.parent] if partition.parent >= 0 else 0)
        return chain

    @cached_property
    def stats(self) -> PlanStats:
        tree = self.tree.stats
        return PlanStats(
            n_leaf=tree.n_leaf,
            n_flat=tree.n_flat,
            n_tree=tree.n_tree,
            n_part=sum(map(len, self.partitions)),
            n_forwards=len(self),
            longest_path=tree.longest_path,
            chain_peak=int(self.chain_tokens.max()),
            n_context=sum(len(p.keys) - len(p) for p in self.partitions),
        )

    def draw(self, width: int = 80) -> str:
        """Draws the plan as text: one line per partition, indented below its parent.

        A drawing omits the middle of a long plan. Indentation ends where a line would exceed ``width``.
        """
        stats = self.stats
        lines = [
            f"{self.strategy}: {stats.n_forwards:,} forward passes run {stats.n_part:,} tokens, "
            f"{stats.n_tree:,} of them distinct; chain peak {stats.chain_peak:,}"
        ]
        depth = np.zeros(len(self), np.int64)
        for i, partition in enumerate(self.partitions):
            depth[i] = depth[partition.parent] + 1 if partition.parent >= 0 else 0
        omitted = range(MAX_DRAWN // 2, len(self) - MAX_DRAWN // 2) if len(self) > MAX_DRAWN else range(0)
        for i, partition in enumerate(self.partitions):
            if i in omitted:
                if i == omitted[0]:
                    lines.append(f"... {len(omitted):,} partitions omitted ...")
                continue
            text = (
                f"{i}: {len(partition):,} own, {len(partition.keys) - len(partition):,} context, tokens "
                f"{partition.own_tokens.min():,} to {partition.own_tokens.max():,}, "
                f"chain {self.chain_tokens[i]:,}"
            )
            lines.append(" " * min(2 * int(depth[i]), max(0, width - len(text))) + text)
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Writes the plan to an .npz file, with a fingerprint of the tree instead of the tree itself."""
        parts = self.partitions
        with open(path, "wb") as file:
            np.savez_compressed(
                file,
                tree=_fingerprint(self.tree),
                strategy=self.strategy,
                reason=self.reason,
                parent=np.array([p.parent for p in parts]),
                num_keys=np.array([len(p.keys) for p in parts]),
                num_own=np.array([len(p) for p in parts]),
                **{name: np.concatenate([getattr(p, name) for p in parts]) for name in _PER_KEY + _PER_OWN},
            )

    @staticmethod
    def load(path: str | Path, tree: TokenTree) -> PartitionPlan:
        """Reads a plan that was saved for ``tree``.

        Raises:
            UserError: ``path`` does not hold a plan, or its plan is for a different tree.
        """
        try:
            with open(path, "rb", opener=regular) as file, np.load(file) as arrays:
                saved = dict(arrays)
            fingerprint, strategy, reason = (str(saved[name]) for name in ("tree", "strategy", "reason"))
            parents = saved["parent"].tolist()
            arrays = {
                name: np.split(saved[name], np.cumsum(saved[counts])[:-1])
                for names, counts in ((_PER_KEY, "num_keys"), (_PER_OWN, "num_own"))
                for name in names
            }
        except (OSError, EOFError, BadZipFile, KeyError, ValueError, TypeError) as error:
            raise UserError(f"{path}: expected a file written by PartitionPlan.save ({error})") from None
        if fingerprint != _fingerprint(tree):
            raise UserError(
                f"{path}: the plan is for a different tree than this one of {len(tree):,} tokens; "
                "plan this tree again"
            )
        partitions = tuple(
            Partition(parent=parent, **{name: array[i] for name, array in arrays.items()})
            for i, parent in enumerate(parents)
        )
        return PartitionPlan(tree, strategy, partitions, reason)


_PER_KEY = ("keys", "subtree_end")  # fields of a partition with an entry per key
_PER_OWN = ("key_index", "scores")  # and per own token


def _fingerprint(tree: TokenTree) -> str:
    sha = hashlib.sha256()
    for array in (tree.tokens, tree.node_offsets, tree.node_parent):
        sha.update(array.tobytes())
    return sha.hexdigest()


def in_tree_order(
    tree: TokenTree,
    parent: int,
    own_tokens: np.ndarray,
    context: np.ndarray,
    scores: np.ndarray | None = None,
) -> Partition:
    """Makes a partition whose own tokens are distinct and in the order of the tree.

    Args:
        parent: number of the partition above; -1: none.
        own_tokens: [n] tokens to run, in any order.
        context: all ancestors of own tokens that are not own.
        scores: [n] bool, for own tokens in ascending order: see ``Partition.scores``. None: all True.
    """
    own_tokens = np.sort(own_tokens).astype(np.int32)
    keys = np.sort(np.concatenate([own_tokens, context.astype(np.int32)]))
    return Partition(
        parent=parent,
        keys=keys,
        subtree_end=np.searchsorted(keys, tree.subtree_end[keys]).astype(np.int32),
        key_index=np.searchsorted(keys, own_tokens).astype(np.int32),
        scores=np.ones(len(own_tokens), bool) if scores is None else scores,
    )


def one_pass(tree: TokenTree) -> PartitionPlan:
    """Returns the plan that runs the whole tree in one forward pass."""
    tokens = np.arange(len(tree), dtype=np.int32)
    whole = Partition(
        parent=-1,
        keys=tokens,
        subtree_end=tree.subtree_end,
        key_index=tokens,
        scores=np.ones(len(tree), bool),
    )
    return PartitionPlan(tree, "none", (whole,))
