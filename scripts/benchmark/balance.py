"""Shows how long ranks wait for each other if trees are balanced, and if each rank trains on what it read.

    python scripts/benchmark/balance.py rollouts.jsonl.gz --tokenizer qwen.tiktoken.gz --template qwen3
    python scripts/benchmark/balance.py demo --trees 4 --ranks 2 --max-tokens 1024

The table is computed, not measured: the costs of trees are those with which a run of the model starts. Steps
are drawn at random from the trees of all files. Ranks run freely if trees are partitioned, and otherwise in
step (balance/assignment.py). Both are shown for the same trees. The columns are shares of the ranks' time in
which they wait: "as read" without balance, "whole" if no tree is split, and "in pieces" if large trees are
(balance/splitting.py). "x faster" is the ratio of the seconds as read and in pieces, and "repeated" the share
of tokens that pieces repeat.
"""

from __future__ import annotations

import random

import numpy as np
import torch
from common import append_csv, argument_parser, default_device, environment, print_table
from partition_table import read_trees

from titan_tree import build_model
from titan_tree.balance.assignment import Assignment, idle_share, planned_work
from titan_tree.balance.splitting import StepBalancer
from titan_tree.data.packing import first_fit
from titan_tree.tree.costs import TreeCosts, leaf_sizes, tree_sizes


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("files", nargs="+")
    parser.add_argument("--tokenizer", default="byte")
    parser.add_argument("--template")
    parser.add_argument("--model", nargs=2, default=["qwen3", "8B"], metavar=("NAME", "FLAVOR"))
    parser.add_argument("--trees", type=int, nargs="+", default=[4, 8, 16, 32, 64], help="of a step")
    parser.add_argument("--ranks", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--max-tokens", type=int, default=32_768)
    parser.set_defaults(rounds=40)
    args = parser.parse_args()
    versions = environment(default_device())
    with torch.device("meta"):
        costs = build_model(*args.model).costs().tree_costs()
    all_trees = read_trees(args.files, args.tokenizer, args.template)
    sizes, leaves = tree_sizes(all_trees), list(map(leaf_sizes, all_trees))
    print(f"{len(sizes)} trees of {np.median(sizes[:, 0]):,.0f} (median) to {sizes[:, 0].max():,} tokens")
    rows = []
    for ranks in args.ranks:
        for trees in args.trees:
            steps = draw_steps(len(sizes), trees, args.rounds)
            compared = compare(sizes, leaves, steps, ranks, costs, args.max_tokens)
            rows.append({"ranks": ranks, "trees": trees, **compared})
    print_table(rows)
    append_csv(args.csv, [{**versions, "files": " ".join(args.files), **row} for row in rows])


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
) -> dict[str, str]:
    """Returns the mean idle shares of the steps, how much faster balanced ranks are, and what they repeat."""
    row = {}
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


if __name__ == "__main__":
    main()
