"""Draws the pictures of docs/performance.md from the CSV files that the benchmarks write.

    python scripts/benchmark/plots.py                                       # all, from docs/data to docs/img
    python scripts/benchmark/plots.py attention --csv sweep.csv --folder .  # your own measurement

Needs matplotlib, which the dev extra installs. Runs on a CPU.
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.figure import Figure

DOCS = Path(__file__).resolve().parents[2] / "docs"
Rows = list[dict[str, str]]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("picture", nargs="*", help=f"some of {', '.join(PICTURES)} (default: all)")
    parser.add_argument("--csv", type=Path, help="rows of a single picture (default: its file in docs/data)")
    parser.add_argument("--folder", type=Path, default=DOCS / "img", help="where pictures go")
    args = parser.parse_args()
    if unknown := set(args.picture) - set(PICTURES):
        parser.error(f"picture: expected some of {', '.join(PICTURES)}, got {', '.join(sorted(unknown))}")
    if args.csv and len(args.picture) != 1:
        parser.error("--csv: expected exactly one picture with it")
    for name in args.picture or PICTURES:
        default, draw = PICTURES[name]
        path = args.csv or DOCS / "data" / default
        with path.open(newline="") as file:
            figure = draw(list(csv.DictReader(file)))
        figure.savefig(args.folder / f"{name}.png", dpi=120)
        plt.close(figure)


def draw_attention(rows: Rows) -> Figure:
    """Draws the speed of attention against node length and POR; rows of ``attention.py --sweep``."""
    figure, axes = plt.subplots(2, 2, figsize=(10, 7), sharey="row", layout="constrained")
    columns = (
        ("nodes of", "node_length", "tokens per node", "log"),
        ("prompt of", "por", "POR: 16 answers to one prompt of growing length", "linear"),
    )
    for panels, (family, x, label, scale) in zip(axes.T, columns, strict=True):
        chosen = [row for row in rows if row["tree"].startswith(family)]
        for panel, direction in zip(panels, ("forward", "backward"), strict=True):
            for attention in dict.fromkeys(row["attention"] for row in chosen):
                points = [
                    (float(row[x]), float(row[f"{direction}_tflops"]))
                    for row in chosen
                    if row["attention"] == attention
                ]
                panel.plot(*zip(*sorted(points), strict=True), marker="o", markersize=3, label=attention)
            panel.set(xscale=scale, xlabel=label, ylabel=f"{direction}, useful TFLOP/s")
            panel.grid(alpha=0.3)
    for panel in axes[:, 0]:
        panel.set_ylim(bottom=0)
    axes[0, 0].legend()
    first = rows[0]
    figure.suptitle(
        f"Attention on trees of {int(first['tokens']):,} tokens, {first['heads']} heads, "
        f"head dim {first['head_dim']}, bf16, {first['device']}, torch {first['torch']}"
    )
    return figure


def draw_gdn(rows: Rows) -> Figure:
    """Draws the time of the gated delta rule on each tree; rows of ``gdn.py``."""
    labels = {
        "tree": "titan_tree, the tree",
        "per path": "titan_tree, every path",
        "FLA, one chain": "FLA, a chain as long",
        "FLA, level by level": "FLA, level by level",
    }
    trees = dict.fromkeys(row["tree"] for row in sorted(rows, key=lambda row: int(row["nodes"])))
    figure, panels = plt.subplots(
        1, len(trees), figsize=(4 * len(trees), 3), sharey=True, layout="constrained", squeeze=False
    )
    for panel, tree in zip(panels[0], trees, strict=True):
        chosen = {row["what"]: row for row in rows if row["tree"] == tree}
        for position, (what, label) in enumerate(labels.items()):
            if what in chosen:
                ms = float(chosen[what]["forward_backward_ms"])
                panel.bar_label(panel.barh(label, ms, color=f"C{position}"), [f"{ms:.2f}"], padding=3)
            else:
                panel.barh(label, 0)
        first = next(iter(chosen.values()))
        nodes = "1 node" if first["nodes"] == "1" else f"{int(first['nodes']):,} nodes"
        panel.set_title(f"{tree}: {nodes}, POR {float(first['por']):.1%}")
        panel.set(xscale="log", xlabel="forward and backward, ms", xlim=(1, 400))
    panels[0][0].invert_yaxis()
    first = rows[0]
    figure.suptitle(
        f"Gated delta rule, about {int(first['tokens']):,} tokens, {first['heads']} heads, head dim "
        f"{first['head_dim']}, bf16, {first['device']}, torch {first['torch']}"
    )
    return figure


def draw_step(rows: Rows) -> Figure:
    """Draws the speed of a training step on chains and trees, per model and size; rows of ``step.py``."""
    groups: dict[tuple[str, int], dict[str, dict[str, str]]] = {}  # the first row of each name
    for row in rows:
        if "(float32)" not in row["step of"]:
            group = groups.setdefault((row["flavor"], int(row["executed tokens"])), {})
            group.setdefault(row["step of"].replace(" (bfloat16)", ""), row)
    groups = dict(sorted(groups.items()))
    figure, panels = plt.subplots(
        1, len(groups), figsize=(3.4 * len(groups), 3.2), sharey=True, layout="constrained", squeeze=False
    )
    for panel, ((flavor, tokens), chosen) in zip(panels[0], groups.items(), strict=True):
        for name, row in chosen.items():
            peer = name.startswith("transformers")
            label = "transformers,\none sequence" if peer else name.split(", ")[-1]
            bar = panel.bar(label, float(row["TFLOP/s"]), color="C7" if peer else "C0")
            panel.bar_label(bar, [f"{float(row['TFLOP/s']):.0f}"], padding=2)
        panel.set_title(f"{flavor}, {tokens:,} distinct tokens")
        panel.tick_params(axis="x", labelsize=8)
    panels[0][0].set(ylabel="useful TFLOP/s", ylim=(0, 600))
    first = rows[0]
    figure.suptitle(f"One training step, bf16 computation, {first['device']}, torch {first['torch']}")
    return figure


def draw_partitions(rows: Rows) -> Figure:
    """Draws speed and memory of trees that are larger than memory; the newest rows of ``partitions.py``."""
    if "code" in rows[0]:
        rows = [row for row in rows if row["code"] == rows[-1]["code"]]
    path, fits = (float(rows[0]["GiB"]), float(rows[1]["TFLOP/s"]))
    labels = [f"{row['run']}\n{int(row['distinct']):,} tokens" for row in rows]
    figure, (speed, memory) = plt.subplots(
        1, 2, figsize=(11, 0.5 * len(rows) + 1.2), sharey=True, layout="constrained"
    )
    ratios = [float(row["TFLOP/s"]) / fits for row in rows]
    speed.bar_label(speed.barh(labels, ratios, color="C0"), [f"{x:.2f}" for x in ratios], padding=3)
    speed.set(xlabel="speed per useful operation, x one pass over 65,536 tokens", xlim=(0, 1.15))
    ratios = [float(row["GiB"]) / path for row in rows]
    memory.bar_label(memory.barh(labels, ratios, color="C1"), [f"{x:.2f}" for x in ratios], padding=3)
    memory.set(xlabel="memory of activations, x one path of 32,768 tokens", xlim=(0, 2.3))
    speed.invert_yaxis()
    return figure


def draw_tau(rows: Rows) -> Figure:
    """Draws loss and speed of a run on tau-bench from its metrics.csv."""
    figure, (loss, speed) = plt.subplots(1, 2, figsize=(9.2, 3.4), layout="constrained")
    steps = [int(row["step"]) for row in rows]
    loss.plot(steps, [float(row["loss"]) for row in rows])
    loss.set(title="Qwen3-0.6B from random weights, tau-bench airline", xlabel="step (4 tasks each)")
    loss.set_ylabel("nats per trained token")
    steady = slice(2, None)  # the first two steps compile
    for name in ("logical", "executed"):
        values = [float(row[f"{name}_tokens_per_s"]) / 1e3 for row in rows]
        speed.plot(steps[steady], values[steady], label=name)
    speed.axhline(
        FLAT_TOKENS_PER_S / 1e3, color="C7", linestyle="--", label="flat layout, logical = executed"
    )
    speed.set(title="one H200", xlabel="step", ylabel="thousand tokens/s", yscale="log")
    for panel in (loss, speed):
        panel.grid(alpha=0.3)
    speed.legend()
    return figure


FLAT_TOKENS_PER_S = 76_584  # measured with data.layout=flat on the same data, see docs/performance.md


def draw_rl(rows: Rows, labels: Mapping[str, str], seconds: str) -> Figure:
    """Draws the reward of reinforcement learning against time; rows of ``rl.py``.

    Each seed of a setting in ``labels`` is a line. Its label may have the field ``seed``.
    """
    figure, panel = plt.subplots(figsize=(7, 3.6), layout="constrained")
    found = {(row["setting"], row["seed"]) for row in rows}
    runs = [run for setting in labels for run in sorted(found) if run[0] == setting]
    for color, (setting, seed) in enumerate(runs):
        for phase, style in (("warm_start", ":"), ("rl", "-")):
            key = (setting, seed, phase)
            chosen = [row for row in rows if (row["setting"], row["seed"], row["phase"]) == key]
            reward = [float(row["reward"]) for row in chosen]
            if phase == "rl":  # the mean of the last ten steps
                parts = [reward[max(0, i - 9) : i + 1] for i in range(len(reward))]
                reward = [sum(part) / len(part) for part in parts]
            label = labels[setting].format(seed=seed) if phase == "rl" else None
            panel.plot([float(row["s"]) for row in chosen], reward, style, color=f"C{color}", label=label)
    panel.axhline(0.9, color="0.8", zorder=0)
    panel.set(xlabel=f"{seconds} (dotted: warm start)", ylabel="mean reward on new tasks", ylim=(0, 1))
    panel.legend()
    return figure


SEARCH_RUNS = {"search, 19a2ab1": "first run", "search": "second run, faster sampler"}
PICTURES: dict[str, tuple[str, Callable[[Rows], Figure]]] = {
    "attention": ("attention_sweep.csv", draw_attention),
    "gdn": ("gdn.csv", draw_gdn),
    "step": ("step.csv", draw_step),
    "partitions": ("partitions.csv", draw_partitions),
    "rl": ("rl.csv", partial(draw_rl, labels={"demo": "seed {seed}"}, seconds="CPU seconds")),
    "rl_search": ("rl_search.csv", partial(draw_rl, labels=SEARCH_RUNS, seconds="seconds on one GPU")),
    "tau_0.6b": ("tau_0.6b_tree.csv", draw_tau),
}


if __name__ == "__main__":
    main()
