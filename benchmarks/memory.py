"""Measures time and memory of trees that are larger than memory, against one pass over a tree that fits.

python -m benchmarks memory --steps 1 --run redundancy_free wider greedy recompute     # Qwen3-0.6B

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
weights and gradients in fp32. "GiB x" is their ratio to those of the one path, and "TFLOP/s x" the ratio of
speeds to one pass over what fits. "MB" are the tensors that describe the tree on the device, which Tree
Training (arXiv:2511.00413) reports too: the layout, the plans of its kernels, edges, and pairs of an edge and
a path. "mallocs" count how often the caching allocator had to call the driver during the timed steps; each
call delays the step. tok/s count distinct tokens. TFLOP/s count the model's operations on distinct tokens, so
repeated tokens do not count. "again" are tokens whose forward pass is recomputed.

The picture has speed and memory of the runs.

torchrun --nproc-per-node 8 -m benchmarks memory --flavor 8B --push /shared/new     # Qwen3-8B, 16.4 GB

With ``--push``, nothing trains. The ranks write random weights as a bf16 snapshot into a new folder, from
where servers read those of a run: each rank its share, and then rank 0 alone. Two lines for each way have
seconds, GB/s, and by how much each rank's resident host memory grew at its peak. Files may still be in the
page cache.
"""

from __future__ import annotations

import argparse
import gc
import shutil
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import steps
from benchmarks.timers import peak_memory, reset_peak_memory
from benchmarks.trees import long_rollouts, random_tree
from titan_tree.cli.bench.record import Row
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.distributed.collectives import call_and_gather, call_on_rank_0
from titan_tree.engine.activations import Activations, Policy
from titan_tree.models.pretrained import save_pretrained
from titan_tree.models.tree_model import TreeModel
from titan_tree.run.checkpoint.export import gathered_weights, save_shares
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KEYS = ("model", "flavor", "layers", "activation_checkpoint", "run", "distinct")
RATIOS = ("TFLOP/s x",)
QUICK = (
    "--flavor", "debug", "--tokens", "256", "--longest", "64", "--fits", "128", "--max-tokens", "32",
    "--wider", "80", "--steps", "1", "--no-compile",
)  # fmt: skip
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
    policy: Policy = "keep"
    device_bytes: float | None = None
    warm_up: TokenTree | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    steps.add_model_arguments(parser, "0.6B")
    add = parser.add_argument
    add("--tokens", type=int, default=1_000_000, help="distinct tokens of the tree (default: %(default)s)")
    add("--longest", type=int, default=32_768, help="tokens of the longest path (default: %(default)s)")
    add("--fits", type=int, default=65_536, help="tokens that fit in one pass (default: %(default)s)")
    add("--max-tokens", type=int, default=16_384, help="tokens of a partition (default: %(default)s)")
    add("--max-chain-tokens", type=int, help="tokens of a chain (default: of a partition, or --longest)")
    add("--wider", type=int, default=34_000, help="tokens of a chain in run wider (default: %(default)s)")
    add("--run", nargs="*", choices=RUNS, default=RUNS)
    add("--device-gb", type=float, default=20, help="gigabytes for activations in run budget (default: 20)")
    add("--push", type=Path, metavar="FOLDER", help="measure only how ranks write weights into a new folder")
    add("--steps", type=int, default=2, help="timed steps (default: %(default)s)")


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row per reference and run."""
    with steps.process_group() as (mesh, device):
        model = steps.training_model(steps.model_config(args), steps.training_config(args), mesh)
        if args.push:
            push(model, args.push)
            return []
        tree = long_rollouts(args.tokens, args.longest, model.config.vocab_size)
        print(f"{args.model} {args.flavor}, {tree.stats}", flush=True)
        return [steps.model_setting(args) | row for row in compare(model, tree, args, device)]


def push(model: TreeModel, folder: Path) -> None:
    """Prints the time and the host memory of each way to write the weights. Removes what was written."""

    def write_alone() -> None:
        weights = gathered_weights(model, torch.bfloat16)
        call_on_rank_0(lambda: save_pretrained(model, folder, weights))

    def host_bytes(field: str, before: int = 0) -> int:
        status = Path("/proc/self/status").read_text().split()
        return 1024 * int(status[status.index(f"{field}:") + 1]) - before

    def write_shares() -> None:
        save_shares(model, folder, torch.bfloat16, None)

    for name, write in (("each rank its share", write_shares), ("rank 0 alone", write_alone)):
        gc.collect()
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak VmHWM to the memory of now
        before = host_bytes("VmRSS")
        dist.barrier()
        started = time.perf_counter()
        write()
        seconds = time.perf_counter() - started
        peaks = call_and_gather(partial(host_bytes, "VmHWM", before))
        if dist.get_rank() == 0:
            size = sum(file.stat().st_size for file in folder.iterdir())
            gib = ", ".join(f"{peak / 2**30:.2f}" for peak in peaks)
            print(f"{name}: {size / 1e9:.2f} GB in {seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s")
            print(f"  host memory of ranks: {gib} GiB", flush=True)
            shutil.rmtree(folder)


def compare(model: TreeModel, tree: TokenTree, args: argparse.Namespace, device: torch.device) -> list[Row]:
    """Returns a row for each run, those of the references first."""
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    rows: list[Row] = []
    for run in make_runs(model, tree, args):
        rows.append(measure(run, model, args, device))
        print(rows[-1], flush=True)
    path, fits = rows[:2]
    return [
        row | {"GiB x": ratio(row, path, "GiB"), "TFLOP/s x": ratio(row, fits, "TFLOP/s")} for row in rows
    ]


def ratio(row: Mapping[str, Any], reference: Mapping[str, Any], name: str) -> float | None:
    """Returns the ratio of two numbers. On a CPU, which measures neither, it may be None."""
    return round(row[name] / reference[name], 3) if reference[name] else None


def make_runs(model: TreeModel, tree: TokenTree, args: argparse.Namespace) -> list[Run]:
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


def measure(run: Run, model: TreeModel, args: argparse.Namespace, device: torch.device) -> Row:
    """Returns the row of one run: medians over ``args.steps`` steps after one step to warm up."""
    activations = Activations(device, run.policy, run.device_bytes)
    step = steps.training_step(model, device, run.partitioner, activations)
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
        reset_peak_memory(device)
        started = time.perf_counter()
        result = step.run(prepared)
        loss = result.loss.item()  # waits for the device
        seconds.append(time.perf_counter() - started)
        peak = max(peak, peak_memory(device) - before)
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
        **tree_megabytes(prepared.micro_batches[0], model, device),
        "loss": round(loss, 5),
    }


def tree_megabytes(batches: Sequence[TreeBatch], model: TreeModel, device: torch.device) -> Row:
    """Returns the megabytes of the tensors that describe a tree, over all of its partitions."""
    sizes = {"layout": 0, "plan": 0, "edges": 0, "pairs": 0}
    for batch in batches:
        layout = model.prepare(batch.layout.to(device))
        plan = tensor_bytes((layout.prepared_attention, layout.conv_index))
        edges = (batch.edge_source, batch.edge_label, batch.edge_number, batch.edge_temperature)
        sizes["layout"] += tensor_bytes(batch.layout)
        sizes["plan"] += plan
        sizes["edges"] += tensor_bytes(edges)
        sizes["pairs"] += tensor_bytes(batch.pairs)
    return {f"{name} MB": round(size / 1e6, 3) for name, size in sizes.items()}


def tensor_bytes(value: object) -> int:
    """Returns the bytes of all tensors in a structure of mappings, sequences and objects with fields."""
    if isinstance(value, Tensor):
        return value.nbytes
    if isinstance(value, Mapping):
        value = value.values()
    elif not isinstance(value, Sequence):
        value = getattr(value, "__dict__", {}).values()
    return 0 if isinstance(value, str) else sum(map(tensor_bytes, value))


def allocated(device: torch.device) -> int:
    """Returns the bytes allocated now; 0 on a CPU."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def device_mallocs(device: torch.device) -> int:
    """Returns how often the caching allocator has asked the driver for memory or returned some of it."""
    stats = torch.cuda.memory_stats(device) if device.type == "cuda" else {}
    return sum(stats.get(name, 0) for name in ("num_device_alloc", "num_device_free"))


