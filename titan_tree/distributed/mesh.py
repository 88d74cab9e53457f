"""The process group and the device mesh of a run."""

from __future__ import annotations

import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from titan_tree.distributed.faults import START_TIMEOUT_S


def init_distributed(timeout_s: float = START_TIMEOUT_S) -> tuple[DeviceMesh, torch.device]:
    """Joins the process group that torchrun describes, or creates one with a single process.

    GPU tensors are exchanged through NCCL and host tensors through gloo, so that ranks can agree on counts
    without waiting for their GPUs.

    Args:
        timeout_s: how long a rank waits for the others.
    Returns:
        The one-dimensional mesh of all ranks, and this rank's device.
    """
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        # Forward passes differ in size. Without expandable segments this fragments the GPU's memory.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if "RANK" in os.environ:
        timeout = timedelta(seconds=timeout_s)
        store, rank, num_ranks = next(rendezvous("env://", timeout=timeout))
        # When torchrun starts all ranks again, they may get the same store, with the addresses of dead ranks.
        store = dist.PrefixStore(f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}", store)
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return init_device_mesh(device.type, (dist.get_world_size(),), mesh_dim_names=("fsdp",)), device
