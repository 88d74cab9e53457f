"""Checks the installation, the machine and a configuration, and says how to fix each problem.

titan-tree doctor                                      the installation and this machine
titan-tree doctor --config FILE.toml [key=value ...]   also whether a run with this configuration could start
titan-tree doctor --json                               the same findings, for programs

The exit status is 0 without problems, 1 with problems, and 2 for wrong usage. Doctor writes nothing into the
run's folder and needs no network. It does not import your own script, so it knows only built-in components.

A check is a function that yields findings. The files:

    finding.py        Finding, and how an exception becomes one
    installation.py   versions of packages
    machine.py        cores, memory, disk, limits
    gpus.py           GPUs, and whether they can exchange tensors
    all_reduce.py     the program that gpus.py starts for each GPU
    numerics.py       backends, and a training step on a tree, compared with the same step path by path
    configuration.py  what a run reads before its first step
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from importlib import import_module
from textwrap import wrap

from titan_tree.cli.doctor.finding import Finding, Subject, attempt
from titan_tree.errors import UserError

# Section -> its check. The module is imported when the check runs, so that a missing torch becomes a finding.
CHECKS = {
    "versions": "installation:versions",
    "machine": "machine:machine",
    "GPUs": "gpus:gpus",
    "backends": "numerics:backends",
    "self-test": "numerics:self_test",
    "configuration": "configuration:configuration",
}
WIDTH = 80  # columns, also in a wider terminal
BOLD, GREEN, RED, YELLOW, DIM = "1", "32", "1;31", "33", "2"
MARKS = {True: ("✓", GREEN), False: ("✗", RED), None: ("-", DIM)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree doctor``."""
    add = parser.add_argument
    add(
        "--config", metavar="FILE.toml", help="also check that a run with this configuration could start here"
    )
    add("overrides", nargs="*", metavar="key=value", help="override a key of the configuration")
    add("--json", action="store_true", help="print the findings as JSON")


def run(args: argparse.Namespace) -> int:
    """Runs ``titan-tree doctor``. Returns 1 if it found problems, else 0."""
    if args.overrides and args.config is None:
        raise UserError(
            f"{args.overrides[0]}: expected --config FILE.toml as well; add it, or remove key=value"
        )
    found: dict[str, list[Finding]] = {}
    logging.disable(logging.WARNING)  # findings report what matters
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            subject = _subject(args)
            for section in CHECKS:
                if section == "configuration" and args.config is None:
                    continue
                if not args.json and sys.stdout.isatty():
                    print(_styled(f"{section} ...", DIM), end="\r", flush=True)
                found[section] = list(attempt(section, _check, section, subject))
                if not args.json:
                    _print_section(section, found[section])
    finally:
        logging.disable(logging.NOTSET)
    problems = sum(finding.ok is False for findings in found.values() for finding in findings)
    if args.json:
        sections = {section: [asdict(finding) for finding in findings] for section, findings in found.items()}
        print(json.dumps({"problems": problems, "sections": sections}))
    elif problems:
        print(_styled(f"{problems} problem{'s' * (problems > 1)}, marked ✗", RED))
    else:
        print(_styled("no problems", GREEN))
    return int(problems > 0)


def _subject(args: argparse.Namespace) -> Subject:
    config = None
    if args.config is not None:
        with suppress(Exception):  # the section "configuration" reports it
            from titan_tree.config.toml import load_config

            config = load_config(args.config, args.overrides)
    return Subject(args.config, args.overrides, config)


def _check(section: str, subject: Subject) -> Iterator[Finding]:
    module, _, function = CHECKS[section].partition(":")
    yield from getattr(import_module(f"{__name__}.{module}"), function)(subject)


def _print_section(section: str, findings: list[Finding]) -> None:
    # The spaces overwrite "section ...".
    print(_styled(f"{section:<20}" if sys.stdout.isatty() else section, BOLD))
    indent = max(len(finding.name) for finding in findings) + 5
    for finding in findings:
        first, *others = wrap(finding.value, WIDTH - indent, break_on_hyphens=False)
        print(f"  {_styled(*MARKS[finding.ok])} {finding.name:<{indent - 5}} {first}")
        for line in others:
            print(" " * indent + line)
        for line in wrap(
            f"fix: {finding.fix}" if finding.fix else "", WIDTH - indent, break_on_hyphens=False
        ):
            print(" " * indent + _styled(line, YELLOW))
    print()


def _styled(text: str, style: str) -> str:
    """Returns the text with a style if stdout is a terminal. Doctor must work without the package rich."""
    if not sys.stdout.isatty() or "NO_COLOR" in os.environ:
        return text
    return f"\x1b[{style}m{text}\x1b[0m"
