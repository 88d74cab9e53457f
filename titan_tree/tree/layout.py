"""TreeLayout: the one piece of metadata that attention, recurrent layers and positions read."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from titan_tree.tree.chains import Chains
from titan_tree.tree.chunks import Chunks


@dataclass(frozen=True)
class TreeLayout:
    """Where N queries stand among M >= N keys of a packed forest in DFS order.

    Query q sees key k iff ``k <= key_index[q] < subtree_end[k]``: one interval per key, no N x N mask.
    Keys that are not queries are gateway context: rows that ancestors left for a later forward. Without
    context M = N and ``key_index`` is 0 .. N-1.
    """

    positions: Tensor  # [N] int32: depth in the path, for RoPE
    subtree_end: Tensor  # [M] int32: exclusive end of the subtree of each key, in key columns
    key_index: Tensor  # [N] int32, strictly increasing: the key column of each query
    # Of a partition (data/partition.py, GatewayRows); None where the tree is run as a whole.
    key_source: Tensor | None = None  # [M] int64: each key's row among those of the bank, then the N own
    exports: Tensor | None = None  # [X] int64: own tokens whose keys and values later forwards read
    # For layers with a state that passes from token to token.
    predecessor: Tensor | None = None  # [N] int32: the query before it on its path; -1: none, a root;
    # -2 - r: not here, a gateway's row r has the state after it.
    state_exports: Tensor | None = None  # [S] int64: own tokens after which later forwards want the state
    chunks: Chunks | None = None
    chains: Chains | None = None  # of chunks; part of it stays on the host
    # For sums over tokens: how many paths run through each, 0 of one that another forward counts.
    num_paths: Tensor | None = None  # [N] float32
    # What components derived from the above, once per batch.
    attention_plan: Any = None
    conv_plan: Any = None

    def to(self, device: torch.device | str, non_blocking: bool = False) -> TreeLayout:
        """The layout on another device; plans stay behind, components make them anew."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TreeLayout:
        """The layout in page-locked host memory, without plans."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> TreeLayout:
        def mapped(value: Any) -> Any:
            if isinstance(value, Chunks | Chains):
                return value.map(function)
            return function(value) if isinstance(value, Tensor) else value

        values = {field.name: mapped(getattr(self, field.name)) for field in dataclasses.fields(self)}
        return TreeLayout(**values | {"attention_plan": None, "conv_plan": None})

    def with_plan(self, plan: Any) -> TreeLayout:
        """The same layout, carrying a backend's ``attention_plan``."""
        return dataclasses.replace(self, attention_plan=plan)

    def dense_mask(self) -> Tensor:
        """[N, M] bool, the definition of the attention mask. For references and small trees only."""
        key = torch.arange(len(self.subtree_end), device=self.subtree_end.device)
        query = self.key_index[:, None]
        return (key <= query) & (query < self.subtree_end)
