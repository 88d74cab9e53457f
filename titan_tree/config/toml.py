"""Reads a configuration from a TOML file and ``key=value`` arguments, and writes one back.

Arguments override the file; the file overrides the defaults of the tables. Every error is a UserError that
names the file or argument, the key and, if one is similar, the key that was probably meant.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, cast, get_args, get_origin, get_type_hints

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from titan_tree.config.checks import MISSING, require
from titan_tree.config.tables import Config
from titan_tree.errors import UserError, errors_at, require_unicode, shorten

C = TypeVar("C", bound=Config)

# Keys of earlier versions, and the setting that replaced each one.
RENAMED = {
    "metrics.csv": 'metrics.loggers, a list of names: add or remove "csv"',
    "metrics.tensorboard": 'metrics.loggers, a list of names: add or remove "tensorboard"',
}
# What a key of each type accepts. omegaconf alone would also convert values, such as "3" to 3.
EXPECTED = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "a table",
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration of a TOML file, with overrides applied.

    Args:
        path: the TOML file.
        overrides: ``table.key=value`` arguments; leading dashes are ignored. Values follow YAML: ``3``,
            ``1e-4``, ``true``, ``null``, ``[a, b]``. ``model.overrides={}`` removes the file's overrides.
    Raises:
        UserError: the file cannot be read, or it or an override contains a wrong key or value.
    """
    return load_tables(Config, path, overrides)


def load_tables(tables: type[C], path: str | Path, overrides: Sequence[str] = ()) -> C:
    """Returns a configuration with other tables. Arguments and errors: see ``load_config``."""
    config = OmegaConf.structured(tables)
    sources: dict[str, str] = {}  # the argument that set a key
    for source, table in [(str(path), _read_file(path)), *map(_read_argument, overrides)]:
        with errors_at(source):
            _check_tables(table, tables)
            config = _merge(config, table)
        if source != str(path):
            sources |= {key: source for key, _ in _items(table)}
    _require_all(config, path)
    try:
        return cast(C, OmegaConf.to_object(config))  # runs the checks of every table
    except UserError as error:
        key = str(error).partition(":")[0]
        raise UserError(f"{sources.get(key, path)}: {error}") from None


def dump_config(config: Config) -> str:
    """Returns ``config`` as TOML that ``load_config`` reads back. Keys whose value is None are omitted."""
    lines: list[str] = []

    def write(table: dict[str, Any], prefix: str) -> None:
        for key, value in table.items():
            if value is not None and not isinstance(value, dict):
                lines.append(f"{_toml_key(key)} = {_toml_value(value)}")
        for key, value in table.items():
            if isinstance(value, dict) and value:
                lines.append(f"\n[{prefix}{_toml_key(key)}]")
                write(value, f"{prefix}{_toml_key(key)}.")

    write(dataclasses.asdict(config), "")
    return "\n".join(lines) + "\n"


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else json.dumps(key)


def _toml_value(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml_value, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)  # TOML writes inf and nan like Python
    return json.dumps(value)  # TOML writes strings, numbers and booleans like JSON


def _read_file(path: str | Path) -> dict[str, Any]:
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise UserError(f"{path}: not valid TOML: brackets are nested too deeply") from None
    except ValueError as error:  # wrong TOML, not UTF-8, or a number of thousands of digits
        raise UserError(f"{path}: not valid TOML: {error}") from None


def _read_argument(argument: str) -> tuple[str, dict[str, Any]]:
    """Returns a name of the argument for error messages, and the tables that it sets."""
    source = f"argument {shorten(argument)}"
    key, separator, text = argument.lstrip("-").partition("=")
    names = key.split(".")
    if not separator or not all(names):
        raise UserError(f"{source}: expected key=value, for example training.steps=10")
    _check_text(text, f"{source}: {key:.60}")
    try:
        parsed: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"value={text}"]))
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, RecursionError):
        raise UserError(f"{source}: the value is not valid YAML") from None
    # YAML spells these numbers .inf and .nan, but Python and TOML do not.
    value: Any = float(text) if text in ("inf", "-inf", "nan") else parsed["value"]
    for name in reversed(names):
        value = {name: value}
    return source, value


def _check_tables(tables: dict[str, Any], config: type[Config]) -> None:
    """Raises UserError for unknown keys, values of another type than the key's, and unusable values."""
    _check_fields(tables, config, "", config)
    for name, table in tables.items():
        _check_value(table, name)


