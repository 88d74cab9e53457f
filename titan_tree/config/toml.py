"""Reads a configuration from a TOML file and ``key=value`` arguments, and writes one back.

Arguments override the file; the file overrides the defaults in tables.py. Every error is a UserError that
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
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from titan_tree.config.tables import Config
from titan_tree.errors import UserError

# Keys of earlier versions, and the setting that replaced each one.
RENAMED = {
    "metrics.csv": 'metrics.loggers, a list of names: add or remove "csv"',
    "metrics.tensorboard": 'metrics.loggers, a list of names: add or remove "tensorboard"',
}


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Returns the configuration of a TOML file, with overrides applied.

    Args:
        path: the TOML file.
        overrides: ``table.key=value`` arguments; leading dashes are ignored. Values follow YAML: ``3``,
            ``1e-4``, ``true``, ``null``, ``[a, b]``.
    Raises:
        UserError: the file cannot be read, or it or an override contains a wrong key or value.
    """
    try:
        table = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"--config {path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not valid TOML: {error}") from None

    config = _merge(OmegaConf.structured(Config), table, source=str(path))
    sources: dict[str, str] = {}  # the argument that set a key
    for argument in overrides:
        key, separator, _ = argument.lstrip("-").partition("=")
        if not separator or not key:
            raise UserError(f"argument {argument!r}: expected key=value, for example training.steps=10")
        try:
            parsed = OmegaConf.from_dotlist([argument.lstrip("-")])
        except yaml.YAMLError:
            raise UserError(f"argument {argument!r}: the value is not valid YAML") from None
        sources[key] = f"argument {argument!r}"
        config = _merge(config, parsed, sources[key])
    try:
        return OmegaConf.to_object(config)  # type: ignore[return-value]  # runs the checks of every table
    except MissingMandatoryValue as error:
        raise UserError(f"{path}: {error.full_key}: missing; it has no default") from None
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


def _merge(config: Any, table: Any, source: str) -> Any:
    """Returns ``config`` with the values of ``table``. Errors name ``source``, a file or an argument."""
    try:
        return OmegaConf.merge(config, table)
    except ConfigKeyError as error:
        raise UserError(f"{source}: {_explain_unknown(error.full_key or str(error.key))}") from None
    except (OmegaConfBaseException, TypeError) as error:
        key = getattr(error, "full_key", None)
        message = str(error).splitlines()[0]
        raise UserError(f"{source}: {key}: {message}" if key else f"{source}: {message}") from None


def _explain_unknown(key: str) -> str:
    if key in RENAMED:
        return f"{key!r} was replaced by {RENAMED[key]}"
    known = list(_keys(OmegaConf.to_container(OmegaConf.structured(Config))))
    if close := difflib.get_close_matches(key, known, n=1, cutoff=0.5):
        return f"unknown key {key!r}; did you mean {close[0]!r}?"
    tables = [field.name for field in dataclasses.fields(Config) if field.name != "folder"]
    return f"unknown key {key!r}; the tables are {', '.join(tables)}"


def _keys(table: Any, prefix: str = "") -> Iterator[str]:
    for key, value in table.items():
        yield prefix + key
        if isinstance(value, dict):
            yield from _keys(value, f"{prefix}{key}.")
