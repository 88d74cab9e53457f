"""Compares the versions of Python and of all packages with the ranges in pyproject.toml."""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Iterator
from importlib import import_module, metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import Version

from titan_tree.cli.doctor.finding import Finding, Subject, problem

PACKAGE = Path(__file__).parents[2]
PYPROJECT = PACKAGE.parent / "pyproject.toml"  # exists in a checkout
SHOWN = ("torch", "triton", "torchtitan")  # each has a line of its own
EXTRAS = {
    "data": "reads Parquet, Arrow and Zstandard",
    "torchao": "float8 and 8-bit optimizer states",
    "flash": 'the attention backend "flash"',
    "lightning": "training with Lightning",
    "wandb": 'the logger "wandb"',
}


def versions(subject: Subject) -> Iterator[Finding]:
    """Checks Python, all required packages, and those of the optional extras that are installed."""
    python, requirements = _requirements()
    yield _compare("python", platform.python_version(), python, "install a supported Python")
    yield Finding("titan_tree", f"{import_module('titan_tree').__version__} in {PACKAGE}")
    others = []
    for requirement in requirements:
        if requirement.marker is None:
            name = requirement.name
            fix = f"python -m pip install {_quoted(requirement)}"
            finding = _compare(name, _installed(name), requirement.specifier, fix)
            if name in SHOWN or not finding.ok:
                yield finding
            else:
                others.append(f"{name} {_installed(name)}")
    yield Finding("others", ", ".join(others))
    for extra, purpose in EXTRAS.items():
        yield from _extra(extra, purpose, requirements)


def _extra(extra: str, purpose: str, requirements: list[Requirement]) -> Iterator[Finding]:
    own = [r for r in requirements if r.marker is not None and r.marker.evaluate({"extra": extra})]
    fix = f"python -m pip install -e '.[{extra}]'"
    found = {r.name: _installed(r.name) for r in own}
    if None in found.values():
        missing = ", ".join(name for name, version in found.items() if version is None)
        yield Finding(extra, f"optional, not installed: {missing} ({purpose})", ok=None)
        return
    findings = [_compare(r.name, found[r.name], r.specifier, fix) for r in own]
    yield from (finding for finding in findings if not finding.ok)
    if all(finding.ok for finding in findings):
        yield Finding(extra, ", ".join(f"{name} {version}" for name, version in found.items()))


def _requirements() -> tuple[SpecifierSet, list[Requirement]]:
    """Returns the supported versions of Python, and all requirements. Those of an extra have a marker."""
    if not PYPROJECT.is_file():
        python = metadata.metadata("titan_tree")["Requires-Python"]
        return SpecifierSet(python), [Requirement(text) for text in metadata.requires("titan_tree") or []]
    project = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]
    texts = list(project["dependencies"])
    for extra, names in project["optional-dependencies"].items():
        texts += [f'{name}; extra == "{extra}"' for name in names]
    return SpecifierSet(project["requires-python"]), [Requirement(text) for text in texts]


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _quoted(requirement: Requirement) -> str:
    return f"'{requirement.name}{requirement.specifier}'"


def _compare(name: str, version: str | None, supported: SpecifierSet, fix: str) -> Finding:
    if version is None:
        return problem(name, f"not installed; expected {supported}", fix)
    # Hardware vendors name their builds 2.11.0a0+..., which sorts before 2.11.
    ok = supported.contains(version, prereleases=True) or supported.contains(Version(version).base_version)
    if ok:
        return Finding(name, f"{version} (supported: {supported})")
    return problem(name, f"{version}; expected {supported}", fix)
