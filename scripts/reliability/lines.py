"""Reads mutated lines of data files. Each must be read correctly, or refused in one line with file and line.

A trial reads 1,000 lines with the generators of the test suite: lines of titan_tree's own format, which are
compared with a plain interpretation of the JSON, and rows of all other formats.
"""

from __future__ import annotations

import logging
import random
import sys
from pathlib import Path

from training import ROOT, check

TRIALS = 100
LINES = 1000
KINDS = ("own format", "other formats")


def prepare(work: Path) -> None:
    sys.path.insert(0, str(ROOT))  # for tests/
    logging.getLogger("titan_tree").setLevel(logging.ERROR)  # hints about readable lines


def trial(kind: str, draw: random.Random, work: Path, folder: Path) -> str:
    """Reads lines that the trial's number determines. Returns how many were read and refused."""
    from tests.data.fuzz_formats import fuzz
    from tests.support.mutated_lines import check_lines

    seed = draw.randrange(2**32)
    if kind == "own format":
        outcomes = check_lines(LINES, seed)
    else:
        outcomes = fuzz(LINES, seed, folder)
        neither = outcomes.keys() - {"read", "refused"}
        check(not neither, f"messages without a place or of several lines: {sorted(neither)[:1]}")
    return f"seed {seed}: {outcomes['read']} read, {outcomes['refused']} refused"
