"""TreeBatch: a forest of token trees as tensors, with its edges and the paths through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from titan_tree.errors import UserError
from titan_tree.tree.chains import make_chains
from titan_tree.tree.chunks import make_chunks
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.partition import (
    GatewayRows,
    Partition,
    PartitionPlan,
    gateway_rows,
    one_pass,
    predecessors,
)
from titan_tree.tree.paths import PER_TOKEN
from titan_tree.tree.token_tree import TokenTree


@dataclass(frozen=True)
class PathPairs:
    """The F (edge, path) pairs of P paths, path after path: where per-sequence losses live.

    Entry f says: path ``path[f]`` runs over edge ``edge[f]``; gather edge values with ``x[pairs.edge]``
    and every path's values stand in order, contiguous, as if the paths had been batched one by one.
    """

    edge: Tensor  # [F] int64 into the batch's edges
    path: Tensor  # [F] int64, 0 .. P-1, ascending
    loss_mask: Tensor  # [F] float32
    weight: Tensor  # [P] float32
    loss_tokens: Tensor  # [P] float32: sum of the path's loss mask
    advantage: Tensor | None = None  # [F] float32; 0 where the mask is 0, like the two below
    old_logprobs: Tensor | None = None  # [F] float32, nats
    ref_logprobs: Tensor | None = None  # [F] float32, nats


class Rows(NamedTuple):
    """A number of rows in each stack of the bank (data/partition.py, GatewayRows)."""

    keys: int
    states: int


NO_ROWS = Rows(0, 0)


@dataclass(frozen=True)
class TreeBatch:
    """N distinct tokens of several trees packed one after another, without padding.

    E edges: ``edge_source[e]`` is the token whose hidden state predicts ``edge_label[e]``. A token at the
    end of a node is the source of one edge per child; every token but a root's first is the label of one.
    Edges stand in DFS order of the predicted token.
    """

    tokens: Tensor  # [N] int64
    layout: TreeLayout
    edge_source: Tensor  # [E] int64
    edge_label: Tensor  # [E] int64
    edge_token: Tensor  # [E] int64: the predicted token's index in the (forest of) trees, ascending
    pairs: PathPairs
    n_logical: int  # tokens that training every path alone would run: N_flat, summed over a plan's batches
    routed_experts: Tensor | None = None  # [L, N, k] int16 for each layer with experts; -1: it chooses itself
    # Of a partition's batch: the batch of the plan that runs before and leaves the context, and the rows of
    # the bank that it reads from, that one's and those of all above it.
    parent: int = -1
    cache_offset: Rows = NO_ROWS

    @staticmethod
    def from_trees(trees: Sequence[TokenTree], edges: Literal["all", "loss"] = "all") -> TreeBatch:
        """Pack ``trees`` in the order given, to be run in one forward.

        edges: "all" scores every edge; "loss" only those that some path's loss mask counts, which saves
            the vocabulary projection of prompts. The loss is the same.
        Raises UserError where there are no trees, or where only some paths carry a per-token field.
        """
        (batch,) = TreeBatch.from_plan(one_pass(TokenTree.forest(trees)), edges)
        return batch

    @staticmethod
    def from_plan(plan: PartitionPlan, edges: Literal["all", "loss"] = "all") -> list[TreeBatch]:
        """A batch per partition, in the plan's order. Their losses add up to the tree's.

        Of each batch P counts the paths that run over one of its edges; a plan of one partition has all.
        """
        tree, partitions = plan.tree, plan.partitions
        # Where each token's out-edges are scored. A root has no in-edge: partition -1.
        home = np.full(len(tree) + 1, -1, np.int32)
        row = np.zeros(len(tree) + 1, np.int64)
        for i, partition in enumerate(partitions):
            (scoring,) = partition.scores.nonzero()
            home[partition.own[scoring]] = i
            row[partition.own[scoring]] = scoring
        logical = np.bincount(home[tree.path_index], minlength=len(partitions))
        edge_home = home[tree.predecessor]

        pair_token, pair_path, fields = _pairs(tree, edges)
        scored = np.zeros(len(tree), bool)
        scored[pair_token] = True
        if edges == "all":
            scored = tree.predecessor >= 0
        target = np.flatnonzero(scored)
        edges_of = _split(target, edge_home[target], len(partitions))
        pairs_of = _split(np.arange(len(pair_token)), edge_home[pair_token], len(partitions))
        weight = np.array([path.weight for path in tree.paths], np.float32)
        loss_tokens = np.array([path.loss_tokens for path in tree.paths], np.float32)
        gateways = gateway_rows(tree, partitions) if len(partitions) > 1 else [None]
        batches = []
        for i, (partition, gateway) in enumerate(zip(partitions, gateways, strict=True)):
            labels, here = edges_of[i], pairs_of[i]
            paths = np.arange(len(tree.paths)) if len(partitions) == 1 else np.unique(pair_path[here])
            pairs = PathPairs(
                edge=torch.from_numpy(np.searchsorted(labels, pair_token[here])),
                path=torch.from_numpy(np.searchsorted(paths, pair_path[here])),
                weight=torch.from_numpy(weight[paths]),
                loss_tokens=torch.from_numpy(loss_tokens[paths]),
                **{name: torch.from_numpy(values[here]) for name, values in fields.items()},
            )
            batches.append(
                TreeBatch(
                    tokens=torch.from_numpy(tree.tokens[partition.own].astype(np.int64)),
                    layout=_layout(tree, partition, gateway),
                    edge_source=torch.from_numpy(row[tree.predecessor[labels]]),
                    edge_label=torch.from_numpy(tree.tokens[labels].astype(np.int64)),
                    edge_token=torch.from_numpy(labels),
                    pairs=pairs,
                    n_logical=int(logical[i]),
                    routed_experts=_routed_experts(tree, partition),
                    parent=partition.parent,
                    cache_offset=NO_ROWS if gateway is None else Rows(gateway.cache_rows, gateway.state_rows),
                )
            )
        return batches

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_dummy(self) -> bool:
        """Whether no path runs here: it takes part in what ranks do together, and adds nothing."""
        return self.n_logical == 0

    @property
    def cache_writes(self) -> Rows:
        """Rows that the batch's partition leaves in the bank."""
        layout = self.layout
        return Rows(*(0 if x is None else len(x) for x in (layout.exports, layout.state_exports)))

    def without_edges(self) -> TreeBatch:
        """The batch without anything to score, for a forward that is after ``exports`` only."""
        none = self.edge_source[:0]
        return dataclasses.replace(self, edge_source=none, edge_label=none, edge_token=none)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TreeBatch:
        """The batch on another device. Pinned host memory and ``non_blocking`` make it asynchronous."""
        return _map(self, lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TreeBatch:
        """The batch in page-locked host memory, which a GPU reads by itself. Needs CUDA."""
        return _map(self, lambda part: part.pin_memory())


def _pairs(tree: TokenTree, edges: str) -> tuple[np.ndarray, np.ndarray, dict[str, np.ndarray]]:
    """Of each (edge, path) pair the predicted token, the path, and the per-token fields of ``PathPairs``."""
    paths = tree.paths
    mask = np.concatenate([path.loss_mask for path in paths])
    # A path's first token has no edge; the pair of any other token is named after that token.
    is_pair = np.ones(len(mask), bool)
    is_pair[tree.path_offsets[:-1]] = False
    mask[~is_pair] = 0
    if edges == "loss":
        is_pair &= mask > 0
    fields = {"loss_mask": mask[is_pair]}
    for name in PER_TOKEN:
        values = [getattr(path, name) for path in paths]
        missing = [path for path, value in zip(paths, values, strict=True) if value is None]
        if 0 < len(missing) < len(paths):
            raise UserError(
                f"path {missing[0].id or '?'}: {name}: missing, but other paths of the batch have it; "
                "give it to all paths or to none"
            )
        if not missing:
            fields[name] = np.where(mask > 0, np.concatenate(values), 0)[is_pair]
    path_of = np.repeat(np.arange(len(paths)), np.diff(tree.path_offsets))
    return tree.path_index[is_pair], path_of[is_pair], fields


def _routed_experts(tree: TokenTree, partition: Partition) -> Tensor | None:
    if tree.records is None:
        return None
    return torch.from_numpy(tree.records.experts[partition.own].swapaxes(0, 1).copy())


def _split(values: np.ndarray, part: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """``values`` of each part, in the order given."""
    order = np.argsort(part, kind="stable")
    return np.split(values[order], np.searchsorted(part[order], np.arange(1, num_parts)))


def _layout(tree: TokenTree, partition: Partition, gateway: GatewayRows | None) -> TreeLayout:
    no_exports = np.empty(0, np.int64)
    predecessor = predecessors(tree, partition) if gateway is None else gateway.predecessor
    chunks = make_chunks(predecessor, no_exports if gateway is None else gateway.state_exports)
    num_paths = np.repeat(tree.node_paths, tree.node_length)[partition.own]
    layout = TreeLayout(
        positions=torch.from_numpy(tree.positions[partition.own].astype(np.int32)),
        subtree_end=torch.from_numpy(partition.subtree_end),
        key_index=torch.from_numpy(partition.key_index),
        predecessor=torch.from_numpy(predecessor),
        chunks=chunks,
        chains=make_chains(chunks, 0 if gateway is None else gateway.state_rows),
        num_paths=torch.from_numpy(np.where(partition.scores, num_paths, 0).astype(np.float32)),
    )
    if gateway is None:
        return layout
    source = np.empty(len(partition.keys), np.int64)
    source[partition.context_index] = gateway.context
    source[partition.key_index] = gateway.cache_rows + np.arange(len(partition))
    return dataclasses.replace(
        layout,
        key_source=torch.from_numpy(source),
        exports=torch.from_numpy(gateway.exports),
        state_exports=torch.from_numpy(gateway.state_exports),
    )


def _map(record: Any, function: Callable[[Any], Any]) -> Any:
    """The dataclass ``record`` with ``function`` applied to every tensor and layout in it."""

    def mapped(value: Any) -> Any:
        if isinstance(value, Tensor | TreeLayout):
            return function(value)
        return _map(value, function) if dataclasses.is_dataclass(value) else value

    return type(record)(**{f.name: mapped(getattr(record, f.name)) for f in dataclasses.fields(record)})
