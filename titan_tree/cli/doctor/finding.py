"""Finding: one line of the report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from titan_tree.config import Config
from titan_tree.errors import UserError, printable


@dataclass(frozen=True)
class Subject:
    """What the checks examine, besides the machine and the installation."""

    file: str | None = None  # of the configuration
    overrides: Sequence[str] = ()
    config: Config | None = None  # None: no configuration was given, or it does not load


@dataclass
class Finding:
    """What a check found."""

    name: str
    value: str
    ok: bool | None = True  # False: a problem; None: information only
    fix: str = ""  # the command or setting that fixes a problem; empty if ``value`` says it

    def __post_init__(self) -> None:
        self.name, self.value, self.fix = map(printable, (self.name, self.value, self.fix))


def problem(name: str, value: str, fix: str) -> Finding:
    return Finding(name, value, ok=False, fix=fix)


def attempt(name: str, check: Callable[..., Iterator[Finding]], *arguments: Any) -> Iterator[Finding]:
    """Yields the findings of ``check(*arguments)``. If the check raises an error, the error is a problem."""
    try:
        yield from check(*arguments)
    except UserError as error:  # its message says how to fix it
        yield Finding(name, str(error), ok=False)
    except ImportError as error:
        yield problem(name, f"cannot be checked: {_first_line(error)}", "python -m pip install -e .")
    except Exception as error:
        yield problem(
            name,
            f"failed with {type(error).__name__}: {_first_line(error)}",
            "fix other problems first; if this one remains, report the output of titan-tree doctor --json",
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or ["no message"]
    return lines[0][:200]
