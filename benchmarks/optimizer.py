"""Times optimizers on the weights that one GPU holds of a large model.

python -m benchmarks optimizer          # on a GPU with 80 GB

The models are some layers of Qwen3-30B-A3B over 4 GPUs (30B-A3B) and of Qwen3-8B on one (8B), with fp32
weights. All optimizers update the same weights, and take turns in one process. Gradients are fp32, or bf16 as
after a step with a single backward pass. The benchmark needs 28 bytes of GPU memory per number: 31 GB for 6
layers of 30B-A3B, 67 GB for 6 layers of 8B.

| column  | meaning                                                                                        |
|---------|------------------------------------------------------------------------------------------------|
| ms      | median of a whole update: gradient norm, clipping, step                                        |
| host ms | median until the host may continue; as long as "ms" if it waits for the GPU                    |
| first s | the first update, which creates states and compiles                                            |
| GB      | bytes to read and write at least once: gradients twice, weights and states                     |
| GB/s    | GB / ms                                                                                        |
| of copy | GB/s, relative to that of a large copy on this GPU: 100% is the bound of memory bandwidth      |
| x torch | the time of torch's fused AdamW over this one                                                  |
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial

import torch
from torch import nn

from benchmarks.timers import Contender, add_rounds, benchmark, synchronize, time_ms, wall_s
from titan_tree.cli.bench.record import Row, default_device
from titan_tree.distributed.optimizers import Optimizers, build_optimizers, clip_and_step
from titan_tree.distributed.settings import OPTIMIZERS, OptimizerConfig, OptimizerSpec
from titan_tree.models.pretrained import build_model

MODELS = {"30B-A3B": ("qwen3_moe", 4), "8B": ("qwen3", 1), "debug": ("qwen3_moe", 2)}  # family, GPUs
BF16 = ", bf16 gradients"  # suffix of optimizers whose gradients are not fp32
# Bytes per number to read and write states.
STATE_BYTES = {
    "adamw": 16,
    "adamw" + BF16: 16,
    "adamw of torch": 16,
    "adamw8bit": 4,
    "adamw8bit of torchao": 4,
}
KEYS = ("model", "layers", "optimizer")
RATIOS = ("x torch",)
QUICK = ("--model", "debug", "--layers", "1", "--rounds", "1", "--no-compile")
PACKAGES = ("torchao",)
COLUMNS = (
    "optimizer", "model", "tensors", "numbers", "ms", "host ms", "first s", "GB", "GB/s", "of copy",
    "x torch",
)  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser)
    add = parser.add_argument
    add("--model", nargs="+", default=["30B-A3B", "8B"], choices=MODELS)
    add("--layers", type=int, default=6)
    add("--no-compile", action="store_true", help="run torchao's optimizer in eager mode")


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row per model and optimizer."""
    import torchao.optim

    device = default_device()
    copied = torch.zeros(2**28 if device.type == "cuda" else 2**20, device=device)
    bandwidth = 2 * copied.nbytes / time_ms(partial(torch.empty_like(copied).copy_, copied)) / 1e6
    del copied
    print(f"a copy moves {bandwidth:,.0f} GB/s")
    fused = OptimizerSpec(import_class=lambda: torch.optim.AdamW, fused=True)
    theirs = OptimizerSpec(import_class=lambda: torchao.optim.AdamW8bit)
    with (
        OPTIMIZERS.registered("adamw of torch", fused),
        OPTIMIZERS.registered("adamw8bit of torchao", theirs),
        torch.compiler.set_stance("force_eager" if args.no_compile else "default"),
    ):
        return [row for name in args.model for row in measure(args, name, bandwidth, device)]


def measure(args: argparse.Namespace, name: str, bandwidth: float, device: torch.device) -> list[Row]:
    """Returns a row per optimizer. ``bandwidth``: of a copy, in GB/s."""
    model = shards(name, args.layers, device)
    contenders: dict[str, Contender] = {}
    first_s: dict[str, float] = {}
    loss = torch.ones((), device=device)
    built: dict[str, Optimizers] = {}
    for label in STATE_BYTES:
        optimizer = label.removesuffix(BF16)
        if optimizer not in built:
            built[optimizer] = build_optimizers(OptimizerConfig(name=optimizer, lr=1e-6), model)
        update = partial(clip_and_step, built[optimizer], loss, math.inf)
        cast = partial(cast_gradients, model, torch.bfloat16 if label.endswith(BF16) else torch.float32)
        cast()
        first_s[label] = wall_s(update)
        contenders[label] = Contender(label, partial(times, cast, update))
    numbers = sum(p.numel() for p in model.parameters())

    def row(contender: Contender) -> Row:
        ms = contender.median("ms")
        gradient_bytes = 2 if contender.name.endswith(BF16) else 4
        gigabytes = (2 * gradient_bytes + 2 * 4 + STATE_BYTES[contender.name]) * numbers / 1e9
        return {
            "optimizer": contender.name,
            "model": name,
            "layers": args.layers,
            "tensors": len(list(model.parameters())),
            "numbers": numbers,
            "ms": round(ms, 2),
            "host ms": round(contender.median("host ms"), 2),
            "first s": round(first_s[contender.name], 1),
            "GB": round(gigabytes, 2),
            "GB/s": round(1e3 * gigabytes / ms),
            "of copy": f"{1e3 * gigabytes / ms / bandwidth:.0%}",
            "x torch": round(contenders["adamw of torch"].median("ms") / ms, 3),
        }

    return benchmark(list(contenders.values()), args.rounds, row)


def cast_gradients(model: nn.Module, dtype: torch.dtype) -> None:
    for weight in model.parameters():
        assert weight.grad is not None
        weight.grad = weight.grad.to(dtype)


def times(cast: partial[None], update: partial[torch.Tensor]) -> list[dict[str, float]]:
    cast()
    synchronize()
    started = time.perf_counter()
    update()
    host_ms = 1e3 * (time.perf_counter() - started)
    return [{"ms": time_ms(update), "host ms": host_ms}]


def shards(name: str, layers: int, device: torch.device) -> nn.Module:
    """Returns a model whose weights are the shards of one GPU, with random gradients."""
    family, gpus = MODELS[name]
    with torch.device("meta"):
        model = build_model(family, name, num_hidden_layers=layers)
    for module in model.modules():
        for label, weight in list(module.named_parameters(recurse=False)):
            shape = (weight.shape[0] // gpus, *weight.shape[1:])
            shard = nn.Parameter(0.02 * torch.randn(shape, device=device))
            shard.grad = torch.randn_like(shard)
            setattr(module, label, shard)
    return model
