"""The program that ``titan-tree doctor`` starts for each GPU: it sums a tensor over all of them."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from titan_tree.distributed.mesh import init_distributed

NUM_ELEMENTS = 2**26  # 256 MiB in fp32 on a GPU
NUM_ELEMENTS_CPU = 2**20
REPEATS = 5


def main() -> None:
    """Raises an error if the sum is wrong; rank 0 prints one line otherwise."""
    _, device = init_distributed()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    num_elements = NUM_ELEMENTS if device.type == "cuda" else NUM_ELEMENTS_CPU
    values = torch.full((num_elements,), rank + 1.0, device=device)
    dist.all_reduce(values)  # the first call also connects the ranks
    expected = ranks * (ranks + 1) / 2
    if not bool((values == expected).all()):
        raise RuntimeError(f"rank {rank}: the sum is wrong: expected {expected}, got {values.unique()[:3]}")
    values.zero_()
    started = time.perf_counter()
    for _ in range(REPEATS):
        dist.all_reduce(values)
    values.sum().item()  # waits for the device
    gigabytes = REPEATS * values.nbytes / 1e9 / (time.perf_counter() - started)
    if rank == 0:
        print(f"all-reduce: {ranks} ranks, {gigabytes:,.1f} GB/s per rank", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
