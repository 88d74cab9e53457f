"""Checks that a dataclass declares beside its fields.

    @dataclass
    class OptimizerConfig(Checked, table="optimizer"):
        lr: float = setting(1e-5, finite, at_least(0))

    OptimizerConfig(lr=-1)  # UserError: optimizer.lr: expected at least 0, got -1

A field of type ``Literal`` accepts only its choices and needs no check.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar, get_args, get_origin, get_type_hints

from titan_tree.errors import UserError, did_you_mean, errors_at, shorten

T = TypeVar("T")

MISSING = "???"  # the value of a required key until the user sets it


@dataclass(frozen=True)
class Check:
    """A condition on the value of a field.

    Args:
        accepts: returns whether a value fulfills the condition.
        describe: returns a phrase for the accepted values, such as "at least 0".
        names: returns the accepted values if they are names.
    """

    accepts: Callable[[Any], object]
    describe: Callable[[], str]
    names: Callable[[], list[str]] = list

    def __call__(self, value: object) -> str | None:
        """Returns None for an accepted value, else the phrase for the accepted values."""
        return None if self.accepts(value) else self.describe()


class Checked:
    """Base class of dataclasses whose fields declare checks. Construction raises UserError for a wrong value.

    A field whose default is None accepts None without running its checks.

    Class arguments:
        table: name of the TOML table. Messages put it before the field's name.
    """

    _prefix: ClassVar[str] = ""

    def __init_subclass__(cls, table: str = "", **arguments: object) -> None:
        super().__init_subclass__(**arguments)
        if table:
            cls._prefix = f"{table}."

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            if value == MISSING or (value is None and field.default is None):
                continue
            with errors_at(f"{self._prefix}{field.name}"):
                for condition in checks_of(type(self))[field.name]:
                    if (expected := condition(value)) is not None:
                        hints = [did_you_mean(each, condition.names()) for each in _unknown(value, condition)]
                        raise UserError(f"expected {expected}, got {shorten(value)}{''.join(hints)}")


def _unknown(value: object, condition: Check) -> list[str]:
    """Returns the text of ``value``, or the texts of a list, that is none of the names of a check."""
    values = value if isinstance(value, list) else [value]
    return [each for each in values if isinstance(each, str) and each not in condition.names()]


def checks_of(table: type) -> dict[str, tuple[Check, ...]]:
    """Returns the checks of every field of a dataclass, by the field's name."""
    hints = get_type_hints(table)
    choices = {
        name: (one_of(*get_args(hint)),) for name, hint in hints.items() if get_origin(hint) is Literal
    }
    return {
        field.name: (*choices.get(field.name, ()), *field.metadata.get("checks", ()))
        for field in dataclasses.fields(table)
    }


def setting(default: T, *checks: Check) -> T:
    """Returns a dataclass field with a default and checks. A list or dict is copied for every instance."""
    metadata = {"checks": checks}
    if isinstance(default, list | dict):
        return dataclasses.field(default_factory=lambda: copy.deepcopy(default), metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def required(*checks: Check) -> Any:
    """Returns a dataclass field with checks and without a default."""
    return dataclasses.field(metadata={"checks": checks})


def require(condition: object, key: str, expected: str, got: object) -> None:
    """Raises UserError unless ``condition`` holds. For rules that involve more than one field."""
    if not condition:
        raise UserError(f"{key}: expected {expected}, got {got}")


def check(expected: str, accepts: Callable[[Any], object]) -> Check:
    """Returns a check of one condition. ``expected`` is a phrase for the accepted values."""
    return Check(accepts, lambda: expected)


def at_least(minimum: float) -> Check:
    return check(f"at least {minimum}", lambda value: value >= minimum)


def greater_than(bound: float) -> Check:
    return check(f"a number > {bound}", lambda value: value > bound)


def between(low: float, high: float) -> Check:
    """Accepts numbers from ``low`` to ``high``, both included."""
    return check(f"a number from {low} to {high}", lambda value: low <= value <= high)


def one_of(*choices: str | Iterable[str]) -> Check:
    """Accepts the given names, every name in the given registries, and "module:attribute" beside those."""

    def names() -> list[str]:
        return [name for choice in choices for name in ([choice] if isinstance(choice, str) else choice)]

    def accepts(value: Any) -> bool:
        return any(value == choice if isinstance(choice, str) else value in choice for choice in choices)

    return Check(accepts, lambda: f"one of {', '.join(names())}", names)


def list_of(item: Check) -> Check:
    """Accepts a list whose items all pass the check ``item``."""
    return Check(
        lambda values: isinstance(values, list) and all(item(value) is None for value in values),
        lambda: f"a list in which every item is {item.describe()}",
        item.names,
    )


def _is_number(value: object) -> bool:
    limit = sys.float_info.max  # math.isfinite refuses larger integers with an OverflowError
    return isinstance(value, int | float) and not isinstance(value, bool) and -limit <= value <= limit


boolean = check("true or false", lambda value: isinstance(value, bool))
finite = check("a finite number", _is_number)
positive_number = check("a finite number > 0", lambda value: _is_number(value) and value > 0)
non_negative = check("a finite number >= 0", lambda value: _is_number(value) and value >= 0)
positive_int = check("an integer > 0", lambda value: type(value) is int and value > 0)
natural_int = check("an integer >= 0", lambda value: type(value) is int and value >= 0)
