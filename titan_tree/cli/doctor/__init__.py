"""Checks the installation, the machine and a configuration, and says how to fix each problem.

titan-tree doctor                                      the installation and this machine
titan-tree doctor --config FILE.toml [key=value ...]   also whether a run with this configuration could start
titan-tree doctor --json                               the same findings, for programs

The exit status is 0 without problems, 1 with problems, and 2 for wrong usage. Doctor writes nothing into the
run's folder and needs no network. It does not import your own script, so it knows only built-in components.
"""

# A check is a generator of findings. machine.py checks versions, the host and its GPUs; numerics.py
# compares training on a tree with training path by path; configuration.py checks what a run reads before its
# first step.

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib import import_module
from textwrap import fill
from typing import TypeVar

from titan_tree.errors import UserError, count, printable, warnings_hidden
from titan_tree.run.config import Config

# Section -> its check. The module is imported when the check runs, so that a missing torch becomes a finding.
CHECKS = {
    "versions": "machine:versions",
    "machine": "machine:machine",
    "GPUs": "machine:gpus",
    "backends": "numerics:backends",
    "self-test": "numerics:self_test",
    "configuration": "configuration:configuration",
}
MARKS = {True: "✓", False: "✗", None: "-"}


@dataclass
class Finding:
    """The result of a check, which is one row of the report."""

    name: str
    value: str
    ok: bool | None = True  # False: a problem; None: information only
    fix: str = ""  # the command or setting that fixes a problem; empty if ``value`` says it

    def __post_init__(self) -> None:
        self.name, self.value, self.fix = map(printable, (self.name, self.value, self.fix))


T = TypeVar("T")
Checked = Generator[Finding, None, T]  # a check: it yields findings, and returns what later checks need


def problem(name: str, value: str, fix: str) -> Finding:
    return Finding(name, value, ok=False, fix=fix)


@dataclass(frozen=True)
class Subject:
    """What the checks examine, besides the machine and the installation."""

    file: str | None = None  # the configuration's path
    overrides: Sequence[str] = ()
    config: Config | None = None  # None: no configuration was given, or it does not load


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree doctor``."""
    add = parser.add_argument
    add("--config", metavar="FILE.toml", help="also check whether a run with this configuration could start")
    add("overrides", nargs="*", default=[], metavar="key=value", help="override a key of the configuration")
    add("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs ``titan-tree doctor``. Returns 1 if it found problems, else 0."""
    if args.overrides and args.config is None:
        raise UserError(
            f"{args.overrides[0]}: expected --config FILE.toml as well; add it, or remove key=value"
        )
    findings: dict[str, list[Finding]] = {}
    with warnings_hidden(), warnings.catch_warnings(action="ignore"):  # findings report what matters
        subject = _subject(args)
        for section in CHECKS:
            if section == "configuration" and args.config is None:
                continue
            if not args.json:
                print(section, flush=True)
            findings[section] = list(attempt(section, _check, section, subject))
            if not args.json:
                _print(findings[section])
    problems = sum(finding.ok is False for section in findings.values() for finding in section)
    if args.json:
        sections = {section: [asdict(finding) for finding in rows] for section, rows in findings.items()}
        print(json.dumps({"problems": problems, "sections": sections}))
    else:
        print(f"{count(problems, 'problem')}, marked ✗" if problems else "no problems")
    return int(problems > 0)


def attempt(name: str, check: Callable[..., Checked[T]], *arguments: object) -> Checked[T | None]:
    """Yields the findings of ``check(*arguments)`` and returns its result.

    If the check raises an error, the error is a problem, and the result None.
    """
    try:
        return (yield from check(*arguments))
    except UserError as error:  # its message says how to fix it
        yield Finding(name, str(error), ok=False)
    except Exception as error:
        line = next(iter(str(error).strip().splitlines()), "no message")[:200]
        if isinstance(error, ImportError):
            yield problem(name, f"cannot be checked: {line}", "python -m pip install -e .")
            return None
        fix = "fix other problems first; if this one remains, report the output of titan-tree doctor --json"
        yield problem(name, f"failed with {type(error).__name__}: {line}", fix)
    return None


def _subject(args: argparse.Namespace) -> Subject:
    config = None
    if args.config is not None:
        with suppress(Exception):  # the section "configuration" reports it
            from titan_tree.run.config import load_any

            config = load_any(args.config, args.overrides)
    return Subject(args.config, args.overrides, config)


def _check(section: str, subject: Subject) -> Checked[None]:
    module, _, function = CHECKS[section].partition(":")
    yield from getattr(import_module(f"{__name__}.{module}"), function)(subject)


def _print(findings: list[Finding]) -> None:
    """Prints a section in 80 columns: a mark, a name, and a value above its fix."""
    width = max((len(finding.name) for finding in findings), default=0)
    indent = " " * (width + 5)
    for finding in findings:
        line = f"  {MARKS[finding.ok]} {finding.name:<{width}} {finding.value}"
        print(fill(line, 80, subsequent_indent=indent, break_on_hyphens=False))
        if finding.fix:
            fix = f"fix: {finding.fix}"
            print(fill(fix, 80, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False))
