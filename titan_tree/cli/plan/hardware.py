"""GPUs, and the rates that training reaches on them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np

from titan_tree.errors import UserError

GIB = 2**30


@dataclass(frozen=True)
class Gpu:
    """A GPU of the Hopper generation: all of them multiply at the same rate, but their memory differs."""

    name: str
    memory: float  # bytes
    bandwidth: float  # bytes per second that kernels reach on the GPU's memory


# The bandwidths are 83 % of what the vendor states, 4.8 and 3.35 TB/s.
GPUS = {"h200": Gpu("H200", 139 * GIB, 4.0e12), "h100": Gpu("H100", 79 * GIB, 2.8e12)}

PEAK_FLOPS = 989e12  # per second, dense bf16: MFU refers to it
# The rates below were measured on H200s or fitted to measured steps (docs/memory.md compares the results).
GEMM_FLOPS = 640e12
EXPERT_FLOPS = 438e12  # a whole layer of experts: router, sorting, grouped products
# (keys that a query sees on average, FLOP/s forward, FLOP/s backward), of the trees in docs/performance.md:
# bushy, agent-fine, agent, group, agent-long and chain. Shorter paths have more partly visible blocks.
ATTENTION_FLOPS = (
    (440, 298e12, 241e12),
    (2_740, 536e12, 452e12),
    (5_560, 580e12, 518e12),
    (7_700, 624e12, 518e12),
    (13_570, 609e12, 495e12),
    (16_384, 635e12, 564e12),
)
ATTENTION_BACKWARD = 2.5  # operations of the backward pass behind these rates, relative to the forward pass
# Norms, RoPE, SwiGLU and residuals, per token and layer, forward and backward.
ELEMENTWISE_SECONDS = 50e-9
# The core of a Gated DeltaNet layer and its convolution, forward and backward: 5.1 ms for a chain of 32,768
# tokens and 4,096 value dims. Chunks that run one after another take as long with a part of the heads.
DELTA_NET_CHUNK_SECONDS = 2.2e-6
DELTA_NET_SECONDS = (5.1e-3 - 512 * DELTA_NET_CHUNK_SECONDS) / 32_768 / 4096  # per token and value dim
VOCABULARY_BYTES = 18  # read and written per logit, besides the matrix products
ADAM_BYTES = 32  # read and written per parameter, by the norm and the fused kernel
ADAM_8BIT_SECONDS = 52e-12  # per parameter of a shard; estimated from whole steps of torchao's AdamW8bit
HOST_SECONDS = 4e-3  # that the host needs to launch a pass, per layer: the least time of small batches
PARTITION_SECONDS = 15e-3 / 28  # per forward pass of a partition and layer (tree_partitioner/auto.py)
NODE_GPUS = 8  # GPUs that NVLink connects
# Bytes per second and GPU of collectives: within a node as measured; across nodes as usual, not measured.
ALL_TO_ALL, ALL_GATHER, REDUCE_SCATTER = 316e9, 305e9, 301e9
ALL_TO_ALL_SECONDS = 75e-6  # of each call besides; 97 GB/s at 16 MiB and 264 at 128 MiB were measured
NETWORK = 50e9


def find_gpu(text: str) -> Gpu:
    """Returns the GPU with a name of ``GPUS``, or an H200 with that many GiB.

    Raises:
        UserError: ``text`` is neither a known name nor a positive number.
    """
    if text.lower() in GPUS:
        return GPUS[text.lower()]
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 < size < math.inf:
        raise UserError(f"--gpu: expected {', '.join(GPUS)} or a number of GiB, got {text!r}")
    return replace(GPUS["h200"], name=f"GPU of {size:g} GiB", memory=size * GIB)


def bandwidth(rate: float, ranks: int) -> float:
    """Returns the bytes per second of a collective over ``ranks`` adjacent GPUs."""
    return rate if ranks <= NODE_GPUS else NETWORK


def attention_seconds(forward_flops: float, keys: float, forwards: float) -> float:
    """Returns the time of a forward and backward pass of attention on a tree.

    Args:
        forward_flops: operations of one forward pass.
        keys: mean number of keys that a query sees.
        forwards: forward passes, 2 if the backward pass recomputes the first one.
    """
    names, *columns = zip(*ATTENTION_FLOPS, strict=True)
    forward, backward = (float(np.interp(math.log(keys), np.log(names), column)) for column in columns)
    return forward_flops * (forwards / forward + ATTENTION_BACKWARD / backward)
