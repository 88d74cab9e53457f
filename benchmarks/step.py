"""Times a whole training step: titan_tree against a compiled transformers model.

python -m benchmarks step --flavor 0.6B --tree chain agent agent-fine
python -m benchmarks step --tokens 16384 --tree chain agent agent-fine                 # Qwen3-1.7B
python -m benchmarks step --flavor 8B --layers 8 --activation-checkpoint full

Both train one architecture on one device in one process, in alternating rounds, with random tokens and random
weights. Every token counts in the loss. A step consists of forward and backward passes, gradient clipping and
AdamW.

- *transformers*: its model on one sequence, fused AdamW, SDPA with cuDNN's or FlashAttention's kernels,
  every decoder layer compiled. Weights, gradients and optimizer states are bf16. With --peer float32 they
  are fp32 and computation runs in bf16 under autocast, which is titan_tree's precision.
- *titan_tree*: the trainer's model, optimizer and step, with fp32 weights and optimizer states and bf16
  computation. Trees are prepared for the device beforehand, as the trainer does in a thread, one step
  ahead.

A tree has as many distinct tokens as the sequence. Times are medians over the steps of all rounds. TFLOP/s
count the model's own operations (ModelCosts.training_flops), so recomputation does not count. MFU is their
share of the GPU's peak. "executed x peer" is the speed per executed token over transformers'. The picture
has TFLOP/s.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks import steps
from benchmarks.timers import (
    Contender,
    add_rounds,
    benchmark,
    peak_memory,
    reset_peak_memory,
    wall_s,
)
from benchmarks.trees import SHAPES, random_tree
from titan_tree.cli.bench.record import Row, device_name
from titan_tree.components.backends import ATTENTION_BACKENDS
from titan_tree.components.lora import LoRA
from titan_tree.distributed import titan
from titan_tree.models.lora.adapters import add_lora
from titan_tree.models.pretrained import build_model
from titan_tree.models.settings import ModelConfig
from titan_tree.run.settings import TrainingConfig
from titan_tree.tree.batch import TreeBatch
from titan_tree.tree.token_tree import TokenTree

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from transformers import PreTrainedConfig

MAY_BE_ZERO = ("lora", "warmup")
KEYS = ("model", "flavor", "layers", "lora", "compile", "activation_checkpoint", "tokens", "step of")
RATIOS = ("executed x peer",)
QUICK = (
    "--tree", "agent", "--flavor", "debug", "--tokens", "64",
    "--rounds", "1", "--warmup", "0", "--steps", "1", "--no-compile",
)  # fmt: skip
PACKAGES = ("transformers",)
COLUMNS = (
    "step of", "nodes", "executed tokens", "leaf tokens", "ms", "ms p10-p90", "executed tok/s", "leaf tok/s",
    "TFLOP/s", "MFU", "peak GiB", "executed x peer",
)  # fmt: skip
Step = Callable[[], object]


@dataclass
class Entry(Contender):
    """One row of the table: a way to run a training step on a tree."""

    tree: TokenTree = field(kw_only=True)
    flops: float = field(kw_only=True)  # of one step


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_rounds(parser)
    steps.add_model_arguments(parser, "1.7B", modes=("none", "full"))  # transformers has only these
    add = parser.add_argument
    add(
        "--implementation",
        nargs="+",
        choices=["native", "transformers"],
        default=["native"],
        help="whose layers titan_tree runs, one run for each (default: native)",
    )
    add("--lora", type=int, default=0, help="rank of titan_tree's LoRA (default: 0, none)")
    add("--tokens", type=int, default=16_384, help="distinct tokens (default: %(default)s)")
    add("--tree", nargs="+", choices=SHAPES, default=["chain", "agent"])
    add(
        "--attention",
        nargs="+",
        choices=["auto", *ATTENTION_BACKENDS],
        default=["auto"],
        help="backends of TreeAttention, one run for each (default: auto)",
    )
    add(
        "--peer",
        nargs="*",
        choices=["bfloat16", "float32"],
        default=["bfloat16"],
        help="dtypes of transformers' weights; ratios refer to the first (default: bfloat16)",
    )
    add("--warmup", type=int, default=3, help="steps at the start of each round, not timed")
    add("--steps", type=int, default=10, help="timed steps of each round")


def run(args: argparse.Namespace) -> list[Row]:
    """Returns a row per peer, and per tree and way to run it."""
    with steps.process_group() as (mesh, device):
        setting = steps.model_setting(args)
        setting |= {"compile": args.compile, "lora": args.lora, "tokens": args.tokens}
        entries = make_entries(args, mesh, device)
        peer = entries[0] if args.peer else None
        return benchmark(entries, args.rounds, lambda entry: setting | table_row(entry, peer, device))


def make_entries(args: argparse.Namespace, mesh: DeviceMesh, device: torch.device) -> list[Entry]:
    """Returns what the arguments ask for: first the peers, then titan_tree on every tree."""
    import transformers

    config = steps.model_config(args)
    with torch.device("meta"):
        model = build_model(args.model, args.flavor, **config.overrides)
        hf_config = transformers.AutoConfig.for_model(**(model.config.to_hf() | {"use_cache": False}))
        if args.lora:
            add_lora(model, LoRA(rank=args.lora), torch.bfloat16)

    def entry(name: str, shape: str, build: Callable[[TokenTree], Step]) -> Entry:
        tree = random_tree(shape, args.tokens, model.config.vocab_size)
        flops = model.costs().training_flops(TreeBatch.from_trees([tree]))
        run = partial(measure, name, partial(build, tree), args, device)
        return Entry(name, run, tree=tree, flops=flops)

    entries = []
    for dtype in args.peer:
        build = partial(peer_step, hf_config, dtype, args=args, device=device)
        entries.append(entry(f"transformers ({dtype}), one sequence", "chain", build))
    for shape, layers, attention in itertools.product(args.tree, args.implementation, args.attention):
        config = steps.model_config(args, attention, implementation=layers)
        training = steps.training_config(args)
        build = partial(our_step, config, training, lora_rank=args.lora, mesh=mesh, device=device)
        of = "" if layers == "native" else "layers of transformers, "
        entries.append(entry(f"titan_tree ({of}{attention}), {shape}", shape, build))
    return entries


def our_step(
    config: ModelConfig,
    training: TrainingConfig,
    tree: TokenTree,
    lora_rank: int,
    mesh: DeviceMesh,
    device: torch.device,
) -> Step:
    """Returns the trainer's step on ``tree``."""
    model = steps.training_model(config, training, mesh, lora_rank)
    step = steps.training_step(model, device)
    return partial(steps.optimizer_update(model), step, step.prepare([[tree]]))


