"""A whole training step per executed token: titan_tree against a compiled transformers model.

    python scripts/benchmark_step.py --flavor 1.7B --tokens 16384 --tree chain agent agent-fine

Both run on one device in one process, in alternating rounds, on random tokens and random weights of one
architecture, every token counted in the loss: forward, backward, gradient clipping, AdamW.

- *transformers*: its model on one sequence, fused AdamW, SDPA with cuDNN's or FlashAttention's
  kernels, every decoder layer compiled. Weights, gradients and optimizer states in bf16, or with --peer
  float32 in fp32 and computed in bf16 under autocast: the precision of titan_tree.
- *titan_tree*: the trainer's model, optimizer and step: fp32 weights and optimizer states, bf16 computation.
  Trees are made ready for the device beforehand; the trainer does so in a thread, one step ahead.

A tree has as many distinct tokens as the sequence. Times are medians over the steps of all rounds. TFLOP/s
count the model's own operations (Decoder.training_flops): recomputation earns nothing. MFU is their share of
the GPU's peak. Without a GPU everything runs on the CPU: --flavor debug --tokens 256 shows that it does.
"""

from __future__ import annotations

import argparse
import csv
import gc
import itertools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import get_args

import torch
import torch.distributed as dist
import transformers
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel
from trees import SHAPES, random_tree

from titan_tree.build import build_optimizers, build_parallel_model
from titan_tree.components.tree_loss import TreeLoss
from titan_tree.config import ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from titan_tree.distributed import titan
from titan_tree.distributed.ao import Float8
from titan_tree.distributed.parallelize import init_distributed
from titan_tree.engine.tree_step import TreeStep
from titan_tree.models.registry import build_model
from titan_tree.registry import MODELS
from titan_tree.trainer import clip_and_step
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.token_tree import TokenTree

OPTIMIZER = OptimizerConfig()  # of both


@dataclass
class Contender:
    """What is timed. ``build`` returns one training step as a function; dropping that frees everything."""

    name: str
    build: Callable[[], Callable[[], object]]
    tree: TokenTree
    flops: float
    step_s: list[float] = field(default_factory=list)
    peak_memory: int = 0  # bytes


def main() -> None:
    args = parse_args()
    mesh, device = init_distributed()
    with torch.device("meta"):
        model = build_model(args.model, args.flavor)

    def contender(name: str, shape: str, build: Callable[[TokenTree], Callable[[], object]]) -> Contender:
        tree = random_tree(shape, args.tokens, model.config.vocab_size)
        return Contender(name, lambda: build(tree), tree, model.training_flops(TreeBatch.from_trees([tree])))

    contenders = []
    hf_config = transformers.AutoConfig.for_model(**(model.config.to_hf() | {"use_cache": False}))
    for dtype in args.peer:
        contenders.append(
            contender(
                f"transformers ({dtype}), one sequence",
                "chain",
                lambda tree, dtype=dtype: peer_step(hf_config, dtype, tree, args, device),
            )
        )
    for shape in args.tree:
        for attention, float8 in itertools.product(args.attention, args.float8):
            precision = "" if float8 == "none" else f", float8 {float8}"
            contenders.append(
                contender(
                    f"titan_tree ({attention}{precision}), {shape}",
                    shape,
                    lambda tree, attention=attention, float8=float8: our_step(
                        attention, float8, tree, args, mesh, device
                    ),
                )
            )

    for number in range(1, args.rounds + 1):
        for each in contenders:
            measure(each, args, device)
            print(
                f"round {number}/{args.rounds}  {each.name}: {1e3 * median(each.step_s):.1f} ms", flush=True
            )
    rows = [result(each, contenders[0] if args.peer else None, device) for each in contenders]
    print_table(rows)
    if args.csv:
        write_csv(args.csv, rows, args, device)
    dist.destroy_process_group()


def our_step(
    attention: str,
    float8: str,
    tree: TokenTree,
    args: argparse.Namespace,
    mesh: DeviceMesh,
    device: torch.device,
) -> Callable[[], object]:
    """The step of titan_tree.trainer.Trainer, without data, logs and checkpoints."""
    training = TrainingConfig(
        compile=args.compile, activation_checkpoint=args.activation_checkpoint, float8=float8
    )
    model = build_parallel_model(
        ModelConfig(args.model, args.flavor, attention=attention), training, ParallelConfig(), mesh
    )
    optimizers = build_optimizers(OPTIMIZER, model)
    tree_step = TreeStep(model, TreeLoss(reduction="token_mean"), device)
    prepared = tree_step.prepare([[tree]])

    def step() -> None:
        loss = tree_step.run(prepared).loss
        norm = clip_and_step(optimizers, loss, OPTIMIZER.max_grad_norm)
        optimizers.zero_grad()
        assert math.isfinite(loss.item() + norm.item()), (loss, norm)

    return step


