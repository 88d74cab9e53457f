"""Builds the model of a configuration: its architecture, its weights, LoRA, and the ranks that share it.

``check_memory`` refuses a run that cannot fit into memory, before its model is built.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_tree.components.lora import LoRA
from titan_tree.distributed import ao
from titan_tree.distributed.collectives import call_on_all_ranks_keep_rank0
from titan_tree.distributed.launch import ranks_of_machine
from titan_tree.distributed.mesh import OneRank
from titan_tree.distributed.parallelize import parallelize, weight_shards
from titan_tree.distributed.settings import OPTIMIZERS, ParallelConfig
from titan_tree.errors import AgreedError, UserError
from titan_tree.models.decoder import Decoder
from titan_tree.models.hf.snapshot_files import fingerprint
from titan_tree.models.lora.adapters import add_lora, init_lora
from titan_tree.models.lora.peft import fill_lora, read_adapter
from titan_tree.models.pretrained import build_model, load_weights, model_from_config
from titan_tree.models.settings import LoRAConfig, ModelConfig
from titan_tree.models.tree_model import TreeModel
from titan_tree.run.config import Config
from titan_tree.run.settings import TrainingConfig

GIB = 2**30


def build_parallel_model(
    model: ModelConfig,
    training: TrainingConfig,
    parallel: ParallelConfig,
    mesh: DeviceMesh | OneRank,
    lora: LoRAConfig | None = None,
) -> TreeModel:
    """Returns the model, parallelized over ``mesh``, with fp32 weights from a snapshot or random ones.

    With LoRA, the weights are frozen and have the dtype of the computation. Only the factors are fp32. If the
    base is quantized, each rank first loads its weights into its host's memory.

    Otherwise, no rank ever holds the whole model. The model is created on the meta device and sharded; then
    each rank reads or draws its own shards. Random weights are the same for any number of ranks.
    """
    with torch.device("meta"):
        built = build_model_without_weights(model)
    _fill(built, model, training, parallel, mesh, lora)
    return built


def _fill(
    built: TreeModel,
    model: ModelConfig,
    training: TrainingConfig,
    parallel: ParallelConfig,
    mesh: DeviceMesh | OneRank,
    lora: LoRAConfig | None,
) -> None:
    """Parallelizes a model on the meta device, and gives it its weights, and LoRA if it is on."""
    if lora is not None and lora.is_on:
        _build_with_lora(built, lora, model, training, parallel, mesh)
    else:
        _parallelize_and_load(built, model, training, parallel, mesh, mesh.device_type)


def build_frozen_model(
    model: ModelConfig,
    training: TrainingConfig,
    parallel: ParallelConfig,
    mesh: DeviceMesh | OneRank,
    lora: LoRAConfig | None = None,
) -> TreeModel:
    """Returns ``build_parallel_model``'s model with frozen weights; on one rank, in the dtype of training.

    One rank reads a snapshot in this dtype. Random weights are drawn in fp32, and then cast.
    """
    with torch.device("meta"):
        frozen = build_model_without_weights(model)
    if mesh.size() == 1 and model.hf_path:
        _cast_weights(frozen, training)
    _fill(frozen, model, training, parallel, mesh, lora)
    frozen.requires_grad_(False)
    if mesh.size() == 1:
        _cast_weights(frozen, training)
    return frozen


def _cast_weights(model: TreeModel, training: TrainingConfig) -> None:
    for weight in model.parameters():
        weight.data = weight.data.to(getattr(torch, training.dtype))


def build_base(model: ModelConfig, training: TrainingConfig, device: str) -> TreeModel:
    """Returns a frozen model on one device, whose weights ``share_base`` shares."""
    plain = dataclasses.replace(training, compile=False, activation_checkpoint="none")
    return build_frozen_model(model, plain, ParallelConfig(), OneRank(device))


def share_base(
    base: TreeModel, training: TrainingConfig, lora: LoRA | None = None, seed: int = 0
) -> TreeModel:
    """Returns a model of its own modules with the tensors of ``base``, and LoRA beside them.

    Args:
        base: the result of ``build_base``.
        seed: of the factors, see ``init_lora``.
    """
    tensors = (*base.parameters(), *base.buffers())
    model = copy.deepcopy(base, {id(tensor): tensor for tensor in tensors})
    if lora is not None:
        add_lora(model, lora)
        init_lora(weight_shards(model), seed)
    return parallelize(
        model,
        OneRank(next(base.parameters()).device.type),
        dtype=getattr(torch, training.dtype),
        activation_checkpoint=training.activation_checkpoint,
        compile=training.compile,
    )


def _parallelize_and_load(
    built: TreeModel,
    model: ModelConfig,
    training: TrainingConfig,
    parallel: ParallelConfig,
    mesh: DeviceMesh | OneRank,
    device: str,
    unsharded: Collection[nn.Parameter] = (),
) -> None:
    """Parallelizes a model on the meta device, and reads or draws its weights, except for factors of LoRA."""
    parallelize(
        built,
        mesh,
        dtype=getattr(torch, training.dtype),
        unsharded=unsharded,
        activation_checkpoint=training.activation_checkpoint,
        compile=training.compile,
        replicate=parallel.replicate,
        sequence_parallel=parallel.sequence_parallel,
        expert_parallel=parallel.expert_parallel,
    )
    if model.hf_path:
        # Each rank checks only the values that it reads, so it must tell the others about an error.
        call_on_all_ranks_keep_rank0(partial(load_weights, built, model.hf_path, device, weight_shards))
    else:
        assert isinstance(built, Decoder)
        built.to_empty(device=device)
        built.init_weights(training.seed, weight_shards(built))


def _build_with_lora(
    built: TreeModel,
    lora: LoRAConfig,
    model: ModelConfig,
    training: TrainingConfig,
    parallel: ParallelConfig,
    mesh: DeviceMesh | OneRank,
) -> None:
    """Does the same for a model with LoRA: adds factors first, and gives them values last."""
    if model.vision == "train":
        raise UserError(
            'model.vision: expected "off" or "frozen" with LoRA, which freezes all weights, got "train"; set '
            'it to "frozen"'
        )
    factors = add_configured_lora(built, lora, getattr(torch, training.dtype))
    is_quantized = lora.quantize == "nf4"
    linears = ao.nf4_linears(built).values() if is_quantized else ()
    unsharded = [linear.get_parameter("weight") for linear in linears]
    device = "cpu" if is_quantized else mesh.device_type
    _parallelize_and_load(built, model, training, parallel, mesh, device, unsharded)
    if is_quantized:
        ao.store_as_nf4(built, mesh.device_type)
    if factors is None:
        init_lora(weight_shards(built), training.seed)
    else:
        fill_lora(weight_shards(built), factors)


def add_configured_lora(
    model: TreeModel, config: LoRAConfig, dtype: torch.dtype | None = None
) -> dict[str, Tensor] | None:
    """Adds the updates of the table [lora] to ``model``, see ``add_lora``.

    Returns:
        The factors, if they come from a PEFT adapter.
    """
    if config.adapter is not None:
        updates, factors = read_adapter(model, config.adapter)
        add_lora(model, updates, dtype)
        return factors
    targets = tuple(config.targets)
    add_lora(model, LoRA(rank=config.rank, alpha=config.alpha, targets=targets, rslora=config.rslora), dtype)
    return None


def snapshot_model(model: ModelConfig, folder: str) -> ModelConfig:
    """Returns the table [model] with the snapshot in ``folder`` in place of its model."""
    return dataclasses.replace(model, flavor=None, hf_path=folder, overrides={})


def build_model_without_weights(model: ModelConfig) -> TreeModel:
    """Returns the model without a snapshot's weights. Call it on the meta device to draw none either."""
    if not model.hf_path:
        if model.implementation == "transformers":
            raise UserError(
                'model.implementation: expected "auto" or "native" with model.flavor, got "transformers"; '
                "set model.hf_path to a snapshot"
            )
        assert model.flavor is not None
        return build_model(
            model.name, model.flavor, model.attention, model.recurrence, model.vision, **model.overrides
        )
    if model.overrides:
        raise UserError(
            "model.overrides: expected none with model.hf_path, because the snapshot sets all sizes; "
            "remove them, or set model.flavor instead of model.hf_path"
        )
    return model_from_config(
        model.hf_path, torch.float32, model.attention, model.recurrence, model.implementation, model.vision
    )


