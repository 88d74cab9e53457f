"""Draw a sweep of benchmark_attention.py: useful TFLOP/s against node length and against POR.

    python scripts/benchmark_attention.py --sweep --csv sweep.csv
    python scripts/plot_attention.py sweep.csv docs/img/attention.png

Needs matplotlib (the dev extra).
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# Which rows a column of panels shows, by the start of their tree's name; against what, and on which scale.
COLUMNS = (
    ("nodes of", "node_length", "tokens per node", "log"),
    ("prompt of", "por", "POR: 16 answers to ever longer prompts", "linear"),
)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path)
    parser.add_argument("image", type=Path)
    args = parser.parse_args()
    with args.csv.open(newline="") as file:
        rows = list(csv.DictReader(file))
    draw(rows, args.image)


def draw(rows: list[dict[str, str]], image: Path) -> None:
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), sharey="row", layout="constrained")
    for panels, (family, x, label, scale) in zip(axes.T, COLUMNS, strict=True):
        chosen = [row for row in rows if row["tree"].startswith(family)]
        for panel, pass_ in zip(panels, ("forward", "backward"), strict=True):
            for attention in dict.fromkeys(row["attention"] for row in chosen):
                points = [
                    (float(row[x]), float(row[f"{pass_}_tflops"]))
                    for row in chosen
                    if row["attention"] == attention
                ]
                panel.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=attention)
            panel.set(xscale=scale, xlabel=label, ylabel=f"{pass_}, useful TFLOP/s")
            panel.grid(alpha=0.3)
    for panel in axes[:, 0]:
        panel.set_ylim(bottom=0)
    axes[0, 0].legend()
    first = rows[0]
    figure.suptitle(
        f"{int(first['tokens']):,} tokens, {first['heads']} heads, head dim {first['head_dim']}, "
        f"bf16, {first['device']}, torch {first['torch']}"
    )
    figure.savefig(image, dpi=120)


if __name__ == "__main__":
    main()
