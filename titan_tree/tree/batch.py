"""TreeBatch: the tensors of one forward pass over a forest, with its edges and the paths through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from titan_tree.errors import UserError, require_list
from titan_tree.tree.chunks import make_chains, make_chunks
from titan_tree.tree.gateway import (
    NO_CACHE_ROWS,
    CacheRows,
    GatewayAccess,
    gateway_accesses,
    predecessors,
)
from titan_tree.tree.layout import TreeLayout
from titan_tree.tree.pairs import Edges, TreePairs, merged_pairs, tree_pairs
from titan_tree.tree.partition import Partition, PartitionPlan, one_pass
from titan_tree.tree.path_fields import SamplingMask
from titan_tree.tree.token_tree import TokenTree


@dataclass(frozen=True, kw_only=True)
class PairTargets:
    """The S targets of pairs: what a teacher would say in place of the token, see ``TokenTargets``."""

    pair: Tensor  # [S] int64, ascending: index of the pair
    number: Tensor  # [S] int64: index of the target in ``TreeBatch.edge_targets``, where paths share it
    teacher: Tensor  # [S] float32, nats: log-prob under the teacher
    student: Tensor | None = None  # [S] fp32, nats: under the model, see ``TreeBatch.with_target_logprobs``


@dataclass(frozen=True, kw_only=True)
class PathPairs:
    """The F (edge, path) pairs of a batch with P paths, on which losses of single sequences run.

    Pair f says that path ``path[f]`` runs over edge ``edge[f]``. Gather values of edges with
    ``x[pairs.edge]``: the values of each path are then contiguous and in order, as if the paths had been
    batched one by one. The tree of ``TokenTree``'s example, 1 2 -> (3 -> (5 6, 4), 7), has six edges and nine
    pairs:

    >>> from titan_tree.tree.paths import TokenPath
    >>> paths = [TokenPath([1, 2, 3, 4]), TokenPath([1, 2, 3, 5, 6]), TokenPath([1, 2, 7])]
    >>> batch = TreeBatch.from_trees([TokenTree.from_paths(paths)])
    >>> batch.tokens[batch.edge_source].tolist()  # from token
    [1, 2, 3, 5, 3, 2]
    >>> batch.edge_label.tolist()  # to token
    [2, 3, 5, 6, 4, 7]
    >>> batch.pairs.path.tolist()
    [0, 0, 0, 1, 1, 1, 1, 2, 2]
    >>> batch.pairs.edge.tolist()
    [0, 1, 4, 0, 1, 2, 3, 0, 5]
    >>> batch.edge_label[batch.pairs.edge].tolist()  # each path without its first token
    [2, 3, 4, 2, 3, 5, 6, 2, 7]
    """

    edge: Tensor  # [F] int64, index of an edge of the batch
    path: Tensor  # [F] int64, 0 .. P-1, ascending
    loss_mask: Tensor  # [F] float32
    path_number: Tensor  # [P] int64: the path's number in ``TokenTree.paths`` of the micro-batch
    weight: Tensor  # [P] float32
    loss_tokens: Tensor  # [P] float32: sum of the path's loss mask, also over edges of other partitions
    rollout_tokens: Tensor  # [P] float32: sum of loss_tokens over the paths of the path's rollout
    # The fields below are None if the paths do not have them, and 0 where the loss mask is 0.
    advantage: Tensor | None = None  # [F] float32
    old_logprobs: Tensor | None = None  # [F] float32, nats
    ref_logprobs: Tensor | None = None  # [F] float32, nats
    rollout_logprobs: Tensor | None = None  # [F] float32, nats
    policy_version: Tensor | None = None  # [F] int32
    edge_weight: Tensor | None = None  # [F] float32, see TokenPath
    is_first: Tensor | None = None  # [F] bool, see TokenPath
    # [P] float32, nats: sum of old_logprobs - rollout_logprobs over the path's loss mask, also over edges of
    # other partitions. None if the paths lack one of both.
    rollout_log_ratio: Tensor | None = None
    # [P, 4] float32, likewise, of x = old_logprobs - rollout_logprobs, bounded by +-20: sum of x² / 2, sum of
    # e^x - 1 - x, smallest x, largest x
    rollout_divergence: Tensor | None = None
    is_chosen: Tensor | None = None  # [P] bool: whether the path's preference is "chosen" or "desirable"
    is_mismatched: Tensor | None = None  # [P] bool: whether it is "mismatched"
    # [P] int64: number of the other path of the pair. None in a partition, or if the paths are not pairs.
    partner: Tensor | None = None
    # [P] int64: number of the first path of the path's rollout. None in a partition, or if paths of a rollout
    # are missing.
    rollout: Tensor | None = None
    targets: PairTargets | None = None  # of pairs that count, if the loss reads them

    def of_edges(self, chosen: Tensor, edge_targets: Tensor | None = None) -> PathPairs:
        """Returns the pairs of the edges that ``chosen`` [E] bool selects, which are numbered anew.

        All paths stay, also those without pairs.

        Args:
            edge_targets: those of the batch, if the pairs have targets.
        """
        is_chosen, number = chosen[self.edge], chosen.cumsum(0) - 1
        per_pair = {name: value[is_chosen] for name in PER_PAIR if (value := getattr(self, name)) is not None}
        targets = self.targets
        if targets is not None and edge_targets is not None:
            is_kept, is_own = is_chosen[targets.pair], chosen[edge_targets[0]]
            targets = PairTargets(
                pair=(is_chosen.cumsum(0) - 1)[targets.pair[is_kept]],
                number=(is_own.cumsum(0) - 1)[targets.number[is_kept]],
                teacher=targets.teacher[is_kept],
            )
        edge = number[self.edge[is_chosen]]
        return dataclasses.replace(self, **per_pair, edge=edge, targets=targets)


# Fields of PathPairs with one number per path; the others have one per pair.
PER_PATH = (
    "path_number",
    "weight",
    "loss_tokens",
    "rollout_tokens",
    "rollout_log_ratio",
    "rollout_divergence",
    "is_chosen",
    "is_mismatched",
    "partner",
    "rollout",
)
PER_PAIR = tuple(
    f.name for f in dataclasses.fields(PathPairs) if f.name not in (*PER_PATH, "edge", "targets")
)


@dataclass(frozen=True, kw_only=True)
class TreeBatch:
    """N distinct tokens of several trees, one after another without padding, and their E edges.

    Edge e leads from the token at index ``edge_source[e]``, whose hidden state predicts the next token, to
    the predicted token. ``edge_label[e]`` is the predicted token's id in the vocabulary, and
    ``edge_number[e]`` is the number of the edge in the tree. With ``edges="all"``, every token but the first
    of a root is the label of an edge, and the last token of a node is the source of an edge per child. With
    ``edges="loss"``, the edges that no path's loss mask counts are missing. Edges are sorted by the DFS index
    of the predicted token. Paths that count an edge at different temperatures, or with different sampling
    masks, have an edge each.

    For a partition, N counts its own tokens, and edges and pairs are those that it scores.
    """

    tokens: Tensor  # [N] int64
    layout: TreeLayout
    edge_source: Tensor  # [E] int64, index into ``tokens``
    edge_label: Tensor  # [E] int64, token ids
    edge_number: Tensor  # [E] int64, ascending: the edge's number among those of the whole micro-batch
    pairs: PathPairs
    n_logical: int  # path tokens that this batch counts; summed over the batches of a plan: N_flat
    edge_temperature: Tensor | None = None  # [E] float32: divides the logits; None: all are 1
    # [2, S] int64: the ids that sampling kept for edges, see ``edge_logprobs``; None: all edges have all ids
    edge_support: Tensor | None = None
    # [2, S] int64: the distinct (edge, token id) of all targets of pairs, see ``edge_logprobs``; None: none
    edge_targets: Tensor | None = None
    # [L, N, k] int16: forced experts of each layer; -1: the router chooses
    routed_experts: Tensor | None = None
    image_row: Tensor | None = None  # [N] int64: row among those of all ``pixels`` of the plan; -1: text
    # [H, W, 3] uint8 per distinct image of all batches of the plan; only the plan's first batch has them
    pixels: tuple[Tensor, ...] = ()
    image_keys: tuple[str, ...] = ()  # ``Image.key`` of each of the ``pixels``
    parent: int = -1  # number of the parent partition's batch in the plan; -1: none
    cache_offset: CacheRows = NO_CACHE_ROWS  # rows of the gateway cache that this partition can read
    is_dummy: bool = False  # no path runs here: the batch only takes part in communication and adds nothing

    @staticmethod
    def from_trees(trees: Sequence[TokenTree], edges: Edges = "all", targets: bool = False) -> TreeBatch:
        """Puts ``trees`` side by side, in the order given, into one batch.

        Args:
            edges: "all" scores every edge. "loss" scores only edges that the loss mask of some path counts.
                It saves the vocabulary projection of prompts; the loss is the same.
            targets: see ``from_plan``.

        Raises:
            UserError: ``trees`` is not a list of trees or is empty, or a per-token field is missing in some
                paths but not in all.
        """
        require_list(trees, TokenTree, "TreeBatch.from_trees", "pass [tree]")
        (batch,) = TreeBatch.from_plan(one_pass(TokenTree.forest(trees)), edges, targets=targets)
        return batch

    @staticmethod
    def from_plan(
        plan: PartitionPlan, edges: Edges = "all", merges_pairs: bool = False, targets: bool = False
    ) -> list[TreeBatch]:
        """Returns a batch for each partition, in the plan's order. Their losses add up to the tree's.

        A batch contains the paths that run over at least one of its edges. The only batch of a plan of one
        partition contains all paths.

        Args:
            edges: see ``from_trees``.
            merges_pairs: make one pair per edge if no field of the paths differs between them, see
                ``merged_pairs``. For losses that do not read the pairs.
            targets: give pairs the targets of their paths. For losses that read them.

        Raises:
            UserError: see ``from_trees``.
        """
        tree, num = plan.tree, len(plan)
        source_partition, source_index = _edge_sources(plan)
        tree_edges, pairs = tree_pairs(tree, edges, targets)
        if merges_pairs:
            pairs = merged_pairs(pairs)
        # The partition that runs an edge's source scores the edge and all of its pairs.
        sources = tree.predecessor[tree_edges.label]
        scoring_partition = source_partition[sources]
        edges_of = _split(np.arange(len(sources)), scoring_partition, num)
        pairs_of = _split(np.arange(len(pairs.edge)), scoring_partition[pairs.edge], num)
        num_paths = np.repeat(tree.node_paths, tree.node_length)
        n_logical = np.bincount(source_partition[:-1], num_paths, minlength=num)
        own_number = np.empty(len(sources), np.int64)  # of each edge, within its partition
        for chosen in edges_of:
            own_number[chosen] = np.arange(len(chosen))
        accesses = gateway_accesses(tree, plan.partitions) if num > 1 else [None]
        batches: list[TreeBatch] = []
        for i, (partition, access) in enumerate(zip(plan.partitions, accesses, strict=True)):
            pair_targets, edge_targets = _targets(pairs, pairs_of[i], own_number)
            path_pairs = _path_pairs(pairs, pairs_of[i], own_number, all_paths=num == 1)
            batches.append(
                TreeBatch(
                    tokens=torch.from_numpy(tree.tokens[partition.own_tokens].astype(np.int64)),
                    layout=_layout(tree, partition, access),
                    edge_source=torch.from_numpy(source_index[sources[edges_of[i]]]),
                    edge_label=torch.from_numpy(tree.tokens[tree_edges.label[edges_of[i]]].astype(np.int64)),
                    edge_number=torch.from_numpy(edges_of[i]),
                    pairs=dataclasses.replace(path_pairs, targets=pair_targets),
                    n_logical=int(n_logical[i]),
                    edge_temperature=_tensor_or_none(tree_edges.temperature, edges_of[i]),
                    edge_support=_support(tree_edges.mask, edges_of[i]),
                    edge_targets=edge_targets,
                    routed_experts=_routed_experts(tree, partition),
                    image_row=_image_row(tree, partition),
                    # A copy, because the pixels may be read-only, or a view with negative strides.
                    pixels=() if batches else tuple(torch.from_numpy(x.pixels.copy()) for x in tree.images),
                    image_keys=() if batches else tuple(image.key for image in tree.images),
                    parent=partition.parent,
                    cache_offset=NO_CACHE_ROWS if access is None else access.cache_offset,
                )
            )
        return batches

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def cache_writes(self) -> CacheRows:
        """Rows that this partition writes to the gateway cache, from ``cache_offset`` on."""
        layout = self.layout
        return CacheRows(*(0 if x is None else len(x) for x in (layout.exports, layout.state_exports)))

    def without_edges(self) -> TreeBatch:
        """Returns the batch without edges, for a forward pass that only computes exports or routing."""
        none = self.edge_source[:0]
        return dataclasses.replace(
            self,
            edge_source=none,
            edge_label=none,
            edge_number=none,
            edge_temperature=None,
            edge_support=None,
            edge_targets=None,
        )

    def with_target_logprobs(self, logprobs: Tensor | None) -> TreeBatch:
        """Returns the batch with the log-probs [S] of ``edge_targets`` under the model, for the loss."""
        if self.pairs.targets is None or logprobs is None:
            return self
        targets = dataclasses.replace(self.pairs.targets, student=logprobs[self.pairs.targets.number])
        return dataclasses.replace(self, pairs=dataclasses.replace(self.pairs, targets=targets))

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TreeBatch:
        """Returns the batch on another device. From pinned memory, ``non_blocking`` copies asynchronously."""
        return _map(self, lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TreeBatch:
        """Returns the batch in page-locked host memory, from which a GPU copies directly. Needs CUDA."""
        return _map(self, lambda part: part.pin_memory())


def _edge_sources(plan: PartitionPlan) -> tuple[np.ndarray, np.ndarray]:
    """Returns where the outgoing edges of each token are scored, in two arrays [tokens + 1].

    The last entry is the one that index -1 reads ("no token").

    Returns:
        The number of the partition, int32, and the token's index among its own tokens, int64.
    """
    numbers, own_index = np.full(len(plan.tree) + 1, -1, np.int32), np.zeros(len(plan.tree) + 1, np.int64)
    for i, partition in enumerate(plan.partitions):
        (own_indices,) = partition.scores.nonzero()
        numbers[partition.own_tokens[own_indices]] = i
        own_index[partition.own_tokens[own_indices]] = own_indices
    return numbers, own_index


def _path_pairs(pairs: TreePairs, chosen: np.ndarray, own_number: np.ndarray, all_paths: bool) -> PathPairs:
    """Makes the ``PathPairs`` of one batch from the ``chosen`` pairs. Paths are numbered within the batch.

    Args:
        own_number: [E] the number of each edge within its batch.
        all_paths: the batch contains paths without pairs, too.
    """
    num_paths = len(pairs.path_fields["weight"])
    # The other path that such a field names may run over no edge of this partition.
    others = () if all_paths else ("partner", "rollout")
    per_path = {name: values for name, values in pairs.path_fields.items() if name not in others}
    paths = np.arange(num_paths) if all_paths else np.unique(pairs.path[chosen])
    fields: dict[str, Any] = {name: torch.from_numpy(values[paths]) for name, values in per_path.items()}
    fields |= {name: torch.from_numpy(values[chosen]) for name, values in pairs.fields.items()}
    return PathPairs(
        edge=torch.from_numpy(own_number[pairs.edge[chosen]]),
        path=torch.from_numpy(
            pairs.path[chosen] if all_paths else np.searchsorted(paths, pairs.path[chosen])
        ),
        path_number=torch.from_numpy(paths),
        **fields,
    )


def _routed_experts(tree: TokenTree, partition: Partition) -> Tensor | None:
    """Returns the recorded experts of a partition's own tokens, layer by layer."""
    if tree.routed_experts is None:
        return None
    return torch.from_numpy(tree.routed_experts.experts[partition.own_tokens].swapaxes(0, 1).copy())


