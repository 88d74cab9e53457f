"""Runs the code blocks of the documentation and writes what they print into the ``text`` blocks below them.

It leaves an output with a line ``...``, which stands for any lines, as it is.

python -m tests.docs.update_outputs [PAGE ...]
"""

from __future__ import annotations

import contextlib
import sys
import tempfile
from pathlib import Path

from tests.support.page_runner import PAGES, run_page, runnable_blocks


def update(page: Path) -> None:
    """Replaces the outputs of one page."""
    before = text = page.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        results = list(run_page(page))
    for block, printed in reversed(results):
        if block.output is not None and "..." not in block.output.splitlines():
            start, end = block.output_span
            lines = [line.rstrip() for line in printed.strip("\n").splitlines()]
            text = text[:start] + "".join(f"{line}\n" for line in lines) + text[end:]
    if text != before:
        page.write_text(text, encoding="utf-8")
        print(f"updated {page}")


if __name__ == "__main__":
    for page in [Path(argument).resolve() for argument in sys.argv[1:]] or PAGES:
        if runnable_blocks(page):
            update(page)
