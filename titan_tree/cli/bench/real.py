"""Trains one configuration twice, as token trees and as rows without trees, and compares losses and speed.

titan-tree bench real train_configs/qwen3_0.6b_tau.toml --steps 100 data.template=chatml
titan-tree bench real train_configs/demo.toml --steps 6       # on a CPU, some minutes

Both runs see the same groups in the same order and start from the same weights. The baseline has one row
per leaf path (data.layout = "leaf"), which also trains the samples that are prefixes of it; with
--baseline flat, it has one row per sample. Rows are packed into micro-batches of data.max_tokens without
padding, and use the same kernels. The losses of both runs should agree up to rounding. In low precision, its
effect grows from step to step. --noise trains the rows once more, packed otherwise; the column "noise" is the
difference between the losses of the two runs of rows.

There is one row per step, and one whose step is "all": sums over the steps after the first --warmup ones.
Ratios are those of baseline to tree, shares those of docs/metrics.md. "operations x" needs a GPU, where the
trainer counts them. Times of a CPU say little, because the cost of its reference attention is quadratic in
data.max_tokens. Both runs keep their folders under --folder. With --case NAME, the picture of a CSV file has
one column per name (figure 7 of Tree Training, arXiv:2511.00413).
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from titan_tree.cli import Finished
from titan_tree.cli.bench.record import Row
from titan_tree.data.packing import BASELINES
from titan_tree.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAY_BE_ZERO = ("warmup",)
KEYS = ("case", "baseline", "step")
RATIOS = ("of operations",)
COLUMNS = (
    "case", "baseline", "step", "tree loss", "rows loss", "loss difference", "noise", "tokens x",
    "operations x", "tree s", "rows s", "speed-up", "of operations",
)  # fmt: skip
QUICK = (
    "train_configs/demo.toml", "--steps", "3", "--warmup", "1", "data.max_tokens=2048",
    "data.global_batch_groups=1", "lr_scheduler.warmup_steps=1",
)  # fmt: skip
Metrics = list[dict[str, float]]  # the rows of a run's metrics.csv


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("config", type=Path, help="a TOML file")
    add("overrides", nargs="*", metavar="key=value")
    add("--baseline", choices=BASELINES, default="leaf", help="rows without trees (default: leaf)")
    add("--case", help="a name for the rows (default: the name of CONFIG)")
    add("--steps", type=int, default=20)
    add("--warmup", type=int, default=3, help="first steps, which are not timed (default: %(default)s)")
    add("--noise", metavar="key=value", help="train the rows again with it: data.max_tokens=16384")
    add("--nproc-per-node", type=int, default=1, help="number of GPUs, as for torchrun (default: 1)")
    add("--folder", type=Path, default=Path("outputs/bench/real"), help="folder of both runs")


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row per step, and one for all steps after the warm-up."""
    if args.steps <= args.warmup:
        raise UserError(f"--steps: expected more than --warmup, which is {args.warmup}, got {args.steps}")
    tree, rows = (train(layout, args) for layout in ("tree", args.baseline))
    name: Row = {"case": args.case or args.config.stem, "baseline": args.baseline}
    steps = [name | row for row in compared(tree, rows)]
    if args.noise:
        again = train(args.baseline, args, args.noise)
        for step, a, b in zip(steps, again, rows, strict=True):
            step["noise"] = difference(a, b)
    return [*steps, name | total(tree[args.warmup :], rows[args.warmup :])]


def train(layout: str, args: argparse.Namespace, *overrides: str) -> Metrics:
    """Trains with ``layout`` in a process of its own and returns the rows of the run's metrics.csv."""
    folder = args.folder / (f"{layout} again" if overrides else layout)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.nproc_per_node)]
    command = [
        sys.executable,
        *(launcher if args.nproc_per_node > 1 else []),
        *("-m", "titan_tree", "train", str(args.config)),
        *args.overrides,
        *overrides,
        f"data.layout={layout}",
        f"folder={folder}",
        f"training.steps={args.steps}",
        *("checkpoint.interval=0", "checkpoint.resume=false"),
        *("metrics.loggers=[console,csv]", "metrics.log_interval=1"),
    ]
    if status := subprocess.run(command, check=False).returncode:
        raise Finished(status)
    return read_metrics(folder / "metrics.csv")


def read_metrics(path: Path) -> Metrics:
    """Returns the values of each step. Steps without validation lack its values.

    Raises:
        UserError: a step was skipped.
    """
    with path.open(newline="") as file:
        steps = list(csv.DictReader(file))
    if skipped := [step["step"] for step in steps if not step["loss"]]:
        raise UserError(
            f"{path}: expected the loss of every step, but step {skipped[0]} was skipped; see the log"
        )
    return [{name: float(value) for name, value in step.items() if value} for step in steps]