def _image_row(tree: TokenTree, partition: Partition) -> Tensor | None:
    if tree.image_row is None:
        return None
    return torch.from_numpy(tree.image_row[partition.own_tokens].astype(np.int64))


def _support(mask: SamplingMask | None, edges: np.ndarray) -> Tensor | None:
    """Returns ``edge_support`` of the chosen ``edges``."""
    if mask is None:
        return None
    sizes, ids = mask.of_tokens(edges)
    return torch.from_numpy(np.stack([np.repeat(np.arange(len(edges)), sizes), ids]))


def _targets(
    pairs: TreePairs, chosen: np.ndarray, own_number: np.ndarray
) -> tuple[PairTargets | None, Tensor | None]:
    """Returns the targets of the ``chosen`` pairs of one batch, and ``edge_targets``. See ``_path_pairs``."""
    if pairs.targets is None:
        return None, None
    sizes, ids, logprobs = pairs.targets.of_tokens(chosen)
    pair = np.repeat(np.arange(len(chosen)), sizes)
    keys, number = np.unique(own_number[pairs.edge[chosen]][pair] << 32 | ids, return_inverse=True)
    pair_targets = PairTargets(
        pair=torch.from_numpy(pair), number=torch.from_numpy(number), teacher=torch.from_numpy(logprobs)
    )
    return pair_targets, torch.from_numpy(np.stack([keys >> 32, keys & 0xFFFFFFFF]))


