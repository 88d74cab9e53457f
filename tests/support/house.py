"""Counts what a person meets who reads the code: sizes, arrows between rooms, and what acts in a dense step.

    python -m tests.support.house              # prints all counts
    python -m tests.support.house --trace      # prints what acts in a dense step, as JSON

A *room* is a folder or a file directly in titan_tree/. An *arrow* is an import from one room into another.
"""

from __future__ import annotations

import ast
import json
import re
import subprocess
import sys
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import FrameType

REPOSITORY = Path(__file__).parents[2]
ROOT = REPOSITORY / "titan_tree"
APPLICATIONS = {"__main__.py", "certify", "cli", "integrations", "rl", "scoring", "serve", "xray"}
# Where a newcomer starts.
TRAINER = ROOT / "run" / "trainer.py"
# A dense model on one rank, whose record is one line of JSON.
LINE = '{"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}\n'
STEP = """
folder = "{folder}/run"
[model]
flavor = "debug"
[data]
files = "{folder}/line.jsonl"
tokenizer = "byte"
global_batch_groups = 1
[training]
steps = 2
dtype = "float32"
[checkpoint]
interval = 0
[metrics]
loggers = ["csv"]
"""


@cache
def sources() -> dict[Path, str]:
    """Returns the text of every file of the package."""
    return {file: file.read_text() for file in sorted(ROOT.rglob("*.py"))}


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(sources()[file])


def room(file: Path) -> str:
    """Returns the name of the folder or file directly in titan_tree/ that holds ``file``."""
    return file.relative_to(ROOT).parts[0]


@cache
def imports(file: Path, types: bool) -> set[Path]:
    """Returns the package's files that a file imports, in functions too, and for types if ``types``."""
    modules = set(_imported(parsed(file), types))
    return {target for name in modules if (target := _file(name)) is not None} - {file}


def _imported(node: ast.AST, types: bool) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and node.module:
        yield node.module
        yield from (f"{node.module}.{alias.name}" for alias in node.names)
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.expr):  # no import stands within one
            continue
        is_for_types = isinstance(child, ast.If) and ast.unparse(child.test) == "TYPE_CHECKING"
        if types or not is_for_types:
            yield from _imported(child, types)


def _file(module: str) -> Path | None:
    path = REPOSITORY.joinpath(*module.split("."))
    return next((file for file in (path.with_suffix(".py"), path / "__init__.py") if file in sources()), None)


def arrows(types: bool) -> set[tuple[str, str]]:
    """Returns the pairs (importing room, imported room)."""
    pairs = {(room(file), room(target)) for file in sources() for target in imports(file, types)}
    return {(one, other) for one, other in pairs if one != other}


def circles(types: bool) -> list[set[Path]]:
    """Returns the groups of files that import each other, directly or not."""
    reach = {file: reached(file, types) for file in sources()}
    groups = {frozenset(f for f in reach[file] if file in reach[f]) for file in sources()}
    return [set(group) for group in groups if len(group) > 1]


def reached(file: Path, types: bool = True) -> set[Path]:
    """Returns the files that a file imports, directly or not, and the file itself."""
    found: set[Path] = set()
    waiting = [file]
    while waiting:
        if (file := waiting.pop()) not in found:
            found.add(file)
            waiting += imports(file, types)
    return found


def lines(files: set[Path]) -> int:
    return sum(sources()[file].count("\n") for file in files)


def num_classes(files: set[Path]) -> int:
    return sum(isinstance(node, ast.ClassDef) for file in files for node in parsed(file).body)


def acting() -> dict[str, set[str]]:
    """Runs two dense steps, and returns the classes whose methods run in them, by file.

    It needs a process of its own: what has been imported, cached and registered changes what runs.
    """
    ran: dict[str, set[str]] = defaultdict(set)
    is_training = False

    def watch(frame: FrameType, event: str, _: object) -> None:
        nonlocal is_training
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(f"{ROOT}/"):
            return
        is_training |= code.co_qualname == "Trainer.train"
        if is_training and not code.co_qualname.rpartition(".")[2].startswith("<"):
            ran[code.co_filename.removeprefix(f"{ROOT}/")].add(code.co_qualname)

    from titan_tree import Trainer, load_config

    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "line.jsonl").write_text(LINE)
        Path(folder, "step.toml").write_text(STEP.format(folder=folder))
        threading.setprofile(watch)
        sys.setprofile(watch)
        try:
            trainer = Trainer(load_config(f"{folder}/step.toml"))
            trainer.train()
            trainer.close()
        finally:
            threading.setprofile(None)  # type: ignore[arg-type]
            sys.setprofile(None)
    return {
        file: {name.split(".")[0] for name in names if re.match(r"\w+\.(?!<)", name)}
        for file, names in ran.items()
    }


@cache
def traced_step() -> dict[str, list[str]]:
    """Returns what ``acting`` returns, from a process of its own."""
    command = [sys.executable, "-m", "tests.support.house", "--trace"]
    run = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    traced: dict[str, list[str]] = json.loads(run.stdout.splitlines()[-1])
    return traced


def counts() -> dict[str, int]:
    """Returns all counts, by name."""
    files = set(sources())
    core = {file for file in files if room(file) not in APPLICATIONS}
    from_trainer = reached(TRAINER)
    pages = [*REPOSITORY.glob("*.md"), *(REPOSITORY / "docs").rglob("*.md")]
    tests = sorted((REPOSITORY / "tests").rglob("*.py"))
    return {
        "files": len(files),
        "lines": lines(files),
        "files of the core": len(core),
        "lines of the core": lines(core),
        "classes": num_classes(files),
        "rooms": len({room(file) for file in files}),
        "arrows between rooms": len(arrows(types=False)),
        "arrows with types": len(arrows(types=True)),
        "files in circles": sum(map(len, circles(types=True))),
        "files reached from the trainer": len(from_trainer),
        "lines reached from the trainer": lines(from_trainer),
        "Any": sum(
            len(re.findall(r"\bAny\b", text)) - bool(re.search(r"import .*\bAny\b", text))
            for text in sources().values()
        ),
        "words of documentation": sum(
            len(page.read_text().split()) for page in pages if "log" not in page.parts
        ),
        "lines of tests": sum(file.read_text().count("\n") for file in tests),
        "files acting in a dense step": len(traced_step()),
        "classes acting in a dense step": sum(map(len, traced_step().values())),
    }


if __name__ == "__main__":
    if "--trace" in sys.argv:
        print(json.dumps({file: sorted(classes) for file, classes in acting().items()}))
    else:
        for name, number in counts().items():
            print(f"{name:<32}{number:>8,}")