def peer_step(
    config: transformers.PreTrainedConfig,
    dtype: str,
    tree: TokenTree,
    args: argparse.Namespace,
    device: torch.device,
) -> Callable[[], object]:
    """The step of an ordinary training script on ``tree``, a chain; weights and their gradients in dtype."""
    with device:
        model = transformers.AutoModelForCausalLM.from_config(
            config, dtype=getattr(torch, dtype), attn_implementation="sdpa"
        )
    model.train()
    if args.activation_checkpoint == "full":
        model.gradient_checkpointing_enable()
    if args.compile:
        for layer in model.model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=OPTIMIZER.lr,
        betas=tuple(OPTIMIZER.betas),
        eps=OPTIMIZER.eps,
        weight_decay=OPTIMIZER.weight_decay,
        fused=True,
    )
    tokens = torch.from_numpy(tree.tokens).long().to(device)[None]

    def step() -> None:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "float32"):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), OPTIMIZER.max_grad_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        assert math.isfinite(loss.item() + norm.item()), (loss, norm)

    return step


def measure(contender: Contender, args: argparse.Namespace, device: torch.device) -> None:
    """One round: build, warm up, time ``args.steps`` steps, free."""
    torch.compiler.reset()  # graphs of other contenders would count against the limit of recompilations
    step = contender.build()
    for _ in range(args.warmup):
        step()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    for _ in range(args.steps):
        synchronize(device)
        started = time.perf_counter()
        step()
        synchronize(device)
        contender.step_s.append(time.perf_counter() - started)
    if device.type == "cuda":
        contender.peak_memory = max(contender.peak_memory, torch.cuda.max_memory_allocated())
    del step
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def result(contender: Contender, peer: Contender | None, device: torch.device) -> dict[str, object]:
    """A row of the table. Tokens per second of the tree's distinct tokens (executed) and of its paths'."""
    seconds = median(contender.step_s)
    stats = contender.tree.stats
    row: dict[str, object] = {
        "step of": contender.name,
        "nodes": stats.n_nodes,
        "executed tokens": stats.n_tree,
        "logical tokens": stats.n_flat,
        "ms": round(1e3 * seconds, 1),
        "ms p10-p90": "-".join(f"{1e3 * q:.1f}" for q in quantiles(contender.step_s)),
        "executed tok/s": round(stats.n_tree / seconds),
        "logical tok/s": round(stats.n_flat / seconds),
        "TFLOP/s": round(contender.flops / seconds / 1e12, 2),
    }
    if device.type == "cuda":
        peak = titan.peak_flops(torch.cuda.get_device_name(device))
        row["MFU"] = f"{contender.flops / seconds / peak:.1%}"
        row["peak GiB"] = round(contender.peak_memory / 2**30, 1)
    if peer:
        row["executed x peer"] = round(
            median(peer.step_s) / peer.tree.stats.n_tree * stats.n_tree / seconds, 3
        )
        row["logical x peer"] = round(
            median(peer.step_s) / peer.tree.stats.n_flat * stats.n_flat / seconds, 2
        )
    return row


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(values)
    return ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]


def print_table(rows: Sequence[dict[str, object]]) -> None:
    cells = [list(rows[0]), *([f"{v:,}" if isinstance(v, int) else str(v) for v in r.values()] for r in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]))


def write_csv(
    path: Path, rows: Sequence[dict[str, object]], args: argparse.Namespace, device: torch.device
) -> None:
    """Append ``rows`` with what they were measured on."""
    setting = {
        "date": time.strftime("%Y-%m-%d"),
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "model": args.model,
        "flavor": args.flavor,
        "compile": args.compile,
        "activation_checkpoint": args.activation_checkpoint,
    }
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, [*setting, *rows[0]])
        if new:
            writer.writeheader()
        writer.writerows(setting | row for row in rows)


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="qwen3", choices=MODELS)
    parser.add_argument("--flavor", default="1.7B", help="its size (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=16_384, help="distinct tokens (default: %(default)s)")
    parser.add_argument("--tree", nargs="+", choices=SHAPES, default=["chain", "agent"])
    parser.add_argument("--attention", nargs="+", default=["auto"], help="backends of TreeAttention")
    parser.add_argument(
        "--float8",
        nargs="+",
        default=["none"],
        choices=get_args(Float8),
        help="titan_tree's linears, each in a run of its own (default: %(default)s)",
    )
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--activation-checkpoint", choices=["none", "full"], default="none")
    dtypes = ["bfloat16", "float32"]
    parser.add_argument(
        "--peer",
        nargs="*",
        choices=dtypes,
        default=dtypes[:1],
        help="transformers' weights; ratios are to the first (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--warmup", type=int, default=3, help="steps not timed, at the start of each round")
    parser.add_argument("--steps", type=int, default=10, help="steps timed in each round")
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    return parser.parse_args()


if __name__ == "__main__":
    main()