def _check_fields(table: dict[str, Any], declared: Any, key: str, config: type[Config]) -> None:
    """Raises UserError for unknown keys of a table, and for values of another type than the key's.

    Args:
        table: the values.
        declared: the dataclass that declares the keys.
        key: name of the table; "" for the whole configuration.
        config: the dataclass of the whole configuration.
    """
    types = _types(declared)
    for name, value in table.items():
        if name not in types:
            raise UserError(_explain_unknown(config, key, name))
        path, is_table = f"{key}.{name}" if key else name, dataclasses.is_dataclass(types[name])
        _check_type(value, dict if is_table else types[name], path)
        if is_table:
            _check_fields(value, types[name], path, config)


def _check_type(value: Any, hint: Any, key: str) -> None:
    """Raises UserError if a value, or an item of a list, is not of the type that the field declares."""
    options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kind = get_origin(options[0]) or options[0]
    if kind not in EXPECTED or (value is None and NoneType in options):
        return
    fits = isinstance(value, int | float if kind is float else kind)
    fits = fits and isinstance(value, bool) == (kind is bool)  # a bool is an int for Python
    hint = "; write it in quotes" if kind is str else ""
    require(fits, key, EXPECTED[kind], shorten(value) + hint)
    if kind is list:
        for index, item in enumerate(value):
            _check_type(item, get_args(options[0])[0], f"{key}[{index}]")


def _check_value(value: Any, key: str) -> None:
    """Raises UserError for a value that no key can have, or that omegaconf would not take literally."""
    expected = "a string, a number, true, false, a list or a table"
    require(isinstance(value, str | int | float | list | dict | None), key, expected, shorten(value))
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


def _check_text(text: str, key: str) -> None:
    """Raises UserError for what omegaconf would replace, and for text that no file can be named."""
    for marker, found in (("${", "${" in text), (MISSING, text.strip() == MISSING)):
        if found:
            raise UserError(
                f"{key}: expected a literal value without {marker!r}, got {shorten(text)}; variables are not "
                "expanded, so write the value itself"
            )
    require("\0" not in text, key, "text without NUL characters", shorten(text))
    require_unicode(text, key)


def _merge(config: Any, tables: dict[str, Any]) -> Any:
    """Returns ``config`` with the values of ``tables``. An empty table empties a table of free keys."""
    try:
        for key, value in _items(tables):
            if value == {} and OmegaConf.get_type(OmegaConf.select(config, key)) is dict:
                OmegaConf.update(config, key, {}, merge=False)
        return OmegaConf.merge(config, tables)
    except OmegaConfBaseException as error:
        raise UserError(f"{error.full_key}: {str(error).splitlines()[0]:.200}") from None


def _require_all(config: Any, path: str | Path) -> None:
    """Raises UserError if keys without a default are missing; the message names all of them."""
    missing = sorted(OmegaConf.missing_keys(config))
    if not (config.model.flavor or config.model.hf_path):
        missing.append("model.flavor (random weights) or model.hf_path (a local Hugging Face snapshot)")
    if missing:
        names = "; ".join(missing)
        raise UserError(f"{path}: missing, without a default: {names}; set them here or as key=value")


def _explain_unknown(config: type[Config], table: str, name: str) -> str:
    """Returns what is wrong with a key. Hints name the same key of another table, or a similar one here."""
    key = f"{table}.{name}" if table else name
    if key in RENAMED:
        return f"{key!r} was replaced by {RENAMED[key]}"
    tables = _tables(config)
    here = list(tables[table] if table else _types(config))
    hints = [f"{other}.{name}" for other, fields in tables.items() if name in fields]
    if not hints:
        near = difflib.get_close_matches(name.lower()[:60], here, n=1, cutoff=0.7)
        hints = [f"{table}.{match}" if table else match for match in near]
    if hints:
        return f"unknown key {shorten(key)}; did you mean {' or '.join(map(repr, hints))}?"
    owner = f"the keys of [{table}]" if table else "the tables"
    return f"unknown key {shorten(key)}; {owner} are {', '.join(here if table else tables)}"


def _tables(config: Any, prefix: str = "") -> dict[str, dict[str, Any]]:
    """Returns the types of the keys of all tables, by the table's name; nested tables have dots in it."""
    found: dict[str, dict[str, Any]] = {}
    for name, hint in _types(config).items():
        if dataclasses.is_dataclass(hint):
            found[prefix + name] = _types(hint)
            found |= _tables(hint, f"{prefix}{name}.")
    return found


def _types(table: Any) -> dict[str, Any]:
    """Returns the types of the fields of a dataclass."""
    hints = get_type_hints(table)
    return {field.name: hints[field.name] for field in dataclasses.fields(table)}


def _items(tables: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields all keys, those of nested tables with dots, and their values."""
    for key, value in tables.items():
        yield prefix + key, value
        if isinstance(value, dict):
            yield from _items(value, f"{prefix}{key}.")
