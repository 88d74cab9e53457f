"""Whole steps on trees beside whole steps on rows without trees: same model, kernels, optimizer, process.

The rows of the baseline are one per leaf path, as a good trainer without trees has them, packed without
padding. A step has forward and backward passes, clipping and AdamW. The learning rate is 0, so both
layouts see the same weights in every step and their losses are comparable. Tokens are random, and every
token counts in the loss. "tree optimizer share" is the share of clipping and AdamW in a step on trees.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from benchmarks import steps
from benchmarks.timers import Contender, add_rounds, peak_memory, reset_peak_memory, run_rounds
from titan_tree.cli.bench.record import Row, device_name
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.data.packing import leaf_trees, pack
from titan_tree.distributed import titan
from titan_tree.distributed.settings import OptimizerConfig
from titan_tree.models.pretrained import build_model
from titan_tree.models.tree_model import TreeModel
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.paths import TokenPath
from titan_tree.tree.token_tree import TokenTree, TreeStats

if TYPE_CHECKING:
    from matplotlib.figure import Figure

COLUMNS = (
    "model", "case", "POR", "N_leaf", "N_tree", "tokens x", "operations x", "tree s", "rows s", "speed-up",
    "of operations", "loss difference",
)  # fmt: skip
QUICK = ("--rounds", "1", "--max-tokens", "1024", "--no-compile")
TREE_TRAINING = {"Tree Training v2": 5.7, "Tree Training v4": 8.7}  # reported speed-ups at a POR of 0.92


@dataclass(frozen=True)
class Case:
    """The samples of one step: one list of paths per tree."""

    name: str
    groups: Sequence[Sequence[TokenPath]]
    strategy: str | None = None  # how trees are partitioned; None: every tree runs in one pass
    max_tokens: int | None = None  # of a forward pass; None: the benchmark's


def add_arguments(parser: argparse.ArgumentParser, max_tokens: int | list[int] = 32_768) -> None:
    """Declares the arguments that ``compare`` reads. With a list as ``max_tokens``, several are allowed."""
    steps.add_model_arguments(parser, "0.6B")
    add_rounds(parser)
    add = parser.add_argument
    add("--attention", default="auto", help="backend, as in model.attention (default: auto)")
    several = "+" if isinstance(max_tokens, list) else None
    help = "most tokens of a forward pass; trees and rows are packed up to it (default: %(default)s)"
    add("--max-tokens", type=int, nargs=several, default=max_tokens, help=help)


def compare(cases: Iterable[Case], args: argparse.Namespace, rows_attention: str = "") -> Iterator[Row]:
    """Times the steps of all cases in both layouts. Prints and yields one row per case.

    Args:
        args: see ``add_arguments``.
        rows_attention: the attention backend of the baseline, which is then a model of its own.
    """
    with steps.process_group() as (mesh, device):
        model = build(args, args.attention, mesh)
        models = {"tree": model, "rows": build(args, rows_attention, mesh) if rows_attention else model}
        updates = {
            layout: steps.optimizer_update(each, OptimizerConfig(lr=0.0)) for layout, each in models.items()
        }
        for each in set(models.values()):
            steps.training_step(each, device).warm_up(args.max_tokens)
        for case in cases:
            row = {"model": model_name(args)} | measure(case, models, updates, args, device)
            print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
            yield row


def model_name(args: argparse.Namespace) -> str:
    """Returns the label of the model that the arguments name."""
    return f"{args.model} {args.flavor}" + (f", {args.layers} layers" if args.layers else "")


def vocab_size(args: argparse.Namespace) -> int:
    """Returns the vocabulary size of the model that the arguments name."""
    with torch.device("meta"):
        size: int = build_model(args.model, args.flavor).config.vocab_size
    return size


def build(args: argparse.Namespace, attention: str, mesh: DeviceMesh) -> TreeModel:
    """Returns the trainer's model for these arguments, with random weights."""
    return steps.training_model(steps.model_config(args, attention), steps.training_config(args), mesh)


