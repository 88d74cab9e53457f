"""Times training steps on token trees of growing overlap, beside steps on rows without trees.

A tree computes every distinct token once; the baseline computes every path from the root to a leaf as a row
of its own. N_tree counts the distinct tokens, and N_leaf the tokens of these rows. The overlap is the POR
(potential overlap ratio), 1 - N_tree / N_leaf: the share of the rows' tokens that trees save.

All trees are binary and have 16 leaves. All rows have --length tokens, so the baseline costs the same at
every POR. A step has forward and backward passes, clipping and AdamW; both layouts use the same model,
kernels and optimizer, in one process, in turn.

| column          | meaning                                                                            |
|-----------------|------------------------------------------------------------------------------------|
| tokens x        | N_leaf / N_tree                                                                    |
| operations x    | operations of the rows / operations of the trees: the speed-up to expect           |
| tree s, rows s  | median seconds of a step on trees, and on rows                                     |
| speed-up        | rows s / tree s                                                                    |
| of operations   | speed-up / operations x: 1 if trees run as many operations per second as rows      |
| loss difference | relative difference of the losses of both layouts, which rounding causes           |

The CSV file also has memory, MFU (model FLOPs utilization), and the share of clipping and AdamW in a step on
trees. The picture has the end points of Tree Training (arXiv:2511.00413, figure 8) at a POR of 0.92, which
are 5.7x (version 2) and 8.7x (version 4), and its range for trees that exceed memory, 4.5x to 5.3x. To
measure such trees, choose a --strategy and a --max-tokens that is smaller than a tree.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from benchmarks import layouts
from benchmarks.trees import Nodes, random_paths
from titan_tree.cli.bench.record import Row
from titan_tree.components.tree_partitioner import PARTITION_STRATEGIES
from titan_tree.errors import UserError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS = ("model", "case", "trees", "N_leaf", "N_tree")
RATIOS = ("of operations",)
COLUMNS = layouts.COLUMNS
QUICK = ("--flavor", "debug", "--length", "64", "--trees", "1", "--por", "0.5", "0.9", *layouts.QUICK)
DEPTH = 4  # levels of inner nodes
LEAVES = 2**DEPTH
LIMITED = (4.5, 5.3)  # Tree Training v2, trees that exceed memory


def add_arguments(parser: argparse.ArgumentParser) -> None:
    layouts.add_arguments(parser)
    parser.set_defaults(max_tokens=66_000)  # of 16 paths of 4,096 tokens, or two trees at a POR of 0.5
    add = parser.add_argument
    pors = [0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.887, 0.92]
    add("--por", type=float, nargs="+", default=pors, help=f"overlaps (default: {' '.join(map(str, pors))})")
    add("--length", type=int, default=4096, help="tokens of every row (default: %(default)s)")
    add("--trees", type=int, default=8, help="trees per step (default: %(default)s)")
    help = "how to partition trees (default: a tree is not partitioned)"
    add("--strategy", choices=list(PARTITION_STRATEGIES), help=help)


def run(args: argparse.Namespace) -> Iterator[Row]:
    """Yields a row per POR. Raises UserError for one that no tree of ``LEAVES`` leaves has."""
    if (largest := max(args.por)) >= 1 - 1 / LEAVES:
        raise UserError(
            f"--por: expected less than {1 - 1 / LEAVES:g}, as trees have {LEAVES} leaves, got {largest:g}"
        )
    return layouts.compare(cases(args), args)


def cases(args: argparse.Namespace) -> Iterator[layouts.Case]:
    """Yields the steps to time."""
    vocab_size = layouts.vocab_size(args)
    for por in args.por:
        nodes = binary_nodes(args.length, por)
        groups = [random_paths(nodes, vocab_size, seed) for seed in range(args.trees)]
        yield layouts.Case(f"POR {por:g}", groups, args.strategy)


def binary_nodes(length: int, por: float) -> Nodes:
    """Returns the nodes of a binary tree whose 16 paths have ``length`` tokens each.

    Inner nodes are equally long, up to the POR at which leaves are no longer than they are. Beyond that, the
    root grows, and all other nodes stay equally long.
    """
    distinct = (1 - por) * LEAVES * length
    others = 2 * LEAVES - 2  # nodes other than the root
    inner = round((LEAVES * length - distinct) / (LEAVES * DEPTH - (LEAVES - 1)))
    root = inner
    if (DEPTH + 1) * inner > length:
        inner = max(1, round((distinct - length) / (others - DEPTH)))
        root = length - DEPTH * inner
    nodes: Nodes = [(-1, root)]
    for i in range(1, others + 1):
        is_leaf = i >= LEAVES - 1
        nodes.append(((i - 1) // 2, length - root - (DEPTH - 1) * inner if is_leaf else inner))
    return nodes


def draw(rows: Sequence[Mapping[str, str]], figure: Figure) -> None:
    """Draws speed-up and operation bound against POR, per model, with the paper's end points."""
    axes = layouts.draw_speed_ups(rows, figure, "POR")
    for marker, (name, value) in zip("s^", layouts.TREE_TRAINING.items(), strict=True):
        axes.plot(0.92, value, marker, color="black", label=f"{name}, reported")
    axes.axhspan(*LIMITED, color="0.9", zorder=0, label="Tree Training v2, limited memory")
    axes.set(xlabel="POR: share of the leaf paths' tokens that trees save")
    axes.set_yscale("log", base=2)
    axes.set_yticks([1, 2, 4, 8, 12], ["1x", "2x", "4x", "8x", "12x"])
    axes.legend(title="dotted: ratio of operations", fontsize=8)
