"""Draw what benchmark_gdn.py measured: the gated delta rule forward and backward on each tree.

    python scripts/benchmark_gdn.py --csv gdn.csv
    python scripts/plot_gdn.py gdn.csv docs/img/gdn.png

Needs matplotlib (the dev extra).
"""

from __future__ import annotations

import argparse
import csv
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

CONTENDERS = {
    "tree": "titan_tree, the tree",
    "per path": "titan_tree, every path",
    "FLA, one chain": "FLA, a chain",
    "FLA, level by level": "FLA, level by level",
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("csv", type=Path)
    parser.add_argument("image", type=Path)
    args = parser.parse_args()
    with args.csv.open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if row["what"] in CONTENDERS]
    draw(rows, args.image)


def draw(rows: list[dict[str, str]], image: Path) -> None:
    trees = list(dict.fromkeys(row["tree"] for row in rows))
    figure, panels = plt.subplots(
        1, len(trees), figsize=(4 * len(trees), 3), sharey=True, layout="constrained"
    )
    for panel, tree in zip(panels, trees, strict=True):
        chosen = {row["what"]: row for row in rows if row["tree"] == tree}
        for position, (what, label) in enumerate(CONTENDERS.items()):
            if what in chosen:
                ms = float(chosen[what]["forward_backward_ms"])
                bar = panel.barh(label, ms, color=f"C{position}")
                panel.bar_label(bar, [f"{ms:.2f}"], padding=3)
            else:
                panel.barh(label, 0)
        first = next(iter(chosen.values()))
        panel.set_title(f"{tree}: {int(first['nodes']):,} nodes, POR {float(first['por']):.1%}")
        panel.set(xscale="log", xlabel="forward and backward, ms", xlim=(1, 400))
    panels[0].invert_yaxis()
    figure.suptitle(
        f"Gated delta rule, about {int(rows[0]['tokens']):,} tokens, {rows[0]['heads']} heads, head dim "
        f"{rows[0]['head_dim']}, bf16, {rows[0]['device']}, torch {rows[0]['torch']}"
    )
    figure.savefig(image, dpi=120)


if __name__ == "__main__":
    main()
