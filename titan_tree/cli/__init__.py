"""The command titan-tree: tools for data. Training starts with `torchrun -m titan_tree.train`.

To add a verb, write titan_tree/cli/VERB.py with two functions, ``add_arguments(parser)`` and ``run(args)``,
and add a line to ``VERBS``. The module's docstring becomes the verb's --help text.
"""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence
from importlib import import_module

from titan_tree.errors import UserError

VERBS = {  # name -> summary; a verb's module is imported only when the verb runs
    "inspect": "show how much the samples of data files share, and what is trained",
    "ingest": "tokenize data files into a token store",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a verb and returns the exit status: 0, 2 for wrong input, 1 if stdout closed, 130 after Ctrl-C."""
    argv = sys.argv[1:] if argv is None else argv
    args = _parser(argv[0] if argv else None).parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape what the terminal's encoding lacks
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        args.run(args)
        sys.stdout.flush()
    except UserError as error:
        print(f"titan-tree: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader of a pipe, such as head, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes stdout at exit
        return 1
    except KeyboardInterrupt:
        return 130
    return 0


def _parser(verb: str | None) -> argparse.ArgumentParser:
    """Returns a parser that knows the names of all verbs, and the arguments of ``verb``."""
    parser = argparse.ArgumentParser(prog="titan-tree", description="Data tools of titan_tree.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    for name, summary in VERBS.items():
        raw = argparse.RawDescriptionHelpFormatter
        verb_parser = verbs.add_parser(name, help=summary, formatter_class=raw)
        if name == verb:
            module = import_module(f"{__name__}.{name}")
            verb_parser.description = module.__doc__
            module.add_arguments(verb_parser)
            verb_parser.set_defaults(run=module.run)
    return parser
