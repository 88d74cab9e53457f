"""Times a step on one large tree: one GPU alone against all GPUs of torchrun, which share its tokens.

torchrun --nproc-per-node 2 -m benchmarks sequence --layers 8
torchrun --nproc-per-node 2 -m benchmarks sequence --model qwen3_5 --flavor 9B --layers 8

Both run in the same processes, one after the other, with the same random weights and tokens. A step consists
of forward and backward passes, gradient clipping and AdamW. Alone, every GPU trains the whole tree,
with all weights and states of its own. ``--layers`` keeps only the first layers, which must fit into one GPU.

Times are medians of the slowest rank. "speedup" is the time of one GPU over that of all GPUs.
"""

from __future__ import annotations

import argparse
import gc

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from benchmarks import steps
from benchmarks.timers import Contender, add_rounds, peak_memory, reset_peak_memory, run_rounds, wall_s
from benchmarks.trees import SHAPES, random_tree
from titan_tree.cli.bench.record import Row
from titan_tree.distributed.collectives import all_reduce_max
from titan_tree.distributed.settings import ParallelConfig
from titan_tree.engine.step_io import StepInput
from titan_tree.run.model_setup import build_parallel_model
from titan_tree.tree.batch import TreeBatch

KEYS = ("model", "flavor", "layers", "tokens", "activation_checkpoint", "tree", "gpus")
RATIOS = ("speedup",)
QUICK = ("--flavor", "debug", "--tokens", "64", "--tree", "bushy", "--rounds", "1", "--no-compile")
COLUMNS = ("tree", "gpus", "s", "tokens/s", "TFLOP/s/GPU", "speedup", "GiB")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser)
    steps.add_model_arguments(parser, "8B", checkpointing="full")
    add = parser.add_argument
    add("--tokens", type=int, default=131_072, help="distinct tokens (default: %(default)s)")
    add("--tree", nargs="+", choices=SHAPES, default=["agent-long", "chain"])


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row per tree for one GPU, and for all of them."""
    with steps.process_group() as (ranks, device):
        setting = steps.model_setting(args) | {"tokens": args.tokens}
        alone = init_device_mesh(ranks.device_type, (ranks.size(), 1), mesh_dim_names=("rank", "alone"))
        shared = ParallelConfig(sequence_parallel=ranks.size())
        contenders = [
            *measure_all(args, "alone", ParallelConfig(), alone["alone"], device),
            *measure_all(args, "shared", shared, ranks, device),
        ]
        rows = [setting | row for row in table_rows(contenders, args)]
        return rows if dist.get_rank() == 0 else []


def measure_all(
    args: argparse.Namespace, name: str, parallel: ParallelConfig, mesh: DeviceMesh, device: torch.device
) -> list[Contender]:
    """Builds a model, times it on each tree, and frees it. Returns a contender for each tree."""
    gc.collect()  # the model of an earlier call
    torch.cuda.empty_cache()
    training = steps.training_config(args, dtype="bfloat16" if device.type == "cuda" else "float32")
    model = build_parallel_model(steps.model_config(args), training, parallel, mesh)
    step, update = steps.training_step(model, device), steps.optimizer_update(model)
    contenders = []
    for shape in args.tree:
        tree = random_tree(shape, args.tokens, model.config.vocab_size)
        prepared = step.prepare([[tree]])
        flops = model.costs().training_flops(TreeBatch.from_trees([tree]))

        def measure(prepared: StepInput = prepared, flops: float = flops) -> list[dict[str, float]]:
            reset_peak_memory(device)
            dist.barrier()
            seconds = wall_s(lambda: update(step, prepared))
            peak = peak_memory(device) / 2**30
            slowest, peak = all_reduce_max(torch.tensor([seconds, peak], device=device)).tolist()
            return [{"s": slowest, "GiB": peak, "flops": flops}]

        measure()  # compiles
        contenders.append(Contender(f"{name}, {shape}", measure))
    run_rounds(contenders, args.rounds)
    for contender in contenders:
        contender.measure = list  # keeps no model alive
    return contenders


def table_rows(contenders: list[Contender], args: argparse.Namespace) -> list[Row]:
    rows: list[Row] = []
    half = len(contenders) // 2
    for i, contender in enumerate(contenders):
        base, number = contenders[i % half], dist.get_world_size() if i >= half else 1
        s = contender.median("s")
        rows.append(
            {
                "tree": contender.name,
                "gpus": number,
                "s": round(s, 3),
                "tokens/s": round(args.tokens / s),
                "TFLOP/s/GPU": round(contender.median("flops") / s / number / 1e12),
                "speedup": round(base.median("s") / s, 2),
                "GiB": round(contender.median("GiB"), 1),
            }
        )
    return rows
