"""TreePartitioner: a token tree -> partitions, each run in one forward.

none.py               the whole tree
traversals.py         what the next three share: a partition is whole paths, run without context
    single_path.py    with one shared prefix each: dynamic program
    multi_path.py     so that the fewest tokens run: exact, for trees of moderate size
    greedy.py         filled in DFS order: linear time
redundancy_free.py    connected pieces with gateways, no token twice; subtree_cut.py finds where to cut
auto.py               none, greedy or redundancy_free, by estimated time

A new strategy is a file with a function ``partition`` and a line in ``STRATEGIES``.
"""

from __future__ import annotations

from collections.abc import Callable

from titan_tree.components.tree_partitioner import (
    auto,
    greedy,
    multi_path,
    none,
    redundancy_free,
    single_path,
)
from titan_tree.errors import UserError
from titan_tree.tree.partition import Partition, PartitionPlan
from titan_tree.tree.token_tree import TokenTree

__all__ = ["STRATEGIES", "TreePartitioner"]

# (tree, max_tokens, max_chain_tokens) -> partitions
STRATEGIES: dict[str, Callable[[TokenTree, int, int | None], list[Partition]]] = {
    "none": none.partition,
    "single_path": single_path.partition,
    "multi_path": multi_path.partition,
    "greedy": greedy.partition,
    "redundancy_free": redundancy_free.partition,
}


class TreePartitioner:
    """Cuts token trees into partitions (Tree Training, arXiv 2511.00413), on the host.

    By example, a root of 19k tokens -> {A 24k -> {10k, 10k}, 10k, 10k}, which has 83k distinct tokens and
    164k on its four paths, with max_tokens = 64k:

    | strategy        | runs | in                                                                   |
    |-----------------|------|----------------------------------------------------------------------|
    | none            | 83k  | one forward, whatever its size                                       |
    | single_path     | 121k | traversals, groups of paths: one prefix is shared, the rest unmerged |
    | greedy          | 102k | traversals that share all they can, filled in DFS order              |
    | multi_path      | 102k | the same, so divided that the fewest tokens run                      |
    | redundancy_free | 83k  | connected pieces that read a gateway from their parent               |

    "auto" is none where the tree fits max_tokens, else greedy or redundancy_free, by estimated time. Every
    token runs at least once, and the edges to its children are scored exactly once.

    Args:
        strategy: see above.
        max_tokens: of one forward; "none" ignores it.
        max_chain_tokens: of a partition and all above it, whose activations are alive together. None: the
            larger of max_tokens and the longest path. More of it makes fewer forwards (redundancy_free).

    Raises:
        UserError: an unknown strategy, a number out of range.
    """

    def __init__(
        self, strategy: str = "auto", max_tokens: int = 32_768, max_chain_tokens: int | None = None
    ) -> None:
        names = ["auto", *STRATEGIES]
        if strategy not in names:
            raise UserError(
                f"TreePartitioner: strategy: expected one of {', '.join(names)}, got {strategy!r}"
            )
        for name, value in (("max_tokens", max_tokens), ("max_chain_tokens", max_chain_tokens)):
            if value is not None and value < 1:
                raise UserError(f"TreePartitioner: {name}: expected at least 1, got {value}")
        self.strategy, self.max_tokens, self.max_chain_tokens = strategy, max_tokens, max_chain_tokens

    def plan(self, tree: TokenTree) -> PartitionPlan:
        """The partitions of a tree, or of a forest (a tree with several roots).

        Raises UserError where a traversal cannot hold the longest path, a chain cannot, or the tree is too
        large for multi_path.
        """
        max_tokens, max_chain_tokens = self.max_tokens, self.max_chain_tokens
        if max_chain_tokens is not None:
            max_tokens = min(max_tokens, max_chain_tokens)  # a partition is part of its chain
        if self.strategy == "auto":
            return auto.choose(tree, max_tokens, max_chain_tokens)
        partitions = STRATEGIES[self.strategy](tree, max_tokens, max_chain_tokens)
        return PartitionPlan(tree, self.strategy, tuple(partitions))
