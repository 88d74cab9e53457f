"""Shows how much the samples of data files share, and what is trained.

titan-tree inspect FILE               a table with one row per token tree
titan-tree inspect FILE --report ID   where and why the samples of a tree diverge
titan-tree inspect FILE --show ID     a sample, with the tokens that the loss counts
titan-tree inspect FILE --json        the numbers of the table, for programs
titan-tree inspect FILE data.sample.turns=last data.merge=batch
                                      with other values of the configuration's table [data]
titan-tree inspect FILE --tokenizer FOLDER --model FOLDER
                                      the table, with the bound of the speed-up for a model
"""

from __future__ import annotations

import argparse

from titan_tree.cli.data_arguments import add_data_arguments, add_overrides, count_to
from titan_tree.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree inspect``."""
    add = parser.add_argument
    add_data_arguments(parser)
    add_overrides(parser)
    add("--limit", type=count_to(10**9), default=20, metavar="N", help="rows of the table, ids of --show")
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


def run(args: argparse.Namespace) -> None:
    """Runs ``titan-tree inspect``. Raises UserError for malformed input."""
    if args.picture and args.report is None:
        raise UserError("--picture: expected --report ID as well; add it, or remove --picture")
    if args.model is not None and (args.report is not None or args.show is not None):
        raise UserError("--model: expected no --report or --show, which print no bound; remove one of them")
    from titan_tree.cli.inspect.tables import show  # imports what --help does not need

    show(args)
