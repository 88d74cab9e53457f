"""The process group of a run, and the device meshes into which its ranks are divided."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from titan_tree.distributed.collectives import world_size
from titan_tree.distributed.faults import START_TIMEOUT_S, start_timeout
from titan_tree.distributed.launch import Launch
from titan_tree.errors import UserError


def init_distributed(timeout_s: float = START_TIMEOUT_S) -> tuple[DeviceMesh, torch.device]:
    """Joins the process group that torchrun describes, or creates one with a single process.

    GPU tensors are exchanged through NCCL and host tensors through gloo, so that ranks can agree on counts
    without waiting for their GPUs.

    Args:
        timeout_s: how long a rank waits for the others to come. Afterwards, until ``set_timeout``, it waits
            for ``start_timeout``.
    Returns:
        The one-dimensional mesh of all ranks, and this rank's device.
    Raises:
        UserError: wrong environment variables, or ranks that do not come.
    """
    launch = Launch.of()
    if "PYTORCH_ALLOC_CONF" not in os.environ:
        # Forward passes differ in size. Without expandable segments this fragments the GPU's memory.
        os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", launch.local_rank if launch else 0) if cuda else torch.device("cpu")
    if cuda:
        if launch and launch.local_rank >= torch.cuda.device_count():
            raise UserError(
                f"environment variable LOCAL_RANK: {launch.local_rank}, but this machine shows "
                f"{torch.cuda.device_count()} GPUs; start one rank per GPU (torchrun --nproc-per-node)"
            )
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    if launch is None:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    else:
        store, timeout = launch.join(timeout_s), timedelta(seconds=start_timeout(timeout_s))
        store.set_timeout(timeout)  # for groups that are made later
        dist.init_process_group(
            backend, store=store, rank=launch.rank, world_size=launch.num_ranks, timeout=timeout
        )
    return _mesh(device.type), device


@dataclass(frozen=True)
class OneRank:
    """The mesh of a process that trains alone, without a process group."""

    device_type: str = "cpu"

    def size(self) -> int:
        return 1

    def get_rank(self) -> int:
        return 0


def all_ranks(device_type: str) -> DeviceMesh | OneRank:
    """Returns the one-dimensional mesh of all ranks, whoever has created the process group."""
    return _mesh(device_type) if world_size() > 1 else OneRank(device_type)


def _mesh(device_type: str) -> DeviceMesh:
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("fsdp",))


@dataclass(frozen=True)
class Meshes:
    """How the ranks of a run share weights, trees and experts. Groups consist of adjacent ranks.

    Attributes:
        fsdp: all ranks, as "fsdp", or with replicas as "replicate" x "fsdp". A replica holds all weights,
            sharded over its ranks.
        sequence: all ranks, as "data" x "sequence". The ranks of a "sequence" group run the same trees and
            share their tokens. None: each rank runs trees of its own.
        experts: all ranks, as "efsdp" x "ep", or with replicas as "replicate" x "efsdp" x "ep". The ranks of
            an "ep" group hold all experts of a layer together. The ranks of an "efsdp" group hold the same
            experts, which FSDP2 shards over them. None: each rank has all experts.
    """

    fsdp: DeviceMesh | OneRank
    sequence: DeviceMesh | None
    experts: DeviceMesh | None

    @staticmethod
    def of(
        ranks: DeviceMesh | OneRank, replicate: int = 1, sequence_parallel: int = 1, expert_parallel: int = 1
    ) -> Meshes:
        """Divides all ranks, a one-dimensional mesh, in numbers that ``check_sizes`` accepts."""

        def mesh(**sizes: int) -> DeviceMesh:
            return init_device_mesh(ranks.device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))

        size = ranks.size() // replicate  # ranks of a replica
        replicas = {"replicate": replicate} if replicate > 1 else {}
        num_shares = ranks.size() // sequence_parallel
        return Meshes(
            fsdp=mesh(**replicas, fsdp=size) if replicas else ranks,
            sequence=mesh(data=num_shares, sequence=sequence_parallel) if sequence_parallel > 1 else None,
            experts=mesh(**replicas, efsdp=size // expert_parallel, ep=expert_parallel)
            if expert_parallel > 1
            else None,
        )


def check_sizes(num_ranks: int, replicate: int, sequence_parallel: int, expert_parallel: int) -> None:
    """Raises UserError if ranks cannot be divided in these numbers."""
    _check_divisor("replicate", replicate, "ranks (--nproc or torchrun)", num_ranks)
    of = "ranks of a replica" if replicate > 1 else "ranks (--nproc or torchrun)"
    _check_divisor("sequence_parallel", sequence_parallel, of, num_ranks // replicate)
    _check_divisor("expert_parallel", expert_parallel, of, num_ranks // replicate)
    if sequence_parallel % expert_parallel and expert_parallel % sequence_parallel:
        raise UserError(
            "parallel.expert_parallel: expected a divisor or a multiple of parallel.sequence_parallel, "
            f"{sequence_parallel}, got {expert_parallel}; otherwise ranks that run the same trees would "
            "exchange tokens with different ranks"
        )


def _check_divisor(key: str, number: int, of: str, total: int) -> None:
    if total % number:
        raise UserError(f"parallel.{key}: expected a divisor of the number of {of}, {total}, got {number}")
