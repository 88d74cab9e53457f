"""A run's folder: its curves, and the settings with which it read its data."""

from __future__ import annotations

import csv
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING

from titan_tree.components.tree_tokenizer import TreeTokenizer
from titan_tree.config.files import regular
from titan_tree.errors import UserError

if TYPE_CHECKING:
    from titan_tree.run.config import Config

Curves = dict[str, tuple[list[int], list[float]]]  # name -> steps, values
RUN_FILES = "config.toml", "metrics.csv"
MOST_POINTS = 500  # of a curve; others are left out evenly


def is_run(path: str) -> bool:
    """Returns whether a path is the folder of a run."""
    return (Path(path) / "config.toml").is_file()


def load_run(folder: str, plugins: bool = False) -> tuple[Config, TreeTokenizer | None, Curves]:
    """Returns the configuration of a run, its tokenizer, and the columns of metrics.csv that vary.

    Args:
        plugins: import the code that the configuration names. Otherwise only [data] and [model] are read.

    Raises:
        UserError: config.toml or metrics.csv is malformed, or the tokenizer is missing. Or the table [data]
            names code, and ``plugins`` is false.
    """
    from titan_tree.run.config import load_stored  # imports omegaconf

    config = load_stored(Path(folder) / "config.toml", plugins, data_only=not plugins)
    name, snapshot = config.data.tokenizer, config.model.hf_path
    if name is None and snapshot and (Path(snapshot) / "tokenizer.json").is_file():
        name = snapshot
    tokenizer = None if name is None else TreeTokenizer.load(name, config.data.template)
    return config, tokenizer, _curves(os.path.join(folder, "metrics.csv"))


def _curves(file: str) -> Curves:
    """Returns the columns of a metrics.csv with more than one finite value; none without the file."""
    if not os.path.lexists(file):
        return {}
    columns: Curves = {}
    with open(file, newline="", encoding="utf-8", errors="backslashreplace", opener=regular) as lines:
        try:
            rows = list(csv.DictReader(lines))
        except csv.Error as error:
            raise UserError(f"{file}: {error}; repair or remove it") from None
        for number, row in enumerate(rows, start=2):
            try:
                step = int(row["step"])
                values = {name: float(text) for name, text in row.items() if name != "step" and text}
            except (KeyError, TypeError, ValueError):
                raise UserError(f"{file}:{number}: expected a step and numbers; repair the line") from None
            for name, value in values.items():
                if math.isfinite(value):
                    steps, kept = columns.setdefault(name, ([], []))
                    steps.append(step)
                    kept.append(value)
    return {
        name: (steps[:: -(-len(steps) // MOST_POINTS)], values[:: -(-len(values) // MOST_POINTS)])
        for name, (steps, values) in columns.items()
        if len(set(values)) > 1
    }
