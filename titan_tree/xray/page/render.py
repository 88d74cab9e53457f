"""Writes the X-ray page: one HTML file with the payload, the code and the styles. It loads nothing else."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from string import Template
from typing import Any

from titan_tree.config.files import write_output

MARKER = '<meta name="generator" content="titan-tree xray">'  # in the head of every page
_FOLDER = Path(__file__).parent
_MODULES = (  # imported ones first
    *("elements.js", "payload.js", "colours.js", "tree.js", "icicle.js", "plots.js"),
    *("overview.js", "page.js"),
)


def write_page(
    payload: Mapping[str, Any], path: Path, inputs: Iterable[str] = (), force: bool = False
) -> None:
    """Writes the page of a payload, which payload.py describes. It replaces an earlier page.

    Args:
        payload: what the page shows. Numbers must be finite; null stands for an unknown one.
        path: the HTML file.
        inputs: what the payload was read from, which is never overwritten.
        force: also replace a file that is no page.

    Raises:
        UserError: see ``write_output``.
    """
    packed = gzip.compress(json.dumps(payload, allow_nan=False, separators=(",", ":")).encode(), mtime=0)
    page = Template(_read("page.html")).substitute(
        marker=MARKER,
        title=html.escape(f"{payload['name']} · titan-tree xray"),
        style=_read("vendor/uPlot.min.css") + _read("page.css"),
        library=_read("vendor/uPlot.iife.min.js"),
        script="".join(map(_module, _MODULES)),
        payload=base64.b64encode(packed).decode(),
    )
    write_output(path, page, MARKER, inputs, force)


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _module(name: str) -> str:
    """Returns a module without its imports and exports: all modules share the scope of the page's script."""
    return re.sub(r"^import [^;]*;\n|^export ", "", _read(name), flags=re.MULTILINE)
