"""Writes the log-probs of a model for all samples of data files, as records that training reads.

titan-tree score rollouts.jsonl scored.jsonl --model /models/Qwen3-1.7B
titan-tree score rollouts.jsonl scored.jsonl --config run.toml --field ref_logprobs
titan-tree score rollouts.jsonl taught.jsonl --model /models/Qwen3-32B --top-k 64
torchrun --nproc-per-node 8 -m titan_tree score rollouts.jsonl scored.jsonl --config run.toml

Each shared prefix is computed once. --config is the configuration of the training run: model, dtype, data and
parallelism are then those of training. The same command continues a run that was interrupted.
"""

from __future__ import annotations

import argparse
import os
from contextlib import nullcontext
from typing import TYPE_CHECKING

from titan_tree.cli.data_arguments import (
    add_force_argument,
    add_overrides,
    add_plugins_argument,
    progress_bar,
    with_arguments,
)
from titan_tree.cli.run_process import rank
from titan_tree.errors import UserError, count, printable

if TYPE_CHECKING:
    from titan_tree.scoring.score_files import ScoreTotals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the command line of ``titan-tree score``."""
    add = parser.add_argument
    add("files", nargs="+", metavar="FILE", help='a file, a glob pattern, or "demo" for the bundled sample')
    add("out", type=os.path.expanduser, metavar="OUT", help="the JSON Lines file to write, a new file")
    add("--model", metavar="FOLDER", help="a local Hugging Face snapshot: sets model.hf_path")
    add("--config", metavar="FILE.toml", help="the configuration of the training run; FILEs replace its data")
    add_overrides(parser)
    add(
        "--field",
        metavar="NAME",
        help="the field to write: old_logprobs, or ref_logprobs (the default with --top-k)",
    )
    add("--top-k", type=int, metavar="K", help="also write the K likeliest tokens of a teacher: teacher_topk")
    add("--entropies", action="store_true", help="also write the entropies; training ignores them")
    add_force_argument(parser)
    add_plugins_argument(parser)
    add("--experts", action="store_true", help="also write routed_experts, which data.replay uses")


def run(args: argparse.Namespace) -> None:
    """Runs ``titan-tree score``. Raises UserError for wrong input or an existing file."""
    # These import torch, which --help does not need.
    from titan_tree.config.toml import load_tables
    from titan_tree.data.readers import open_binary
    from titan_tree.run.config import Config, stored_code_refused
    from titan_tree.scoring.score_files import score_files

    if not (args.model or args.config):
        raise UserError("--model or --config: missing; give the folder of a model, or a configuration")
    values = {"data.files": args.files, "data.weights": None}
    if args.model:
        values |= {"model.hf_path": args.model, "model.flavor": None}
    with stored_code_refused(args.config, args.plugins):
        config = load_tables(Config, args.config or os.devnull, with_arguments(values, args.overrides))
        with nullcontext(open_binary) if rank() else progress_bar() as open_file:
            totals = score_files(
                config,
                args.out,
                args.field or ("ref_logprobs" if args.top_k else "old_logprobs"),
                entropies=args.entropies,
                routed_experts=args.experts,
                top_k=args.top_k or 0,
                open_file=open_file,
                inputs=[args.config] if args.config else [],
                force=args.force,
            )
    if rank() == 0:
        print(describe(args.out, totals))


def describe(out: str, totals: ScoreTotals) -> str:
    """Returns what was written, and how the sampling engine's log-probs differ."""
    lines = [
        f"{printable(out)}: {count(totals.groups, 'group')} with {count(totals.paths, 'sample')}; "
        f"tokens: {totals.tokens:,} of all paths, {totals.distinct:,} distinct"
    ]
    if n := totals.compared:
        lines.append(
            f"rollout_logprobs of {n:,} tokens: mean |difference| {totals.abs_sum / n:.5f} nats, "
            f"k3 {totals.k3_sum / n:.2e}, max {totals.largest:.5f}, above 0.1: {totals.large / n:.3%}"
        )
    return "\n".join(lines)
