"""Times a step of several GPUs against the same model on one GPU.

torchrun --nproc-per-node 2 -m benchmarks ranks --flavor 0.6B
torchrun --nproc-per-node 2 -m benchmarks ranks --way tokens --flavor 8B --layers 8 --tokens 131072
torchrun --nproc-per-node 2 -m benchmarks ranks --model qwen3_moe --flavor 30B-A3B --layers 4 --way experts

All ways run in the same processes, one after the other, with the same random weights. A step consists of
forward and backward passes, gradient clipping and AdamW.

- *alone*: every GPU trains trees of its own, with all weights and states of its own. ``--layers`` keeps only
  the first layers, which must fit into one GPU.
- *weights*: every GPU trains trees of its own. FSDP2 shards weights, gradients and optimizer states.
- *experts*: the same, and the GPUs also share the experts of each layer (parallel.expert_parallel).
- *tokens*: all GPUs share the tokens of the same trees (parallel.sequence_parallel).

``--routing balanced`` replays experts that are chosen equally often, by random tokens. With "random", the
random weights of the router use experts unevenly.

Times are medians of the slowest GPU. TFLOP/s are those of one GPU. "of alone" is their ratio to the first
way's. "exposed ms" is the time of a step in which a GPU only communicates.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import steps
from benchmarks.experts import balanced_experts, exposed_ms, slowest
from benchmarks.timers import Contender, add_rounds, peak_memory, reset_peak_memory, run_rounds, wall_s
from benchmarks.trees import SHAPES, random_tree
from titan_tree.cli.bench.record import Row, device_name
from titan_tree.distributed import titan
from titan_tree.distributed.settings import ParallelConfig
from titan_tree.models.tree_model import TreeModel
from titan_tree.run.model_setup import build_parallel_model
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.routed_experts import RoutedExperts
from titan_tree.tree.token_tree import TokenTree

KEYS = (
    "model",
    "flavor",
    "layers",
    "tokens",
    "trees",
    "activation_checkpoint",
    "routing",
    "reduce_gradients",
    "tree",
    "way",
    "gpus",
)
RATIOS = ("of alone",)
QUICK = ("--flavor", "debug", "--tokens", "64", "--tree", "bushy", "--rounds", "1", "--no-compile")
COLUMNS = ("tree", "way", "gpus", "ms", "tokens/s/GPU", "TFLOP/s/GPU", "MFU", "of alone", "exposed ms", "GiB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser)
    steps.add_model_arguments(parser, "0.6B")
    add = parser.add_argument
    add("--tokens", type=int, default=32_768, help="distinct tokens of a tree (default: %(default)s)")
    add(
        "--trees",
        type=int,
        default=4,
        help="micro-batches of a step, of one tree each (default: %(default)s)",
    )
    add("--tree", nargs="+", choices=SHAPES, default=["agent"])
    ways = ["alone", "weights", "experts", "tokens"]
    add("--way", nargs="+", choices=ways, default=ways[:2])
    add("--routing", choices=["random", "balanced"], default="random")
    help = "as parallel.reduce_gradients (default: %(default)s)"
    add("--reduce-gradients", choices=["last", "every"], default="last", help=help)


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row per way and tree."""
    with steps.process_group() as (ranks, device):
        setting = steps.model_setting(args)
        setting |= {"tokens": args.tokens, "trees": args.trees, "routing": args.routing}
        setting |= {"reduce_gradients": args.reduce_gradients}
        contenders = [each for way in args.way for each in measure_all(args, way, ranks, device)]
        first = {each.shape: each for each in reversed(contenders)}
        rows = [setting | table_row(each, first[each.shape], args, device) for each in contenders]
        return rows if dist.get_rank() == 0 else []


@dataclasses.dataclass
class Way(Contender):
    """A way to train trees of one shape on the ranks."""

    shape: str = ""
    tokens: int = 0  # distinct tokens of one GPU and step
    flops: float = 0.0  # of one GPU and step
    exposed: float = 0.0  # milliseconds


def measure_all(args: argparse.Namespace, way: str, ranks: DeviceMesh, device: torch.device) -> list[Way]:
    """Builds a model, times it on each shape of trees, and frees it."""
    gc.collect()  # the model of an earlier call
    if device.type == "cuda":
        torch.cuda.empty_cache()
    torch.compiler.reset()  # graphs of other ways would count against the limit of recompilations
    size, mesh = ranks.size(), ranks
    if way == "alone":
        mesh = init_device_mesh(ranks.device_type, (size, 1), mesh_dim_names=("rank", "alone"))["alone"]
    parallel = ParallelConfig(
        sequence_parallel=size if way == "tokens" else 1, expert_parallel=size if way == "experts" else 1
    )
    training = steps.training_config(args, dtype="bfloat16" if device.type == "cuda" else "float32")
    model = build_parallel_model(steps.model_config(args), training, parallel, mesh)
    step = steps.training_step(model, device, reduce_gradients=args.reduce_gradients)
    update = steps.optimizer_update(model)
    found = []
    for shape in args.tree:
        first = 0 if way == "tokens" else args.trees * dist.get_rank()
        trees = [make_tree(model, shape, args, seed) for seed in range(first, first + args.trees)]
        run = partial(update, step, step.prepare([[tree] for tree in trees]))
        share = size if way == "tokens" else 1
        contender = Way(way, list, shape=shape, tokens=sum(map(len, trees)) // share)
        contender.flops = sum(model.costs().training_flops(TreeBatch.from_trees([t])) for t in trees) / share

        def measure(run: Callable[[], object] = run) -> list[dict[str, float]]:
            reset_peak_memory(device)
            dist.barrier()
            seconds = wall_s(run)
            peak = peak_memory(device) / 2**30
            return [{"s": slowest(seconds), "GiB": slowest(peak)}]

        for _ in range(2):
            measure()  # compiles
        contender.measure = measure
        run_rounds([contender], args.rounds)
        contender.exposed = slowest(exposed_ms(run, 1))
        contender.measure = list  # keeps no model alive
        found.append(contender)
    return found


def make_tree(model: TreeModel, shape: str, args: argparse.Namespace, seed: int) -> TokenTree:
    """Returns a random tree, with the experts of its tokens if routing is balanced."""
    tree = random_tree(shape, args.tokens, model.config.vocab_size, seed)
    if args.routing == "random" or model.experts is None:
        return tree
    sizes = model.experts.sizes
    chosen = [
        balanced_experts(
            len(tree), sizes.num_experts, sizes.top_k, torch.Generator().manual_seed(seed + layer)
        )
        for layer in range(sizes.num_layers)
    ]
    experts = torch.stack(chosen, 1).numpy().astype(np.int16)
    return dataclasses.replace(tree, routed_experts=RoutedExperts(experts, experts[..., 0].size, 0))


def table_row(way: Way, alone: Way, args: argparse.Namespace, device: torch.device) -> Row:
    """Returns the row of a way."""
    s = way.median("s")
    row: Row = {
        "tree": way.shape,
        "way": way.name,
        "gpus": 1 if way.name == "alone" else dist.get_world_size(),
        "ms": round(1e3 * s, 1),
        "tokens/s/GPU": round(way.tokens / s),
        "TFLOP/s/GPU": round(way.flops / s / 1e12, 1),
        "of alone": round(way.flops / s / (alone.flops / alone.median("s")), 3),
        "exposed ms": round(way.exposed, 1),
        "GiB": round(max(way.samples["GiB"]), 1),
    }
    if device.type == "cuda":
        row["MFU"] = f"{way.flops / s / titan.peak_flops(device_name(device)):.1%}"
    return row
