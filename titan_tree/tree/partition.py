"""Partition and PartitionPlan: a token tree cut into pieces, each run in one forward.

A partition's *keys* are the columns of its attention: its own tokens, which it runs, and its *context*, rows
of keys and values that ancestors left (the gateway). Context is read from the parent partition alone, which
has all of it as own tokens or as context of its own. An edge (token, next token) is scored where its first
token runs, since that token's hidden state predicts the next; so no hidden state crosses a cut.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from titan_tree.errors import UserError
from titan_tree.tree.token_tree import TokenTree

DRAWN = 40  # partitions of a picture; of a longer plan the first and the last ones

# torch.compile makes graphs of their own for sizes 0 and 1: context and exports have PAD rows at least.
PAD = 2


@dataclass(frozen=True, eq=False)
class Partition:
    """n own tokens among m keys, both in DFS order. Tokens are named by their index in the tree."""

    parent: int  # partition that has all of the context; -1: no context
    keys: np.ndarray  # [m] int32: token of each column
    subtree_end: np.ndarray  # [m] int32, exclusive, in columns: query column q sees key k iff k <= q < end[k]
    key_index: np.ndarray  # [n] int32, ascending: columns of own tokens
    scores: np.ndarray  # [n] bool: the edges from this own token to its children are scored here

    def __len__(self) -> int:
        return len(self.key_index)

    @cached_property
    def own(self) -> np.ndarray:
        """[n] tree tokens that are run."""
        return self.keys[self.key_index]

    @cached_property
    def context_index(self) -> np.ndarray:
        """[m - n] columns of context, ascending."""
        is_context = np.ones(len(self.keys), bool)
        is_context[self.key_index] = False
        return np.flatnonzero(is_context).astype(np.int32)

    @cached_property
    def context(self) -> np.ndarray:
        """[m - n] tree tokens of the context."""
        return self.keys[self.context_index]


@dataclass(frozen=True)
class PlanStats:
    """Sizes of a plan, in tokens unless said otherwise."""

    n_flat: int
    n_tree: int
    n_part: int  # executed: n_tree where nothing runs twice
    n_forwards: int  # partitions
    longest_path: int
    chain_peak: int  # largest sum of own tokens over a partition and all partitions above it
    n_context: int  # rows of context, summed over partitions

    @property
    def err(self) -> float:
        """Effective reuse ratio 1 - N_part / N_flat; POR is its bound."""
        return 1.0 - self.n_part / self.n_flat

    @property
    def duplicates(self) -> float:
        """Tokens run again, as a share of the distinct ones."""
        return self.n_part / self.n_tree - 1.0


@dataclass(frozen=True, eq=False)
class PartitionPlan:
    """Partitions of a tree, in the order in which their forwards run: depth first, parents first."""

    tree: TokenTree
    strategy: str
    partitions: tuple[Partition, ...]
    reason: str = ""  # why the strategy, where "auto" chose it

    def __len__(self) -> int:
        return len(self.partitions)

    @cached_property
    def chain_tokens(self) -> np.ndarray:
        """[len(self)] int64: own tokens of a partition and of all above it, alive when it runs."""
        chain = np.zeros(len(self), np.int64)
        for i, partition in enumerate(self.partitions):
            chain[i] = len(partition) + (chain[partition.parent] if partition.parent >= 0 else 0)
        return chain

    @cached_property
    def stats(self) -> PlanStats:
        tree = self.tree.stats
        return PlanStats(
            n_flat=tree.n_flat,
            n_tree=tree.n_tree,
            n_part=sum(map(len, self.partitions)),
            n_forwards=len(self),
            longest_path=tree.longest_path,
            chain_peak=int(self.chain_tokens.max()),
            n_context=sum(len(p.keys) - len(p) for p in self.partitions),
        )

    def draw(self, width: int = 80) -> str:
        """A picture of the plan in text: a line per partition, under its parent and further to the right.

        Long plans are drawn without their middle, and say so. No line is indented beyond ``width``.
        """
        stats = self.stats
        lines = [
            f"{self.strategy}: {stats.n_forwards:,} forwards run {stats.n_part:,} tokens, {stats.n_tree:,} "
            f"distinct; chain peak {stats.chain_peak:,}"
        ]
        depth = np.zeros(len(self), np.int64)
        for i, partition in enumerate(self.partitions):
            depth[i] = depth[partition.parent] + 1 if partition.parent >= 0 else 0
        left_out = range(DRAWN // 2, len(self) - DRAWN // 2) if len(self) > DRAWN else range(0)
        for i, partition in enumerate(self.partitions):
            if i in left_out:
                if i == left_out[0]:
                    lines.append(f"... {len(left_out):,} partitions left out ...")
                continue
            text = (
                f"{i}: {len(partition):,} own, {len(partition.keys) - len(partition):,} context, tokens "
                f"{partition.own.min():,} to {partition.own.max():,}, chain {self.chain_tokens[i]:,}"
            )
            lines.append(" " * min(2 * int(depth[i]), max(0, width - len(text))) + text)
        return "\n".join(lines)

    def save(self, path: str | Path) -> None:
        """Writes the plan as .npz, without the tree but with a check of it."""
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
        """A plan that was saved for ``tree``. Raises UserError where it was for another, or is no plan."""
        try:
            with np.load(path) as file:
                saved = dict(file)
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
                f"{path}: the plan is for another tree than this one of {len(tree):,} tokens; plan again"
            )
        partitions = tuple(
            Partition(parent, **{name: array[i] for name, array in arrays.items()})
            for i, parent in enumerate(parents)
        )
        return PartitionPlan(tree, strategy, partitions, reason)


_PER_KEY = ("keys", "subtree_end")  # fields of a partition
_PER_OWN = ("key_index", "scores")


def _fingerprint(tree: TokenTree) -> str:
    sha = hashlib.sha256()
    for array in (tree.tokens, tree.node_offsets, tree.node_parent):
        sha.update(array.tobytes())
    return sha.hexdigest()


def in_tree_order(
    tree: TokenTree, parent: int, own: np.ndarray, context: np.ndarray, scores: np.ndarray | None = None
) -> Partition:
    """A partition of ``own`` tokens that come once each and stand as in the tree.

    ``context`` holds all ancestors of own tokens that are not own. scores: [len(own)] bool; None: all.
    """
    own = np.sort(own).astype(np.int32)
    keys = np.sort(np.concatenate([own, context.astype(np.int32)]))
    return Partition(
        parent=parent,
        keys=keys,
        subtree_end=np.searchsorted(keys, tree.subtree_end[keys]).astype(np.int32),
        key_index=np.searchsorted(keys, own).astype(np.int32),
        scores=np.ones(len(own), bool) if scores is None else scores,
    )


def one_pass(tree: TokenTree) -> PartitionPlan:
    """The whole tree in one forward."""
    tokens = np.arange(len(tree), dtype=np.int32)
    return PartitionPlan(tree, "none", (in_tree_order(tree, -1, tokens, tokens[:0]),))


@dataclass(frozen=True, eq=False)
class GatewayRows:
    """A partition's place in the *bank*, where partitions of one chain leave rows for those below them.

    The bank is two cache_streams, one of keys and values and one of recurrent states: PAD rows that nobody reads,
    then what the chain's partitions left, from the root's on.
    """

    cache_rows: int  # rows that the partitions above fill; those of this one come next
    exports: np.ndarray  # [X >= PAD] int64: own tokens, by their place among them, that go into the bank
    context: np.ndarray  # [m - n] int64: rows of the bank that are the context
    # The same of states. Wanted are those after tokens that own tokens of another partition follow.
    state_rows: int
    state_exports: np.ndarray  # [S >= PAD] int64
    predecessor: np.ndarray  # [n] int32, see ``TreeLayout.predecessor``


def gateway_rows(tree: TokenTree, partitions: Sequence[Partition]) -> list[GatewayRows]:
    """Of each partition of a plan. Exported are the own tokens that some child has as context."""
    wanted: list[list[np.ndarray]] = [[] for _ in partitions]
    for partition in partitions:
        if partition.parent >= 0:
            wanted[partition.parent].append(partition.context)
    states = _wanted_states(tree, partitions)
    # What a child does not take from its parent's own tokens, the parent has as context: found in its bank.
    banks: list[np.ndarray] = []  # tokens of rows PAD, PAD + 1, ...
    state_banks: list[np.ndarray] = []
    rows = []
    for i, partition in enumerate(partitions):
        above = partition.parent >= 0
        bank = banks[partition.parent] if above else partition.context
        state_bank = state_banks[partition.parent] if above else partition.context[:0]
        exports, state_exports = (_places(partition, tokens[i]) for tokens in (wanted, states))
        rows.append(
            GatewayRows(
                cache_rows=PAD + len(bank),
                exports=exports,
                context=_rows_of(bank, partition.context),
                state_rows=PAD + len(state_bank),
                state_exports=state_exports,
                predecessor=predecessors(tree, partition, state_bank),
            )
        )
        banks.append(np.concatenate([bank, partition.own[exports]]))
        state_banks.append(np.concatenate([state_bank, partition.own[state_exports]]))
    return rows


def _places(partition: Partition, tokens: list[np.ndarray]) -> np.ndarray:
    """Those of ``tokens``, PAD at least, among own ones. The last own token, if need be, fills up."""
    asked = np.unique(np.concatenate(tokens)) if tokens else np.empty(0, np.int32)
    places = np.flatnonzero(np.isin(partition.own, asked))
    return np.pad(places, (0, max(PAD - len(places), 0)), constant_values=len(partition) - 1)


def _rows_of(bank: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    order = np.argsort(bank, kind="stable")
    return PAD + order[np.searchsorted(bank[order], tokens)]


def predecessors(tree: TokenTree, partition: Partition, state_bank: np.ndarray | None = None) -> np.ndarray:
    """``TreeLayout.predecessor``. state_bank: tokens of the rows PAD, PAD + 1, ... of states."""
    before, is_own, place = _followed(tree, partition)
    predecessor = np.where(is_own, place, -1).astype(np.int32)
    elsewhere = (before >= 0) & ~is_own
    if elsewhere.any():
        assert state_bank is not None
        predecessor[elsewhere] = -2 - _rows_of(state_bank, before[elsewhere])
    return predecessor


def _followed(tree: TokenTree, partition: Partition) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Of each own token the tree's token before it, whether that is own, and its place if so.

    Where a traversal runs a token several times, each copy of a path stands in one piece: the token before
    is the nearest one to the left.
    """
    before, n = tree.predecessor[partition.own], len(partition)
    if np.array_equal(partition.own, np.arange(len(tree))):
        return before, before >= 0, before
    places = np.sort(partition.own.astype(np.int64) * n + np.arange(n))
    nearest = places[np.searchsorted(places, before.astype(np.int64) * n + np.arange(n)) - 1]
    return before, (before >= 0) & (nearest // n == before), nearest % n


def _wanted_states(tree: TokenTree, partitions: Sequence[Partition]) -> list[list[np.ndarray]]:
    """Of each partition the own tokens that own tokens of partitions below follow."""
    wanted: list[list[np.ndarray]] = [[] for _ in partitions]
    for partition in partitions:
        before, is_own, _ = _followed(tree, partition)
        left = np.unique(before[(before >= 0) & ~is_own])
        above = partition.parent
        while len(left):
            here = np.isin(left, partitions[above].own)
            wanted[above].append(left[here])
            left, above = left[~here], partitions[above].parent
    return wanted
