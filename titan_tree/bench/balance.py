"""Shows how long ranks wait for each other if trees are balanced, and if each rank trains on what it read.

titan-tree bench balance rollouts.jsonl.gz --tokenizer qwen.tiktoken.gz --template qwen3

The table is computed, not measured: the costs of trees are those with which a run of the model starts. Steps
are drawn at random from the trees of all files. Ranks run freely if trees are partitioned, and otherwise in
step (balance/assignment.py). Both are shown for the same trees. The columns are shares of the ranks' time in
which they wait: "as read" without balance, "whole" if no tree is split, and "in pieces" if large trees are
(balance/splitting.py). "x faster" is the ratio of the seconds as read and in pieces, and "repeated" the share
of tokens that pieces repeat.
"""

from __future__ import annotations

import argparse
import random

import numpy as np
import torch

from titan_tree.bench.partition import read_paths
from titan_tree.bench.record import Row, add_rounds
from titan_tree.data.packing import first_fit
from titan_tree.models.pretrained import build_model
from titan_tree.run.balance.assignment import Assignment, idle_share, planned_work
from titan_tree.run.balance.splitting import StepBalancer
from titan_tree.tree.costs import TreeCosts, leaf_sizes, tree_sizes
from titan_tree.tree.token_tree import TokenTree

KEYS = ("files", "model", "max_tokens", "ranks", "trees")
RATIOS = ("in step: x faster", "freely: x faster")
QUICK = ("demo", "--trees", "4", "--ranks", "2", "--max-tokens", "1024", "--rounds", "2")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser, 40)
    add = parser.add_argument
    add("files", nargs="+")
    add("--tokenizer", default="byte")
    add("--template")
    add("--model", nargs=2, default=["qwen3", "8B"], metavar=("NAME", "FLAVOR"))
    add("--trees", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="of a step")
    add("--ranks", type=int, nargs="+", default=[4, 8])
    add("--max-tokens", type=int, default=32_768)


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row per number of ranks and of trees."""
    with torch.device("meta"):
        costs = build_model(*args.model).costs().tree_costs()
    all_trees = list(map(TokenTree.from_paths, read_paths(args.files, args.tokenizer, args.template)))
    sizes, leaves = tree_sizes(all_trees), list(map(leaf_sizes, all_trees))
    print(f"{len(sizes)} trees of {np.median(sizes[:, 0]):,.0f} (median) to {sizes[:, 0].max():,} tokens")
    setting: Row = {
        "files": " ".join(args.files),
        "model": " ".join(args.model),
        "max_tokens": args.max_tokens,
    }
    rows = []
    for ranks in args.ranks:
        for trees in args.trees:
            steps = draw_steps(len(sizes), trees, args.rounds)
            compared = compare(sizes, leaves, steps, ranks, costs, args.max_tokens)
            rows.append(setting | {"ranks": ranks, "trees": trees} | compared)
    return rows


def draw_steps(num_trees: int, per_step: int, rounds: int) -> list[list[int]]:
    """Returns the trees of each step: of a stream of epochs, each shuffled anew."""
    draw, stream = random.Random(0), list[int]()
    while len(stream) < per_step * rounds:
        stream += draw.sample(range(num_trees), num_trees)
    return [stream[i * per_step : (i + 1) * per_step] for i in range(rounds)]


def compare(
    sizes: np.ndarray,
    leaves: list[np.ndarray],
    steps: list[list[int]],
    ranks: int,
    costs: TreeCosts,
    max_tokens: int,
) -> Row:
    """Returns the mean idle shares of the steps, how much faster balanced ranks are, and what they repeat."""
    row: Row = {}
    for name, in_step in (("in step", True), ("freely", False)):
        balancer = StepBalancer(costs, ranks, max_tokens, in_step)
        idle, seconds, tokens = [], [], []
        for trees in steps:
            whole_sizes = sizes[trees]
            whole = balancer.whole(whole_sizes)
            split = balancer.split(whole, {i: leaves[trees[i]] for i in balancer.candidates(whole)})
            work = [
                planned_work(assignment, unit_sizes, costs, in_step)
                for assignment, unit_sizes in (
                    (as_read(whole_sizes, ranks, max_tokens), whole_sizes),
                    (whole.micro_batches, whole_sizes),
                    (split.micro_batches, split.sizes),
                )
            ]
            idle.append([idle_share(seconds_of_ranks) for seconds_of_ranks in work])
            seconds.append([seconds_of_ranks.max(0).sum() for seconds_of_ranks in work])
            tokens.append([split.sizes[:, 0].sum(), whole_sizes[:, 0].sum()])
        before, _, after = np.sum(seconds, 0)
        executed, distinct = np.sum(tokens, 0)
        shares = zip(("as read", "whole", "in pieces"), np.mean(idle, 0), strict=True)
        row |= {f"{name}: {column}": f"{share:.0%}" for column, share in shares}
        row[f"{name}: x faster"] = f"{before / after:.2f}"
        row[f"{name}: repeated"] = f"{executed / distinct - 1:.1%}"
    return row


def as_read(sizes: np.ndarray, ranks: int, max_tokens: int) -> Assignment:
    """Returns the assignment in which rank r trains on trees r, r + ranks, ..."""
    tokens = sizes[:, 0].tolist()
    read = [list(range(rank, len(tokens), ranks)) for rank in range(ranks)]
    return [
        [[trees[i] for i in chosen] for chosen in first_fit([tokens[tree] for tree in trees], max_tokens)]
        for trees in read
    ]
