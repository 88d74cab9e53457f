"""Reads a configuration from a TOML file and ``key=value`` arguments, and writes one back.

Arguments override the file; the file overrides the defaults of the tables. Every error is a UserError that
names the file or argument, the key and, if one is similar, the key that was probably meant.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titan_tree.config.checks import MISSING, require
from titan_tree.config.files import regular
from titan_tree.config.plugins import import_plugins
from titan_tree.errors import (
    UserError,
    encoding_hint,
    errors_at,
    keep_secret,
    require_unicode,
    shorten,
    unknown_name,
)

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

D = TypeVar("D", bound="DataclassInstance")
Table = dict[str, Any]  # keys and values as TOML or YAML has them

PACKAGED = Path(__file__).parents[1] / "train_configs"  # in a checkout, a link to train_configs/
# Keys of earlier versions, and what became of each one.
FORMER = {
    "metrics.csv": 'was replaced by metrics.loggers, a list of names: add or remove "csv"',
    "metrics.tensorboard": 'was replaced by metrics.loggers, a list of names: add or remove "tensorboard"',
    "model.gdn": "was replaced by model.recurrence",
    "rl.server.api": "was removed; delete it, and serve the model with vLLM: SGLang is not supported",
    "parallel.reshard_after_forward": "was removed; delete it: weights are gathered once per step with "
    'parallel.reduce_gradients = "last", and in each pass with "every"',
    "training.float8": "was removed; delete it: linears compute in training.dtype, by default bfloat16",
}
# Other names of keys in the same table. ``dump_config`` writes the key.
SYNONYMS = {"parallel.context_parallel": "sequence_parallel"}  # torchtitan's name
COMMANDS = {  # tables that only one command has
    "lightning": "titan-tree train --trainer lightning",
    "rl": "titan-tree rl",
    "serve": "titan-tree serve and titan-tree rl",
    "warm_start": "titan-tree rl",
}
# How to fix what Python's parser of TOML refuses, by the start of its message.
TOML_HINTS = {
    "Cannot overwrite a value": "the key is set twice; remove one of them",
    "Cannot declare": "the table occurs twice; write its keys into one of them",
    "Invalid value": "text needs quotes; true and false are lower case",
    "Expected '=' after a key": "write key = value",
    "Invalid hex value": "in double quotes, write \\ as \\\\",
    "Invalid statement": "a configuration has lines such as steps = 10; data files belong in data.files",
    "Unescaped '\\'": "in double quotes, write \\ as \\\\",
}
# What a key of each type accepts.
EXPECTED = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a table",
}


Override = str | tuple[str, object]  # key=value as text, or the two
_PATTERN = re.compile(r"(?:^|(?<=[\[,:\s]))\*[^\],\s]*")  # [*], *.jsonl: for YAML, * begins an alias


def load_tables(
    tables: type[D], path: str | Path, overrides: Sequence[Override] = (), skip: Collection[str] = ()
) -> D:
    """Returns the configuration of a TOML file, with overrides applied.

    Args:
        tables: the dataclass of the whole configuration.
        path: see ``titan_tree.load_config``.
        overrides: as for ``load_config``, or keys with their values.
        skip: tables of the file that are ignored.

    Raises:
        UserError: the file cannot be read, or it or an override contains a wrong key or value.
    """
    schema = _Schema.of(tables)
    values: Table = {}
    sources: dict[str, str] = {}
    for source, table in read_tables(path, overrides):
        table = {name: value for name, value in table.items() if name not in skip}
        with errors_at(source):
            for key, value in schema.settings(table):
                values[key] = _merged(values.get(key), value)
                sources |= dict.fromkeys(_keys(value, key), source)
    with errors_at(f"{sources.get('plugins', path)}: plugins"):
        import_plugins(values.get("plugins") or [])
    _require_all(schema, values, path)
    try:
        return schema.build(tables, tables, values)  # runs the checks of every table
    except UserError as error:
        key = str(error).partition(":")[0]
        raise UserError(f"{sources.get(key, path)}: {error}") from None


def dump_config(config: DataclassInstance) -> str:
    """Returns ``config`` as TOML that ``load_config`` reads back. Keys whose value is None are omitted."""
    lines: list[str] = []

    def write(table: Table, prefix: str) -> None:
        for key, value in table.items():
            if value is not None and not isinstance(value, dict):
                lines.append(f"{_toml_key(key)} = {toml_value(value)}")
        for key, value in table.items():
            if isinstance(value, dict) and value:
                lines.append(f"\n[{prefix}{_toml_key(key)}]")
                write(value, f"{prefix}{_toml_key(key)}.")

    write(dataclasses.asdict(config), "")
    return "\n".join(lines) + "\n"


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def toml_value(value: object) -> str:
    """Returns a list, table, string, number or boolean as TOML on one line."""
    if isinstance(value, list):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml_key(key)} = {toml_value(item)}" for key, item in value.items()) + "}"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # TOML writes inf and nan like Python
    return json.dumps(value)  # TOML writes strings, numbers and booleans like JSON


def read_tables(path: str | Path, overrides: Sequence[Override]) -> list[tuple[str, Table]]:
    """Returns the tables of the file and of each argument, with a name for error messages."""
    path = find_config(path)
    return [(str(path), _read_file(path)), *map(_read_argument, overrides)]


def find_config(path: str | Path) -> str | Path:
    """Returns ``path``, or the packaged file that it names: ``demo`` is train_configs/demo.toml.

    A file of that name in the working directory comes first.

    Raises:
        UserError: a name that is neither.
    """
    name = str(path)
    packaged = PACKAGED / f"{name}.toml"
    if "/" in name or os.path.isfile(name):
        return path
    if os.path.isfile(packaged):
        return packaged
    if os.path.exists(name):
        return path
    known = *sorted(map(str, Path().glob("*.toml"))), *sorted(file.stem for file in PACKAGED.glob("*.toml"))
    raise unknown_name("configuration file", name, known)


def _read_file(path: str | Path) -> Table:
    try:
        with open(path, encoding="utf-8-sig", opener=regular) as file:
            return tomllib.loads(file.read())
    except OSError as error:
        hint = f"; did you mean {path}/config.toml?" if os.path.isfile(f"{path}/config.toml") else ""
        raise UserError(f"{path}: cannot be read: {error.strerror}{hint}") from None
    except RecursionError:
        raise UserError(f"{path}: not valid TOML: brackets are nested too deeply") from None
    except UnicodeDecodeError as error:
        hint = encoding_hint(error.object)
        raise UserError(f"{path}: not valid TOML: {error}{hint}") from None
    except ValueError as error:  # wrong TOML, or a number of thousands of digits
        hint = next((f"; {hint}" for start, hint in TOML_HINTS.items() if str(error).startswith(start)), "")
        raise UserError(f"{path}: not valid TOML: {error}{hint}") from None


def _read_argument(argument: Override) -> tuple[str, Table]:
    """Returns a name of the argument for error messages, and the tables that it sets."""
    if isinstance(argument, tuple):
        key, value = argument
        return f"argument {key}", _nested(key.split("."), value)
    key, separator, text = argument.lstrip("-").partition("=")
    if re.search(r"key|password|secret|credential|auth|(?<![a-z])token(?![a-z])", key, re.IGNORECASE):
        keep_secret(text)
    source = f"argument {shorten(argument)}"
    names = key.split(".")
    if not separator or not all(names):
        raise UserError(f"{source}: expected key=value, for example training.steps=10")
    if not text.strip():  # YAML reads null, but a variable of the shell may be unset
        raise UserError(f"{source}: expected a value after =, got none; null unsets a key")
    with errors_at(source):
        _check_text(text, f"{key:.60}")
    try:
        if not {'"', "'"} & set(text):
            text = _PATTERN.sub(lambda match: f'"{match[0]}"', text)
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError):
        raise UserError(f"{source}: the value is not valid YAML") from None
    # YAML spells these numbers .inf and .nan, but Python and TOML do not.
    value = float(text) if text in ("inf", "-inf", "nan") else parsed["value"]
    if text == "off":  # false in YAML 1.1, but a value of some keys
        value = text
    return source, _nested(names, value)


def _nested(names: Sequence[str], value: object) -> Table:
    table: Table = {names[-1]: value}
    for name in reversed(names[:-1]):
        table = {name: table}
    return table


class _Schema(NamedTuple):
    """All tables and keys of a configuration. Names of nested tables and of keys have dots in them."""

    tables: dict[str, type[DataclassInstance]]  # dataclass of each table; "" is the whole configuration
    types: dict[str, object]  # type of each key

    @classmethod
    def of(cls, declared: type[DataclassInstance], name: str = "") -> _Schema:
        """Returns the tables and keys of a dataclass whose table is called ``name``."""
        schema = cls({name: declared}, {})
        hints = get_type_hints(declared)
        for field in dataclasses.fields(declared):
            key, hint = f"{name}.{field.name}".lstrip("."), hints[field.name]
            if isinstance(hint, type) and dataclasses.is_dataclass(hint):
                inner = cls.of(hint, key)
                schema.tables.update(inner.tables)
                schema.types.update(inner.types)
            else:
                schema.types[key] = hint
        return schema

    def settings(self, table: Table, name: str = "") -> Iterator[tuple[str, object]]:
        """Yields the keys and values of a table. Raises UserError for unknown keys and for wrong types."""
        for field, value in table.items():
            key = f"{name}.{field}" if name else field
            if (synonym := SYNONYMS.get(key)) is not None:
                same = f"the value of {name}.{synonym}, which is the same key; remove one of them"
                require(table.get(synonym, value) == value, key, same, shorten(value))
                field, key = synonym, f"{name}.{synonym}"
            if "." in field or key not in {*self.tables, *self.types}:
                raise UserError(self.explain_unknown(name, field))
            if key in self.tables:
                _check_type(value, dict, key)
                yield from self.settings(value, key)
            else:
                _check_type(value, self.types[key], key)
                _check_value(value, key)
                yield key, value

    def build(self, make: Callable[..., D], declared: type[D], values: Table, name: str = "") -> D:
        """Returns ``make(**arguments)``, a dataclass ``declared``, with the given values of its keys."""
        arguments: Table = {}
        for field in dataclasses.fields(declared):
            key = f"{name}.{field.name}".lstrip(".")
            if key in self.tables:
                assert callable(field.default_factory)
                default = partial(dataclasses.replace, field.default_factory())
                arguments[field.name] = self.build(default, self.tables[key], values, key)
            elif key in values:
                arguments[field.name] = _with_floats(values[key], self.types[key])
        return make(**arguments)

    def explain_unknown(self, table: str, name: str) -> str:
        """Returns what is wrong with a key. Hints name the same key elsewhere, or a similar one here."""
        key = f"{table}.{name}" if table else name
        if key in FORMER:
            return f"{key!r} {FORMER[key]}"
        if key in COMMANDS:
            return f"unknown key {key!r}; this table is for {COMMANDS[key]}; start that, or remove the table"
        siblings = [field.name for field in dataclasses.fields(self.tables[table])]
        hints = [other for other in (*self.types, *self.tables) if name and other.rpartition(".")[2] == name]
        if not hints:
            near = difflib.get_close_matches(name.lower()[:60], siblings, n=1, cutoff=0.7)
            hints = [f"{table}.{match}" if table else match for match in near]
        if hints:
            return f"unknown key {shorten(key)}; did you mean {' or '.join(map(repr, hints))}?"
        known = f"the keys of [{table}]" if table else "the tables"
        names = siblings if table else [name for name in self.tables if name]
        return f"unknown key {shorten(key)}; {known} are {', '.join(names)}"


def _check_type(value: object, hint: object, key: str) -> None:
    """Raises UserError if a value, or an item of a list, is not of the type that the field declares."""
    kinds = _kinds(hint)
    kind = get_origin(kinds[0]) or kinds[0]
    # A field with several types, with a Literal or with Any has checks of its own.
    if len(kinds) > 1 or kind not in EXPECTED or (value is None and hint not in kinds):
        return
    fits = isinstance(value, int | float if kind is float else kind)
    fits = fits and isinstance(value, bool) == (kind is bool)  # a bool is an int for Python
    hint = "; write it in quotes" if kind is str else ""
    if kind is list and isinstance(value, str | int | float):
        hint = f"; write it in brackets: [{shorten(value)}]"
    require(fits, key, EXPECTED[kind], shorten(value) + hint)
    if isinstance(value, list):
        for index, item in enumerate(value):
            _check_type(item, get_args(kinds[0])[0], f"{key}[{index}]")


def _check_value(value: object, key: str) -> None:
    """Raises UserError for a value that no key can have."""
    if isinstance(value, str):
        _check_text(value, key)
    elif isinstance(value, int):
        require(-(2**63) <= value < 2**63, key, "an integer of at most 64 bits", shorten(value))
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _check_value(item, f"{key}[{index}]")
    elif isinstance(value, dict):
        for name, item in value.items():
            require(isinstance(name, str), key, "names as the keys of a table", shorten(name))
            _check_text(name, key)
            _check_value(item, f"{key}.{name:.60}")
    else:  # such as a date
        expected = "a string, a number, true, false, a list or a table"
        require(isinstance(value, float | None), key, expected, shorten(value))


def _check_text(text: str, key: str) -> None:
    """Raises UserError for text that looks like a variable, and for text that no file can be named."""
    got = f"{shorten(text)}; variables are not expanded, so write the value itself"
    require("${" not in text, key, "a literal value without '${'", got)
    require("\0" not in text, key, "text without NUL characters", shorten(text))
    require_unicode(text, key)


def _merged(old: object, new: object) -> object:
    """Returns the value of a key that is set again. Tables of free keys are merged; an empty one clears."""
    if isinstance(old, dict) and isinstance(new, dict) and new:
        return old | {name: _merged(old.get(name), value) for name, value in new.items()}
    return new


def _with_floats(value: object, hint: object) -> object:
    """Returns a value of a field whose type is ``hint``, with integers as floats if the field has floats."""
    kind = _kinds(hint)[0]
    if get_origin(kind) is list and isinstance(value, list):
        return [_with_floats(item, get_args(kind)[0]) for item in value]
    return float(value) if kind is float and isinstance(value, int) else value


def _require_all(schema: _Schema, values: Table, path: str | Path) -> None:
    """Raises UserError if keys without a default are missing; the message names all of them."""
    required = [
        f"{table}.{field.name}"
        for table, declared in schema.tables.items()
        for field in dataclasses.fields(declared)
        if field.default == MISSING
    ]
    missing = [key for key in required if values.get(key, MISSING) == MISSING]
    if "model" in schema.tables and not (values.get("model.flavor") or values.get("model.hf_path")):
        missing.append("model.flavor (random weights) or model.hf_path (a local Hugging Face snapshot)")
    if missing:
        names = "; ".join(missing)
        raise UserError(f"{path}: missing, without a default: {names}; set them here or as key=value")


def _kinds(hint: object) -> list[object]:
    """Returns the types of a union without None, or the type itself."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return [kind for kind in kinds if kind is not NoneType]


def _keys(value: object, key: str) -> Iterator[str]:
    """Yields a key, and the keys of its value if that is a table of free keys."""
    yield key
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _keys(item, f"{key}.{name}")
