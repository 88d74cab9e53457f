"""Shows how much the samples of data files share, and what is trained.

titan-tree inspect FILE               a table with one row per token tree
titan-tree inspect FILE --report ID   where and why the samples of a tree diverge
titan-tree inspect FILE --show ID     a sample, with the tokens that the loss counts
titan-tree inspect FILE --json        the numbers of the table, for programs
titan-tree inspect FILE --tokenizer FOLDER --model FOLDER
                                      the table, with the bound of the speed-up for a model
"""

from __future__ import annotations

import argparse

from titan_tree.cli.data_arguments import add_data_arguments
from titan_tree.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree inspect``."""
    add = parser.add_argument
    add_data_arguments(parser)
    add(
        "--merge",
        choices=("group", "batch", "all"),
        default="group",
        help="group: one tree per group; batch: trees of up to --max-tokens tokens from each "
        "global batch, in file order; all: one tree of all samples",
    )
    for option, default, meaning in (
        ("--global-batch-groups", 8, "groups per global batch, for --merge batch"),
        ("--max-tokens", 32_768, "maximum tokens of a tree, for --merge batch"),
        ("--limit", 20, "rows of the table, ids of --show"),
    ):
        add(option, type=_positive, default=default, metavar="N", help=meaning)
    add(
        "--model",
        metavar="MODEL",
        help="also show the bound by the operations of a model: NAME:FLAVOR, such as qwen3:0.6B, or the "
        "folder of a Hugging Face snapshot",
    )
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--report", metavar="ID", help="show where and why the paths of one tree diverge")
    output.add_argument(
        "--show", metavar="ID", help="show one sample, or the first one of a tree, with its trained tokens"
    )
    output.add_argument("--json", action="store_true", help="print the statistics of all trees as JSON")
    add("--picture", action="store_true", help="with --report: draw the tree as well")


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected an integer, got {text!r}") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"expected at least 1, got {number}")
    return number


def run(args: argparse.Namespace) -> None:
    """Runs ``titan-tree inspect``. Raises UserError for malformed input."""
    if args.picture and args.report is None:
        raise UserError("--picture: expected --report ID as well; add it, or remove --picture")
    if args.model is not None and (args.report is not None or args.show is not None):
        raise UserError("--model: expected no --report or --show, which print no bound; remove one of them")
    from titan_tree.cli.inspect.tables import show  # imports what --help does not need

    show(args)
