"""Finds or creates the Python environment that titan_tree runs in, and prints its interpreter on stdout.

    python3 scripts/environment.py [EXTRA]        # EXTRA: test or dev, see pyproject.toml

If the interpreter that runs this script has a supported torch, that torch is used and no other is installed.
The interpreter itself is used if it has all other packages too. Otherwise the missing packages are installed
into .venv, which also sees the packages of that interpreter. Without a supported torch, .venv gets everything
from constraints.txt.

scripts/setup.sh calls this script with Python 3.11 or later. It uses the standard library only.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CONSTRAINTS = ROOT / "constraints.txt"
VENV = ROOT / ".venv"
# Contains the path of the base interpreter. A .venv without this file stays untouched.
MADE_BY = VENV / "made-by-titan_tree"
STATE = ROOT / "build" / "environment.json"  # the result of the last set-up that finished


def main(extra: str) -> None:
    """Prints the interpreter; sets up its environment if the last set-up does not fit."""
    if Path(sys.prefix).resolve() == VENV and MADE_BY.exists():  # .venv is active: start from its base
        below = MADE_BY.read_text().strip()
        os.execv(below, [below, __file__, extra])

    needed = requirements(extra)
    base = {
        "root": str(ROOT),
        "python": sys.executable,
        "version": sys.version,
        "torch": installed("torch"),
        "constraints": hashlib.sha256(CONSTRAINTS.read_bytes()).hexdigest(),
    }
    state = json.loads(STATE.read_text()) if STATE.exists() else {}
    ready = state.get("base") == base and os.access(state["interpreter"], os.X_OK)
    if not (ready and set(needed) <= set(state["requirements"])):
        interpreter = set_up(extra, needed, keep_venv=ready and state["interpreter"] != sys.executable)
        STATE.parent.mkdir(exist_ok=True)
        STATE.write_text(json.dumps({"base": base, "interpreter": interpreter, "requirements": needed}))
        state = {"interpreter": interpreter}
    print(state["interpreter"])


def set_up(extra: str, needed: list[str], keep_venv: bool) -> str:
    """Creates the environment and returns its interpreter.

    Args:
        extra: of pyproject.toml, or "".
        needed: the requirements of the project with that extra.
        keep_venv: whether to add to an existing .venv instead of starting afresh.
    Raises:
        SystemExit: the set-up failed; the message says how to fix it.
    """
    say(f"looking at the packages of {sys.executable} ...")
    torch = next(r for r in needed if name_of(r) == "torch")
    respected = installed("torch") is not None and satisfied(torch)
    if installed("torch") is not None and not respected:
        say(f"{sys.executable} has torch {installed('torch')}, but {torch} is needed: .venv gets its own")
    if respected and all(satisfied(r) for r in needed) and imports_titan_tree():
        say(f"using {sys.executable} with torch {installed('torch')}; nothing is installed, not even .venv")
        if shutil.which("titan-tree") is None:
            say(f"run the command titan-tree as {sys.executable} -m titan_tree, in {ROOT}")
        return sys.executable

    STATE.unlink(missing_ok=True)  # if this set-up is interrupted, the next call starts over
    is_empty = VENV.is_dir() and not any(VENV.iterdir())
    if os.path.lexists(VENV) and not MADE_BY.exists() and not is_empty:
        sys.exit(
            f"error: {VENV} exists but was not created by this script: move it away, or activate it and run "
            "`pip install -e '.[dev]'`"
        )
    if not keep_venv:
        make_venv(respected)
    constraints = CONSTRAINTS
    if respected:
        constraints = VENV / "constraints.txt"
        constraints.write_text(constraints_beside_installed())
        say(f"using torch {installed('torch')} of {sys.executable}; installing missing packages in .venv ...")
    else:
        say("installing torch and other packages in .venv; this takes a minute plus the download ...")
    interpreter = str(VENV / "bin" / "python")
    project = f"{ROOT}[{extra}]" if extra else str(ROOT)
    pip = [interpreter, "-m", "pip", "--disable-pip-version-check", "--no-input", "--quiet", "install"]
    if run([*pip, "--constraint", str(constraints), "--editable", project]):
        sys.exit(
            "error: pip could not install the packages, see its message above. Without a network, set "
            "PIP_INDEX_URL or PIP_FIND_LINKS to a mirror, or PYTHON to an interpreter with all packages"
        )
    return interpreter


def make_venv(respected: bool) -> None:
    """Creates an empty .venv. With ``respected`` it also sees all packages of this interpreter."""
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    MADE_BY.write_text(sys.executable)
    if run([sys.executable, "-m", "venv", str(VENV)]):
        shutil.rmtree(VENV)
        sys.exit(
            "error: this Python cannot create virtual environments, see its message above. Install its venv "
            "package; on Debian and Ubuntu: `apt-get install python3-venv`"
        )
    if respected:
        # If this interpreter is a virtual environment itself, --system-site-packages would show the packages
        # of its base, not its own.
        folders = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
        (site_packages,) = VENV.glob("lib/python*/site-packages")
        lines = [f"import site; site.addsitedir({folder!r})" for folder in folders]
        (site_packages / "packages_below.pth").write_text("\n".join(lines) + "\n")


def constraints_beside_installed() -> str:
    """Returns the lines of constraints.txt that this interpreter lacks, and its own version of torch."""
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if re.match(r"\w", line)]
    missing = [line for line in lines if installed(name_of(line)) is None]
    return "\n".join([*missing, f"torch=={installed('torch')}"]) + "\n"


def requirements(extra: str) -> list[str]:
    """Returns the requirements in pyproject.toml, including those of ``extra``."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = list(project["dependencies"])
    if extra and extra not in project["optional-dependencies"]:
        known = ", ".join(project["optional-dependencies"])
        sys.exit(f"error: unknown extra {extra!r}: expected one of {known}")
    for requirement in project["optional-dependencies"].get(extra, []):
        own = re.fullmatch(r"titan_tree\[(\w+)\]", requirement)
        found += requirements(own[1]) if own else [requirement]
    return list(dict.fromkeys(found))


def name_of(requirement: str) -> str:
    """Returns the name in a requirement: "torch" for "torch>=2.11,<2.16"."""
    return re.match(r"[\w.-]+", requirement)[0]


def installed(name: str) -> str | None:
    """Returns the version of a distribution that this interpreter sees, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def satisfied(requirement: str) -> bool:
    """Returns whether a fitting version is installed. Knows the operators that pyproject.toml uses."""
    version = installed(name_of(requirement))
    if version is None:
        return False
    compare = {">=": tuple.__ge__, "==": tuple.__eq__, "<": tuple.__lt__}
    clauses = re.findall(r"([<>=]+)([\d.]+)", requirement)
    return all(compare[operator](release(version), release(bound)) for operator, bound in clauses)


def release(version: str) -> tuple[int, ...]:
    """Returns (2, 11, 0) for "2.11.0+cu130"."""
    return tuple(int(number) for number in re.match(r"\d+(\.\d+)*", version)[0].split("."))


def imports_titan_tree() -> bool:
    """Returns whether the trainer, and everything that it imports, can be imported here."""
    command = [sys.executable, "-c", "import titan_tree.run.trainer"]
    return not subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode


def run(command: list[str]) -> int:
    """Runs a command with stdout redirected to stderr and returns its exit status."""
    return subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False).returncode


def say(message: str) -> None:
    """Prints progress on stderr."""
    print(f"[set-up] {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
