"""Shows what rollouts and sessions of coding agents repeat, and draws their trees on a page.

It needs no GPU and no model.

titan-tree xray ~/.claude/projects          all sessions of Claude Code
titan-tree xray rollouts.jsonl --tokenizer /models/Qwen3-1.7B
titan-tree xray outputs/run                 a run's folder: its curves, and the data that it trained on
titan-tree xray demo --json > xray.json     the numbers of the page, for programs

A folder is searched for files of any format of docs/data.md. Broken files and lines are counted and left out.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
from pathlib import Path

from titan_tree.cli.data_arguments import (
    FILES,
    add_data_arguments,
    add_force_argument,
    add_overrides,
    add_plugins_argument,
    count_to,
    data_config,
    progress_bar,
)
from titan_tree.errors import UserError, printable

SHOWN_FILES = 3  # in the title


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree xray``."""
    add = parser.add_argument
    add_data_arguments(parser, files=f"{FILES}, a folder to search, or the folder of a run", metavar="PATH")
    add_overrides(parser)
    page = "the page to write (default: xray.html)"
    add("-o", "--out", type=os.path.expanduser, metavar="FILE", help=page)
    add_force_argument(parser)
    add("--json", action="store_true", help="print the numbers of the page as JSON, and write no page")
    add(
        "--no-text",
        action="store_true",
        help="leave out all texts, ids and pictures, so that the numbers can be shared",
    )
    add("--show-secrets", action="store_true", help="do not hide what looks like keys and passwords")
    for option, meaning in (
        ("--max-tokens", "also show partitions of at most N tokens"),
        ("--ranks", "also show which of N ranks trains on each tree"),
    ):
        add(option, type=count_to(10**6), nargs="+", default=[], metavar="N", help=meaning)
    add_plugins_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Runs ``titan-tree xray``. Raises UserError if there is nothing to show."""
    from titan_tree.components.tree_tokenizer import TreeTokenizer
    from titan_tree.config.files import check_output
    from titan_tree.data.readers import DEMO
    from titan_tree.data.sample_reader import SampleReader
    from titan_tree.xray.page.render import MARKER, write_page
    from titan_tree.xray.payload import Xray
    from titan_tree.xray.rendering import Renderer
    from titan_tree.xray.runs import RUN_FILES, is_run, load_run
    from titan_tree.xray.sources import Sources

    if args.json and args.out is not None:
        raise UserError("--out: expected no page together with --json; remove one of them")
    out = "xray.html" if args.out is None else args.out
    name, curves = ", ".join(args.files[:SHOWN_FILES]), None
    if (more := len(args.files) - SHOWN_FILES) > 0:
        name += f" and {more:,} more"
    data = data_config(args)
    tokenizer = TreeTokenizer.load(data.tokenizer, data.template) if data.tokenizer else None
    folder = os.path.expanduser(args.files[0])
    if len(args.files) == 1 and is_run(folder):
        if args.overrides or args.format:
            raise UserError(
                f"{args.files[0]}: expected no keys of [data] beside the folder of a run, which has its own; "
                "remove them, or name the run's data files instead"
            )
        config, of_run, curves = load_run(folder, args.plugins)
        tokenizer, data = tokenizer or of_run, config.data
    sources = Sources(data.files, data.format)
    read = [*sources.files, *(os.path.join(folder, name) for name in RUN_FILES)]
    read += filter(None, (args.tokenizer, args.template, data.tokenizer, data.template))
    if not args.json:
        check_output(out, MARKER, read, args.force)  # reading may take minutes
    xray = Xray(
        sources,
        # ``sources`` reads the files. The reader makes samples of their groups.
        Renderer(SampleReader(dataclasses.replace(data, files=[DEMO], weights=None), tokenizer)),
        name=name,
        has_text=not args.no_text,
        max_tokens=args.max_tokens,
        ranks=args.ranks,
        curves=curves,
        has_secrets=args.show_secrets,
    )
    with progress_bar() as open_file:
        payload = xray.payload(open_file)
    if args.json:
        print(json.dumps(payload, separators=(",", ":")))
        return
    for line in (*payload["sentences"], *payload["notes"]):
        print(line)
    write_page(payload, Path(out), read, args.force)
    print(f"The page: {printable(out)}")
