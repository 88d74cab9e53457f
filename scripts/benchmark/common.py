"""Code shared by the benchmarks: arguments, environment, timers, rounds, tables, CSV files, training steps.

All calls into titan_tree's trainer are at the end of this file, so that the benchmarks depend on it in one
place.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import math
import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import triton
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from titan_tree.components.lora import LoRA
from titan_tree.components.tree_loss import TreeLoss
from titan_tree.components.tree_partitioner import TreePartitioner
from titan_tree.components.tree_tokenizer.template_process import PROCESS
from titan_tree.config import LoRAConfig, ModelConfig, OptimizerConfig, ParallelConfig, TrainingConfig
from titan_tree.distributed.mesh import init_distributed
from titan_tree.distributed.optimizers import build_optimizers, clip_and_step
from titan_tree.distributed.parallelize import parallelize, weight_shards
from titan_tree.engine.activations import Activations
from titan_tree.engine.step_io import StepInput
from titan_tree.engine.tree_step import TreeStep
from titan_tree.models.decoder import build_model
from titan_tree.models.lora.adapters import init_lora
from titan_tree.models.tree_model import TreeModel
from titan_tree.run.model_setup import build_parallel_model

VOCABULARY = 151_936  # token ids in random trees: the vocabulary size of Qwen3
OPTIMIZER = OptimizerConfig()  # the optimizer of all timed training steps
Row = dict[str, object]  # one row of a table and of a CSV file


# Arguments and environment.


def argument_parser(description: str | None, rounds: bool = True) -> argparse.ArgumentParser:
    """Returns a parser with the options that benchmarks share: ``--csv`` and, on request, ``--rounds``."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if rounds:
        parser.add_argument("--rounds", type=int, default=3, help="measurements of each contender, in turn")
    parser.add_argument("--csv", type=Path, help="append the rows to this file")
    return parser


def cpu_seconds() -> float:
    """Returns the CPU time of this process, of its ended children, and of the process of chat templates."""
    times = os.times()
    own = time.process_time() + times.children_user + times.children_system
    return own + PROCESS.cpu_seconds()


