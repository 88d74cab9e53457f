"""TreePartitioner: the choice of a strategy, and checks of its partitions."""

from __future__ import annotations

from titan_tree.components.tree_partitioner import PARTITION_STRATEGIES, greedy, redundancy_free
from titan_tree.errors import UserError, unknown_name
from titan_tree.tree.costs import QWEN3_1_7B, ModelCosts
from titan_tree.tree.partition import Partition, PartitionPlan, one_pass
from titan_tree.tree.token_tree import TokenTree


class TreePartitioner:
    """Cuts token trees into partitions on the host (Tree Training, arXiv:2511.00413).

    Every token runs at least once, and the edges to its children are scored exactly once.

    Example: a root of 19k tokens has the children A (24k tokens), B (10k) and C (10k); A has two children of
    10k. The tree has 83k distinct tokens and 164k on its four paths. With max_tokens = 64k:

    | strategy        | executed tokens | partitions                                                         |
    |-----------------|-----------------|--------------------------------------------------------------------|
    | none            | 83k             | one partition of any size                                          |
    | single_path     | 121k            | traversals; paths in a traversal share one prefix and nothing else |
    | greedy          | 102k            | traversals that share all they can, filled in DFS order            |
    | multi_path      | 102k            | traversals that share all they can, with the fewest tokens         |
    | redundancy_free | 83k             | connected parts that read their context from the gateway cache     |

    "auto" is none if the tree fits max_tokens, else greedy or redundancy_free, by the model's estimated time.

    Args:
        strategy: "auto" or a name in ``PARTITION_STRATEGIES``.
        max_tokens: largest number of own tokens of a partition; "none" ignores it.
        max_chain_tokens: largest number of own tokens of a partition and all partitions above it, whose
            activations exist at the same time. A larger number makes fewer partitions (redundancy_free).
            None: the larger of max_tokens and the longest path.

    Raises:
        UserError: the strategy is unknown, or a number is out of range.
    """

    def __init__(
        self, strategy: str = "auto", max_tokens: int = 32_768, max_chain_tokens: int | None = None
    ) -> None:
        if strategy != "auto" and strategy not in PARTITION_STRATEGIES:
            raise unknown_name("partition strategy", strategy, ["auto", *PARTITION_STRATEGIES])
        for name, value in (("max_tokens", max_tokens), ("max_chain_tokens", max_chain_tokens)):
            if value is not None and value < 1:
                raise UserError(f"TreePartitioner: {name}: expected at least 1, got {value}")
        self.strategy, self.max_tokens, self.max_chain_tokens = strategy, max_tokens, max_chain_tokens

    def plan(self, tree: TokenTree, costs: ModelCosts = QWEN3_1_7B) -> PartitionPlan:
        """Returns the partitions of a tree, or of a forest (a tree with several roots).

        Args:
            tree: the tree or forest to cut.
            costs: the model's costs (``TreeModel.costs``), by which "auto" decides. The default is those of
                Qwen3-1.7B. ``TreeStep`` passes the costs of its model.

        Raises:
            UserError: the longest path exceeds what a traversal or a chain may hold, or the tree is too large
                for multi_path.
        """
        max_tokens, max_chain_tokens = self.max_tokens, self.max_chain_tokens
        if max_chain_tokens is not None:
            max_tokens = min(max_tokens, max_chain_tokens)  # a partition is part of its chain
        if self.strategy == "auto":
            return _choose(tree, max_tokens, max_chain_tokens, costs)
        with PARTITION_STRATEGIES.calling(self.strategy, "tree, max_tokens, max_chain_tokens"):
            partitions = list(PARTITION_STRATEGIES[self.strategy](tree, max_tokens, max_chain_tokens))
        return PartitionPlan(tree, self.strategy, tuple(partitions))


def one_partition(tree: TokenTree, max_tokens: int, max_chain_tokens: int | None) -> list[Partition]:
    """Returns one partition of all tokens, for the strategy "none". It ignores both limits."""
    return list(one_pass(tree).partitions)


def _choose(
    tree: TokenTree, max_tokens: int, max_chain_tokens: int | None, costs: ModelCosts
) -> PartitionPlan:
    """Returns the plan of "auto": none if the tree fits max_tokens, else greedy or redundancy_free.

    greedy repeats tokens; redundancy_free makes more partitions and reads context from the gateway cache. The
    estimate (``ModelCosts.partition_seconds``) adds up the time of tokens, of attention, of partitions and of
    context. A repeated token costs little in a small model, so greedy is chosen more often for small models.
    The plan's ``reason`` says why, with the estimated times if they were compared.
    """
    if len(tree) <= max_tokens:
        reason = f"the tree's {len(tree):,} tokens fit max_tokens = {max_tokens:,}"
        return PartitionPlan(tree, "none", one_pass(tree).partitions, reason)
    free = redundancy_free.partition(tree, max_tokens, max_chain_tokens)
    if (longest := tree.stats.longest_path) > max_tokens:
        reason = f"greedy cannot cut the longest path, {longest:,} tokens, to max_tokens = {max_tokens:,}"
        return PartitionPlan(tree, "redundancy_free", tuple(free), reason)
    filled = greedy.partition(tree, max_tokens, max_chain_tokens)
    candidates = {"redundancy_free": free, "greedy": filled}
    plans = [PartitionPlan(tree, name, tuple(parts)) for name, parts in candidates.items()]
    best, other = sorted(plans, key=lambda plan: _seconds(plan, costs))
    reason = f"{_describe(best, costs)} against {_describe(other, costs)}, estimated for one H200"
    return PartitionPlan(tree, best.strategy, best.partitions, reason)


def _seconds(plan: PartitionPlan, costs: ModelCosts) -> float:
    """Returns the estimated time of all forward and backward passes of a plan, in seconds."""
    # A token at position p sees p + 1 tokens.
    pairs = sum(int((plan.tree.positions[p.own_tokens] + 1).sum(dtype=int)) for p in plan.partitions)
    stats = plan.stats
    return costs.partition_seconds(stats.n_part, pairs, stats.n_forwards, stats.n_context)


def _describe(plan: PartitionPlan, costs: ModelCosts) -> str:
    stats = plan.stats
    sizes = f"{stats.n_part:,} tokens, {stats.n_forwards:,} forward passes"
    return f"{plan.strategy} {_seconds(plan, costs):.2f} s ({sizes})"
