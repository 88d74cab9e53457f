"""The names of titan_tree.bench that the scripts of this folder use."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from titan_tree.bench import record
from titan_tree.bench.record import *  # noqa: F403
from titan_tree.bench.steps import *  # noqa: F403


def argument_parser(description: str | None, rounds: bool = True) -> argparse.ArgumentParser:
    """Returns a parser with the options that benchmarks share: ``--csv`` and, on request, ``--rounds``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds:
        parser.add_argument("--rounds", type=int, default=3, help="measurements of each contender, in turn")
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    return parser


def append_csv(path: Path | None, rows: Sequence[record.Row]) -> None:
    """Appends rows to a CSV file. Does nothing if ``path`` is None."""
    if path is not None:
        record.append_csv(path, rows)