def draw(rows: Sequence[Mapping[str, str]], figure: Figure) -> None:
    """Draws speed and memory of trees that are larger than memory; the newest rows of a file."""
    if "code" in rows[0]:
        rows = [row for row in rows if row["code"] == rows[-1]["code"]]
    path, fits = float(rows[0]["GiB"]) or 1.0, float(rows[1]["TFLOP/s"]) or 1.0
    labels = [f"{row['run']}\n{int(row['distinct']):,} tokens" for row in rows]
    figure.set_size_inches(11, 0.5 * len(rows) + 1.2)
    speed, memory = figure.subplots(1, 2, sharey=True)
    ratios = [float(row["TFLOP/s"]) / fits for row in rows]
    speed.bar_label(speed.barh(labels, ratios, color="C0"), [f"{x:.2f}" for x in ratios], padding=3)
    one_pass, one_path = (int(row["distinct"]) for row in (rows[1], rows[0]))
    speed.set(xlabel=f"speed per useful operation, x one pass over {one_pass:,} tokens", xlim=(0, 1.15))
    ratios = [float(row["GiB"]) / path for row in rows]
    memory.bar_label(memory.barh(labels, ratios, color="C1"), [f"{x:.2f}" for x in ratios], padding=3)
    memory.set(xlabel=f"memory of activations, x one path of {one_path:,} tokens", xlim=(0, 2.3))
    speed.invert_yaxis()
