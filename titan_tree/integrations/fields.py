"""Fields: how titan_tree treats the fields of another framework's rows. Row: the checked fields of one row.

FIELDS = Fields("theirs=ours same", "left out", {"refused": "why"})
FIELDS.row(row_or_batch, "row 0")["ours"]
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Set
from typing import Any

import numpy as np
from torch import Tensor

from titan_tree.errors import UserError, errors_at, shorten
from titan_tree.tree.path_fields import any_array, float_array

# Why fields of several frameworks are refused.
IMAGES = "expected text only"
TEACHER = "losses with a teacher are not supported; remove it"


class Row(dict[str, Any]):
    """The fields of a row or a batch, by titan_tree's names. Errors have the framework's names."""

    def __init__(self, values: Mapping[str, Any], where: str, names: dict[str, str]) -> None:
        super().__init__(values)
        self.where, self.names = where, names

    def required(self, name: str) -> Any:
        """Returns a field. Raises UserError without it."""
        if name not in self:
            raise self.error(name, "missing; give it for every row")
        return self[name]

    def size(self, name: str) -> int:
        """Returns the number of entries of a field. Raises UserError unless it is a list, array or tensor."""
        value = self.required(name)
        try:
            if isinstance(value, str | bytes | Mapping | Set):
                raise TypeError
            return len(value)
        except TypeError:  # a number, or a tensor that is one
            raise self.error(name, f"expected a list, got {shorten(value)}") from None

    def entries(self, name: str, length: int) -> Any:
        """Returns a field with ``length`` entries, or None without it."""
        if name in self and (size := self.size(name)) != length:
            raise self.error(name, f"expected {length} entries, got {size}")
        return self.get(name)

    def array(self, name: str) -> np.ndarray:
        """Returns a field as an array. Tensors may be on any device, and have types that NumPy lacks."""
        value = self.required(name)
        if isinstance(value, Tensor):
            value = value.detach().cpu()
            value = value.float() if value.is_floating_point() and value.itemsize < 4 else value
        with errors_at(self.where):
            return any_array(self.names.get(name, name), value, "numbers")

    def integers(self, name: str) -> np.ndarray:
        """Returns a field of integers in any shape."""
        array = self.array(name)
        if array.size and array.dtype.kind not in "iu":
            raise self.error(name, f"expected integers, got {shorten(self[name])}")
        return array

    def numbers(self, name: str, length: int | None = None) -> np.ndarray:
        """Returns a field of numbers as float32, with NaN for None.

        Args:
            length: the number of entries, one number each. None: any shape.
        """
        if length is not None:
            self.entries(name, length)
        array = self.array(name)
        with errors_at(self.where):
            types = (bool, int, float, type(None))
            array = float_array(self.names.get(name, name), array, "iufb", types)
        if length is not None and array.ndim != 1:
            raise self.error(name, f"expected one number per entry, got shape {list(array.shape)}")
        return array

    def flags(self, name: str, length: int | None = None) -> np.ndarray:
        """Returns a field of 0 and 1 as bool, see ``numbers``."""
        array = self.numbers(name, length)
        if len(bad := array[(array != 0) & (array != 1)]):
            raise self.error(name, f"expected only 0 and 1, got {bad[0]:g}")
        return array == 1

    def split(self, number: int, prefix: str) -> list[Row]:
        """Returns the rows of a batch whose fields are columns of ``number`` entries."""
        columns = {name: self.entries(name, number) for name in self}
        rows = [{name: column[i] for name, column in columns.items()} for i in range(number)]
        return [
            Row({n: x for n, x in row.items() if x is not None}, f"{prefix} {i}", self.names)
            for i, row in enumerate(rows)
        ]

    def error(self, name: str, problem: str) -> UserError:
        """Returns the error for a field."""
        return UserError(f"{self.where}: {self.names.get(name, name)}: {problem}")


class Fields:
    """How titan_tree treats the fields of a framework. Any other field is an error.

    Args:
        read: names of the fields that are read. "theirs=ours" also has titan_tree's name, which is that of a
            TokenPath's field where there is one.
        left_out: names of fields without effect on losses.
        refused: names of fields that would change the loss -> how to fix it.
    """

    def __init__(self, read: str, left_out: str, refused: Mapping[str, str]) -> None:
        pairs = [name.partition("=") for name in read.split()]
        self.read = {theirs: ours or theirs for theirs, _, ours in pairs}
        self.left_out = left_out.split()
        self.refused = {name: reason for names, reason in refused.items() for name in names.split()}

    def row(self, source: object, where: str) -> Row:
        """Returns the fields of a dict or an object that are not empty.

        Raises:
            UserError: a field is unknown, or refused.
        """
        row = Row({}, where, {ours: theirs for theirs, ours in reversed(self.read.items())})
        for name, value in items_of(source, where):
            if _is_empty(value):
                continue
            if name in self.refused:
                raise UserError(f"{where}: {name}: {self.refused[name]}")
            if name in self.read:
                ours = self.read[name]
                if ours in row:
                    raise UserError(
                        f"{where}: {name}: expected one name of this field, got {row.names[ours]}, too"
                    )
                row[ours], row.names[ours] = value, name
            elif name not in self.left_out:
                raise UserError(
                    f"{where}: {name}: unknown field, which might change the loss; remove it if it does not"
                )
        return row


def items_of(source: object, where: str) -> Iterable[tuple[str, Any]]:
    """Returns the items of a dict, or the attributes of an object."""
    if isinstance(source, Mapping):
        return source.items()
    names = getattr(source, "__struct_fields__", None)  # of msgspec
    if names is None and not hasattr(source, "__dict__"):
        raise UserError(f"{where}: expected a dict or an object with fields, got {shorten(source)}")
    return vars(source).items() if names is None else [(name, getattr(source, name)) for name in names]


def _is_empty(value: object) -> bool:
    """Returns whether a field says nothing: None, False, an empty dict, or a list of None."""
    if isinstance(value, dict):
        return not value
    return value is None or value is False or (isinstance(value, list) and all(x is None for x in value))
