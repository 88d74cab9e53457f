"""TreePartitioner: cuts a token tree into partitions, each run in one forward pass.

partitioner.py      TreePartitioner
traversals.py       code shared by the next three files: a *traversal* runs whole paths, without context
single_path.py      each traversal shares one prefix: a dynamic program
multi_path.py       the fewest executed tokens: exact, for trees of moderate size
greedy.py           fills traversals in DFS order: linear time
redundancy_free.py  runs every token once, in connected parts that read from a gateway cache
subtree_cut.py      where redundancy_free cuts subtrees that are too large

A new strategy is one file with a function ``partition(tree, max_tokens, max_chain_tokens)`` that returns
partitions, and one line in ``PARTITION_STRATEGIES``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from titan_tree.config.registry import Registry

if TYPE_CHECKING:
    from titan_tree.tree.partition import Partition
    from titan_tree.tree.token_tree import TokenTree

# Functions (tree, max_tokens, max_chain_tokens) -> partitions.
PARTITION_STRATEGIES: Registry[Callable[[TokenTree, int, int | None], Iterable[Partition]]] = Registry(
    "partition strategy",
    {
        "none": "titan_tree.components.tree_partitioner.partitioner:one_partition",
        "single_path": "titan_tree.components.tree_partitioner.single_path:partition",
        "multi_path": "titan_tree.components.tree_partitioner.multi_path:partition",
        "greedy": "titan_tree.components.tree_partitioner.greedy:partition",
        "redundancy_free": "titan_tree.components.tree_partitioner.redundancy_free:partition",
    },
    key="partition.strategy",
)
