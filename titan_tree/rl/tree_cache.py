"""TreeCache: keys and values for sampling. Tokens that several rows share are stored, and read, once.

B rows, N distinct tokens of their contexts, T tokens of room for each turn, L layers, H query heads, K
key-value heads, D head dim. The cache has M = N + B * T columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from titan_tree.components.backends import PLAIN
from titan_tree.components.tree_attention import triton_kernels
from titan_tree.components.tree_attention.block_lists import DecodingLists, decoding_lists
from titan_tree.rl.sampler import distinct_contexts
from titan_tree.tree.context import Ids
from titan_tree.tree.token_tree import TokenTree


class Forest(NamedTuple):
    """The tree of a batch's contexts. Each row has a turn of its own, which follows its context.

    Columns number the tokens of contexts and turns in DFS order. Rows are in this order, too.

    Attributes:
        contexts: the tree of N tokens.
        row: [B], the index of each row among the contexts that were given.
        path: [B], the path of ``contexts`` that is each row's context.
        last: [B], the token of ``contexts`` that ends the context of each row.
        column: [N], the column of each token.
        start: [B], the column of the first token of each turn. The others follow it.
        end: [M], the exclusive end of each column's subtree, see ``TreeLayout``.
    """

    contexts: TokenTree
    row: np.ndarray
    path: np.ndarray
    last: np.ndarray
    column: np.ndarray
    start: np.ndarray
    end: np.ndarray

    @staticmethod
    def of(contexts: Sequence[Ids], size: int) -> Forest:
        """Returns the forest of one row per context, of which several may be equal, and turns of size T."""
        paths, numbers = distinct_contexts(contexts)
        path, tree = np.array(numbers), TokenTree.from_paths(paths)
        last = tree.path_index[tree.path_offsets[path + 1] - 1].astype(np.int64)
        row = last.argsort(kind="stable")
        last, path = last[row], path[row]
        token = np.arange(len(tree) + 1)
        columns = token + size * np.searchsorted(last, token)  # after the turns of all rows that end earlier
        start = last + 1 + size * np.arange(len(last))
        end = np.empty(columns[-1], np.int32)
        end[columns[:-1]] = columns[tree.subtree_end]
        end[start[:, None] + np.arange(size)] = start[:, None] + size
        return Forest(tree, row, path, last, columns[:-1], start, end)


class TreeCache(NamedTuple):
    """Keys and values of a forest.

    Attributes:
        keys_values: [L, 2, M, K, D].
        end: [M] int32, see ``Forest``.
        start: [B], the column of the first token of each turn.
        position: [B], the position of this token, which is the size of the context.
        rope_position: [B], what rotary embeddings read instead, which is less behind images.
        size: T.
        seen: [B, P + T], the columns of each row's context of up to P tokens, and of its turn. None if the
            kernel ``decode`` computes attention: on a GPU, unless it refuses the dtype or the head dim.
    """

    keys_values: Tensor
    end: Tensor
    start: Tensor
    position: Tensor
    rope_position: Tensor
    size: int
    seen: Tensor | None

    @staticmethod
    def of(forest: Forest, size: int, keys_values: Tensor) -> TreeCache:
        """Returns the cache of a forest with turns of this size. ``keys_values`` must hold zeros."""
        device = keys_values.device
        position = forest.contexts.positions[forest.last] + 1
        rope_position = forest.contexts.rope_positions[..., forest.last] + 1
        seen, (keys, values) = None, keys_values[0]
        if device.type == "cpu" or triton_kernels.refusal(keys, values, PLAIN, deterministic=False):
            seen = torch.zeros(len(position), position.max() + size, dtype=torch.long)
            for row, (i, start) in enumerate(zip(forest.path, forest.start, strict=True)):
                columns = np.append(forest.column[forest.contexts.indices_of(i)], start + np.arange(size))
                seen[row, : len(columns)] = torch.from_numpy(columns)
            seen = seen.to(device)
        # All axes of the position of text are equal.
        rope_position = rope_position.reshape(-1, len(position))[0]
        arrays = forest.end, forest.start, position, rope_position
        end, start, depth, rope = (torch.from_numpy(x).to(device) for x in arrays)
        return TreeCache(keys_values, end, start, depth, rope, size, seen)

    def select(self, rows: Tensor) -> TreeCache:
        """Returns the cache of some rows. It shares the memory of keys and values."""
        seen = None if self.seen is None else self.seen[rows]
        start, position, rope_position = (x[rows] for x in (self.start, self.position, self.rope_position))
        return self._replace(start=start, position=position, rope_position=rope_position, seen=seen)

    def block_lists(self, num_columns: int) -> DecodingLists | None:
        """Returns what ``decode`` reads for the first ``num_columns`` of each turn; with ``seen``, None."""
        if self.seen is not None:
            return None
        num_columns = min(num_columns, self.size)
        unused = self.start[:, None] + torch.arange(num_columns, self.size, device=self.start.device)
        end = self.end.index_fill(0, unused.flatten(), 0)
        return decoding_lists(end, self.start.int(), self.start.int() + (num_columns - 1))

    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, position: Tensor, column: Tensor, lists: DecodingLists | None
    ) -> Tensor:
        """Returns the attention [B, H, D] of one token of each turn.

        Args:
            q: [B, H, D].
            k, v: [M, K, D], keys and values of a layer.
            position, column: [B], those of the token. Columns are int32.
            lists: the result of ``block_lists``.
        """
        if lists is not None:
            return triton_kernels.decode(q, k, v, self.end, column, lists)
        assert self.seen is not None
        visible = torch.arange(self.seen.shape[1], device=q.device) <= position[:, None]
        q, k, v = q[:, :, None], k[self.seen].transpose(1, 2), v[self.seen].transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible[:, None, None], enable_gqa=True)
        return out[:, :, 0]
