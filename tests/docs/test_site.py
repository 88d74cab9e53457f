"""The site of the documentation: it is built without warnings, and is complete."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import titan_tree
from tests.support.page_runner import ROOT


@pytest.mark.slow
@pytest.mark.skipif(
    importlib.util.find_spec("mkdocs") is None, reason='needs mkdocs: pip install -e ".[docs]"'
)
def test_the_site_is_built_strictly_with_all_pages_and_public_names(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr
    pages = {file.relative_to(ROOT / "docs") for file in (ROOT / "docs").rglob("*.md")}
    built = {
        page.with_name("index.html") if page.stem == "README" else page.with_suffix(".html") for page in pages
    }
    built |= {Path("pages.html"), Path("security.html")}  # docs/README.md, SECURITY.md
    assert [page for page in built if not (tmp_path / page).exists()] == []
    names = {name for name in titan_tree.__all__ if name != "__version__"}
    api = (tmp_path / "api.html").read_text()
    assert {name for name in names if 'id="titan_tree.' not in api or f'.{name}"' not in api} == set()
    front = (tmp_path / "index.html").read_text()
    assert "img/ratio.png" in front  # README.md
    assert "<strong>init</strong>" not in (tmp_path / "configuration.html").read_text()
    assert "https://unpkg.com" not in front  # no request to other servers
    assert re.search(r"What you need next:\s*<ul>", (tmp_path / "pages.html").read_text())  # a nested list
    text = (tmp_path / "llms.txt").read_text()
    addresses = re.findall(r"^- \[[^\]]+\]\(([^)]+)\)", text, re.MULTILINE)
    assert set(map(str, built)) | {"api.html"} == set(addresses)
