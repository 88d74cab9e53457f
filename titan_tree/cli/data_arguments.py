"""Command line arguments that commands share: keys of a configuration, and data files with their progress."""

from __future__ import annotations

import argparse
import glob
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from titan_tree.data.readers import READERS
from titan_tree.data.settings import DataConfig
from titan_tree.errors import UserError, missing_snapshot, printable, shorten
from titan_tree.models.settings import MODELS

if TYPE_CHECKING:  # functions import what --help does not need
    from titan_tree.config.toml import Override
    from titan_tree.data.readers import OpenFile
    from titan_tree.models.tree_model import TreeModel

FILES = 'a file, a glob pattern, or "demo" for the bundled sample'


def add_overrides(parser: argparse.ArgumentParser) -> None:
    """Declares the keys of a configuration that a command takes. ``cli.parse`` finds them among its words."""
    help = "set a key of the configuration; titan-tree config lists them"
    parser.add_argument("overrides", nargs="*", default=[], metavar="key=value", help=help)


def is_override(word: str) -> bool:
    """Returns whether a word of a command line sets a key. A word with = may also name files."""
    key, separator, _ = word.partition("=")
    is_key = re.fullmatch(r"[A-Za-z_][\w.\[\]-]*|--?[A-Za-z_][\w-]*\.[\w.-]*", key)
    return bool(separator and is_key and not os.path.lexists(word) and not glob.glob(word))


def key_of(override: str) -> str:
    """Returns the key that key=value sets; dashes may precede it."""
    return override.lstrip("-").partition("=")[0]


def add_data_arguments(parser: argparse.ArgumentParser, files: str = FILES, metavar: str = "FILE") -> None:
    """Declares the files, and how they become samples: keys of [data], of which three have options.

    Args:
        parser: gets the arguments.
        files: what the files may be, for the help.
        metavar: what the help calls a file.
    """
    add = parser.add_argument
    add("files", nargs="+", metavar=metavar, help=files)
    own = "one of your own as module:name"
    add("--format", help=f"sets data.format: {', '.join(READERS)}, {own}, or auto")
    folder = "a Hugging Face folder, a .tiktoken[.gz] file, module:name of your own, or byte"
    add("--tokenizer", help=f"sets data.tokenizer: {folder} (default for conversations)")
    own = "chatml, qwen3 or a file (default: the tokenizer's own, or chatml)"
    add("--template", help=f"sets data.template, the chat template: {own}")


def add_plugins_argument(parser: argparse.ArgumentParser) -> None:
    """Declares the user's word that the code of a run may run here."""
    parser.add_argument(
        "--plugins",
        action="store_true",
        help="import the code that the config.toml of a run names; read it first (SECURITY.md)",
    )


def add_force_argument(parser: argparse.ArgumentParser) -> None:
    """Declares the user's word that an existing file may be replaced."""
    parser.add_argument("--force", action="store_true", help="replace a file that the command did not write")


def count_to(most: int) -> Callable[[str], int]:
    """Returns the type of an argument that is an integer from 1 to ``most``."""

    def count(text: str) -> int:
        if text.isascii() and text.isdecimal() and len(text) <= len(str(most)) and 0 < int(text) <= most:
            return int(text)
        raise argparse.ArgumentTypeError(f"expected an integer from 1 to {most:,}, got {text!r:.60}")

    return count


@dataclass(kw_only=True)
class DataTables:
    """The configuration of a command that only reads data files."""

    data: DataConfig = field(default_factory=DataConfig)


def data_config(args: argparse.Namespace) -> DataConfig:
    """Returns the table [data] that the arguments describe. Raises UserError for wrong ones."""
    from titan_tree.config.toml import load_tables

    given = {name: getattr(args, name) for name in ("files", "format", "tokenizer", "template")}
    values = {f"data.{name}": value for name, value in given.items() if value is not None}
    return load_tables(DataTables, os.devnull, with_arguments(values, args.overrides)).data


def with_arguments(values: Mapping[str, Any], overrides: Sequence[str]) -> list[Override]:
    """Returns the overrides, with those for which a command has arguments of its own.

    Raises:
        UserError: an override sets one of these keys as well.
    """
    for word in overrides:
        if (key := key_of(word)) in values:
            raise UserError(f"{key}: set twice, by an argument of its own and as {shorten(word)}; remove one")
    return [*overrides, *values.items()]


def named_model(model: str) -> TreeModel:
    """Returns the model that --model names, a family and its size or a snapshot, without weights."""
    import torch

    from titan_tree.models.pretrained import build_model, model_from_config

    name, colon, flavor = model.partition(":")
    with torch.device("meta"):
        if Path(model).is_dir():
            return model_from_config(model)
        if not colon:
            names = [(name, flavor) for name in MODELS for flavor in MODELS[name].flavors]
            near = [f"{name}:{flavor}" for name, flavor in names if model in (name, flavor)]
            known = ", ".join(near) or "qwen3:0.6B or the tiny qwen3:debug, with random weights"
            kind = f"that of a Hugging Face snapshot, or NAME:FLAVOR, such as {known}"
            raise UserError(f"--model {model}: {missing_snapshot(model, kind)}")
        return build_model(name, flavor)


@contextmanager
def progress_bar() -> Iterator[OpenFile]:
    """Provides an ``open`` for data files that advances a bar on stderr while a file is read."""
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import Progress, TimeElapsedColumn

    from titan_tree.data.readers import open_binary

    console = Console(stderr=True)
    # The clock runs on while the records of a large group become a tree.
    columns = *Progress.get_default_columns(), TimeElapsedColumn()
    with Progress(*columns, console=console, transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("")

        def open_file(file: str) -> BinaryIO:
            progress.reset(task, description=escape(printable(file)))
            open_binary(file).close()  # refuses a FIFO, which would block
            return progress.open(file, "rb", task_id=task)

        yield open_file
