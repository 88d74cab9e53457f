"""What each strategy of TreePartitioner makes of real trees: tokens run, ERR and forwards, as Markdown.

    python scripts/partition_table.py rollouts.jsonl.gz --tokenizer qwen.tiktoken.gz --max-tokens 8192 16384

One tree per group, every assistant turn a sample. A strategy that refuses a tree (a path longer than
max_tokens, too many leaves for multi_path) is left out of it: "trees" says how many it took, and N_tree,
N_part and ERR are of these.
"""

from __future__ import annotations

import argparse

from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.readers import PathReader, find_files, read_groups
from titan_tree.errors import UserError
from titan_tree.registry import PARTITION_STRATEGIES
from titan_tree.tree.partition import PlanStats
from titan_tree.tree.token_tree import TokenTree


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tokenizer", default="byte")
    parser.add_argument("--max-tokens", type=int, nargs="+", default=[8192, 16_384, 32_768])
    args = parser.parse_args()
    reader = PathReader(TreeTokenizer.load(args.tokenizer), {})
    trees = [TokenTree.from_paths(reader.paths(group)) for group in read_groups(find_files(args.files))]
    print("| max_tokens | strategy | trees | N_tree | N_part | ERR | forwards | chain peak |")
    print("|---|---|---|---|---|---|---|---|")
    for max_tokens in args.max_tokens:
        for strategy in PARTITION_STRATEGIES:
            print(
                row(strategy, max_tokens, [stats(strategy, max_tokens, tree) for tree in trees]), flush=True
            )


def stats(strategy: str, max_tokens: int, tree: TokenTree) -> PlanStats | None:
    """None where the strategy refuses the tree; "none" does where the tree does not fit."""
    if strategy == "none" and len(tree) > max_tokens:
        return None
    try:
        return TreePartitioner(strategy, max_tokens).plan(tree).stats
    except UserError:
        return None


def row(strategy: str, max_tokens: int, results: list[PlanStats | None]) -> str:
    taken = [result for result in results if result is not None]
    cells = [f"{max_tokens:,}", strategy, f"{len(taken)} of {len(results)}"]
    if taken:
        n_flat, n_tree, n_part = (
            sum(getattr(x, name) for x in taken) for name in ("n_flat", "n_tree", "n_part")
        )
        cells += [f"{n_tree:,}", f"{n_part:,}", f"{1 - n_part / n_flat:.4f}"]
        cells += [f"{sum(x.n_forwards for x in taken):,}", f"{max(x.chain_peak for x in taken):,}"]
    else:
        cells += ["-"] * 5
    return "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