def describe_architecture(config: Config, model: TreeModel, mesh: DeviceMesh | OneRank) -> dict[str, object]:
    """Returns the properties that a run must share with the checkpoints that it resumes from."""
    described = {"name": model.family, "optimizer": config.optimizer.name, **vars(model.config)}
    if config.optimizer.options:  # they decide which states an optimizer has
        described["optimizer.options"] = config.optimizer.options
    if model.visual is not None:
        described["vision"] = config.model.vision
    if model.lora is not None:
        described |= {"lora": vars(model.lora), "base": _base(config)}
    if model.experts is not None and model.experts.router_biases():
        described["router_bias"] = True
    # The ranks that share an expert shard its rows, which are the second dimension of its weights. If the
    # optimizer's states cannot be redistributed along that dimension, this number of ranks must not change.
    replica = mesh.size() // config.parallel.replicate
    sharing = replica // config.parallel.expert_parallel
    if not OPTIMIZERS[config.optimizer.name].reshards_any_dim and 1 < sharing < replica:
        described["ranks_that_share_an_expert"] = sharing
    return described


def start_weights(config: Config) -> str:
    """Returns what determines the weights at the start of a run, without LoRA's updates."""
    if config.model.hf_path:
        return f"snapshot {fingerprint(Path(config.model.hf_path))}"
    return f"random weights, training.seed {config.training.seed}"


