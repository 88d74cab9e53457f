"""Code blocks and links of Markdown pages."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Block:
    """A fenced code block."""

    language: str
    code: str
    line: int  # number of the block's first line in the page
    not_run: str  # the reason in <!-- not run: reason --> above the block; "" if there is no such comment
    output: str | None  # content of the ``text`` block that follows immediately, if there is one
    output_span: tuple[int, int]  # position of that content in the page, or (-1, -1) without one


FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>.*) -->\n+)?"
    r"^```(?P<language>\w*)\n(?P<code>(?:.*\n)*?)^```$"
    r"(?=\n+(?:```text\n(?P<output>(?:.*\n)*?)^```$)?|\Z)",
    re.M,
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")


def blocks(page: Path) -> Iterator[Block]:
    """Yields the code blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        reason = match["reason"] or ""
        yield Block(match["language"], match["code"], line, reason, match["output"], match.span("output"))


def links(page: Path) -> list[str]:
    """Returns the targets of all links and images outside of code blocks."""
    return LINK.findall(FENCE.sub("", page.read_text(encoding="utf-8")))


def anchors(page: Path) -> set[str]:
    """Returns the names under which GitHub links to the page's headings."""
    headings = re.findall(r"^#+ (.*)$", FENCE.sub("", page.read_text(encoding="utf-8")), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
