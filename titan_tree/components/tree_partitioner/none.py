"""none: the whole tree in one partition of any size."""

from __future__ import annotations

from titan_tree.tree.partition import Partition, one_pass
from titan_tree.tree.token_tree import TokenTree


def partition(tree: TokenTree, max_tokens: int, max_chain_tokens: int | None) -> list[Partition]:
    """Returns one partition of all tokens; ignores both limits."""
    return list(one_pass(tree).partitions)
