"""Every key of the configurations of all commands, with its type, default and meaning.

``titan-tree config`` prints them, and docs/configuration.md is made from them. A table declares its keys; the
comment above a key, or at its end, is the meaning.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import re
import tokenize
from functools import cache
from types import NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin, get_type_hints

from titan_tree.config.checks import MISSING, checks_of
from titan_tree.integrations.lightning_settings import LightningRunConfig
from titan_tree.rl.settings import RLRunConfig
from titan_tree.run.config import Config

TYPES: dict[object, str] = {
    bool: "true or false",
    int: "integer",
    float: "number",
    str: "string",
    list: "list",
    dict: "table",
}


ROOTS = (Config, LightningRunConfig, RLRunConfig)


class Key(NamedTuple):
    """A key of a configuration.

    Attributes:
        name: the name of the key with its table, such as "optimizer.lr".
        type: its type, or the values that it accepts; names of values are in backticks.
        default: MISSING if the key is required, and None if it is unset.
        meaning: its documentation.
    """

    name: str
    type: str
    default: Any
    meaning: str

    @property
    def default_text(self) -> str:
        """The default as TOML, "required" or "unset"."""
        if self.default == MISSING:
            return "required"
        if self.default is None:
            return "unset"
        return (
            str(self.default).lower()
            if isinstance(self.default, bool)
            else f"{self.default!r}".replace("'", '"')
        )


class Table(NamedTuple):
    """A table of a configuration. ``name`` is "" for the keys that are in no table.

    Attributes:
        module: the module that declares it.
        meaning: its documentation.
    """

    name: str
    module: str
    meaning: str
    keys: list[Key]


@cache
def tables() -> list[Table]:
    """Returns all tables, in the order of a configuration; those of one command only are last."""
    declared: dict[tuple[str, type], dict[str, Any]] = {}
    declared["", Config] = {field.name: field.default for field in dataclasses.fields(Config)}
    declared["", Config]["plugins"] = []
    for root in ROOTS:
        declared |= _walk(root, "")
    return [_table(name, table, defaults) for (name, table), defaults in declared.items()]


def _walk(declared: type, name: str) -> dict[tuple[str, type], dict[str, Any]]:
    """Returns the tables inside of a table, by name and dataclass, with the defaults of their keys."""
    tables: dict[tuple[str, type], dict[str, Any]] = {}
    for field in dataclasses.fields(declared):
        make = field.default_factory
        if make is not dataclasses.MISSING and dataclasses.is_dataclass(default := make()):
            inner = f"{name}.{field.name}".lstrip(".")
            values = tables[inner, type(default)] = dict(vars(default))
            if make is type(default):  # as declared: an instance may hold what "auto" means on this machine
                fields = dataclasses.fields(default)
                values |= {f.name: f.default for f in fields if f.default is not dataclasses.MISSING}
            tables |= _walk(type(default), inner)
    return tables


def _table(name: str, declared: type, defaults: dict[str, Any]) -> Table:
    hints, meanings = get_type_hints(declared), _comments(declared)
    keys = []
    for field in dataclasses.fields(declared):
        if field.name in declared.__annotations__ and not dataclasses.is_dataclass(hints[field.name]):
            kind = _type(declared, field.name, hints[field.name])
            key = f"{name}.{field.name}".lstrip(".")
            keys.append(Key(key, kind, defaults[field.name], meanings[field.name]))
    meaning = inspect.cleandoc(declared.__doc__ or "").partition("\n\n")[0]
    return Table(name, declared.__module__, meaning, keys)


def _comments(table: type) -> dict[str, str]:
    """Returns the comment of every field that the dataclass itself declares: above it or at its end."""
    source = inspect.getsource(table)
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {token.start[0]: token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT}
    (definition,) = ast.parse(source).body
    assert isinstance(definition, ast.ClassDef)
    comments, end = {}, definition.body[0].end_lineno or 0
    for statement in definition.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            last = statement.end_lineno or 0
            text = " ".join(lines[line] for line in range(end + 1, last + 1) if line in lines)
            if text:
                comments[statement.target.id] = text
            end = last
    return comments


def _type(table: type, name: str, kind: Any) -> str:
    """Returns the type of a key and the values that its checks accept."""
    options = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    kinds = [option for option in options if option is not NoneType]
    checks = [check.describe() for check in checks_of(table)[name]]
    if checks and checks[0].startswith("one of "):
        return ", ".join(f"`{choice}`" for choice in checks[0].removeprefix("one of ").split(", "))
    if get_origin(kinds[0]) is list:
        return "; ".join(checks) or f"list of {TYPES[get_args(kinds[0])[0]]}s"
    if len(kinds) == 1 and kinds[0] is not Any:
        checks = [TYPES[get_origin(kinds[0]) or kinds[0]], *checks]
    checks = [text for text in checks if text != "a finite number"]
    return re.sub(r", a (finite )?number", "", ", ".join(checks))
