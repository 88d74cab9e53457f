"""Trees larger than memory: time and memory of each way to run them, against one pass over what fits.

    python scripts/benchmark_partitions.py --flavor 0.6B --tokens 1000000 --longest 32768 --fits 65536

A generated tree (trees.long_rollouts) of ``--tokens`` distinct tokens, no path of it longer than
``--longest``, runs forward and backward, everything a trainer does but its optimizer, as each of --run:

- *redundancy_free*: every token once; activations of the waiting partitions stay on the GPU.
- *offload*, *recompute*: the same partitions; those activations go to the host, or their forward runs again.
- *budget*: the same, with ``--device-gb`` for activations, and so some of them on the host.
- *wider*: the same as redundancy_free, with ``--wider`` tokens for a chain: fewer and larger partitions.
- *greedy*: traversals of ``--fits`` tokens that share what they can and compute the rest again.

Beside them in one pass: a path of ``--longest`` tokens alone, the yardstick of memory, and the first
``--fits`` tokens of the tree, that of throughput. Random weights and tokens, every token counts in the loss.

"mallocs" of a timed step hold it up: they count how often the caching allocator had to ask the driver.
Activations are what is allocated at the peak beyond what was before the step: weights and gradients in fp32.
tok/s are of distinct tokens. TFLOP/s count the model's operations on distinct tokens, so repeated ones earn
nothing.

``--train 20`` instead trains for that many steps with AdamW, prints what is allocated after each, and shows
first that of the tree a twentieth fits in one pass and a tenth does not; ``--memory-gb`` makes the GPU so
small.
"""

from __future__ import annotations

import argparse
import csv
import gc
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from benchmark_step import print_table
from trees import long_rollouts, random_tree

from titan_tree.build import build_optimizers, build_parallel_model
from titan_tree.components.tree_loss import TreeLoss
from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.config import ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from titan_tree.distributed.parallelize import init_distributed
from titan_tree.engine.activations import Activations
from titan_tree.engine.records import StepInput
from titan_tree.engine.tree_step import TreeStep
from titan_tree.errors import UserError
from titan_tree.models.decoder import Decoder
from titan_tree.registry import MODELS
from titan_tree.trainer import clip_and_step
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.token_tree import TokenTree

RUNS = ["redundancy_free", "wider", "recompute", "greedy", "offload", "budget"]


def main() -> None:
    args = parse_args()
    mesh, device = init_distributed()
    training = TrainingConfig(compile=args.compile, activation_checkpoint=args.activation_checkpoint)
    model = build_parallel_model(ModelConfig(args.model, args.flavor), training, ParallelConfig(), mesh)
    tree = long_rollouts(args.tokens, args.longest, model.config.vocab_size)
    print(f"{args.model} {args.flavor}, {tree.stats}", flush=True)
    if args.train:
        train(model, tree, args, device)
    else:
        compare(model, tree, args, device)
    dist.destroy_process_group()


@dataclass
class Contender:
    name: str
    tree: TokenTree
    partitioner: TreePartitioner | None = None
    policy: str = "keep"
    device_bytes: float | None = None
    warm_up: TokenTree | None = None  # runs first; None: ``tree``


def compare(model: Decoder, tree: TokenTree, args: argparse.Namespace, device: torch.device) -> None:
    vocab_size = model.config.vocab_size
    path = random_tree("chain", args.longest, vocab_size)
    fits = long_rollouts(args.fits, args.longest, vocab_size)
    partitions = TreePartitioner("redundancy_free", args.max_tokens, args.max_chain_tokens)
    wider = TreePartitioner("redundancy_free", args.max_tokens, args.wider)
    smaller = long_rollouts(args.tokens // 4, args.longest, vocab_size)
    budget = 1e9 * args.device_gb
    runs = {
        "redundancy_free": Contender("redundancy_free", tree, partitions),
        "wider": Contender(f"chain of {args.wider:,}", tree, wider, warm_up=smaller),
        "recompute": Contender("recompute", tree, partitions, "recompute", warm_up=smaller),
        "offload": Contender("offload", tree, partitions, "offload", warm_up=fits),
        "budget": Contender(f"{args.device_gb:g} GB", tree, partitions, "auto", budget, warm_up=fits),
        "greedy": Contender("greedy", tree, TreePartitioner("greedy", args.fits), warm_up=fits),
    }
    contenders = [
        Contender("one path, one pass", path),
        Contender("what fits, one pass", fits),
        Contender("what fits, partitions", fits, partitions),
        *(runs[name] for name in args.run),
    ]
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rows: list[dict[str, object]] = []
    for contender in contenders:
        rows.append(measure(contender, model, args, device))
        print(rows[-1], flush=True)
    for row in rows:
        for name, yardstick in (("GiB", rows[0]), ("tok/s", rows[1]), ("TFLOP/s", rows[1])):
            row[f"{name} x"] = round(row[name] / yardstick[name], 3) if yardstick[name] else ""
    print_table(rows)
    if args.csv:
        with args.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, rows[0])
            writer.writeheader()
            writer.writerows(rows)


