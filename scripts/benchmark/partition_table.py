"""Shows how each strategy of TreePartitioner cuts real trees: executed tokens, ERR and forward passes.

    python scripts/benchmark/partition_table.py rollouts.jsonl.gz --tokenizer qwen.tiktoken.gz
    python scripts/benchmark/partition_table.py demo

Each group of samples is one tree, and every assistant turn is a sample. Strategies that run whole paths
refuse a tree with a path longer than max_tokens. multi_path also refuses a tree with too many leaves. The
strategy none counts as refusing a tree of more than max_tokens tokens. The column "trees" says how many
trees a strategy accepted; N_tree, N_part, ERR (1 - N_part / N_flat), forwards and chain peak count these
trees only.
"""

from __future__ import annotations

import argparse

from titan_tree import TokenTree, TreePartitioner, TreeTokenizer, UserError
from titan_tree.config import DataConfig
from titan_tree.data.sample_reader import SampleReader
from titan_tree.registry import PARTITION_STRATEGIES
from titan_tree.tree.partition import PlanStats


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tokenizer", default="byte")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[8192, 16_384, 32_768])
    args = parser.parse_args()
    trees = read_trees(args.files, args.tokenizer)
    print("| max_tokens | strategy | trees | N_tree | N_part | ERR | forwards | chain peak |")
    print("|---|---|---|---|---|---|---|---|")
    for max_tokens in args.max_tokens:
        for strategy in PARTITION_STRATEGIES:
            results = [plan_stats(strategy, max_tokens, tree) for tree in trees]
            print(table_row(strategy, max_tokens, results), flush=True)


def read_trees(files: list[str], tokenizer: str, template: str | None = None) -> list[TokenTree]:
    """Returns one tree per group of samples in the files."""
    reader = SampleReader(DataConfig(files=files), TreeTokenizer.load(tokenizer, template))
    return [TokenTree.from_paths(reader.paths(group)) for group in reader.groups()]


def plan_stats(strategy: str, max_tokens: int, tree: TokenTree) -> PlanStats | None:
    """Returns the plan's statistics, or None if the strategy refuses the tree or "none" cannot fit it."""
    if strategy == "none" and len(tree) > max_tokens:
        return None
    try:
        return TreePartitioner(strategy, max_tokens).plan(tree).stats
    except UserError:
        return None


def table_row(strategy: str, max_tokens: int, results: list[PlanStats | None]) -> str:
    """Returns a line of the Markdown table; ``results`` has an entry per tree."""
    accepted = [result for result in results if result is not None]
    cells = [f"{max_tokens:,}", strategy, f"{len(accepted)} of {len(results)}"]
    if accepted:
        n_flat, n_tree, n_part = (
            sum(getattr(x, name) for x in accepted) for name in ("n_flat", "n_tree", "n_part")
        )
        cells += [f"{n_tree:,}", f"{n_part:,}", f"{1 - n_part / n_flat:.4f}"]
        cells += [f"{sum(x.n_forwards for x in accepted):,}", f"{max(x.chain_peak for x in accepted):,}"]
    else:
        cells += ["-"] * 5
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
