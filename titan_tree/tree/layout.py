"""TreeLayout: the metadata that attention, recurrent layers and rotary embeddings read about a tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_tree.tree.chunks import Chains, Chunks


@dataclass(frozen=True, kw_only=True)
class TreeLayout:
    """The structure of N queries among M >= N keys of a forest, both in DFS order.

    In DFS order a subtree is a contiguous range. A query therefore sees a key if and only if the query lies
    in the key's subtree and does not precede it: ``k <= key_index[q] < subtree_end[k]``. This is the whole
    attention mask, in O(M) numbers.

    Keys that are not queries are the context of a partition (tree/partition.py). Without context M = N and
    ``key_index`` is 0 .. N-1. The tree of ``TokenTree``'s example, 1 2 -> (3 -> (5 6, 4), 7):

    >>> layout = TreeLayout(
    ...     positions=torch.tensor([0, 1, 2, 3, 4, 3, 2]),
    ...     subtree_end=torch.tensor([7, 7, 6, 5, 5, 6, 7]),
    ...     key_index=torch.arange(7),
    ... )
    >>> for token, row in zip([1, 2, 3, 5, 6, 4, 7], layout.dense_mask().tolist(), strict=True):
    ...     print(token, "sees", "".join("x" if sees else "." for sees in row))
    1 sees x......
    2 sees xx.....
    3 sees xxx....
    5 sees xxxx...
    6 sees xxxxx..
    4 sees xxx..x.
    7 sees xx....x
    """

    positions: Tensor  # [N] int32: position on the path, for rotary embeddings; [3, N] with images
    subtree_end: Tensor  # [M] int32: exclusive end of each key's subtree, in key columns
    key_index: Tensor  # [N] int32, strictly increasing: the key column of each query

    # For a partition that has a gateway (tree/gateway.py); None if the whole tree runs in one forward pass.
    # [M] int64: the row of each key in the concatenation of the cached rows and the N own tokens
    key_source: Tensor | None = None
    exports: Tensor | None = None  # [X] int64: own tokens whose keys and values descendants read

    # For recurrent layers, whose state passes from token to token along a path.
    predecessor: Tensor | None = None  # [N] int32: the query before it on its path; -1: none, it is a root;
    # -2 - r: another partition ran it, and row r of the gateway cache holds the state after it
    state_exports: Tensor | None = None  # [S] int64: own tokens whose states descendants start from
    chunks: Chunks | None = None
    chains: Chains | None = None  # of chunks; one of its tensors stays on the host

    # For sums over tokens: the number of paths through each token, or 0 if another partition or piece
    # (run/balance/splitting.py) counts it.
    num_paths: Tensor | None = None  # [N] float32

    # Derived by components from the fields above, once per batch.
    prepared_attention: Mapping[int | None, Any] | None = None  # by a backend, per sliding window
    conv_index: tuple[Tensor, ...] | None = None  # which inputs each window of the convolution reads

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TreeLayout:
        """Returns the layout on another device, without what components prepared: they do it again."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TreeLayout:
        """Returns the layout in page-locked host memory, without what components prepared."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> TreeLayout:
        def mapped(value: object) -> object:
            if isinstance(value, Chunks | Chains):
                return value.map(function)
            return function(value) if isinstance(value, Tensor) else value

        values: dict[str, Any] = {
            field.name: mapped(getattr(self, field.name)) for field in dataclasses.fields(self)
        }
        return dataclasses.replace(self, **values | {"prepared_attention": None, "conv_index": None})

    def for_attention(self) -> TreeLayout:
        """Returns the layout without the fields for recurrent layers."""
        return dataclasses.replace(self, predecessor=None, state_exports=None, chunks=None, chains=None)

    def with_prepared(self, prepared: Mapping[int | None, Any]) -> TreeLayout:
        return dataclasses.replace(self, prepared_attention=prepared)

    def dense_mask(self) -> Tensor:
        """Returns the attention mask, [N, M] bool, which defines what kernels compute. For small trees."""
        key = torch.arange(len(self.subtree_end), device=self.subtree_end.device)
        query = self.key_index[:, None]
        return (key <= query) & (query < self.subtree_end)

    def in_window(self, window: int) -> Tensor:
        """Returns [N, M] bool: whether a key is one of the ``window`` last tokens on the query's path.

        This holds for keys that ``dense_mask`` shows to the query. Other entries mean nothing.
        """
        depth = self.key_depths()
        return depth[self.key_index][:, None] - depth < window

    def key_depths(self) -> Tensor:
        """Returns [M] int64: the number of tokens before each key on its path. It waits for no device."""
        # All ancestors of a key are keys. So its depth is the number of keys before it, without those whose
        # subtrees have ended.
        end = self.subtree_end
        key = torch.arange(len(end), dtype=end.dtype, device=end.device)
        return key - torch.searchsorted(end.sort().values, key, right=True)
