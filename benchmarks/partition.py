"""How each strategy cuts real trees: executed tokens, ERR and forward passes; with --seconds, its speed.

python -m benchmarks partition rollouts.jsonl.gz --tokenizer qwen.tiktoken.gz             # on a CPU
python -m benchmarks partition rollouts.jsonl.gz --tokenizer qwen.tiktoken.gz --seconds --trees 8
python -m benchmarks partition demo --seconds --trees 8

Each group of samples is one tree, and every assistant turn is a sample. Strategies that run whole paths
refuse a tree with a path longer than max_tokens. multi_path also refuses a tree with too many leaves. The
strategy none counts as refusing a tree of more than max_tokens tokens. The column "trees" says how many
trees a strategy accepted; all other columns count these trees only.

ERR is 1 - N_part / N_leaf, where N_leaf counts one row per leaf path. --seconds times whole steps on these
trees beside steps on one row per leaf path, see the columns of por. A row that is longer than
max_tokens runs in a forward pass of its own. The table is that of Tree Training (arXiv:2511.00413), figure 5,
and of its runs with limited memory.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from benchmarks import layouts
from titan_tree.cli.bench.record import Row
from titan_tree.components.tree_partitioner import PARTITION_STRATEGIES
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.sample_reader import SampleReader
from titan_tree.data.settings import DataConfig
from titan_tree.errors import UserError
from titan_tree.tree.partition import PlanStats
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree, reuse_ratio

KEYS = ("files", "max_tokens", "strategy")
RATIOS = ("ERR", "of operations")
QUICK = (
    "demo", "--trees", "1", "--flavor", "debug", "--layers", "1", "--seconds",
    "--strategy", "redundancy_free", *layouts.QUICK,
)  # fmt: skip
COLUMNS = (
    "max_tokens", "strategy", "trees", "N_leaf", "N_tree", "N_part", "ERR", "forwards", "chain peak",
    "operations x", "tree s", "rows s", "speed-up", "of operations", "tree GiB", "rows GiB",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("files", nargs="+", help='data files, or "demo"')
    add("--tokenizer", default="byte")
    add("--template", help="chat template (default: the tokenizer's)")
    add("--strategy", nargs="+", choices=list(PARTITION_STRATEGIES), default=list(PARTITION_STRATEGIES))
    add("--trees", type=int, help="the first trees of the files (default: all)")
    add("--seconds", action="store_true", help="also time steps; the arguments below are for this")
    layouts.add_arguments(parser, max_tokens=[8192, 16_384, 32_768])


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row per size of a forward pass and strategy."""
    groups = read_paths(args.files, args.tokenizer, args.template)[: args.trees]
    trees = list(map(TokenTree.from_paths, groups))
    rows: list[Row] = []
    cases: list[layouts.Case] = []
    for max_tokens in args.max_tokens:
        for strategy in args.strategy:
            stats = [plan_stats(strategy, max_tokens, tree) for tree in trees]
            name = f"{strategy}, {max_tokens:,}"
            accepted = [group for group, plan in zip(groups, stats, strict=True) if plan]
            if args.seconds and accepted:
                cases.append(layouts.Case(name, accepted, strategy, max_tokens))
            setting = {"files": " ".join(args.files), "case": name}
            rows.append(setting | table_row(strategy, max_tokens, stats))
    if cases:
        largest = argparse.Namespace(**vars(args) | {"max_tokens": max(args.max_tokens)})
        timed = {row["case"]: row for row in layouts.compare(cases, largest)}
        rows = [timed.get(row["case"], {}) | row for row in rows]
    return rows


def read_paths(files: list[str], tokenizer: str, template: str | None = None) -> list[list[TokenPath]]:
    """Returns the paths of each group of samples in the files."""
    reader = SampleReader(DataConfig(files=files), TreeTokenizer.load(tokenizer, template))
    return [reader.paths(group) for group in reader.files.groups()]


def plan_stats(strategy: str, max_tokens: int, tree: TokenTree) -> PlanStats | None:
    """Returns the plan's statistics, or None if the strategy refuses the tree or "none" cannot fit it."""
    if strategy == "none" and len(tree) > max_tokens:
        return None
    try:
        return TreePartitioner(strategy, max_tokens).plan(tree).stats
    except UserError:
        return None


def table_row(strategy: str, max_tokens: int, stats: Sequence[PlanStats | None]) -> Row:
    """Returns the row of one strategy; ``stats`` has an entry per tree."""
    accepted = [plan for plan in stats if plan is not None]
    row: Row = {
        "max_tokens": max_tokens,
        "strategy": strategy,
        "trees": f"{len(accepted)} of {len(stats)}",
    }
    if accepted:
        n_leaf, n_tree, n_part = (
            sum(getattr(plan, name) for plan in accepted) for name in ("n_leaf", "n_tree", "n_part")
        )
        row |= {"N_leaf": n_leaf, "N_tree": n_tree, "N_part": n_part}
        row["ERR"] = round(reuse_ratio(n_leaf, n_part), 4)
        row["forwards"] = sum(plan.n_forwards for plan in accepted)
        row["chain peak"] = max(plan.chain_peak for plan in accepted)
    return row
