"""Shows the keys of a configuration, or writes a configuration that trains a model on data files.

titan-tree config                  all keys, with their types, defaults and meanings
titan-tree config optimizer        the keys of a table
titan-tree config lr               a key, with or without its table
titan-tree config --json           the same, for programs
titan-tree config --model qwen3:0.6B --data rollouts.jsonl -o my.toml
titan-tree config --model /models/Qwen3-0.6B --data 'rollouts/*.jsonl' optimizer.lr=2e-5 -o my.toml

A written configuration suits the model, the data and this machine: a loss that the data has the fields for,
and the precision of the GPU or the CPU. It says which fields it ignores or does not use.
The values are a starting point, not a tuned recipe.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from titan_tree.cli.data_arguments import add_force_argument, add_overrides
from titan_tree.errors import UserError, did_you_mean, printable

if TYPE_CHECKING:
    from titan_tree.cli.reference import Key, Table

WIDTH = 100  # columns


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree config``."""
    add = parser.add_argument
    add("names", nargs="*", metavar="KEY_OR_TABLE", help="show only these (default: all)")
    add("--json", action="store_true", help="print the keys as JSON")
    add(
        "--model",
        metavar="MODEL",
        help="write a configuration for NAME:FLAVOR with random weights, such as qwen3:0.6B or the tiny "
        "qwen3:debug, or for the folder of a Hugging Face snapshot",
    )
    add("--data", nargs="+", metavar="FILE", help='its data: files, glob patterns, or "demo"')
    add_overrides(parser)
    meaning = "the file to write, a new one (default: print it)"
    add("-o", "--out", type=os.path.expanduser, metavar="FILE.toml", help=meaning)
    add_force_argument(parser)


def run(args: argparse.Namespace) -> None:
    """Runs ``titan-tree config``. Raises UserError for unknown names, and for a wrong model or data."""
    if (args.model is None) != (args.data is None):
        missing = "--data FILE" if args.data is None else "--model MODEL"
        raise UserError(
            f"{missing}: missing; a written configuration has both a model and data, such as --model "
            "qwen3:debug --data demo"
        )
    if args.model is None and args.out is not None:
        raise UserError("--out: expected --model and --data as well; add them, or remove --out")
    if args.model is not None:
        if args.names or args.json:
            given = args.names[0] if args.names else "--json"
            raise UserError(f"{given}: expected no keys and no --json together with --model; remove it")
        _write(args)
        return
    if args.overrides:
        raise UserError(f"{args.overrides[0]}: expected --model and --data as well; add them, or remove it")
    found = find(args.names)
    if args.json:
        print(json.dumps([_as_json(key) for table in found for key in table.keys]))
    else:
        print("\n\n".join(_describe(table) for table in found))


def find(names: list[str]) -> list[Table]:
    """Returns the tables and keys that have one of the names; all without names.

    Raises:
        UserError: a name that no table and no key has.
    """
    from titan_tree.cli.reference import tables

    if not names:
        return tables()
    found = []
    for name in names:
        matches = [table for table in tables() if table.name == name or table.name.startswith(f"{name}.")]
        for table in [] if matches else tables():
            if keys := [key for key in table.keys if f".{key.name}".endswith(f".{name}")]:
                matches.append(table._replace(keys=keys))
        if not matches:
            full = [key.name for table in tables() for key in table.keys]
            known = [*(table.name for table in tables()), *full, *(key.rpartition(".")[2] for key in full)]
            hint = did_you_mean(name, known)
            raise UserError(f"unknown key or table {name!r} (titan-tree config lists all keys){hint}")
        found += matches
    return found


def _describe(table: Table) -> str:
    """Returns a table and its keys as text."""
    lines = [f"[{table.name}]", *_filled(table.meaning, "")] if table.name else []
    for key in table.keys:
        default = key.default_text
        default = default if default in ("required", "unset") else f"default {default}"
        lines += [f"  {key.name}: {key.type.replace('`', '')}; {default}", *_filled(key.meaning, "      ")]
    return "\n".join(lines)


def _filled(text: str, indent: str) -> list[str]:
    text = " ".join(text.replace("`", "").split())
    return wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_on_hyphens=False)


def _as_json(key: Key) -> dict[str, Any]:
    from titan_tree.config.checks import MISSING

    required = key.default == MISSING
    return {
        "key": key.name,
        "type": key.type.replace("`", ""),
        "required": required,
        "default": None if required else key.default,
        "meaning": key.meaning.replace("``", ""),
    }


def _write(args: argparse.Namespace) -> None:
    """Writes or prints a configuration."""
    from titan_tree.cli.suggestion import settings  # imports torch
    from titan_tree.config.files import check_output, write_output
    from titan_tree.data.readers import find_files

    out, read = args.out, [args.model, *find_files(args.data)]
    if out is not None:
        check_output(out, None, read, args.force)
    values, notes, is_unscored = settings(args.model, args.data, Path(out or "run.toml").stem, args.overrides)
    what_next = advice(out or "my.toml", args.data if is_unscored else [])
    text = written(values, [f"{what_next}.", *notes])
    if out is None:
        print(text, end="")
        return
    write_output(out, text, None, read, args.force)
    print(*map(printable, (f"wrote {out}; {what_next}", *notes)), sep="\n")


def advice(out: str, unscored: list[str]) -> str:
    """Returns what to do with the configuration ``out``.

    Args:
        unscored: the data files, if the loss needs log-probs of the model before training that they lack.
    """
    out = shlex.quote(out)
    plan = f"titan-tree plan {out} estimates its memory"
    if not unscored:
        return f"{plan}, titan-tree train {out} trains"
    return (
        f"{plan}; its loss needs log-probs of the model before training: titan-tree score "
        f"{shlex.join(unscored)} scored.jsonl --config {out} --field ref_logprobs writes them, then "
        f"titan-tree train {out} data.files=scored.jsonl trains"
    )


def written(values: Mapping[str, Any], notes: Sequence[str]) -> str:
    """Returns a TOML file with a comment above each key, and ``notes`` at its beginning."""
    from titan_tree.cli.reference import tables
    from titan_tree.config.toml import toml_value

    lines = [
        *(f"# {line}" for note in notes for line in _filled(note, "")),
        "# Other keys have their defaults: titan-tree config lists all of them.",
    ]
    left = dict(values)
    for table in tables():
        keys = [key for key in table.keys if key.name in left]
        if keys and table.name:
            lines += ["", f"[{table.name}]"]
        for key in keys:
            lines += [f"# {line}" for line in _filled(key.meaning, "")]
            lines.append(f"{key.name.rpartition('.')[2]} = {toml_value(left.pop(key.name))}")
    return "\n".join(lines) + "\n"
