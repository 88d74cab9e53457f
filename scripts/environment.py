"""Find or make the Python environment that titan_tree runs in; print its interpreter on stdout.

    python3 scripts/environment.py [EXTRA]        # EXTRA: test or dev, see pyproject.toml

Can the interpreter that runs this script import a supported torch, then that torch is used and no other is
installed: directly, where everything else is there too; otherwise from .venv, which sees the packages of
that interpreter and adds what is missing. Without torch, .venv holds all of constraints.txt.

Called by scripts/setup.sh with Python 3.11 or later, of which it uses the standard library alone.
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
MADE_BY = VENV / "made-by-titan_tree"  # names the interpreter below; a .venv without it is left alone
STATE = ROOT / "build" / "environment.json"  # what the last set-up that came to its end has made


def main(extra: str) -> None:
    if Path(sys.prefix).resolve() == VENV and MADE_BY.exists():  # .venv is active: speak of what it stands on
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
    """Make the environment and return its interpreter; SystemExit says what to do where that fails."""
    torch = next(r for r in needed if name_of(r) == "torch")
    respected = installed("torch") is not None and satisfied(torch)
    if installed("torch") is not None and not respected:
        say(f"{sys.executable} has torch {installed('torch')}, not {torch}: .venv gets its own")
    if respected and all(satisfied(r) for r in needed) and imports_titan_tree():
        say(f"using {sys.executable} with torch {installed('torch')}, as it is")
        return sys.executable

    STATE.unlink(missing_ok=True)  # from here on an interruption means: start again
    if VENV.exists() and not MADE_BY.exists() and any(VENV.iterdir()):
        sys.exit(
            f"error: {VENV} was not made by this script, which leaves it alone: move it away, or activate it "
            "and run `pip install -e '.[dev]'`"
        )
    if not keep_venv:
        make_venv(respected)
    constraints = CONSTRAINTS
    if respected:
        constraints = VENV / "constraints.txt"
        constraints.write_text(constraints_beside_installed())
        say(f"keeping torch {installed('torch')} of {sys.executable}; adding what is missing in .venv")
    else:
        say("installing the packages of constraints.txt in .venv: about a minute plus the download ...")
    interpreter = str(VENV / "bin" / "python")
    project = f"{ROOT}[{extra}]" if extra else str(ROOT)
    pip = [interpreter, "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "--quiet"]
    if run([*pip, "--progress-bar", "off", "--constraint", str(constraints), "--editable", project]):
        sys.exit(
            "error: pip could not install the packages (its reason stands above); without network set "
            "PIP_INDEX_URL or PIP_FIND_LINKS to a mirror, or use a Python that has them already"
        )
    return interpreter


def make_venv(respected: bool) -> None:
    """An empty .venv; with ``respected``, one that sees all packages of this interpreter."""
    shutil.rmtree(VENV, ignore_errors=True)
    VENV.mkdir()
    MADE_BY.write_text(sys.executable)
    if run([sys.executable, "-m", "venv", str(VENV)]):
        shutil.rmtree(VENV)
        sys.exit(
            "error: this Python cannot make virtual environments (its reason stands above): install its venv "
            "package, on Debian and Ubuntu `apt-get install python3-venv`"
        )
    if respected:
        # --system-site-packages would show the packages of the interpreter that a virtual environment or
        # user site stands on, not their own.
        folders = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
        (site_packages,) = VENV.glob("lib/python*/site-packages")
        lines = [f"import site; site.addsitedir({folder!r})" for folder in folders]
        (site_packages / "packages_below.pth").write_text("\n".join(lines) + "\n")


def constraints_beside_installed() -> str:
    """constraints.txt for the packages this interpreter lacks, and torch as it is."""
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if re.match(r"\w", line)]
    missing = [line for line in lines if installed(name_of(line)) is None]
    return "\n".join([*missing, f"torch=={installed('torch')}"]) + "\n"


def requirements(extra: str) -> list[str]:
    """The requirements of pyproject.toml, those of ``extra`` included."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    found = list(project["dependencies"])
    if extra and extra not in project["optional-dependencies"]:
        sys.exit(f"error: extra {extra!r}: expected one of {', '.join(project['optional-dependencies'])}")
    for requirement in project["optional-dependencies"].get(extra, []):
        own = re.fullmatch(r"titan_tree\[(\w+)\]", requirement)
        found += requirements(own[1]) if own else [requirement]
    return list(dict.fromkeys(found))


def name_of(requirement: str) -> str:
    return re.match(r"[\w.-]+", requirement)[0]


def installed(name: str) -> str | None:
    """The version of a distribution that this interpreter sees, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def satisfied(requirement: str) -> bool:
    """Is a fitting distribution there? Reads "torch>=2.11,<2.14": the operators pyproject.toml uses."""
    version = installed(name_of(requirement))
    if version is None:
        return False
    compare = {">=": tuple.__ge__, "==": tuple.__eq__, "<": tuple.__lt__}
    clauses = re.findall(r"([<>=]+)([\d.]+)", requirement)
    return all(compare[operator](release(version), release(bound)) for operator, bound in clauses)


def release(version: str) -> tuple[int, ...]:
    """2.11.0+cu130 -> (2, 11, 0)."""
    return tuple(int(number) for number in re.match(r"\d+(\.\d+)*", version)[0].split("."))


def imports_titan_tree() -> bool:
    """Does the trainer import here, with all that its packages import in turn?"""
    command = [sys.executable, "-c", "import titan_tree.trainer"]
    return not subprocess.run(command, cwd=ROOT, capture_output=True, check=False).returncode


def run(command: list[str]) -> int:
    """Exit status; stdout goes to stderr, since ours carries the interpreter."""
    return subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False).returncode


def say(message: str) -> None:
    print(f"[set-up] {message}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "")
