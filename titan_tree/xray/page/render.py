"""Writes the X-ray page: one HTML file with the payload, the code and the styles. It loads nothing else."""

from __future__ import annotations

import base64
import gzip
import html
import json
import re
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Any

from titan_tree.errors import UserError

_FOLDER = Path(__file__).parent
_MODULES = (  # imported ones first
    *("elements.js", "payload.js", "colours.js", "tree.js", "estimators.js", "icicle.js", "plots.js"),
    *("overview.js", "page.js"),
)


def write_page(payload: Mapping[str, Any], path: Path) -> None:
    """Writes the page of a payload, which payload.py describes.

    Args:
        payload: what the page shows. Numbers must be finite; null stands for an unknown one.
        path: the HTML file. An existing file is replaced.

    Raises:
        UserError: the file cannot be written.
    """
    packed = gzip.compress(json.dumps(payload, allow_nan=False, separators=(",", ":")).encode(), mtime=0)
    page = Template(_read("page.html")).substitute(
        title=html.escape(f"{payload['name']} · titan-tree xray"),
        style=_read("vendor/uPlot.min.css") + _read("page.css"),
        library=_read("vendor/uPlot.iife.min.js"),
        script="".join(map(_module, _MODULES)),
        payload=base64.b64encode(packed).decode(),
    )
    try:
        path.write_text(page, encoding="utf-8", errors="replace")  # names of files may hold other bytes
    except OSError as error:
        raise UserError(
            f"{path}: the page cannot be written: {error.strerror}; name a file in a folder that exists"
        ) from None


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _module(name: str) -> str:
    """Returns a module without its imports and exports: all modules share the scope of the page's script."""
    return re.sub(r"^import [^;]*;\n|^export ", "", _read(name), flags=re.MULTILINE)
