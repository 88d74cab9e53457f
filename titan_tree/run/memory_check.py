"""Refuses a run that cannot fit into memory, before its model is built."""

from __future__ import annotations

import os
from pathlib import Path

import torch
from torch.distributed.device_mesh import DeviceMesh

from titan_tree.distributed.settings import OPTIMIZERS
from titan_tree.errors import AgreedError
from titan_tree.models.tree_model import TreeModel
from titan_tree.run.config import Config
from titan_tree.run.model_setup import add_configured_lora, build_model_without_weights

GIB = 2**30


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
        total, local_ranks = host_memory(), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
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