def speed_up(tree_s: float, rows_s: float, bound: float) -> Row:
    """Returns the columns that compare both layouts. ``bound`` is the ratio of their operations."""
    return {
        "operations x": round(bound, 2),
        "tree s": round(tree_s, 3),
        "rows s": round(rows_s, 3),
        "speed-up": round(rows_s / tree_s, 2),
        "of operations": round(rows_s / tree_s / bound, 3),
    }


def measure(
    case: Case,
    models: Mapping[str, TreeModel],
    updates: Mapping[str, steps.Update],
    args: argparse.Namespace,
    device: torch.device,
) -> Row:
    """Returns the row of one case. "rows" are those of the baseline."""
    max_tokens = case.max_tokens or args.max_tokens
    partitioner = TreePartitioner(case.strategy, max_tokens) if case.strategy else None
    trees = [TokenTree.from_paths(paths) for paths in case.groups]
    micro_batches = {
        "tree": pack(trees, max_tokens),
        "rows": pack([row for paths in case.groups for row in leaf_trees(paths)], max_tokens),
    }
    costs = models["tree"].costs()
    operations, tree_steps, prepared = {}, {}, {}
    for layout, batches in micro_batches.items():
        flops = (costs.training_flops(TreeBatch.from_trees(batch, edges="loss")) for batch in batches)
        operations[layout] = sum(flops)
        own = partitioner if layout == "tree" else None
        tree_steps[layout] = steps.training_step(models[layout], device, own)
        prepared[layout] = tree_steps[layout].prepare(batches)
    peaks, losses = {}, {}

    def step(layout: str) -> Iterator[dict[str, float]]:
        reset_peak_memory(device)
        started = time.perf_counter()
        update = updates[layout]
        losses[layout], _, optimizer_s = update(tree_steps[layout], prepared[layout])  # waits for the device
        seconds = time.perf_counter() - started
        yield {"seconds": seconds, "optimizer share": optimizer_s / seconds}
        peaks[layout] = peak_memory(device)

    contenders = {layout: Contender(layout, partial(step, layout)) for layout in micro_batches}
    list(step("tree"))  # reserves memory and tunes kernels; the rows' kernels are the same
    run_rounds(list(contenders.values()), args.rounds)
    tree_s, rows_s = (contenders[layout].median("seconds") for layout in contenders)
    stats = TreeStats.total([tree.stats for tree in trees])
    executed = prepared["tree"].counts.executed_tokens
    row: Row = {
        "case": case.name,
        "trees": len(trees),
        "POR": round(stats.por, 3),
        "N_leaf": stats.n_leaf,
        "N_tree": stats.n_tree,
        "N_part": executed,
        "forwards": prepared["tree"].counts.forwards,
        "tokens x": round(stats.n_leaf / stats.n_tree, 2),
        **speed_up(tree_s, rows_s, operations["rows"] / operations["tree"]),
        "loss difference": f"{abs(losses['tree'] - losses['rows']) / abs(losses['rows']):.1e}",
        "tree optimizer share": round(contenders["tree"].median("optimizer share"), 3),
    }
    if device.type == "cuda":
        peak_rate = titan.peak_flops(device_name(device))
        row["tree MFU"] = round(operations["tree"] / tree_s / peak_rate, 3)
        row["rows MFU"] = round(operations["rows"] / rows_s / peak_rate, 3)
        row |= {f"{layout} GiB": round(peaks[layout] / 2**30, 1) for layout in peaks}
    return row


def draw_speed_ups(rows: Sequence[Mapping[str, str]], figure: Figure, x: str) -> Any:
    """Draws the speed-up, and dotted the ratio of operations, against a column; returns the axes."""
    figure.set_size_inches(7, 4.5)
    axes = figure.subplots()
    for color, model in enumerate(dict.fromkeys(row["model"] for row in rows)):
        chosen = sorted((row for row in rows if row["model"] == model), key=lambda row: float(row[x]))
        for y, style, label in (("speed-up", "o-", model), ("operations x", ":", None)):
            points = ([float(row[name]) for row in chosen] for name in (x, y))
            axes.plot(*points, style, color=f"C{color}", label=label)
    axes.set_ylabel("speed-up of a whole step")
    axes.grid(alpha=0.3)
    axes.set_title(f"Trees beside one packed row per leaf path, {rows[0]['device']}", fontsize=10)
    return axes
