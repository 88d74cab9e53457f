"""auto: none where the tree fits, else the cheaper of greedy and redundancy_free by estimated time.

The constants are for Qwen3-1.7B (28 layers, 16 query and 8 key/value heads of 128 dims, bf16) on one H200,
forward and backward. Only their ratios matter for the choice.
"""

from __future__ import annotations

from titan_tree.components.tree_partitioner import greedy, none, redundancy_free
from titan_tree.tree.partition import PartitionPlan
from titan_tree.tree.token_tree import TokenTree

FLOPS = 500e12  # per second, about what dense training reaches in bf16
TOKEN_SECONDS = 6 * 1.7e9 / FLOPS  # 6 FLOPs per parameter: 20 us
PAIR_SECONDS = 12 * 28 * 16 * 128 / FLOPS  # of a query and a key that it sees, 12 FLOPs per dim: 1.4 ns
# What partitions take beyond that, fitted to measured steps (docs/performance.md, Trees larger than memory).
FORWARD_SECONDS = 15e-3  # one more forward and backward: smaller kernels, gradients of all weights added
CONTEXT_SECONDS = 0.7e-6  # a row of keys and values of 28 layers, gathered twice, and its gradients


def choose(tree: TokenTree, max_tokens: int, max_chain_tokens: int | None) -> PartitionPlan:
    """The plan; its ``reason`` gives the times that were compared."""
    if len(tree) <= max_tokens:
        reason = f"the tree's {len(tree):,} tokens fit max_tokens = {max_tokens:,}"
        return PartitionPlan(tree, "none", tuple(none.partition(tree, max_tokens, max_chain_tokens)), reason)
    free = redundancy_free.partition(tree, max_tokens, max_chain_tokens)
    if (longest := tree.stats.longest_path) > max_tokens:
        reason = f"greedy cannot cut the longest path, {longest:,} tokens, to max_tokens = {max_tokens:,}"
        return PartitionPlan(tree, "redundancy_free", tuple(free), reason)
    filled = greedy.partition(tree, max_tokens, max_chain_tokens)
    candidates = {"redundancy_free": free, "greedy": filled}
    plans = [PartitionPlan(tree, name, tuple(parts)) for name, parts in candidates.items()]
    best, other = sorted(plans, key=seconds)
    reason = f"{_describe(best)} against {_describe(other)}, estimated for Qwen3-1.7B on an H200"
    return PartitionPlan(tree, best.strategy, best.partitions, reason)


def seconds(plan: PartitionPlan) -> float:
    """Estimated time of all forwards and backwards of a plan."""
    # A token sees its path, which has position + 1 tokens.
    pairs = sum(int((plan.tree.positions[p.own] + 1).sum(dtype=int)) for p in plan.partitions)
    return (
        TOKEN_SECONDS * plan.stats.n_part
        + PAIR_SECONDS * pairs
        + FORWARD_SECONDS * plan.stats.n_forwards
        + CONTEXT_SECONDS * plan.stats.n_context
    )


def _describe(plan: PartitionPlan) -> str:
    stats = plan.stats
    return f"{plan.strategy} {seconds(plan):.2f} s ({stats.n_part:,} tokens, {stats.n_forwards:,} forwards)"
