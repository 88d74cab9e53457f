"""The text, the JSON and the page of a certificate."""

from __future__ import annotations

import html
import json
import platform
from collections.abc import Iterable
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from typing import TYPE_CHECKING

from titan_tree.config.files import write_output
from titan_tree.errors import printable

if TYPE_CHECKING:
    from titan_tree.certify import Certificate

PACKAGES = "titan_tree", "torch", "transformers"
COLUMNS = ("check", "error", "noise floor", "limit", "")
MARKS = {True: "✓", False: "✗", None: "-"}
JSON_MARKER, PAGE_MARKER = '{\n  "passed": ', "<h1>Certificate of exactness</h1>"  # see ``check_output``
PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>{title}</title>
<style>
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }}
.verdict {{ padding: .7rem 1rem; border-left: .4rem solid {colour}; background: {colour}1a; }}
table {{ border-collapse: collapse; margin: 1rem 0; }}
td, th {{ text-align: left; vertical-align: top; padding: .25rem .8rem .25rem 0; }}
tr {{ border-bottom: 1px solid #8884; }}
td:not(:last-child) {{ white-space: nowrap; font-variant-numeric: tabular-nums; }}
</style>
<h1>Certificate of exactness</h1>
<p class="verdict">{verdict}</p>
<table>{facts}</table>
<table><tr>{head}</tr>{rows}</table>
<p>The first training step ran on token trees, and path by path. An error is the norm of a difference from the
step path by path in higher precision, relative to that step's norm. The noise floor is the error of the step
path by path in the precision of training. Computed by {versions}.</p>
</html>
"""


def text(certificate: Certificate) -> str:
    """Returns the verdict, the facts and the table of checks."""
    rows = [COLUMNS, *_rows(certificate)]
    widths = [max(len(row[i]) for row in rows) for i in range(4)]
    table = ["  ".join((*map(str.ljust, row, widths), row[4])).rstrip() for row in rows]
    width = max(map(len, certificate.facts))
    facts = [f"{name:<{width}}  {printable(value)}" for name, value in certificate.facts.items()]
    return "\n".join([certificate.verdict, "", *facts, "", *table])


def _rows(certificate: Certificate) -> list[tuple[str, ...]]:
    return [
        (
            f"{MARKS[check.passed]} {check.name}",
            *map(_number, (check.error, check.floor, check.limit)),
            check.found,
        )
        for check in certificate.checks
    ]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1e}" if value else "0"


def write_json(certificate: Certificate, path: str, inputs: Iterable[str] = (), force: bool = False) -> None:
    """Writes the certificate, and the versions of what computed it. See ``write_output``."""
    content = asdict(certificate) | {"versions": _versions()}
    write_output(path, json.dumps(content, indent=2) + "\n", JSON_MARKER, inputs, force)


def _versions() -> dict[str, str]:
    found = {name: version(name) for name in PACKAGES if find_spec(name)}
    now = datetime.now(UTC).isoformat(" ", "minutes")
    return {**found, "python": platform.python_version(), "time": now}


def write_page(certificate: Certificate, path: str, inputs: Iterable[str] = (), force: bool = False) -> None:
    """Writes one HTML page that needs no other file. See ``write_output``."""

    def row(values: tuple[str, ...], cell: str = "td") -> str:
        return "<tr>" + "".join(f"<{cell}>{html.escape(value)}</{cell}>" for value in values) + "</tr>\n"

    page = PAGE.format(
        title="PASSED" if certificate.passed else "FAILED",
        colour="#1a7f37" if certificate.passed else "#cf222e",
        verdict=html.escape(certificate.verdict),
        facts="".join(map(row, certificate.facts.items())),
        head=row(COLUMNS, "th").removeprefix("<tr>").removesuffix("</tr>\n"),
        rows="".join(map(row, _rows(certificate))),
        versions=html.escape(", ".join(map(" ".join, _versions().items()))),
    )
    write_output(path, page, PAGE_MARKER, inputs, force)