def _tensor_or_none(values: np.ndarray | None, index: np.ndarray) -> Tensor | None:
    return None if values is None else torch.from_numpy(values[index])


def _split(values: np.ndarray, part: np.ndarray, num_parts: int) -> list[np.ndarray]:
    """Returns the ``values`` of each part, in the order given. ``part`` names the part of each value."""
    if num_parts == 1:
        return [values]
    order = np.argsort(part, kind="stable")
    return np.split(values[order], np.searchsorted(part[order], np.arange(1, num_parts)))


def _layout(tree: TokenTree, partition: Partition, access: GatewayAccess | None) -> TreeLayout:
    no_exports = np.empty(0, np.int64)
    predecessor = predecessors(tree, partition) if access is None else access.predecessor
    chunks = make_chunks(predecessor, no_exports if access is None else access.state_exports)
    num_paths = np.repeat(tree.node_paths, tree.node_length)[partition.own_tokens]
    layout = TreeLayout(
        positions=torch.from_numpy(tree.rope_positions[..., partition.own_tokens].astype(np.int32)),
        subtree_end=torch.from_numpy(partition.subtree_end),
        key_index=torch.from_numpy(partition.key_index),
        predecessor=torch.from_numpy(predecessor),
        chunks=chunks,
        chains=make_chains(chunks, 0 if access is None else access.cache_offset.states),
        num_paths=torch.from_numpy(np.where(partition.scores, num_paths, 0).astype(np.float32)),
    )
    if access is None:
        return layout
    source = np.empty(len(partition.keys), np.int64)
    source[partition.context_index] = access.context_rows
    source[partition.key_index] = access.cache_offset.keys + np.arange(len(partition))
    return dataclasses.replace(
        layout,
        key_source=torch.from_numpy(source),
        exports=torch.from_numpy(access.exports),
        state_exports=torch.from_numpy(access.state_exports),
    )


