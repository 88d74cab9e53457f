"""The code in README.md and docs/ runs, prints what the pages show, and names files and keys that exist.

A comment ``<!-- not run: reason -->`` above a block excludes it. If a message changes,
``python -m tests.docs.update_outputs`` writes the new output into the pages.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from tests.support.cases import for_each
from tests.support.markdown import anchors, blocks, links
from tests.support.page_runner import PAGES, ROOT, run_page, runnable_blocks

NOT_RUN = 2  # blocks with the comment

NUMBER = re.compile(r"-?\d+\.\d+(?:e[+-]?\d+)?")


def name(page: Path) -> str:
    return str(page.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.exhaustive if name(page) == "docs/memory.md" else [])
        for page in PAGES
        if runnable_blocks(page) and page.parent.name != "log"  # a log describes the code of its day
    ],
    ids=name,
)
def test_code_blocks_run_and_print_what_the_page_shows(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for block, printed in run_page(page):
        if block.output is not None:
            assert_same_output(printed, block.output, f"{name(page)}:{block.line}")


@for_each("page", PAGES)
def test_relative_links_point_to_files_and_headings_that_exist(page: Path) -> None:
    for link in links(page):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_no_block_is_excluded_by_accident() -> None:
    excluded = [f"{name(page)}:{block.line}" for page in PAGES for block in blocks(page) if block.not_run]
    assert len(excluded) == NOT_RUN, excluded


def assert_same_output(printed: str, shown: str, where: str) -> None:
    """Compares text and integers exactly, and decimal fractions up to rounding.

    A line ``...`` of ``shown`` stands for any lines.
    """
    got, expected = ("\n".join(map(str.rstrip, text.strip("\n").splitlines())) for text in (printed, shown))
    patterns = [
        "(?s:.*)" if line == "..." else f"({NUMBER.pattern})".join(map(re.escape, NUMBER.split(line)))
        for line in expected.splitlines()
    ]
    match = re.fullmatch("\n".join(patterns), got)
    message = f"{where}: printed\n{printed}\nbut the page shows\n{shown}"
    assert match, message
    for number, shown_number in zip(match.groups(), NUMBER.findall(expected), strict=True):
        assert math.isclose(float(number), float(shown_number), rel_tol=2e-3, abs_tol=2e-3), message
