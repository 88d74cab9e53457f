"""Checks the installation, the machine and the numerics, and says how to fix each problem.

titan-tree doctor          versions, GPUs, and tiny models that train on a tree and path by path
titan-tree doctor --json   the same findings, for programs

The exit status is 0 without problems, 1 with problems, and 2 for wrong usage. Doctor writes nothing and needs
no network. What a run checks itself when it starts, such as its configuration and data, is left to the run.
"""

# A check is a generator of findings. machine.py checks versions, shared memory and GPUs; numerics.py compares
# training on a tree with training path by path.

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib import import_module
from textwrap import fill

from titan_tree.errors import UserError, count, printable, warnings_hidden

# Section -> its check. The module is imported when the check runs, so that a missing torch becomes a finding.
CHECKS = {
    "versions": "machine:versions",
    "machine": "machine:machine",
    "backends": "numerics:backends",
    "self-test": "numerics:self_test",
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


def problem(name: str, value: str, fix: str) -> Finding:
    return Finding(name, value, ok=False, fix=fix)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree doctor``."""
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    parser.add_argument("--config", nargs="+", help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    """Runs ``titan-tree doctor``. Returns 1 if it found problems, else 0."""
    if args.config:
        raise UserError(
            f"--config: removed; titan-tree train {args.config[0]} checks its configuration before it trains"
        )
    findings: dict[str, list[Finding]] = {}
    with warnings_hidden(), warnings.catch_warnings(action="ignore"):  # findings report what matters
        for section in CHECKS:
            if not args.json:
                print(section, flush=True)
            findings[section] = list(attempt(section, _check, section))
            if not args.json:
                _print(findings[section])
    problems = sum(finding.ok is False for section in findings.values() for finding in section)
    if args.json:
        sections = {section: [asdict(finding) for finding in rows] for section, rows in findings.items()}
        print(json.dumps({"problems": problems, "sections": sections}))
    else:
        print(f"{count(problems, 'problem')}, marked ✗" if problems else "no problems")
    return int(problems > 0)


def attempt(name: str, check: Callable[..., Iterator[Finding]], *arguments: object) -> Iterator[Finding]:
    """Yields the findings of ``check(*arguments)``. If it raises an error, the error is a problem."""
    try:
        yield from check(*arguments)
    except UserError as error:  # its message says how to fix it
        yield Finding(name, str(error), ok=False)
    except ImportError as error:
        yield problem(name, f"cannot be checked: {_line(error)}", "python -m pip install -e .")
    except Exception as error:
        fix = "fix other problems first; if this one remains, report the output of titan-tree doctor --json"
        yield problem(name, f"failed with {type(error).__name__}: {_line(error)}", fix)


def _line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), "no message")[:200]


def _check(section: str) -> Iterator[Finding]:
    module, _, function = CHECKS[section].partition(":")
    yield from getattr(import_module(f"{__name__}.{module}"), function)()


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
