"""TokenShard: the tokens and edges of a batch that one rank of a sequence-parallel group computes.

The P ranks of a group run the same trees. Everything that treats tokens one by one runs on an even split of
the tokens in DFS order: rank r has the r-th shard. Whatever mixes tokens runs on all tokens, for 1/P of the
heads (distributed/sequence_parallel.py). The layout of a shard therefore keeps the mask, chunks and exports
of the whole batch; only positions and numbers of paths are those of its own tokens.

An edge and its pairs belong to the rank that has the edge's source. The token to predict is stored with the
edge, so it does not matter which rank has that token.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import torch

from titan_tree.tree.batch import TreeBatch


class TokenShard(NamedTuple):
    """Which part of the tokens of every batch a rank computes: shard ``rank`` of ``num_ranks``."""

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
        """
        if self.num_ranks == 1:
            return batch
        tokens = self.tokens(len(batch))
        is_own = (batch.edge_source >= tokens.start) & (batch.edge_source < tokens.stop)
        layout, routed = batch.layout, batch.routed_experts
        temperature, support = batch.edge_temperature, batch.edge_support
        if support is not None:
            support = support[:, is_own[support[0]]]
            support = torch.stack([is_own.cumsum(0)[support[0]] - 1, support[1]])
        num_paths = None if layout.num_paths is None else layout.num_paths[tokens]
        return dataclasses.replace(
            batch,
            tokens=batch.tokens[tokens],
            layout=dataclasses.replace(layout, positions=layout.positions[tokens], num_paths=num_paths),
            edge_source=batch.edge_source[is_own] - tokens.start,
            edge_label=batch.edge_label[is_own],
            edge_number=batch.edge_number[is_own],
            pairs=batch.pairs.of_edges(is_own),
            edge_temperature=None if temperature is None else temperature[is_own],
            edge_support=support,
            routed_experts=None if routed is None else routed[:, tokens],
        )


ALL_TOKENS = TokenShard()  # the shard of a rank that computes whole batches
