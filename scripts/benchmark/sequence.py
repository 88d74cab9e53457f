"""Times a step on one large tree: one GPU alone against all GPUs of torchrun, which share its tokens.

    torchrun --nproc-per-node 2 scripts/benchmark/sequence.py --flavor 8B --layers 8
    torchrun --nproc-per-node 2 scripts/benchmark/sequence.py --model qwen3_5 --flavor 9B --layers 8
    torchrun --nproc-per-node 2 scripts/benchmark/sequence.py --flavor debug --tokens 200  # on a CPU

Both run in the same processes, one after the other, with the same random weights and tokens. A step consists
of forward and backward passes, gradient clipping and AdamW. Alone, every GPU trains the whole tree,
with all weights and states of its own. ``--layers`` keeps only the first layers, which must fit into one GPU.

Times are medians of the slowest rank.
"""

from __future__ import annotations

import argparse
import gc

import torch
import torch.distributed as dist
from common import (
    Contender,
    Row,
    append_csv,
    argument_parser,
    environment,
    optimizer_update,
    print_table,
    process_group,
    run_rounds,
    training_step,
    wall_s,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_tree import TreeBatch
from titan_tree.bench.trees import SHAPES, random_tree
from titan_tree.config import ModelConfig, ParallelConfig, TrainingConfig
from titan_tree.distributed.collectives import all_reduce_max
from titan_tree.run.model_setup import build_parallel_model


def main() -> None:
    args = parse_args()
    with process_group() as (ranks, device):
        setting = environment(device) | {"model": args.model, "flavor": args.flavor, "layers": args.layers}
        setting |= {"gpus": ranks.size(), "activation_checkpoint": args.activation_checkpoint}
        alone = init_device_mesh(ranks.device_type, (ranks.size(), 1), mesh_dim_names=("rank", "alone"))
        shared = ParallelConfig(sequence_parallel=ranks.size())
        contenders = [
            *measure_all(args, "alone", ParallelConfig(), alone["alone"], device),
            *measure_all(args, "shared", shared, ranks, device),
        ]
        if dist.get_rank() == 0:
            rows = table_rows(contenders, args)
            print_table(rows)
            append_csv(args.csv, [setting | row for row in rows])


def measure_all(
    args: argparse.Namespace, name: str, parallel: ParallelConfig, mesh: DeviceMesh, device: torch.device
) -> list[Contender]:
    """Builds a model, times it on each tree, and frees it. Returns a contender for each tree."""
    gc.collect()  # the model of an earlier call
    torch.cuda.empty_cache()
    overrides = {"num_hidden_layers": args.layers} if args.layers else {}
    cuda = device.type == "cuda"
    training = TrainingConfig(
        compile=cuda,
        activation_checkpoint=args.activation_checkpoint,
        dtype="bfloat16" if cuda else "float32",
    )
    config = ModelConfig(name=args.model, flavor=args.flavor, overrides=overrides)
    model = build_parallel_model(config, training, parallel, mesh)
    step, update = training_step(model, device), optimizer_update(model)
    contenders = []
    for shape in args.tree:
        tree = random_tree(shape, args.tokens, model.config.vocab_size)
        prepared = step.prepare([[tree]])
        flops = model.costs().training_flops(TreeBatch.from_trees([tree]))

        def measure(prepared=prepared, flops=flops) -> list[dict[str, float]]:
            if cuda:
                torch.cuda.reset_peak_memory_stats()
            dist.barrier()
            seconds = wall_s(lambda: update(step, prepared))
            peak = torch.cuda.max_memory_allocated() / 2**30 if cuda else 0.0
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


def parse_args() -> argparse.Namespace:
    parser = argument_parser(__doc__)
    parser.add_argument("--model", default="qwen3")
    parser.add_argument("--flavor", default="8B")
    parser.add_argument("--layers", type=int, help="default: all")
    parser.add_argument("--tokens", type=int, default=131_072)
    parser.add_argument("--tree", nargs="+", choices=SHAPES, default=["agent-long", "chain"])
    parser.add_argument("--activation-checkpoint", default="full", choices=["none", "selective", "full"])
    return parser.parse_args()


if __name__ == "__main__":
    main()
