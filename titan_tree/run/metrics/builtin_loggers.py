"""The loggers that need no further package: log lines, metrics.csv and TensorBoard."""

from __future__ import annotations

import csv
import logging
import math
import time
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import TextIO

from rich import get_console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from torch.utils.tensorboard import SummaryWriter

from titan_tree.config.files import regular
from titan_tree.errors import UserError, shorten
from titan_tree.run.metrics.loggers import Logger

logger = logging.getLogger(__name__)

# The values that the line shows, in this order, and those that it always omits. Any other value, such as one
# of your own loss or metric, follows the loss and the reward.
FORMATS = {
    "bad_steps": "{:.0f} bad steps so far",
    "loss": "loss {:.4f}",
    "reward": "reward {:.3f}",
    "grad_norm": "grad {:.3f}",
    "lr": "lr {:.2e}",
    "por": "POR {:.1%}",
    "leaf_tokens_per_s": "{:,.0f} leaf tok/s",
    "executed_tokens_per_s": "{:,.0f} executed tok/s",
    "step_s": "{:.2f} s",
    "mfu": "MFU {:.1%}",
    "peak_memory_gib": "{:.1f} GiB",
}
FIRST = ("bad_steps", "loss", "reward")
WIDTH = 100  # columns of a line
# What a line omits if it has no room, in this order, before metrics of the loss or of your own.
LEFT_OUT_FIRST = ("executed_tokens_per_s", "mfu", "peak_memory_gib", "por", "lr", "grad_norm")
OMITTED = {
    "epoch",
    "por_samples",
    "err",
    "logical_tokens",
    "leaf_tokens",
    "executed_tokens",
    "scored_edges",
    "forwards",
    "chain_peak_tokens",
    "gateway_gib",
    "extra_forward_tokens",
    "dummy_forwards",
    "passes_share",
    "optimizer_share",
    "exchange_share",
    "host_share",
    "replayed_rows",
    "replay_disagreement",
    "rollouts",
    "sampled_tokens",
    "sampling_s",
    "scoring_s",
}


def progress_bar(is_shown: bool = True) -> Progress:
    """Returns a bar for stdout if that is a terminal. One that starts later is shown below the first one."""
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    console = get_console()
    return Progress(*columns, console=console, disable=not (is_shown and console.is_terminal), transient=True)


class ConsoleLogger(Logger):
    """Writes log lines through ``logging``, with the time left.

    If stdout is a terminal, a progress bar shows that time instead.
    """

    def __init__(self, folder: Path, start_step: int, total_steps: int) -> None:
        super().__init__(folder, start_step, total_steps)
        self.progress = progress_bar()
        self._first: tuple[int, float] | None = None  # the first step of this process, and when it ended
        self.bar = self.progress.add_task("training", total=total_steps, completed=start_step)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        start = f"step {step:{len(str(self.total_steps))}}/{self.total_steps}  "
        end = self._time_left(step) if self.progress.disable else ""
        logger.info("%s%s%s", start, _line(values, WIDTH - len(start) - len(end)), end)

    def _time_left(self, step: int) -> str:
        """Returns how long the remaining steps will take if they are like those since the first one."""
        if self._first is None or step <= self._first[0] or step == self.total_steps:
            return ""
        first, started = self._first
        seconds = (time.perf_counter() - started) / (step - first) * (self.total_steps - step)
        return f"  {timedelta(seconds=round(seconds))} left"

    def advance(self, step: int) -> None:
        if self._first is None and step > self.start_step:
            self._first = step, time.perf_counter()
        self.progress.start()  # does nothing if the bar is already visible
        self.progress.update(self.bar, completed=step)

    def close(self) -> None:
        self.progress.stop()


def _line(values: Mapping[str, float], width: int) -> str:
    """Returns the text of ``values`` in at most ``width`` columns; ``LEFT_OUT_FIRST`` leave first."""
    others = {
        name: f"{name} {{:.4f}}"
        for name in values
        if name not in FORMATS and name not in OMITTED and not _repeats_loss(name, values)
    }
    order = [*FIRST, *others, *(name for name in FORMATS if name not in FIRST)]
    texts = {name: (FORMATS | others)[name].format(values[name]) for name in order if name in values}
    for name in (*LEFT_OUT_FIRST, *reversed(others)):
        if len("  ".join(texts.values())) > width:
            texts.pop(name, None)
    return "  ".join(texts.values())


def _repeats_loss(name: str, values: Mapping[str, float]) -> bool:
    """Returns whether the value is the loss itself: ``nll`` is the loss of sft with token_mean."""
    return name == "nll" and "loss" in values and math.isclose(values["nll"], values["loss"], rel_tol=1e-3)


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
            with open(self.path, newline="", errors="backslashreplace", opener=regular) as file:
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
                with open(self.path, newline="", opener=regular) as file:
                    rows = list(csv.DictReader(file))
            self.columns += [name for name in row if name not in self.columns]
            self._rewrite(rows)
        with open(self.path, "a", newline="", opener=regular) as file:
            self._writer(file).writerow(row)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        part = self.path.with_suffix(".csv.part")
        with open(part, "w", newline="", opener=regular) as file:
            writer = self._writer(file)
            writer.writeheader()
            writer.writerows(rows)
        part.replace(self.path)

    def _writer(self, file: TextIO) -> csv.DictWriter:
        return csv.DictWriter(file, self.columns, restval="", lineterminator="\n")


class TensorBoardLogger(Logger):
    """Writes every value as a scalar into the run's folder ``tensorboard/``.

    A resumed run hides the steps that it repeats.
    """

    def __init__(self, folder: Path, start_step: int, total_steps: int) -> None:
        super().__init__(folder, start_step, total_steps)
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start_step + 1)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self.writer.add_scalar(name, value, step)

    def sample(self, text: str) -> None:
        indented = "\n".join(f"    {line}" for line in text.splitlines())  # Markdown shows it as it is
        self.writer.add_text("first_sample", indented, 0)

    def close(self) -> None:
        self.writer.close()