def peer_step(
    config: PreTrainedConfig,
    dtype: str,
    tree: TokenTree,
    args: argparse.Namespace,
    device: torch.device,
) -> Step:
    """Returns the step of an ordinary training script on ``tree``, a chain.

    Args:
        config: the architecture.
        dtype: the dtype of weights, gradients and optimizer states; computation is in bf16.
        tree: the sequence.
        args: see ``add_arguments``.
        device: the device of the model.
    """
    import transformers

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
        lr=steps.OPTIMIZER.lr,
        betas=(steps.OPTIMIZER.betas[0], steps.OPTIMIZER.betas[1]),
        eps=steps.OPTIMIZER.eps,
        weight_decay=steps.OPTIMIZER.weight_decay,
        fused=True,
    )
    tokens = torch.from_numpy(tree.tokens).long().to(device)[None]

    def step() -> None:
        with sdpa_kernel([SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION]):
            with torch.autocast(device.type, torch.bfloat16, enabled=dtype == "float32"):
                loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), steps.OPTIMIZER.max_grad_norm, foreach=True)
        optimizer.step()
        optimizer.zero_grad()
        assert math.isfinite(loss.item() + norm.item()), (loss, norm)

    return step


def measure(
    name: str, build: Callable[[], Step], args: argparse.Namespace, device: torch.device
) -> list[dict[str, float]]:
    """Builds a step, warms it up, times ``args.steps`` steps and frees everything.

    Returns one sample per step: its seconds, and the peak of allocated bytes of all steps.
    """
    torch.compiler.reset()  # graphs of other contenders would count against the limit of recompilations
    step = build()
    for _ in range(args.warmup):
        step()
    reset_peak_memory(device)
    seconds = [wall_s(step) for _ in range(args.steps)]
    peak = peak_memory(device)
    del step
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    print(f"{name}: {1e3 * sum(seconds) / len(seconds):.1f} ms a step", flush=True)
    return [{"seconds": each, "peak": peak} for each in seconds]


def table_row(entry: Entry, peer: Entry | None, device: torch.device) -> Row:
    """Returns a row of the table. Executed tokens are the tree's distinct tokens."""
    stats, seconds = entry.tree.stats, entry.median("seconds")
    row: Row = {
        "step of": entry.name,
        "nodes": stats.n_nodes,
        "executed tokens": stats.n_tree,
        "leaf tokens": stats.n_leaf,
        "ms": round(1e3 * seconds, 1),
        "ms p10-p90": "-".join(f"{1e3 * q:.1f}" for q in quantiles(entry.samples["seconds"])),
        "executed tok/s": round(stats.n_tree / seconds),
        "leaf tok/s": round(stats.n_leaf / seconds),
        "TFLOP/s": round(entry.flops / seconds / 1e12, 2),
    }
    if device.type == "cuda":
        row["MFU"] = f"{entry.flops / seconds / titan.peak_flops(device_name(device)):.1%}"
        row["peak GiB"] = round(max(entry.samples["peak"]) / 2**30, 1)
    if peer:
        speed = peer.median("seconds") / seconds
        row["executed x peer"] = round(speed * stats.n_tree / peer.tree.stats.n_tree, 3)
    return row


def quantiles(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 10th and the 90th percentile."""
    ordered = sorted(values)
    return ordered[len(ordered) // 10], ordered[-1 - len(ordered) // 10]


def draw(rows: Sequence[Mapping[str, str]], figure: Figure) -> None:
    """Draws the speed of a training step on chains and trees, per model and size."""
    groups: dict[tuple[str, int], dict[str, Mapping[str, str]]] = {}  # the first row of each name
    for row in rows:
        if "(float32)" not in row["step of"]:
            group = groups.setdefault((row["flavor"], int(row["executed tokens"])), {})
            group.setdefault(row["step of"].replace(" (bfloat16)", ""), row)
    groups = dict(sorted(groups.items()))
    figure.set_size_inches(3.4 * len(groups), 3.2)
    panels = figure.subplots(1, len(groups), sharey=True, squeeze=False)
    for panel, ((flavor, tokens), chosen) in zip(panels[0], groups.items(), strict=True):
        for name, row in chosen.items():
            peer = name.startswith("transformers")
            label = "transformers,\none sequence" if peer else name.split(", ")[-1]
            bar = panel.bar(label, float(row["TFLOP/s"]), color="C7" if peer else "C0")
            panel.bar_label(bar, [f"{float(row['TFLOP/s']):.0f}"], padding=2)
        panel.set_title(f"{flavor}, {tokens:,} distinct tokens")
        panel.tick_params(axis="x", labelsize=8)
    panels[0][0].set(ylabel="useful TFLOP/s", ylim=(0, 600))
    first = rows[0]
    figure.suptitle(f"One training step, bf16 computation, {first['device']}, torch {first['torch']}")
