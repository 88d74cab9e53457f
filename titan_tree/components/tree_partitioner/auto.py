"""auto: none if the tree fits max_tokens, else greedy or redundancy_free, by estimated time.

greedy repeats tokens; redundancy_free makes more partitions and reads context from the gateway cache. The
estimate (``ModelCosts.partition_seconds``) adds up the time of tokens, of attention, of partitions and of
context. A repeated token costs little in a small model, so greedy is chosen more often for small models.
"""

from __future__ import annotations

from titan_tree.components.tree_partitioner import greedy, none, redundancy_free
from titan_tree.tree.costs import ModelCosts
from titan_tree.tree.partition import PartitionPlan
from titan_tree.tree.token_tree import TokenTree


def choose(
    tree: TokenTree, max_tokens: int, max_chain_tokens: int | None, costs: ModelCosts
) -> PartitionPlan:
    """Returns the chosen plan. Its ``reason`` says why, with the estimated times if they were compared."""
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
    best, other = sorted(plans, key=lambda plan: seconds(plan, costs))
    reason = f"{_describe(best, costs)} against {_describe(other, costs)}, estimated for one H200"
    return PartitionPlan(tree, best.strategy, best.partitions, reason)


def seconds(plan: PartitionPlan, costs: ModelCosts) -> float:
    """Returns the estimated time of all forward and backward passes of a plan, in seconds."""
    # A token at position p sees p + 1 tokens.
    pairs = sum(int((plan.tree.positions[p.own_tokens] + 1).sum(dtype=int)) for p in plan.partitions)
    stats = plan.stats
    return costs.partition_seconds(stats.n_part, pairs, stats.n_forwards, stats.n_context)


def _describe(plan: PartitionPlan, costs: ModelCosts) -> str:
    stats = plan.stats
    sizes = f"{stats.n_part:,} tokens, {stats.n_forwards:,} forward passes"
    return f"{plan.strategy} {seconds(plan, costs):.2f} s ({sizes})"
