"""metrics.csv: one row per logged step."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from titan_tree.metrics.loggers import Logger


class CsvLogger(Logger):
    """Appends a row to metrics.csv per logged step and flushes it immediately.

    The columns are those of the first row. A value with a new name adds a column, empty in earlier rows.
    A resumed run removes the rows of the steps that it repeats.
    """

    def __init__(self, folder: Path, start_step: int, total_steps: int) -> None:
        super().__init__(folder, start_step, total_steps)
        self.path = folder / "metrics.csv"
        self.columns: list[str] = []
        if self.path.exists():
            with self.path.open(newline="") as file:
                reader = csv.DictReader(file)
                # A crash can truncate the last row, even inside its step number. Missing values are None.
                rows = [row for row in reader if None not in row.values() and int(row["step"]) <= start_step]
                self.columns = list(reader.fieldnames or [])
            self._rewrite(rows)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        row = {"step": step, **values}
        if not row.keys() <= set(self.columns):
            rows = []
            if self.path.exists():
                with self.path.open(newline="") as file:
                    rows = list(csv.DictReader(file))
            self.columns += [name for name in row if name not in self.columns]
            self._rewrite(rows)
        with self.path.open("a", newline="") as file:
            self._writer(file).writerow(row)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        part = self.path.with_suffix(".csv.part")
        with part.open("w", newline="") as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(rows)
        part.replace(self.path)

    def _writer(self, file: TextIO) -> csv.DictWriter:
        return csv.DictWriter(file, self.columns, restval="", lineterminator="\n")
