"""auto: none if the tree fits max_tokens, else greedy or redundancy_free, by estimated time.

greedy repeats tokens; redundancy_free makes more partitions and reads context from the gateway cache. The
estimate adds up the time of tokens, of attention, of forward passes and of context. Its constants hold for
forward and backward passes of Qwen3-1.7B (28 layers, 16 query and 8 key-value heads of dimension 128, bf16)
on one H200. Only their ratios matter for the choice.
"""

from __future__ import annotations

from titan_tree.components.tree_partitioner import greedy, none, redundancy_free
from titan_tree.tree.partition import PartitionPlan
from titan_tree.tree.token_tree import TokenTree

FLOPS = 500e12  # per second, about the speed of dense training in bf16
TOKEN_SECONDS = 6 * 1.7e9 / FLOPS  # 6 FLOPs per parameter: 20 us
PAIR_SECONDS = 12 * 28 * 16 * 128 / FLOPS  # per query and visible key, 12 FLOPs per dimension: 1.4 ns
# The additional time of partitions, fitted to measured steps.
FORWARD_SECONDS = 15e-3  # per partition: smaller kernels; all weight gradients are added once more
CONTEXT_SECONDS = 0.7e-6  # per context token: 28 layers gather keys and values twice and add gradients


def choose(tree: TokenTree, max_tokens: int, max_chain_tokens: int | None) -> PartitionPlan:
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
    best, other = sorted(plans, key=seconds)
    reason = f"{_describe(best)} against {_describe(other)}, estimated for Qwen3-1.7B on an H200"
    return PartitionPlan(tree, best.strategy, best.partitions, reason)


def seconds(plan: PartitionPlan) -> float:
    """Returns the estimated time of all forward and backward passes of a plan, in seconds."""
    # A token at position p sees p + 1 tokens.
    pairs = sum(int((plan.tree.positions[p.own_tokens] + 1).sum(dtype=int)) for p in plan.partitions)
    return (
        TOKEN_SECONDS * plan.stats.n_part
        + PAIR_SECONDS * pairs
        + FORWARD_SECONDS * plan.stats.n_forwards
        + CONTEXT_SECONDS * plan.stats.n_context
    )


def _describe(plan: PartitionPlan) -> str:
    stats = plan.stats
    sizes = f"{stats.n_part:,} tokens, {stats.n_forwards:,} forward passes"
    return f"{plan.strategy} {seconds(plan):.2f} s ({sizes})"
