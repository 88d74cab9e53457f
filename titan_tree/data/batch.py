"""TreeBatch: a forest of token trees as tensors, with its edges and the paths through them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from titan_tree.data.layout import TreeLayout
from titan_tree.data.paths import PER_TOKEN
from titan_tree.data.tree import TokenTree
from titan_tree.errors import UserError


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
    pairs: PathPairs
    n_logical: int  # N_flat: tokens that training every path alone would run

    @staticmethod
    def from_trees(trees: Sequence[TokenTree], edges: Literal["all", "loss"] = "all") -> TreeBatch:
        """Pack ``trees`` in the order given.

        edges: "all" scores every edge; "loss" only those that some path's loss mask counts, which saves
            the vocabulary projection of prompts. The loss is the same.
        Raises UserError where there are no trees, or where only some paths carry a per-token field.
        """
        if not trees:
            raise UserError("TreeBatch.from_trees: expected at least one tree, got none")
        sizes = [len(tree) for tree in trees]
        offsets = np.concatenate([[0], np.cumsum(sizes)])

        def pack(arrays: list[np.ndarray]) -> np.ndarray:
            return np.concatenate([a + offset for a, offset in zip(arrays, offsets[:-1], strict=True)])

        tokens = np.concatenate([tree.tokens for tree in trees]).astype(np.int64)
        predecessor = np.concatenate(
            [
                np.where(t.predecessor < 0, -1, t.predecessor + o)
                for t, o in zip(trees, offsets[:-1], strict=True)
            ]
        )
        paths = [path for tree in trees for path in tree.paths]
        lengths = np.array([len(path) for path in paths])
        path_token = pack([tree.path_index for tree in trees])
        mask = np.concatenate([path.loss_mask for path in paths])

        # A path's first token has no edge; the pair of any other token is named after that token.
        is_pair = np.ones(len(path_token), bool)
        is_pair[np.cumsum(lengths) - lengths] = False
        mask[~is_pair] = 0
        path_of = np.repeat(np.arange(len(paths)), lengths)
        if edges == "loss":
            is_pair &= mask > 0
            scored = np.zeros(len(tokens), bool)
            scored[path_token[is_pair]] = True
        else:
            scored = predecessor >= 0
        target = np.flatnonzero(scored)
        edge_of = np.cumsum(scored) - 1

        optional = {}
        for name in PER_TOKEN:
            values = [getattr(path, name) for path in paths]
            missing = [path for path, value in zip(paths, values, strict=True) if value is None]
            if 0 < len(missing) < len(paths):
                raise UserError(
                    f"path {missing[0].id or '?'}: {name}: missing, but other paths of the batch have it; "
                    "give it to all paths or to none"
                )
            if not missing:
                optional[name] = torch.from_numpy(np.where(mask > 0, np.concatenate(values), 0)[is_pair])
        pairs = PathPairs(
            edge=torch.from_numpy(edge_of[path_token[is_pair]]),
            path=torch.from_numpy(path_of[is_pair]),
            loss_mask=torch.from_numpy(mask[is_pair]),
            weight=torch.tensor([path.weight for path in paths], dtype=torch.float32),
            loss_tokens=torch.tensor([path.loss_tokens for path in paths], dtype=torch.float32),
            **optional,
        )
        layout = TreeLayout(
            positions=torch.from_numpy(np.concatenate([tree.positions for tree in trees])),
            subtree_end=torch.from_numpy(pack([tree.subtree_end for tree in trees]).astype(np.int32)),
            key_index=torch.arange(len(tokens), dtype=torch.int32),
        )
        return TreeBatch(
            tokens=torch.from_numpy(tokens),
            layout=layout,
            edge_source=torch.from_numpy(predecessor[target].astype(np.int64)),
            edge_label=torch.from_numpy(tokens[target]),
            pairs=pairs,
            n_logical=len(path_token),
        )

    def __len__(self) -> int:
        return len(self.tokens)

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TreeBatch:
        """The batch on another device. Pinned host memory and ``non_blocking`` make it asynchronous."""
        return _map(self, lambda part: part.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TreeBatch:
        """The batch in page-locked host memory, which a GPU reads by itself. Needs CUDA."""
        return _map(self, lambda part: part.pin_memory())


def _map(record: Any, function: Callable[[Any], Any]) -> Any:
    """The dataclass ``record`` with ``function`` applied to every tensor and layout in it."""

    def mapped(value: Any) -> Any:
        if isinstance(value, Tensor | TreeLayout):
            return function(value)
        return _map(value, function) if dataclasses.is_dataclass(value) else value

    return type(record)(**{f.name: mapped(getattr(record, f.name)) for f in dataclasses.fields(record)})
