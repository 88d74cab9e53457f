"""Measures time and memory of trees that are larger than memory, against one pass over a tree that fits.

    python scripts/benchmark/partitions.py --flavor 0.6B --tokens 1000000 --longest 32768 --fits 65536
    python scripts/benchmark/partitions.py --flavor debug --tokens 1024 --longest 128 --fits 256 \\
        --max-tokens 64 --wider 160 --steps 1 --no-compile        # on a CPU: shows that it runs

A generated tree (trees.long_rollouts) of ``--tokens`` distinct tokens, with paths of at most ``--longest``
tokens, runs forward and backward, without an optimizer, in each of the ways named by --run:

- *redundancy_free*: every token once. Activations of suspended partitions stay on the GPU.
- *offload*, *recompute*: the same partitions. Those activations move to the host, or are recomputed.
- *budget*: the same partitions with ``--device-gb`` for activations; what exceeds it moves to the host.
- *wider*: like redundancy_free, with ``--wider`` tokens per chain, which makes fewer and larger partitions.
- *greedy*: traversals of ``--fits`` tokens. They repeat the tokens that they cannot share.

Two single passes are the references: a path of ``--longest`` tokens for memory, and the first ``--fits``
tokens of the tree for speed. Weights and tokens are random, and every token counts in the loss.

"GiB" are activations: the peak of allocated memory beyond what was allocated before the step, which are
weights and gradients in fp32. "mallocs" count how often the caching allocator had to call the driver during
the timed steps; each call delays the step. tok/s count distinct tokens. TFLOP/s count the model's
operations on distinct tokens, so repeated tokens do not count. "again" are tokens whose forward pass is
recomputed.

``--train 20`` trains for that many steps with AdamW instead and prints the memory that is allocated after
each step. Before that it shows that a twentieth of the tree fits in one pass and a tenth does not.
``--memory-gb`` limits the GPU's memory for this.
"""

from __future__ import annotations

import argparse
import gc
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch
from common import (
    Row,
    append_csv,
    argument_parser,
    environment,
    optimizer_update,
    print_table,
    process_group,
    training_model,
    training_step,
)

from titan_tree import TokenTree, TreeBatch, TreePartitioner, UserError
from titan_tree.bench.trees import long_rollouts, random_tree
from titan_tree.config import ModelConfig, TrainingConfig
from titan_tree.engine.activations import Activations
from titan_tree.models.decoder import Decoder
from titan_tree.registry import MODELS

RUNS = ["redundancy_free", "wider", "recompute", "greedy", "offload", "budget"]


@dataclass
class Run:
    """A way to run a tree.

    Attributes:
        name: its label in the table.
        tree: the tree to run.
        partitioner: cuts the tree; None runs it in one pass.
        policy: how activations of suspended partitions are kept, see ``Activations``.
        device_bytes: the budget of policy "auto".
        warm_up: the tree that runs before the measurement; None: ``tree``.
    """

    name: str
    tree: TokenTree
    partitioner: TreePartitioner | None = None
    policy: str = "keep"
    device_bytes: float | None = None
    warm_up: TokenTree | None = None


def main() -> None:
    args = parse_args()
    with process_group() as (mesh, device):
        setting = environment(device) | {"model": args.model, "flavor": args.flavor, "steps": args.steps}
        training = TrainingConfig(compile=args.compile, activation_checkpoint=args.activation_checkpoint)
        model = training_model(ModelConfig(name=args.model, flavor=args.flavor), training, mesh)
        tree = long_rollouts(args.tokens, args.longest, model.config.vocab_size)
        print(f"{args.model} {args.flavor}, {tree.stats}", flush=True)
        if args.train:
            train(model, tree, args, device)
        else:
            rows = compare(model, tree, args, device)
            print_table(rows)
            append_csv(args.csv, [setting | row for row in rows])