def default_device() -> torch.device:
    """Returns the GPU, or the CPU on a machine without one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def device_name(device: torch.device) -> str:
    """Returns the GPU's product name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def environment(device: torch.device, *packages: str) -> Row:
    """Prints and returns what a measurement depends on: date, commit, device and versions.

    Args:
        device: the device that the benchmark runs on.
        packages: distributions whose versions matter, besides torch and triton.
    """
    row: Row = {
        "date": time.strftime("%Y-%m-%d"),
        "commit": commit(),
        "device": device_name(device),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    row |= {name: importlib.metadata.version(name) for name in packages}
    print(", ".join(f"{name} {value}" for name, value in row.items()), flush=True)
    return row


def commit() -> str:
    """Returns the checked-out commit, with "-dirty" after it if tracked files differ.

    Returns "unknown" without git, and in a copy whose git folder does not say which files are tracked.
    """
    here = Path(__file__)

    def git(*arguments: str) -> str:
        command = ["git", *arguments]
        return subprocess.run(
            command, cwd=here.parent, capture_output=True, text=True, check=True
        ).stdout.strip()

    try:
        is_known = git("ls-files", here.name)
        return git("describe", "--always", "--dirty", "--exclude", "*") if is_known else "unknown"
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


# Timers.


@dataclass
class Contender:
    """One of several things that a benchmark times side by side.

    Attributes:
        name: its label in tables.
        measure: takes one measurement or several of them; each maps names to numbers.
        scale: factor from what is measured to the whole, for contenders that measure a sample of the work.
        note: a remark for tables.
        samples: all measurements so far, by name, not scaled.
    """

    name: str
    measure: Callable[[], Iterable[dict[str, float]]]
    scale: float = 1.0
    note: str = ""
    samples: dict[str, list[float]] = field(default_factory=dict)

    def median(self, name: str) -> float:
        """Returns the median of all measurements of ``name``, times ``scale``."""
        return self.scale * median(self.samples[name])


def run_rounds(contenders: Sequence[Contender], rounds: int) -> None:
    """Measures all contenders in turn, ``rounds`` times, so that clock changes affect all equally."""
    for _ in range(rounds):
        for contender in contenders:
            for sample in contender.measure():
                for name, value in sample.items():
                    contender.samples.setdefault(name, []).append(value)


def time_ms(function: Callable[[], object]) -> float:
    """Returns the median milliseconds of a call, without the first one, which compiles.

    On a GPU calls are repeated for 100 ms. On a CPU three calls show that the benchmark runs, no more.
    """
    function()
    if torch.cuda.is_available():
        return triton.testing.do_bench(function, warmup=20, rep=100, return_mode="median")
    return median(1e3 * wall_s(function) for _ in range(3))


def wall_s(function: Callable[[], object]) -> float:
    """Returns the seconds of one call on the host's clock. Waits for the GPU before and after the call."""
    synchronize()
    started = time.perf_counter()
    function()
    synchronize()
    return time.perf_counter() - started


def synchronize() -> None:
    """Waits until the GPU, if there is one, has finished all work."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


# Tables and files.


def print_table(rows: Sequence[Row], columns: Sequence[str] = ()) -> None:
    """Prints ``columns`` of the rows (default: all) as aligned text. None becomes an empty cell."""
    columns = columns or list(rows[0])
    cells = [list(columns), *([_cell(row.get(name)) for name in columns] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    for line in cells:
        print("  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip())
    print(flush=True)


def _cell(value: object) -> str:
    if value is None:
        return ""
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def append_csv(path: Path | None, rows: Sequence[Row]) -> None:
    """Appends rows to a CSV file and adds missing columns to it. Does nothing if ``path`` is None."""
    if path is None:
        return
    old: list[Row] = []
    if path.exists():
        with path.open(newline="") as file:
            old = list(csv.DictReader(file))
    columns = list(dict.fromkeys(name for row in (*old, *rows) for name in row))
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns, restval="")
        writer.writeheader()
        writer.writerows([*old, *rows])


# Training steps of titan_tree: the only calls into its trainer.


@contextmanager
def process_group() -> Iterator[tuple[DeviceMesh, torch.device]]:
    """Joins torchrun's process group, or forms one of a single process; yields its mesh and this device."""
    mesh, device = init_distributed()
    try:
        yield mesh, device
    finally:
        dist.destroy_process_group()


def training_model(
    model: ModelConfig, training: TrainingConfig, mesh: DeviceMesh, lora_rank: int = 0
) -> TreeModel:
    """Returns the model that the trainer builds from these tables, with random weights.

    Args:
        model: with ``implementation="transformers"``, the layers are those of transformers.
        training: dtype, compilation and activation checkpointing.
        mesh: of all ranks.
        lora_rank: of LoRA's updates for all linears; 0: all weights are trained.
    """
    if model.implementation != "transformers":
        return build_parallel_model(model, training, ParallelConfig(), mesh, LoRAConfig(rank=lora_rank))
    import transformers

    from titan_tree.models.transformers import TransformersModel

    assert model.flavor is not None
    with torch.device("meta"):
        native = build_model(model.name, model.flavor, **model.overrides)
    config = transformers.AutoConfig.for_model(**native.config.to_hf())
    with torch.device(mesh.device_type):
        theirs = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    built = parallelize(
        TransformersModel(theirs, model.attention),
        mesh,
        dtype=getattr(torch, training.dtype),
        lora=LoRA(rank=lora_rank) if lora_rank else None,
        activation_checkpoint=training.activation_checkpoint,
        compile=training.compile,
    )
    init_lora(weight_shards(built), training.seed)
    return built


def training_step(
    model: TreeModel,
    device: torch.device,
    partitioner: TreePartitioner | None = None,
    activations: Activations | None = None,
) -> TreeStep:
    """Returns the trainer's forward and backward passes, for a mean over all tokens of the batch."""
    return TreeStep(model, TreeLoss(reduction="token_mean"), device, partitioner, activations)


def optimizer_update(model: TreeModel) -> Callable[[TreeStep, StepInput], tuple[float, float]]:
    """Returns the trainer's whole step as a function: forward, backward, clipping, AdamW.

    The function waits for the device and returns the loss and the gradient norm. If it raises, it first
    clears the gradients.
    """
    optimizers = build_optimizers(OPTIMIZER, model)

    def update(step: TreeStep, prepared: StepInput) -> tuple[float, float]:
        try:
            loss = step.run(prepared).loss
            norm = clip_and_step(optimizers, loss, OPTIMIZER.max_grad_norm)
        finally:
            optimizers.zero_grad()
        values = loss.item(), norm.item()
        assert all(map(math.isfinite, values)), f"loss and gradient norm: {values}"
        return values

    return update


def autograd_ms(run: Callable[[], Tensor], inputs: Sequence[Tensor], gradient: Tensor) -> float:
    """Returns the median milliseconds of a forward and backward pass, with gradients for all inputs."""
    return time_ms(lambda: torch.autograd.grad(run(), inputs, gradient))
