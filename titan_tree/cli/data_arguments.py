"""Command line arguments that say which data to read, and a progress bar for reading them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from titan_tree.data.readers import READERS
from titan_tree.errors import UserError, missing_snapshot, printable
from titan_tree.models.settings import MODELS

if TYPE_CHECKING:  # functions import what --help does not need
    from titan_tree.data.readers import OpenFile
    from titan_tree.data.settings import DataConfig
    from titan_tree.models.tree_model import TreeModel

FILES = 'a file, a glob pattern, or "demo" for the bundled sample'


def add_data_arguments(parser: argparse.ArgumentParser, files: str = FILES, metavar: str = "FILE") -> None:
    """Declares the files, their format, and how conversations become samples.

    Args:
        parser: gets the arguments.
        files: what the files may be, for the help.
        metavar: what the help calls a file.
    """
    add = parser.add_argument
    add("files", nargs="+", metavar=metavar, help=files)
    add(
        "--format",
        default="auto",
        help=f"{', '.join(READERS)}, a reader of your own as module:name, or auto: recognize each file",
    )
    add(
        "--tokenizer",
        help="a Hugging Face folder, a .tiktoken[.gz] file, module:name of your own, or byte "
        "(default for conversations)",
    )
    add("--template", help="chat template: chatml, qwen3 or a file (default: the tokenizer's own, or chatml)")
    add_settings(
        parser,
        "--sample",
        "how conversations become samples, as in the table [data.sample] of a configuration: "
        "turns=last, keep_reasoning=false, ...",
    )
    add("--ignore-fields", nargs="+", default=[], metavar="NAME", help="fields to ignore if they are unknown")


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


def add_settings(parser: argparse.ArgumentParser, option: str, help: str) -> None:
    """Declares an option that takes KEY=VALUE pairs, as the table of a configuration has them."""
    parser.add_argument(option, nargs="+", type=_setting, default=[], metavar="KEY=VALUE", help=help)


def data_config(args: argparse.Namespace, **settings: Any) -> DataConfig:
    """Returns the table [data] that the arguments describe. ``settings`` are further keys."""
    from titan_tree.data.settings import DataConfig

    return DataConfig(
        files=args.files,
        format=args.format,
        sample=dict(args.sample),
        ignore_fields=args.ignore_fields,
        **settings,
    )


def _setting(text: str) -> tuple[str, Any]:
    """Parses key=value. A value that is not JSON, such as a bare word, is a string."""
    key, separator, value = text.partition("=")
    if not separator or not key:
        raise argparse.ArgumentTypeError(f"expected KEY=VALUE, got {text!r}")
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


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
