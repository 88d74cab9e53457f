"""The code in README.md and docs/extending.md passes ruff and mypy, and mypy knows every public name."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import titan_tree
from tests.support.markdown import blocks
from tests.support.page_runner import ROOT

README_BLOCKS, EXTENDING_BLOCKS = (
    [block.code for block in blocks(ROOT / page) if block.language == "python"]
    for page in ("README.md", "docs/extending.md")
)
EXTENSIONS = "\n\n".join(block.strip() for block in EXTENDING_BLOCKS) + "\n"


@pytest.mark.slow
def test_ruff_accepts_the_examples_of_the_page_on_extensions() -> None:
    pytest.importorskip("ruff")
    # The blocks share a namespace, so each one may have imports.
    command = [sys.executable, "-m", "ruff", "check", "--ignore=E402,F811", "--stdin-filename=page.py", "-"]
    run = subprocess.run(command, cwd=ROOT, input=EXTENSIONS, capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.timeout(900)  # without a cache mypy reads all of torch
def test_mypy_accepts_the_code_in_the_docs_and_knows_every_public_name(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    files = {f"readme_{number}.py": code for number, code in enumerate(README_BLOCKS)}
    files["extending.py"] = EXTENSIONS
    names = [name for name in titan_tree.__all__ if name != "__version__"]
    files["names.py"] = f"from titan_tree import __version__, {', '.join(names)}\n"
    files["wrong.py"] = "from titan_tree import TokenTree\n\nTokenTree.from_path(1)\n"
    for name, code in files.items():
        (tmp_path / name).write_text(code)
    command = [sys.executable, "-m", "mypy", "--config-file", "pyproject.toml"]
    run = subprocess.run(
        [*command, *(str(tmp_path / name) for name in files)],
        cwd=ROOT,
        env=os.environ | {"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    # A cached result shows the folder of an earlier run, so look for the files' names only.
    errors = [line for line in run.stdout.splitlines() if Path(line.partition(":")[0]).name in files]
    assert len(README_BLOCKS) >= 1
    assert len(errors) == 1, run.stdout + run.stderr
    assert 'wrong.py:3: error: "type[TokenTree]" has no attribute "from_path"' in errors[0]