B = TypeVar("B", bound=TreeBatch | PathPairs | PairTargets)


def _map(record: B, function: Callable[[Tensor | TreeLayout], object]) -> B:
    """Returns the record with ``function`` applied to every tensor and layout in it."""

    def mapped(value: object) -> object:
        if isinstance(value, Tensor | TreeLayout):
            return function(value)
        if type(value) is tuple:
            return tuple(map(mapped, value))
        return _map(value, function) if isinstance(value, PathPairs | PairTargets) else value

    values: dict[str, Any] = {
        field.name: mapped(getattr(record, field.name)) for field in dataclasses.fields(record)
    }
    return dataclasses.replace(record, **values)


class TokenShard(NamedTuple):
    """Which part of the tokens of every batch a rank computes: shard ``rank`` of ``num_ranks``.

    The P ranks of a sequence-parallel group run the same trees. Everything that treats tokens one by one runs
    on an even split of the tokens in DFS order. Whatever mixes tokens runs on all tokens, for 1/P of the
    heads (distributed/sequence_parallel.py). The layout of a shard therefore keeps the mask, chunks and
    exports of the whole batch; only positions and numbers of paths are those of its own tokens.

    An edge and its pairs belong to the rank that has the edge's source. The token to predict is stored with
    the edge, so it does not matter which rank has that token.
    """

    rank: int = 0
    num_ranks: int = 1

    def sizes(self, num_tokens: int) -> list[int]:
        """Returns the number of tokens of each rank. The first ranks have one more than the last ones.

        >>> TokenShard(0, 4).sizes(10)
        [3, 3, 2, 2]
        """
        return [(num_tokens + self.num_ranks - 1 - rank) // self.num_ranks for rank in range(self.num_ranks)]

    def tokens(self, num_tokens: int) -> slice:
        """Returns the tokens of this rank.

        >>> TokenShard(1, 4).tokens(10)
        slice(3, 6, None)
        """
        sizes = self.sizes(num_tokens)
        first = sum(sizes[: self.rank])
        return slice(first, first + sizes[self.rank])

    def of(self, batch: TreeBatch) -> TreeBatch:
        """Returns this rank's shard of a batch. Edges keep their order and their ``edge_number``.

        ``n_logical`` stays that of the whole batch.

        Raises:
            UserError: the batch has images, whose rows shards cannot divide.
        """
        if self.num_ranks == 1:
            return batch
        if batch.image_row is not None:
            raise UserError(
                f"images: expected none, because {self.num_ranks} ranks divide the tokens of a batch, got a "
                "batch with images; set parallel.sequence_parallel = 1"
            )
        tokens = self.tokens(len(batch))
        is_own = (batch.edge_source >= tokens.start) & (batch.edge_source < tokens.stop)
        layout, routed = batch.layout, batch.routed_experts
        temperature = batch.edge_temperature
        num_paths = None if layout.num_paths is None else layout.num_paths[tokens]
        return dataclasses.replace(
            batch,
            tokens=batch.tokens[tokens],
            layout=dataclasses.replace(layout, positions=layout.positions[..., tokens], num_paths=num_paths),
            edge_source=batch.edge_source[is_own] - tokens.start,
            edge_label=batch.edge_label[is_own],
            edge_number=batch.edge_number[is_own],
            pairs=batch.pairs.of_edges(is_own, batch.edge_targets),
            edge_temperature=None if temperature is None else temperature[is_own],
            edge_support=_of_edges(batch.edge_support, is_own),
            edge_targets=_of_edges(batch.edge_targets, is_own),
            routed_experts=None if routed is None else routed[:, tokens],
        )


def _of_edges(ids: Tensor | None, chosen: Tensor) -> Tensor | None:
    """Returns those of ``ids`` [2, S] whose edges ``chosen`` [E] bool selects, which are numbered anew."""
    if ids is None:
        return None
    edge, token = ids[:, chosen[ids[0]]]
    return torch.stack([chosen.cumsum(0)[edge] - 1, token])


ALL_TOKENS = TokenShard()  # the shard of a rank that computes whole batches