def _base(config: Config) -> str:
    """Returns what determines the frozen weights, which checkpoints do not hold."""
    quantized = "" if config.lora.quantize == "none" else f", in {config.lora.quantize}"
    return f"{start_weights(config)}{quantized}"


def check_memory(config: Config, mesh: DeviceMesh, device: torch.device) -> None:
    """Compares the least memory of a step with the memory that this machine has in total.

    Raises:
        AgreedError: the run cannot fit. Whether one that passes fits, ``titan-tree plan`` estimates.
    """
    with torch.device("meta"):
        model = build_model_without_weights(config.model)
        if config.lora.is_on:
            add_configured_lora(model, config.lora)
    local_ranks = 1
    if device.type == "cuda":
        total = float(torch.cuda.get_device_properties(device).total_memory)
        where = f"the {total / GIB:,.0f} GiB of {torch.cuda.get_device_name(device)}"
    else:
        total, local_ranks = host_memory(), ranks_of_machine()
        where = f"the {total / GIB:,.0f} GiB of this machine, which has no GPU that torch sees"
    sharing = mesh.size() // config.parallel.replicate  # ranks that shard the model
    needed = least_bytes(config, model) / sharing * local_ranks
    if needed > total:
        raise AgreedError(
            f"model: {model.num_parameters():,} parameters need at least {needed / GIB:,.0f} GiB for "
            f"weights, gradients and optimizer states, more than {where}; choose a smaller model, more GPUs, "
            "optimizer.name=adamw8bit, or LoRA (lora.rank); titan-tree plan estimates the memory of each"
        )


def least_bytes(config: Config, model: TreeModel) -> float:
    """Returns the bytes of weights, gradients and optimizer states, all ranks together. All are fp32.

    Frozen weights have the dtype of the computation, or about 4 bits if they are quantized.
    """
    sizes = [weight.numel() for weight in model.parameters() if weight.requires_grad]
    frozen = sum(weight.numel() for weight in model.parameters()) - sum(sizes)
    frozen_item = 0.5 if config.lora.quantize != "none" else getattr(torch, config.training.dtype).itemsize
    state_bytes = OPTIMIZERS[config.optimizer.name].state_bytes
    return frozen * frozen_item + sum(8.0 * size + state_bytes(size) for size in sizes)


def host_memory() -> float:
    """Returns the bytes of memory and swap of this host, or the limit of its container if that is lower."""
    lines = Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else []
    fields = dict(line.split(":", 1) for line in lines)
    known = [1024.0 * int(fields[name].split()[0]) for name in ("MemTotal", "SwapTotal") if name in fields]
    limit = Path("/sys/fs/cgroup/memory.max")
    text = limit.read_text().strip() if limit.is_file() else "max"
    total = sum(known) or float("inf")
    return total if text == "max" else min(total, float(text))
