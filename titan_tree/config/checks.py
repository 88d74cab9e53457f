"""Validators that a dataclass declares beside its fields.

    @dataclass
    class OptimizerConfig(Checked, table="optimizer"):
        lr: float = setting(1e-5, finite, at_least(0))

    OptimizerConfig(lr=-1)  # UserError: optimizer.lr: expected at least 0, got -1

A check is a function of the field's value. It returns None for a valid value, else a phrase that names the
values it accepts. A field of type ``Literal`` accepts only its choices and needs no check.
"""

from __future__ import annotations

import copy
import dataclasses
import sys
from collections.abc import Callable
from typing import Any, ClassVar, Literal, get_args, get_origin, get_type_hints

from titan_tree.errors import UserError, shorten
from titan_tree.registry import Registry

Check = Callable[[Any], str | None]

MISSING = "???"  # the value of a required key until the user sets it; omegaconf uses the same marker


class Checked:
    """Base class of dataclasses whose fields declare checks. Construction raises UserError for a wrong value.

    A field whose default is None accepts None without running its checks.

    Class arguments:
        table: name of the TOML table, which messages put before the field's name.
    """

    _prefix: ClassVar[str] = ""

    def __init_subclass__(cls, table: str = "", **arguments: Any) -> None:
        super().__init_subclass__(**arguments)
        if table:
            cls._prefix = f"{table}."

    def __post_init__(self) -> None:
        choices = _literal_checks(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]  # subclasses are dataclasses
            value = getattr(self, field.name)
            if value == MISSING or (value is None and field.default is None):
                continue
            for accepted in (*choices.get(field.name, ()), *field.metadata.get("checks", ())):
                if (expected := accepted(value)) is not None:
                    raise UserError(f"{self._prefix}{field.name}: expected {expected}, got {shorten(value)}")


def setting(default: Any, *checks: Check) -> Any:
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
    """Returns a check of one condition, which ``expected`` describes."""
    return lambda value: None if accepts(value) else expected


def at_least(minimum: float) -> Check:
    return check(f"at least {minimum}", lambda value: value >= minimum)


def greater_than(bound: float) -> Check:
    return check(f"a number > {bound}", lambda value: value > bound)


def between(low: float, high: float) -> Check:
    """Accepts numbers from ``low`` to ``high``, both included."""
    return check(f"a number from {low} to {high}", lambda value: low <= value <= high)


def one_of(*choices: str | Registry[Any]) -> Check:
    """Accepts the given names and every name in the given registries, including later registrations."""

    def accepted(value: Any) -> str | None:
        names: list[str] = []
        for choice in choices:
            names += [choice] if isinstance(choice, str) else choice
        return None if value in names else f"one of {', '.join(names)}"

    return accepted


def list_of(item: Check) -> Check:
    """Accepts a list whose items all pass the check ``item``."""

    def accepted(value: Any) -> str | None:
        if not isinstance(value, list):
            return "a list"
        wrong = next((expected for each in value if (expected := item(each)) is not None), None)
        return None if wrong is None else f"a list in which every item is {wrong}"

    return accepted


def _literal_checks(cls: type) -> dict[str, tuple[Check]]:
    """Returns a check of the choices for every field whose type is a Literal."""
    hints = get_type_hints(cls)
    return {name: (one_of(*get_args(hint)),) for name, hint in hints.items() if get_origin(hint) is Literal}


def _is_number(value: Any) -> bool:
    limit = sys.float_info.max  # math.isfinite refuses larger integers with an OverflowError
    return isinstance(value, int | float) and not isinstance(value, bool) and -limit <= value <= limit


boolean = check("true or false", lambda value: isinstance(value, bool))
finite = check("a finite number", _is_number)
positive_number = check("a finite number > 0", lambda value: _is_number(value) and value > 0)
positive_int = check("an integer > 0", lambda value: type(value) is int and value > 0)
natural_int = check("an integer >= 0", lambda value: type(value) is int and value >= 0)