def compared(tree: Metrics, rows: Metrics) -> list[Row]:
    """Returns the losses of each step, and how they and the speeds compare."""
    return [
        {
            "step": int(ours["step"]),
            "tree loss": round(ours["loss"], 6),
            "rows loss": round(theirs["loss"], 6),
            "loss difference": difference(ours, theirs),
        }
        | speeds([ours], [theirs])
        for ours, theirs in zip(tree, rows, strict=True)
    ]


def difference(step: Mapping[str, float], other: Mapping[str, float]) -> str:
    """Returns the relative difference of the losses of two steps, with two digits."""
    return f"{abs(step['loss'] - other['loss']) / abs(other['loss']):.1e}"


def total(tree: Metrics, rows: Metrics) -> Row:
    """Returns the comparison of all given steps together, with the largest difference of their losses."""
    largest = max(map(difference, tree, rows), key=float)
    memory = {
        f"{name} GiB": round(max(step["peak_memory_gib"] for step in steps), 1)
        for name, steps in (("tree", tree), ("rows", rows))
        if "peak_memory_gib" in steps[0]
    }
    return {"step": "all", "loss difference": largest} | speeds(tree, rows) | memory


def speeds(tree: Metrics, rows: Metrics) -> Row:
    """Returns seconds, speed-up and its bounds over these steps."""

    def both(name: str) -> tuple[float, float]:
        return sum(step[name] for step in tree), sum(step[name] for step in rows)

    (tree_s, rows_s), (tree_tokens, rows_tokens) = both("step_s"), both("executed_tokens")
    row: Row = {
        "tree tokens": int(tree_tokens),
        "rows tokens": int(rows_tokens),
        "tokens x": round(rows_tokens / tree_tokens, 2),
        "tree s": round(tree_s, 3),
        "rows s": round(rows_s, 3),
        "speed-up": round(rows_s / tree_s, 2),
    }
    for name in ("optimizer_share", "exchange_share", "host_share"):
        if name in tree[0]:
            share = sum(step[name] * step["step_s"] for step in tree) / tree_s
            row[f"tree {name.replace('_', ' ')}"] = round(share, 3)
    if "mfu" in tree[0]:
        operations, rows_operations = (sum(s["mfu"] * s["step_s"] for s in steps) for steps in (tree, rows))
        row["operations x"] = round(rows_operations / operations, 2)
        row["of operations"] = round(rows_s / tree_s / (rows_operations / operations), 3)
        row["tree MFU"], row["rows MFU"] = round(operations / tree_s, 3), round(rows_operations / rows_s, 3)
    return row


def draw(rows: Sequence[Mapping[str, str]], figure: Figure) -> None:
    """Draws the speed-up of each step with its bound, and both losses with their difference, per case.

    Speeds are left out if the rows have none, as those of runs that shared a GPU.
    """
    cases = list(dict.fromkeys(row["case"] for row in rows))
    has_speeds = any(row.get("speed-up") for row in rows)
    labels = [*["speed-up of a step"] * has_speeds, "loss", "relative difference"]
    figure.set_size_inches(4.2 * len(cases), 2.4 * len(labels))
    panels = figure.subplots(len(labels), len(cases), squeeze=False, sharex="col")
    for column, case in zip(panels.T, cases, strict=True):
        steps = [row for row in rows if row["case"] == case and row["step"] != "all"]
        numbers = [int(row["step"]) for row in steps]

        def line(name: str, steps: Sequence[Mapping[str, str]] = steps) -> list[float]:
            return [float(row[name] or "nan") for row in steps]

        column[0].set_title(case, fontsize=10)
        if has_speeds:
            bound = "operations x" if steps[0].get("operations x") else "tokens x"
            column[0].plot(numbers, line(bound), color="0.7", label=f"bound: {bound[:-2]}")
            column[0].plot(numbers, line("speed-up"), color="C0", label="speed-up")
        *_, loss, apart = column
        loss.plot(numbers, line("rows loss"), color="C1", label="rows")
        loss.plot(numbers, line("tree loss"), "--", color="C0", label="tree")
        if steps[0].get("noise"):
            apart.plot(numbers, line("noise"), color="0.6", label="rows packed otherwise, and rows")
        apart.plot(numbers, line("loss difference"), color="C3", label="tree and rows")
        apart.axhline(0.01, color="0.7", linestyle=":", label="1 %, Tree Training's bound")
        apart.set(xlabel="step", yscale="log", ylim=(1e-6, 1))
        for panel in column:
            panel.grid(alpha=0.3)
            panel.legend(fontsize=8)
    for panel, label in zip(panels[:, 0], labels, strict=True):
        panel.set_ylabel(label)
