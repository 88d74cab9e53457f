"""metrics.csv: one row per logged step."""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import TextIO

from titan_tree.errors import UserError, shorten
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
            with self.path.open(newline="", errors="backslashreplace") as file:
                rows = self._rows_up_to(start_step, csv.DictReader(file))
            self._rewrite(rows)

    def _rows_up_to(self, step: int, reader: csv.DictReader) -> list[dict[str, str]]:
        """Returns the rows of steps up to ``step``, and sets the columns.

        A crash can truncate the last row, even inside its step number. This row is left out.

        Raises:
            UserError: a row is not one that this class writes.
        """
        try:
            rows = [(reader.line_num, row) for row in reader]
        except csv.Error as error:
            raise UserError(f"{self.path}:{reader.line_num}: {error}; rename the file") from None
        self.columns = list(reader.fieldnames or [])
        if rows and None in rows[-1][1].values():
            del rows[-1]
        for line, row in rows:
            step_text = row.get("step", "")
            if None in row or None in row.values() or not (step_text.isdecimal() and len(step_text) < 16):
                raise UserError(
                    f"{self.path}:{line}: expected a step and one value per column, got "
                    f"{shorten(step_text)}; correct or remove the line, or rename the file"
                )
        return [row for _, row in rows if int(row["step"]) <= step]

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
