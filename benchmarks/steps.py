"""Training steps of titan_tree for benchmarks: the only calls into its trainer."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from benchmarks.timers import wall_s
from titan_tree.cli.bench.record import Row
from titan_tree.components.lora import LoRA
from titan_tree.components.tree_loss.loss import TreeLoss
from titan_tree.components.tree_partitioner.partitioner import TreePartitioner
from titan_tree.distributed.gradient_sync import cast_weights
from titan_tree.distributed.mesh import init_distributed
from titan_tree.distributed.optimizers import build_optimizers, clip_and_step
from titan_tree.distributed.parallelize import parallelize, weight_shards
from titan_tree.distributed.settings import OptimizerConfig, ParallelConfig
from titan_tree.engine.activations import Activations
from titan_tree.engine.device_clock import DeviceClock
from titan_tree.engine.step_io import StepInput
from titan_tree.engine.tree_step import TreeStep
from titan_tree.models.decoder_config import ConfigJson
from titan_tree.models.lora.adapters import add_lora, init_lora
from titan_tree.models.pretrained import add_tower, build_model
from titan_tree.models.settings import MODELS, LoRAConfig, ModelConfig
from titan_tree.models.tree_model import TreeModel
from titan_tree.run.model_setup import build_parallel_model
from titan_tree.run.settings import TrainingConfig

OPTIMIZER = OptimizerConfig()  # of all timed training steps
Update = Callable[[TreeStep, StepInput], tuple[float, float, float]]  # see ``optimizer_update``


def add_model_arguments(
    parser: argparse.ArgumentParser,
    flavor: str,
    checkpointing: str = "none",
    modes: Sequence[str] = ("none", "selective", "full"),
) -> None:
    """Declares the arguments that ``model_setting``, ``model_config`` and ``training_config`` read.

    Args:
        parser: the parser of a benchmark.
        flavor: the default size of the model.
        checkpointing: the default of --activation-checkpoint.
        modes: its valid values.
    """
    add = parser.add_argument
    add("--model", default="qwen3", choices=list(MODELS), help="model family (default: %(default)s)")
    add("--flavor", default=flavor, help="size of the model, as in model.flavor (default: %(default)s)")
    add("--layers", type=int, help="keep only the first layers (default: all)")
    help = "which activations the backward pass recomputes (default: %(default)s)"
    add("--activation-checkpoint", choices=modes, default=checkpointing, help=help)
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="torch.compile the layers")


def model_setting(args: argparse.Namespace) -> Row:
    """Returns the columns that name the model and how it is checkpointed."""
    return {
        "model": args.model,
        "flavor": args.flavor,
        "layers": args.layers or "all",
        "activation_checkpoint": args.activation_checkpoint,
    }


def model_config(args: argparse.Namespace, attention: str = "auto", **values: Any) -> ModelConfig:
    """Returns the model that the arguments name."""
    overrides = {"num_hidden_layers": args.layers} if args.layers else {}
    return ModelConfig(
        name=args.model, flavor=args.flavor, attention=attention, overrides=overrides, **values
    )


def training_config(args: argparse.Namespace, **values: Any) -> TrainingConfig:
    """Returns how the arguments compile and checkpoint the model."""
    return TrainingConfig(compile=args.compile, activation_checkpoint=args.activation_checkpoint, **values)


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
        model: ``implementation="transformers"`` takes the layers of transformers.
        training: dtype, compilation and activation checkpointing.
        mesh: the mesh of all ranks.
        lora_rank: the rank of LoRA's updates for all linears; 0: all weights are trained.
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
    built: TreeModel = TransformersModel(theirs, model.attention)
    dtype = getattr(torch, training.dtype)
    if lora_rank:
        add_lora(built, LoRA(rank=lora_rank), dtype)
    parallelize(
        built,
        mesh,
        dtype=dtype,
        activation_checkpoint=training.activation_checkpoint,
        compile=training.compile,
    )
    init_lora(weight_shards(built), training.seed)
    return built


def model_with_tower(
    model: ModelConfig, training: TrainingConfig, mesh: DeviceMesh, config: ConfigJson | None
) -> TreeModel:
    """Returns ``training_model`` with the tower of a config.json; None: that of the flavor "debug"."""
    assert model.flavor is not None
    with torch.device("meta"):
        built = build_model(model.name, model.flavor)
        add_tower(built, config, model.flavor, trained=model.vision == "train")
    parallelize(
        built,
        mesh,
        dtype=getattr(torch, training.dtype),
        activation_checkpoint=training.activation_checkpoint,
        compile=training.compile,
    )
    built.to_empty(device=mesh.device_type)
    built.init_weights(training.seed, weight_shards(built))
    return built


def training_step(
    model: TreeModel,
    device: torch.device,
    partitioner: TreePartitioner | None = None,
    activations: Activations | None = None,
    **options: Any,
) -> TreeStep:
    """Returns the trainer's forward and backward passes, for a mean over all tokens of the batch."""
    return TreeStep(model, TreeLoss(reduction="token_mean"), device, partitioner, activations, **options)


def encode_images(model: TreeModel, prepared: StepInput) -> float:
    """Returns the seconds of the tower for the images of a step, with its backward pass if it is trained."""

    def encode() -> None:
        for first, *_ in prepared.micro_batches:
            rows = [x for x in model.encode(first.pixels) if x.requires_grad]
            torch.autograd.backward(rows, list(map(torch.ones_like, rows)))

    with cast_weights(model):
        seconds = wall_s(encode)
    model.zero_grad()
    return seconds


def optimizer_update(model: TreeModel, optimizer: OptimizerConfig = OPTIMIZER) -> Update:
    """Returns the trainer's whole step as a function: forward, backward, clipping, AdamW.

    The function waits for the device. It returns the loss, the gradient norm, and the seconds of clipping and
    AdamW. If it raises, it first clears the gradients.
    """
    optimizers = build_optimizers(optimizer, model)

    def update(step: TreeStep, prepared: StepInput) -> tuple[float, float, float]:
        clock = DeviceClock(step.device)
        try:
            loss = step.run(prepared).loss
            passes_done = clock.mark()
            norm = clip_and_step(optimizers, loss, optimizer.max_grad_norm)
            optimizer_done = clock.mark()
        finally:
            optimizers.zero_grad()
        values = loss.item(), norm.item()
        assert all(map(math.isfinite, values)), f"loss and gradient norm: {values}"
        return *values, clock.seconds(passes_done, optimizer_done)

    return update
