"""Writes into docs/architecture.md which files and classes act in a dense step, from a trace of one.

python -m tests.docs.dense_step
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests.support.house import traced_step

PAGE = Path(__file__).parents[2] / "docs" / "architecture.md"
LIST = re.compile(r"(?<=<!-- dense step: begin -->\n).*(?=<!-- dense step: end -->)", re.DOTALL)


def table(acting: Mapping[str, Sequence[str]]) -> str:
    """Returns the files of each folder with their classes, as a table, and a sentence with the sums."""
    folders: dict[str, list[str]] = defaultdict(list)
    for file, classes in sorted(acting.items()):
        folder, _, name = file.rpartition("/")
        folders[folder or "titan_tree"].append(" ".join([f"`{name}`", *sorted(classes)]))
    rows = "".join(f"| {folder} | {'; '.join(files)} |\n" for folder, files in folders.items())
    num_classes = sum(map(len, acting.values()))
    return (
        f"Functions of {len(acting)} files and methods of {num_classes} classes run in a dense step "
        f"on one rank, on a CPU.\n`python -m tests.docs.dense_step` writes this list from a trace of one.\n\n"
        f"| folder | files, and classes whose methods run |\n|---|---|\n{rows}"
    )


if __name__ == "__main__":
    PAGE.write_text(LIST.sub(lambda _: table(traced_step()), PAGE.read_text()))
    print(f"wrote {PAGE}")
