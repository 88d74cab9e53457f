"""What all benchmarks record: the environment of a measurement, tables, CSV files, and ratios that fell."""

from __future__ import annotations

import csv
import importlib.metadata
import io
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import triton

from titan_tree.config.files import regular, write_output
from titan_tree.errors import UserError

Row = dict[str, object]  # one row of a table and of a CSV file


# The environment.


def default_device() -> torch.device:
    """Returns the GPU, or the CPU on a machine without one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """Returns the GPU's product name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


SETTING = ("bench", "date", "commit", "device", "torch", "triton")  # columns of every row


def environment(device: torch.device, *packages: str) -> Row:
    """Prints and returns what a measurement depends on: date, commit, device and versions.

    Args:
        device: the device that the benchmark runs on.
        packages: distributions whose versions matter, besides torch and triton.

    Raises:
        UserError: a package is not installed.
    """
    row: Row = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    try:
        row |= {name: importlib.metadata.version(name) for name in packages}
    except importlib.metadata.PackageNotFoundError as error:
        raise UserError(
            f"{error.name}: expected this package, with which the benchmark compares; install it with pip"
        ) from error
    print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return row


def commit() -> str:
    """Returns the checked-out commit, with "-dirty" after it if tracked files differ.

    Returns "unknown" without git, and in a copy whose git folder does not say which files are tracked.
    """
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=here.parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        is_known = git("ls-files", here.name)
        return git("describe", "--always", "--dirty", "--exclude", "*") if is_known else "unknown"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# Tables and files.


def print_table(rows: Sequence[Row], columns: Sequence[str] = ()) -> None:
    """Prints ``columns`` of the rows (default: all) as aligned text. None becomes an empty cell."""
    columns = columns or list(rows[0])
    cells = [list(columns), *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip())
    print(flush=True)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def read_csv(path: Path) -> list[Row]:
    """Returns the rows of a CSV file. Raises UserError if it is something else."""
    try:
        with open(path, newline="", opener=regular) as file:
            reader = csv.DictReader(file)
            if "bench" not in (reader.fieldnames or ["bench"]):
                raise UserError(f"{path}: expected a CSV file of a benchmark, which has a column bench")
            return [dict(row) for row in reader]
    except (UnicodeDecodeError, csv.Error) as error:
        raise UserError(f"{path}: expected a CSV file of a benchmark, but {error}") from None


def read_rows(path: Path, program: str) -> list[Row]:
    """Returns the rows that a benchmark wrote to a CSV file. Its name is the last word of ``program``.

    Raises:
        UserError: the file is missing or empty, or another benchmark wrote rows of it.
    """
    if not path.is_file():
        raise UserError(f"{path}: expected a CSV file of {program}, found none")
    rows = read_csv(path)
    if (found := {str(row.get("bench") or "unknown") for row in rows}) != {program.split()[-1]}:
        raise UserError(
            f"{path}: expected rows of {program}, whose column bench says so, found rows of "
            f"{', '.join(sorted(found)) or 'none'}; choose a file of this benchmark"
        )
    return rows


def append_csv(path: Path, rows: Sequence[Row]) -> None:
    """Appends rows to a CSV file and adds missing columns to it. Creates missing folders."""
    old = read_csv(path) if path.exists() else []
    columns = list(dict.fromkeys(name for row in (*old, *rows) for name in row))
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows([*old, *rows])
    write_output(path, file.getvalue(), "bench")


# The guard against slowness.

TOLERANCE = 0.03  # a ratio may be smaller than before by this share


def check_comparable(
    path: Path, before: Sequence[Row], devices: set[str], keys: Sequence[str], ratios: Sequence[str]
) -> None:
    """Checks that new rows can be compared with the rows ``before``, as far as that shows without new rows.

    Args:
        path: the file of the rows ``before``.
        before: rows of an earlier measurement.
        devices: the devices of the new measurement.
        keys: the columns that name a row, besides the device.
        ratios: the columns to compare.

    Raises:
        UserError: the rows lack a key, or none has a ratio of one of these devices.
    """
    if missing := [key for key in keys if key not in before[0]]:
        raise UserError(
            f"--against {path}: expected the columns {', '.join(keys)}, which name a row, but the file lacks "
            f"{', '.join(missing)}; measure again with --csv FILE, and compare with that file"
        )
    if not any(row["device"] in devices and row.get(ratio) for row in before for ratio in ratios):
        found = ", ".join(sorted({str(row["device"]) for row in before}))
        raise UserError(
            f"--against {path}: expected rows of {', '.join(sorted(devices))} with a value in the columns of "
            f"ratios ({', '.join(ratios)}), found rows of {found}; measure on this device with --csv FILE, "
            "and compare with that file"
        )


def slower(
    rows: Sequence[Row], before: Sequence[Row], keys: Sequence[str], ratios: Sequence[str]
) -> tuple[int, list[str]]:
    """Returns how many ratios were compared, and a line for each that fell by more than ``TOLERANCE``.

    Args:
        rows: the new measurement.
        before: rows of an earlier one, in the order of measurement. The last row with the same keys counts.
        keys: the columns that name a row, besides the device.
        ratios: the columns to compare; larger is better.

    Raises:
        UserError: no row has the keys and the device of a new one, so nothing can be compared.
    """
    keys = ["device", *keys]

    def name(row: Row) -> tuple[str, ...]:
        return tuple(str(row.get(key, "")) for key in keys)

    known = {name(row): row for row in before}
    pairs = [(row, known[name(row)]) for row in rows if name(row) in known]
    compared = [(new, old, r) for new, old in pairs for r in ratios if new.get(r) and old.get(r)]
    if not compared:
        raise UserError(
            f"--against: expected a row with the same {', '.join(keys)} and a value in the columns of ratios "
            f"({', '.join(ratios)}); measure with the same arguments on the same device"
        )
    fallen = [
        f"{', '.join(filter(None, name(new)))}: {r} fell from {old[r]} to {new[r]}, "
        f"by {1 - float(str(new[r])) / float(str(old[r])):.1%}"
        for new, old, r in compared
        if float(str(new[r])) < (1 - TOLERANCE) * float(str(old[r]))
    ]
    return len(compared), fallen