def measure(
    contender: Contender, model: Decoder, args: argparse.Namespace, device: torch.device
) -> dict[str, object]:
    tree = contender.tree
    activations = Activations(device, contender.policy, contender.device_bytes)
    step = TreeStep(model, TreeLoss(reduction="token_mean"), device, contender.partitioner, activations)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    step.run(step.prepare([[contender.warm_up or tree]])).loss.item()
    started = time.perf_counter()
    prepared = step.prepare([[tree]])
    host_s = time.perf_counter() - started
    one_pass = model.training_flops(TreeBatch.from_trees([tree], edges="loss"))
    seconds, peak = [], 0
    mallocs = device_mallocs(device)
    for _ in range(args.steps):
        before = allocated(device)
        started = time.perf_counter()
        result = step.run(prepared)
        loss = result.loss.item()  # waits for the device
        seconds.append(time.perf_counter() - started)
        peak = max(peak, allocated(device, peak=True) - before)
    return {
        "run": contender.name,
        "distinct": result.counts.distinct_tokens,
        "executed": result.counts.executed_tokens,
        "again": int(result.extra_forward_tokens),
        "forwards": result.counts.forwards,
        "chain": result.chain_peak,
        "s": round(median(seconds), 2),
        "host s": round(host_s, 2),
        "tok/s": round(result.counts.distinct_tokens / median(seconds)),
        "TFLOP/s": round(one_pass / median(seconds) / 1e12, 1),
        "GiB": round(peak / 2**30, 2),
        "mallocs": device_mallocs(device) - mallocs,
        "gateways GiB": round(result.counts.gateway_bytes / 2**30, 1),
        "loss": round(loss, 5),
    }


def train(model: Decoder, tree: TokenTree, args: argparse.Namespace, device: torch.device) -> None:
    """A tree twenty times larger than what fits: that it does not, and that nothing is left behind."""
    optimizer = OptimizerConfig()
    optimizers = build_optimizers(optimizer, model)
    loss = TreeLoss(reduction="token_mean")
    if args.memory_gb:
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(1e9 * args.memory_gb / total)

    def update(prepared: StepInput) -> str:
        result = step.run(prepared)
        norm = clip_and_step(optimizers, result.loss, optimizer.max_grad_norm)
        optimizers.zero_grad()
        return f"loss {result.loss.item():.4f}, gradient norm {norm.item():.3f}"

    for share in (20, 10):
        part = long_rollouts(args.tokens // share, args.longest, model.config.vocab_size)
        step = TreeStep(model, loss, device)
        try:
            print(f"one pass over {len(part):,} tokens fits: {update(step.prepare([[part]]))}", flush=True)
        except UserError as error:
            print(f"one pass over {len(part):,} tokens: {error}", flush=True)
            optimizers.zero_grad()
    step = TreeStep(
        model, loss, device, TreePartitioner("redundancy_free", args.max_tokens, args.max_chain_tokens)
    )
    prepared = step.prepare([[tree]])
    for number in range(1, args.train + 1):
        started = time.perf_counter()
        allocated(device)
        values = update(prepared)
        peak = allocated(device, peak=True) / 2**30
        print(
            f"step {number}: {values}, {time.perf_counter() - started:.2f} s, {allocated(device):,} bytes "
            f"allocated after it, {peak:.2f} GiB at most",
            flush=True,
        )


def allocated(device: torch.device, peak: bool = False) -> int:
    """Bytes allocated now, from where on the peak counts; or at the peak since. 0 on a CPU."""
    if device.type != "cuda":
        return 0
    if peak:
        return torch.cuda.max_memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def device_mallocs(device: torch.device) -> int:
    """Times that the caching allocator has asked the driver for memory, or given some back to be able to."""
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return sum(stats.get(name, 0) for name in ("num_device_alloc", "num_device_free"))


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3", choices=MODELS)
    parser.add_argument("--flavor", default="0.6B", help="its size (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the tree (default: %(default)s)")
    parser.add_argument("--longest", type=int, default=32_768, help="path (default: %(default)s tokens)")
    parser.add_argument("--fits", type=int, default=65_536, help="tokens in one pass (default: %(default)s)")
    parser.add_argument(
        "--max-tokens", type=int, default=16_384, help="of one forward (default: %(default)s)"
    )
    parser.add_argument("--max-chain-tokens", type=int, help="default: the larger of max-tokens and longest")
    parser.add_argument("--wider", type=int, default=34_000, help="of run wider (default: %(default)s)")
    parser.add_argument("--run", nargs="*", choices=RUNS, default=RUNS)
    parser.add_argument("--device-gb", type=float, default=20, help="of run budget (default: %(default)s)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--activation-checkpoint", choices=["none", "selective", "full"], default="none")
    parser.add_argument("--steps", type=int, default=2, help="steps timed (default: %(default)s)")
    parser.add_argument("--train", type=int, default=0, help="train for so many steps instead")
    parser.add_argument("--memory-gb", type=float, help="with --train: of the GPU, all of it by default")
    parser.add_argument("--csv", type=Path, help="write the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
