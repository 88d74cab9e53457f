"""Trains one configuration twice, as token trees and without trees, and compares losses and speed.

    python scripts/compare_layouts.py CONFIG --steps 50 [key=value ...]
    python scripts/compare_layouts.py train_configs/demo.toml --steps 6        # on a CPU, some minutes

Both runs see the same groups in the same order and start from the same weights. The baseline has one row
per leaf path (data.layout = "leaf"), which also trains the samples that are prefixes of it; with
``--baseline flat``, it has one row per sample. Rows are packed into micro-batches of data.max_tokens without
padding, and use the same kernels. The losses of both runs should agree up to rounding. The speed-up is at
most the ratio of the tokens of these rows to the distinct tokens: N_leaf / N_tree, or N_flat / N_tree.

Times omit the first ``--warmup`` steps. They are meaningful on a GPU only, because the cost of the CPU's
reference attention is quadratic in data.max_tokens.

Writes losses.csv into FOLDER, beside the folders of both runs, and losses.png if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path

ROWS = {"leaf": "one row per leaf path", "flat": "one row per sample"}
Rows = list[dict[str, float]]  # one per step, as in metrics.csv


def main() -> None:
    args = parse_args()
    rows = {layout: train(layout, args) for layout in ("tree", args.baseline)}
    write_losses(rows, args.folder / "losses.csv")
    plot_losses(rows, args.folder / "losses.png")
    print(summary(rows, args.warmup))


def train(layout: str, args: argparse.Namespace) -> Rows:
    """Trains with ``layout`` in a process of its own and returns the rows of the run's metrics.csv."""
    folder = args.folder / layout
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(args.nproc_per_node)]
    command = [
        sys.executable,
        *(launcher if args.nproc_per_node > 1 else []),
        *("-m", "titan_tree.train", "--config", str(args.config)),
        *args.overrides,
        f"data.layout={layout}",
        f"folder={folder}",
        f"training.steps={args.steps}",
        *("checkpoint.interval=0", "checkpoint.resume=false"),
        *("metrics.loggers=[console,csv]", "metrics.log_interval=1"),
    ]
    if status := subprocess.run(command, check=False).returncode:
        sys.exit(status)
    with (folder / "metrics.csv").open(newline="") as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def relative_differences(rows: dict[str, Rows]) -> list[float]:
    """Returns |tree - baseline| / |baseline| of the loss for each step."""
    pairs = zip(*rows.values(), strict=True)
    return [abs(tree["loss"] - other["loss"]) / abs(other["loss"]) for tree, other in pairs]


def write_losses(rows: dict[str, Rows], path: Path) -> None:
    """Writes the losses of both runs and their relative difference, one line per step."""
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["step", *rows, "relative difference"])
        for *steps, difference in zip(*rows.values(), relative_differences(rows), strict=True):
            losses = [row["loss"] for row in steps]
            writer.writerow([int(steps[0]["step"]), *losses, f"{difference:.3e}"])


def plot_losses(rows: dict[str, Rows], path: Path) -> None:
    """Draws the losses of both runs, if matplotlib is installed."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print(f"{path} was not drawn, because matplotlib is not installed")
        return
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for layout, style in zip(rows, ("-", "--"), strict=True):
        axes.plot([r["step"] for r in rows[layout]], [r["loss"] for r in rows[layout]], style, label=layout)
    axes.set(xlabel="step", ylabel="loss")
    axes.legend()
    figure.savefig(path, dpi=150)


def summary(rows: dict[str, Rows], warmup: int) -> str:
    """Returns a table of both runs, and the speed-up with its bound."""
    tree, baseline = rows
    lines = [f"{'':24}{tree:>14}{baseline:>14}"]
    seconds, executed = {}, {}
    for layout in rows:
        steady = rows[layout][warmup:]
        seconds[layout] = sum(row["step_s"] for row in steady)
        executed[layout] = sum(row["executed_tokens"] for row in steady)

    def line(name: str, values: dict[str, float], form: str) -> None:
        lines.append(f"{name:24}" + "".join(f"{values[layout]:>14{form}}" for layout in rows))

    line("first loss", {layout: rows[layout][0]["loss"] for layout in rows}, ".5f")
    line("last loss", {layout: rows[layout][-1]["loss"] for layout in rows}, ".5f")
    line("seconds", seconds, ".2f")
    line("executed tokens/s", {layout: executed[layout] / seconds[layout] for layout in rows}, ",.0f")
    if "peak_memory_gib" in rows[tree][0]:
        peaks = {layout: max(row["peak_memory_gib"] for row in rows[layout]) for layout in rows}
        line("peak memory, GiB", peaks, ".1f")
    speed_up, bound = seconds[baseline] / seconds[tree], executed[baseline] / executed[tree]
    differences = relative_differences(rows)
    lines += [
        f"largest relative difference between the losses: {max(differences):.1e} "
        f"(step {1 + differences.index(max(differences))} of {len(differences)})",
        f"speed-up over {ROWS[baseline]}: {speed_up:.2f}x, {speed_up / bound:.1%} of the ratio of executed "
        f"tokens, {bound:.2f}x",
    ]
    if "mfu" in rows[tree][0]:
        operations = {
            layout: sum(row["mfu"] * row["step_s"] for row in rows[layout][warmup:]) for layout in rows
        }
        ratio = operations[baseline] / operations[tree]
        lines.append(f"{speed_up / ratio:.1%} of the ratio of operations, {ratio:.2f}x")
    return "\n".join(lines)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--baseline", choices=ROWS, default="leaf", help="rows without trees (default: leaf)")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument(
        "--warmup", type=int, default=3, help="steps at the start that are not timed (default: 3)"
    )
    parser.add_argument(
        "--nproc-per-node", type=int, default=1, help="number of GPUs, as for torchrun (default: 1)"
    )
    parser.add_argument("--folder", type=Path, default=Path("outputs/compare_layouts"))
    args = parser.parse_intermixed_args()
    if args.steps <= args.warmup:
        parser.error(f"--steps: expected more than --warmup = {args.warmup}, got {args.steps}")
    return args


if __name__ == "__main__":
    main()
