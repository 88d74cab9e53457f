"""titan-tree: look at data before anything is trained on it.

titan-tree inspect rollouts.jsonl.gz                  how much the samples of each group share
titan-tree inspect rollouts.jsonl.gz --report TASK    where the samples of one group part, and why
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import count, islice
from typing import Any, BinaryIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.data.dataset import merged_trees
from titan_tree.data.readers import PathReader, find_files, holds_conversations, read_groups
from titan_tree.data.report import render_picture, render_report
from titan_tree.errors import UserError
from titan_tree.tree.token_tree import TokenTree, TreeStats

COLUMNS = ("paths", "N_flat", "N_tree", "POR", "bound", "nodes", "depth", "fan-out", "longest")
LEGEND = (
    "N_flat: summed path lengths in tokens; N_tree: distinct tokens; POR = 1 - N_tree / N_flat;\n"
    "bound = 1 / (1 - POR): the speed-up that sharing allows; depth: nodes on the deepest path;\n"
    "fan-out: mean children of a node that branches; longest: tokens of the longest path"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a command; returns the exit status: 0, or 2 where the input is at fault."""
    args = _parser().parse_args(argv)
    try:
        args.run(args)
    except UserError as error:
        print(f"titan-tree: error: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="titan-tree", description="Data tools of titan_tree.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    inspect = commands.add_parser(
        "inspect",
        help="how much the samples of a data file share",
        description="Statistics of the token trees of data files (JSON Lines, plain or gzip).",
    )
    inspect.set_defaults(run=_inspect)
    add = inspect.add_argument
    add("files", nargs="+", metavar="FILE", help="a file, a glob pattern, or demo for the embedded sample")
    add(
        "--tokenizer", help="a Hugging Face folder, a .tiktoken[.gz] file or byte (default for conversations)"
    )
    add("--template", help="chat template: chatml, qwen3 or a file (default: the tokenizer's own, or chatml)")
    add(
        "--turns",
        choices=("each", "last", "whole"),
        default="each",
        help="samples of a conversation (default each)",
    )
    add(
        "--strip-reasoning",
        action="store_true",
        help="chatml: drop the thoughts of earlier turns, as qwen3 does",
    )
    add(
        "--text-before-calls-is-reasoning",
        action="store_true",
        help="for agents without a reasoning channel: what they write before tool calls is thought",
    )
    add(
        "--merge",
        choices=("group", "batch", "all"),
        default="group",
        help="one tree per group (default), trees over each global batch (in file order), one tree over all",
    )
    add("--global-batch-groups", type=_positive, default=8, metavar="N", help="for --merge batch (default 8)")
    add("--max-tokens", type=_positive, default=32_768, metavar="N", help="for --merge batch (default 32768)")
    add(
        "--limit",
        type=_positive,
        default=20,
        metavar="N",
        help="rows shown (default 20); totals are over all",
    )
    add("--report", metavar="ID", help="instead of the table: where and why the paths of one tree part")
    add("--picture", action="store_true", help="with --report: a drawing of the tree as well")
    return parser


def _positive(text: str) -> int:
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def _inspect(args: argparse.Namespace) -> None:
    files = find_files(args.files)
    name = args.tokenizer
    if name is None and holds_conversations(files[0]):
        name = "byte"
    tokenizer = None if name is None else TreeTokenizer.load(name, args.template)
    trees = _trees(args, files, tokenizer)
    # Numbers are never cut: a narrower terminal wraps lines.
    console = Console(width=max(100, Console().width) if sys.stdout.isatty() else 160)
    if args.report is None:
        rows = [(name, tree.stats) for name, tree in trees]
        console.print(_table(rows, args.limit))
        console.print(LEGEND, style="dim", highlight=False)
        total = TreeStats.total([stats for _, stats in rows])
        if total.n_rows:
            console.print(
                f"routed experts: recorded for {total.n_rows:,} rows (a token in a layer); paths disagree on "
                f"{total.n_disagreeing / total.n_rows:.2%} of them, see data.replay",
                highlight=False,
            )
        largest, stats = max(rows, key=lambda row: row[1].n_tree)
        console.print(
            f"largest tree: {largest} with {stats.n_tree:,} tokens; above data.max_tokens it is cut",
            highlight=False,
            markup=False,
        )
        if tokenizer is not None and args.tokenizer is None:
            console.print("tokens are bytes here; --tokenizer counts those of a model", style="yellow")
        return
    asked = [tree for name, tree in trees if name == args.report]  # several where lines share an id
    if not asked:
        raise UserError(f"--report {args.report}: no tree has this name; the table names them")
    decode = tokenizer.decode if tokenizer else None
    for tree in asked:
        if args.picture:
            console.print(render_picture(tree, decode))
        console.print(render_report(tree, decode))


def _trees(
    args: argparse.Namespace, files: list[str], tokenizer: TreeTokenizer | None
) -> Iterator[tuple[str, TokenTree]]:
    """(name, tree) for every tree, read behind a progress bar."""
    options: dict[str, Any] = {"turns": args.turns}
    if args.strip_reasoning:
        options["keep_reasoning"] = False
    if args.text_before_calls_is_reasoning:
        options["text_before_calls_is_reasoning"] = True
    reader = PathReader(tokenizer, options)
    with Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("demo")

        def open_file(file: str) -> BinaryIO:
            progress.reset(task, description=file)
            return progress.open(file, "rb", task_id=task)

        groups = read_groups(files, open_file)
        if args.merge == "group":
            for group in groups:
                yield group.id, TokenTree.from_paths(reader.paths(group), "first")
        elif args.merge == "all":
            paths = [path for group in groups for path in reader.paths(group)]
            yield "all", TokenTree.from_paths(paths, "first")
        else:
            for step in count():
                paths = [p for group in islice(groups, args.global_batch_groups) for p in reader.paths(group)]
                if not paths:
                    return
                for number, tree in enumerate(merged_trees(paths, args.max_tokens, "first")):
                    yield f"batch {step} tree {number}", tree


def _table(rows: list[tuple[str, TreeStats]], limit: int) -> Table:
    table = Table("tree", box=box.SIMPLE, show_edge=False, padding=(0, 0, 0, 1), show_footer=True)
    total = _cells(TreeStats.total([stats for _, stats in rows]))
    for column, cell in zip(COLUMNS, total, strict=True):
        table.add_column(column, footer=cell, justify="right", no_wrap=True)
    table.columns[0].footer = f"all {len(rows):,}"
    for name, stats in rows[:limit]:
        table.add_row(escape(name), *_cells(stats))
    if len(rows) > limit:
        table.add_row(f"... {len(rows) - limit:,} more", style="dim")
    return table


def _cells(stats: TreeStats) -> list[str]:
    return [
        f"{stats.n_paths:,}",
        f"{stats.n_flat:,}",
        f"{stats.n_tree:,}",
        f"{stats.por:.3f}",
        f"{stats.n_flat / stats.n_tree:.2f}x",
        f"{stats.n_nodes:,}",
        f"{stats.max_depth}",
        f"{stats.branching:.2f}",
        f"{stats.longest_path:,}",
    ]


if __name__ == "__main__":
    sys.exit(main())