def compare(model: Decoder, tree: TokenTree, args: argparse.Namespace, device: torch.device) -> list[Row]:
    """Returns a row for each run, those of the references first."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rows: list[Row] = []
    for run in make_runs(model, tree, args):
        rows.append(measure(run, model, args, device))
        print(rows[-1], flush=True)
    for row in rows:
        for name, reference in (("GiB", rows[0]), ("tok/s", rows[1]), ("TFLOP/s", rows[1])):
            row[f"{name} x"] = round(row[name] / reference[name], 3) if reference[name] else ""
    return rows


def make_runs(model: Decoder, tree: TokenTree, args: argparse.Namespace) -> list[Run]:
    """Returns the references and the runs that the arguments ask for."""
    vocab_size = model.config.vocab_size
    fits = long_rollouts(args.fits, args.longest, vocab_size)
    smaller = long_rollouts(args.tokens // 4, args.longest, vocab_size)
    partitions = TreePartitioner("redundancy_free", args.max_tokens, args.max_chain_tokens)
    wider = TreePartitioner("redundancy_free", args.max_tokens, args.wider)
    runs = {
        "redundancy_free": Run("redundancy_free", tree, partitions),
        "wider": Run(f"chain of {args.wider:,}", tree, wider, warm_up=smaller),
        "recompute": Run("recompute", tree, partitions, "recompute", warm_up=smaller),
        "offload": Run("offload", tree, partitions, "offload", warm_up=fits),
        "budget": Run(f"{args.device_gb:g} GB", tree, partitions, "auto", 1e9 * args.device_gb, warm_up=fits),
        "greedy": Run("greedy", tree, TreePartitioner("greedy", args.fits), warm_up=fits),
    }
    return [
        Run("one path, one pass", random_tree("chain", args.longest, vocab_size)),
        Run("what fits, one pass", fits),
        Run("what fits, partitions", fits, partitions),
        *(runs[name] for name in args.run),
    ]


def measure(run: Run, model: Decoder, args: argparse.Namespace, device: torch.device) -> Row:
    """Returns the row of one run: medians over ``args.steps`` steps after one step to warm up."""
    activations = Activations(device, run.policy, run.device_bytes)
    step = training_step(model, device, run.partitioner, activations)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    step.run(step.prepare([[run.warm_up or run.tree]])).loss.item()
    started = time.perf_counter()
    prepared = step.prepare([[run.tree]])
    host_s = time.perf_counter() - started
    flops = model.costs().training_flops(TreeBatch.from_trees([run.tree], edges="loss"))
    seconds, peak = [], 0
    mallocs = device_mallocs(device)
    for _ in range(args.steps):
        before = allocated(device)
        started = time.perf_counter()
        result = step.run(prepared)
        loss = result.loss.item()  # waits for the device
        seconds.append(time.perf_counter() - started)
        peak = max(peak, allocated(device, peak=True) - before)
    median_s = median(seconds)
    return {
        "run": run.name,
        "distinct": result.counts.distinct_tokens,
        "executed": result.counts.executed_tokens,
        "again": int(result.extra_forward_tokens),
        "forwards": result.counts.forwards,
        "chain": result.chain_peak,
        "s": round(median_s, 2),
        "host s": round(host_s, 2),
        "tok/s": round(result.counts.distinct_tokens / median_s),
        "TFLOP/s": round(flops / median_s / 1e12, 1),
        "GiB": round(peak / 2**30, 2),
        "mallocs": device_mallocs(device) - mallocs,
        "gateways GiB": round(result.counts.gateway_bytes / 2**30, 1),
        "loss": round(loss, 5),
    }


def train(model: Decoder, tree: TokenTree, args: argparse.Namespace, device: torch.device) -> None:
    """Trains on a tree that is twenty times larger than what fits, and prints the memory after each step."""
    update = optimizer_update(model)
    if args.memory_gb:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1e9 * args.memory_gb / total)
    for share in (20, 10):
        part = long_rollouts(args.tokens // share, args.longest, model.config.vocab_size)
        step = training_step(model, device)
        try:
            loss, norm, _ = update(step, step.prepare([[part]]))
            print(f"one pass over {len(part):,} tokens fits: loss {loss:.4f}, gradient norm {norm:.3f}")
        except UserError as error:
            print(f"one pass over {len(part):,} tokens: {error}")
    partitioner = TreePartitioner("redundancy_free", args.max_tokens, args.max_chain_tokens)
    step = training_step(model, device, partitioner)
    prepared = step.prepare([[tree]])
    for number in range(1, args.train + 1):
        started = time.perf_counter()
        allocated(device)
        loss, norm, _ = update(step, prepared)
        peak = allocated(device, peak=True) / 2**30
        print(
            f"step {number}: loss {loss:.4f}, gradient norm {norm:.3f}, "
            f"{time.perf_counter() - started:.2f} s, {allocated(device):,} bytes allocated after it, "
            f"{peak:.2f} GiB at most",
            flush=True,
        )


def allocated(device: torch.device, peak: bool = False) -> int:
    """Returns the bytes allocated now, and resets the peak. With ``peak``, returns the peak since the reset.

    On a CPU, the result is 0.
    """
    if device.type != "cuda":
        return 0
    if peak:
        return torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def device_mallocs(device: torch.device) -> int:
    """Returns how often the caching allocator has asked the driver for memory or returned some of it."""
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return sum(stats.get(name, 0) for name in ("num_device_alloc", "num_device_free"))


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__, rounds=False)

    def number(name: str, default: int | float | None, help: str, type: Callable = int) -> None:
        parser.add_argument(name, type=type, default=default, help=help + " (default: %(default)s)")

    parser.add_argument("--model", default="qwen3", choices=list(MODELS))
    parser.add_argument("--flavor", default="0.6B", help="size of the model (default: %(default)s)")
    number("--tokens", 1_000_000, "distinct tokens of the tree")
    number("--longest", 32_768, "tokens of the longest path")
    number("--fits", 65_536, "tokens of a tree that fits in one pass")
    number("--max-tokens", 16_384, "tokens of a partition")
    number("--max-chain-tokens", None, "tokens of a chain; None: the larger of --max-tokens and --longest")
    number("--wider", 34_000, "tokens of a chain in run wider")
    parser.add_argument("--run", nargs="*", choices=RUNS, default=RUNS)
    number("--device-gb", 20, "gigabytes for activations in run budget", float)
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--activation-checkpoint", choices=["none", "selective", "full"], default="none")
    number("--steps", 2, "timed steps")
    number("--train", 0, "train for so many steps instead")
    number("--memory-gb", None, "with --train: gigabytes of the GPU to use; None: all", float)
    return parser.parse_args()


if __name__ == "__main__":
    main()
